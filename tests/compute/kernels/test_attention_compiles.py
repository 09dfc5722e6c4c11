"""The attention kernels compile for Hopper, with and without windows, soft caps and sinks."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_compiled

PROGRAM = """
import torch

from aioengine.kernels.triton import attention, decode, prompt_attention, scores
from aioengine.kernels.triton.scores import ScoreRules


ints = torch.zeros(48, dtype=torch.int32)
rows = attention.PagedRows(ints, ints, ints, ints)
step = decode.DecodeRows(ints, ints, torch.zeros(5, 16, dtype=torch.int32), ints)
of_drafts = decode.DecodeRows(ints, ints, torch.zeros(7, 16, dtype=torch.int32), ints, ints, 4)
weights = torch.zeros(2, 8)
for rules in (ScoreRules(), ScoreRules(300), ScoreRules(None, 50.0), ScoreRules(128, 30.0, torch.zeros(8))):
    for head_size, dtype in ((64, torch.bfloat16), (256, torch.float16), (80, torch.float32)):
        q, out = torch.zeros(2, 16, head_size, dtype=dtype)[:, :8], torch.zeros(2, 8, head_size, dtype=dtype)
        pool = torch.zeros(2, 3, 4, 16, head_size, dtype=dtype).unbind(0)
        attention.attend(q, pool, rows, ints[:4].view(2, 2), scale=0.1, out=out, rules=rules)
        attention.attend_splits(q, pool, rows, ints, max_splits=4, num_programs=2, scale=0.1, out=out, rules=rules)
        if head_size != 80:  # FlashInfer does not support it
            for other in (None, (out, weights)):
                decode.decode(q, pool, step, scale=0.1, out=out, other=other, rules=rules)
            decode.decode(q, pool, of_drafts, scale=0.1, out=out, rules=rules)
        if rules.sinks is not None:
            scores.add_sinks(out, weights, rules.sinks)
        scores.merge(out, weights, out, weights)
for num_heads, page_size in ((8, 16), (20, 128)):
    q, out = torch.zeros(2, num_heads + 8, 128, dtype=torch.bfloat16)[:, :num_heads], torch.zeros(2, num_heads, 128)
    pool = torch.zeros(2, 3, 4, page_size, 128, dtype=torch.bfloat16).unbind(0)
    prompt_attention.attend(q, pool, rows, ints[:2].view(1, 2), scale=0.1, out=out.to(torch.bfloat16))
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    run_compiled(PROGRAM)
