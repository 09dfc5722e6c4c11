"""Sampling by several ranks in Triton's interpreter: each rank samples the token of all logits."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_compiled, run_interpreted

SETUP = """
import torch

from aioengine.kernels.triton import rank_messages, sampling
from aioengine.kernels.triton.sampling import NUM_FIELDS, Draws, RankSampling, SamplingKernels

SIZE, VOCAB_SIZE, NUM_EMBEDDINGS, PART_SIZE, MAX_ROWS = 2, 4300, 4302, 2151, 4
CPU = torch.device("cpu")
torch.cuda.synchronize = lambda device: None
ranks = [RankSampling(rank, SIZE, max_rows=MAX_ROWS, num_embeddings=NUM_EMBEDDINGS, device=CPU) for rank in range(SIZE)]
for own in ranks:  # all in the memory of this process
    own.memory.addresses = torch.tensor([other.memory._own.data_ptr() for other in ranks])
options = {"max_rows": MAX_ROWS, "vocab_size": VOCAB_SIZE, "num_embeddings": NUM_EMBEDDINGS, "device": CPU}
whole = SamplingKernels(**options, num_parts=SIZE)
parts = [SamplingKernels(**options, num_parts=SIZE, ranks=own) for own in ranks]


def draws(seed, temperature, is_greedy):
    fields = torch.tensor([[seed], [0], [seed], [0], [is_greedy]], dtype=torch.int32)
    fields[3] = torch.tensor([1 / temperature]).view(torch.int32)
    return Draws(fields)
"""

SAMPLED = """
pick, owners = sampling._pick_kernel, []
for number, case in enumerate(["greedy", "ties", "nan", "skipped", "sampled", "sampled"]):
    logits = torch.randn(1, NUM_EMBEDDINGS, generator=torch.Generator().manual_seed(number)).bfloat16() * 2
    if case == "ties":
        logits[0, [2149, 2160, 4299]] = 50.0
    if case == "nan":
        logits[0, 3000] = torch.nan
    index = torch.tensor([-1 if case == "skipped" else 2], dtype=torch.int32)
    settings = draws(number, 0.5 + number, case in ("greedy", "ties"))
    expected, actual = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    tokens, expected_tokens = torch.full((4,), 7), torch.full((4,), 7)
    whole.sample(logits, settings, expected, (index, expected_tokens))
    of_ranks = [part.contiguous() for part in logits.split(PART_SIZE, 1)]
    owner = max(int(expected), 0) // PART_SIZE
    owners.append(owner)
    sampling._pick_kernel = lambda *_: None  # a program would wait for the blocks of the other rank
    parts[1 - owner].sample(of_ranks[1 - owner], settings, actual, (index, tokens))
    sampling._pick_kernel = pick
    for rank in (owner, 1 - owner):
        actual.zero_()
        tokens.fill_(7)
        parts[rank].sample(of_ranks[rank], settings, actual, (index, tokens))
        assert torch.equal(actual, expected), (case, rank, actual, expected)
        assert torch.equal(tokens, expected_tokens)
    assert (int(expected) == -1) == (case in ("nan", "skipped"))
    assert case != "ties" or int(expected) == 2149
    assert all(int(own.counts[0]) == number + 1 for own in ranks)
assert set(owners) == {0, 1}
"""

COMPILED = """
token = torch.zeros(1, dtype=torch.int64)
for kernels in (whole, parts[1]):
    kernels.sample(torch.zeros(1, PART_SIZE).bfloat16(), draws(0, 1.0, False), token, (token.int(), token))
"""


def test_all_ranks_sample_the_token_of_all_logits() -> None:
    run_interpreted(SETUP + SAMPLED)


@pytest.mark.slow
def test_sampling_compiles_for_hopper() -> None:
    run_compiled(SETUP + COMPILED)
