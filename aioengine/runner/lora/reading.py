"""Read adapters from their folders, check them, and convert them to the layout of the device.

This runs in a thread while steps run, so it uses operations that release the GIL.
D input size, O output size of a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aioengine.layers.adapters import LayerMatrices
from aioengine.model_files import folder_files
from aioengine.model_files.adapter_folder import read_folder
from aioengine.runner.tensor_files import read_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.model_files.checkpoint import Entry
    from aioengine.protocol.messages import Adapter
    from aioengine.runner.lora.layout import AdaptedLayer, Layout
    from aioengine.settings.config import LoraSettings


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
    folder = read_folder(Path(adapter.path))
    parts = folder.parts(layout.shapes, max_rank=settings.max_rank, allowed=settings.modules or None)
    offsets, size = layout.offsets({part.layer: part.rank for part in parts})
    elements = torch.zeros(size, dtype=dtype)
    table = layout.table(offsets)
    elements[: table.nbytes // dtype.itemsize].view(torch.int32).copy_(torch.from_numpy(table).ravel())
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    path = parts[0].a.path
    with folder_files.open_existing(path, f"{path} was removed") as file:
        for part in parts:
            (num_outputs, num_inputs), own = layout.shapes[part.layer], offsets[part.layer]
            a = elements[own.first_a :][: own.rank * num_inputs].view(own.rank, num_inputs)
            b = elements[own.first_b :][: num_outputs * own.rank].view(num_outputs, own.rank)
            _fill(a[: part.rank], read_tensor(file, part.a), part.a)
            rows = read_tensor(file, part.b)[part.first_row : part.first_row + num_outputs]
            if (order := layout.order(part.layer)) is not None:
                rows = rows.index_select(0, order)
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
