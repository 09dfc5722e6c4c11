"""SamplingParams: the parameters of a request. They are checked and normalized when the object is created.

Each field of ``SamplingParams`` is a row (``parameter_table.Parameter``) with its default, check, message fields, flag
and documentation. The functions below the class return the parts of a ``Submit`` message: ``sampling`` for the runner,
``output_limit`` and ``stop_ids`` for the scheduler, ``text_rules`` for the detokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from itertools import compress
from operator import is_, is_not
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import astuple, force_setattr, replace

from aioengine.api import checks
from aioengine.api import parameter_table as table
from aioengine.api.checks import whole_from
from aioengine.api.parameter_table import number, other_name, parameter
from aioengine.errors import RequestTooLargeError
from aioengine.protocol.messages import Limits, Sampling, TextRules

Tokenize = Callable[[Sequence[str]], list[list[int]]]
"""Converts texts to lists of token ids."""

DEFAULT_MAX_NEW_TOKENS: Final = 128
MAX_SAMPLES: Final = 1024
_DRAWN_SEED_BITS: Final = 52
"""Bits of a random seed. All samples of a request then have seeds below 2**53, which JavaScript represents exactly."""
MIN_REPETITION_PENALTY: Final = 0.01
"""Logits are divided by it. A much smaller value would overflow."""

_UNCHANGING: Final = frozenset((int, float, bool, str, type(None)))
"""Types of immutable values: parameters with only these can be cached."""

CONSTRAINTS: Final = frozenset(
    (
        "json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag",
        "whitespace", "reasoning_end", "max_thinking_tokens",
    )
)  # fmt: skip
"""Parameters that define the grammar of the output together."""

FROM_MODEL: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters whose defaults a model may set, in its generation_config.json."""

# ---------------------------------------------------------------- the parameters

if TYPE_CHECKING:
    Whole = int
    Number = float
    Switch = bool
    TokenIds = Sequence[int | None] | Sequence[int] | Set[int] | checks.Array
    TokenBiases = Mapping[int, float] | Mapping[str, float]
    Json = Mapping[str, object]
    JsonSchema = str | Mapping[str, object] | type | None
    Tag = str | Mapping[str, object] | None
    ReasoningEnd = str | Sequence[int] | None
else:  # msgspec decodes these types; null is the default
    Whole = int | None
    Number = float | None
    Switch = bool | None
    TokenIds = list[int | None]
    TokenBiases = dict[int, float]
    Json = dict[str, Any]
    JsonSchema = Tag = str | dict[str, object] | None
    ReasoningEnd = str | list[int] | None


class SamplingParams(
    Struct,
    metaclass=table.ParametersType,
    frozen=True,
    kw_only=True,
    dict=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    repr_omit_defaults=True,
):
    """The parameters of a generation. The constructor checks every value, and raises ValueError or TypeError.

    Values are kept as plain Python objects. Lists and dicts are copied, so that later changes have no effect. Lists of
    token ids may also be arrays, ``stop_token_ids`` and ``allowed_token_ids`` also sets. None means the default, except
    for ``max_new_tokens``. A model may set other defaults (``sampling_defaults`` of the engine). ``msgspec`` encodes it
    without defaults, and decodes null to the default.
    """

    max_new_tokens: int | None = parameter(
        table.DefaultInt(DEFAULT_MAX_NEW_TOKENS),
        table.length,
        "maximum output tokens. Left out: 128, or fewer if the context is nearly full. None: to the end of the "
        "context. A number that does not fit raises `RequestTooLargeError`",
        read=int,
        takes_none=True,
    )
    min_new_tokens: Whole = parameter(
        0,
        whole_from(0),
        "no stop token before this many output tokens; stop strings still apply",
        wire="limits sampling",
        read=int,
    )
    stop: str | Sequence[str] | None = parameter(
        None,
        table.strings,
        "text that ends the answer and is removed. A string, or a list of up to 32; empty strings are ignored",
        wire="text",
        columns=table.strings_column,
        read=str,
        is_list=True,
    )
    stop_token_ids: TokenIds | None = parameter(
        None,
        table.token_ids,
        "token ids that end the answer, in addition to the model's own",
        wire="limits",
        columns=table.token_ids_column,
        read=int,
        is_list=True,
    )
    stop_regex: str | Sequence[str] | None = parameter(
        None,
        table.patterns,
        "pattern that ends the answer; its match is removed. A string, or a list of up to 32 (256 bytes each), in the "
        "syntax of the `regex` package, without recursion, fuzzy matching, `\\G`, `\\K` and the flags f, r, x and V1. "
        "The bytes of a pattern times all its counted repetitions `{m,n}` are limited to 50,000, for all patterns of a "
        "request together. Matching is limited to 20 ms per token, and to 0.1 s plus 1 ms per token for a request. "
        "A request that exceeds a limit fails with a `RequestError` of stage `stop_regex`",
        wire="text",
        columns=table.strings_column,
        read=str,
        is_list=True,
    )
    temperature: Number = number(
        1.0, 0, 2, "0 (always the most likely token) to 2. The default of the command line is 0"
    )
    top_p: Number = number(
        1.0,
        0,
        1,
        "above 0, up to 1: sample from the most likely tokens that together have this probability",
        above=True,
    )
    top_k: Whole = parameter(
        table.DefaultInt(-1),
        table.top_k,
        "sample from this many of the most likely tokens; -1 or 0: all",
        wire="sampling",
        read=int,
    )
    min_p: Number = number(
        0.0, 0, 1, "0 to 1: sample from tokens at least this probable, relative to the most likely one"
    )
    frequency_penalty: Number = number(
        0.0, -2, 2, "-2 to 2; above 0: lowers the logit of each token by its count in the answer"
    )
    presence_penalty: Number = number(0.0, -2, 2, "-2 to 2; above 0: lowers the logits of tokens in the answer")
    repetition_penalty: Number = number(
        1.0, MIN_REPETITION_PENALTY, 2, "0.01 to 2; above 1: lowers the logits of tokens in prompt and answer"
    )
    n: Whole = parameter(1, whole_from(1, MAX_SAMPLES), "answers per prompt, up to 1,024; answer i uses seed + i")
    ignore_eos: Switch = parameter(
        False, checks.switch, "neither the model's end-of-text token nor `stop_token_ids` end the answer", read=bool
    )
    skip_special_tokens: Switch = parameter(True, checks.switch, "leave special tokens out of the text", wire="text")
    spaces_between_special_tokens: Switch = parameter(True, checks.switch, "no effect: text is exact")
    no_stop_trim: Switch = parameter(
        False, checks.switch, "keep the stop string or stop token in the text", wire="text", read=bool
    )
    stream_interval: int | None = parameter(
        None, whole_from(1), "output tokens between two chunks; None: the engine's", wire="text"
    )
    logit_bias: TokenBiases | None = parameter(
        None,
        table.biases,
        "token id -> number added to its logit, for up to 4,096 tokens. -inf counts as -1e6, which excludes a token",
        wire="sampling.bias_token_ids sampling.logit_bias",
        columns=table.bias_columns,
    )
    allowed_token_ids: TokenIds | None = parameter(
        None,
        table.allowed_token_ids,
        "the only token ids that can be sampled, up to 65,536; None: all. Include the model's end-of-text token if the "
        "answer should end by itself",
        wire="sampling",
        columns=table.token_ids_column,
    )
    bad_words: Sequence[str] | None = parameter(
        None,
        table.words,
        "words to avoid, up to 256 of 256 bytes each. A word stands for two sequences of tokens: with and without a "
        "space before it. If prompt and output so far end with all tokens of a sequence but the last, the last one is "
        "not sampled. Other tokens can still spell the word",
    )
    custom_params: Json | None = parameter(
        None,
        table.json_object,
        "parameters for the `custom_logit_processor` of the request: a dict, up to 16,384 characters as JSON",
        wire="sampling",
        columns=table.json_column,
    )
    sampling_seed: int | None = parameter(
        None,
        whole_from(-(2**63), 2**63 - 1),
        "the same seed gives the same tokens; None: a random seed",
        read=int,
        flag="seed",
    )
    json_schema: JsonSchema = parameter(
        None,
        table.constraint("json_schema"),
        "the output is JSON that is valid under this schema: JSON text, a dict, a pydantic model, a msgspec Struct or "
        "a dataclass. A schema that cannot be enforced raises `UnsupportedSchemaError`",
    )
    json_object: Switch = parameter(False, checks.switch, "the output is any JSON object", read=bool)
    regex: str | None = parameter(
        None,
        table.constraint("regex"),
        "a Python regular expression that the output matches completely; without lookaround and backreferences",
        read=str,
    )
    ebnf: str | None = parameter(
        None, table.constraint("text"), "a grammar that the output matches completely, in GBNF or Lark syntax"
    )
    choice: Sequence[str] | None = parameter(
        None, table.constraint("choice"), "the output is one of these strings", read=str, is_list=True
    )
    structural_tag: Tag = parameter(
        None, table.constraint("structural_tag"), "free text with constrained parts: JSON text or a dict"
    )
    whitespace: str | None = parameter(
        None,
        table.constraint("whitespace"),
        'whitespace between JSON tokens: "flexible", or a pattern. None: at most one space or line break',
    )
    reasoning_end: ReasoningEnd = parameter(
        None, table.constraint("reasoning_end"), "text or token ids after which the constraint begins", read=str
    )
    max_thinking_tokens: int | None = parameter(
        None, whole_from(0), "maximum tokens before `reasoning_end`, which is then forced", read=int
    )
    max_tokens: int | UnsetType | None = other_name("max_new_tokens")
    max_completion_tokens: int | UnsetType | None = other_name("max_new_tokens")
    min_tokens: Whole | UnsetType = other_name("min_new_tokens")
    seed: int | UnsetType | None = other_name("sampling_seed")
    stop_sequences: str | Sequence[str] | UnsetType | None = other_name("stop")
    stop_strings: str | Sequence[str] | UnsetType | None = other_name("stop")
    include_stop_str_in_output: Switch | UnsetType = other_name("no_stop_trim")

    def __post_init__(self) -> None:
        """Check the values that are not defaults, convert them to plain values, and build the message parts once."""
        parameters = type(self).__table__
        changed = [*compress(parameters.fields, map(is_not, astuple(self), parameters.defaults))]
        if not parameters.aliases.keys().isdisjoint(changed):  # decoded: only the constructor replaces other names
            own = parameters.by_own_names({name: _field(self, name) for name in reversed(changed)})
            for name, value in (dict.fromkeys(parameters.aliases, UNSET) | own).items():
                force_setattr(self, name, value)
            changed = list(own)
        sampling, limits, text = parts = (dict[str, Any](), dict[str, Any](), dict[str, Any]())
        for name in changed:
            row, value = parameters.rows[name], _field(self, name)
            is_left_out = value is UNSET or (value is None and not row.takes_none)
            # the default of another object, whose type shows that the user has not set it
            is_copied = isinstance(value, table.DefaultInt | table.DefaultFloat) and value == row.default
            kept = row.default if is_left_out or is_copied else row.check(name, value)
            if kept == row.default and type(kept) is type(row.default):
                kept = row.default  # the same object: encoders and repr leave it out
            if kept is not value:
                force_setattr(self, name, kept)
            if kept is row.default:
                continue
            if row.columns is None:
                for part, field in parameters.wire[name]:
                    parts[part][field] = kept
            else:
                for (part, field), column in zip(parameters.wire[name], row.columns(kept), strict=True):
                    parts[part][field] = column
        if self.min_new_tokens and self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            allowed = f"at most max_new_tokens ({self.max_new_tokens})"
            raise checks.wrong_value("min_new_tokens", allowed, self.min_new_tokens)
        if not CONSTRAINTS.isdisjoint(changed):
            from aioengine.constraints.parameters import grammar_of  # slow to import, and most programs need none

            values = {name: _field(self, name) for name in CONSTRAINTS}
            sampling["grammar"] = grammar_of(values, ignore_eos=self.ignore_eos)
        message_parts = _ParamParts(
            Sampling(0, **sampling) if sampling else _NO_PARTS.sampling,
            Limits(0, **limits) if limits else _NO_PARTS.limits,
            TextRules(**text) if text else _NO_PARTS.text,
        )
        force_setattr(self, "_parts", message_parts)

    def __copy__(self) -> SamplingParams:
        return self

    def __eq__(self, other: object) -> bool:
        """Whether all values are equal. A default differs from the same number, because a model may change it."""
        if not isinstance(other, SamplingParams) or type(other) is not type(self):
            return NotImplemented
        own, theirs = astuple(self), astuple(other)
        return own == theirs and all(map(is_, map(type, own), map(type, theirs)))

    def __hash__(self) -> int:  # without the lists, which cannot be hashed
        return hash((self.max_new_tokens, self.temperature, self.top_p, self.n, self.sampling_seed))

    @classmethod
    def parse(cls, value: SamplingParams | Mapping[str, object] | None) -> SamplingParams:
        """Convert a dict of fields, or None for the defaults. An object is returned unchanged.

        Raises:
            UnknownParameterError: a key that does not exist (a TypeError and a ValueError).
            TypeError, ValueError: a value of the wrong type, or outside its range.
        """
        if isinstance(value, SamplingParams):
            return value
        if value is None:
            return _cached(cls)
        if not isinstance(cast("object", value), (dict, Mapping)):  # dict first: faster
            raise checks.wrong_type("sampling_params", "a SamplingParams, a dict or None", value)
        for key in cast("Mapping[object, object]", value):
            if not isinstance(key, str):
                raise cls.__table__.unknown(key)
        if _UNCHANGING.issuperset(map(type, value.values())):
            return _cached(cls, **value)
        return cls(**value)  # type: ignore[arg-type]  # every value is checked

    @property
    def is_length_explicit(self) -> bool:
        """Whether ``max_new_tokens`` was set to a number."""
        return self.max_new_tokens is not None and not isinstance(self.max_new_tokens, table.DefaultInt)


PARAMETERS: Final[Mapping[str, table.Parameter]] = SamplingParams.__table__.rows
ALIASES: Final[Mapping[str, str]] = SamplingParams.__table__.aliases
"""Other names of parameters -> their own names."""


def is_sampling_parameter(name: str) -> bool:
    """Return whether ``sampling_params`` may have this key, also by the name of another engine."""
    return name in SamplingParams.__table__.fields


@lru_cache(maxsize=64, typed=True)
def _cached(cls: type[SamplingParams], /, **fields: object) -> SamplingParams:
    """Return the same object for the same immutable values, because many requests have equal parameters."""
    return cls(**fields)  # type: ignore[arg-type]  # every value is checked


def _field(params: SamplingParams, name: str) -> object:
    value: object = getattr(params, name)
    return value


# ---------------------------------------------------------------- to the wire


class _ParamParts(Struct, frozen=True, gc=False):
    """The parts of a ``Submit`` message with the values of the parameters alone, without defaults of the model."""

    sampling: Sampling = Sampling(0)
    limits: Limits = Limits(0)
    text: TextRules = TextRules()


_NO_PARTS: Final = _ParamParts()


def _parts(params: SamplingParams) -> _ParamParts:
    return cast("_ParamParts", vars(params)["_parts"])


def output_limit(params: SamplingParams, num_prompt: int, *, context_length: int, max_total_tokens: int) -> int:
    """Return the maximum number of output tokens after a prompt of ``num_prompt`` tokens.

    max_total_tokens: the size of the KV pool.

    Raises:
        RequestTooLargeError: the prompt is too long, or an explicit ``max_new_tokens`` does not fit.
    """
    left = min(context_length, max_total_tokens) - num_prompt
    wanted = params.max_new_tokens
    if left > 0 and (wanted is None or wanted <= left or not params.is_length_explicit):
        return left if wanted is None else min(int(wanted), left)
    limit = f"the context of {context_length} tokens"
    if max_total_tokens < context_length:
        limit = f"the KV pool of {max_total_tokens} tokens (max_total_tokens)"
    if left <= 0:
        raise RequestTooLargeError(f"the prompt has {num_prompt} tokens and does not fit into {limit}")
    raise RequestTooLargeError(f"max_new_tokens={wanted} with a prompt of {num_prompt} tokens does not fit {limit}")


def sampling(
    params: SamplingParams,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    tokenize: Tokenize | None = None,
    defaults: Mapping[str, float] | None = None,
) -> Sampling:
    """Return the runner's part of a ``Submit`` message, with seed 0.

    Args:
        tokenize: converts texts without adding special tokens; None: there is no tokenizer.
        defaults: values of the model for parameters of ``FROM_MODEL`` that the caller left out.

    Raises:
        ValueError: an id is outside the vocabulary, bad words cannot be tokenized, or no token can be sampled because
            of ``min_new_tokens`` or bad words.
    """
    part = _parts(params).sampling
    if defaults:
        unset = {name: value for name, value in defaults.items() if _field(params, name) is PARAMETERS[name].default}
        part = replace(part, **unset)
    _check_vocabulary("logit_bias", part.bias_token_ids, vocab_size)
    _check_vocabulary("allowed_token_ids", part.allowed_token_ids, vocab_size)
    if params.bad_words:
        part = replace(part, bad_token_ids=_bad_token_ids(params.bad_words, tokenize))
        banned = {ids[0] for ids in part.bad_token_ids if len(ids) == 1}
        if banned.issuperset(part.allowed_token_ids or range(vocab_size)):
            raise ValueError("bad_words rule out every token that allowed_token_ids allow; allow one more")
    if part.grammar is not None:
        end = part.grammar.reasoning_end
        _check_vocabulary("reasoning_end", () if isinstance(end, str) else end, vocab_size)
        part = replace(part, grammar=replace(part.grammar, eos_token_ids=tuple(eos_token_ids)))
    if not part.min_new_tokens:
        return part
    stops = stop_ids(params, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    if len(stops) >= vocab_size:
        raise ValueError(f"min_new_tokens={params.min_new_tokens} cannot be kept: all {vocab_size} tokens stop")
    return replace(part, suppressed_token_ids=stops)


def _bad_token_ids(words: Sequence[str], tokenize: Tokenize | None) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of the words, each with and without a space before it, without duplicates."""
    if tokenize is None:
        raise ValueError("bad_words needs a tokenizer, and this engine has none (skip_tokenizer_init); use logit_bias")
    bare = [word.lstrip(" ") or word for word in words]
    return tuple(dict.fromkeys(tuple(ids) for ids in tokenize([*bare, *(f" {word}" for word in bare)]) if ids))


def text_rules(params: SamplingParams, *, stream_interval: int) -> TextRules:
    """Return the detokenizer's part of a ``Submit`` message, without ``context_token_ids``.

    stream_interval: the default of the engine.
    """
    part = _parts(params).text
    if params.stream_interval is not None or stream_interval == part.stream_interval:
        return part
    return replace(part, stream_interval=stream_interval)


def stop_ids(params: SamplingParams, *, vocab_size: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that end the request, from the model and from the caller; none with ``ignore_eos``.

    Raises:
        ValueError: an id is outside the vocabulary.
    """
    own = _parts(params).limits.stop_token_ids
    _check_vocabulary("stop_token_ids", own, vocab_size)
    return () if params.ignore_eos else tuple(dict.fromkeys((*eos_token_ids, *own)))


def _check_vocabulary(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        wrong = next(token_id for token_id in token_ids if token_id >= vocab_size)
        raise checks.wrong_value(name, f"token ids from 0 to {vocab_size - 1}", wrong)


def drawn_seed(count: int) -> int:
    """Return a seed for a request without one. Consecutive counts give unrelated seeds (finalizer of SplitMix64)."""
    value = (count * 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) >> (64 - _DRAWN_SEED_BITS)
