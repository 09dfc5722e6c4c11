"""Apply grammar masks, packed to one bit per token, to logits on a GPU.

S rows of logits, X constrained rows, N masks, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from aioengine.kernels.triton.launcher import KernelLauncher, alignments

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = tl.constexpr(2048)


@triton.jit(do_not_specialize=["logits_stride", "words_stride", "num_tokens"], do_not_specialize_on_alignment=["rules"])
def _mask_kernel(
    logits: tl.tensor, logits_stride: tl.tensor, words: tl.tensor, words_stride: tl.tensor, rules: tl.tensor,
    num_tokens: tl.tensor,
) -> None:  # fmt: skip
    index = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = columns < num_tokens
    row = tl.load(rules + 2 * index).to(tl.int64)
    only = tl.load(rules + 2 * index + 1)
    mask = tl.where(only < 0, -1 - only, 0).to(tl.int64)
    word = tl.load(words + mask * words_stride + columns // 32, mask=is_token & (only < 0), other=0)
    is_banned = tl.where(only < 0, ((word >> (columns % 32)) & 1) == 0, columns != only)
    tl.store(logits + row * logits_stride + columns, float("-inf"), mask=is_token & is_banned)


_mask = KernelLauncher(_mask_kernel)


def mask(logits: Tensor, rules: Tensor, masks: Tensor) -> None:
    """Set the logits [S, V] of forbidden tokens to -inf.

    masks: [N, at most ceil(V / 32)] int32, one bit per allowed token. Tokens beyond the masks keep their logits.
    rules: [X, 2] int32, (row, the only allowed token, or -1 - index of its mask) of each constrained row.
    """
    num_tokens = min(logits.shape[1], 32 * masks.shape[1])
    key = logits.dtype, *alignments(logits, masks)
    arguments = logits, logits.stride(0), masks, masks.stride(0), rules, num_tokens
    _mask((len(rules), -(-num_tokens // BLOCK.value), 1), key, arguments, {"num_warps": 4})
