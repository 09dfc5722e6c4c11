"""What callers may write: the types of the arguments of a call, and its keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from aioengine.api import checks
from aioengine.api.params import SamplingParams
from aioengine.frontend.image_sources import Picture
from aioengine.frontend.intake.prompts import Messages

Sampled = SamplingParams | Mapping[str, object]
"""Sampling parameters as callers write them."""

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
"""One image as callers write it; ``Picture`` is ``PIL.Image.Image``."""


class PlainRequestOptions(TypedDict, total=False):
    """``RequestOptions`` without ``return_exceptions``, on which the type of the result depends."""

    rid: str | Sequence[str] | None
    priority: int | None
    tenant: str | None
    timeout: float | None
    queue_timeout: float | None
    first_token_timeout: float | None
    refuse_late: bool
    resume_ttl: float | None
    return_prompt_token_ids: bool
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    image_data: ImageData | Sequence[ImageData | Sequence[ImageData] | None] | None
    cache_salt: str | Sequence[str | None] | None
    return_hidden_states: bool | Literal["last"] | Sequence[bool | Literal["last"] | None] | None
    lora_path: str | Sequence[str | None] | None
    custom_logit_processor: str | Sequence[str | None] | None
    session_params: Mapping[str, object] | Sequence[Mapping[str, object] | None] | None
    return_logprob: bool | Sequence[bool | None] | None
    logprob_start_len: int | Sequence[int | None] | None
    top_logprobs_num: int | Sequence[int | None] | None
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int] | None] | checks.Array | None
    return_text_in_logprobs: bool | Sequence[bool | None] | None


class RequestOptions(PlainRequestOptions, total=False):
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
    return_exceptions: rows of a batch that are wrong, or fail, give their exception instead of ending the call. A
        mistake in the whole call still raises, and so does a single prompt.
    return_prompt_token_ids: answers and chunks carry ``prompt_token_ids``.
    add_special_tokens: whether the tokenizer adds its special tokens to a text, such as that of its beginning. None: to
        a ``prompt``, and not to a chat, whose template writes them.
    truncate_prompt_tokens: how many of the last tokens of each prompt are kept, special ones among them; None: all.
    image_data: the images of a prompt, which has a placeholder for each: one, or a list of them, as a path, a URL
        (``http://``, ``file://``, ``data:``), base64 text, bytes or a PIL image. A batch takes one for all prompts, or
        a list with one entry for each: an image, a list of images, or None.
    cache_salt: requests find cached prefixes of others with the same salt alone; a batch takes one, or a list. None and
        "": the prefixes that have no salt.
    return_hidden_states: True: ``meta_info["hidden_states"]`` is a list of float32 arrays of numpy, one for each output
        token: first [tokens, D] of the whole prompt, which is computed for it, then [D] of the position that gave each
        further token. "last": the one [D] of the position that gave the last token. A batch takes one, or a list.
    lora_path: the name of the LoRA adapter to use; None: the base model. A batch takes one, or a list.
    custom_logit_processor: the name of one of the engine's ``logits_processors``, which changes the logits of the
        request by its ``custom_params``; a batch takes one, or a list. None: none.
    session_params: go on from earlier requests of a session (``open_session``): a dict with its ``id`` and the ``rid``
        of the request to go on from, or a list with one for each prompt. The prompt is added to the prompt and the
        output of that request. ``drop_previous_output`` leaves out its output, ``offset`` keeps that many ids of both;
        ``replace`` ends it, where it runs, and forgets what went on from it. Without ``rid`` the prompt begins anew
        (``replace``: and all else is forgotten). A session with ``streaming=True`` goes on from its last answer.
    return_logprob: ``meta_info`` gets the logprobs of the output tokens, of the distribution that ``logprobs_mode`` of
        the engine names. This and the next four are one value for all prompts of a batch, or a list with one for each.
    logprob_start_len: prompt tokens from this position on get logprobs too; -1: none.
    top_logprobs_num: how many of the likeliest tokens at each position get logprobs too, up to the vocabulary.
    token_ids_logprob: further tokens that get logprobs at each position: ids, for a batch also a list of such lists.
    return_text_in_logprobs: logprobs come with the text of each token.
    """

    return_exceptions: bool


class GenerateOptions(RequestOptions, total=False):
    """Keyword arguments of ``generate``: those of every call, and another form of a prompt.

    input_embeds: in place of a prompt its embeddings: a float array [tokens, D] of numpy or torch, or nested lists; a
        list of them is a batch. They share no cached prefix with other calls.
    """

    input_embeds: Embeds | BatchEmbeds | None


class PlainChatOptions(PlainRequestOptions, total=False):
    """``ChatOptions`` without ``return_exceptions``."""

    chat_template: str | os.PathLike[str] | None
    enable_thinking: bool | None
    tools: Sequence[Mapping[str, object]] | None
    chat_template_kwargs: Mapping[str, object] | None


class ChatOptions(PlainChatOptions, total=False):
    """Keyword arguments of ``chat``: those of every call, and how its messages are written.

    chat_template: the name of one of the model's chat templates, in place of the default. If the engine has
        ``allow_request_templates=True``, also the text of a template, or a file (``pathlib.Path``). It runs in this
        process, without a limit on its time: take none from strangers.
    enable_thinking: whether the model thinks before it answers, where its template knows that variable.
    tools: what the model may call: dicts in JSON schema form.
    chat_template_kwargs: other variables for the template, and its switches ``add_generation_prompt`` and
        ``continue_final_message``.
    """

    return_exceptions: bool
