"""The signatures of the constructors and of the calls, for both engines.

The calls are protocols for type checkers; the methods are plain functions. The parameters of a protocol are the types
of its results: for one prompt, for a batch, for a batch whose rows may be exceptions, and for a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence  # for typing.get_type_hints(EngineArguments)
from functools import wraps
from inspect import Parameter, Signature, iscoroutinefunction, signature
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from aioengine.api.answers import Answer, BatchOutput, Embedding, Ranking
from aioengine.api.args import ARGUMENTS
from aioengine.api.stream import Generation, Stream
from aioengine.frontend.intake.pool_requests import EncodeOptions, Pairs, PlainEncodeOptions, PlainPoolOptions
from aioengine.frontend.intake.prompts import Messages
from aioengine.frontend.intake.request_options import (
    BatchEmbeds,
    BatchIds,
    BatchSampled,
    ChatOptions,
    Chats,
    Conversations,
    Embeds,
    Ids,
    PlainChatOptions,
    PlainRequestOptions,
    Prompt,
    RequestOptions,
    Sampled,
    Texts,
    TokenIds,
)
from aioengine.frontend.intake.requests import check_names
from aioengine.frontend.intake.score import PlainScoreOptions, ScoreOptions, ScoreResult

if TYPE_CHECKING:
    OnlyFalse = Literal[False]
    OnlyTrue = Literal[True]
    Params = Sampled | None
    BatchParams = BatchSampled | None
    Query = str | TokenIds | None
    Items = str | Texts | Ids | None
    Labels = Ids | None

    class RaisingRequest(PlainRequestOptions, total=False):
        """The options of a batch that raises the error of any row."""

        return_exceptions: OnlyFalse

    class RaisingChat(PlainChatOptions, total=False):
        return_exceptions: OnlyFalse

    class RaisingEncode(PlainEncodeOptions, total=False):
        return_exceptions: OnlyFalse

    class RaisingRerank(PlainPoolOptions, total=False):
        return_exceptions: OnlyFalse

    class RaisingScore(PlainScoreOptions, total=False):
        return_exceptions: OnlyFalse


class Dtype(Protocol):
    """``torch.dtype``, which is not imported here."""

    @property
    def is_floating_point(self) -> bool: ...


class EngineArguments(TypedDict, total=False):
    """Keyword arguments of ``Engine`` and ``AsyncEngine``, except ``model_path``. The default of each is None."""

    tokenizer_path: str | PurePath | None
    revision: str | None
    download_dir: str | PurePath | None
    load_format: str | None
    quantization: str | None
    quantization_group_size: int | None
    dtype: str | Dtype | None
    context_length: int | None
    model_impl: str | None
    trust_remote_code: bool | None
    skip_tokenizer_init: bool | None
    chat_template: str | PurePath | None
    allow_request_templates: bool | None
    is_embedding: bool | None
    sampling_defaults: str | None
    device: str | None
    attention_backend: str | None
    enable_deterministic_inference: bool | None
    tp_size: int | None
    dp_size: int | None
    executor: str | None
    load_balance_method: str | None
    base_gpu_id: int | None
    disable_cuda_graph: bool | None
    cuda_graph_max_bs: int | None
    logits_processors: Sequence[str] | str | None
    enable_lora: bool | None
    lora_paths: Sequence[str | PurePath | Mapping[str, object]] | Mapping[str, str | PurePath] | str | None
    max_loras_per_batch: int | None
    max_lora_rank: int | None
    lora_target_modules: Sequence[str] | str | None
    max_loaded_loras: int | None
    allowed_local_media_path: str | PurePath | None
    allow_private_urls: bool | None
    max_image_bytes: int | None
    max_image_pixels: int | None
    max_images_per_prompt: int | None
    media_timeout: float | None
    page_size: int | None
    kv_cache_dtype: str | None
    max_total_tokens: int | None
    mem_fraction_static: float | None
    disable_radix_cache: bool | None
    max_running_requests: int | None
    chunked_prefill_size: int | None
    schedule_policy: str | None
    tenant_weights: Mapping[str, float] | str | None
    disable_overlap_schedule: bool | None
    speculative_algorithm: str | None
    speculative_num_draft_tokens: int | None
    speculative_num_steps: int | None
    speculative_draft_model_path: str | PurePath | None
    speculative_draft_model_revision: str | None
    speculative_draft_model_quantization: str | None
    max_queued_requests: int | None
    max_queued_tokens: int | None
    max_queued_bytes: int | None
    max_logprob_bytes: int | None
    slow_reader: str | None
    slow_reader_timeout: float | None
    max_hidden_state_bytes: int | None
    max_restarts: int | None
    restart_window: float | None
    stall_timeout: float | None
    startup_timeout: float | None
    enable_memory_saver: bool | None
    enable_weights_cpu_backup: bool | None
    stream_interval: int | None
    logprobs_mode: str | None
    random_seed: int | None
    log_level: str | None
    progress: bool | None
    # names of other engines
    model: str | PurePath | None
    tokenizer: str | PurePath | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float | None
    block_size: int | None
    cuda_graph_max_bs_decode: int | None
    enforce_eager: bool | None
    tensor_parallel_size: int | None
    data_parallel_size: int | None
    watchdog_timeout: float | None
    seed: int | None


_ROWS = [f"    {name}: {argument.description}" for name, argument in ARGUMENTS.items() if name != "model_path"]
EngineArguments.__doc__ = "\n".join((EngineArguments.__doc__ or "", "", *_ROWS))

Method = TypeVar("Method", bound=Callable[..., object])


def engine_arguments(method: Method) -> Method:
    """Make ``inspect.signature``, ``help`` and notebooks show each argument of a constructor with its default."""
    types = {name: getattr(hint, "__forward_arg__", hint) for name, hint in EngineArguments.__annotations__.items()}
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for name, argument in ARGUMENTS.items():
        kind = Parameter.POSITIONAL_OR_KEYWORD if name == "model_path" else Parameter.KEYWORD_ONLY
        hint = types.get(name, "str | PurePath | None")
        parameters.append(Parameter(name, kind, default=argument.default, annotation=hint))
    method.__doc__ = EngineArguments.__doc__
    method.__qualname__ = "__init__"  # errors would name the internal base class
    method.__dict__["__signature__"] = Signature(parameters, return_annotation=None)
    return method


def own_arguments(method: Method) -> Method:
    """Make a method raise a TypeError for an unknown keyword that names the nearest known one, as ``generate`` does."""
    known = {name: parameter for name, parameter in signature(method).parameters.items() if name != "self"}

    def call(*arguments: object, **options: object) -> object:
        unknown = {name: value for name, value in options.items() if name not in known}
        check_names(unknown, (), known)
        return method(*arguments, **options)

    async def call_async(*arguments: object, **options: object) -> object:
        return await cast("Any", call(*arguments, **options))

    return cast("Method", wraps(method)(call_async if iscoroutinefunction(method) else call))


One = TypeVar("One", covariant=True)
Batch = TypeVar("Batch", covariant=True)
Caught = TypeVar("Caught", covariant=True)
"""A batch whose rows may be exceptions (``return_exceptions=True``)."""
Chunks = TypeVar("Chunks", covariant=True)
Result = TypeVar("Result")


class Generate(Protocol[One, Batch, Caught, Chunks]):
    """A method like ``generate``: a prompt or its token ids; a list of either is a batch."""

    @overload
    def __call__(
        self,
        prompt: str | None = None,
        sampling_params: Params = None,
        input_ids: TokenIds | None = None,
        *,
        stream: OnlyFalse = False,
        input_embeds: Embeds | None = None,
        **options: Unpack[RequestOptions],
    ) -> One: ...
    @overload
    def __call__(
        self,
        prompt: Texts | None = None,
        sampling_params: BatchParams = None,
        input_ids: BatchIds | None = None,
        *,
        stream: OnlyFalse = False,
        input_embeds: BatchEmbeds | None = None,
        **options: Unpack[RaisingRequest],
    ) -> Batch: ...
    @overload
    def __call__(
        self,
        prompt: Texts | None = None,
        sampling_params: BatchParams = None,
        input_ids: BatchIds | None = None,
        *,
        stream: OnlyFalse = False,
        input_embeds: BatchEmbeds | None = None,
        **options: Unpack[RequestOptions],
    ) -> Caught: ...
    @overload
    def __call__(
        self,
        prompt: Prompt | None = None,
        sampling_params: BatchParams = None,
        input_ids: Ids | None = None,
        *,
        stream: OnlyTrue,
        input_embeds: Embeds | BatchEmbeds | None = None,
        **options: Unpack[RequestOptions],
    ) -> Chunks: ...
    @overload
    def __call__(
        self,
        prompt: Prompt | None = None,
        sampling_params: BatchParams = None,
        input_ids: Ids | None = None,
        *,
        stream: bool,
        input_embeds: Embeds | BatchEmbeds | None = None,
        **options: Unpack[RaisingRequest],
    ) -> One | Batch | Chunks: ...
    @overload
    def __call__(
        self,
        prompt: Prompt | None = None,
        sampling_params: BatchParams = None,
        input_ids: Ids | None = None,
        *,
        stream: bool,
        input_embeds: Embeds | BatchEmbeds | None = None,
        **options: Unpack[RequestOptions],
    ) -> One | Caught | Chunks: ...


class Chat(Protocol[One, Batch, Caught, Chunks]):
    """A method like ``chat``: a conversation; a list of them is a batch."""

    @overload
    def __call__(
        self,
        messages: Messages,
        sampling_params: Params = None,
        *,
        stream: OnlyFalse = False,
        **options: Unpack[ChatOptions],
    ) -> One: ...
    @overload
    def __call__(
        self,
        messages: Chats,
        sampling_params: BatchParams = None,
        *,
        stream: OnlyFalse = False,
        **options: Unpack[RaisingChat],
    ) -> Batch: ...
    @overload
    def __call__(
        self,
        messages: Chats,
        sampling_params: BatchParams = None,
        *,
        stream: OnlyFalse = False,
        **options: Unpack[ChatOptions],
    ) -> Caught: ...
    @overload
    def __call__(
        self,
        messages: Conversations,
        sampling_params: BatchParams = None,
        *,
        stream: OnlyTrue,
        **options: Unpack[ChatOptions],
    ) -> Chunks: ...
    @overload
    def __call__(
        self,
        messages: Conversations,
        sampling_params: BatchParams = None,
        *,
        stream: bool,
        **options: Unpack[RaisingChat],
    ) -> One | Batch | Chunks: ...
    @overload
    def __call__(
        self,
        messages: Conversations,
        sampling_params: BatchParams = None,
        *,
        stream: bool,
        **options: Unpack[ChatOptions],
    ) -> One | Caught | Chunks: ...


class Encode(Protocol[One, Batch, Caught]):
    """A method like ``encode``: a text or its token ids; a list of either is a batch."""

    @overload
    def __call__(
        self, prompt: str | None = None, *, input_ids: TokenIds | None = None, **options: Unpack[EncodeOptions]
    ) -> One: ...
    @overload
    def __call__(
        self, prompt: Texts | None = None, *, input_ids: BatchIds | None = None, **options: Unpack[RaisingEncode]
    ) -> Batch: ...
    @overload
    def __call__(
        self, prompt: Texts | None = None, *, input_ids: BatchIds | None = None, **options: Unpack[EncodeOptions]
    ) -> Caught: ...


class Rerank(Protocol[Batch, Caught]):
    """A method like ``rerank``: a query and documents, or pairs of them."""

    @overload
    def __call__(
        self, query: str, documents: Texts, *, top_n: int | None = None, **options: Unpack[RaisingRerank]
    ) -> Batch: ...
    @overload
    def __call__(
        self, query: Pairs, documents: None = None, *, top_n: None = None, **options: Unpack[RaisingRerank]
    ) -> Batch: ...
    @overload
    def __call__(
        self,
        query: str | Pairs,
        documents: Texts | None = None,
        *,
        top_n: int | None = None,
        return_exceptions: bool,
        **options: Unpack[PlainPoolOptions],
    ) -> Caught: ...


class Score(Protocol[Batch, Caught]):
    """A method like ``score``."""

    @overload
    def __call__(
        self, query: Query = None, items: Items = None, label_token_ids: Labels = None, **options: Unpack[RaisingScore]
    ) -> Batch: ...
    @overload
    def __call__(
        self, query: Query = None, items: Items = None, label_token_ids: Labels = None, **options: Unpack[ScoreOptions]
    ) -> Caught: ...


def _unchanged(method: Any) -> Any:
    return method


Typed = Callable[[Callable[..., object]], Result]
"""A decorator that gives a method a type."""

async_generate: Typed[
    Generate[Generation[Answer], Generation[BatchOutput], Generation[BatchOutput[Answer | Exception]], Stream]
] = _unchanged
async_chat: Typed[
    Chat[Generation[Answer], Generation[BatchOutput], Generation[BatchOutput[Answer | Exception]], Stream]
] = _unchanged
async_encode: Typed[
    Encode[Generation[Embedding], Generation[BatchOutput[Embedding]], Generation[BatchOutput[Embedding | Exception]]]
] = _unchanged
async_rerank: Typed[Rerank[Generation[BatchOutput[Ranking]], Generation[BatchOutput[Ranking | Exception]]]] = _unchanged
async_score: Typed[
    Score[Coroutine[None, None, ScoreResult], Coroutine[None, None, ScoreResult[list[float] | Exception]]]
] = _unchanged
