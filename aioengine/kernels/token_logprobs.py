"""Logprobs of the token of each position, of the likeliest tokens, and of tokens asked for.

Ties among the likeliest tokens go to the lower id, whatever stands beside a position.

Shape letters: N positions, V vocabulary, K likeliest tokens, M tokens asked for, W = 2 + 2 K + M, C candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor

SEGMENT = 128
"""Logits whose maximum stands for them in the search for the likeliest tokens."""

_LOW_WORD = (1 << 32) - 1


def likeliest(logits: Tensor, count: int) -> Tensor:
    """The ids [N, K] of the ``count`` largest logits of each row [N, V], best first; the lower id of equal ones.

    Over few of many logits the largest of each segment come first: they say which segments hold the result.
    """
    num_rows, width = logits.shape
    places = torch.arange(width, device=logits.device)
    if 4 * count * SEGMENT > width:
        return _ranked(logits, places.expand(num_rows, width), count)
    whole = width // SEGMENT
    best = logits[:, : whole * SEGMENT].unflatten(-1, (whole, SEGMENT)).amax(-1)
    if whole * SEGMENT < width:
        best = torch.cat([best, logits[:, whole * SEGMENT :].amax(-1, keepdim=True)], dim=-1)
    segments = _ranked(best, places[: best.shape[1]].expand(best.shape), count)
    candidates = (segments[:, :, None] * SEGMENT + places[:SEGMENT]).flatten(1)
    values = logits.gather(-1, candidates.clamp(max=width - 1)).float()
    return _ranked(values.masked_fill(candidates >= width, -torch.inf), candidates, count)


def _ranked(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Of ids [N, C] those of the ``count`` largest values [N, C], as [N, count]: by one key of value and id."""
    bits = (values.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it is equal to
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the values
    keys = order.to(torch.int64) * (1 << 32) + (_LOW_WORD - ids)
    return _LOW_WORD - (keys.topk(count, dim=-1).values & _LOW_WORD)


def reference(logits: Tensor, token_ids: Tensor, num_top: int, asked: Tensor | None) -> Tensor:
    """logits [N, V], token_ids [N], asked [N, M] -> [N, W]: see ``measure``."""
    ids = token_ids[:, None]
    if num_top:
        ids = torch.cat([ids, likeliest(logits, num_top)], dim=-1)
    wanted = ids if asked is None else torch.cat([ids, asked], dim=-1)
    values = torch.log_softmax(logits, -1, dtype=torch.float32).gather(-1, wanted)
    return torch.cat([values.view(torch.int32), ids.to(torch.int32)], dim=-1)


def measure(logits: Tensor, token_ids: Tensor, num_top: int, asked: Tensor | None) -> Tensor:
    """The numbers of each position, in the order of ``protocol.packed_logprobs``.

    Args:
        logits: [N, V].
        token_ids: [N] int64, the token of each position.
        num_top: how many of the likeliest tokens.
        asked: [N, M] int64, further tokens.

    Returns:
        [N, W] int32; the logprobs are the bits of fp32.
    """
    if not launcher.serves(logits):
        return reference(logits, token_ids, num_top, asked)
    from aioengine.kernels.triton import token_logprobs

    if num_top <= token_logprobs.MANY:
        return token_logprobs.measure(logits, token_ids, num_top, asked)
    ids = likeliest(logits, num_top)
    wanted = ids if asked is None else torch.cat([ids, asked], dim=-1)
    numbers = token_logprobs.measure(logits, token_ids, 0, wanted)
    return torch.cat([numbers, ids.to(torch.int32)], dim=-1)


def compile_kernels(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Have all that ``measure`` may launch on a GPU compiled, for logits of this width and type."""
    from aioengine.kernels.triton import token_logprobs

    whole = torch.zeros(2, vocab_size, dtype=dtype, device=device)
    with launcher.compile_only():
        for logits in whole.split(1):  # the second row may begin at no multiple of 16 bytes: another specialization
            for num_top in (token_logprobs.FEW, token_logprobs.MANY):
                token_logprobs.measure(logits, logits.new_zeros(1, dtype=torch.int64), num_top, None)
