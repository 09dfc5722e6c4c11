"""Causal depthwise convolution over the last W tokens of a row, optionally followed by SiLU.

T packed tokens, C channels, W filter width, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.activation import silu
from aioengine.kernels.state_types import StateRows
from aioengine.kernels.triton import launcher


def causal_conv(
    x: Tensor, weight: Tensor, state: Tensor, rows: StateRows, *, bias: Tensor | None = None, activates: bool = True
) -> Tensor:
    """Convolve the channels and store the last W - 1 inputs of each row.

    The products are added one by one in fp32, so that the result of a token does not depend on the chunk that contains
    it.

    Args:
        x: [T, C], any row stride.
        weight: [C, W]; the last column multiplies the newest token.
        state: [N, W - 1, C] in the dtype of x, the last inputs of each row, newest last; changed in place.
        bias: [C].
        activates: apply SiLU.

    Returns:
        [T, C] in the dtype of x.
    """
    if launcher.supports(x):
        from aioengine.kernels.triton import causal_conv as kernels

        return kernels.causal_conv(x, weight, state, rows, bias=bias, activates=activates)
    width = weight.shape[1]
    filters = weight.float().unbind(1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for slot, start, first, end in rows.on_host():
        past = state[slot] if start else torch.zeros_like(state[slot])
        seen = torch.cat((past, x[first:end]))
        wide = seen.float()
        total = wide[: end - first] * filters[0]
        for tap in range(1, width):
            total.addcmul_(wide[tap : tap + end - first], filters[tap])
        if bias is not None:
            total.add_(bias)
        out[first:end] = silu(total) if activates else total
        state[slot] = seen[len(seen) - width + 1 :]
    return out
