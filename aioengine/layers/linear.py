"""Linear layers whose parts may come from several checkpoint tensors. D input size, O output size, T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels import linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from aioengine.kernels.linear import Prepare, Product
    from aioengine.layers.placement import Placement


class Linear:
    """[T, D] -> [T, O], where O is made of ``parts``: name in the checkpoint -> output size, in order.

    ``prepare``: what makes of the weight what is computed with it; of a product alone if left out.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        placement: Placement,
        *,
        bias: bool = False,
        prepare: Prepare = linear.prepare,
    ) -> None:
        out_features = sum(parts.values())
        self._parts = dict(parts)
        self._prepare = prepare
        self._batch_invariant = placement.batch_invariant
        self._weight: Tensor | None = placement.empty(out_features, in_features)
        self._bias = placement.empty(out_features) if bias else None
        self._product: Product | None = None

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the part of the fused tensor that it fills."""
        assert self._weight is not None, "the weights were packed already"
        sizes = list(self._parts.values())
        tensors = {"weight": self._weight} if self._bias is None else {"weight": self._weight, "bias": self._bias}
        return {
            f"{prefix}{part}.{kind}": piece
            for kind, tensor in tensors.items()
            for part, piece in zip(self._parts, tensor.split(sizes), strict=True)
        }

    def finish_loading(self) -> None:
        """Bring the weight into the kernel's form and let go of the plain one."""
        assert self._weight is not None, "the weights were packed already"
        self._product = self._prepare(self._weight, self._bias, batch_invariant=self._batch_invariant)
        self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._product is not None, "finish_loading was not called"
        return self._product(x)
