"""Reads LoRA adapters in threads while steps run, keeps some in memory, and lets them be copied into slots.

``AdapterSlots`` knows which adapters are needed. Adapters that are not in memory are read, a few at a time, in the
order in which they get slots. To free memory for them, the least recently used adapters are removed. If an adapter
cannot be read or copied, only its requests fail; the next request for it tries again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final, cast

from aioengine.errors import describe
from aioengine.memory.adapter_slots import Key
from aioengine.model_files import adapter_folder
from aioengine.protocol.messages import UNLOAD_ADAPTER, Adapter, Control, FinishCode, Reply
from aioengine.scheduler.request_states import Requests, key_of
from aioengine.scheduler.runner import AdapterCopy, DeviceAdapters

logger = logging.getLogger(__name__)

MAX_READS: Final = 2
"""Maximum number of adapters that are read at a time."""

STAGE: Final = "adapter"
"""The stage in the errors of requests whose adapter failed."""


class AdapterCopies:
    """The adapters in memory, least recently used first. At least one is kept, even if it exceeds the limits."""

    def __init__(self, max_number: int | None, max_bytes: int) -> None:
        self._max_number = max_number
        self._max_bytes = max_bytes
        self._copies: OrderedDict[Key, AdapterCopy] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    def get(self, key: Key) -> AdapterCopy:
        """Return an adapter that is in memory. It becomes the most recently used one."""
        self._copies.move_to_end(key)
        return self._copies[key]

    def add(self, key: Key, copy: AdapterCopy) -> None:
        self.remove(key)
        self._copies[key] = copy
        self.num_bytes += copy.num_bytes

    def remove(self, key: Key) -> None:
        """Remove an adapter. Ignores unknown adapters."""
        if (copy := self._copies.pop(key, None)) is not None:
            self.num_bytes -= copy.num_bytes

    def make_space(self, num_new: int, needed: Collection[Key]) -> bool:
        """Remove adapters that are not ``needed`` until ``num_new`` more fit. Return whether they fit."""
        for key in list(self._copies):
            if self._fits(num_new):
                return True
            if key not in needed:
                self.remove(key)
        return self._fits(num_new)

    def _fits(self, num_new: int) -> bool:
        number = len(self._copies) + num_new
        if self._max_number is not None and number > max(1, self._max_number):
            return False
        return number <= 1 or self.num_bytes + bool(num_new) <= self._max_bytes


class AdapterLoader:
    """Reads adapters and has them copied into slots. Its methods are called in the thread of the scheduler."""

    def __init__(self, device: DeviceAdapters, requests: Requests, copies: AdapterCopies) -> None:
        self._device = device
        self._requests = requests
        self._slots = requests.adapters
        self._copies = copies
        self._threads = ThreadPoolExecutor(MAX_READS, thread_name_prefix="adapter")
        self._reads: dict[Key, Future[AdapterCopy]] = {}
        self._placing: dict[Key, Future[None]] = {}
        self._pinned: dict[int, Adapter] = {}
        self._loads: dict[int, tuple[Adapter, Callable[[Reply], None]]] = {}  # by the id of the call

    @property
    def is_busy(self) -> bool:
        """Whether ``step`` has, or will soon have, work."""
        return bool(self._reads or self._placing or self._slots.is_changed)

    def wait(self, timeout_s: float) -> None:
        """Wait until an adapter was read or copied."""
        if (futures := self._futures) and not self._slots.is_changed:
            wait(futures, timeout_s, FIRST_COMPLETED)

    def step(self) -> None:
        """Process finished reads and copies, start the next ones, and release requests."""
        if not (self._slots.is_changed or any(future.done() for future in self._futures)):
            return
        self._take_reads()
        self._take_placed()
        claims = self._slots.claims()
        self._answer_loads()
        self._start_reads([key for _, key in claims])
        assignments, released = self._slots.assign([claim for claim in claims if claim[1] in self._copies])
        for slot, key in assignments:
            try:
                self._placing[key] = self._device.place(slot, self._copies.get(key))
            except Exception as error:  # only its requests fail
                self._placing[key] = Future()
                self._placing[key].set_exception(error)
        self._requests.requeue(released)

    def control(self, control: Control, answer: Callable[[Reply], None]) -> None:
        """Start "load_adapter" or do "unload_adapter". A load is answered after the read, or, if pinned, the copy."""
        adapter = Adapter(**cast("dict[str, Any]", control.arguments))
        if control.name == UNLOAD_ADAPTER:
            self._unload(adapter)
            answer(Reply(control.call_id, True))
            return
        if adapter.is_pinned:
            self._pinned[adapter.id] = adapter
            self._slots.pin(key_of(adapter), adapter.id)
        self._loads[control.call_id] = adapter, answer
        self._slots.is_changed = True

    @property
    def figures(self) -> dict[str, int]:
        """The number of adapters in slots, in memory, being read, and waited for, and the bytes in memory."""
        return {
            "num_placed": self._slots.num_placed,
            "num_in_memory": len(self._copies),
            "bytes_in_memory": self._copies.num_bytes,
            "num_reading": len(self._reads),
            "num_waiting": len(self._slots.load_queue.keys),
        }

    def forget_loads(self) -> None:
        """Drop unanswered load calls. Their callers repeat them."""
        self._loads.clear()

    # ------------------------------------------------------------ private

    @property
    def _futures(self) -> list[Future[Any]]:
        return [*self._reads.values(), *self._placing.values()]

    def _unload(self, adapter: Adapter) -> None:
        key = key_of(adapter)
        self._pinned.pop(adapter.id, None)
        self._slots.unpin(key, adapter.id)
        self._loads = {call: load for call, load in self._loads.items() if load[0].id != adapter.id}
        self._slots.drop(key)
        if not self._slots.load_queue.uids(key):
            self._copies.remove(key)

    def _take_reads(self) -> None:
        for key, read in list(self._reads.items()):
            if not read.done():
                continue
            del self._reads[key]
            if (error := read.exception()) is None:
                self._copies.add(key, read.result())
                self._pin_again(key)
            else:
                self._fail(key, error)

    def _pin_again(self, key: Key) -> None:
        """Pin a pinned adapter whose first read failed, for example in a new process, and which was read later."""
        for uid in self._slots.load_queue.uids(key):
            adapter = cast("Adapter", self._requests.gated[uid].submit.adapter)
            if adapter.is_pinned and adapter.id not in self._pinned:
                self._pinned[adapter.id] = adapter
                self._slots.pin(key, adapter.id)

    def _take_placed(self) -> None:
        for key, future in list(self._placing.items()):
            if not future.done():
                continue
            del self._placing[key]
            error = future.exception()
            if error is None:
                self._slots.placed(key)
            else:
                self._slots.fail(key)
                self._fail(key, error)

    def _start_reads(self, claims: list[Key]) -> None:
        """Start to read needed adapters that are not in memory, in the order of the claims, while they fit."""
        wanted = [key_of(adapter) for adapter, _ in self._loads.values() if not self._is_known(adapter)] + claims
        needed = {*wanted}
        for key in wanted:
            if key in self._copies or key in self._reads:
                continue
            if len(self._reads) >= MAX_READS or not self._copies.make_space(len(self._reads) + 1, needed):
                break
            adapter = self._adapter_of(key)
            if adapter is not None:
                self._reads[key] = self._threads.submit(read_unchanged, self._device, adapter)
        self._copies.make_space(0, needed)

    def _is_known(self, adapter: Adapter) -> bool:
        key = key_of(adapter)
        return key in self._copies or self._slots.has(key) or key in self._placing

    def _adapter_of(self, key: Key) -> Adapter | None:
        """Return a needed adapter with this key."""
        for adapter, _ in self._loads.values():
            if key_of(adapter) == key:
                return adapter
        waiting = self._slots.load_queue.uids(key)
        if waiting:
            return self._requests.gated[waiting[0]].submit.adapter
        return next((adapter for adapter in self._pinned.values() if key_of(adapter) == key), None)

    def _fail(self, key: Key, error: BaseException) -> None:
        """End the requests that wait for an adapter, and its load calls."""
        if not isinstance(error, ValueError | OSError):
            logger.warning("the adapter in %s failed", key[0], exc_info=error)
        reason = str(error) if isinstance(error, ValueError) else describe(error)
        for uid in self._slots.load_queue.uids(key):
            adapter = cast("Adapter", self._requests.gated[uid].submit.adapter)
            self._requests.abort([uid], FinishCode.FAILED, f"adapter {adapter.name!r}: {reason}", stage=STAGE)
        for call_id, (adapter, answer) in list(self._loads.items()):
            if key_of(adapter) == key:
                del self._loads[call_id]
                answer(Reply(call_id, False, reason))
        for adapter in [adapter for adapter in self._pinned.values() if key_of(adapter) == key]:
            logger.warning("the pinned adapter %r is not placed: %s", adapter.name, reason)
            del self._pinned[adapter.id]
            self._slots.unpin(key, adapter.id)

    def _answer_loads(self) -> None:
        for call_id, (adapter, answer) in list(self._loads.items()):
            is_there = self._slots.has(key_of(adapter)) if adapter.is_pinned else self._is_known(adapter)
            if is_there:
                del self._loads[call_id]
                answer(Reply(call_id, True))


def read_unchanged(device: DeviceAdapters, adapter: Adapter) -> AdapterCopy:
    """Read an adapter. Raises ValueError if its files have changed since the load."""
    _check_unchanged(adapter)
    copy = device.read(adapter)
    _check_unchanged(adapter)
    return copy


def _check_unchanged(adapter: Adapter) -> None:
    if adapter_folder.fingerprint(Path(adapter.path)) != adapter.fingerprint:
        raise ValueError(f"the files in {adapter.path} have changed since it was loaded; unload it, and load it again")
