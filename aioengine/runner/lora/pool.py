"""The adapter slots on the device, the copy of adapters into slots while steps run, and the rows of a step by adapter.

Except in ``RowAdapters``, a row is a row of the input of a linear layer: a token or an output of the step.

T tokens of a step, S outputs, N tiles of R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioengine.kernels.adapter_types import AdapterTiles, AdapterWeights, max_tiles, rows_of_tile
from aioengine.kernels.arrays import Ints32, Ints64
from aioengine.layers.adapters import Grouping, HostAdapters, PooledAdapters, RowGroups
from aioengine.layers.linear import Linear
from aioengine.layers.ranks import RankGroup
from aioengine.protocol.messages import Adapter
from aioengine.runner.lora.reading import Layout, PackedAdapter, read_adapter
from aioengine.runner.transfer import Upload, upload_to
from aioengine.settings.config import LoraSettings

Slots = npt.NDArray[np.int32]
"""The adapter slot of each row of a step; 0: the base model."""

GroupRows = Callable[[Slots], Grouping]
"""Groups the rows of a step for the device."""


def group_on_host(slots: Slots) -> RowGroups:
    """Return the rows of each adapter, for slots [T]."""
    used = np.unique(slots)
    return RowGroups(tuple((slot, torch.from_numpy(np.flatnonzero(slots == slot))) for slot in used.tolist() if slot))


def tile(slots: Slots, *, num_slots: int, size: int) -> tuple[Ints32, Slots]:
    """Return the rows of each tile [N, size], padded with -1, and the slot of each tile [N], for slots [T].

    N depends only on T and ``num_slots``. Unused tiles have slot -1.
    """
    num_rows = len(slots)
    num_tiles = max_tiles(num_rows, num_slots, size)
    rows = np.argsort(slots, kind="stable")
    counts = np.bincount(slots, minlength=num_slots + 1)
    tile_counts = -(-counts // size)
    first_tiles = tile_counts.cumsum() - tile_counts
    first_rows = counts.cumsum() - counts
    ordered = slots[rows]
    order = np.full(num_tiles * size, -1, dtype=np.int32)
    order[(first_tiles * size - first_rows)[ordered] + np.arange(num_rows)] = rows
    tile_slots = np.full(num_tiles, -1, dtype=np.int32)
    tile_slots[: tile_counts.sum()] = np.repeat(np.arange(num_slots + 1), tile_counts)
    return order.reshape(num_tiles, size), tile_slots


@dataclass(frozen=True, slots=True)
class TileRows:
    """Implements ``GroupRows`` for a GPU."""

    num_slots: int
    batch_invariant: bool
    upload: Upload

    def __call__(self, slots: Slots) -> Grouping:
        """Return the tiles for slots [T]."""
        order, tile_slots = tile(slots, num_slots=self.num_slots, size=self.size(len(slots)))
        return AdapterTiles(self.upload(order), self.upload(tile_slots))

    def size(self, num_rows: int) -> int:
        return rows_of_tile(num_rows, batch_invariant=self.batch_invariant)


class StepAdapters:
    """``AdapterRows`` of a step. They are grouped at the first access, because CUDA graphs group them differently.

    Attributes:
        token_slots: [T]. output_slots: [S]; None: all tokens are outputs.
    """

    def __init__(self, token_slots: Slots, output_slots: Slots | None, group: GroupRows) -> None:
        self.token_slots = token_slots
        self.output_slots = output_slots
        self._group = group
        self._tokens: Grouping | None = None
        self._outputs: Grouping | None = None

    @property
    def tokens(self) -> Grouping:
        if self._tokens is None:
            self._tokens = self._group(self.token_slots)
        return self._tokens

    @property
    def outputs(self) -> Grouping:
        if self._outputs is None:
            assert self.output_slots is not None, "the step has no output indices"
            self._outputs = self._group(self.output_slots)
        return self._outputs


class FixedTiles:
    """The tiles of up to T rows, in memory read by CUDA graphs."""

    def __init__(self, max_rows: int, group: TileRows, device: torch.device) -> None:
        self._group = group
        sizes = {group.size(num_rows) for num_rows in (1, max_rows)}
        capacity = max(max_tiles(max_rows, group.num_slots, size) * (size + 1) for size in sizes)
        self._memory = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self._content: tuple[int, bytes] = (0, b"")

    def for_graph(self, num_rows: int) -> AdapterTiles:
        """Return the tiles that a graph of ``num_rows`` rows reads."""
        size = self._group.size(num_rows)
        num_tiles = max_tiles(num_rows, self._group.num_slots, size)
        order = self._memory[: num_tiles * size].view(num_tiles, size)
        return AdapterTiles(order, self._memory[num_tiles * size : num_tiles * (size + 1)])

    def fill(self, slots: Slots, num_rows: int) -> None:
        """Write the tiles of rows with these slots, for the graph of ``num_rows`` rows. Padding rows use the base
        model.
        """
        content = num_rows, slots.tobytes()
        if content == self._content:
            return
        padded = np.zeros(num_rows, dtype=np.int32)
        padded[: len(slots)] = slots
        order, tile_slots = tile(padded, num_slots=self._group.num_slots, size=self._group.size(num_rows))
        packed = np.concatenate([order.ravel(), tile_slots])
        self._memory[: len(packed)].copy_(self._group.upload(packed))
        self._content = content


@dataclass(frozen=True, slots=True)
class FixedAdapters:
    """``AdapterRows`` of a captured step."""

    tokens: AdapterTiles
    outputs: AdapterTiles


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
        ranks: RankGroup | None = None,
    ) -> None:
        self.num_slots = settings.num_slots
        self._ranks = ranks
        self._settings = settings
        self._dtype = dtype
        self._layout = Layout(linears, max_rank=settings.max_rank, modules=settings.modules)
        self.tiles: TileRows | None = None
        self._device_slots: _DeviceSlots | None = None
        self._host_layers: list[HostAdapters] = []
        if device.type == "cpu":
            for layer in self._layout.layers:
                self._host_layers.append(HostAdapters(settings.num_slots, is_gated=layer.linear.spec.is_gated))
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

    def is_read_by_all(self, is_read: bool) -> bool:
        """See ``DeviceAdapters``."""
        return is_read if self._ranks is None else self._ranks.all_reduce_min(is_read) == 1

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

    def rows(self, token_slots: Slots, output_slots: Slots | None) -> StepAdapters:
        """Group the rows of a step by the slots of tokens [T] and outputs [S]."""
        return StepAdapters(token_slots, output_slots, self._group)

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
        table = self.pool.view(torch.int32)
        for layer in layout.layers:
            spec = layer.linear.spec
            weights = AdapterWeights(self.pool, table, layer.first_part, spec.in_features, spec.sizes, layout.max_rank)
            layer.linear.use_adapters(PooledAdapters(weights, is_gated=spec.is_gated))
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

    def slots(self, row_indices: Ints64) -> Slots | None:
        """Return the slots [R] of these rows [R]; None: all rows use the base model."""
        if not self._num_used:
            return None
        slots = self._slots[row_indices]
        return slots if slots.any() else None

    def of_step(self, row_indices: Ints64, row_of_token: Ints64, outputs: Ints64 | None) -> StepAdapters | None:
        """Group the rows of a step by adapter. None: all rows use the base model.

        row_indices: [R]. row_of_token: [T]. outputs: [S] indices of output tokens.
        """
        slots = self.slots(row_indices)
        if slots is None or self._pool is None:
            return None
        token_slots = slots[row_of_token]
        return self._pool.rows(token_slots, None if outputs is None else token_slots[outputs])
