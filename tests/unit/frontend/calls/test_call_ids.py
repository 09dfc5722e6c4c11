"""Ids of open calls: when they are in use and when they are free."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from aioengine.frontend.calls.call_ids import CallIds
from aioengine.frontend.intake.requests import generate_request
from tests.kit.calls import call_of

if TYPE_CHECKING:
    from aioengine.frontend.calls.call import Call


def open_call(ids: CallIds, prompt: object, **options: object) -> Call:
    params = options.pop("sampling_params", None)
    call = call_of(generate_request(prompt, params, None, stream=True, options=options))
    ids.add(call)
    return call


@pytest.fixture
def ids() -> CallIds:
    return CallIds()


def test_an_id_is_free_as_soon_as_its_call_is_over(ids: CallIds) -> None:
    first = open_call(ids, ["a", "b"], rid="x")
    first.is_over = True
    second = open_call(ids, "c", rid="x_1")
    ids.free(first)
    owner = ids.find("x_1")
    assert owner is not None
    assert owner[0] is second
    assert ids.find("x") is None


def test_id_stays_that_of_its_call_if_a_row_of_a_batch_has_the_same_id(ids: CallIds) -> None:
    first = open_call(ids, "c", rid="x_1")
    second = open_call(ids, ["a", "b"], rid="x")
    for owner in (first, second):
        entry = ids.find("x_1")
        assert entry is not None
        assert entry[0] is owner
        ids.free(owner)


def test_lookups_to_open_a_call_do_not_depend_on_the_number_of_open_calls(
    ids: CallIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a call must not depend on the number of other calls."""
    num_looked_up = 0
    plain = CallIds.find

    def counting(ids: CallIds, rid: str) -> tuple[Call, range] | None:
        nonlocal num_looked_up
        num_looked_up += 1
        return plain(ids, rid)

    monkeypatch.setattr(CallIds, "find", counting)
    opened = [open_call(ids, ["a", "b"], rid=f"x{number}") for number in range(200)]
    opened += [open_call(ids, "a", rid=f"x{number}_{number}_7") for number in range(2, 200)]
    assert num_looked_up < 4 * len(opened)
    with pytest.raises(ValueError, match="'x3_3_7' is in use"):
        open_call(ids, "a", rid="x3_3_7")
    for call in opened:
        ids.free(call)
    assert ids._owners == {}  # pyright: ignore[reportPrivateUsage]


def test_id_of_an_attachable_call_stays_in_use(ids: CallIds) -> None:
    first = open_call(ids, "a", rid="x", resume_ttl=1)
    first.leave()
    with pytest.raises(ValueError, match="'x' is in use"):
        open_call(ids, "b", rid="x")


def test_an_id_with_numbers_at_its_end_finds_the_rows_of_a_batch(ids: CallIds) -> None:
    open_call(ids, ["a", "b"], rid="x", sampling_params={"n": 2})
    open_call(ids, "c", rid="x_9_y")
    rows = {rid: list(owner[1]) for rid in ("x", "x_1", "x_1_0", "x_9_y") if (owner := ids.find(rid)) is not None}
    assert rows == {"x": [0, 1, 2, 3], "x_1": [2, 3], "x_1_0": [2], "x_9_y": [0]}
    for odd in (
        "",
        "_",
        "_" * 3000,
        "x_" + "1" * 5000,
        "x_" + "_1" * 5000,
        "x_1_0_0",
        "x_01",
        "x_9",
        "x_1_٣",
        "\ud800",
    ):
        assert ids.find(odd) is None


def _word_of_state(output: int) -> int:
    """Return the word in the state of a Mersenne Twister (the generator of ``random``) for one of its outputs."""
    word = output ^ output >> 18
    word ^= word << 15 & 0xEFC60000
    state = word
    for _ in range(4):
        state = word ^ state << 7 & 0x9D2C5680
    word = state
    for _ in range(2):
        state = word ^ state >> 11
    return state & 0xFFFFFFFF


def test_random_ids_cannot_be_predicted_from_earlier_ones(ids: CallIds) -> None:
    """With such an id, a client could abort or read requests of other clients."""
    drawn = [int(open_call(ids, "a").rid, 16) for _ in range(624 // 4)]
    state = [_word_of_state(number >> shift & 0xFFFFFFFF) for number in drawn for shift in (0, 32, 64, 96)]
    guess = random.Random()
    guess.setstate((3, (*state, 624), None))
    assert open_call(ids, "a").rid != f"{guess.getrandbits(128):032x}"
