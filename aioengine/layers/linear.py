"""Linear layers, which may fuse several layers of the checkpoint.

Shape letters: T tokens, D input size, O output size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aioengine.layers.layer import Layer
from aioengine.layers.placement import Slice, Target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from aioengine.kernels.linear import Matmul
    from aioengine.layers.adapters import Grouping, LayerAdapters
    from aioengine.layers.placement import Placement
    from aioengine.quantization._base import Axis


class Stored(NamedTuple):
    """How a checkpoint stores a layer.

    Attributes:
        order: [O] int64, the checkpoint index of each output within its part; None if the orders are equal.
        is_transposed: the checkpoint stores weights as [D, outputs].
    """

    order: Tensor | None = None
    is_transposed: bool = False


AS_COMPUTED = Stored()


class Linear(Layer):
    """[T, D] -> [T, O].

    Args:
        parts: the fused layers of the checkpoint, in order: name -> output size. O is the sum of the sizes.
        is_gated: the first half of the outputs are gates. The result is silu(first half) * second half: [T, O / 2].
        divided: tensor parallelism: the axis along which each part is sharded; None if each rank has the whole layer.
            With "outputs", each rank computes its shard of the outputs. With "inputs", each rank computes a partial
            result of all outputs, and the caller sums over the ranks.
        stored: how the checkpoint stores the layer.

    Attributes:
        in_features: D.
        sizes: the output size of each part.
        is_gated, stored: see above.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        placement: Placement,
        *,
        bias: bool = False,
        is_gated: bool = False,
        divided: Axis | None = None,
        stored: Stored = AS_COMPUTED,
    ) -> None:
        self._shard = placement.shard
        self._divided: Axis | None = divided
        num_ranks = placement.shard.size
        sizes = {part: size // num_ranks if divided == "outputs" else size for part, size in parts.items()}
        in_features = in_features // num_ranks if divided == "inputs" else in_features
        self.in_features = in_features
        self.sizes = sizes
        self._format = placement.linear_format
        self.is_gated = is_gated
        self.stored = stored
        self._batch_invariant = placement.batch_invariant
        self._tensors = self._format.empty(
            in_features, list(sizes.values()), has_bias=bias, dtype=placement.dtype, device=placement.device
        )
        self._is_open = True
        self._matmul: Matmul | None = None
        self._adapters: LayerAdapters | None = None
        self._ungated: Matmul | None = None

    def tensors(self) -> dict[str, Target]:
        """Map names to views of the fused tensors. Valid only while the layer is open for loading."""
        assert self._is_open, "the layer is not open for loading"
        sizes = list(self.sizes.values())
        return {
            f"{part}.{name}": Target(self._as_stored(piece), self._source(name, piece))
            for name, tensor in self._tensors.items()
            for part, piece in zip(self.sizes, self._format.split(name, tensor, sizes), strict=True)
        }

    def _as_stored(self, piece: Tensor) -> Tensor:
        """Return the view of ``piece`` [...] with the shape in the checkpoint."""
        return piece.t() if self.stored.is_transposed and piece.dim() == 2 else piece

    def _source(self, name: str, piece: Tensor) -> Slice | None:
        """Return the slice of the checkpoint tensor that this rank loads into ``piece`` [...]; None for all of it."""
        dim = None if self._divided is None else self._format.dim_of(name, self._divided)
        if dim is None or self._shard.size == 1:
            return None
        num_entries = piece.shape[dim]
        return Slice(dim, self._shard.rank * num_entries, self._shard.size * num_entries)

    def finish_loading(self) -> None:
        """Prepare the matmul, and free the tensors that it does not read."""
        assert self._is_open, "the layer is not open for loading"
        self._is_open = False
        if self.stored.order is not None:
            self._reorder(self.stored.order)
        if self._divided == "inputs" and self._shard.rank and "bias" in self._tensors:
            self._tensors["bias"].zero_()  # only rank 0 adds the bias to the sum over the ranks
        if self._matmul is None:
            self._matmul, self._tensors = self._format.prepare(
                self._tensors, is_gated=self.is_gated, batch_invariant=self._batch_invariant
            )
            self._prepare_ungated()

    def _reorder(self, order: Tensor) -> None:
        """Reorder the outputs of all tensors in place. ``order``: [O]."""
        for name, tensor in self._tensors.items():
            if (dim := self._format.dim_of(name, "outputs")) is not None:
                tensor.copy_(tensor.index_select(dim, order))

    def use_adapters(self, adapters: LayerAdapters) -> None:
        """Set the adapters. Call it after the weights are loaded."""
        self._adapters = adapters
        self._prepare_ungated()

    def _prepare_ungated(self) -> None:
        """Prepare the matmul for rows with adapters. It does not apply the gates of a gated layer."""
        if self._adapters is None:
            return
        self._ungated = self._matmul
        if self.is_gated:
            prepared = self._format.prepare(self._tensors, is_gated=False, batch_invariant=self._batch_invariant)
            self._ungated = prepared.matmul

    def open_for_loading(self) -> None:
        """Make ``weights`` valid again. Its tensors have the current values.

        A matmul that reads these tensors directly is kept. Otherwise ``finish_loading`` prepares a new one.
        """
        assert not self._is_open, "the layer is open for loading already"
        self._is_open = True
        prepared, self._tensors = self._tensors, self._format.restore(self._tensors)
        if self.stored.order is not None:
            self._reorder(self.stored.order.argsort())
        if any(self._tensors.get(name) is not tensor for name, tensor in prepared.items()):
            self._matmul = None

    def __call__(self, x: Tensor, rows: Grouping | None = None) -> Tensor:
        """[T, D] -> [T, O], or [T, O / 2] if the layer is gated. ``rows``: by adapter; None without adapters."""
        if rows is not None and self._adapters is not None:
            assert self._ungated is not None, "finish_loading was not called"
            return self._adapters.add(self._ungated, x, rows)
        assert self._matmul is not None, "finish_loading was not called"
        return self._matmul(x)


def adaptable_linears(layer: Layer, prefix: str = "") -> list[tuple[str, Linear]]:
    """Return the linear layers that adapters may change, in order, each with the prefix of its tensor names."""
    if isinstance(layer, Linear):
        return [(prefix, layer)]
    parts = [(f"{prefix}{name}", part) for name, part in layer.parts if part is not None and part.is_adaptable]
    return [entry for name, part in parts for entry in adaptable_linears(part, name)]
