"""The arguments of a call, checked: prompts, sampling parameters and the options of a request.

Checks that need the tokenizer or the engine's state come later. The call itself checks the first rows of a long batch.
The encoder's thread for long prompts checks the other rows, some at a time. The size of a batch has no limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

from msgspec import Struct

from aioengine.api import checks
from aioengine.api.answers import ExtraDecoder, HiddenStateDecoder, named
from aioengine.api.args import ARGUMENTS
from aioengine.api.foreign_names import ALIASES, MISSING_OPTIONS, our_way
from aioengine.api.params import SamplingParams, is_sampling_parameter
from aioengine.frontend.intake.pooling import Pooled  # a field of a Struct
from aioengine.frontend.intake.prompt_options import (
    PROMPTS_IN_PIECE,
    LogprobOptions,
    PerPrompt,
    list_for,
    logprob_options,
    per_prompt,
)
from aioengine.frontend.intake.prompts import (
    CHAT_ARGUMENTS,
    MESSAGES,
    CheckedPrompt,
    EncodeRules,
    PromptError,
    chat_prompt,
    encode_rules,
    ids_prompt,
    template_options,
    text_prompt,
)
from aioengine.frontend.intake.request_options import ChatOptions, GenerateOptions, Sampled
from aioengine.frontend.loaded_adapters import AdapterChoice, adapter_choice  # msgspec needs the class
from aioengine.frontend.sessions.session_params import SessionParams, session_params
from aioengine.media.intake.sources import NOT_TRUNCATED, GivenImages, given_images
from aioengine.protocol.messages import ALL_STATES, LAST_STATES, Sampling, TextRules
from aioengine.protocol.packed_logprobs import LogprobDecoder, LogprobRules
from aioengine.settings.config import MAX_REPLICAS

MAX_TIMEOUT_S: Final = 1e9
MAX_RID_BYTES: Final = 512
MAX_SALT_BYTES: Final = 512
MAX_PRIORITY: Final = 2**63 - 1
IDS_OR_ROWS: Final = "a list of token ids, or a list of such lists"

_TIMEOUTS: Final = (("total", "timeout"), ("queue", "queue_timeout"), ("first_token", "first_token_timeout"))
"""Name of each deadline in finish reasons, and its option."""


PromptCheck = Callable[[str, object], CheckedPrompt]
"""Takes the name and the value of a prompt."""

MAX_BYTES_IN_PIECE: Final = 512 * 1024
"""Bytes of the prompts that are checked at once, except the last one."""


class MessageParts(NamedTuple):
    """The parts of a ``Submit`` that depend only on the sampling parameters, the model and the engine.

    Each row adds its seed and its context.
    """

    params: SamplingParams
    sampling: Sampling
    stop_ids: tuple[int, ...]
    text: TextRules


class CallRequest(Struct):
    """The arguments of a call, checked. ``check_more`` checks later rows of a long batch."""

    # the prompts
    name: str  # the argument with the prompts
    values: Sequence[object]  # its entries
    check_prompt: PromptCheck  # returns a checked prompt
    is_batch: bool  # the caller gave a list of prompts
    pooled: Pooled | None = None  # options for vectors; None: the call generates tokens
    images: GivenImages | None = None  # from ``image_data``; None: there are none
    prompts: list[CheckedPrompt | PromptError] = []  # checked, or errors of rows; the encoder's thread may add more
    num_prompts: int = 0
    num_registered: int = 0  # number of prompts that may start: they are checked, and their ids are registered
    num_samples: int = 1  # of each prompt
    num_rows: int = 0
    num_bytes: int = 0  # of the prompt; 0 for a batch: the caller keeps the batch, and its rows start gradually

    # the sampling parameters
    params: list[SamplingParams] = []  # one for all prompts, or one for each checked prompt
    given_params: list[object] | None = None  # of each prompt, as the caller gave them; None: all prompts share one
    parsed: dict[int, SamplingParams | Exception] = {}  # by the ``id()`` of an entry of ``given_params``
    # By the ``id()`` of parsed parameters. The request keeps these objects alive, so no other object gets the same id.
    message_parts: dict[int, MessageParts] = {}

    # options of the call
    gives_batch: bool = False  # the answer is a batch
    is_stream: bool = False
    rid: str | None = None  # the caller's id of the whole call
    priority: int = 0
    tenant: str = ""
    timeouts: dict[str, float] = {}  # name in a finish reason -> seconds from the call
    refuses_late: bool = False
    resume_ttl_s: float | None = None
    returns_exceptions: bool = False
    shows_prompt: bool = False
    trace_headers: Mapping[str, str] = {}  # ``external_trace_header``, with names in lower case
    replica: int | None = None  # None: the engine chooses

    # options with one value for all prompts, or one value for each
    rids: list[str] | None = None  # the caller's ids of the prompts; "" replaces a wrong id
    adapters: AdapterChoice | None = None  # None: all prompts use the base model
    salts: PerPrompt[str] | None = None
    processors: PerPrompt[str] | None = None
    hidden_states: PerPrompt[str] | None = None
    sessions: PerPrompt[SessionParams | None] | None = None
    logprobs: LogprobOptions | None = None
    lists: Sequence[PerPrompt[Any]] = ()  # the options of this group that have one value for each prompt

    @property
    def is_checked(self) -> bool:
        return len(self.prompts) == self.num_prompts

    @property
    def prompts_fail_alone(self) -> bool:
        """Whether an invalid row returns its exception, instead of failing the whole call."""
        return self.returns_exceptions and self.is_batch

    def params_of(self, prompt_index: int) -> SamplingParams:
        return self.params[0 if self.given_params is None else prompt_index]

    def hidden_states_of(self, prompt_index: int) -> str:
        """``Sampling.hidden_states`` of a prompt; empty if the prompt is not checked yet."""
        return (
            ""
            if self.hidden_states is None or prompt_index >= len(self.prompts)
            else self.hidden_states.of(prompt_index)
        )

    def logprobs_of(self, prompt_index: int) -> LogprobRules | None:
        """The logprobs that a prompt asks for; None if the prompt is not checked yet."""
        return None if self.logprobs is None or prompt_index >= len(self.prompts) else self.logprobs.of(prompt_index)

    def decoders_of(self, prompt_index: int, num_ids: int, hidden_size: int) -> tuple[ExtraDecoder, ...]:
        """New decoders for the logprobs and hidden states of a row. ``num_ids``: tokens of the prompt."""
        rules = self.logprobs_of(prompt_index)
        decoders: tuple[ExtraDecoder, ...] = () if rules is None else (LogprobDecoder(rules, num_ids),)
        if self.hidden_states_of(prompt_index) == ALL_STATES:
            decoders = (*decoders, HiddenStateDecoder(num_ids, hidden_size))
        return decoders

    def clear(self) -> None:
        """Free the prompts and parameters: the call is over, but its reader may keep it for long."""
        for parts in (self.prompts, self.params, self.parsed, self.message_parts):
            parts.clear()
        self.values, self.given_params, self.images, self.lists = (), None, None, ()

    def check_more(self) -> int:
        """Check some more rows of the call: their ids, parameters and prompts. Return the bytes of these prompts.

        Raises:
            TypeError, ValueError: an argument is wrong; the message has its name and value.
        """
        first, num_bytes = len(self.prompts), 0
        for index in range(first, min(first + PROMPTS_IN_PIECE, self.num_prompts)):
            if num_bytes > MAX_BYTES_IN_PIECE:
                break
            try:
                if self.rids is not None:
                    rid, self.rids[index] = self.rids[index], ""  # stays empty if the id is wrong
                    self.rids[index] = _rid(rid)
                for option in self.lists:
                    option.check_value(index)
                if self.given_params is not None:
                    self.params.append(self._parsed(self.given_params[index]))
                params = self.params[-1]
                if self.processors is None and params.custom_params:
                    message = "is given without custom_logit_processor, which reads it; name one"
                    raise ValueError(f"custom_params={checks.shown(params.custom_params)} {message}")
                name = f"{self.name}[{index}]" if self.is_batch else self.name
                checked = self.check_prompt(name, self.values[index])
                num_bytes += checked.num_bytes
                prompt: CheckedPrompt | PromptError = checked
            except (TypeError, ValueError) as error:
                if not self.prompts_fail_alone:
                    raise named(error, index, self.num_prompts) from None
                prompt = _without_frames(error)
                for option in self.lists:
                    option.reset_value(index)
                if self.given_params is not None and len(self.params) == index:
                    self.params.append(SamplingParams(n=self.num_samples))
                params = self.params[-1]
            if params.n != self.num_samples:  # an error of the call: n decides the index of each answer
                counts = f"{self.num_samples} and {params.n}"
                raise ValueError(f"n must be the same in all sampling_params of a batch, got {counts}")
            self.prompts.append(prompt)
        return num_bytes

    def fail_prompt(self, prompt_index: int, error: TypeError | ValueError) -> None:
        """Fail a prompt with this error. If rows do not fail alone, raise the error."""
        if not self.prompts_fail_alone:
            raise named(error, prompt_index, self.num_prompts) from None
        self.prompts[prompt_index] = _without_frames(error)

    def _parsed(self, value: object) -> SamplingParams:
        params = self.parsed.get(id(value))
        if params is None:
            try:
                params = SamplingParams.parse(cast("Sampled | None", value))
            except (TypeError, ValueError) as error:  # other rows may share it
                params = error
            self.parsed[id(value)] = params
        if isinstance(params, Exception):
            raise params.with_traceback(None)
        return params


def _without_frames(error: PromptError) -> PromptError:
    """Remove the tracebacks of an error. Their frames would keep the reader of a dropped call alive."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def generate_request(
    prompt: object, sampling_params: object, input_ids: object, *, stream: object, options: Mapping[str, object]
) -> CallRequest:
    """Check a call of ``generate``.

    Raises:
        TypeError, ValueError: an argument is wrong; the message has its name and value.
    """
    check: PromptCheck = ids_prompt if prompt is None else text_prompt
    if options:
        check_names(options, ("prompt", "sampling_params", "input_ids", "stream"), GenerateOptions.__annotations__)
        rules = encode_rules(options)
        if (embeds := options.get("input_embeds")) is not None:
            if prompt is not None or input_ids is not None:
                raise ValueError("input_embeds is given together with a prompt; give one of them")
            request = _embeds_request(embeds, options, rules)
            return complete(request, sampling_params, stream=stream, options=options)
        if prompt is None:
            check = partial(ids_prompt, rules=rules, may_be_empty=options.get("session_params") is not None)
        else:
            check = partial(text_prompt, rules=rules)
    request = prompt_request(prompt, input_ids, check, options)
    return complete(request, sampling_params, stream=stream, options=options)


def prompt_request(prompt: object, input_ids: object, check: PromptCheck, options: Mapping[str, object]) -> CallRequest:
    """Return the request for one prompt or a list of prompts. ``check``: of texts, or of ids if ``prompt`` is None.

    Raises:
        TypeError, ValueError: both or none are given, or the prompt has a wrong type.
    """
    if (prompt is None) == (input_ids is None):
        problem = "missing" if prompt is None else "given"
        raise ValueError(f"prompt and input_ids are both {problem}; give one of them")
    if prompt is None:
        return rows_request("input_ids", input_ids, check, options, allowed=IDS_OR_ROWS)
    if isinstance(prompt, str):
        return CallRequest("prompt", [prompt], check, is_batch=False)
    texts = checks.items("prompt", prompt, checks.MAX_COUNT, allowed=checks.TEXTS)
    return CallRequest("prompt", texts, check, is_batch=True)


def chat_request(
    messages: object, sampling_params: object, *, stream: object, options: Mapping[str, object]
) -> CallRequest:
    """Check a call of ``chat``: one conversation, or a list of them.

    Raises:
        TypeError, ValueError: an argument is wrong; the message has its name and value.
    """
    check_names(options, ("messages", "sampling_params", "stream"), ChatOptions.__annotations__)
    check_prompt = partial(chat_prompt, options=template_options(options), rules=encode_rules(options))
    request = rows_request("messages", messages, check_prompt, options, allowed=MESSAGES)
    return complete(request, sampling_params, stream=stream, options=options)


def _embeds_request(value: object, options: Mapping[str, object], rules: EncodeRules) -> CallRequest:
    """Return the request of a call whose prompts are embeddings. Raises ValueError for options that need ids."""
    from aioengine.frontend.intake import embeds  # imports numpy, which most programs do not need here

    for name in ("return_prompt_token_ids", "session_params", "image_data"):
        if options.get(name) is not None and options.get(name) is not False:
            raise ValueError(f"{name} is for prompts that have token ids, and input_embeds has none; leave it out")
    values, is_batch = embeds.embeds_rows(value)
    return CallRequest(embeds.NAME, values, partial(embeds.embeds_prompt, rules=rules), is_batch)


def rows_request(
    name: str, value: object, check_prompt: PromptCheck, options: Mapping[str, object], *, allowed: str
) -> CallRequest:
    """Return a request with the rows of a list, or with the list itself as one row.

    A list is a batch if its first entry is a list. With ``return_exceptions`` the first row may be wrong, so any of the
    first ``PROMPTS_IN_PIECE`` entries may be the list.
    """
    # The rows of an array are read one by one, because converting a large array to lists would block the loop. Its
    # protocol is asked last, because that is slow.
    is_list = isinstance(value, (list, tuple, memoryview))
    is_array = not is_list and isinstance(value, checks.Array) and checks.num_items(value) > 0
    num_dimensions = cast("int", getattr(value, "ndim", 0)) if is_array else 0
    given = cast("Sequence[object]", value) if num_dimensions else checks.sequence(name, value, allowed=allowed)
    first = given[: PROMPTS_IN_PIECE if options.get("return_exceptions") is True else 1]
    is_batch = any(isinstance(entry, (list, tuple)) for entry in map(checks.plain, first))
    values = [given] if not is_batch else given if num_dimensions > 1 else list(given)
    return CallRequest(name, values, check_prompt, is_batch)


def complete(
    request: CallRequest, sampling_params: object, *, stream: object, options: Mapping[str, object]
) -> CallRequest:
    """Add the other arguments of the call to its request, and check its first rows (``check_more`` checks later ones).

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    request.num_prompts = len(request.values)
    if isinstance(sampling_params, (list, tuple)):
        request.given_params = list_for("sampling_params", cast("object", sampling_params), request, one="dict")
        request.num_samples = _num_samples(request.given_params)
    else:
        params = SamplingParams.parse(cast("Sampled | None", sampling_params))
        request.params, request.num_samples = [params], params.n
    request.num_rows = request.num_prompts * request.num_samples
    request.gives_batch = request.is_batch or request.num_samples > 1
    request.is_stream = checks.switch("stream", stream)
    if options:
        _set_options(request, options)
    num_bytes = request.check_more()
    if not request.is_batch:
        request.num_bytes = num_bytes + (0 if request.images is None else request.images.num_bytes)
    return request


def _num_samples(params: Sequence[object]) -> int:
    """Return the first valid ``n``. Wrong parameters are errors of their rows."""
    for entry in params[:PROMPTS_IN_PIECE]:
        if isinstance(entry, SamplingParams):
            return entry.n
        if isinstance(entry, Mapping) and "n" in entry:
            with contextlib.suppress(TypeError, ValueError):
                return SamplingParams.parse({"n": cast("Mapping[str, int]", entry)["n"]}).n
    return 1


def _set_options(request: CallRequest, options: Mapping[str, object]) -> None:
    rid, priority = options.get("rid"), options.get("priority")
    if isinstance(rid, list | tuple):  # each is checked with its row
        request.rids = cast("list[str]", list_for("rid", cast("object", rid), request))
    elif rid is not None:
        request.rid = _rid(rid)
    request.priority = 0 if priority is None else checks.whole("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    if (tenant := options.get("tenant")) is not None:
        request.tenant = checks.text("tenant", tenant, max_bytes=checks.MAX_TENANT_BYTES)
    request.timeouts = {key: value for key, name in _TIMEOUTS if (value := _timeout(name, options)) is not None}
    if (replica := options.get("routed_dp_rank")) is not None:
        request.replica = checks.whole("routed_dp_rank", replica, 0, MAX_REPLICAS - 1)
    request.refuses_late = checks.switch("refuse_late", options.get("refuse_late", False))
    request.resume_ttl_s = _timeout("resume_ttl", options)
    request.trace_headers = _headers(options.get("external_trace_header"))
    request.returns_exceptions = checks.switch("return_exceptions", options.get("return_exceptions", False))
    request.shows_prompt = checks.switch("return_prompt_token_ids", options.get("return_prompt_token_ids", False))
    request.adapters = adapter_choice(options, request)
    request.salts = per_prompt("cache_salt", options, _salt, request)
    request.processors = per_prompt("custom_logit_processor", options, _processor, request)
    request.hidden_states = per_prompt("return_hidden_states", options, _hidden_states, request)
    request.sessions = per_prompt("session_params", options, session_params, request)
    request.logprobs = logprob_options(options, request)
    if request.resume_ttl_s is not None and (request.gives_batch or not request.is_stream):
        raise ValueError("resume_ttl is for streams (stream=True) of one prompt and one sample (n=1)")
    image_data = options.get("image_data")
    request.images = given_images(image_data, is_batch=request.is_batch, num_prompts=request.num_prompts)
    if request.images is not None and options.get("truncate_prompt_tokens") is not None:
        raise ValueError(NOT_TRUNCATED)
    per_row = [request.salts, request.processors, request.hidden_states, request.sessions, *(request.logprobs or ())]
    if request.adapters is not None:
        per_row.append(request.adapters.of_prompts)
    request.lists = [option for option in per_row if option is not None and option.is_list]


def check_names(options: Mapping[str, object], others: tuple[str, ...], known: Mapping[str, object]) -> None:
    """Refuse unknown options, and options of missing features unless every value switches the feature off.

    ``others``: other arguments of the call, for the message.
    """
    for name, value in options.items():
        if name in known:
            continue
        if name in MISSING_OPTIONS:
            entries = cast("list[object]", value) if isinstance(value, list) else [value]
            for entry in entries:
                checks.off(name, entry, *MISSING_OPTIONS[name])
        else:
            raise _unexpected(name, (*others, *known))


def _unexpected(name: str, known: tuple[str, ...]) -> TypeError:
    if is_sampling_parameter(name) and "sampling_params" in known:
        return TypeError(f"unexpected argument {name!r}: it belongs in sampling_params, as {{{name!r}: ...}}")
    if name in CHAT_ARGUMENTS and "sampling_params" in known:
        return TypeError(f"unexpected argument {name!r}: chat takes it, for its messages")
    if hint := our_way(name):
        return TypeError(f"unexpected argument {name!r}{hint}")
    if name in ARGUMENTS or name in ALIASES:
        return TypeError(f"unexpected argument {name!r}: the constructor of the engine takes it")
    hint = checks.did_you_mean(name, (*known, *MISSING_OPTIONS))
    return TypeError(f"unexpected argument {checks.shown(name)}{hint}; allowed: {', '.join(known)}")


def _rid(value: object) -> str:
    return checks.text("rid", value, max_bytes=MAX_RID_BYTES, if_empty="leave it out for a random id")


def _salt(value: object) -> str:
    return "" if value is None else checks.text("cache_salt", value, max_bytes=MAX_SALT_BYTES)


def _hidden_states(value: object) -> str:
    """``Sampling.hidden_states``."""
    if value is None or isinstance(value, bool):
        return ALL_STATES if value else ""
    allowed = "True, False or 'last'"
    if not isinstance(value, str):
        raise checks.wrong_type("return_hidden_states", allowed, value)
    if value != LAST_STATES:
        raise checks.wrong_value("return_hidden_states", allowed, value)
    return LAST_STATES


def _headers(value: object) -> dict[str, str]:
    """Return the headers of a mapping, with names in lower case."""
    name = "external_trace_header"
    headers = {} if value is None else checks.mapping(name, value, allowed="a dict of HTTP headers")
    return {checks.text(name, key).lower(): checks.text(f"{name}[{key!r}]", header) for key, header in headers.items()}


def _processor(value: object) -> str:
    advice = "give the name of one, or leave it out for none"
    return "" if value is None else checks.text("custom_logit_processor", value, if_empty=advice)


def _timeout(name: str, options: Mapping[str, object]) -> float | None:
    value = options.get(name)
    return None if value is None else checks.number(name, value, 0, MAX_TIMEOUT_S, above=True)
