"""Logprobs in OpenAI's forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aioengine.openai.replies import CallError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioengine.api.engine import AsyncEngine
    from aioengine.openai.http_call import Info

LOWEST: Final = -9999.0
"""OpenAI's logprob of a token that is almost impossible. JSON has no -inf."""

_Entry = tuple[float | None, int, str | None]


def options(num_top: int) -> dict[str, Any]:
    """Return the keyword arguments of a call that returns logprobs and ``num_top`` alternatives."""
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
        logprob, token_id, text = entry
        data = (text or "").encode()
        if "\ufffd" in (text or ""):  # perhaps a part of a character
            data = engine.tokenizer.token_bytes(token_id) or data
        return {"token": text or "", "logprob": _value(logprob), "bytes": list(data)}

    entries = _outputs(info)[start:]
    tops = info.get("output_top_logprobs") or [[]] * (start + len(entries))
    content = [
        {**token(entry), "top_logprobs": list(map(token, top))}
        for entry, top in zip(entries, tops[start:], strict=False)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    info: Info, text_offset: int, *, start: int = 0, with_prompt: bool = False
) -> dict[str, object]:
    """Return ``logprobs`` of a choice of /v1/completions. ``text_offset``: of its first token.

    ``with_prompt``: the tokens of the prompt come first (echo).
    """
    entries = _outputs(info)[start:]
    tops: list[Sequence[_Entry] | None] = list((info.get("output_top_logprobs") or [])[start:])
    if with_prompt:
        entries = [*info["input_token_logprobs"], *entries]
        tops = [*(info.get("input_top_logprobs") or []), *tops]
    tokens = [text or "" for _, _, text in entries]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    tops += [None] * (len(entries) - len(tops))
    return {
        "tokens": tokens,
        "token_logprobs": [_value(logprob) for logprob, _, _ in entries],
        "top_logprobs": [_top(entry, top) for entry, top in zip(entries, tops, strict=False)],
        "text_offset": offsets,
    }


def _top(entry: _Entry, top: Sequence[_Entry] | None) -> Mapping[str, object] | None:
    """Return the most likely tokens of a position and the sampled one: text -> logprob."""
    if entry[0] is None:
        return None
    return {text or "": max(logprob, LOWEST) for logprob, _, text in (*(top or ()), entry) if logprob is not None}
