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
"""The axis along which a layer is divided among ranks."""


class Prepared(NamedTuple):
    """A layer after loading: its matmul, and the tensors that the matmul reads."""

    matmul: Matmul
    tensors: Tensors


class LinearFormat(Protocol):
    """The tensors of a linear layer, their preparation after loading, and the matmul.

    One object serves all layers. A layer may fuse several layers of the checkpoint, such as query, key and
    value: ``sizes`` are their output sizes, and O is the sum.
    """

    def empty(
        self, in_features: int, sizes: Sequence[int], *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Tensors:
        """Allocate the tensors to load into, uninitialized. ``dtype``: of the activations."""
        ...

    def split(self, name: str, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Split ``tensor`` [O, ...], called ``name``, into a view for each fused layer of the checkpoint."""
        ...

    def dim_of(self, name: str, axis: Axis) -> int | None:
        """Return the dimension of the tensor ``name`` that belongs to ``axis``. None: the tensor has none."""
        ...

    def prepare(self, tensors: Tensors, *, is_gated: bool, batch_invariant: bool) -> Prepared:
        """Make the matmul [T, D] -> [T, O] from loaded tensors. Tensors that it does not read are dropped.

        ``is_gated``: the first half of the outputs are gates; the result is silu(gates) * (second half), [T, O / 2].
        ``batch_invariant``: on a GPU, the result for a row must not depend on the number of rows.
        """
        ...

    def restore(self, tensors: Tensors) -> Tensors:
        """Convert ``Prepared.tensors`` back to the form of ``empty``, so that some or all can be loaded again.

        If ``prepare`` kept the loaded tensors unchanged, return the same tensors. Loading then overwrites them in
        place, so their addresses in CUDA graphs stay valid.
        """
        ...
