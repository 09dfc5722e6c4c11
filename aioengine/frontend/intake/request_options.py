"""The types of the arguments of a call, and its keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from aioengine.api import checks
from aioengine.api.params import SamplingParams
from aioengine.frontend.intake.prompts import Messages
from aioengine.media.intake.sources import Picture

Sampled = SamplingParams | Mapping[str, object]
"""Sampling parameters of one prompt."""

BatchSampled = Sampled | Sequence[Sampled | None]
"""Sampling parameters of a batch: one for all, or one for each prompt."""

Texts = list[str] | tuple[str, ...]
TokenIds = list[int] | tuple[int, ...] | checks.Array
BatchIds = list[list[int]] | list[tuple[int, ...]] | tuple[list[int], ...]
Embeds = checks.Array | Sequence[Sequence[float]]
BatchEmbeds = Sequence[checks.Array] | Sequence[Sequence[Sequence[float]]]
Chats = list[list[dict[str, object]]] | list[list[dict[str, str]]] | list[Messages] | tuple[Messages, ...]

Prompt = str | Texts
Ids = TokenIds | BatchIds
Conversations = Messages | Chats

ImageData = str | bytes | bytearray | memoryview | os.PathLike[str] | Picture
"""One image; ``Picture`` is ``PIL.Image.Image``."""


class CommonOptions(TypedDict, total=False):
    """The options of all calls. ``RequestOptions`` describes them."""

    rid: str | Sequence[str] | None
    priority: int | None
    tenant: str | None
    timeout: float | None
    queue_timeout: float | None
    refuse_late: bool
    external_trace_header: Mapping[str, str] | None
    cache_salt: str | Sequence[str | None] | None
    lora_path: str | Sequence[str | None] | None
    routed_dp_rank: int | None


class PlainRequestOptions(CommonOptions, total=False):
    """``RequestOptions`` without ``return_exceptions``, which changes the type of the result."""

    first_token_timeout: float | None
    resume_ttl: float | None
    return_prompt_token_ids: bool
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    image_data: ImageData | Sequence[ImageData | Sequence[ImageData] | None] | None
    return_hidden_states: bool | Literal["last"] | Sequence[bool | Literal["last"] | None] | None
    custom_logit_processor: str | Sequence[str | None] | None
    session_params: Mapping[str, object] | Sequence[Mapping[str, object] | None] | None
    return_logprob: bool | Sequence[bool | None] | None
    logprob_start_len: int | Sequence[int | None] | None
    top_logprobs_num: int | Sequence[int | None] | None
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int] | None] | checks.Array | None
    return_text_in_logprobs: bool | Sequence[bool | None] | None


class RequestOptions(PlainRequestOptions, total=False):
    """Keyword arguments of every call that generates.

    A batch takes one value for all prompts or, where the type has a ``Sequence``, a list with one value per prompt.

    rid: an id for ``abort_request`` and the logs, unique among live requests. From one id, the rows of a batch and the
        ``n`` samples get ``rid_0``, ``rid_1`` ... None: a random id. The id can be used again after the request ended
        or its reader left (with ``resume_ttl``: after that time).
    priority: each level counts as 10 seconds of waiting; with ``schedule_policy="priority"``, as 10 minutes.
    tenant: the tenant of the request. Tenants share the engine by their weights (``tenant_weights``), independent of
        their number of requests; ``priority`` orders the requests of one tenant.
    timeout, queue_timeout, first_token_timeout: seconds from the call to its end, to its admission, to its first token.
        When one expires, the request ends with reason ``deadline`` and its output so far.
    refuse_late: raise EngineOverloadedError immediately if the speed of the queue shows that a timeout will be missed.
        Awaiting a stream then waits for its first chunk.
    resume_ttl: seconds for which the stream of a single prompt outlives its reader. A reader that leaves does not abort
        it, ``attach`` continues it, and it can be read again after its end.
    external_trace_header: HTTP headers of the caller with ``traceparent``, for ``aioengine.tracing``: the span of the
        request belongs to this trace.
    return_exceptions: the result of a wrong or failed row of a batch is its exception; other rows continue. A mistake
        in the whole call still raises, and so does a single prompt.
    return_prompt_token_ids: answers and chunks have ``prompt_token_ids``.
    add_special_tokens: whether the tokenizer adds special tokens, such as the one for the start of a text. None: yes
        for a ``prompt``, no for a chat, because its template writes them.
    truncate_prompt_tokens: keep only this number of last tokens of each prompt, including special tokens. None: all.
    image_data: one image or a list of images per prompt. The prompt has a placeholder for each. An image is a path, a
        URL (``http://``, ``file://``, ``data:``), base64 text, bytes or a PIL image. The list of a batch has an image,
        a list of images or None per prompt.
    cache_salt: share cached prefixes only with requests of the same salt. None and "" are the same salt.
    return_hidden_states: True: ``meta_info["hidden_states"]`` is a list of float32 numpy arrays, one per output token.
        The first is [T, D], for all T tokens of the prompt (which is computed without the prefix cache). The others are
        [D], for the position that predicted the token. "last": one [D], for the position that predicted the last token.
    lora_path: the name of the LoRA adapter to use; None: the base model.
    custom_logit_processor: the name of one of the engine's ``logits_processors``. It changes the logits of the request,
        with the parameters in ``custom_params``. None: no processor.
    session_params: continue an earlier request of a session (``open_session``): a dict with the ``id`` of the session
        and the ``rid`` of that request. The prompt is appended to its prompt and output. ``drop_previous_output``
        leaves out its output. ``offset`` keeps only that many token ids of both. ``replace`` aborts it if it runs, and
        forgets the requests that continued it. Without ``rid`` a new history starts (with ``replace``, the session
        forgets all others). A session with ``streaming=True`` continues from its last answer.
    return_logprob: ``meta_info`` has the logprobs of the output tokens. ``logprobs_mode`` of the engine selects the
        distribution.
    logprob_start_len: prompt tokens from this position on have logprobs too; -1: none.
    top_logprobs_num: number of most likely tokens at each position that have logprobs too, up to the vocabulary size.
    token_ids_logprob: more token ids that have logprobs at each position.
    return_text_in_logprobs: each logprob has the text of its token.
    routed_dp_rank: the replica for the call, less than ``dp_size``. None, or if it has failed: the engine chooses.
    """

    return_exceptions: bool


class GenerateOptions(RequestOptions, total=False):
    """Keyword arguments of ``generate``: ``RequestOptions`` and ``input_embeds``.

    input_embeds: the embeddings of a prompt instead of its text: a float array [T, D] of numpy or torch, or nested
        lists. A list of arrays is a batch. They share no cached prefixes with other calls.
    """

    input_embeds: Embeds | BatchEmbeds | None


class PlainChatOptions(PlainRequestOptions, total=False):
    """``ChatOptions`` without ``return_exceptions``."""

    chat_template: str | os.PathLike[str] | None
    enable_thinking: bool | None
    tools: Sequence[Mapping[str, object]] | None
    chat_template_kwargs: Mapping[str, object] | None


class ChatOptions(PlainChatOptions, total=False):
    """Keyword arguments of ``chat``: ``RequestOptions`` and options of the chat template.

    chat_template: the name of one of the model's chat templates instead of the default one. If the engine has
        ``allow_request_templates=True``, also the text of a template or a file (``pathlib.Path``). Templates run in
        this process without a time limit: accept them only from trusted clients.
    enable_thinking: whether the model thinks before it answers, if its template has this variable.
    tools: descriptions of functions that the model may call: dicts in JSON Schema form.
    chat_template_kwargs: more variables for the template, and the switches ``add_generation_prompt`` and
        ``continue_final_message``.
    """

    return_exceptions: bool
