"""The adapter slots on the device, and the copy of adapters into slots while steps run."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.kernels.adapter_slots import UNIT, AdapterWeights
from aioengine.layers.adapters import HostAdapters, PooledAdapters
from aioengine.runner.lora.grouping import GroupRows, Slots, StepAdapters, TileRows, group_on_host
from aioengine.runner.lora.reading import Layout, PackedAdapter, read_adapter
from aioengine.runner.transfer import Ints, upload_to

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from aioengine.layers.linear import Linear
    from aioengine.protocol.messages import Adapter
    from aioengine.settings.config import LoraSettings

_STAGING_BYTES = 8 << 20
"""Size of each of the two pinned buffers for copies to the device."""


class AdapterPool:
    """The adapter slots of a model, numbered from 1 to ``num_slots``, allocated at the start.

    Attributes:
        num_bytes: memory of all slots on the device.
        tiles: groups rows on a GPU; None on a CPU.
    """

    def __init__(
        self,
        linears: Iterable[tuple[str, Linear]],
        settings: LoraSettings,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        self.num_slots = settings.num_slots
        self._settings = settings
        self._dtype = dtype
        self._layout = Layout(linears, max_rank=settings.max_rank, modules=settings.modules)
        self.tiles: TileRows | None = None
        self._device_slots: _DeviceSlots | None = None
        self._host_layers: list[HostAdapters] = []
        if device.type == "cpu":
            for layer in self._layout.layers:
                self._host_layers.append(HostAdapters(settings.num_slots, is_gated=layer.linear.is_gated))
                layer.linear.use_adapters(self._host_layers[-1])
        else:
            self._device_slots = _DeviceSlots(self._layout, settings.num_slots, dtype, device)
            self.tiles = TileRows(settings.num_slots, batch_invariant, upload_to(device))
        self._group: GroupRows = self.tiles or group_on_host
        self.num_bytes = 0 if self._device_slots is None else self._device_slots.pool.nbytes

    def read(self, adapter: Adapter) -> PackedAdapter:
        """Read the folder of an adapter. May be called in any thread.

        Raises:
            ValueError: see ``reading.read_adapter``.
        """
        is_for_gpu = self._device_slots is not None
        return read_adapter(adapter, self._layout, self._settings, self._dtype, for_gpu=is_for_gpu)

    def place(self, slot: int, adapter: PackedAdapter) -> Future[None]:
        """Copy an adapter into an unused slot. Called between steps, by the thread that launches them.

        Rows may use the slot once the future is done. Steps in flight that use the slot still read its old content.
        """
        if self._device_slots is not None:
            return self._device_slots.place(slot, adapter)
        for index, layer in enumerate(self._host_layers):
            layer.slots[slot] = adapter.matrices.get(index)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def rows(self, token_slots: Slots, output_slots: Slots | None) -> StepAdapters | None:
        """Group the rows of a step by the slots of tokens [T] and outputs [S]. None: all rows use the base model."""
        return StepAdapters(token_slots, output_slots, self._group) if token_slots.any() else None

    def close(self) -> None:
        """Wait for copies to the device in progress, and allow no further copies."""
        if self._device_slots is not None:
            self._device_slots.close()


def slots_bytes(linears: Iterable[tuple[str, Linear]], settings: LoraSettings, dtype: torch.dtype) -> int:
    """Return the memory of the slots on a GPU."""
    layout = Layout(linears, max_rank=settings.max_rank, modules=settings.modules)
    return settings.num_slots * layout.slot_size * dtype.itemsize


class _DeviceSlots:
    """The slots on a GPU: ``pool`` [slots, elements]. A thread copies adapters on a separate stream."""

    def __init__(self, layout: Layout, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pool = torch.zeros(num_slots, layout.slot_size, dtype=dtype, device=device)
        assert layout.slot_size % UNIT == 0
        table = self.pool.view(torch.int32)
        for layer in layout.layers:
            linear = layer.linear
            sizes = tuple(linear.sizes.values())
            weights = AdapterWeights(self.pool, table, layer.first_part, linear.in_features, sizes, layout.max_rank)
            linear.use_adapters(PooledAdapters(weights, is_gated=linear.is_gated))
        self._stream = torch.cuda.Stream(device)
        self._staging = [torch.empty(_STAGING_BYTES // dtype.itemsize, dtype=dtype, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._staging]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioengine-adapters")

    def place(self, slot: int, adapter: PackedAdapter) -> Future[None]:
        """See ``AdapterPool.place``."""
        is_free = torch.cuda.Event()
        is_free.record()  # after the steps launched so far
        return self._executor.submit(self._copy, self.pool[slot - 1], adapter.elements, is_free)

    @torch.inference_mode()
    def _copy(self, target: Tensor, elements: Tensor, is_free: torch.cuda.Event) -> None:
        """Copy elements [X] to the start of a slot, target [elements of a slot], and wait for the copy.

        numpy copies on the host, because it releases the GIL and uses one core.
        """
        size = len(self._staging[0])
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(is_free)
            for index, begin in enumerate(range(0, len(elements), size)):
                piece = elements[begin : begin + size]
                staged, copied = self._staging[index % 2][: len(piece)], self._copied[index % 2]
                copied.synchronize()
                staged.view(torch.uint8).numpy()[...] = piece.view(torch.uint8).numpy()
                target[begin : begin + len(piece)].copy_(staged, non_blocking=True)
                copied.record()
        for copied in self._copied:
            copied.synchronize()

    def close(self) -> None:
        self._executor.shutdown(wait=True)


class RowAdapters:
    """The adapter slot of each row of the request table. T tokens of a step, S outputs, R rows.

    Attributes:
        tiles: see ``AdapterPool.tiles``; None without adapters.
    """

    def __init__(self, max_rows: int, pool: AdapterPool | None = None) -> None:
        self.tiles = None if pool is None else pool.tiles
        self._pool = pool
        self._slots = np.zeros(max_rows, dtype=np.int32)
        self._num_used = 0

    def open(self, row_index: int, slot: int) -> None:
        """Set the adapter slot of a row, counted from 1; 0: the base model."""
        if slot:
            self._num_used += 1
            self._slots[row_index] = slot

    def close(self, row_index: int) -> None:
        if self._num_used and self._slots[row_index]:
            self._num_used -= 1
            self._slots[row_index] = 0

    def slots(self, row_indices: Ints) -> Slots | None:
        """Return the slots [R] of these rows [R]; None: all rows use the base model."""
        if not self._num_used:
            return None
        slots = self._slots[row_indices]
        return slots if slots.any() else None

    def of_step(self, row_indices: Ints, row_of_token: Ints, outputs: Ints | None) -> StepAdapters | None:
        """Group the rows of a step by adapter. None: all rows use the base model.

        row_indices: [R]. row_of_token: [T]. outputs: [S] indices of output tokens.
        """
        slots = self.slots(row_indices)
        if slots is None or self._pool is None:
            return None
        token_slots = slots[row_of_token]
        return self._pool.rows(token_slots, None if outputs is None else token_slots[outputs])
