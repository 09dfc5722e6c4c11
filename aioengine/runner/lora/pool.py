"""The adapter slots of a model, and the copy of adapters into slots while steps run."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from aioengine.kernels.adapter_types import AdapterWeights
from aioengine.layers.adapters import HostAdapters, PooledAdapters
from aioengine.layers.linear import Linear
from aioengine.layers.ranks import RankGroup
from aioengine.protocol.messages import Adapter
from aioengine.runner.lora.grouping import GroupRows, TileRows, group_on_host
from aioengine.runner.lora.reading import Layout, PackedAdapter, read_adapter
from aioengine.runner.transfer import upload_to
from aioengine.settings.config import LoraSettings

_STAGING_BYTES = 8 << 20
"""Size of each of the two pinned buffers for copies to the device."""


class AdapterPool:
    """The adapter slots of a model, numbered from 1 to ``num_slots``. On a GPU, they are allocated at the start.

    Attributes:
        num_bytes: memory of all slots on a GPU; 0 on a CPU, where each adapter has its own memory.
        group: groups the rows of a step for the device.
    """

    def __init__(
        self,
        linears: Iterable[tuple[str, Linear]],
        settings: LoraSettings,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
        ranks: RankGroup | None = None,
    ) -> None:
        self.num_slots = settings.num_slots
        self._ranks = ranks
        self._settings = settings
        self._dtype = dtype
        self._layout = Layout(linears, max_rank=settings.max_rank, modules=settings.modules)
        self._slots: _HostSlots | _DeviceSlots
        self.group: GroupRows
        if device.type == "cpu":
            self._slots, self.group = _HostSlots(self._layout, settings.num_slots), group_on_host
        else:
            self._slots = _DeviceSlots(self._layout, settings.num_slots, dtype, device)
            self.group = TileRows(settings.num_slots, batch_invariant, upload_to(device))
        self.num_bytes = self._slots.num_bytes

    def read(self, adapter: Adapter) -> PackedAdapter:
        """Read the folder of an adapter. May be called in any thread.

        Raises:
            ValueError: see ``reading.read_adapter``.
        """
        for_gpu = isinstance(self._slots, _DeviceSlots)
        return read_adapter(adapter, self._layout, self._settings, self._dtype, for_gpu=for_gpu)

    def is_read_by_all(self, is_read: bool) -> bool:
        """See ``DeviceAdapters``."""
        return is_read if self._ranks is None else self._ranks.all_reduce_min(is_read) == 1

    def place(self, slot: int, adapter: PackedAdapter) -> Future[None]:
        """Copy an adapter into an unused slot. Called between steps, by the thread that launches them.

        Rows may use the slot once the future is done. Steps in flight that use the slot still read its old content.
        """
        return self._slots.place(slot, adapter)

    def close(self) -> None:
        """Wait for copies to the device in progress, and allow no further copies."""
        self._slots.close()


def slots_bytes(linears: Iterable[tuple[str, Linear]], settings: LoraSettings, dtype: torch.dtype) -> int:
    """Return the memory of the slots on a GPU."""
    layout = Layout(linears, max_rank=settings.max_rank, modules=settings.modules)
    return settings.num_slots * layout.slot_size * dtype.itemsize


class _HostSlots:
    """The slots on a CPU. Each layer keeps the matrices of each adapter."""

    num_bytes = 0

    def __init__(self, layout: Layout, num_slots: int) -> None:
        self._layers = [HostAdapters(num_slots, is_gated=layer.linear.spec.is_gated) for layer in layout.layers]
        for layer, adapters in zip(layout.layers, self._layers, strict=True):
            layer.linear.use_adapters(adapters)

    def place(self, slot: int, adapter: PackedAdapter) -> Future[None]:
        """See ``AdapterPool.place``."""
        for index, layer in enumerate(self._layers):
            layer.slots[slot] = adapter.matrices.get(index)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Do nothing, because no copy is in progress."""


class _DeviceSlots:
    """The slots on a GPU: a tensor [slots, elements]. A thread copies adapters on a separate stream."""

    def __init__(self, layout: Layout, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._pool = torch.zeros(num_slots, layout.slot_size, dtype=dtype, device=device)
        self.num_bytes = self._pool.nbytes
        table = self._pool.view(torch.int32)
        for layer in layout.layers:
            spec = layer.linear.spec
            weights = AdapterWeights(self._pool, table, layer.first_part, spec.in_features, spec.sizes, layout.max_rank)
            layer.linear.use_adapters(PooledAdapters(weights, is_gated=spec.is_gated))
        self._stream = torch.cuda.Stream(device)
        self._staging = [torch.empty(_STAGING_BYTES // dtype.itemsize, dtype=dtype, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._staging]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioengine-adapters")

    def place(self, slot: int, adapter: PackedAdapter) -> Future[None]:
        """See ``AdapterPool.place``."""
        is_free = torch.cuda.Event()
        is_free.record()  # after the steps launched so far
        return self._executor.submit(self._copy, self._pool[slot - 1], adapter.elements, is_free)

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
