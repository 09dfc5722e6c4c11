"""Masks of grammars, packed to one bit a token, applied to logits on a GPU.

S rows of logits, X of which are constrained, N of these by a mask, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from aioengine.kernels.triton.launcher import Launcher

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 2048


@triton.jit(do_not_specialize=["logits_stride", "words_stride", "num_tokens"], do_not_specialize_on_alignment=["rules"])
def _mask_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    words: tl.tensor,
    words_stride: tl.tensor,
    rules: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = columns < num_tokens
    row = tl.load(rules + 2 * index).to(tl.int64)
    only = tl.load(rules + 2 * index + 1)
    mask = tl.where(only < 0, -1 - only, 0).to(tl.int64)
    word = tl.load(words + mask * words_stride + columns // 32, mask=is_token & (only < 0), other=0)
    is_banned = tl.where(only < 0, ((word >> (columns % 32)) & 1) == 0, columns != only)
    tl.store(logits + row * logits_stride + columns, float("-inf"), mask=is_token & is_banned)


_mask = Launcher(_mask_kernel)


def mask(logits: Tensor, rules: Tensor, words: Tensor) -> None:
    """Rule tokens out of logits [S, V]: set them to -inf.

    rules: [X, 2] int32, for each constrained row its index, and the only token that is allowed there, or -1 - n where
    the bits of words [N, at most ceil(V / 32)] int32 at n are the allowed ones. Tokens beyond the words keep their
    logits.
    """
    num_tokens = min(logits.shape[1], 32 * words.shape[1])
    key = logits.dtype, logits.data_ptr() % 16, words.data_ptr() % 16
    arguments = logits, logits.stride(0), words, words.stride(0), rules, num_tokens, _BLOCK
    _mask((len(rules), -(-num_tokens // _BLOCK), 1), key, arguments, {"num_warps": 4})
