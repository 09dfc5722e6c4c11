"""SamplingParams: what a caller may ask of one request, checked where it is made.

The pure functions below translate it into the parts of a ``Submit`` message, one for each process that has a say:
``sampling`` (the runner), ``limits`` (the scheduler) and ``text_rules`` (the detokenizer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar, cast

from msgspec import UNSET, Struct, StructMeta, UnsetType
from msgspec.structs import astuple, fields, force_setattr, replace

from aioengine import checks, sampling_values
from aioengine.errors import RequestTooLargeError, UnknownParameterError
from aioengine.foreign_names import our_way
from aioengine.protocol.messages import Limits, Sampling, TextRules

DEFAULT_MAX_NEW_TOKENS: Final = 128
MAX_SAMPLES: Final = 1024
SEED_MASK: Final = 2**63 - 1
GREEDY_BELOW: Final = 1e-6
"""Temperatures below this are greedy: dividing logits by less overflows, and means the same."""


class DefaultLength(int):
    """The ``max_new_tokens`` of a caller who gave none: reads as 128, and is clipped where 128 would not fit.

    An explicit value that does not fit is an error instead, hence a type of its own. There is one object of it, which
    copies and pickles give again: encoders leave out a field whose value is the default itself.
    """

    def __reduce__(self) -> str:
        return "_DEFAULT_LENGTH"


_DEFAULT_LENGTH: Final = DefaultLength(DEFAULT_MAX_NEW_TOKENS)

_UNCHANGING: Final = frozenset((int, float, bool, str, type(None), DefaultLength, UnsetType))
"""Types of values that make the same parameters each time."""

_WHOLE_NUMBERS: Final = "max_new_tokens", "min_new_tokens", "top_k", "n", "stream_interval", "sampling_seed"
_NUMBERS: Final = "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"

_LISTS: Final = "stop", "stop_regex", "stop_token_ids", "logit_bias"
"""Fields whose values may be lists or dicts, which can change."""

_COSTLY: Final = frozenset(("stop_token_ids", "logit_bias", "stop_regex"))
"""Fields whose checks may take long."""

_ALIASES: Final = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "include_stop_str_in_output": "no_stop_trim",
}

_NO_ALIASES: Final = (UNSET,) * len(_ALIASES)

_LATER: Final = {
    "json_schema": "structured output",
    "regex": "structured output",
    "ebnf": "structured output",
    "structural_tag": "structured output",
    "beam_width": "beam search",
    "custom_params": "custom logits processors",
    "watermark": "watermarking",
}


Params = TypeVar("Params")


class _ByAnyName(StructMeta):
    """Makes an object of fields that may have another engine's names; one that does not exist is named, with a hint."""

    def __call__(cls: type[Params], *positional: object, **given: object) -> Params:
        if positional:
            raise TypeError(f"{cls.__name__} takes keywords alone; a dict may be given in its place, or to parse()")
        made: Params = super().__call__(**_known_fields(given))  # type: ignore[misc]
        return made


if TYPE_CHECKING:
    TokenIds = Sequence[int | None] | Sequence[int] | Set[int] | checks.Array
    TokenBiases = Mapping[int, float] | Mapping[str, float]
else:  # what may stand in JSON and other encodings
    TokenIds = list[int | None]
    TokenBiases = dict[int, float]


class SamplingParams(
    Struct,
    metaclass=_ByAnyName,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    repr_omit_defaults=True,
):
    """How to generate. Every value is checked when the object is made; a wrong one raises ValueError or TypeError.

    max_new_tokens: output tokens at most. None: to the end of the context. Left out: 128, or less where the context
        is nearly full; an explicit value that does not fit is refused with ``RequestTooLargeError``.
    min_new_tokens: no stop token before so many output tokens (stop strings still act).
    stop: one string or up to 32 (empty ones are left out); the text ends before the first that appears.
    stop_token_ids: ids that end the request, beside the model's own end-of-text ids.
    stop_regex: one pattern or up to 32 (of at most 256 bytes each), in the dialect of the ``regex`` package, without
        recursion and fuzzy matching; counted repetitions, nested ones multiplied, up to 10,000. Matching may take 50 ms
        for a token, and 1 s and 1 ms per token for a request, which fails with ``RequestError`` beyond.
    temperature: 0 (greedy) to 2; 1 where left out.
    top_p: above 0, up to 1. top_k: -1 (off) or at least 1. min_p: 0 to 1, relative to the likeliest token.
    frequency_penalty, presence_penalty: -2 to 2, over the output. repetition_penalty: above 0, up to 2, over prompt
        and output.
    n: answers to one prompt; answer i uses seed + i.
    ignore_eos: neither the model's end-of-text ids nor ``stop_token_ids`` end the request.
    skip_special_tokens: leave them out of the text. spaces_between_special_tokens: no effect, for text is exact.
    no_stop_trim: keep the stop string or stop token in the text.
    stream_interval: output tokens between two chunks of a stream; None: the engine's.
    logit_bias: token id -> number added to its logit; up to 4,096 entries.
    sampling_seed: the same seed gives the same tokens; None: one is drawn and reported.

    None stands for the default in every other field too. Token ids may be arrays, and ``stop_token_ids`` a set. A bias
    of -inf counts as -1e6, which rules the token out. Fields may also be given as ``seed``, ``max_tokens``,
    ``max_completion_tokens``, ``min_tokens``, ``stop_sequences``, ``stop_strings`` and ``include_stop_str_in_output``;
    they are read by their own names. ``msgspec`` encodes and decodes it, with these names, and leaves defaults out.
    """

    max_new_tokens: int | None = _DEFAULT_LENGTH
    min_new_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: TokenIds | None = None
    stop_regex: str | Sequence[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: TokenBiases | None = None
    sampling_seed: int | None = None
    max_tokens: int | UnsetType | None = UNSET
    max_completion_tokens: int | UnsetType | None = UNSET
    min_tokens: int | UnsetType = UNSET
    seed: int | UnsetType | None = UNSET
    stop_sequences: str | Sequence[str] | UnsetType | None = UNSET
    stop_strings: str | Sequence[str] | UnsetType | None = UNSET
    include_stop_str_in_output: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        values = astuple(self)
        if values[-len(_ALIASES) :] != _NO_ALIASES:
            _take_aliases(self)
            values = astuple(self)
        is_plain = _UNCHANGING.issuperset(map(type, values))
        if not is_plain:
            _keep_plain_numbers(self)
        _check_lengths(self)
        _check_numbers(self)
        _stops(self)
        _check_patterns(_patterns(self))
        if not is_plain or self.stop_token_ids is not None or self.logit_bias is not None:
            _keep_plain_lists(self)
        for name in ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"):
            checks.switch(name, _field(self, name))

    @classmethod
    def parse(cls, value: SamplingParams | Mapping[str, object] | None) -> SamplingParams:
        """Accept what callers write: an object, a dict of fields, or None for the defaults.

        What the caller may change later, a list or a dict in it, is copied: requests are made from it by and by.

        Raises:
            UnknownParameterError: a key that does not exist (a TypeError and a ValueError).
            TypeError, ValueError: a value of the wrong type, or outside its range.
        """
        if value is None:
            return cls()
        if isinstance(value, SamplingParams):
            lists = {name: entry for name in _LISTS if (entry := getattr(value, name)) is not None}
            return replace(value, **_copied(lists)) if lists else value
        if not isinstance(cast("object", value), Mapping):
            raise checks.wrong_type("sampling_params", "a SamplingParams, a dict or None", value)
        for key in value:
            if not isinstance(cast("object", key), str):
                raise _unknown(key)
        if _UNCHANGING.issuperset(map(type, value.values())):
            return _made_before(**value)
        return cls(**_copied(value))  # type: ignore[arg-type]  # __post_init__ checks every value

    @property
    def is_length_explicit(self) -> bool:
        """Whether ``max_new_tokens`` was given as a number."""
        return self.max_new_tokens is not None and not isinstance(self.max_new_tokens, DefaultLength)


# ---------------------------------------------------------------- to the wire


def output_limit(params: SamplingParams, num_prompt: int, *, context_length: int, max_total_tokens: int) -> int:
    """How many tokens this request may give, for a prompt of ``num_prompt`` tokens.

    ``max_total_tokens`` is the size of the KV pool. The default and None are clipped to what fits.

    Raises:
        RequestTooLargeError: the prompt leaves no room for a token, or an explicit ``max_new_tokens`` does not fit.
    """
    capacity = min(context_length, max_total_tokens)
    which = f"the context of {context_length} tokens"
    if max_total_tokens < context_length:
        which = f"the KV pool of {max_total_tokens} tokens (max_total_tokens)"
    if num_prompt >= capacity:
        raise RequestTooLargeError(f"the prompt has {num_prompt} tokens and leaves no room in {which}")
    room = capacity - num_prompt
    if params.max_new_tokens is None:
        return room
    if params.is_length_explicit and params.max_new_tokens > room:
        raise RequestTooLargeError(
            f"max_new_tokens={params.max_new_tokens} with a prompt of {num_prompt} tokens does not fit {which}; "
            f"at most {room} fit"
        )
    return min(int(params.max_new_tokens), room)


def sampling(params: SamplingParams, *, seed: int, vocab_size: int, eos_token_ids: Sequence[int]) -> Sampling:
    """The runner's part. ``seed`` is the caller's or a drawn one, plus the index of the answer.

    Raises ValueError for ids outside the vocabulary.
    """
    biases = sampling_values.biases(params.logit_bias)
    _check_vocabulary("logit_bias", biases, vocab_size)
    stops = stop_ids(params, vocab_size=vocab_size, eos_token_ids=eos_token_ids) if params.min_new_tokens else ()
    if params.min_new_tokens and len(stops) >= vocab_size:
        raise ValueError(
            f"min_new_tokens={params.min_new_tokens} cannot be kept: all {vocab_size} tokens of the vocabulary are "
            "stop tokens (stop_token_ids and the model's end-of-text ids)"
        )
    return Sampling(
        seed=seed & SEED_MASK,
        temperature=0.0 if params.temperature < GREEDY_BELOW else float(params.temperature),
        top_p=float(params.top_p),
        top_k=int(params.top_k),
        min_p=float(params.min_p),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        repetition_penalty=float(params.repetition_penalty),
        bias_token_ids=tuple(biases),
        logit_bias=tuple(biases.values()),
        min_new_tokens=int(params.min_new_tokens),
        suppressed_token_ids=stops,
    )


def limits(
    params: SamplingParams,
    *,
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...],
    deadline: float | None = None,
    queue_deadline: float | None = None,
    first_token_deadline: float | None = None,
    refuses_late: bool = False,
) -> Limits:
    """The scheduler's part. ``max_new_tokens`` from ``output_limit``, ``stop_token_ids`` from ``stop_ids``."""
    return Limits(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(int(params.min_new_tokens), max_new_tokens),
        stop_token_ids=stop_token_ids,
        deadline=deadline,
        queue_deadline=queue_deadline,
        first_token_deadline=first_token_deadline,
        refuses_late=refuses_late,
    )


def text_rules(
    params: SamplingParams, *, context_token_ids: Sequence[int], stream: bool, stream_interval: int
) -> TextRules:
    """The detokenizer's part: the last few ids of the prompt, and the engine's interval for callers who give none."""
    return TextRules(
        context_token_ids=tuple(context_token_ids),
        stop=_stops(params),
        stop_regex=_patterns(params),
        no_stop_trim=params.no_stop_trim,
        skip_special_tokens=params.skip_special_tokens,
        stream=stream,
        stream_interval=stream_interval if params.stream_interval is None else int(params.stream_interval),
    )


def stop_ids(params: SamplingParams, *, vocab_size: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids that end the request: the model's and the caller's, or none at all with ``ignore_eos``.

    Raises ValueError for ids outside the vocabulary.
    """
    own = sampling_values.token_ids(params.stop_token_ids)
    _check_vocabulary("stop_token_ids", own, vocab_size)
    return () if params.ignore_eos else tuple(dict.fromkeys((*eos_token_ids, *own)))


def check_together(entries: Sequence[object]) -> None:
    """Refuse parameters of one call that take too long to look at together: one call does it without a pause.

    Raises:
        ValueError: they have too many stop token ids, biases or patterns.
    """
    costly = {id(entry): entry for entry in entries if _is_costly(entry)}
    num_ids = 0
    patterns: dict[str, None] = {}
    for entry in costly.values():
        ids, biases, given = (_given(entry, name) for name in ("stop_token_ids", "logit_bias", "stop_regex"))
        num_ids += checks.num_items(ids) + checks.num_items(biases)
        if isinstance(given, str) and not isinstance(entry, SamplingParams):  # which was checked when it was made
            patterns[given] = None
        elif isinstance(given, list | tuple):
            patterns.update((each, None) for each in cast("Sequence[object]", given) if isinstance(each, str))
    if num_ids > sampling_values.MAX_ENTRIES_OF_CALL:
        raise ValueError(
            f"the sampling_params of one call have {num_ids} stop_token_ids and logit_bias entries together; at most "
            f"{sampling_values.MAX_ENTRIES_OF_CALL} are allowed; give rows that share them the same object, or make "
            "several calls"
        )
    if patterns:
        from aioengine.patterns import check_patterns_of_call  # slow to import, and most programs give no pattern

        check_patterns_of_call(patterns)


@lru_cache(maxsize=64, typed=True)
def _made_before(**fields: object) -> SamplingParams:
    """The same object for the same fields, whose values cannot change: many requests are made alike."""
    return SamplingParams(**fields)  # type: ignore[arg-type]  # __post_init__ checks every value


def _copied(fields: Mapping[str, object]) -> dict[str, object]:
    """The same values, lists and dicts as copies."""
    copies = dict(fields)
    for name, value in fields.items():
        if isinstance(value, list):
            copies[name] = list(cast("list[object]", value))
        elif isinstance(value, Mapping):
            copies[name] = dict(cast("Mapping[object, object]", value))
    return copies


def _take_aliases(params: SamplingParams) -> None:
    """What was decoded under other names goes to the fields' own."""
    for alias, name in _ALIASES.items():
        value = _field(params, alias)
        if value is UNSET:
            continue
        if _field(params, name) is not _DEFAULTS[name]:
            raise _given_twice(name, (alias, name))
        force_setattr(params, alias, UNSET)
        force_setattr(params, name, value)


def _keep_plain_numbers(params: SamplingParams) -> None:
    """Keep plain numbers, whatever kind of number was given: they can be compared, encoded and sent.

    What is no number, or not of the kind that the field has, stays for the checks to refuse.
    """
    for name in (*_WHOLE_NUMBERS, *_NUMBERS):
        value = checks.plain(_field(params, name))
        if type(value) not in _UNCHANGING:
            with suppress(TypeError, ValueError, OverflowError):
                value = sampling_values.plain_number(value, is_whole=name in _WHOLE_NUMBERS)
        force_setattr(params, name, value)


def _keep_plain_lists(params: SamplingParams) -> None:
    """Keep lists and dicts of plain values, whatever holds them and whatever kind they are."""
    for name in ("stop", "stop_regex"):
        force_setattr(params, name, sampling_values.kept_strings(name, _field(params, name)))
    ids, biases = list(sampling_values.token_ids(params.stop_token_ids)), sampling_values.biases(params.logit_bias)
    if params.stop_token_ids is not None and not sampling_values.is_plain_copy(params.stop_token_ids, ids):
        force_setattr(params, "stop_token_ids", ids)
    if params.logit_bias is not None and not sampling_values.is_plain_copy(params.logit_bias, biases):
        force_setattr(params, "logit_bias", biases)


_DEFAULTS: Final[dict[str, object]] = {field.name: field.default for field in fields(SamplingParams)}


def is_sampling_parameter(name: str) -> bool:
    """Whether ``sampling_params`` may have this key, by its own name or by another engine's."""
    return name in SamplingParams.__struct_fields__ or name in _ALIASES


# ---------------------------------------------------------------- checks


def _known_fields(given: Mapping[str, object]) -> dict[str, object]:
    """The given values by field name. A None that stands for the default is left out."""
    fields: dict[str, object] = {}
    for key, value in given.items():
        name = _ALIASES.get(key, key)
        if name in _LATER and (value is None or (isinstance(value, str | dict) and not value)):
            continue  # switched off, as it is anyway
        if value is UNSET:
            continue  # a copy is made
        if name not in SamplingParams.__struct_fields__:
            raise _unknown(key)
        if name in fields:
            raise _given_twice(name, [key for key in given if _ALIASES.get(key, key) == name])
        fields[name] = value
    return {name: value for name, value in fields.items() if value is not None or name == "max_new_tokens"}


def _given_twice(name: str, spellings: Sequence[str]) -> ValueError:
    return ValueError(f"sampling parameter {name!r} is given twice, as {' and '.join(map(repr, spellings))}")


def _unknown(key: object) -> UnknownParameterError:
    if isinstance(key, str) and key in _LATER:
        return UnknownParameterError(f"sampling parameter {key!r} is not supported yet ({_LATER[key]})")
    known = (*SamplingParams.__struct_fields__, *_ALIASES)
    hint = (our_way(key) or checks.did_you_mean(key, known)) if isinstance(key, str) else ""
    return UnknownParameterError(f"unknown sampling parameter {checks.shown(key)}{hint}")


def _is_costly(entry: object) -> bool:
    if isinstance(entry, Mapping):
        return not _COSTLY.isdisjoint(cast("Mapping[object, object]", entry))
    return isinstance(entry, SamplingParams)


def _given(entry: object, name: str) -> object:
    if isinstance(entry, Mapping):
        return cast("Mapping[str, object]", entry).get(name)
    return _field(entry, name) if isinstance(entry, SamplingParams) else None


def _field(params: SamplingParams, name: str) -> object:
    value: object = getattr(params, name)
    return value


def _check_lengths(params: SamplingParams) -> None:
    longest = checks.MAX_COUNT
    if params.max_new_tokens is not None:
        longest = checks.whole("max_new_tokens", params.max_new_tokens, 0)
    if checks.whole("min_new_tokens", params.min_new_tokens, 0) > longest:
        raise checks.wrong_value("min_new_tokens", f"at most max_new_tokens ({longest})", params.min_new_tokens)
    if checks.whole("top_k", params.top_k, -1) == 0:
        raise checks.wrong_value("top_k", "-1 (off) or an integer of at least 1", 0)
    checks.whole("n", params.n, 1, MAX_SAMPLES)
    if params.stream_interval is not None:
        checks.whole("stream_interval", params.stream_interval, 1)
    if params.sampling_seed is not None:
        checks.whole("sampling_seed", params.sampling_seed, -(2**63), 2**63 - 1)


def _check_numbers(params: SamplingParams) -> None:
    checks.number("temperature", params.temperature, 0, 2)
    checks.number("top_p", params.top_p, 0, 1, above=True)
    checks.number("min_p", params.min_p, 0, 1)
    checks.number("frequency_penalty", params.frequency_penalty, -2, 2)
    checks.number("presence_penalty", params.presence_penalty, -2, 2)
    checks.number("repetition_penalty", params.repetition_penalty, 0, 2, above=True)


def _stops(params: SamplingParams) -> tuple[str, ...]:
    """The stop strings, without empty ones."""
    return tuple(filter(None, sampling_values.strings("stop", params.stop, sampling_values.MAX_STOP_BYTES)))


def _patterns(params: SamplingParams) -> tuple[str, ...]:
    return sampling_values.strings("stop_regex", params.stop_regex, checks.MAX_PATTERN_BYTES)


def _check_patterns(patterns: tuple[str, ...]) -> None:
    if patterns:
        from aioengine.patterns import check_patterns  # slow to import, and most programs give no pattern

        check_patterns(patterns)


def _check_vocabulary(name: str, token_ids: Sequence[int] | Mapping[int, float], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        wrong = next(token_id for token_id in token_ids if token_id >= vocab_size)
        raise checks.wrong_value(name, f"token ids from 0 to {vocab_size - 1}", wrong)
