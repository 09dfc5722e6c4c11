"""Matmuls of single heads with weights that never change: x [T, H, I], weight [H, I, O] -> [T, H, O].

As in ``kernels/linear.py``, on a CPU a row of the result is the same bits for every T; on a GPU with
``batch_invariant``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from aioengine.kernels import linear

if TYPE_CHECKING:
    from torch import Tensor


class HeadMatmul(Protocol):
    """[T, H, I] -> [T, H, O]; holds its weight."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x [T, H, I] to out [T, H, O], both of any strides with their last dimension contiguous."""
        ...


def reference(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x [T, H, I] and weight [H, I, O] to out [T, H, O]."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


def prepare(weight: Tensor, *, batch_invariant: bool = False) -> HeadMatmul:
    """For weight [H, I, O], of any strides; on a GPU its memory is read in each call."""
    if weight.device.type == "cpu":
        return _head_by_head(weight)
    if batch_invariant:
        from aioengine.kernels.triton import head_linear

        invariant_matmul = head_linear.matmul
        return lambda x, out: invariant_matmul(x, weight, out)
    return lambda x, out: reference(x, weight, out)


def _head_by_head(weight: Tensor) -> HeadMatmul:
    """For weight [H, I, O] on a CPU, which is copied."""
    matmuls = [linear.prepare(linear.pack(head.t().contiguous()), None) for head in weight]

    def matmul(x: Tensor, out: Tensor) -> None:
        """x [T, H, I] to out [T, H, O]."""
        for head, of_head in enumerate(matmuls):
            out[:, head] = of_head(x[:, head].contiguous())

    return matmul
