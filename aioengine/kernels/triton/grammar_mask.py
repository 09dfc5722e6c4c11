"""Masks of grammars, packed to one bit a token, applied to logits on a GPU.

S rows of logits, X of which have a mask, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from aioengine.kernels.triton.launcher import Launcher

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 2048


@triton.jit(do_not_specialize=["logits_stride", "words_stride", "num_tokens"])
def _mask_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    words: tl.tensor,
    words_stride: tl.tensor,
    rows: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = columns < num_tokens
    word = tl.load(words + index * words_stride + columns // 32, mask=is_token, other=-1)
    is_banned = ((word >> (columns % 32)) & 1) == 0
    target = logits + tl.load(rows + index).to(tl.int64) * logits_stride + columns
    tl.store(target, float("-inf"), mask=is_token & is_banned)


_mask = Launcher(_mask_kernel)


def mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set logits [S, V] fp32 to -inf, in ``rows`` [X] int64, where words [X, at most ceil(V / 32)] int32 have no bit.

    Tokens beyond the words keep their logits.
    """
    num_tokens = min(logits.shape[1], 32 * words.shape[1])
    key = logits.data_ptr() % 16, words.data_ptr() % 16, rows.data_ptr() % 16
    arguments = logits, logits.stride(0), words, words.stride(0), rows, num_tokens, _BLOCK
    _mask((len(rows), -(-num_tokens // _BLOCK), 1), key, arguments, {"num_warps": 4})
