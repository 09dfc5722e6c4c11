"""The fake runner detects wrong plans, simulates step times, and fails on demand."""

from __future__ import annotations

import subprocess
import sys
import time

import msgspec
import pytest

from aioengine.protocol.messages import Limits, Progress, Sampling
from aioengine.scheduler.plan import NOTHING, TOKENS, NewRow, Row, StepPlan
from aioengine.settings.config import Settings
from aioengine.testing import fake_runner
from aioengine.testing.fake_runner import PRINTABLE, FakeModel, FakeRunner, build
from aioengine.testing.faults import Faults, InjectedFault
from tests.kit.fake_reference import reference_output
from tests.kit.settings import small_settings

MODEL = FakeModel(vocab_size=100)
GREEDY = Sampling(seed=0, temperature=0.0)


def runner_with(model: FakeModel = MODEL, faults: Faults | None = None) -> FakeRunner:
    return FakeRunner(model, num_pages=8, page_size=4, faults=faults)


def give(
    runner: FakeRunner, *rows: Row, opened: list[NewRow] | None = None, closed: list[int] | None = None
) -> list[int]:
    return runner.collect(runner.launch(StepPlan(list(rows), opened or [], closed or []))).tokens.token_ids


def first_token(runner: FakeRunner, prompt: list[int], pages: list[int], sampling: Sampling = GREEDY) -> int:
    opened = NewRow(1, sampling, len(prompt), prompt, pages)
    return give(runner, Row(1, 0, len(prompt), TOKENS, prompt), opened=[opened])[0]


def test_outputs_equal_the_reference() -> None:
    runner, prompt = runner_with(), [5, 6, 7]
    output = [first_token(runner, prompt, [3])]
    output += give(runner, Row(1, 3, 1, TOKENS))
    output += give(runner, Row(1, 4, 1, TOKENS, [], [0]))
    assert output == reference_output(prompt, GREEDY, Limits(max_new_tokens=3), MODEL)


def test_chunks_and_page_sizes_do_not_change_the_output() -> None:
    prompt = list(range(10))
    runner = runner_with()
    opened = NewRow(1, GREEDY, 10, prompt, [7, 2])
    assert give(runner, Row(1, 0, 3, NOTHING, prompt[:3]), opened=[opened]) == []
    token_ids = give(runner, Row(1, 3, 7, TOKENS, prompt[3:], [5]))
    assert token_ids == [first_token(runner_with(), prompt, [0, 1, 2])]


@pytest.mark.parametrize(
    "row",
    [
        Row(1, 3, 1, TOKENS),  # a position is missing: slot 2 was never written
        Row(1, 1, 1, TOKENS),  # a position is computed twice
    ],
)
def test_a_wrong_position_changes_the_output(row: Row) -> None:
    runner = runner_with()
    output = [first_token(runner, [5, 6], [3]), *give(runner, row)]
    assert output != reference_output([5, 6], GREEDY, Limits(max_new_tokens=2), MODEL)


def test_a_page_that_two_requests_write_changes_the_output() -> None:
    runner = runner_with()
    first = first_token(runner, [5, 6], [3])
    give(runner, Row(2, 0, 2, TOKENS, [8, 9]), opened=[NewRow(2, GREEDY, 2, [8, 9], [3])])
    assert [first, *give(runner, Row(1, 2, 1, TOKENS))] != reference_output(
        [5, 6], GREEDY, Limits(max_new_tokens=2), MODEL
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(9, 0, 1, TOKENS, [1]), "request 9, which was never opened"),
        (Row(1, 2, 4, TOKENS, [1, 2, 3, 4]), "1 pages for 6 positions"),
        (Row(1, 2, 3, TOKENS, [1]), "1 of 3 tokens"),
    ],
)
def test_an_impossible_plan_is_an_error(row: Row, words: str) -> None:
    runner = runner_with()
    first_token(runner, [5, 6], [3])
    with pytest.raises(RuntimeError, match=words):
        runner.launch(StepPlan([row]))


def test_closing_a_request_frees_everything() -> None:
    runner = runner_with()
    first_token(runner, [5, 6], [3])
    opened = NewRow(1, GREEDY, 2, [5, 6], [3])
    with pytest.raises(RuntimeError, match="none is held"):
        runner.launch(StepPlan([Row(1, 2, 1, TOKENS)], [opened], [1, 77]))


def test_output_depends_on_the_seed_unless_it_is_greedy() -> None:
    def tokens(temperature: float) -> set[int]:
        return {first_token(runner_with(), [1, 2], [0], Sampling(seed, temperature)) for seed in range(20)}

    assert len(tokens(0.0)) == 1
    assert len(tokens(1.0)) > 10


def test_output_uses_only_the_alphabet() -> None:
    model = FakeModel(vocab_size=261, alphabet=PRINTABLE, eos_token_id=256, eos_probability=0.1)
    limits = Limits(max_new_tokens=400, stop_token_ids=(256,))
    outputs = [reference_output([seed], Sampling(seed), limits, model) for seed in range(50)]
    assert {token_id for output in outputs for token_id in output} <= {*map(ord, PRINTABLE), 256}
    assert all(output[-1] == 256 for output in outputs if len(output) < 400)
    assert 5 < sum(map(len, outputs)) / 50 < 20


def test_an_alphabet_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond the vocabulary of 50"):
        runner_with(FakeModel(vocab_size=50, alphabet="abc"))


def test_a_vocabulary_of_the_end_token_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="no token besides eos_token_id=0"):
        runner_with(FakeModel(vocab_size=1, eos_token_id=0))


def test_if_all_tokens_are_suppressed_one_is_still_sampled() -> None:
    sampling = Sampling(1, 0.0, min_new_tokens=2, suppressed_token_ids=(0, 1))
    assert len(reference_output([1], sampling, Limits(max_new_tokens=3), FakeModel(vocab_size=2))) == 3


def test_tokens_are_suppressed_until_min_new_tokens() -> None:
    model = FakeModel(vocab_size=4, eos_token_id=3, eos_probability=0.9)
    sampling = Sampling(seed=1, temperature=0.0, min_new_tokens=5, suppressed_token_ids=(3, 2))
    limits = Limits(max_new_tokens=50, min_new_tokens=5, stop_token_ids=(3, 2))
    output = reference_output([1], sampling, limits, model)
    assert set(output[:5]) <= {0, 1}
    assert output[-1] in {2, 3}


def test_each_step_takes_step_time_s_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(fake_runner, "time", clock)
    runner = runner_with(FakeModel(vocab_size=100, step_time_s=0.1))
    opened = NewRow(1, GREEDY, 1, [1], [0])
    tickets = [
        runner.launch(StepPlan([Row(1, 0, 1, TOKENS, [1])], [opened])),
        runner.launch(StepPlan([Row(1, 1, 1, TOKENS)])),
    ]
    assert clock.now == 0.0
    for num_steps, ticket in enumerate(tickets, 1):
        runner.collect(ticket)
        assert clock.now == pytest.approx(0.1 * num_steps)


class Clock:
    """A clock whose time advances only in ``sleep``."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


# ------------------------------------------------------------ faults and the factory


def settings_with(**options: str | int | float | bool) -> Settings:
    return small_settings(context_length=64, vocab_size=77, page_size=4, num_pages=6, options=options)


def ignore(progress: Progress) -> None:
    raise AssertionError(progress)


def test_the_factory_reads_the_settings() -> None:
    runner = build(settings_with(eos_token_id=5, raise_at=3), ignore)
    assert (runner.facts["num_pages"], runner.facts["page_size"], runner.facts["max_total_tokens"]) == (6, 4, 24)
    opened = NewRow(1, GREEDY, 1, [1], [0])
    assert give(runner, Row(1, 0, 1, TOKENS, [1]), opened=[opened])[0] < 77
    give(runner, Row(1, 1, 1, TOKENS))
    with pytest.raises(InjectedFault, match="launch of step 3"):
        runner.launch(StepPlan([]))
    runner.close()


def test_the_factory_refuses_unknown_options() -> None:
    with pytest.raises(msgspec.ValidationError, match="step_tim"):
        build(settings_with(step_tim=3), ignore)


def test_a_fault_can_fail_the_start() -> None:
    with pytest.raises(InjectedFault, match="no such device"):
        build(settings_with(start_error="no such device"), ignore)


def test_faults_can_fail_chosen_steps() -> None:
    runner = runner_with(faults=Faults(collect_raise_at=2, raise_times=2, fail_row_at=5, stall_at=4, stall_s=0.03))
    results: list[str] = []
    seconds: list[float] = []
    for _ in range(6):
        started = time.monotonic()
        ticket = runner.launch(StepPlan([Row(1, 0, 1, TOKENS, [1])], [NewRow(1, GREEDY, 1, [1], [0])]))
        try:
            result = runner.collect(ticket)
        except InjectedFault:
            results.append("raised")
        else:
            results.append(result.failed.get(1, "fine"))
        seconds.append(time.monotonic() - started)
    assert results == ["fine", "raised", "raised", "fine", "as asked for by fail_row_at=5", "fine"]
    assert seconds[3] >= 0.03


@pytest.mark.parametrize(
    ("fault", "exit_code"), [("exit_at=1, exit_code=7", 7), ("kill_at=1", -9), ("poison_token_id=1", -9)]
)
def test_a_fault_can_kill_the_process(fault: str, exit_code: int) -> None:
    program = (
        "from aioengine.testing.fake_runner import *; from aioengine.scheduler.plan import *; "
        "from aioengine.protocol.messages import Sampling; "
        f"runner = FakeRunner(FakeModel(), num_pages=2, page_size=4, faults=Faults({fault})); "
        "runner.launch(StepPlan([Row(1, 0, 1, TOKENS, [1])], [NewRow(1, Sampling(0), 1, [1], [0])]))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == exit_code
