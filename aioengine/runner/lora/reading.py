"""Adapters on the host: read from their folders, checked, and brought into the form of the device.

This runs in a thread beside the steps of a runner, so it leaves the work to operations that release Python's lock.
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
class HostAdapter:
    """An adapter that can be placed in a slot.

    Attributes:
        num_bytes: the memory that it takes on the host.
        numbers: [X], what a slot of a GPU begins with; empty for a CPU.
        matrices: for a CPU, by the index of the layer in the layout.
    """

    num_bytes: int
    numbers: Tensor
    matrices: dict[int, LayerMatrices]


@torch.inference_mode()
def read_adapter(
    adapter: Adapter, layout: Layout, settings: LoraSettings, dtype: torch.dtype, *, for_gpu: bool
) -> HostAdapter:
    """Read the folder of an adapter and check all of it.

    Raises:
        ValueError: the folder is not one of an adapter for this model, or has numbers that are not finite; it names
            the file and the tensor.
    """
    folder = read_folder(Path(adapter.path))
    parts = folder.parts(layout.shapes, max_rank=settings.max_rank, allowed=settings.modules or None)
    places, size = layout.places({part.layer: part.rank for part in parts})
    numbers = torch.zeros(size, dtype=dtype)
    table = layout.table(places)
    numbers[: table.nbytes // dtype.itemsize].view(torch.int32).copy_(torch.from_numpy(table).ravel())
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    path = parts[0].a.path
    file = folder_files.open_file(path)
    if file is None:
        raise ValueError(f"{path} is not there any more")
    with file:
        for part in parts:
            (num_outputs, num_inputs), place = layout.shapes[part.layer], places[part.layer]
            a = numbers[place.first_a :][: place.rank * num_inputs].view(place.rank, num_inputs)
            b = numbers[place.first_b :][: num_outputs * place.rank].view(num_outputs, place.rank)
            _fill(a[: part.rank], read_tensor(file, part.a), part.a)
            rows = read_tensor(file, part.b)[part.first_row : part.first_row + num_outputs]
            if (order := layout.order(part.layer)) is not None:
                rows = rows.index_select(0, order)
            _fill(b[:, : part.rank], rows.to(torch.float32) * part.scale, part.b)
            matrices[part.layer] = a, b
    if for_gpu:
        return HostAdapter(numbers.nbytes, numbers, {})
    prepared = {index: _prepared(layer, matrices) for index, layer in enumerate(layout.layers)}
    by_layer = {index: each for index, each in prepared.items() if each is not None}
    return HostAdapter(numbers.nbytes, torch.empty(0), by_layer)


def _prepared(layer: AdaptedLayer, matrices: dict[str, tuple[Tensor, Tensor]]) -> LayerMatrices | None:
    """A [rank, D] and B [O, rank] of parts -> those of a layer, for a CPU; None: the adapter does not change it."""
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
    """Copy values [X, Y] to target [X, Y], which may be of another dtype."""
    target.copy_(values)
    if not target.isfinite().all():
        kind = str(target.dtype).removeprefix("torch.")
        raise ValueError(f"{entry.path}: {entry.name} has numbers that are not finite in {kind} (NaN, or too large)")
