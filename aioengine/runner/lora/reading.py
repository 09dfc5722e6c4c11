"""Read adapters from their folders, check them, and convert them to the layout of the device.

This runs in a thread while steps run, so it uses operations that release the GIL.
D input size, O output size of a part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels.adapter_types import RANK_UNIT, TABLE_COLUMNS, UNIT
from aioengine.kernels.arrays import Ints32
from aioengine.layers.adapters import LayerMatrices
from aioengine.layers.linear import FusedPart, Linear
from aioengine.model_files import folder_files
from aioengine.model_files.adapter_folder import read_folder
from aioengine.model_files.checkpoint import Entry
from aioengine.protocol.messages import Adapter
from aioengine.runner.weight_reading import read_tensor
from aioengine.settings.config import LoraSettings, padded_rank


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter in host memory that can be copied into a slot.

    Attributes:
        num_bytes: its host memory.
        elements: [X], the content of a GPU slot; empty for a CPU.
        matrices: for a CPU, index of the layer in the layout -> matrices.
    """

    num_bytes: int
    elements: Tensor
    matrices: dict[int, LayerMatrices]


@torch.inference_mode()
def read_adapter(
    adapter: Adapter, layout: Layout, settings: LoraSettings, dtype: torch.dtype, *, for_gpu: bool
) -> PackedAdapter:
    """Read the folder of an adapter and check it.

    Raises:
        ValueError: the folder does not contain an adapter for this model, or has numbers that are not finite. The
            message names the file and the tensor.
    """
    folder = read_folder(Path(adapter.path), adapter.config)
    whole_shapes = {name: part.whole_shape for name, part in layout.parts.items()}
    parts = folder.parts(whole_shapes, max_rank=settings.max_rank, allowed=settings.modules or None)
    offsets, size = layout.offsets({part.layer: part.rank for part in parts})
    elements = torch.zeros(size, dtype=dtype)
    table = layout.table(offsets)
    elements[: table.nbytes // dtype.itemsize].view(torch.int32).copy_(torch.from_numpy(table).ravel())
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    path = parts[0].a.path
    with folder_files.open_existing(path, f"{path} was removed") as file:
        for part in parts:
            fused, own = layout.parts[part.layer], offsets[part.layer]
            num_outputs, num_inputs = fused.shape
            a = elements[own.first_a :][: own.rank * num_inputs].view(own.rank, num_inputs)
            b = elements[own.first_b :][: num_outputs * own.rank].view(num_outputs, own.rank)
            _fill(a[: part.rank], read_tensor(file, part.a).narrow(1, fused.first_input, num_inputs), part.a)
            rows = read_tensor(file, part.b)[part.first_row : part.first_row + fused.whole_shape[0]]
            if fused.stored_outputs is not None:
                rows = rows.index_select(0, fused.stored_outputs)
            _fill(b[:, : part.rank], rows.to(torch.float32) * part.scale, part.b)
            matrices[part.layer] = a, b
    if for_gpu:
        return PackedAdapter(elements.nbytes, elements, {})
    by_layer: dict[int, LayerMatrices] = {}
    for index, layer in enumerate(layout.layers):
        if (layer_matrices := _layer_matrices(layer, matrices)) is not None:
            by_layer[index] = layer_matrices
    return PackedAdapter(elements.nbytes, torch.empty(0), by_layer)


def _layer_matrices(layer: AdaptedLayer, matrices: dict[str, tuple[Tensor, Tensor]]) -> LayerMatrices | None:
    """Join A [rank, D] and B [O, rank] of the parts of a layer, for a CPU. None: the layer is not adapted."""
    a: list[Tensor] = []
    parts: list[tuple[int, Tensor]] = []
    first_output = 0
    for name, num_outputs in zip(layer.names, layer.linear.sizes.values(), strict=True):
        if name in matrices:
            a.append(matrices[name][0])
            parts.append((first_output, matrices[name][1].contiguous()))
        first_output += num_outputs
    return LayerMatrices(torch.cat(a), parts) if parts else None


def _fill(target: Tensor, values: Tensor, entry: Entry) -> None:
    """Copy values [X, Y] to target [X, Y], which may have another dtype, and check that they are finite."""
    target.copy_(values)
    if not target.isfinite().all():
        kind = str(target.dtype).removeprefix("torch.")
        raise ValueError(f"{entry.path}: {entry.name} has numbers that are not finite in {kind} (NaN, or too large)")


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer with adapters. first_part: index of its first part in the table."""

    linear: Linear
    names: tuple[str, ...]
    first_part: int


@dataclass(frozen=True, slots=True)
class PartOffsets:
    """The matrices of a part: A [rank, D] starts at element ``first_a`` of the slot, B [O, rank] at ``first_b``.

    The rank is a multiple of ``RANK_UNIT``.
    """

    rank: int
    first_a: int
    first_b: int


class Layout:
    """The layout of all slots, for the layers of a model.

    A slot starts with a table of all parts of all layers (``kernels.adapter_types``). The matrices of the parts that
    the adapter changes follow, at the offsets in the table. So an adapter uses only the memory for its ranks.

    Attributes:
        layers: the layers that adapters may change.
        parts: the parts of all linear layers, by name in the checkpoint.
        max_rank: the maximum rank, a multiple of ``RANK_UNIT``.
    """

    def __init__(self, linears: Iterable[tuple[str, Linear]], *, max_rank: int, modules: tuple[str, ...]) -> None:
        """modules: the parts that adapters may change, by the last component of their names; empty: all."""
        self.max_rank = padded_rank(max_rank)
        self.layers: list[AdaptedLayer] = []
        self.parts: dict[str, FusedPart] = {}
        for prefix, linear in linears:
            parts = {f"{prefix}{name}": part for name, part in linear.fused_parts().items()}
            self.parts |= parts
            if not modules or any(part in modules for part in linear.sizes):
                first = self.layers[-1].first_part + len(self.layers[-1].names) if self.layers else 0
                self.layers.append(AdaptedLayer(linear, tuple(parts), first))
        self._names = [name for layer in self.layers for name in layer.names]
        self._modules = modules

    def offsets(self, ranks: dict[str, int]) -> tuple[dict[str, PartOffsets], int]:
        """Return the offsets of the parts of an adapter with these ranks, and its size in elements."""
        offsets: dict[str, PartOffsets] = {}
        # The table is int32. As many elements are reserved for it as if elements had 16 bits.
        end = _padded_size(len(self._names) * TABLE_COLUMNS * 2)
        for name in self._names:
            if name not in ranks:
                continue
            (num_outputs, size), rank = self.parts[name].shape, padded_rank(ranks[name])
            first_b = end + _padded_size(rank * size)
            offsets[name] = PartOffsets(rank, end, first_b)
            end = first_b + _padded_size(num_outputs * rank)
        return offsets, end

    def table(self, offsets: dict[str, PartOffsets]) -> Ints32:
        """Return the table [parts, TABLE_COLUMNS] at the start of a slot."""
        table = np.zeros((len(self._names), TABLE_COLUMNS), dtype=np.int32)
        for index, name in enumerate(self._names):
            if (part := offsets.get(name)) is not None:
                table[index, :3] = part.rank // RANK_UNIT, part.first_a // UNIT, part.first_b // UNIT
        return table

    @property
    def slot_size(self) -> int:
        """Elements of a slot: the size of an adapter of the maximum rank that changes all allowed parts."""
        names = [name for name in self._names if not self._modules or name.rpartition(".")[2] in self._modules]
        return self.offsets(dict.fromkeys(names, self.max_rank))[1]


def _padded_size(size: int) -> int:
    return -(-size // UNIT) * UNIT
