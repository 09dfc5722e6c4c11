"""The types of the constructors, of ``generate`` and of ``chat``, written once for both engines.

One prompt gives one kind of result, a list of prompts another, a stream a third. Each face says which three these are;
its methods stay plain functions, and only type checkers look here.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  # for typing.get_type_hints(EngineArguments)
from inspect import Parameter, Signature
from pathlib import PurePath  # noqa: TC003
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypedDict, TypeVar, cast, overload

from aioengine.answers import Answer, BatchOutput
from aioengine.args import ARGUMENTS
from aioengine.stream import Generation, Stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from aioengine.frontend.prompts import Messages
    from aioengine.frontend.requests import (
        BatchIds,
        BatchSampled,
        ChatOptions,
        Chats,
        RequestOptions,
        Sampled,
        Texts,
        TokenIds,
    )

MODEL_PATH: Final = "str | PurePath | None"


class Dtype(Protocol):
    """``torch.dtype``, which is not imported here."""

    @property
    def is_floating_point(self) -> bool: ...

    @property
    def is_complex(self) -> bool: ...


class OtherNames(TypedDict, total=False):
    """Names that other engines have for arguments of the constructor."""

    model: str | PurePath | None
    tokenizer: str | PurePath | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float | None
    block_size: int | None
    cuda_graph_max_bs_decode: int | None
    enforce_eager: bool | None
    watchdog_timeout: float | None
    seed: int | None


class EngineArguments(OtherNames, total=False):
    """Keyword arguments of ``Engine`` and ``AsyncEngine``, beside ``model_path``. None is the default, for each.

    tokenizer_path: folder or hub id of the tokenizer (default: the model's folder)
    revision: branch, tag or commit of the hub (default: the main branch)
    download_dir: where downloads go (default: the hub's cache)
    load_format: auto, safetensors, or dummy weights (default: auto)
    dtype: auto, bfloat16, float16 or float32 (default: auto)
    context_length: tokens of prompt and output (default: the model's)
    trust_remote_code: no effect: no code of a model folder is run (default: False)
    skip_tokenizer_init: token ids in, token ids out, no text (default: False)
    chat_template: text or file of a chat template in place of the model's own (default: the model's)
    device: auto, cpu or cuda (default: auto)
    attention_backend: auto; flashinfer or triton on a GPU, fused on a CPU, torch on both (default: auto)
    enable_deterministic_inference: the same bits in any batch on a GPU too (a CPU always does) (default: False)
    disable_cuda_graph: no CUDA graphs (default: False)
    cuda_graph_max_bs: most rows of a CUDA graph (default: max_running_requests, 1024 at most)
    page_size: tokens of a page of KV memory (default: 16)
    max_total_tokens: size of the KV pool in tokens (default: what fits into the memory)
    mem_fraction_static: share of the memory for weights and KV pool (default: 0.88 on a GPU, 0.4 on a CPU)
    disable_radix_cache: no prefix cache (default: False)
    max_running_requests: requests computed at once (default: 1024 on a GPU, 64 on a CPU)
    chunked_prefill_size: tokens of one step; -1: prompts are never split (default: 8192 on a GPU, 512 on a CPU)
    schedule_policy: fcfs, longest_prefix (lpm) or priority (default: fcfs)
    tenant_weights: tenant=weight,...: shares of the engine (default: 1 each)
    disable_overlap_schedule: read each step before the next is launched (a CPU always does) (default: False)
    max_queued_requests: requests that may wait (default: 4096)
    max_queued_tokens: prompt tokens that may wait (default: 4194304)
    max_queued_bytes: bytes of the prompts of open calls (default: 268435456)
    slow_reader: what a reader that stays away brings about: coalesce (unread chunks are merged), pause or abort
        (default: coalesce)
    slow_reader_timeout: seconds that a reader may stay away (default: 30)
    max_restarts: replacements of lost processes before the engine gives up; 0: none (default: 3)
    restart_window: seconds within which max_restarts counts (default: 600)
    stall_timeout: seconds (at least 2) without progress before the engine counts as stalled (default: 600)
    startup_timeout: seconds that starting may take (default: 600)
    stream_interval: output tokens between two chunks of a stream (default: 1)
    random_seed: seed from which the seeds of requests are drawn (default: drawn)
    log_level: debug, info, warning, error or critical (default: error)
    progress: progress bars (default: where stderr is a terminal or a notebook)
    """

    tokenizer_path: str | PurePath | None
    revision: str | None
    download_dir: str | PurePath | None
    load_format: str | None
    dtype: str | Dtype | None
    context_length: int | None
    trust_remote_code: bool | None
    skip_tokenizer_init: bool | None
    chat_template: str | PurePath | None
    device: str | None
    attention_backend: str | None
    enable_deterministic_inference: bool | None
    disable_cuda_graph: bool | None
    cuda_graph_max_bs: int | None
    page_size: int | None
    max_total_tokens: int | None
    mem_fraction_static: float | None
    disable_radix_cache: bool | None
    max_running_requests: int | None
    chunked_prefill_size: int | None
    schedule_policy: str | None
    tenant_weights: Mapping[str, float] | str | None
    disable_overlap_schedule: bool | None
    max_queued_requests: int | None
    max_queued_tokens: int | None
    max_queued_bytes: int | None
    slow_reader: str | None
    slow_reader_timeout: float | None
    max_restarts: int | None
    restart_window: float | None
    stall_timeout: float | None
    startup_timeout: float | None
    stream_interval: int | None
    random_seed: int | None
    log_level: str | None
    progress: bool | None


Method = TypeVar("Method", bound="Callable[..., object]")


def engine_arguments(method: Method) -> Method:
    """Make ``inspect.signature``, ``help`` and notebooks show each argument of a constructor with its default."""
    types = {name: str(getattr(of, "__forward_arg__", of)) for name, of in EngineArguments.__annotations__.items()}
    first = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    first += [Parameter("model_path", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=MODEL_PATH)]
    others = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=argument.default, annotation=types[name])
        for name, argument in ARGUMENTS.items()
        if name != "model_path"
    ]
    method.__doc__ = EngineArguments.__doc__
    method.__dict__["__signature__"] = Signature([*first, *others], return_annotation=None)
    return method


One = TypeVar("One", covariant=True)
Batch = TypeVar("Batch", covariant=True)
Chunks = TypeVar("Chunks", covariant=True)


class Generate(Protocol[One, Batch, Chunks]):
    """A method like ``generate``: a prompt or its token ids; a list of either is a batch."""

    @overload
    def __call__(
        self,
        prompt: str | None = None,
        sampling_params: Sampled | None = None,
        input_ids: TokenIds | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> One: ...
    @overload
    def __call__(
        self,
        prompt: Texts,
        sampling_params: BatchSampled | None = None,
        input_ids: None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> Batch: ...
    @overload
    def __call__(
        self,
        prompt: None = None,
        sampling_params: BatchSampled | None = None,
        *,
        input_ids: BatchIds,
        stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> Batch: ...
    @overload
    def __call__(
        self,
        prompt: str | Texts | None = None,
        sampling_params: BatchSampled | None = None,
        input_ids: TokenIds | BatchIds | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[RequestOptions],
    ) -> Chunks: ...
    @overload
    def __call__(
        self,
        prompt: str | Texts | None = None,
        sampling_params: BatchSampled | None = None,
        input_ids: TokenIds | BatchIds | None = None,
        *,
        stream: bool,
        **options: Unpack[RequestOptions],
    ) -> One | Batch | Chunks: ...


class Chat(Protocol[One, Batch, Chunks]):
    """A method like ``chat``: a conversation; a list of them is a batch."""

    @overload
    def __call__(
        self,
        messages: Messages,
        sampling_params: Sampled | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> One: ...
    @overload
    def __call__(
        self,
        messages: Chats,
        sampling_params: BatchSampled | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Batch: ...
    @overload
    def __call__(
        self,
        messages: Messages | Chats,
        sampling_params: BatchSampled | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Chunks: ...
    @overload
    def __call__(
        self,
        messages: Messages | Chats,
        sampling_params: BatchSampled | None = None,
        *,
        stream: bool,
        **options: Unpack[ChatOptions],
    ) -> One | Batch | Chunks: ...


AsyncGenerate = Generate[Generation[Answer], Generation[BatchOutput], Stream]
AsyncChat = Chat[Generation[Answer], Generation[BatchOutput], Stream]


def async_generate(method: Callable[..., object]) -> AsyncGenerate:
    """Give a method the types of ``async_generate``."""
    return cast("AsyncGenerate", method)


def async_chat(method: Callable[..., object]) -> AsyncChat:
    """Give a method the types of ``async_chat``."""
    return cast("AsyncChat", method)
