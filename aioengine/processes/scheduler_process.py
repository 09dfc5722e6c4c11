"""The scheduler process: queues requests, runs steps, sends their tokens to the detokenizer.

``Child.serve`` has the loop of the process (receive, step, send), and ``SchedulerCore.step`` is the step.
"""

from __future__ import annotations

import gc
import json
import logging
import pkgutil
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from msgspec.structs import replace

from aioengine.api import checks
from aioengine.child_process.child import Child, encodable, run_child
from aioengine.child_process.host import (
    keep_freed_memory,
    limit_kernel_cache,
    limit_threads,
    open_gpu,
    show_one_gpu,
    use_share_of_cores,
)
from aioengine.errors import UnsupportedSchemaError, describe
from aioengine.processes.adapter_loading import AdapterCopies, AdapterLoader
from aioengine.processes.leading_runner import LeadingRunner
from aioengine.protocol.messages import (
    DEFAULT_WEIGHT_VERSION,
    DETOKENIZER,
    LOAD_ADAPTER,
    MAX_REPLY_BYTES,
    UNLOAD_ADAPTER,
    Abort,
    Control,
    End,
    FinishCode,
    Message,
    NewEpoch,
    Progress,
    Reply,
    Resume,
    Stats,
    StepOutput,
    Submit,
    Suspend,
    TextChunks,
)
from aioengine.protocol.service import HEARTBEAT_S, Outbox
from aioengine.protocol.weight_messages import WeightCall
from aioengine.runner.profile import Profile
from aioengine.runner.time_limit import install_timer_signal
from aioengine.scheduler.core import SchedulerCore
from aioengine.scheduler.request import Gate, Request
from aioengine.scheduler.scheduler import Scheduler
from aioengine.transport.addresses import RANKS_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.constraints.grammars import Grammars
    from aioengine.protocol.board import CrashBoard
    from aioengine.protocol.messages import Fact, Grammar
    from aioengine.protocol.rank_step import RankAdapter, RankStep
    from aioengine.scheduler.runner import Runner, RunnerFactory
    from aioengine.settings.config import Settings

logger = logging.getLogger(__name__)

_CONTROL_STAGE = "control"
_SWITCH_S = 0.0005
"""Switch interval of the GIL with LoRA: a step waits at most this long for a thread that reads an adapter. Grammar
masks become slower."""

_STATS_INTERVAL_S = 0.1
"""Time between two messages with statistics while requests run."""

_WAIT_S = 0.001
"""How long an idle scheduler waits for a grammar or an adapter before it reads messages again."""


class SchedulerService:
    """Connects ``SchedulerCore`` to messages, without sockets.

    Attributes:
        facts: facts for ``Ready``.
    """

    def __init__(
        self,
        core: SchedulerCore[Any],
        runner: Runner[Any],
        profile: Profile,
        *,
        settings: Settings,
        facts: dict[str, Fact],
        report: Callable[[Progress], None],
        grammars: Grammars | None = None,
        adapters: AdapterLoader | None = None,
    ) -> None:
        """report: called before each control call, because the call may take long and nothing is sent meanwhile.
        grammars: compiles the runner's constraints; None if the runner applies no grammars.
        adapters: the adapters of the runner; None if the runner applies no adapters.
        """
        self._core = core
        self._runner = runner
        self._profile = profile
        self._settings = settings
        self.facts = facts
        self._report = report
        self._grammars = grammars
        self._adapters = adapters
        if grammars is not None:
            grammars.needed = self._needed_grammars
        self._compiling: dict[int, Future[Any]] = {}  # uid -> grammar of a request that waits for it
        self._checks: dict[Future[Reply], Control] = {}  # of new weights
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="aioengine-check")
        self._num_weight_loads = runner.facts.get("num_weight_loads", 0)
        self._failed_submits: list[End] = []
        self._replies: list[Message] = []
        self._stats_sent_at = 0.0
        self._sent_step_ended_at = -1.0
        self._was_busy = False
        self._has_replied = False
        # name -> a function that returns success, message and data of the ``Reply``
        self._controls: dict[str, Callable[..., tuple[bool, str, str]]] = {
            "flush_cache": self._flush_cache,
            "pause": partial(self._set_paused, True),
            "continue": partial(self._set_paused, False),
            "server_info": self._server_info,
            "freeze_gc": self._freeze_gc,
            "close_sessions": self._close_sessions,
            "start_profile": profile.start,
            "stop_profile": profile.stop,
        }

    def handle(self, messages: list[Message], now: float) -> None:
        """Queue and abort requests, and answer control calls. An error in a request ends only this request."""
        for message in messages:
            match message:
                case Submit():
                    self._submit(message, now)
                case Abort():
                    self._core.requests.abort(message.uids, message.code, message.message)
                case Suspend():
                    self._core.requests.close_gate(message.uids, Gate.SUSPENDED)
                case Resume():
                    self._core.requests.open_gate(message.uids, Gate.SUSPENDED)
                case Control():
                    self._control(message, now)
                case NewEpoch():
                    self._compiling.clear()
                    self._checks.clear()
                    if self._adapters is not None:
                        self._adapters.forget_loads()
                    self._core.forget_all()

    def step(self, now: float) -> Outbox:
        """Run a step if there is work. Return its results, replies and statistics."""
        to_peer: list[Message] = []
        to_frontend: list[Message] = []
        if self._grammars is not None:
            self._grammars.prepare_when_quiet(now, is_busy=self._core.has_work)
        if self._compiling:
            if not self._core.has_work:
                wait(set(self._compiling.values()), _WAIT_S, FIRST_COMPLETED)
            if streams := self._take_compiled():
                to_frontend.append(TextChunks(compiled=streams))
        if self._checks:
            if not self._core.has_work:
                wait(self._checks, _WAIT_S)
            self._answer_checks(now)
        if self._adapters is not None and self._adapters.is_busy:
            if not self._core.has_work:
                self._adapters.wait(_WAIT_S)
            self._adapters.step()
        if self._failed_submits:
            to_peer.append(StepOutput(ended=self._failed_submits))
            self._failed_submits = []
        output = self._core.step(now)
        if output is not None and not output.tokens.extras:
            to_peer.append(output)
        elif output is not None:
            for part in output.parts():
                if (textless := part.take_textless()) is not None:
                    to_frontend.append(textless)
                if textless is None or part.has_news:
                    to_peer.append(part)
        to_frontend += self._replies
        self._replies = []
        if stats := self._take_due_stats(now, has_output=output is not None):
            to_frontend.append(stats)
            if not to_peer:
                to_peer.append(StepOutput())
        return Outbox(to_peer, to_frontend)

    def wait_s(self, now: float) -> float:
        """Return 0 if there is work or unsent results, else the seconds until the next deadline or heartbeat."""
        if self._was_busy or self._compiling or self._checks:
            return 0.0
        if self._adapters is not None and self._adapters.is_busy:
            return 0.0
        until = self._stats_sent_at + HEARTBEAT_S
        deadline = self._core.requests.next_deadline()
        return max(0.0, (until if deadline is None else min(until, deadline)) - now)

    def close(self) -> None:
        self._profile.close()
        if self._grammars is not None:
            self._grammars.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._runner.close()

    def _submit(self, submit: Submit, now: float) -> None:
        try:
            self._core.requests.submit(submit, now)
            if submit.sampling.grammar is not None:
                self._compile(submit, submit.sampling.grammar)
        except Exception as error:
            logger.warning("request %d failed when it was queued", submit.uid, exc_info=True)
            self._failed_submits.append(End(submit.uid, FinishCode.FAILED, stage="schedule", message=describe(error)))

    def _compile(self, submit: Submit, grammar: Grammar) -> None:
        """Compile the grammar of a request in the background. The gate of the request is closed until then."""
        compiled: Future[Any] = Future()
        if self._grammars is None:
            compiled.set_exception(ValueError("the runner of this engine does not support grammars"))
        else:
            compiled = self._grammars.compile(grammar, submit.tenant)
            if not submit.text.stream and compiled.done() and compiled.exception() is None:
                return
        self._compiling[submit.uid] = compiled
        self._core.requests.close_gate([submit.uid], Gate.GRAMMAR)

    def _needed_grammars(self) -> set[tuple[str, str]]:
        """Return the grammars of all open requests. They must stay cached.

        A step that needs an evicted grammar would wait for its compilation.
        """
        requests = self._core.requests
        open_requests = (*requests.waiting, *requests.running, *requests.gated.values())
        grammars = (request.submit.sampling.grammar for request in open_requests)
        return {(grammar.kind, grammar.text) for grammar in grammars if grammar is not None}

    def _take_compiled(self) -> list[int]:
        """Open the gates of requests whose grammar is compiled, and end requests whose grammar cannot be compiled.

        Return the uids of streams with a compiled grammar, because their callers wait for it.
        """
        streams: list[int] = []
        for uid, compiled in list(self._compiling.items()):
            request = self._core.requests.gated.get(uid)
            if request is None:  # it has ended
                del self._compiling[uid]
                if self._grammars is not None and compiled not in self._compiling.values():
                    self._grammars.leave(compiled)
                continue
            if not compiled.done():
                continue
            del self._compiling[uid]
            if (error := compiled.exception()) is not None:
                self._end_uncompilable(request, error)
                continue
            self._core.requests.open_gate([uid], Gate.GRAMMAR)
            if request.submit.text.stream:
                streams.append(uid)
        return streams

    def _end_uncompilable(self, request: Request, error: BaseException) -> None:
        """End a request whose grammar cannot be enforced."""
        if not isinstance(error, ValueError):
            logger.warning("the grammar of request %d failed", request.uid, exc_info=error)
        grammar = request.submit.sampling.grammar
        parameter = "" if grammar is None else grammar.parameter
        pointer, keyword = (error.pointer, error.keyword) if isinstance(error, UnsupportedSchemaError) else ("", "")
        keyword = keyword or parameter.partition("=")[0]
        message = f"{parameter} cannot be enforced: {error}"
        self._core.requests.end(request, End(request.uid, FinishCode.UNSUPPORTED, keyword, pointer, message))

    def _take_due_stats(self, now: float, *, has_output: bool) -> Stats | None:
        """Return statistics to send, if they are due: at intervals while steps run, after the last step, and as
        heartbeats.

        If there is work but no step ends, return None. The supervisor then detects a stall.
        """
        is_busy = self._core.has_work
        interval_s = _STATS_INTERVAL_S if is_busy else HEARTBEAT_S
        has_become_idle = self._was_busy and not is_busy
        if has_become_idle and has_output and not self._has_replied:
            return None  # send the last output first; the next ``step`` follows immediately and sends the statistics
        self._was_busy = is_busy
        if not has_become_idle and now - self._stats_sent_at < interval_s:
            return None
        stats = self._core.scheduler.stats(now)
        if is_busy and not self._has_replied and stats.step_ended_at == self._sent_step_ended_at:
            return None
        self._has_replied = False
        self._stats_sent_at = now
        self._sent_step_ended_at = stats.step_ended_at
        return stats

    # ------------------------------------------------------------ control calls

    def _control(self, control: Control, now: float) -> None:
        """Answer a call to the scheduler immediately, and a call to the runner when no step is in flight."""
        if control.name in (LOAD_ADAPTER, UNLOAD_ADAPTER) and self._adapters is not None:
            self._adapters.control(control, lambda reply: self._answer(reply, now))
        elif control.name in self._controls:
            function = self._controls[control.name]
            reply = self._reply(control, lambda _: Reply(control.call_id, *function(**control.arguments)))
            self._answer(reply, now)
        elif (call := self._runner.controls.get(control.name)) is None:
            known = ", ".join([*self._controls, *self._runner.controls])
            message = f"unknown control call {control.name!r}; allowed: {known}"
            self._answer(Reply(control.call_id, False, message), now)
        elif control.name == WeightCall.CHECK:
            self._report(Progress(control.name, 0, 1, ""))
            self._checks[self._readers.submit(call, control)] = control
        else:
            if control.name == WeightCall.RELEASE_MEMORY:
                call = partial(self._release_memory, call)
            self._core.call_between_steps(lambda: self._answer(self._reply(control, call, _CONTROL_STAGE), now))

    def _release_memory(self, release: Callable[[Control], Reply], control: Control) -> Reply:
        """Free memory, unless running requests use it. The prefix cache is emptied."""
        if num_running := len(self._core.requests.running):
            text = f"{checks.counted(num_running, 'request')} still running; pause_generation('retract') lets them wait"
            return Reply(control.call_id, False, text)
        reply = release(control)
        if reply.success:
            self._core.scheduler.cache.clear()
        return reply

    def _answer_checks(self, now: float) -> None:
        """Answer the calls whose checks are done."""
        for check in [check for check in self._checks if check.done()]:
            control = self._checks.pop(check)
            self._answer(self._reply(control, lambda _, done=check: done.result(), _CONTROL_STAGE), now)

    def _answer(self, reply: Reply, now: float) -> None:
        """Queue a reply, with new statistics that show the effect of the call. now: arrival time of the call."""
        self._stats_sent_at = min(self._stats_sent_at, now - HEARTBEAT_S)
        self._has_replied = True
        reply.message = encodable(reply.message)
        self._replies.append(reply)

    def _reply(self, control: Control, call: Callable[[Control], Reply], stage: str = "") -> Reply:
        """Return the reply of ``call``, or a failure if it raises. stage: of the failure."""
        self._report(Progress(control.name, 0, 1, ""))
        try:
            reply = call(control)
            if len(reply.data) > MAX_REPLY_BYTES:  # sending it would fail and end this process
                raise ValueError(f"its reply has {len(reply.data):,} bytes, the limit is {MAX_REPLY_BYTES:,}")
        except Exception as error:  # only the call fails
            logger.warning("the control call %r failed", control.name, exc_info=error)
            message = f"{control.name} failed: {type(error).__name__}: {error}"
            return Reply(control.call_id, False, message, stage=stage)
        facts = self._runner.facts
        self._core.is_held = bool(facts.get("lacks_weights") or facts.get("lacks_memory"))
        if (num_loads := facts.get("num_weight_loads", 0)) != self._num_weight_loads:
            self._num_weight_loads = num_loads
            version = str(facts["weight_version"])
            reply.data = str(self._core.requests.change_weights(version, keeps_kv=self._core.is_paused))
        return reply

    def _flush_cache(self) -> tuple[bool, str, str]:
        stats = self._core.scheduler.stats(0.0)
        if stats.num_running or stats.num_waiting:
            counts = f"{stats.num_running} running, {stats.num_waiting} waiting"
            return False, f"the cache is not flushed while requests use it: {counts}", ""
        is_empty = self._core.scheduler.cache.clear()
        return is_empty, "" if is_empty else "some cached pages are still in use", ""

    def _close_sessions(self, sessions: list[str]) -> tuple[bool, str, str]:
        for session in sessions:
            self._core.requests.close_session(int(session))
        return True, "", ""

    def _set_paused(self, is_paused: bool, *, retracts: bool = False) -> tuple[bool, str, str]:
        self._core.is_paused = is_paused
        if retracts:
            self._core.requests.preempt_all()
        return True, "", ""

    def _server_info(self) -> tuple[bool, str, str]:
        stats = msgspec.structs.asdict(self._core.scheduler.stats(time.monotonic()))
        info = {"settings": self._settings, "facts": self.facts, "stats": stats}
        if self._adapters is not None:
            stats["adapters"] = self._adapters.figures
        if self._grammars is not None:
            stats["grammars_prepared"] = self._grammars.is_prepared
        return True, "", json.dumps(msgspec.to_builtins(info))  # paths need not be UTF-8

    def _freeze_gc(self) -> tuple[bool, str, str]:
        gc.collect()
        gc.freeze()
        return True, f"{gc.get_freeze_count()} objects frozen", ""


def build_service(
    settings: Settings,
    report: Callable[[Progress], None],
    board: CrashBoard | None = None,
    send_to_ranks: Callable[[RankStep | RankAdapter | Control], None] | None = None,
    *,
    imports_s: float = 0.0,
) -> SchedulerService:
    """Build the runner with the factory in the settings, and a scheduler with the runner's number of pages.

    board: crash board on which each step is recorded. send_to_ranks: sends a message to the other ranks.
    imports_s: duration of the import of the factory, for the facts.

    Raises:
        ImportError, AttributeError: the factory cannot be imported.
        ValueError: its runner cannot be used.
        Exception: the exception of the factory.
    """
    start = time.monotonic()
    factory: RunnerFactory = pkgutil.resolve_name(settings.runner.factory)
    runner: Runner[Any] = factory(settings, report)
    if send_to_ranks is not None:
        runner = LeadingRunner(runner, send_to_ranks)
    grammars = None
    if runner.use_grammars is not None and settings.model.task == "generate":
        from aioengine.constraints.grammars import Grammars  # and numpy, which other runners do without

        grammars = Grammars(settings.text.tokenizer_path, settings.model.vocab_size, settings.text.eos_token_ids)
        runner.use_grammars(grammars)
    lora = settings.runner.lora
    if lora is not None and runner.adapters is None:
        raise ValueError("enable_lora: the runner of this engine applies no LoRA adapters")
    max_running = min(settings.scheduler.max_running, int(runner.facts.get("max_running_requests", sys.maxsize)))
    scheduler = Scheduler(
        replace(settings.scheduler, max_running=max_running),
        num_pages=int(runner.facts["num_pages"]),
        page_size=settings.memory.page_size,
        num_adapter_slots=0 if runner.adapters is None else runner.adapters.num_slots,
        num_snapshots=int(runner.facts.get("num_snapshots", 0)),
        windows=page_windows(runner.facts),
    )
    profile = Profile(report)
    depth = settings.scheduler.depth
    core = SchedulerCore(scheduler, runner, depth, clock=time.monotonic, trace=profile, board=board)
    core.requests.events.weight_version = str(runner.facts.get("weight_version", DEFAULT_WEIGHT_VERSION))
    facts: dict[str, Fact] = {
        "page_size": settings.memory.page_size,
        "max_total_tokens": scheduler.cache.num_pages * settings.memory.page_size,
        "max_running_requests": settings.scheduler.max_running,
        "load_s": round(time.monotonic() - start, 3),
        "start_imports_s": round(imports_s, 3),
        **runner.facts,
    }
    adapters = None
    if runner.adapters is not None and lora is not None:
        adapters = AdapterLoader(runner.adapters, core.requests, AdapterCopies(lora.max_loaded, lora.max_bytes))
    return SchedulerService(
        core, runner, profile, settings=settings, facts=facts, report=report, grammars=grammars, adapters=adapters
    )


def page_windows(facts: Mapping[str, Fact]) -> tuple[int | None, ...]:
    """Return ``PageGroups.windows`` from the facts of a runner. Empty if all layers have the same page table."""
    return tuple(int(window) or None for window in str(facts.get("page_windows", "")).split())


def prepare_process(child: Child) -> Settings:
    """Prepare a process with a runner. Return its settings, with its rank."""
    settings = child.settings
    runner, ranks, rank = settings.runner, settings.runner.ranks, child.orders.role.rank
    limit_threads(runner.num_threads)
    limit_kernel_cache()
    keep_freed_memory()
    if runner.device == "cpu" and runner.num_replicas > 1:
        use_share_of_cores(runner.replica, runner.num_replicas)
    if runner.device == "cuda" and runner.base_gpu_id + runner.num_runners > 1:
        show_one_gpu(runner.base_gpu_id + runner.replica * runner.num_runners // runner.num_replicas + rank)
    if runner.device == "cuda":
        open_gpu()
    pkgutil.resolve_name(runner.factory)  # imports torch
    gc.freeze()  # otherwise a later collection takes 0.1 s to visit all modules
    if ranks is None:
        return settings
    ranks = replace(ranks, rank=rank, store_file=str(Path(child.orders.board).with_name(RANKS_FILE)))
    return replace(settings, runner=replace(settings.runner, ranks=ranks))


def work(child: Child) -> None:
    start = time.monotonic()
    settings = prepare_process(child)
    imports_s = time.monotonic() - start
    install_timer_signal()
    if settings.runner.lora is not None:
        sys.setswitchinterval(_SWITCH_S)
    send_to_ranks = None if settings.runner.ranks is None else child.connect_ranks()
    service = build_service(settings, child.uplink.post, child.board, send_to_ranks, imports_s=imports_s)
    child.serve(service, DETOKENIZER)


def main() -> NoReturn:
    run_child(work)
