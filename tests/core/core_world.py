"""Runs SchedulerCore with a fake runner: submits, steps, records the output, and checks invariants after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aioengine.protocol.columns import POOLED_VECTOR, Extra
from aioengine.protocol.messages import (
    End,
    FinishCode,
    Limits,
    RequestKind,
    Sampling,
    StepOutput,
    Submit,
    TextOpened,
    TextRules,
)
from aioengine.scheduler.core import SchedulerCore
from aioengine.scheduler.plan import TOKENS
from aioengine.scheduler.request import Gate
from aioengine.settings.page_groups import PageGroups
from aioengine.testing.fake_runner import FakeModel, FakeRunner, FakeTicket
from tests.core.ranked_runner import RankedFakeRunner
from tests.core.windowed_runner import WindowedFakeRunner
from tests.kit.checked_scheduler import CheckedScheduler
from tests.kit.fake_reference import reference_output, reference_vector
from tests.kit.integrity import check_scheduler
from tests.kit.settings import small_settings

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from aioengine.scheduler.plan import Row, StepPlan, StepResult
    from aioengine.settings.config import SchedulerSettings
    from aioengine.testing.faults import Faults

MODEL = FakeModel(vocab_size=50, eos_token_id=3, eos_probability=0.02)
NO_EOS = FakeModel(vocab_size=50)


def submit_of(
    uid: int,
    prompt: list[int],
    *,
    limits: Limits | None = None,
    priority: int = 0,
    arrived_at: float = 0.0,
    temperature: float = 0.0,
) -> Submit:
    """Return a greedy request with eight output tokens by default."""
    sampling = Sampling(seed=uid, temperature=temperature)
    return Submit(uid, prompt, sampling, limits or Limits(max_new_tokens=8), TextRules(), priority, arrived_at)


class WatchedRunner:
    """A FakeRunner that keeps the plans, and checks that no running decode is left out of a plan.

    gives_one: whether each row with tokens has one token; then plans are checked.
    gates: the closed gates of each request. A request with a closed gate must not be in a plan.
    vectors: the vectors of all results, by uid.
    """

    def __init__(self, runner: FakeRunner | RankedFakeRunner, *, gives_one: bool) -> None:
        self._runner = runner
        self.adapters = runner.adapters
        self.use_grammars = None
        self.use_ranks = None
        self.controls = runner.controls
        self.gives_one = gives_one
        self.plans: list[StepPlan] = []
        self.max_new: dict[int, int] = {}
        self.gates: dict[int, set[Gate]] = {}
        self.vectors: dict[int, bytes] = {}
        self._must_advance: list[int] = []
        self._num_sampled: dict[int, int] = {}

    @property
    def facts(self) -> dict[str, str | int | float | bool]:
        return dict(self._runner.facts)

    def launch(self, plan: StepPlan) -> FakeTicket:
        if self.gives_one:
            self._check(plan)
        self.plans.append(plan)
        return self._runner.launch(plan)

    def collect(self, ticket: FakeTicket) -> StepResult:
        result = self._runner.collect(ticket)
        self.vectors.update({extra.uid: extra.data for extra in result.tokens.extras if extra.kind == POOLED_VECTOR})
        return result

    def close(self) -> None:
        self._runner.close()

    def _check(self, plan: StepPlan) -> None:
        counts = self._num_sampled
        for uid in plan.closed:
            counts.pop(uid, None)
        for new in plan.new_rows:
            counts[new.uid] = len(new.token_ids) - new.num_prompt
        uids = [row.uid for row in plan.rows]
        assert len(uids) == len(set(uids))
        assert not [uid for uid in uids if self.gates.get(uid)]
        for uid in self._must_advance:
            if self.gates.get(uid):
                continue
            assert uid in uids or uid in plan.closed or counts[uid] >= self.max_new[uid], f"{uid} stands still"
        for row in plan.rows:
            counts[row.uid] += row.outputs == TOKENS
            assert counts[row.uid] <= self.max_new[row.uid], f"{row.uid} runs beyond its end"
        self._must_advance = [row.uid for row in plan.rows if row.outputs == TOKENS]


@dataclass
class World:
    """One core, its requests and their results. windows: as in ``PageGroups``; empty: no page groups.

    num_ranks: above 1, all ranks compute the same rows; then there are no windows and faults.
    """

    settings: SchedulerSettings
    num_pages: int
    page_size: int
    model: FakeModel = MODEL
    faults: Faults | None = None
    windows: tuple[int | None, ...] = ()
    num_ranks: int = 1
    now: float = 0.0
    submitted: dict[int, Submit] = field(default_factory=dict[int, Submit])
    outputs: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    opened: dict[int, TextOpened] = field(default_factory=dict[int, TextOpened])
    ended: dict[int, End] = field(default_factory=dict[int, End])
    stopped: set[int] = field(default_factory=set[int])
    preempted: list[int] = field(default_factory=list[int])
    extras: dict[int, list[Extra]] = field(default_factory=dict[int, list[Extra]])
    num_never_told: int = 0

    def __post_init__(self) -> None:
        sizes = {"num_pages": self.num_pages, "page_size": self.page_size}
        runner: FakeRunner | RankedFakeRunner = FakeRunner(self.model, **sizes, faults=self.faults)
        if self.num_ranks > 1:
            runner = RankedFakeRunner(self.model, self.num_ranks, **sizes)
        elif self.windows:
            groups = PageGroups(windows=self.windows, page_size=self.page_size, min_tokens=self.settings.min_tokens)
            runner = WindowedFakeRunner(self.model, groups, num_pages=self.num_pages, faults=self.faults)
        self.runner = WatchedRunner(
            runner, gives_one=self.model.tokens_per_step == "1" and not self.settings.max_drafts
        )
        self.scheduler = CheckedScheduler(
            self.settings, num_pages=self.num_pages, page_size=self.page_size, windows=self.windows
        )
        self.core: SchedulerCore[FakeTicket] = SchedulerCore(self.scheduler, self.runner, self.settings.depth)

    def submit(self, *submits: Submit) -> None:
        for submit in submits:
            self.submitted[submit.uid] = submit
            self.outputs[submit.uid] = [] if submit.continuation is None else list(submit.continuation.token_ids)
            self.runner.max_new[submit.uid] = submit.limits.max_new_tokens
            self.core.requests.submit(submit)

    def abort(self, uids: Iterable[int], code: FinishCode = FinishCode.ABORT) -> None:
        """Abort requests. Like the detokenizer, use STOP only for requests with text."""
        if code is FinishCode.STOP:
            uids = [uid for uid in uids if uid in self.opened and uid not in self.ended]
            self.stopped.update(uids)
        self.core.requests.abort(uids, code)

    def close_gate(self, uids: Iterable[int], gate: Gate) -> None:
        uids = list(uids)
        for uid in self.submitted.keys() & uids:
            self.runner.gates.setdefault(uid, set()).add(gate)
        self.core.requests.close_gate(uids, gate)

    def open_gate(self, uids: Iterable[int], gate: Gate) -> None:
        uids = list(uids)
        for uid in uids:
            self.runner.gates.get(uid, set()).discard(gate)
        self.core.requests.open_gate(uids, gate)

    def forget_all(self) -> None:
        """Forget all requests, as after a crash. Requests that have not ended may be submitted again."""
        stats = self.core.scheduler.stats(self.now)
        self.num_never_told += stats.num_finished + stats.num_aborted - len(self.ended) - len(self.stopped)
        self.opened = {uid: opened for uid, opened in self.opened.items() if uid in self.ended}
        self.core.forget_all()
        check_scheduler(self.core.scheduler)

    def step(self) -> StepOutput | None:
        output = self.core.step(self.now)
        self.now += 1.0
        check_scheduler(self.core.scheduler)
        if output is not None:
            self._take(output)
        return output

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.core.scheduler.stats(self.now)}")

    def _take(self, output: StepOutput) -> None:
        for opened in output.opened:
            assert opened.first_token.uid not in self.opened
            self.opened[opened.first_token.uid] = opened
        for uid, token_id in zip(output.tokens.uid_of_each(), output.tokens.token_ids, strict=True):
            assert uid in self.opened
            assert uid not in self.ended
            assert uid not in self.stopped
            self.outputs[uid].append(token_id)
        for extra in output.tokens.extras:
            assert extra.uid in self.opened
            self.extras.setdefault(extra.uid, []).append(extra)
        for uid in output.preempted:
            assert uid in self.opened
            self.preempted.append(uid)
        for ended in output.ended:
            assert ended.uid not in self.ended
            assert ended.stage != "forward" or ended.message.startswith("InjectedFault: "), ended.message
            self.ended[ended.uid] = ended

    def reference(self, uid: int) -> list[int]:
        submit = self.submitted[uid]
        if submit.kind is RequestKind.POOL:
            return []
        return reference_output(submit.prompt_token_ids, submit.sampling, submit.limits, self.model)

    def rows_of(self, step: int) -> list[Row]:
        """Return the rows of a step, counted from 1, or an empty list if there was no such step."""
        return self.runner.plans[step - 1].rows if step <= len(self.runner.plans) else []

    def check_all_over(self) -> None:
        """Check that every request ended once with the tokens and vectors of the reference, and that nothing leaked."""
        stats = self.core.scheduler.stats(self.now)
        assert not self.core.has_work
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_pages == stats.num_pages == self.num_pages
        assert self.ended.keys() | self.stopped == self.submitted.keys()
        assert not self.ended.keys() & self.stopped
        assert stats.num_finished + stats.num_aborted == len(self.submitted) + self.num_never_told
        for uid, output in self.outputs.items():
            expected = self.reference(uid)
            if uid in self.ended and self.ended[uid].code in (FinishCode.STOP, FinishCode.LENGTH):
                assert output == expected
            else:
                assert output == expected[: len(output)]
        for uid, vector in self.runner.vectors.items():
            assert vector == reference_vector(self.submitted[uid].prompt_token_ids)
        assert self.core.scheduler.cache.clear()


def settings_of(**changes: int | str | bool) -> SchedulerSettings:
    return small_settings(**changes).scheduler


def random_requests(rng: random.Random, *, count: int, max_prompt: int, max_output: int) -> list[Submit]:
    """Return requests with all kinds of limits. Many share prefixes."""
    trunk = [rng.randrange(50) for _ in range(max_prompt)]
    submits: list[Submit] = []
    for uid in range(count):
        num_prompt = rng.randint(1, max_prompt)
        num_shared = rng.choice([0, num_prompt, rng.randint(0, num_prompt)])
        prompt = trunk[:num_shared] + [rng.randrange(50) for _ in range(num_prompt - num_shared)]
        limits = Limits(
            max_new_tokens=rng.choice([1, 1, max_output, rng.randint(1, max_output)]),
            min_new_tokens=rng.choice([0, 0, 3]),
            stop_token_ids=rng.choice([(), (3,), (3, 7)]),
        )
        submits.append(
            submit_of(
                uid,
                prompt,
                limits=limits,
                priority=rng.choice([0, 0, 0, 1, -1]),
                arrived_at=float(uid),
                temperature=rng.choice([0.0, 1.0]),
            )
        )
    return submits


def small_world(
    depth: int = 0, num_pages: int = 64, *, faults: Faults | None = None, **settings: int | str | bool
) -> World:
    """Return a world with four tokens per page, whose model samples no end token."""
    return World(settings_of(depth=depth, **settings), num_pages, page_size=4, model=NO_EOS, faults=faults)
