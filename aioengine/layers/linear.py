"""Linear layers, which may fuse several layers of the checkpoint. D input size, O output size, T tokens."""

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
        order: [O] int64, where the checkpoint has each output of the layer, within its part; None: in the same order.
        is_transposed: the weights of parts are [D, size].
    """

    order: Tensor | None = None
    is_transposed: bool = False


AS_COMPUTED = Stored()


class Linear(Layer):
    """[T, D] -> [T, O].

    Args:
        parts: the layers of the checkpoint that are fused, in order: name -> output size. O is the sum of the sizes.
        is_gated: the first half of the outputs are gates; the result is silu(gates) * (second half), [T, O / 2].
        divided: tensor parallelism: the axis along which each part is divided among the ranks of the placement; None:
            every rank has the whole layer. With "outputs", each rank computes its share of the outputs; with "inputs",
            each rank computes a partial result for all outputs, to be summed over the ranks.
        stored: how the checkpoint stores the layer.

    Attributes:
        in_features: D. sizes: the output size of each part. is_gated, stored: as above.
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
        """Checkpoint name -> the view of the fused tensor to load it into. Only while the layer is open for loading."""
        assert self._is_open, "the layer is not open for loading"
        sizes = list(self.sizes.values())
        return {
            f"{part}.{name}": Target(self._as_stored(piece), self._source(name, piece))
            for name, tensor in self._tensors.items()
            for part, piece in zip(self.sizes, self._format.split(name, tensor, sizes), strict=True)
        }

    def _as_stored(self, piece: Tensor) -> Tensor:
        """The view of ``piece`` [...] in the shape that the checkpoint has."""
        return piece.t() if self.stored.is_transposed and piece.dim() == 2 else piece

    def _source(self, name: str, piece: Tensor) -> Slice | None:
        """The slice of the checkpoint tensor that this rank loads into ``piece`` [...]; None: the whole tensor."""
        dim = None if self._divided is None else self._format.dim_of(name, self._divided)
        if dim is None or self._shard.size == 1:
            return None
        num_entries = piece.shape[dim]
        return Slice(dim, self._shard.rank * num_entries, self._shard.size * num_entries)

    def finish_loading(self) -> None:
        """Prepare the matmul. Tensors that it does not read are freed."""
        assert self._is_open, "the layer is not open for loading"
        self._is_open = False
        if self.stored.order is not None:
            self._reorder(self.stored.order)
        if self._divided == "inputs" and self._shard.rank and "bias" in self._tensors:
            self._tensors["bias"].zero_()  # the sum over the ranks must contain it once
        if self._matmul is None:
            self._matmul, self._tensors = self._format.prepare(
                self._tensors, is_gated=self.is_gated, batch_invariant=self._batch_invariant
            )
            self._prepare_ungated()

    def _reorder(self, order: Tensor) -> None:
        """Put the outputs of all tensors into this order [O], in place."""
        for name, tensor in self._tensors.items():
            if (dim := self._format.dim_of(name, "outputs")) is not None:
                tensor.copy_(tensor.index_select(dim, order))

    def use_adapters(self, adapters: LayerAdapters) -> None:
        """Set what is added for rows with an adapter. The weights are loaded."""
        self._adapters = adapters
        self._prepare_ungated()

    def _prepare_ungated(self) -> None:
        """Prepare the matmul to whose result adapters add: without the gates of a gated layer."""
        if self._adapters is None:
            return
        self._ungated = self._matmul
        if self.is_gated:
            prepared = self._format.prepare(self._tensors, is_gated=False, batch_invariant=self._batch_invariant)
            self._ungated = prepared.matmul

    def open_for_loading(self) -> None:
        """Allow ``weights`` again; its tensors have the current values.

        If the matmul reads these tensors directly, it is kept; else ``finish_loading`` prepares a new one.
        """
        assert not self._is_open, "the layer is open for loading already"
        self._is_open = True
        prepared, self._tensors = self._tensors, self._format.restore(self._tensors)
        if self.stored.order is not None:
            self._reorder(self.stored.order.argsort())
        if any(self._tensors.get(name) is not tensor for name, tensor in prepared.items()):
            self._matmul = None

    def __call__(self, x: Tensor, rows: Grouping | None = None) -> Tensor:
        """[T, D] -> [T, O]; [T, O / 2] if the layer is gated. ``rows``: grouped by adapter; None: no row has one."""
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
