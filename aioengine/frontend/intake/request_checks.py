"""RequestChecks: checks the rows of a call against the engine's model and limits, before they are queued."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, cast

from msgspec import Meta, ValidationError, convert, defstruct

from aioengine.api import checks
from aioengine.api.params import SamplingParams, output_limit, sampling, stop_ids, text_rules
from aioengine.errors import RequestTooLargeError
from aioengine.frontend.engine_parts import EngineParts
from aioengine.frontend.intake.encoder import Encoder
from aioengine.frontend.intake.image_prompts import PromptImages, check_images
from aioengine.frontend.intake.pooling import completed
from aioengine.frontend.intake.prompts import ChatPrompt, EmbedsIds, IdsPrompt, PooledPrompt, TextPrompt
from aioengine.frontend.intake.requests import CallRequest, MessageParts
from aioengine.protocol.messages import ALL_STATES


class RequestChecks:
    """Checks requests against the model. From any thread.

    Attributes:
        parts: the engine. model: its model. images: None if the model reads only text. output_limit: of this model.
    """

    def __init__(self, parts: EngineParts, encoder: Encoder, images: PromptImages | None = None) -> None:
        self.parts = parts
        self.model = model = parts.settings.model
        self.encoder = encoder
        self.images = images
        self._num_replicas = cast("int", parts.facts.get("num_replicas", 1))
        # Ids are checked in one pass. msgspec caches the types of a Struct.
        self._ids = defstruct("Ids", [("token_ids", list[Annotated[int, Meta(ge=0, lt=model.vocab_size)]])])
        self.output_limit = partial(
            output_limit, context_length=model.context_length, max_total_tokens=parts.max_total_tokens
        )
        self._last_message_parts: MessageParts | None = None

    def check_more(self, request: CallRequest) -> None:
        """Check some more prompts of a long batch: first alone, then against the model."""
        first = len(request.prompts)
        request.check_more()
        self.check(request, first)

    def check(self, request: CallRequest, first: int = 0) -> None:
        """Check the prompts from ``first`` on against the model. ``CallRequest.check_more`` has checked them alone.

        If rows may fail alone, a wrong row gets its error in its place.

        Raises:
            TypeError, ValueError: the call is wrong, or a row that may not fail alone.
        """
        has_tokenizer = self.encoder.has_tokenizer
        if first == 0:  # the options that all rows share
            if request.replica is not None and request.replica >= self._num_replicas:
                raise checks.wrong_value("routed_dp_rank", f"less than dp_size={self._num_replicas}", request.replica)
            if request.pooled is not None or self.model.task != "generate":
                request.pooled = completed(request.pooled, self.model)
            self._check_options(request, 0, per_prompt=False)
        for index in range(first, len(request.prompts)):
            prompt = request.prompts[index]
            if not has_tokenizer and isinstance(prompt, TextPrompt | ChatPrompt | PooledPrompt):
                raise ValueError("this engine has no tokenizer (skip_tokenizer_init); give input_ids")
            if isinstance(prompt, ChatPrompt) and prompt.options.template is not None:
                self._check_template(prompt.options.template)
            try:
                if request.lists or request.given_params is not None:
                    self._check_options(request, index, per_prompt=True)
                if isinstance(prompt, IdsPrompt):
                    self.check_ids(prompt.token_ids)
                if request.images is not None or isinstance(prompt, ChatPrompt):
                    check_images(request, index, self.images)
            except (TypeError, ValueError) as error:
                request.fail_prompt(index, error)

    def _check_options(self, request: CallRequest, prompt_index: int, *, per_prompt: bool) -> None:
        """Check the options of a prompt. ``per_prompt``: the options with one value per prompt; False: the others."""
        logprobs, processors = request.logprobs, request.processors
        if logprobs is not None and logprobs.is_list == per_prompt:
            logprobs.check(prompt_index, self.model.vocab_size, has_tokenizer=self.encoder.has_tokenizer)
        if (request.given_params is not None) == per_prompt:
            self._check_params(request, request.params_of(prompt_index))
        if processors is not None and processors.is_list == per_prompt:
            self._check_processor(processors.of(prompt_index))

    def _check_template(self, template: str | os.PathLike[str]) -> None:
        tokenizer = self.parts.tokenizer
        if tokenizer is None or self.parts.settings.text.allow_request_templates:
            return
        names = tokenizer.template_names
        if not (isinstance(template, str) and template in names):
            given, known = checks.shown(os.fspath(template)), ", ".join(names) or "it has none"
            text = f"chat_template={given} is none of the model's templates ({known})"
            raise ValueError(f"{text}; allow_request_templates=True allows others")

    def _check_params(self, request: CallRequest, params: SamplingParams) -> None:
        """Convert parameters to ``request.message_parts``, and check them.

        Calls often share the object of the last call.

        Raises:
            ValueError: an id is outside the vocabulary, or a tokenizer is needed.
        """
        parts, has_tokenizer = self._last_message_parts, self.encoder.has_tokenizer
        if parts is None or parts.params is not params:
            parts = request.message_parts.get(id(params))
        if parts is None:
            vocab_size, eos_token_ids = self.model.vocab_size, self.parts.eos_token_ids
            parts = MessageParts(
                params,
                sampling(
                    params,
                    vocab_size=vocab_size,
                    eos_token_ids=eos_token_ids,
                    tokenize=self.encoder.tokenize if has_tokenizer else None,
                    defaults=self.model.sampling_defaults,
                ),
                stop_ids(params, vocab_size=vocab_size, eos_token_ids=eos_token_ids),
                text_rules(params, stream_interval=self.parts.blueprint.stream_interval),
            )
        request.message_parts[id(params)] = self._last_message_parts = parts
        if not has_tokenizer and (parts.text.stop or parts.text.stop_regex):
            raise ValueError("stop and stop_regex need a tokenizer, and this engine has none; use stop_token_ids")
        if not has_tokenizer and parts.sampling.grammar:
            raise ValueError("structured output needs a tokenizer, and this engine has none (skip_tokenizer_init)")

    def _check_processor(self, name: str) -> None:
        known = self.parts.settings.runner.logits_processors
        if name and name not in known:
            allowed = f"allows {', '.join(known)}" if known else "allows none (logits_processors of the constructor)"
            raise ValueError(f"custom_logit_processor {checks.shown(name)} is not known: this engine {allowed}")

    def check_ids(self, token_ids: list[int]) -> None:
        """Raise ValueError for ids outside the vocabulary."""
        size = self.model.vocab_size
        if isinstance(token_ids, EmbedsIds) and token_ids.width != self.model.hidden_size:
            raise ValueError(f"input_embeds has the width {token_ids.width}; this model needs {self.model.hidden_size}")
        if len(token_ids) > self.model.context_length:
            return  # refused anyway, and may be very long
        try:
            convert({"token_ids": token_ids}, self._ids)
        except ValidationError:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise ValueError(f"input_ids has {wrong}, outside the vocabulary; ids go from 0 to {size - 1}") from None

    def check_hidden_states(self, states: str, num_ids: int, max_new_tokens: int) -> None:
        """Raise RequestTooLargeError if the hidden states of a row may be larger than allowed."""
        num_positions = num_ids + max_new_tokens - 1 if states == ALL_STATES else 1
        num_bytes = 4 * self.model.hidden_size * num_positions
        max_bytes = self.parts.blueprint.delivery.max_hidden_state_bytes
        if num_bytes > max_bytes:
            excess = f"the hidden states may take {num_bytes} bytes; max_hidden_state_bytes={max_bytes} are allowed"
            raise RequestTooLargeError(f"{excess}; lower max_new_tokens, or give a shorter prompt")
