"""What a caller asks for, checked at the call: prompts, sampling parameters and the options of a request.

Pure: whatever needs the tokenizer or the engine's state comes later.
"""

from __future__ import annotations

import os  # noqa: TC003  # for the annotations of the options
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypedDict, cast

from msgspec import Struct
from msgspec.structs import replace

from aioengine import checks
from aioengine.args import ALIASES, ARGUMENTS
from aioengine.foreign_names import our_way
from aioengine.frontend.chats import CHAT_ARGUMENTS, chat_form
from aioengine.frontend.prompts import (
    MAX_IDS_AT_CALL,
    MAX_ROWS_AT_CALL,
    MESSAGES,
    Messages,
    Prompt,
    RefusedPrompt,
    Rows,
    RowsOfIds,
    chat_prompt,
    ids_prompt,
    later_ids,
    later_text,
    text_prompt,
)
from aioengine.params import SamplingParams, check_together, is_sampling_parameter

Sampled = SamplingParams | Mapping[str, object]
"""Sampling parameters as callers write them."""

BatchSampled = Sampled | Sequence[Sampled | None]
"""Sampling parameters of a batch: one for all, or one for each prompt."""

Texts = list[str] | tuple[str, ...]
TokenIds = list[int] | tuple[int, ...] | checks.Array
BatchIds = list[list[int]] | list[tuple[int, ...]] | tuple[list[int], ...]
Chats = list[list[dict[str, object]]] | list[list[dict[str, str]]] | list[Messages] | tuple[Messages, ...]

MAX_TIMEOUT_S: Final = 1e9
MAX_RID_BYTES: Final = 512
MAX_PRIORITY: Final = 2**63 - 1
IDS: Final = "a list of token ids, or a list of such lists"


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of every call that generates.

    rid: an id for ``abort_request`` and the logs, unique among live requests; a batch takes a list, or one from which
        ``rid_0``, ``rid_1`` ... are made, as ``n`` samples do. None: one is drawn. It is free again when the
        request has ended or was left, with ``resume_ttl`` when that is over.
    priority: higher runs sooner (with ``schedule_policy="priority"``).
    tenant: whose request it is; tenants share the engine by their weights (``tenant_weights``), whatever each asks for,
        and ``priority`` orders the requests of one tenant.
    timeout, queue_timeout, first_token_timeout: seconds from the call until its end, until it is admitted, until its
        first token. One that runs out ends the request with reason ``deadline`` and what there is.
    refuse_late: raise EngineOverloadedError at once where the engine knows already that a timeout would be missed, by
        the pace of its queue; awaiting a stream then waits for its first chunk.
    resume_ttl: seconds for which a stream of one row outlives its reader: leaving it detaches it instead of aborting
        it, and ``attach`` goes on with it; so long it can also be read again after its end.
    return_exceptions: rows of a batch that are wrong, or fail, give their exception instead of ending the call. (A
        single prompt raises all the same, and so does what is wrong with the whole call.)
    return_prompt_token_ids: answers and chunks carry ``prompt_token_ids``.
    """

    rid: str | Sequence[str] | None
    priority: int | None
    tenant: str | None
    timeout: float | None
    queue_timeout: float | None
    first_token_timeout: float | None
    refuse_late: bool
    resume_ttl: float | None
    return_exceptions: bool
    return_prompt_token_ids: bool


class ChatOptions(RequestOptions, total=False):
    """Keyword arguments of ``chat``: those of every call, and how its messages are written.

    chat_template: the text of a chat template, the name of one of the model's, or a file (``pathlib.Path``), in place
        of the model's own. It runs in this process: take none from strangers.
    enable_thinking: whether the model thinks before it answers, where its template knows that variable.
    tools: what the model may call: dicts in JSON schema form.
    chat_template_kwargs: other variables for the template, and its switches ``add_generation_prompt`` and
        ``continue_final_message``.
    """

    chat_template: str | os.PathLike[str] | None
    enable_thinking: bool | None
    tools: Sequence[Mapping[str, object]] | None
    chat_template_kwargs: Mapping[str, object] | None


_MEDIA: Final = "images, audio and video"
_LOGPROBS: Final = "log-probabilities"
_SESSIONS: Final = "sessions"
_SEVERAL_ENGINES: Final = "separate prefill and decode engines"

_OFF: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "image_data": (([],), _MEDIA),
    "audio_data": (([],), _MEDIA),
    "video_data": (([],), _MEDIA),
    "mm_hashes": (([],), _MEDIA),
    "mm_content_hashes": (([],), _MEDIA),
    "return_logprob": ((False,), _LOGPROBS),
    "logprob_start_len": ((-1,), _LOGPROBS),
    "top_logprobs_num": ((0,), _LOGPROBS),
    "token_ids_logprob": (([],), _LOGPROBS),
    "return_text_in_logprobs": ((False,), _LOGPROBS),
    "lora_path": ((), "LoRA adapters"),
    "custom_logit_processor": ((), "custom logits processors"),
    "require_reasoning": ((False,), "grammars that begin after the reasoning"),
    "return_hidden_states": ((False,), "hidden states"),
    "return_routed_experts": ((False,), "routed experts"),
    "routed_experts_start_len": ((0,), "routed experts"),
    "input_embeds": ((), "embeddings as input"),
    "session_params": ((), _SESSIONS),
    "session_id": ((), _SESSIONS),
    "cache_salt": (("",), "parts of the prefix cache"),
    "extra_key": (("",), "parts of the prefix cache"),
    "routed_dp_rank": ((0,), "data parallelism"),
    "data_parallel_rank": ((0,), "data parallelism"),
    "bootstrap_host": ((), _SEVERAL_ENGINES),
    "bootstrap_port": ((), _SEVERAL_ENGINES),
    "bootstrap_room": ((), _SEVERAL_ENGINES),
    "disagg_prefill_dp_rank": ((), _SEVERAL_ENGINES),
    "kv_hints": ((), _SEVERAL_ENGINES),
    "external_trace_header": ((), "traces"),
}
"""Arguments of calls to come: name -> (values that mean "off", beside None; what it is)."""


class CallRequest(Struct, frozen=True, kw_only=True):
    """A checked call: ``params`` has one entry, or one for each prompt; ``num_samples`` of each prompt.

    ``rids``: ids of the prompts where the caller gave a list; ``rid``: of the whole call where it gave one.
    Timeouts are in seconds from the call.
    """

    prompts: Rows
    params: list[SamplingParams]
    num_samples: int
    num_rows: int
    is_batch: bool
    is_stream: bool = False
    rid: str | None = None
    rids: list[str] | None = None
    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    first_token_timeout_s: float | None = None
    refuses_late: bool = False
    resume_ttl_s: float | None = None
    returns_exceptions: bool = False
    shows_prompt: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the prompt. None of a batch, which the caller holds anyway and whose rows begin by and by."""
        return 0 if self.is_batch else self.prompts[0].num_bytes

    def timeouts(self) -> dict[str, float]:
        """In seconds, by the words that name them in a finish reason."""
        given = (self.timeout_s, self.queue_timeout_s, self.first_token_timeout_s)
        return {
            which: seconds
            for which, seconds in zip(("total", "queue", "first_token"), given, strict=True)
            if seconds is not None
        }

    @property
    def gives_batch(self) -> bool:
        return self.is_batch or self.num_samples > 1

    def params_of(self, prompt: int) -> SamplingParams:
        return self.params[prompt if len(self.params) > 1 else 0]


def generate_request(
    prompt: object, sampling_params: object, input_ids: object, *, stream: object, options: Mapping[str, object]
) -> CallRequest:
    """Check a call of ``generate``.

    Raises:
        TypeError, ValueError: what is wrong, with the field and the value.
    """
    _check_names(options, ("prompt", "sampling_params", "input_ids", "stream"))
    if prompt is not None and input_ids is not None:
        raise ValueError("prompt and input_ids are both given; give one of them")
    if prompt is None and input_ids is None:
        raise ValueError("prompt and input_ids are both missing; give one of them")
    if prompt is not None:
        if isinstance(prompt, str):
            return _call_request(
                Rows([text_prompt("prompt", prompt)]), sampling_params, is_batch=False, stream=stream, options=options
            )
        given = checks.sequence("prompt", prompt, allowed=checks.TEXTS)
        is_plain = set(map(type, given)) == {str} and all(given)
        texts = _rows("prompt", given, text_prompt, options, later=later_text if is_plain else None)
        return _call_request(texts, sampling_params, is_batch=True, stream=stream, options=options)
    rows = checks.sequence("input_ids", input_ids, allowed=IDS)
    is_batch = _holds_rows(rows, options)
    if is_batch:
        is_plain = set(map(type, rows)) <= {list, tuple} and all(rows)
        prompts = _rows("input_ids", rows, RowsOfIds(), options, later=later_ids if is_plain else None)
    else:
        prompts = Rows([ids_prompt("input_ids", rows)])
    return _call_request(prompts, sampling_params, is_batch=is_batch, stream=stream, options=options)


def chat_request(
    messages: object, sampling_params: object, *, stream: object, options: Mapping[str, object]
) -> CallRequest:
    """Check a call of ``chat``: one conversation, or a list of them.

    Raises:
        TypeError, ValueError: what is wrong, with the field and the value.
    """
    _check_names(options, ("messages", "sampling_params", "stream"), ChatOptions.__annotations__)
    rows = checks.sequence("messages", messages, allowed=MESSAGES)
    make = partial(chat_prompt, form=chat_form(options))
    is_batch = _holds_rows(rows, options)
    prompts = _rows("messages", rows, make, options) if is_batch else Rows([make("messages", rows)])
    return _call_request(prompts, sampling_params, is_batch=is_batch, stream=stream, options=options)


def _rows(
    name: str,
    values: Sequence[object],
    make: Callable[[str, object], Prompt],
    options: Mapping[str, object],
    *,
    later: Callable[[str, object], Prompt] | None = None,
) -> Rows:
    """The prompts of a batch. One that is wrong raises, or stands for its error (``return_exceptions=True``).

    ``later`` makes those behind the first of a long batch, when they begin; None: all are made now.
    """
    num_first = len(values) if later is None else MAX_ROWS_AT_CALL
    prompts: list[Prompt] = []
    for place, value in enumerate(values[:num_first]):
        try:
            prompts.append(make(f"{name}[{place}]", value))
        except (TypeError, ValueError) as error:
            if not _fails_alone(options):
                raise
            prompts.append(RefusedPrompt(error))
    if later is None:
        return Rows(prompts)
    return Rows(prompts, values[num_first:], lambda place, value: later(f"{name}[{place}]", value))


def _fails_alone(options: Mapping[str, object]) -> bool:
    return options.get("return_exceptions") is True


def _holds_rows(values: Sequence[object], options: Mapping[str, object]) -> bool:
    """Whether this is a list of lists; where a wrong row may stand beside others, one list among them tells."""
    first = values[: MAX_IDS_AT_CALL if _fails_alone(options) else 1]
    return any(isinstance(checks.plain(value), list | tuple) for value in first)


def _call_request(
    prompts: Rows, sampling_params: object, *, is_batch: bool, stream: object, options: Mapping[str, object]
) -> CallRequest:
    params = _params(sampling_params, prompts, is_batch=is_batch, fails_alone=_fails_alone(options))
    num_samples = params[0].n if params else 1
    request = CallRequest(
        prompts=prompts,
        params=params,
        num_samples=num_samples,
        num_rows=num_samples * len(prompts),
        is_batch=is_batch,
        is_stream=checks.switch("stream", stream),
    )
    return _with_options(request, options) if options else request


def _with_options(plain: CallRequest, options: Mapping[str, object]) -> CallRequest:
    rid: object = options.get("rid")
    has_list = isinstance(rid, list | tuple)
    priority = options.get("priority")
    request = replace(
        plain,
        rid=None if rid is None or has_list else _rid(rid),
        rids=_rids(options.get("rid"), len(plain.prompts), plain.is_batch) if has_list else None,
        priority=0 if priority is None else checks.whole("priority", priority, -MAX_PRIORITY, MAX_PRIORITY),
        tenant=_tenant(options.get("tenant")),
        timeout_s=_timeout("timeout", options),
        queue_timeout_s=_timeout("queue_timeout", options),
        first_token_timeout_s=_timeout("first_token_timeout", options),
        refuses_late=checks.switch("refuse_late", options.get("refuse_late", False)),
        resume_ttl_s=_timeout("resume_ttl", options),
        returns_exceptions=checks.switch("return_exceptions", options.get("return_exceptions", False)),
        shows_prompt=checks.switch("return_prompt_token_ids", options.get("return_prompt_token_ids", False)),
    )
    if request.resume_ttl_s is not None and (request.gives_batch or not request.is_stream):
        raise ValueError("resume_ttl is for streams (stream=True) of one prompt and one sample (n=1)")
    return request


def _check_names(
    options: Mapping[str, object], others: tuple[str, ...], known: Mapping[str, object] = RequestOptions.__annotations__
) -> None:
    """Options that exist pass, and those to come at values that mean "off", also once for each prompt.

    ``others``: what the call takes beside the options.
    """
    for name, value in options.items():
        if name in _OFF:
            entries = cast("list[object]", value) if isinstance(value, list) else [value]
            for entry in entries:
                checks.off(name, entry, *_OFF[name])
        elif name not in known:
            raise _unexpected(name, (*others, *known))


def _unexpected(name: str, known: tuple[str, ...]) -> TypeError:
    if is_sampling_parameter(name):
        return TypeError(f"unexpected argument {name!r}: it belongs in sampling_params, as {{{name!r}: ...}}")
    if name in CHAT_ARGUMENTS:
        return TypeError(f"unexpected argument {name!r}: chat takes it, for its messages")
    if hint := our_way(name):
        return TypeError(f"unexpected argument {name!r}{hint}")
    if name in ARGUMENTS or name in ALIASES:
        return TypeError(f"unexpected argument {name!r}: the constructor of the engine takes it")
    hint = checks.did_you_mean(name, (*known, *_OFF))
    return TypeError(f"unexpected argument {name!r}{hint}; there are {', '.join(known)}")


def _params(value: object, prompts: Rows, *, is_batch: bool, fails_alone: bool) -> list[SamplingParams]:
    """One for all prompts, or one for each; their ``n`` must agree, since it gives the answers their places.

    With ``fails_alone``, a wrong one of several refuses its prompt.
    """
    if not isinstance(value, list | tuple):
        return [SamplingParams.parse(cast("Sampled | None", value))]
    given = cast("Sequence[Sampled | None]", value)
    if not is_batch:
        raise TypeError("sampling_params is a list, but there is one prompt; give a list of prompts, or one dict")
    if len(given) != len(prompts):
        raise ValueError(f"sampling_params has {len(given)} entries for {len(prompts)} prompts; give one for each")
    check_together(given)
    found: dict[int, SamplingParams] = {}
    made: dict[int, SamplingParams] = {}  # by the identity of what was given: many rows may share it
    for place, entry in enumerate(given):
        try:
            found[place] = made[id(entry)] = made.get(id(entry)) or SamplingParams.parse(entry)
        except (TypeError, ValueError) as error:
            if not fails_alone:
                raise
            prompts.refuse(place, error)
    counts = [entry.n for entry in found.values()]
    if len(set(counts)) > 1:
        raise ValueError(f"n must be the same in all sampling_params of a batch, got {counts}")
    unused = SamplingParams(n=counts[0] if counts else 1)  # where a prompt is refused
    return [found.get(place, unused) for place in range(len(given))]


def _rid(value: object) -> str:
    found = checks.text("rid", value, max_bytes=MAX_RID_BYTES)
    if not found:
        raise ValueError("rid is empty; leave it out to have one drawn")
    return found


def _rids(value: object, num_prompts: int, is_batch: bool) -> list[str]:
    found = [_rid(entry) for entry in checks.items("rid", value, checks.MAX_COUNT)]
    if not is_batch:
        raise TypeError("rid is a list, but there is one prompt; give a list of prompts, or one rid")
    if len(found) != num_prompts:
        raise ValueError(f"rid has {len(found)} entries for {num_prompts} prompts; give one for each")
    return found


def _tenant(value: object) -> str:
    return "" if value is None else checks.text("tenant", value, max_bytes=checks.MAX_TENANT_BYTES)


def _timeout(name: str, options: Mapping[str, object]) -> float | None:
    value = options.get(name)
    return None if value is None else checks.number(name, value, 0, MAX_TIMEOUT_S, above=True)
