"""The proposer of n-grams against a brute-force reference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioengine.scheduler.ngrams import MAX_INDEXED, SIZES, NgramProposer

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def proposed(token_ids: list[int], count: int, first: int = 0) -> list[int]:
    """Return the proposal by definition: the tokens after the latest earlier occurrence of the last tokens."""
    for size in SIZES:
        last = token_ids[-size:]
        for end in range(len(token_ids) - 1, first + size - 1, -1):
            if len(token_ids) - size >= first and token_ids[end - size : end] == last:
                copied = list(token_ids)
                for index in range(count):
                    copied.append(copied[end + index])
                return copied[len(token_ids) :]
    return []


@given(parts=st.lists(TOKENS, min_size=1, max_size=6), count=st.integers(1, 15), first=st.integers(0, 12))
def test_proposals_follow_the_latest_occurrence_of_the_longest_ngram(
    parts: list[list[int]], count: int, first: int
) -> None:
    proposer, token_ids = NgramProposer([], first=first), list[int]()
    for part in parts:  # the index is brought up to date between proposals
        proposer.token_ids += part
        token_ids += part
        assert proposer.propose(count)[1] == proposed(token_ids, count, first)


@given(token_ids=TOKENS)
def test_each_token_is_indexed_once_in_any_order_of_calls(token_ids: list[int]) -> None:
    at_once, step_by_step = NgramProposer(list(token_ids)), NgramProposer([])
    for token_id in token_ids:
        step_by_step.token_ids.append(token_id)
        step_by_step.propose(1)
    at_once.propose(1)
    assert at_once._ends == step_by_step._ends


def test_a_period_is_repeated() -> None:
    assert NgramProposer([9, 1, 2, 3, 1, 2, 3]).propose(7) == (3, [1, 2, 3, 1, 2, 3, 1])
    assert NgramProposer([7, 7, 7, 7]).propose(3) == (7, [7, 7, 7])


def test_long_prompts_are_indexed_in_parts() -> None:
    token_ids = [*range(3 * MAX_INDEXED)]
    early, late = (NgramProposer([*token_ids, *token_ids[end - 6 : end]]) for end in (MAX_INDEXED - 1, len(token_ids)))
    assert early.propose(2)[1] == [MAX_INDEXED - 1, MAX_INDEXED]
    assert [bool(late.propose(2)[1]) for _ in range(4)] == [False, False, False, True]


def test_texts_that_repeat_nothing_get_no_proposals() -> None:
    for token_ids in ([*range(100)], list[int]()):
        assert NgramProposer(token_ids).propose(3) == (-1, [])


@given(token_ids=TOKENS, in_flight=st.lists(st.integers(0, 2), max_size=4), count=st.integers(1, 5))
def test_proposals_follow_the_tokens_expected_in_flight(token_ids: list[int], in_flight: list[int], count: int) -> None:
    followed = proposed(token_ids, len(in_flight) + 1 + count)
    num_expected = 0 if not followed else max(n for n in range(len(in_flight) + 1) if in_flight[:n] == followed[:n])
    newest, *drafts = followed[num_expected : num_expected + 1 + count] or [-1]
    assert NgramProposer(token_ids).propose(count, in_flight) == (newest, drafts)


def test_wrong_drafts_in_flight_are_expected_to_be_rejected() -> None:
    proposer = NgramProposer([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    assert proposer.propose(2, []) == (4, [5, 6])
    assert proposer.propose(2, [4, 5]) == (6, [7, 8])
    assert proposer.propose(2, [4, 9, 9]) == (5, [6, 7])
