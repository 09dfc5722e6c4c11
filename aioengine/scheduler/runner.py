"""The interface between the scheduler and a runner, the device side of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from aioengine.protocol.messages import Adapter, Control, Fact, Progress, Reply
from aioengine.scheduler.plan import StepPlan, StepResult
from aioengine.settings.config import Settings

Ticket = TypeVar("Ticket")


class Runner(Protocol[Ticket]):
    """Computes plans.

    Plans are launched in order and collected in the same order. A plan may be launched before an earlier plan is
    collected. Its decode rows then use tokens that only the device knows. Pages are written in launch order, so pages
    freed after a launch may be used by a later plan. A plan may close a uid that the runner does not know (because its
    launch failed), or a uid whose row is still in flight.
    """

    @property
    def facts(self) -> Mapping[str, Fact]:
        """Facts about the device, for ``Ready``. ``num_pages`` (int) is the size of the KV pool.

        ``weight_version`` (str) is the version of the weights, and ``num_weight_loads`` (int) how often they were
        replaced. ``lacks_weights`` and ``lacks_memory`` (bool): no step may be launched. A function of ``controls`` may
        change these.
        """
        ...

    @property
    def adapters(self) -> DeviceAdapters | None:
        """The LoRA adapters on the device. None: the runner uses no adapters."""
        ...

    @property
    def use_grammars(self) -> Callable[[Any], None] | None:
        """Sets the ``Grammars`` that open the constraints of requests. None: the runner cannot constrain its output."""
        ...

    @property
    def use_ranks(self) -> Callable[[Callable[[StepPlan, Collection[int]], None]], None] | None:
        """Sets a function that sends each plan to the other ranks before it is computed, with the uids of failed
        requests, whose rows are not computed. None: the runner cannot be divided among ranks.
        """
        ...

    @property
    def controls(self) -> Mapping[str, Callable[[Control], Reply]]:
        """The control calls of the runner by name.

        A function is called when every launched plan has been collected; WeightCall.CHECK at any time, in a thread. Its
        reply has the ``call_id`` of the call. An exception becomes the reply. Requests continue after it, so the runner
        must be unchanged. The same call can arrive twice if the detokenizer process was replaced before the reply
        arrived.
        """
        ...

    def launch(self, plan: StepPlan) -> Ticket:
        """Start the step and return without waiting for the device."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the step and return its result."""
        ...

    def close(self) -> None: ...


class DeviceAdapters(Protocol):
    """The slots for LoRA adapters on the device, numbered from 1 to ``num_slots``."""

    @property
    def num_slots(self) -> int: ...

    def read(self, adapter: Adapter) -> AdapterCopy:
        """Read and check the files of an adapter. Called in another thread than the steps.

        Raises:
            ValueError: the adapter cannot be used. The message names the file and the tensor.
        """
        ...

    def is_read_by_all(self, is_read: bool) -> bool:
        """Return whether all ranks have read an adapter. All ranks call it between the same two steps."""
        ...

    def place(self, slot: int, adapter: Any, /) -> Future[None]:
        """Copy an adapter that ``read`` returned into a slot, in the background. Called between two steps.

        Rows may use the slot once the future is done. Steps in flight still use the old content of the slot.
        """
        ...


class AdapterCopy(Protocol):
    """An adapter in host memory."""

    @property
    def num_bytes(self) -> int: ...


RunnerFactory = Callable[["Settings", Callable[["Progress"], None]], Runner[Any]]
"""The function named by ``settings.runner.factory``: builds the runner. It reports slow work to its second argument."""
