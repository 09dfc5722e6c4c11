"""The interface of a weight format for linear layers. T tokens, D input size, O output size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from aioengine.kernels.linear import Matmul

Tensors = dict[str, "Tensor"]
"""The tensors of a linear layer, by the last part of their names in the checkpoint, such as "weight" and "bias"."""


Axis = Literal["inputs", "outputs"]
"""Along which a layer is divided among ranks."""


class Prepared(NamedTuple):
    """A layer after loading: its matmul, and the tensors that the matmul reads."""

    matmul: Matmul
    tensors: Tensors


class LinearFormat(Protocol):
    """Which tensors a linear layer has, how they are prepared after loading, and how they are computed.

    One object serves all layers. A layer may be fused of several parts, as those of query, key and value are: ``sizes``
    are their output sizes, of which O is the sum.
    """

    def empty(
        self, in_features: int, sizes: Sequence[int], *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Tensors:
        """The tensors to be loaded, without values. ``dtype``: of the activations."""
        ...

    def split(self, name: str, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """One view of ``tensor`` [O, ...], which has this name, for each part: what the checkpoint has of it."""
        ...

    def dim_of(self, name: str, axis: Axis) -> int | None:
        """The dimension of the tensor of this name that runs over the layer's inputs or outputs; None: none does."""
        ...

    def prepare(self, tensors: Tensors, *, is_gated: bool, batch_invariant: bool) -> Prepared:
        """The matmul [T, D] -> [T, O] of loaded tensors; of those that it does not read nothing is kept.

        ``is_gated``: the first half of the outputs are gates; the matmul gives silu(gates) * others, [T, O / 2].
        ``batch_invariant``: on a GPU, a row of the result must not depend on the number of rows.
        """
        ...

    def restore(self, tensors: Tensors) -> Tensors:
        """The tensors as they were loaded, from ``Prepared.tensors``, to be loaded again in part or in whole.

        Where the matmul reads the very tensors that were loaded, these: then they are overwritten in place, and
        addresses in CUDA graphs stay valid.
        """
        ...
