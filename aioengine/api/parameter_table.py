"""The table behind SamplingParams: one row for each field, and the checks of values.

A class of parameters assigns a row to each field with ``parameter`` or ``other_name``. Its metaclass replaces the rows
by the defaults, for msgspec and type checkers, and keeps the rows as the table of the class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from typing import Annotated, Any, Final, NamedTuple, TypeVar, cast

from msgspec import UNSET, Meta, Struct, StructMeta, UnsetType, ValidationError, convert

from aioengine.api import checks
from aioengine.api.foreign_names import MISSING_PARAMETERS, by_own_names, our_way
from aioengine.errors import UnknownParameterError

MAX_STOPS: Final = 32
MAX_STOP_BYTES: Final = 4096
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_BYTES: Final = 256
MAX_ALLOWED_TOKEN_IDS: Final = 65_536
MAX_JSON_CHARACTERS: Final = 16_384
MAX_BIAS: Final = 1e6
MAX_BIASES: Final = 4096
"""Entries of a ``logit_bias``: each is checked at the call, sent, and added in every step."""

PARTS: Final = ("sampling", "limits", "text")
"""The parts of a message that contain parameters: for the runner, the scheduler, and the detokenizer."""

ARGUMENTS_OF_CALLS: Final = frozenset(
    """
    input_ids input_embeds stream rid priority tenant timeout queue_timeout first_token_timeout refuse_late resume_ttl
    return_exceptions return_prompt_token_ids add_special_tokens truncate_prompt_tokens cache_salt lora_path image_data
    return_hidden_states custom_logit_processor session_params return_logprob logprob_start_len top_logprobs_num
    token_ids_logprob return_text_in_logprobs chat_template enable_thinking tools chat_template_kwargs
    external_trace_header routed_dp_rank
    """.split()  # noqa: SIM905  # thirty quoted names would hide the list
)
"""Arguments of calls, for the error if ``sampling_params`` has one of them. Their types are in
``frontend.intake.request_options``, which imports this module."""

Params = TypeVar("Params")
Default = TypeVar("Default")


class DefaultInt(int):
    """A default. Its type distinguishes it from the same number in a request."""


class DefaultFloat(float):
    """Like ``DefaultInt``."""


class Parameter(Struct, frozen=True, kw_only=True):
    """One row of the table of sampling parameters.

    Attributes:
        default: the value if the parameter is left out, or None.
        check: takes name and value, and returns the plain value. Raises TypeError or ValueError if it is wrong.
        doc: the documentation; the first sentence is the help of its flag.
        wire: the message parts that contain the value (see ``PARTS``), separated by spaces. Its field has the name of
            the parameter, or another one, such as "sampling.bias_token_ids". Empty: only the frontend reads it.
        columns: returns the values of these fields; None: each is the value itself.
        read: converts the text after its flag; bool: a switch; None: there is no flag.
        flag: the name of the flag, if it is not the name of the parameter.
        is_list: the flag may be repeated.
        takes_none: None is a value of the parameter, not the default.
    """

    default: object
    check: checks.Check
    doc: str
    wire: str = ""
    columns: Callable[[object], tuple[object, ...]] | None = None
    read: Callable[[str], object] | None = None
    flag: str = ""
    is_list: bool = False
    takes_none: bool = False

    @property
    def summary(self) -> str:
        """The first sentence of ``doc``, as plain text."""
        return self.doc.partition(". ")[0].replace("`", "")


class _OtherName(NamedTuple):
    """A second name of the parameter ``name``."""

    name: str


def parameter(
    default: Default,
    check: checks.Check,
    doc: str,
    *,
    wire: str = "",
    read: Callable[[str], object] | None = None,
    **others: object,
) -> Default:
    """Return a field of SamplingParams. The arguments are the attributes of ``Parameter``."""
    row = Parameter(default=default, check=check, doc=doc, wire=wire, read=read, **others)  # type: ignore[arg-type]
    return cast("Default", row)


def number(default: float, low: float, high: float, doc: str, *, above: bool = False) -> float:
    """Return a field for a number from ``low`` (or above it) to ``high``, for the runner."""
    check = checks.number_from(low, high, above=above)
    return parameter(DefaultFloat(default), check, doc, wire="sampling", read=float)


def other_name(name: str) -> UnsetType:
    """Return a field that is a second name of the parameter ``name``, from another engine."""
    return cast("UnsetType", _OtherName(name))


class Table:
    """The parameters of a class, with inherited ones.

    Attributes:
        fields: every field of the class, in order. defaults: their defaults.
        rows: the parameters by name. aliases: other name -> name.
        wire: name -> (index in ``PARTS``, field) of each message field that contains the value.
    """

    def __init__(self, fields: Mapping[str, Parameter | _OtherName]) -> None:
        self.fields = fields
        self.defaults = tuple(row.default if isinstance(row, Parameter) else UNSET for row in fields.values())
        self.rows = {name: row for name, row in fields.items() if isinstance(row, Parameter)}
        self.aliases = {name: row.name for name, row in fields.items() if isinstance(row, _OtherName)}
        self.wire: dict[str, list[tuple[int, str]]] = {}
        for name, row in self.rows.items():
            targets = (target.partition(".") for target in row.wire.split())
            self.wire[name] = [(PARTS.index(part), field or name) for part, _, field in targets]

    @property
    def doc(self) -> str:
        """One line for each parameter, and one for all other names."""
        rows = [f"    {name} (default {row.default}): {row.doc}" for name, row in self.rows.items()]
        others = ", ".join(f"``{alias}`` for ``{name}``" for alias, name in self.aliases.items())
        return "\n".join([*rows, "", f"    Fields may also be given by other names: {others}.", "    "])

    def by_own_names(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the values with the own names of the parameters as keys.

        Raises:
            UnknownParameterError: a name does not exist.
            ValueError: two names of one parameter.
        """
        given = {key: value for key, value in given.items() if value is not UNSET}  # UNSET: in a copy
        values, others = by_own_names("sampling parameter", given, self.aliases, self.rows, MISSING_PARAMETERS)
        if others:
            raise self.unknown(others[0])
        return values

    def unknown(self, key: object) -> UnknownParameterError:
        """Return the error for a name that does not exist, with the name to use instead."""
        if isinstance(key, str) and key in ARGUMENTS_OF_CALLS:
            return UnknownParameterError(
                f"unknown sampling parameter {key!r}: it is an argument of the call, beside sampling_params"
            )
        hint = (our_way(key) or checks.did_you_mean(key, self.fields)) if isinstance(key, str) else ""
        return UnknownParameterError(f"unknown sampling parameter {checks.shown(key)}{hint}")


class ParametersType(StructMeta):
    """The metaclass of SamplingParams. It builds the table from the fields, and accepts all names as keywords."""

    __table__: Table

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, object], **config: Any) -> ParametersType:
        own = {field: row for field, row in namespace.items() if isinstance(row, Parameter | _OtherName)}
        inherited = [dict(base.__table__.fields) for base in bases if isinstance(base, ParametersType)]
        table = Table({field: row for rows in (*inherited, own) for field, row in rows.items()})
        namespace |= {field: row.default if isinstance(row, Parameter) else UNSET for field, row in own.items()}
        namespace |= {"__table__": table, "__doc__": f"{namespace.get('__doc__') or ''}\n{table.doc}"}
        return super().__new__(cls, name, bases, namespace, **config)

    def __call__(cls: type[Params], *positional: object, **given: object) -> Params:
        if positional:
            raise TypeError(f"{cls.__name__} takes only keywords; pass a dict instead of it, or to parse()")
        table = cast("ParametersType", cls).__table__
        if not given.keys() <= table.rows.keys():
            given = table.by_own_names(given)
        return cast("Params", super().__call__(**given))  # type: ignore[misc]


def constraint(name: str) -> checks.Check:
    """Return a check of ``constraints.parameters`` by its name. The module is imported at the first call."""

    def check(field: str, value: object) -> object:
        from aioengine.constraints import parameters

        return cast("checks.Check", getattr(parameters, name))(field, value)

    return check


# ---------------------------------------------------------------- checks of lists, and their columns


def top_k(name: str, value: object) -> int:
    """Return -1 for 0: both mean all tokens."""
    return checks.whole(name, value, -1) or -1


def length(name: str, value: object) -> int | None:
    return None if value is None else checks.whole(name, value, 0)


def strings(name: str, value: object, max_bytes: int = MAX_STOP_BYTES) -> str | list[str]:
    """Return a string, or a new list of strings."""
    value = checks.plain(value)
    if isinstance(value, str):
        return checks.text(name, value, max_bytes=max_bytes)
    entries = checks.sequence(name, value, MAX_STOPS, allowed=checks.TEXTS)
    return [checks.text(name, entry, max_bytes=max_bytes) for entry in entries]


def patterns(name: str, value: object) -> str | list[str]:
    patterns = strings(name, value, checks.MAX_PATTERN_BYTES)
    if patterns != []:
        from aioengine.constraints.patterns import check_patterns  # slow to import, and most programs need no pattern

        check_patterns([patterns] if isinstance(patterns, str) else patterns)
    return patterns


def json_object(name: str, value: object) -> dict[str, object]:
    """Return a new dict, decoded from the JSON of the value."""
    original = dict(checks.mapping(name, value, allowed="a dict of JSON values"))
    if checks.json_size(original, MAX_JSON_CHARACTERS) > MAX_JSON_CHARACTERS:
        raise ValueError(f"{name} must have at most {MAX_JSON_CHARACTERS} characters of JSON, and it has more")
    try:
        text = json.dumps(original, allow_nan=False)
        copy: dict[str, object] = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must have only JSON values, got {checks.shown(original)}: {error}") from None
    if len(text) > MAX_JSON_CHARACTERS:
        raise ValueError(f"{name} must have at most {MAX_JSON_CHARACTERS} characters of JSON, got {len(text)}")
    return copy


def json_column(value: object) -> tuple[bytes]:
    return (json.dumps(value).encode(),)


def strings_column(value: object) -> tuple[tuple[str, ...]]:
    """Return the strings, without empty ones."""
    strings = cast("str | list[str]", value)
    return (tuple(filter(None, [strings] if isinstance(strings, str) else strings)),)


_TokenId = Annotated[int, Meta(ge=0, le=checks.MAX_COUNT)]
_PlainIds = list[_TokenId]
_PlainBiases = dict[_TokenId, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]]
"""Types that msgspec checks in one pass, for most callers."""


def words(name: str, value: object) -> list[str]:
    """Return a new list of strings that are not empty."""
    entries = checks.items(name, value, MAX_BAD_WORDS, allowed="a list of strings")
    words = [checks.text(f"{name} entries", entry, max_bytes=MAX_BAD_WORD_BYTES) for entry in entries]
    if "" in words:
        raise checks.wrong_value(f"{name} entries", "strings of at least one character", "")
    return words


def allowed_token_ids(name: str, value: object) -> list[int]:
    ids = token_ids(name, value, MAX_ALLOWED_TOKEN_IDS)
    if not ids:
        raise checks.wrong_value(name, "a list of at least one token id, or None for all", value)
    return ids


def token_ids(name: str, value: object, max_items: int = MAX_STOP_TOKEN_IDS) -> list[int]:
    """Return a new list from a list, a set or an array, without entries that are None."""
    size = checks.num_items(value)
    if size > max_items and not isinstance(value, str | bytes):
        raise ValueError(f"{name} must have at most {max_items} entries, got {size}")
    value = checks.plain(value)
    if isinstance(value, list | tuple):
        with suppress(ValidationError):
            return convert(cast("object", value), _PlainIds)
    ids = cast("object", value)  # type: ignore[redundant-cast]  # a list of unknown entries to pyright
    if isinstance(value, Set):
        ids = sorted(cast("Set[object]", value), key=hash)
    entries = checks.sequence(name, ids, max_items, allowed="a list of token ids")
    return [checks.whole(f"{name} entries", entry, 0) for entry in entries if entry is not None]


def token_ids_column(value: object) -> tuple[tuple[int, ...]]:
    return (tuple(cast("list[int]", value)),)


def biases(name: str, value: object) -> dict[int, float]:
    """Return a new dict from token id to bias. Keys may be strings of digits, as in JSON."""
    entries = checks.mapping(name, value, allowed="a dict of token id to number")
    if len(entries) > MAX_BIASES:
        raise ValueError(f"{name} must have at most {MAX_BIASES} entries, got {len(entries)}")
    with suppress(ValidationError):
        return convert(entries, _PlainBiases)
    biases: dict[int, float] = {}
    for key, bias in entries.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token_id = checks.whole(f"{name} keys", int(cast("str", key)) if is_digits else key, 0)
        if token_id in biases:
            raise ValueError(f"{name} has token id {token_id} twice")
        bias = -MAX_BIAS if checks.plain(bias) == -math.inf else bias
        biases[token_id] = checks.number(f"{name}[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
    return biases


def bias_columns(value: object) -> tuple[tuple[int, ...], tuple[float, ...]]:
    biases = cast("dict[int, float]", value)
    return tuple(biases), tuple(biases.values())
