"""One matmul per head with constant weights: x [T, H, I], weight [H, I, O] -> [T, H, O].

As in ``kernels/linear.py``, a row of the result does not depend on T: always on a CPU, on a GPU with
``batch_invariant``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aioengine.kernels import linear

HeadMatmul = Callable[[Tensor, Tensor], None]
"""A function that holds its weight. It multiplies x [T, H, I] into out [T, H, O]. The last dimension of both is
contiguous.
"""


def reference(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply x [T, H, I] by weight [H, I, O] into out [T, H, O]."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


def prepare(weight: Tensor, *, batch_invariant: bool = False) -> HeadMatmul:
    """Return the fastest callable for weight [H, I, O], any strides. On a GPU each call reads the weight's memory."""
    if weight.device.type == "cpu":
        return _head_by_head(weight)
    if batch_invariant:
        from aioengine.kernels.triton import invariant_linear

        return lambda x, out: invariant_linear.head_matmul(x, weight, out)
    return lambda x, out: reference(x, weight, out)


def _head_by_head(weight: Tensor) -> HeadMatmul:
    """Return a callable for a CPU that copies weight [H, I, O]."""
    matmuls = [linear.prepare(head.t().contiguous(), None) for head in weight]

    def matmul(x: Tensor, out: Tensor) -> None:
        """Multiply x [T, H, I] into out [T, H, O]."""
        for head, head_matmul in enumerate(matmuls):
            out[:, head] = head_matmul(x[:, head].contiguous())

    return matmul
