"""Linear layers, which may fuse several layers of the checkpoint.

A ``Linear`` knows which layers it fuses, and which part of them this rank has. Its ``LinearFormat`` knows how weights
are stored and multiplied. The steps in the life of a layer, and which object makes which:

    __init__          sizes on this rank                          -> LinearSpec
    weights           Placement.format_of(name)                   -> LinearFormat
                      LinearFormat.empty(spec)                    -> tensors, uninitialized
                      LinearFormat.split(spec, name, tensor)      -> one Target per tensor and fused layer
                      (the runner reads the checkpoint into the targets)
    finish_loading    LinearFormat.prepare(spec, tensors)         -> PreparedLinear; the tensors are dropped
    __call__          PreparedLinear.matmul(x)                    -> the outputs; adapters add theirs

    open_for_loading  PreparedLinear.restore()                    -> the tensors, with their current values
                      (the runner reads new weights into some of them)
    finish_loading    PreparedLinear.update(tensors), or LinearFormat.prepare again

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aioengine.families._block_config import LinearShape
from aioengine.kernels.row_counts import Matmul
from aioengine.layers.adapters import Grouping, LayerAdapters
from aioengine.layers.layer import Layer, Placement, Slice, Target, Units, errors_of, rank_ranges
from aioengine.model_files.quantization import Axis, Ranges
from aioengine.quantization._base import LinearFormat, LinearSpec, PreparedLinear, Tensors


class FusedPart(NamedTuple):
    """One of the fused layers of the checkpoint.

    Attributes:
        shape, whole_shape: its outputs and inputs on this rank, and on all ranks.
        first_input: the index in the checkpoint of the first input that this rank has.
        stored_outputs: the index in the checkpoint of each output that this rank has, [outputs] int64 on the CPU; None:
            all, in order.
    """

    shape: tuple[int, int]
    whole_shape: tuple[int, int]
    first_input: int
    stored_outputs: Tensor | None


class Linear(Layer):
    """[T, I] -> [T, O].

    Args:
        parts: the fused layers of the checkpoint, in order: name -> output size. O is the sum of the sizes.
        is_gated: the first half of the outputs are gates. The result is silu(first half) * second half: [T, O / 2].
        divided: tensor parallelism: the axis along which each part is sharded; None if each rank has the whole layer.
            With "outputs", each rank computes its shard of the outputs. With "inputs", each rank computes a part of the
            sum of all outputs; the caller adds the parts.
        units: the groups of units on the divided axis, such as query heads, key heads and value heads, in the order of
            the matmul. Each rank has its share of each group. By default, each part is a group of single entries.
        order: [O] int64, the checkpoint index of each output, with the parts joined; None if the orders are equal. On
            the CPU if the layer is divided among ranks.
        is_transposed: the checkpoint stores weights that are not quantized as [I, outputs].

    Attributes:
        spec: the layer on this rank.
        sizes: the output size of each part.
        joined: layers that compute the parts, if these have different formats.
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
        units: Sequence[Units] | None = None,
        order: Tensor | None = None,
        is_transposed: bool = False,
    ) -> None:
        """Allocate nothing yet, see ``weights``. ``order``: [O]."""
        self._divided: Axis | None = divided if placement.shard.size > 1 else None
        self._stored_outputs = order  # the checkpoint index of each output on this rank, with the parts joined
        sizes, first_input = dict(parts), 0
        self._whole_shapes = {part: (size, in_features) for part, size in parts.items()}
        self._units = units or [Units(size) for size in parts.values()]
        if self._divided == "outputs":
            stored, self._ranges = _output_shard(parts, rank_ranges(self._units, placement.shard), order)
            sizes = {part: sum(stop - start for start, stop in ranges) for part, ranges in self._ranges.items()}
            self._stored_outputs = stored
            if order is not None:  # the tensors are loaded in the order of the checkpoint
                order = stored.argsort().argsort()
        elif self._divided == "inputs":
            [inputs] = rank_ranges(units or [Units(in_features)], placement.shard)
            self._ranges = dict.fromkeys(parts, (inputs,))
            first_input, in_features = inputs[0], inputs[1] - inputs[0]
        self._order = None if order is None else order.to(placement.device)
        self.sizes = sizes
        self._stores_transposed = is_transposed
        self._placement = placement
        self.spec = LinearSpec(
            in_features,
            tuple(sizes.values()),
            bias,
            placement.dtype,
            placement.device,
            is_gated=is_gated,
            batch_invariant=placement.batch_invariant,
            order=self._order,
            first_input=first_input,
        )
        self._format: LinearFormat  # ``weights`` chooses it, and allocates the tensors
        self._names: list[str] = []
        self._tensors: Tensors = {}  # while the layer is open for loading
        self._is_open = True
        self._prepared: PreparedLinear | None = None
        self._matmul: Matmul | None = None
        self.joined: list[Linear] = []
        self._adapters: LayerAdapters | None = None

    @classmethod
    def of(cls, linears: Sequence[LinearShape], placement: Placement, **options: Any) -> Linear:
        """Return a layer that fuses ``linears``, which have the same input. ``options``: of the constructor."""
        sizes = {linear.name: linear.outputs for linear in linears}
        return cls(linears[0].inputs, sizes, placement, bias=linears[0].has_bias, **options)

    def weights(self, prefix: str = "") -> dict[str, Target]:
        """Map names to views of the fused tensors. The first call allocates them, in the format for the layer's name.

        Raises:
            ValueError: the parts have different formats, and the checkpoint should not have such parts.
        """
        if self._is_open and not self._tensors and not self.joined:
            names = self._names = [f"{prefix}{part}" for part in self.sizes]
            formats = [self._placement.format_of(name) for name in names]
            if all(other is formats[0] for other in formats):
                self._format = formats[0]
                self._tensors = self._format.empty(self.spec)
            elif self._placement.mixes_formats and self._order is None:
                self._join(formats)
            else:
                parts = f"{', '.join(names)} are one layer here, but their checkpoint has several formats"
                raise ValueError(f"{parts}; allowed: one format for all of them")
        return super().weights(prefix)

    def _join(self, formats: Sequence[LinearFormat]) -> None:
        """Compute this layer as several layers, each with consecutive parts of the same format."""
        parts = zip(formats, self._whole_shapes.items(), self._units, strict=True)
        for _, group in groupby(parts, key=lambda part: id(part[0])):
            _, shapes, units = zip(*group, strict=True)
            layer = Linear(
                self.spec.in_features,
                {part: outputs for part, (outputs, _) in shapes},
                self._placement,
                bias=self.spec.has_bias,
                divided=self._divided,
                units=units,
                is_transposed=self._stores_transposed,
            )
            self.joined.append(layer)
        self.parts = [("", layer) for layer in self.joined]

    def own_weights(self) -> dict[str, Target]:
        if self.joined or not self._is_open:
            return {}
        return {
            f"{part}.{name}": self._as_stored(name, target)._replace(source=self._source(part, name, target.tensor))
            for name, targets in unplaced_targets(self._format, self.spec, self._tensors)
            for part, target in zip(self.sizes, targets, strict=True)
        }

    def _as_stored(self, name: str, target: Target) -> Target:
        """Transpose the target of a weight if the checkpoint stores it as [I, outputs]."""
        tensor, writer = target.tensor, target.writer
        if not self._is_transposed(name, tensor):
            return target
        return Target(tensor.t(), writer=None if writer is None else writer.transposed())

    def _is_transposed(self, name: str, tensor: Tensor) -> bool:
        """Return whether the checkpoint stores a tensor [...] as [I, outputs]. Quantized weights have other dtypes."""
        return self._stores_transposed and name == "weight" and tensor.dtype == self.spec.dtype

    def _source(self, part: str, name: str, tensor: Tensor) -> Slice | None:
        """Return the part of a checkpoint tensor that this rank loads into ``tensor`` [...]; None for all of it.

        Raises ValueError if the stored codes cannot be divided.
        """
        if self._divided is None:
            return None
        axis, ranges, shape = self._divided, self._ranges[part], self._whole_shapes[part]
        if self._is_transposed(name, tensor):
            return Slice(int(axis == "outputs"), ranges, shape[axis == "inputs"])
        with errors_of(self.name):
            own = self._format.part(name, axis, ranges, shape)
        return None if own is None else Slice(*own)

    def finish_loading(self) -> None:
        """Prepare the matmul, and free the tensors that it does not read."""
        if not self._is_open:
            return
        self._is_open = False
        if self._order is not None:
            self._reorder(self._order)
        if self._divided == "inputs" and self._placement.shard.rank and "bias" in self._tensors:
            self._tensors["bias"].zero_()  # only rank 0 adds the bias to the sum over the ranks
        super().finish_loading()
        if self._prepared is None:
            self._prepared = self._prepare()
            self._matmul = self._prepared.gated or self._prepared.matmul
        elif self._prepared.update is not None:
            self._prepared.update(self._tensors)
        self._tensors = {}

    def _prepare(self) -> PreparedLinear:
        if self.joined:  # these layers have the tensors
            return self.spec.prepared(
                lambda x: torch.cat([part(x) for part in self.joined], 1), dict, update=lambda tensors: None
            )
        with errors_of(self.name):
            return self._format.prepare(self.spec, self._tensors)

    def _reorder(self, order: Tensor) -> None:
        """Reorder the outputs of all tensors in place, unless the format reorders them. ``order``: [O]."""
        if not self._format.reorders:
            for tensor in self._tensors.values():
                tensor.copy_(tensor[order])

    def fused_parts(self) -> dict[str, FusedPart]:
        """Return the parts by name."""
        outputs: list[Tensor | None] = [None] * len(self.sizes)
        if self._stored_outputs is not None:
            starts = accumulate((size for size, _ in self._whole_shapes.values()), initial=0)
            stored = self._stored_outputs.cpu().split([*self.sizes.values()])
            outputs = [own - start for own, start in zip(stored, starts, strict=False)]
        return {
            name: FusedPart((size, self.spec.in_features), self._whole_shapes[name], self.spec.first_input, own)
            for (name, size), own in zip(self.sizes.items(), outputs, strict=True)
        }

    def use_adapters(self, adapters: LayerAdapters) -> None:
        self._adapters = adapters

    @property
    def name(self) -> str:
        """The names of the parts in the checkpoint."""
        return ", ".join(self._names)

    def open_for_loading(self, prefix: str = "", modules: Collection[str] | None = None) -> None:
        """See ``Layer``. A matmul that cannot be updated is prepared again at the end."""
        if modules is not None and not any(f"{prefix}{part}" in modules for part in self.sizes):
            return
        assert not self._is_open, "the layer is open for loading already"
        assert self._prepared is not None
        self._is_open = True
        super().open_for_loading(prefix, modules)
        self._tensors = self._prepared.restore()
        if self._order is not None:
            self._reorder(self._order.argsort())
        if self._prepared.update is None:
            self._prepared = self._matmul = None

    def free_weights(self) -> None:
        super().free_weights()
        self._prepared = self._matmul = None
        self._is_open = True

    def __call__(self, x: Tensor, grouping: Grouping | None = None) -> Tensor:
        """[T, I] -> [T, O], or [T, O / 2] if the layer is gated.

        grouping: the rows of x by adapter; None: no row has an adapter.
        """
        if grouping is not None and self._adapters is not None:
            assert self._prepared is not None, "finish_loading was not called"
            return self._adapters.add(self._prepared.matmul, x, grouping)
        assert self._matmul is not None, "finish_loading was not called"
        return self._matmul(x)


def unplaced_targets(
    linear_format: LinearFormat, layer: LinearSpec, tensors: Tensors
) -> Iterator[tuple[str, list[Target]]]:
    """Yield the names of checkpoint tensors, with a target for each fused layer."""
    writers = linear_format.writers(layer, tensors)
    for name, parts in writers.items():
        yield name, [Target(writer.placeholder, writer=writer) for writer in parts]
    for name, tensor in tensors.items():
        if name not in writers and (pieces := linear_format.split(layer, name, tensor)):
            is_preset, check = linear_format.is_preset(name), linear_format.check_of(layer, name)
            yield name, [Target(piece, is_preset=is_preset, check=check) for piece in pieces]


def _output_shard(
    parts: Mapping[str, int], shares: Sequence[tuple[int, int]], order: Tensor | None
) -> tuple[Tensor, dict[str, Ranges]]:
    """Return the checkpoint index of each output of a rank [outputs], and the ranges that it loads of each part.

    parts, order: as in ``Linear``. shares: the ranges of outputs that the rank has, in the order of the matmul.
    """
    own = torch.cat([torch.arange(*share) for share in shares])
    stored = own if order is None else order[own]
    loaded = stored.sort().values
    bounds = pairwise(accumulate(parts.values(), initial=0))
    ranges = {
        part: _runs((loaded[(loaded >= start) & (loaded < stop)] - start).tolist())
        for part, (start, stop) in zip(parts, bounds, strict=True)
    }
    return stored, ranges


def _runs(indices: Sequence[int]) -> Ranges:
    """Return ascending indices as ranges (start, stop)."""
    starts = [i for i, index in enumerate(indices) if not i or index != indices[i - 1] + 1]
    return tuple((indices[start], indices[stop - 1] + 1) for start, stop in pairwise([*starts, len(indices)]))


def adaptable_linears(layer: Layer, prefix: str = "") -> list[tuple[str, Linear]]:
    """Return the linear layers that adapters may change, in order, each with the prefix of its tensor names."""
    if isinstance(layer, Linear):
        return [(prefix, layer)]
    parts = [(f"{prefix}{name}", part) for name, part in layer.parts if part is not None and part.is_adaptable]
    return [entry for name, part in parts for entry in adaptable_linears(part, name)]
