"""Bodies of requests: the fields of an endpoint, and sampling parameters beside them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, TypeVar

from msgspec import DecodeError, Struct, ValidationError, convert
from msgspec.json import Decoder
from starlette.requests import Request

from aioengine.openai.replies import CallError, encode

IGNORED: Final = frozenset(
    (
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "verbosity", "include_obfuscation",
    )
)  # fmt: skip
"""Fields that are accepted and have no effect."""

REFUSED: Final = {
    "suffix": "models that fill in the middle need their own prompt; write it as the prompt",
    "best_of": "use n, and choose among the choices",
    "use_beam_search": "beam search has no endpoint",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "answers are text",
    "prediction": "leave it out",
    "web_search_options": "the server has no tools of its own",
    "background": "the answer is a response or a stream",
    "conversation": "use previous_response_id",
    "prompt_logprobs": "use /v1/completions with echo and logprobs",
    "resume_ttl": "only the streams of /v1/chat/completions and /v1/completions can be continued",
}
"""Fields of other servers that are refused -> the way that works."""

_MARGIN: Final = 32
"""Spare levels and frames: an answer that repeats a part of a body is nested more deeply than the body."""

_FEW_LEVELS: Final = 500
"""A body with fewer lists and objects is not nested too deeply."""

_decode = Decoder(dict[str, Any]).decode

Fields = TypeVar("Fields", bound=Struct)


class StreamOptions(Struct, frozen=True):
    """``include_usage``: the last chunk has the usage. ``continuous_usage_stats``: each chunk has it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all endpoints."""

    model: str = ""


class GenerateBody(Body, kw_only=True):
    """Fields of all endpoints that generate.

    Attributes:
        timeout: seconds for the whole answer; then it ends as if its length were reached.
        resume_ttl: seconds for which a broken stream can be continued (``Last-Event-ID``).
    """

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    timeout: float | None = None
    resume_ttl: float | None = None


async def read_body(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the body of a request.

    Raises:
        CallError: it has more than ``max_bytes``, or is not a JSON object.
    """
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > max_bytes:
            raise CallError(f"the body has more than {max_bytes} bytes (max_body_bytes)", 413)
    try:
        body = nested = _decode(content)
        if content.count(b"[") + content.count(b"{") > _FEW_LEVELS:
            for _ in range(_MARGIN):
                nested = [nested]
            encode(nested)  # raises RecursionError
        return body
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallError(f"the body must be a JSON object: {error}") from None


def read_fields(body: Mapping[str, object], kind: type[Fields]) -> Fields:
    """Return the fields of an endpoint. null is the default of a field.

    Raises:
        CallError: a field does not exist, is not supported, or has the wrong type.
    """
    ignored = IGNORED.difference(kind.__struct_fields__)
    given = {name: value for name, value in body.items() if value is not None and name not in ignored}
    if name := next((name for name in given if name in REFUSED and name not in kind.__struct_fields__), None):
        raise CallError(f"{name} is not supported: {REFUSED[name]}", param=name)
    try:
        return convert(given, kind)
    except ValidationError as error:
        raise CallError(str(error)) from None


def read_generate_fields(body: Mapping[str, object], kind: type[Fields]) -> tuple[Fields, dict[str, object]]:
    """Return the fields of an endpoint that generates, and all other fields: its sampling parameters.

    The engine refuses unknown ones. Raises CallError as ``read_fields``.
    """
    known = _known_fields(kind)
    fields = read_fields({name: value for name, value in body.items() if name in known}, kind)
    return fields, {name: value for name, value in body.items() if name not in known and value is not None}


@cache
def _known_fields(kind: type[Struct]) -> frozenset[str]:
    return frozenset((*kind.__struct_fields__, *IGNORED, *REFUSED))


def prompt_arguments(prompt: str | list[Any]) -> dict[str, Any]:
    """Return the argument of the engine for texts or token ids."""
    is_text = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], str))
    return {"prompt" if is_text else "input_ids": prompt}


# ---------------------------------------------------------------- constraints

_STRUCTURED: Final = {
    "json": "json_schema",
    "grammar": "ebnf",
    **{name: name for name in ("regex", "choice", "json_object", "structural_tag")},
}
"""Keys of ``structured_outputs`` -> sampling parameters."""


def add_constraint(
    sampling: dict[str, object],
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None = None,
) -> None:
    """Add the constraint of a body to its sampling parameters.

    Raises:
        CallError: the type does not exist, or its value is missing.
    """
    for name, value in (structured_outputs or {}).items():
        if name not in _STRUCTURED:
            raise CallError(f"structured_outputs has {name!r}; allowed: {', '.join(_STRUCTURED)}")
        if value is not None:
            sampling[_STRUCTURED[name]] = value
    match response_format:
        case {"type": "json_object", "schema": schema} | {"type": "json_schema", "json_schema": {"schema": schema}}:
            sampling["json_schema"] = schema
        case {"type": "json_schema", "schema": schema}:  # as /v1/responses has it
            sampling["json_schema"] = schema
        case {"type": "json_object"}:
            sampling["json_object"] = True
        case {"type": "regex", "pattern": pattern}:
            sampling["regex"] = pattern
        case {"type": "grammar", "grammar": grammar}:
            sampling["ebnf"] = grammar
        case {"type": "structural_tag"}:
            sampling["structural_tag"] = dict(response_format)
        case None | {"type": "text"}:
            return
        case _:
            raise CallError(
                f"response_format is {str(response_format)[:200]}; allowed: text, json_object, json_schema (with "
                "json_schema.schema), regex (with pattern), grammar (with grammar), structural_tag",
                param="response_format",
            )
