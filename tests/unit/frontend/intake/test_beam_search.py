"""Beam search over a table of probabilities, compared with a search through all outputs."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from aioengine.frontend.intake.beam_search import BeamSearch, search_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NUM_TOKENS = 5
STOP = 0


def logprobs_of(seed: int, token_ids: tuple[int, ...]) -> list[float]:
    """Return the logprob of each token after these."""
    rng = random.Random(repr((seed, token_ids)))
    weights = [rng.random() ** 2 + 1e-3 for _ in range(NUM_TOKENS)]
    return [math.log(weight / sum(weights)) for weight in weights]


def searched(seed: int, **options: Any) -> list[tuple[float, list[int]]]:
    search = BeamSearch(**{"stop_ids": frozenset([STOP]), "min_new_tokens": 0, **options})
    while search.live:
        tops = [enumerate(logprobs_of(seed, tuple(beam.token_ids))) for beam in search.live]
        best = [sorted(((logprob, token) for token, logprob in top), reverse=True) for top in tops]
        search.extend([top[: search.num_wanted] for top in best])
    return [(beam.score, beam.token_ids) for beam in search.ended]


def all_outputs(seed: int, length: int, penalty: float, min_new_tokens: int) -> list[tuple[float, list[int]]]:
    """Return all outputs with their scores, best first."""
    results = []
    for size in range(1, length + 1):
        for token_ids in product(range(NUM_TOKENS), repeat=size):
            is_stopped = token_ids[-1] == STOP and size > min_new_tokens
            if (
                STOP in token_ids[:-1]
                or (size < length and not is_stopped)
                or (token_ids[-1] == STOP and not is_stopped)
            ):
                continue
            total = sum(logprobs_of(seed, token_ids[:i])[token] for i, token in enumerate(token_ids))
            results.append((total / size**penalty, list(token_ids)))
    return sorted(results, reverse=True)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("min_new_tokens", [0, 2])
def test_wide_search_returns_the_best_of_all_outputs(seed: int, penalty: float, min_new_tokens: int) -> None:
    width = NUM_TOKENS**3
    actual = searched(seed, width=width, max_new_tokens=4, length_penalty=penalty, min_new_tokens=min_new_tokens)
    expected = all_outputs(seed, 4, penalty, min_new_tokens)
    assert [token_ids for _, token_ids in actual] == [token_ids for _, token_ids in expected[:width]]
    assert [score for score, _ in actual] == pytest.approx([score for score, _ in expected[:width]])


def test_one_beam_is_greedy_decoding() -> None:
    [(score, token_ids)] = searched(1, width=1, max_new_tokens=6, length_penalty=0.0, stop_ids=[])
    expected: list[int] = []
    total = 0.0
    for _ in range(6):
        logprobs = logprobs_of(1, tuple(expected))
        total += max(logprobs)
        expected.append(logprobs.index(max(logprobs)))
    assert (score, token_ids) == (pytest.approx(total), expected)


def test_tokens_with_probability_zero_are_in_no_beam() -> None:
    search = BeamSearch(width=2, max_new_tokens=2, length_penalty=1.0, stop_ids=frozenset(), min_new_tokens=0)
    search.extend([[(-0.1, 1), (-math.inf, 2)]])
    assert [beam.token_ids for beam in search.live] == [[1]]


@pytest.mark.parametrize(
    ("arguments", "sampling", "error", "message"),
    [
        ({"beam_width": 0}, {}, ValueError, "beam_width must be an integer from 1 to 256, got 0"),
        ({"beam_width": 1.5}, {}, TypeError, "beam_width"),
        ({"max_new_tokens": 0}, {}, ValueError, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"length_penalty": math.nan}, {}, ValueError, "length_penalty"),
        ({}, {"top_p": 0.5}, ValueError, "beam_search takes no 'top_p', got 0.5; it takes stop_token_ids"),
        ({}, {"n": 2}, ValueError, "beam_search takes no 'n'"),
        ({}, {"logit_bias": {5: 1.0}}, ValueError, "takes 'logit_bias' only if .* logprobs_mode='processed'"),
        ({}, {"stop_token_ids": "x"}, TypeError, "stop_token_ids"),
        (
            {},
            {"beams": 3},
            TypeError,
            "unexpected argument 'beams': beam_search takes prompt, beam_width",
        ),
        ({}, {"timeout": 3}, TypeError, "unexpected argument 'timeout': beam_search takes"),
        ({}, {"beam_widht": 3}, TypeError, "unexpected argument 'beam_widht' .did you mean 'beam_width'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: dict[str, Any], sampling: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"beam_width": 4, "max_new_tokens": 8, "length_penalty": 1.0, **arguments}
    with pytest.raises(error, match=message):
        search_options(*given.values(), sampling, mode="raw")


@pytest.mark.parametrize(("stops", "most"), [([STOP], 201), (range(1000, 2000), 300)])
def test_only_top_tokens_that_can_be_in_a_beam_are_read(stops: Sequence[int], most: int) -> None:
    search = BeamSearch(width=100, max_new_tokens=8, length_penalty=1.0, stop_ids=frozenset(stops), min_new_tokens=0)
    assert search.num_wanted == 100 + len(stops)
    num_read = 0

    def tokens() -> Iterator[tuple[float, int]]:
        nonlocal num_read
        for place in range(search.num_wanted):
            num_read += 1
            yield -1.0 - place, 1 + place

    search.extend([tokens()])
    num_read = 0
    search.extend([tokens() for _ in search.live])
    assert len(search.live) == 100
    assert num_read <= most


def test_the_sampling_defaults_of_the_model_do_not_change_a_search() -> None:
    step = search_options(4, 8, 1.0, {}, mode="processed").step
    assert (step["temperature"], step["repetition_penalty"]) == (0, 1.0)
    given = {"temperature": 0.5, "repetition_penalty": 1.2}
    step = search_options(4, 8, 1.0, given, mode="processed").step
    assert (step["temperature"], step["repetition_penalty"]) == (0.5, 1.2)
