"""Requests that would miss their deadline are refused at once."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.messages import (
    Continuation,
    FinishCode,
    FirstToken,
    Limits,
    RequestKind,
    Sampling,
    Submit,
    TextRules,
)
from aioengine.scheduler.admission import TimeEstimates, refusal_of_late

CHUNK = 100


def measured_estimates(step_s: float = 0.1, full_step_s: float = 1.0, admission_s: float = 0.0) -> TimeEstimates:
    estimates = TimeEstimates(CHUNK)
    estimates.note_step(step_s, 1)
    estimates.note_step(full_step_s, CHUNK)
    for number in range(200):
        estimates.note_admission(number * admission_s, has_next=True)
    return estimates


def submit_of(max_new: int = 10, *, stop_ids: tuple[int, ...] = (), min_new: int = 0, **deadlines: float) -> Submit:
    limits = Limits(max_new, min_new, stop_ids, deadlines, refuses_late=True)
    return Submit(1, [1], Sampling(seed=0), limits, TextRules())


def is_refused(submit: Submit, estimates: TimeEstimates, *, num_ahead: int = 0, num_missing: int = 1) -> bool:
    return refusal_of_late(submit, estimates, 10.0, num_ahead=num_ahead, num_missing=num_missing) is not None


def test_each_deadline_is_compared_with_the_estimate_of_its_stages() -> None:
    # The queue: 4 others, one admitted every 2 s lately, perhaps twice as fast: 4 s. The prompt: 3 full steps.
    slow = measured_estimates(admission_s=2.0)
    for kind, needed_s in (("queue", 4.0), ("first_token", 7.0), ("total", 7.9)):
        late, in_time = submit_of(**{kind: 10 + needed_s - 0.1}), submit_of(**{kind: 10 + needed_s + 0.1})
        assert is_refused(late, slow, num_ahead=4, num_missing=300)
        assert not is_refused(in_time, slow, num_ahead=4, num_missing=300)


def test_an_output_that_may_stop_early_counts_as_its_minimum() -> None:
    assert is_refused(submit_of(100, total=15.0), measured_estimates())
    assert not is_refused(submit_of(100, total=15.0, stop_ids=(3,)), measured_estimates())
    assert is_refused(submit_of(100, total=15.0, stop_ids=(3,), min_new=80), measured_estimates())
    with_stop = msgspec.structs.replace(submit_of(100, total=15.0), text=TextRules(stop=("x",)))
    assert not is_refused(with_stop, measured_estimates())


def test_a_vector_counts_as_one_token() -> None:
    pooled = msgspec.structs.replace(submit_of(100, total=15.0), kind=RequestKind.POOL)
    assert not is_refused(pooled, measured_estimates())


def test_a_refusal_has_the_estimated_and_the_remaining_time() -> None:
    end = refusal_of_late(submit_of(total=10.5), measured_estimates(), 10.0, num_ahead=0, num_missing=200)
    assert end is not None
    assert (end.code, end.matched) == (FinishCode.REFUSED, 2400)
    assert end.message == "it would take 2.9 s at least, and its timeout leaves 0.5 s"


def test_requests_without_early_refusal_and_continued_requests_are_not_refused() -> None:
    late = submit_of(total=10.5)
    patient = msgspec.structs.replace(late, limits=msgspec.structs.replace(late.limits, refuses_late=False))
    going_on = msgspec.structs.replace(late, continuation=Continuation(FirstToken(1, 0, 0.0, 0.0), []))
    assert [is_refused(submit, measured_estimates(), num_missing=900) for submit in (late, patient, going_on)] == [
        True,
        False,
        False,
    ]


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0.001, 1e6))
def test_without_measurements_no_request_is_refused(num_ahead: int, num_missing: int, seconds: float) -> None:
    assert not is_refused(
        submit_of(total=10 + seconds), TimeEstimates(CHUNK), num_ahead=num_ahead, num_missing=num_missing
    )


@given(st.lists(st.tuples(st.floats(1e-4, 10), st.integers(0, 2 * CHUNK)), min_size=1, max_size=50))
def test_the_estimate_of_a_step_is_at_most_the_newest_decode_step(steps: list[tuple[float, int]]) -> None:
    estimates = TimeEstimates(CHUNK)
    for seconds, num_prompt_tokens in steps:
        estimates.note_step(seconds, num_prompt_tokens)
    newest = [seconds for seconds, num_prompt_tokens in steps if 2 * num_prompt_tokens < CHUNK]
    assert estimates.output_s(1) <= (newest[-1] if newest else 0.0)


@pytest.mark.parametrize("is_waited", [True, False])
def test_times_without_waiting_requests_do_not_count_for_the_pace_of_the_queue(is_waited: bool) -> None:
    estimates = TimeEstimates(CHUNK)
    for number in range(100):
        estimates.note_admission(60.0 * number, has_next=is_waited)
    assert (estimates.queue_s(1) > 20) is is_waited
