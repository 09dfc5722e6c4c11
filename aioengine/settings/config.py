"""The user's configuration (``EngineConfig``) and the resolved one (``Settings``), as small frozen sections.

``EngineConfig`` may hold None and "auto"; ``resolve.resolve`` replaces them, from facts about the model and the device.
``Settings`` has neither, and child processes receive it unchanged. A component receives its own section only.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

OWN: Final = "aioengine"
TRANSFORMERS: Final = "transformers"
"""Whose code computes a model."""

# ---------------------------------------------------------------- the user's configuration


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Which model, and how to read it. ``path``: a folder or a hub id; None is the demo model of the package.

    ``chat_template``: text or a path; None: the model's own. ``allow_request_templates``: whether a request may bring
    the text or the file of a template. ``is_embedding``: whether a generative model only returns vectors; None: if its
    folder is one of sentence-transformers. ``implementation``: "auto", "aioengine" or "transformers".
    ``sampling_defaults``: "model" (from generation_config.json) or "engine".
    """

    path: str | None = None
    tokenizer_path: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    context_length: int | None = None
    trust_remote_code: bool = False
    tokenizer: bool = True
    chat_template: str | None = None
    allow_request_templates: bool = False
    is_embedding: bool | None = None
    implementation: str = "auto"
    sampling_defaults: str = "model"


class DeviceConfig(Struct, frozen=True, kw_only=True):
    """The device and the implementations that compute. ``logits_processors``: "module:Class" of those of the user."""

    name: str = "auto"
    attention_backend: str = "auto"
    batch_invariant: bool = False
    cuda_graphs: bool = True
    cuda_graph_max_rows: int | None = None
    logits_processors: tuple[str, ...] = ()


class MemoryConfig(Struct, frozen=True, kw_only=True):
    """The KV pool. ``max_total_tokens`` None: what fits into ``mem_fraction_static`` of the memory."""

    page_size: int = 16
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    prefix_cache: bool = True


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """``chunk_tokens`` -1: a prompt is never split."""

    max_running: int | None = None
    chunk_tokens: int | None = None
    policy: str = "fcfs"
    overlap: bool = True
    tenant_weights: dict[str, float] = {}


class GivenAdapter(Struct, frozen=True):
    """A LoRA adapter of the start. ``alias``: another name of it; empty: none."""

    name: str
    path: str
    alias: str = ""
    is_pinned: bool = False


class LoraConfig(Struct, frozen=True, kw_only=True):
    """LoRA adapters. ``enabled`` None: where there are ``adapters``. ``modules`` (): all of the model; None: those of
    ``adapters``. ``max_rank`` None: that of ``adapters``.
    """

    enabled: bool | None = None
    adapters: tuple[GivenAdapter, ...] = ()
    num_slots: int = 8
    max_rank: int | None = None
    modules: tuple[str, ...] | None = None
    max_loaded: int | None = None


class QueueConfig(Struct, frozen=True, kw_only=True):
    """Limits of the queue and of unread logprobs. Requests above a limit are refused.

    ``max_logprob_bytes``: packed logprobs of all requests. Memory is reserved when a row starts, until it is read.
    """

    max_requests: int = 4096
    max_tokens: int = 4 * 1024 * 1024
    max_bytes: int = 256 * 1024 * 1024
    max_logprob_bytes: int = 4 * 1024 * 1024 * 1024


class DeliveryConfig(Struct, frozen=True, kw_only=True):
    """How a stream is handled whose reader does not read for ``slow_reader_timeout_s`` seconds.

    ``slow_reader``: "coalesce" (unread chunks are merged), "pause" (its request is suspended until it reads) or
    "abort". ``max_hidden_state_bytes``: the most hidden states that one request may be given.
    """

    slow_reader: str = "coalesce"
    slow_reader_timeout_s: float = 30.0
    max_hidden_state_bytes: int = 64 * 1024 * 1024


class SupervisionConfig(Struct, frozen=True, kw_only=True):
    """Starting, watching and replacing the processes; times in seconds.

    ``max_restarts`` 0: the end of a process is the end of the engine. ``stall_timeout_s``: a process that makes no
    progress for longer is replaced, so every step must be shorter, even a prefill chunk of a large model on two cores.
    """

    max_restarts: int = 3
    restart_window_s: float = 600.0
    stall_timeout_s: float = 600.0
    startup_timeout_s: float = 600.0


class MediaConfig(Struct, frozen=True, kw_only=True):
    """Limits of the images of prompts.

    Attributes:
        allowed_local_media_path: the folder in which paths and ``file://`` URLs must be; None: anywhere.
        allow_private_urls: URLs may lead to addresses that are not public.
        timeout_s: for the download of an image, and for its preparation.
    """

    allowed_local_media_path: str | None = None
    allow_private_urls: bool = False
    max_image_bytes: int = 64 * 1024 * 1024
    max_image_pixels: int = 64 * 1024 * 1024
    max_images_per_prompt: int = 64
    timeout_s: float = 30.0


class EngineConfig(Struct, frozen=True, kw_only=True):
    """All arguments of an engine, in sections, as ``args.engine_config`` builds it.

    ``random_seed`` None: a random one. ``progress`` None: bars only where stderr is a terminal or a notebook.
    """

    model: ModelConfig = ModelConfig()
    device: DeviceConfig = DeviceConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    queue: QueueConfig = QueueConfig()
    delivery: DeliveryConfig = DeliveryConfig()
    lora: LoraConfig = LoraConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    media: MediaConfig = MediaConfig()
    stream_interval: int = 1
    logprobs_mode: str = "raw"
    random_seed: int | None = None
    log_level: str = "error"
    progress: bool | None = None


# ---------------------------------------------------------------- the resolved settings


class PoolingSettings(Struct, frozen=True, kw_only=True):
    """How the hidden states of a text become one vector, and what is done with it.

    Attributes:
        kind: "last" or "cls" (the first token), or "mean" of all.
        is_normalized: vectors have the length 1 unless a call says otherwise.
        max_tokens: of a text; None: the context.
        lowers_text: texts are made lower case.
        prompts: texts that can stand before a text, by name. default_prompt: the name of the usual one; "": none.
        num_labels: scores of a classifier. has_sigmoid: whether ``rerank`` gives sigmoid(score).
    """

    kind: str = "last"
    is_normalized: bool = True
    max_tokens: int | None = None
    lowers_text: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    num_labels: int = 0
    has_sigmoid: bool = False


class ModelSettings(Struct, frozen=True, kw_only=True):
    """The model folder and how to read it.

    Attributes:
        dtype: of the computation: "bfloat16", "float16" or "float32". checkpoint_dtype: of the stored weights.
        task: "generate", "embed" or "classify".
        hidden_size: of the hidden states; 0: the model has none.
        files: path -> state of config.json and of the weights; the runner loads no other files.
        sampling_defaults: the model's values of sampling parameters, for requests that leave them out.
        implementation: whose code computes the model, "aioengine" or "transformers". Only the latter may run code of
            the folder, with ``trust_remote_code``.
    """

    path: str
    dtype: str
    load_format: str
    context_length: int
    vocab_size: int
    checkpoint_dtype: str = ""
    trust_remote_code: bool = False
    implementation: str = OWN
    hidden_size: int = 0
    task: str = "generate"
    pooling: PoolingSettings = PoolingSettings()
    files: dict[str, str] = {}
    sampling_defaults: dict[str, float] = {}


class MemorySettings(Struct, frozen=True, kw_only=True):
    """The KV pool. ``num_pages``: its tokens in pages, of which groups of layers
    take a multiple (``PageGroups.pages_in``); None: as many as fit into ``mem_fraction_static`` of the memory, found by
    the runner.
    ``kv_dtype``: of keys and values; None: that of the model.
    """

    page_size: int
    num_pages: int | None
    mem_fraction_static: float
    kv_dtype: str | None = None


class SchedulerSettings(Struct, frozen=True, kw_only=True):
    """The scheduler and the limits of one step.

    Attributes:
        chunk_tokens: the token budget of a step.
        depth: steps that may be in flight beside the one just launched; 0: no overlap.
        stats_interval_s: the time between two snapshots of the statistics.
        tenant_weights: the share of each tenant; a tenant that is not named has 1.
        splits_prompts: False: a prompt is computed in one step, and nothing of it is cached, since its tokens attend in
            both directions, or all of them are pooled. A longer one than ``chunk_tokens`` is alone in its step.
        decode_cost: tokens that a decoding row takes from the token budget, as many prompt tokens as take its time.
        whole_image_tokens: tokens of an image that are computed in one step; 0: images are divided as texts are.
        short_length: requests with more tokens are computed with the rotations of long texts (longrope); 0: all have
            the same ones.
        snapshot_tokens: states of layers are kept at multiples of this, a multiple of the page size, where prefixes can
            be reused; 0: layers have no states.
    """

    max_running: int
    chunk_tokens: int
    context_length: int
    policy: str
    prefix_cache: bool
    depth: int
    stats_interval_s: float = 0.1
    tenant_weights: dict[str, float] = {}
    decode_cost: int = 1
    splits_prompts: bool = True
    whole_image_tokens: int = 0
    snapshot_tokens: int = 0
    short_length: int = 0

    @property
    def min_tokens(self) -> int:
        """Tokens of a request that are computed in one step at the least: not more are needed for it to advance."""
        return max(1, self.whole_image_tokens) if self.splits_prompts else self.context_length

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest step. Prompts get an eighth of ``chunk_tokens`` even where all rows decode; one image
        that is not divided may be beyond the budget.
        """
        longest = 0 if self.splits_prompts else self.context_length
        most = max(self.chunk_tokens, self.max_running + self.chunk_tokens // 8, longest)
        return most + self.whole_image_tokens


ADAPTER_RANKS: Final = 16
"""The kernels pad the ranks of LoRA adapters to a multiple of this number."""


class LoraSettings(Struct, frozen=True, kw_only=True):
    """LoRA adapters beside the base model.

    Attributes:
        num_slots: adapters on the device at a time. Their slots are 1 to ``num_slots``.
        max_rank: maximum rank of an adapter.
        modules: the modules of a layer that adapters may change, such as "q_proj"; empty: all modules of the model.
        max_loaded: maximum number of adapters in the memory of the scheduler process; None: no limit.
        max_bytes: maximum memory of these adapters.
    """

    num_slots: int
    max_rank: int
    modules: tuple[str, ...] = ()
    max_loaded: int | None = None
    max_bytes: int = 4 * 1024**3

    @property
    def slot_rank(self) -> int:
        """The rank that each slot has memory for."""
        return -(-self.max_rank // ADAPTER_RANKS) * ADAPTER_RANKS


class RunnerSettings(Struct, frozen=True, kw_only=True):
    """The runner and its device.

    Attributes:
        factory: "module:function", which builds the runner from ``Settings``. It is imported by name, so that tests
            and benchmarks can start real processes with a fake runner.
        batch_invariant: a GPU computes the same bits for a request in any batch, as a CPU always does.
        fallback_backend: used, with a warning, if ``attention_backend`` does not work on this machine; "": that is an
            error.
        compile_timeout_s: how long kernels may compile at the start.
        logprobs_mode: "raw" (the model's own distribution) or "processed" (the one that tokens are drawn from, but for
            top-k, top-p and min-p).
        logits_processors: "module:Class" of the user's logits processors, which requests may name.
        lora: the adapters that it has room for; None: it serves the base model alone.
        options: passed on to the factory, which alone reads them.
    """

    factory: str
    device: str
    attention_backend: str
    num_threads: int
    batch_invariant: bool = False
    cuda_graph_max_rows: int = 0
    fallback_backend: str = ""
    compile_timeout_s: float = 540.0
    logprobs_mode: str = "raw"
    logits_processors: tuple[str, ...] = ()
    lora: LoraSettings | None = None
    options: dict[str, str | int | float | bool] = {}


class TextSettings(Struct, frozen=True, kw_only=True):
    """The detokenizer. ``tokenizer_path`` None: no tokenizer, ids pass through without text. ``files``: path -> state
    of the tokenizer's files, as ``checkpoint.file_states`` has it. ``allow_request_templates``: as in ``ModelConfig``;
    read by the frontend. ``eos_token_ids``: of the model's configuration.
    """

    tokenizer_path: str | None
    allow_request_templates: bool = False
    files: dict[str, str] = {}
    eos_token_ids: tuple[int, ...] = ()


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of all child processes, sent to each of them as JSON when it starts."""

    model: ModelSettings
    memory: MemorySettings
    scheduler: SchedulerSettings
    runner: RunnerSettings
    text: TextSettings
    random_seed: int
    log_level: str
