"""Logprobs in OpenAI's forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioengine.openai.http_call import Info

LOWEST: Final = -9999.0
"""OpenAI's logprob of a token that is almost impossible. JSON has no -inf."""

_Entry = tuple[float | None, int, str | None]


def options(num_top: int) -> dict[str, Any]:
    """Return the keyword arguments of a call that returns logprobs and ``num_top`` alternatives."""
    return {"return_logprob": True, "top_logprobs_num": num_top, "return_text_in_logprobs": True}


def _token(entry: _Entry) -> dict[str, object]:
    logprob, _, text = entry
    text = text or ""
    value = None if logprob is None else max(logprob, LOWEST)
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def chat_logprobs(info: Info, start: int = 0) -> dict[str, object]:
    """Return ``logprobs`` of a choice of /v1/chat/completions, from output token ``start`` on."""
    entries = info["output_token_logprobs"][start:]
    tops = info.get("output_top_logprobs") or [[]] * (start + len(entries))
    content = [
        {**_token(entry), "top_logprobs": list(map(_token, top))}
        for entry, top in zip(entries, tops[start:], strict=False)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    info: Info, text_offset: int, *, start: int = 0, with_prompt: bool = False
) -> dict[str, object]:
    """Return ``logprobs`` of a choice of /v1/completions. ``text_offset``: of its first token.

    ``with_prompt``: the tokens of the prompt come first (echo).
    """
    entries: list[_Entry] = list(info["output_token_logprobs"][start:])
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
        "token_logprobs": [_token(entry)["logprob"] for entry in entries],
        "top_logprobs": [_top(entry, top) for entry, top in zip(entries, tops, strict=False)],
        "text_offset": offsets,
    }


def _top(entry: _Entry, top: Sequence[_Entry] | None) -> Mapping[str, object] | None:
    """Return the most likely tokens of a position and the sampled one: text -> logprob."""
    if entry[0] is None:
        return None
    return {text or "": max(logprob, LOWEST) for logprob, _, text in (*(top or ()), entry) if logprob is not None}
