"""Beam search with plain requests: each step sends one request per beam, for one token with its top logprobs.

The prefix cache has the prefixes of the beams, so little of each request is computed. The score of an ended beam is the
sum of its logprobs divided by ``length ** length_penalty``. The search ends when ``beam_width`` beams have ended and no
live beam can reach a better score than the worst of them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

from msgspec import Struct, field

from aioengine.api import checks
from aioengine.api.answers import Answer, BatchOutput, FinishReason
from aioengine.api.foreign_names import our_way
from aioengine.api.params import SamplingParams, is_sampling_parameter, output_limit, stop_ids
from aioengine.errors import RequestError
from aioengine.frontend.engine_parts import EngineParts
from aioengine.text.detokenizer import NUM_CONTEXT_TOKENS, make_detokenizer

MAX_BEAMS: Final = 256
MAX_LENGTH_PENALTY: Final = 10.0

ALWAYS: Final = ("stop_token_ids", "ignore_eos", "min_new_tokens", "skip_special_tokens")
"""Sampling parameters of a search."""

IF_PROCESSED: Final = ("temperature", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words")
"""Sampling parameters of a search with ``logprobs_mode="processed"``: they change the scores."""

PROMPT: Final = "one prompt, a string or a list of token ids"
OWN: Final = ("prompt", "beam_width", "max_new_tokens", "length_penalty")
_TAKEN: Final = f"{', '.join(ALWAYS)}, and with logprobs_mode='processed' {', '.join(IF_PROCESSED)}"


class Beam(NamedTuple):
    """A beam that continues: its output tokens, and the sum of their log-probabilities."""

    token_ids: list[int]
    logprob: float


class EndedBeam(NamedTuple):
    """An ended beam. ``matched``: the stop token that ended it; None: it has the maximum length."""

    score: float
    token_ids: list[int]
    matched: int | None


class BeamSearch(Struct, kw_only=True):
    """The beams of one search, without the model.

    Attributes:
        live: the beams that continue, best first. ended: the best ended beams, best first.
    """

    width: int
    max_new_tokens: int
    length_penalty: float
    stop_ids: frozenset[int]
    min_new_tokens: int
    live: list[Beam] = field(default_factory=lambda: [Beam([], 0.0)])
    ended: list[EndedBeam] = []

    @property
    def num_wanted(self) -> int:
        """Number of top tokens that are needed per beam. If all stop tokens are among them, enough others remain."""
        return self.width + len(self.stop_ids)

    def extend(self, likeliest: Iterable[Iterable[tuple[float, int]]]) -> None:
        """Extend each beam of ``live`` with its top tokens (logprob, id), best first.

        If scores are equal, the first beam is better.
        """
        num_output = len(self.live[0].token_ids) + 1
        best = heapq.merge(*map(self._candidates, self.live, likeliest), key=lambda candidate: -candidate[0])
        self.live = []
        for rank, (logprob, beam, token_id) in enumerate(best):
            if rank >= self.width and len(self.live) == self.width:
                break
            token_ids = [*beam.token_ids, token_id]
            if token_id in self.stop_ids:
                if rank < self.width:
                    self._end(token_ids, logprob, token_id)
            elif len(self.live) < self.width:
                self.live.append(Beam(token_ids, logprob))
        if num_output == self.max_new_tokens:
            for beam in self.live:
                self._end(beam.token_ids, beam.logprob, None)
            self.live = []
        elif self.live and len(self.ended) == self.width:
            longest = self.max_new_tokens if self.length_penalty > 0 else num_output
            if self.live[0].logprob / longest**self.length_penalty <= self.ended[-1].score:
                self.live = []  # none of them can become one of the best

    def _candidates(self, beam: Beam, tokens: Iterable[tuple[float, int]]) -> Iterator[tuple[float, Beam, int]]:
        can_stop = len(beam.token_ids) >= self.min_new_tokens
        for logprob, token_id in tokens:
            if logprob > -math.inf and (can_stop or token_id not in self.stop_ids):
                yield beam.logprob + logprob, beam, token_id

    def _end(self, token_ids: list[int], logprob: float, matched: int | None) -> None:
        self.ended.append(EndedBeam(logprob / len(token_ids) ** self.length_penalty, token_ids, matched))
        self.ended.sort(key=lambda beam: -beam.score)
        del self.ended[self.width :]


class SearchOptions(Struct, frozen=True):
    """The checked arguments of a search. ``step``: sampling parameters of its requests."""

    width: int
    length_penalty: float
    params: SamplingParams
    step: dict[str, object]


def search_options(
    beam_width: object, max_new_tokens: object, length_penalty: object, sampling: Mapping[str, object], *, mode: str
) -> SearchOptions:
    """Check the arguments of a search; ``mode``: ``logprobs_mode`` of the engine.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it and its value.
    """
    width = checks.whole("beam_width", beam_width, 1, MAX_BEAMS)
    length = checks.whole("max_new_tokens", max_new_tokens, 1)
    penalty = checks.number("length_penalty", length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    for name in sampling:
        if not is_sampling_parameter(name):
            hint = our_way(name) or checks.did_you_mean(name, (*OWN, *ALWAYS, *IF_PROCESSED))
            known = f"beam_search takes {', '.join(OWN)}, {_TAKEN}"
            raise TypeError(f"unexpected argument {checks.shown(name)}{hint}: {known}")
    params = SamplingParams.parse({**sampling, "max_new_tokens": length})
    set_params = {name: value for name, value in sampling.items() if value is not None}
    own = SamplingParams.__table__.by_own_names(set_params)
    for name in own:
        if name not in (*ALWAYS, *IF_PROCESSED):
            raise ValueError(f"beam_search takes no {name!r}, got {checks.shown(own[name])}; it takes {_TAKEN}")
        if name in IF_PROCESSED and mode != "processed":
            raise ValueError(f"beam_search takes {name!r} only if the engine has logprobs_mode='processed'")
    # without the model's sampling defaults: a repetition penalty would change the scores
    step: dict[str, object] = {"temperature": 0, "repetition_penalty": 1.0}
    step |= {name: own[name] for name in IF_PROCESSED if name in own}
    return SearchOptions(width, penalty, params, {**step, "max_new_tokens": 1, "ignore_eos": True})


def _check_prompt(prompt: object) -> None:
    """Raise TypeError unless there is exactly one prompt. The first request checks its token ids."""
    is_list = isinstance(prompt, list | tuple)
    first = next(iter(cast("Sequence[object]", prompt)), 0) if is_list else 0
    if not (is_list or isinstance(prompt, str | checks.Array)) or isinstance(first, str | list | tuple):
        raise checks.wrong_type("prompt", PROMPT, prompt)


async def beam_search(
    generate: Callable[..., Awaitable[object]], parts: EngineParts, prompt: object, options: SearchOptions
) -> BatchOutput:
    """Return the answers of the best beams, best first. ``generate``: ``async_generate`` of the engine.

    Raises the errors of ``generate``, RequestTooLargeError if the longest beam would not fit, and RequestError if a
    step was aborted.
    """
    _check_prompt(prompt)
    started_at = time.monotonic()
    model, params = parts.settings.model, options.params
    search = BeamSearch(
        width=options.width,
        max_new_tokens=cast("int", params.max_new_tokens),
        length_penalty=options.length_penalty,
        stop_ids=frozenset(stop_ids(params, vocab_size=model.vocab_size, eos_token_ids=parts.eos_token_ids)),
        min_new_tokens=params.min_new_tokens,
    )
    ask = partial(
        generate,
        sampling_params=options.step,
        return_logprob=True,
        top_logprobs_num=min(search.num_wanted, model.vocab_size),
    )
    name = "prompt" if isinstance(prompt, str) else "input_ids"
    first = cast("Answer", await ask(**{name: prompt}, return_prompt_token_ids=True))
    if isinstance(first, list):  # of an array of two dimensions
        raise checks.wrong_type("prompt", PROMPT, prompt)
    prompt_ids = first.get("prompt_token_ids", [])
    output_limit(params, len(prompt_ids), context_length=model.context_length, max_total_tokens=parts.max_total_tokens)
    answers = [first]
    while True:
        search.extend([_likeliest(answer) for answer in answers])
        if not search.live:
            break
        answers = cast("list[Answer]", await ask(input_ids=[prompt_ids + beam.token_ids for beam in search.live]))
    total_s = time.monotonic() - started_at
    return BatchOutput(
        [_answer(parts, options, first, beam, index=index, total_s=total_s) for index, beam in enumerate(search.ended)]
    )


def _likeliest(answer: Answer) -> Iterator[tuple[float, int]]:
    info = answer["meta_info"]
    tops = info.get("output_top_logprobs")
    if not tops:
        raise RequestError("schedule", f"a step of its beams ended early: {dict(info['finish_reason'] or {})}")
    return ((-math.inf if logprob is None else logprob, token_id) for logprob, token_id, _ in tops[0])


def _answer(
    parts: EngineParts, options: SearchOptions, first: Answer, beam: EndedBeam, *, index: int, total_s: float
) -> Answer:
    """Return the dict of the beam at ``index``. ``total_s``: duration of the search."""
    info = cast("dict[str, Any]", first["meta_info"])
    kept = {key: value for key, value in info.items() if "logprobs" not in key}
    before = {name: info["timings"][name] for name in ("tokenize_s", "queue_s", "prefill_s")}
    reason = FinishReason(type="stop", matched=beam.matched)
    if beam.matched is None:
        reason = FinishReason(type="length", length=len(beam.token_ids))
    kept |= {
        "id": f"{info['id']}_{index}",
        "finish_reason": reason,
        "completion_tokens": len(beam.token_ids),
        "sequence_score": beam.score,
        "e2e_latency": total_s,
        "timings": {
            **info["timings"],
            "decode_s": max(0.0, total_s - sum(before.values())),
            "deliver_s": 0.0,
            "total_s": max(total_s, sum(before.values())),
        },
    }
    text = _text(parts, options.params, first.get("prompt_token_ids", []), beam)
    return cast("Answer", {"text": text, "output_ids": beam.token_ids, "meta_info": kept})


def _text(parts: EngineParts, params: SamplingParams, prompt_ids: list[int], beam: EndedBeam) -> str:
    """Return the text of a beam after its prompt, without the stop token; empty without a tokenizer."""
    if parts.tokenizer is None:
        return ""
    decode = partial(parts.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
    decoder = make_detokenizer(decode, prompt_ids[-NUM_CONTEXT_TOKENS:])
    return decoder.push(beam.token_ids if beam.matched is None else beam.token_ids[:-1]) + decoder.flush()
