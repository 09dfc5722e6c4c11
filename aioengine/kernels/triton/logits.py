"""Penalties and grammar masks on a GPU. A program changes ``BLOCK`` logits of one row.

S rows of logits, X penalized or constrained rows, N rows of the count table or masks, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.launcher import alignments, kernel

IN_PROMPT = 1 << 30
"""This bit of a count is set if the token is in the prompt. The lower bits count the token in the output."""

PROMPT_BIT = tl.constexpr(IN_PROMPT)
BLOCK = tl.constexpr(2048)


class PenalizedRows(NamedTuple):
    """Columns [X] on the device: row in the logits, row in the count table (int32), and penalties (fp32)."""

    rows: Tensor
    count_rows: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor


@triton.jit(do_not_specialize=["logits_stride", "counts_stride"])
def _penalties_kernel(
    logits: tl.tensor, logits_stride: tl.tensor, counts: tl.tensor, counts_stride: tl.tensor, rows: tl.tensor,
    count_rows: tl.tensor, frequencies: tl.tensor, presences: tl.tensor, repetitions: tl.tensor, num_tokens: tl.tensor,
) -> None:  # fmt: skip
    """Compute ``penalize`` for a block of one row."""
    index = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count_row = tl.load(count_rows + index).to(tl.int64)
    count = tl.load(counts + count_row * counts_stride + columns, mask=columns < num_tokens, other=0)
    target = logits + tl.load(rows + index).to(tl.int64) * logits_stride + columns
    x = tl.load(target, mask=count != 0, other=0.0)
    num_output = (count % PROMPT_BIT).to(tl.float32)
    presence = tl.where(num_output > 0, tl.load(presences + index), 0.0)
    x -= tl.load(frequencies + index) * num_output + presence
    repetition = tl.load(repetitions + index)
    tl.store(target, tl.where(x < 0, x * repetition, x / repetition), mask=count != 0)


def penalize(logits: Tensor, counts: Tensor, rows: PenalizedRows) -> None:
    """Apply frequency and presence penalties for output tokens, then the repetition penalty for all tokens.

    Changes logits [S, V] fp32 in place. counts: [N, at least V] int32.
    """
    num_tokens = logits.shape[1]
    _penalties_kernel[(len(rows.rows), triton.cdiv(num_tokens, BLOCK.value))](
        logits, logits.stride(0), counts, counts.stride(0), *rows, num_tokens
    )


@kernel(do_not_specialize=["logits_stride", "words_stride", "num_tokens"], do_not_specialize_on_alignment=["rules"])
def _mask_kernel(
    logits: tl.tensor, logits_stride: tl.tensor, words: tl.tensor, words_stride: tl.tensor, rules: tl.tensor,
    num_tokens: tl.tensor,
) -> None:  # fmt: skip
    """Compute ``mask`` for a block of one row."""
    index = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = columns < num_tokens
    row = tl.load(rules + 2 * index).to(tl.int64)
    only = tl.load(rules + 2 * index + 1)
    mask = tl.where(only < 0, -1 - only, 0).to(tl.int64)
    word = tl.load(words + mask * words_stride + columns // 32, mask=is_token & (only < 0), other=0)
    is_banned = tl.where(only < 0, ((word >> (columns % 32)) & 1) == 0, columns != only)
    tl.store(logits + row * logits_stride + columns, float("-inf"), mask=is_token & is_banned)


def mask(logits: Tensor, rules: Tensor, masks: Tensor) -> None:
    """Set the logits [S, V] of forbidden tokens to -inf.

    masks: [N, at most ceil(V / 32)] int32, one bit per allowed token. Tokens beyond the masks keep their logits.
    rules: [X, 2] int32, (row, the only allowed token, or -1 - index of its mask) of each constrained row.
    """
    num_tokens = min(logits.shape[1], 32 * masks.shape[1])
    key = logits.dtype, *alignments(logits, masks)
    arguments = logits, logits.stride(0), masks, masks.stride(0), rules, num_tokens
    _mask_kernel((len(rules), -(-num_tokens // BLOCK.value), 1), key, arguments, {"num_warps": 4})
