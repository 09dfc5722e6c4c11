"""Logprobs at each position: of its token, of the K most likely tokens, and of M requested tokens.

Ties among the most likely tokens go to the lower id.

N positions, V vocabulary, K most likely tokens, M requested tokens, W = 2 + 2 K + M, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.triton import launcher

SEGMENT = 128
"""Logits per segment. The search for the most likely tokens first compares the maxima of segments."""

_LOW_WORD = (1 << 32) - 1


def top_tokens(logits: Tensor, count: int) -> Tensor:
    """Return the ids [N, K] of the ``count`` largest logits [N, V], best first. Ties go to the lower id.

    If ``count`` is small, only the segments with the largest maxima are searched: they contain the result.
    """
    num_rows, width = logits.shape
    ids = torch.arange(width, device=logits.device)
    if 4 * count * SEGMENT > width:
        return _ranked(logits, ids.expand(num_rows, width), count)
    num_full = width // SEGMENT
    best = logits[:, : num_full * SEGMENT].unflatten(-1, (num_full, SEGMENT)).amax(-1)
    if num_full * SEGMENT < width:
        best = torch.cat([best, logits[:, num_full * SEGMENT :].amax(-1, keepdim=True)], dim=-1)
    segments = _ranked(best, ids[: best.shape[1]].expand(best.shape), count)
    candidates = (segments[:, :, None] * SEGMENT + ids[:SEGMENT]).flatten(1)
    values = logits.gather(-1, candidates.clamp(max=width - 1)).float()
    return _ranked(values.masked_fill(candidates >= width, -torch.inf), candidates, count)


def _ranked(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Return the ``count`` ids with the largest values, [N, C] each -> [N, count]. Sorts by one key of value and id."""
    bits = (values.float() + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that sort like the values
    keys = order.to(torch.int64) * (1 << 32) + (_LOW_WORD - ids)
    return _LOW_WORD - (keys.topk(count, dim=-1).values & _LOW_WORD)


def measure(logits: Tensor, token_ids: Tensor, num_top: int, requested: Tensor | None) -> Tensor:
    """Return the logprobs of each position in the layout of ``protocol.packed_logprobs``.

    Args:
        logits: [N, V].
        token_ids: [N] int64, the token of each position.
        num_top: K.
        requested: [N, M] int64, further token ids.

    Returns:
        [N, W] int32; logprobs are fp32 numbers viewed as int32.
    """
    if not launcher.supports(logits):
        ids = torch.cat([token_ids[:, None], top_tokens(logits, num_top)], dim=-1) if num_top else token_ids[:, None]
        wanted = ids if requested is None else torch.cat([ids, requested], dim=-1)
        values = torch.log_softmax(logits, -1, dtype=torch.float32).gather(-1, wanted)
        return torch.cat([values.view(torch.int32), ids.to(torch.int32)], dim=-1)
    from aioengine.kernels.triton import token_logprobs

    if num_top <= token_logprobs.MANY:
        return token_logprobs.measure(logits, token_ids, num_top, requested)
    ids = top_tokens(logits, num_top)
    wanted = ids if requested is None else torch.cat([ids, requested], dim=-1)
    logprobs = token_logprobs.measure(logits, token_ids, 0, wanted)
    return torch.cat([logprobs, ids.to(torch.int32)], dim=-1)


def compile_kernels(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile all kernels that ``measure`` may launch on a GPU for logits of this width and dtype."""
    from aioengine.kernels.triton import token_logprobs

    two_rows = torch.zeros(2, vocab_size, dtype=dtype, device=device)
    with launcher.compile_only():
        for logits in two_rows.split(1):  # the second row may be unaligned, which needs another specialization
            for num_top in (token_logprobs.FEW, token_logprobs.MANY):
                token_logprobs.measure(logits, logits.new_zeros(1, dtype=torch.int64), num_top, None)
