"""Logprobs in OpenAI's forms."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aioengine.api.engine import AsyncEngine
from aioengine.openai.http_call import Info
from aioengine.openai.replies import CallError

LOWEST: Final = -9999.0
"""OpenAI's logprob of a token that is almost impossible. JSON has no -inf."""

MAX_TOP: Final = 20
"""OpenAI's limit of /v1/chat/completions. Thousands in one response would keep the event loop busy for seconds."""

_Entry = tuple[float | None, int, str | None]


def options(num_top: int) -> dict[str, Any]:
    """Return the keyword arguments of a call that returns logprobs and ``num_top`` alternatives."""
    if not 0 <= num_top <= MAX_TOP:
        raise CallError(f"a request may ask for 0 to {MAX_TOP} top logprobs of a token, got {num_top}")
    return {"return_logprob": True, "top_logprobs_num": num_top, "return_text_in_logprobs": True}


def _value(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)


def _outputs(info: Info) -> list[_Entry]:
    """Return the entries of the output tokens."""
    if "output_token_logprobs" not in info:  # a stream that is continued with other options
        raise CallError("this stream was started without logprobs, and cannot be continued with them")
    return [*info["output_token_logprobs"]]


def chat_logprobs(engine: AsyncEngine, info: Info, start: int) -> dict[str, object]:
    """Return ``logprobs`` of a choice of /v1/chat/completions, from output token ``start`` on."""

    def token(entry: _Entry) -> dict[str, object]:
        return {"token": entry[2] or "", "logprob": _value(entry[0]), "bytes": list(_bytes(engine, entry))}

    entries = _outputs(info)[start:]
    tops = info.get("output_top_logprobs") or [[]] * (start + len(entries))
    content = [
        {**token(entry), "top_logprobs": list(map(token, top))}
        for entry, top in zip(entries, tops[start:], strict=False)
    ]
    return {"content": content, "refusal": None}


def _bytes(engine: AsyncEngine, entry: _Entry) -> bytes:
    """Return the bytes of a token in the text."""
    _, token_id, text = entry
    data = (text or "").encode()
    if "\ufffd" in (text or ""):  # perhaps a part of a character
        data = engine.tokenizer.token_bytes(token_id) or data
    return data


class TextOffsets:
    """Counts the characters before each token. All parts of a character have its offset."""

    def __init__(self, engine: AsyncEngine, start: int) -> None:
        """start: characters before the first token."""
        self._engine = engine
        self._num_characters = start
        self._decode = getincrementaldecoder("utf-8")("replace").decode

    def next(self, entry: _Entry) -> int:
        """Return the offset of the next token."""
        offset = self._num_characters
        self._num_characters += len(self._decode(_bytes(self._engine, entry)))
        return offset


def completion_logprobs(
    info: Info, offsets: TextOffsets, *, start: int = 0, prompt_offsets: TextOffsets | None = None
) -> dict[str, object]:
    """Return ``logprobs`` of a choice of /v1/completions, from output token ``start`` on.

    ``offsets``: of the outputs. ``prompt_offsets``: the tokens of the prompt come first (echo).
    """
    outputs = _outputs(info)
    places = list(map(offsets.next, outputs))[start:]
    entries = outputs[start:]
    tops: list[Sequence[_Entry] | None] = list((info.get("output_top_logprobs") or [])[start:])
    if prompt_offsets is not None:
        prompt = info["input_token_logprobs"]
        places = [*map(prompt_offsets.next, prompt), *places]
        entries = [*prompt, *entries]
        tops = [*(info.get("input_top_logprobs") or []), *tops]
    tops += [None] * (len(entries) - len(tops))
    return {
        "tokens": [text or "" for _, _, text in entries],
        "token_logprobs": [_value(logprob) for logprob, _, _ in entries],
        "top_logprobs": [_top(entry, top) for entry, top in zip(entries, tops, strict=False)],
        "text_offset": places,
    }


def _top(entry: _Entry, top: Sequence[_Entry] | None) -> Mapping[str, object] | None:
    """Return the most likely tokens of a position and the sampled one: text -> logprob."""
    if entry[0] is None:
        return None
    return {text or "": max(logprob, LOWEST) for logprob, _, text in (*(top or ()), entry) if logprob is not None}
