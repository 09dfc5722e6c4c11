"""The values of the user (``EngineConfig``) and the resolved values (``Settings``), in frozen sections.

``resolve.resolve`` makes ``Settings`` from ``EngineConfig`` and facts about model and machine. It replaces "auto", and
None, except where None is a value of its own. Child processes receive ``Settings`` as JSON. Components receive only
their own section.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

OWN: Final = "aioengine"
TRANSFORMERS: Final = "transformers"
"""Names of the code that computes a model."""

NGRAM: Final = "NGRAM"
STANDALONE: Final = "STANDALONE"
EAGLE: Final = "EAGLE"
EAGLE3: Final = "EAGLE3"
MTP: Final = "MTP"
"""Algorithms of speculation."""
DRAFT_HEADS: Final = (EAGLE, EAGLE3, MTP)
"""Algorithms with a draft head."""

DEFAULT_GROUP_SIZE: Final = 128
"""Inputs that share a scale in int4."""

# ---------------------------------------------------------------- values of the user


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The model and how to read it.

    Attributes:
        path: a folder, a GGUF file or a hub id; None: the demo model.
        tokenizer: False: requests contain token ids only.
        chat_template: text or path; None: the template of the model.
        allow_request_templates: a request may contain the text or the path of a template.
        quantization: the method in config.json, or one of ``online_quantization.METHODS``.
        quantization_group_size: inputs that share a scale in int4; None: the default.
        is_embedding: True: a generative model returns only vectors. None: True if its folder is of
            sentence-transformers.
        implementation: "auto", "aioengine" or "transformers".
        sampling_defaults: "model" (from generation_config.json) or "engine".
        draft_head: the folder has a draft head for this algorithm of speculation; "": a model.
    """

    path: str | None = None
    tokenizer_path: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    quantization: str | None = None
    quantization_group_size: int | None = None
    dtype: str = "auto"
    context_length: int | None = None
    trust_remote_code: bool = False
    tokenizer: bool = True
    chat_template: str | None = None
    allow_request_templates: bool = False
    is_embedding: bool | None = None
    implementation: str = "auto"
    sampling_defaults: str = "model"
    draft_head: str = ""


class DeviceConfig(Struct, frozen=True, kw_only=True):
    """The devices and the kernels. ``logits_processors``: "module:Class" of the user's processors."""

    name: str = "auto"
    base_gpu_id: int = 0
    tp_size: int = 1
    attention_backend: str = "auto"
    batch_invariant: bool = False
    cuda_graphs: bool = True
    cuda_graph_max_rows: int | None = None
    logits_processors: tuple[str, ...] = ()


class MemoryConfig(Struct, frozen=True, kw_only=True):
    """The KV pool.

    Attributes:
        max_total_tokens: its size; None: as many tokens as ``mem_fraction_static`` allows.
        mem_fraction_static: None for a default that depends on the device.
    """

    page_size: int = 16
    kv_cache_dtype: str = "auto"
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    prefix_cache: bool = True
    can_release: bool = False


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """The scheduler. ``chunk_tokens`` -1: prompts are never split."""

    max_running: int | None = None
    chunk_tokens: int | None = None
    policy: str = "fcfs"
    overlap: bool = True
    tenant_weights: dict[str, float] = {}


class SpeculationConfig(Struct, frozen=True, kw_only=True):
    """Speculation.

    Attributes:
        algorithm: "": off. "MTP": the draft head is in the folder of the model.
        num_steps: maximum drafts of a row. num_draft_tokens: ``num_steps`` + 1, as in other engines. One is enough.
        draft_model_path, draft_revision, draft_quantization: the draft model, as in ``ModelConfig``.
    """

    algorithm: str = ""
    num_steps: int | None = None
    num_draft_tokens: int | None = None
    draft_model_path: str | None = None
    draft_revision: str | None = None
    draft_quantization: str | None = None


class GivenAdapter(Struct, frozen=True):
    """A LoRA adapter that is loaded at the start. ``alias``: a second name; "" for none."""

    name: str
    path: str
    alias: str = ""
    is_pinned: bool = False


class LoraConfig(Struct, frozen=True, kw_only=True):
    """LoRA adapters.

    Attributes:
        enabled: None means True if there are ``adapters``.
        max_rank: None for the highest rank of ``adapters``.
        modules: the modules that adapters may change; (): all modules of the model; None: the modules of ``adapters``.
    """

    enabled: bool | None = None
    adapters: tuple[GivenAdapter, ...] = ()
    num_slots: int = 8
    max_rank: int | None = None
    modules: tuple[str, ...] | None = None
    max_loaded: int | None = None


class QueueConfig(Struct, frozen=True, kw_only=True):
    """Limits of the queue and of unread logprobs. Requests above a limit are refused.

    ``max_logprob_bytes``: packed logprobs of all requests, from the start of a row until its result is read.
    """

    max_requests: int = 4096
    max_tokens: int = 4 * 1024 * 1024
    max_bytes: int = 256 * 1024 * 1024
    max_logprob_bytes: int = 4 * 1024 * 1024 * 1024


class DeliveryConfig(Struct, frozen=True, kw_only=True):
    """The delivery of results.

    Attributes:
        slow_reader: if a stream is not read for ``slow_reader_timeout_s`` seconds, "coalesce" merges unread chunks,
            "pause" suspends the request until it is read, and "abort" ends it.
        max_hidden_state_bytes: maximum hidden states of one request.
    """

    slow_reader: str = "coalesce"
    slow_reader_timeout_s: float = 30.0
    max_hidden_state_bytes: int = 64 * 1024 * 1024


MAX_REPLICAS: Final = 64
ROUTINGS: Final = ("auto", "round_robin", "shortest_queue")
"""How a replica is chosen for a request (``supervision.routing.Routes``)."""


class SupervisionConfig(Struct, frozen=True, kw_only=True):
    """Starting, watching and replacing the processes.

    Attributes:
        executor: "process", or "ray" for replicas on the nodes of a Ray cluster.
        num_replicas: number of copies of the model, each with its own processes.
        routing: one of ``ROUTINGS``.
        max_restarts: number of times within ``restart_window_s`` that lost processes are replaced. After the next loss
            the engine ends; with 0, after the first.
        stall_timeout_s: a process without progress for this time is replaced. Every step must be shorter, even a
            prefill chunk of a large model on two cores.
        keeps_tensors: copies of new weights that are given as tensors are kept for new processes.
    """

    executor: str = "process"
    num_replicas: int = 1
    routing: str = "auto"
    max_restarts: int = 3
    restart_window_s: float = 600.0
    stall_timeout_s: float = 600.0
    startup_timeout_s: float = 600.0
    keeps_tensors: bool = False


class MediaConfig(Struct, frozen=True, kw_only=True):
    """Limits of images in prompts.

    Attributes:
        allowed_local_media_path: the folder that must contain paths and ``file://`` URLs; None: any folder.
        allow_private_urls: URLs may resolve to addresses that are not public.
        timeout_s: of downloading an image, and of preparing it.
    """

    allowed_local_media_path: str | None = None
    allow_private_urls: bool = False
    max_image_bytes: int = 64 * 1024 * 1024
    max_image_pixels: int = 64 * 1024 * 1024
    max_images_per_prompt: int = 64
    timeout_s: float = 30.0


class EngineConfig(Struct, frozen=True, kw_only=True):
    """All arguments of an engine, in sections. Created by ``args.engine_config``.

    ``random_seed`` None: a random seed. ``progress`` None: progress bars if stderr is a terminal or a notebook.
    """

    model: ModelConfig = ModelConfig()
    device: DeviceConfig = DeviceConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
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

    @property
    def draft_model(self) -> ModelConfig | None:
        """The draft model of speculation; None: there is none."""
        wanted, own = self.speculation, self.model
        is_own = wanted.algorithm == MTP
        has_folder = wanted.algorithm in (STANDALONE, EAGLE, EAGLE3) and wanted.draft_model_path is not None
        if not (is_own or has_folder):
            return None
        return ModelConfig(
            path=own.path if is_own else wanted.draft_model_path,
            revision=own.revision if is_own else wanted.draft_revision,
            quantization=own.quantization if is_own else wanted.draft_quantization,
            quantization_group_size=own.quantization_group_size if is_own else None,
            draft_head=wanted.algorithm if wanted.algorithm in DRAFT_HEADS else "",
            download_dir=self.model.download_dir,
            load_format="dummy" if self.model.load_format == "dummy" else "auto",
            is_embedding=False,
            implementation=OWN,
            tokenizer=False,
            sampling_defaults="engine",
        )


# ---------------------------------------------------------------- resolved values


class PoolingSettings(Struct, frozen=True, kw_only=True):
    """How the hidden states of a text become one vector or score.

    Attributes:
        kind: "last" token, "cls" (first) token, or "mean" of all tokens.
        is_normalized: by default, vectors have length 1.
        max_tokens: maximum tokens of a text; None: the context length.
        lowers_text: texts are converted to lower case.
        prompts: name -> text that is put before the text of a request.
        default_prompt: name of the prompt for requests that do not choose one; "" for none.
        num_labels: number of scores of a classifier.
        has_sigmoid: ``rerank`` returns sigmoid(score).
    """

    kind: str = "last"
    is_normalized: bool = True
    max_tokens: int | None = None
    lowers_text: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    num_labels: int = 0
    has_sigmoid: bool = False


class LoadedWeights(Struct, frozen=True, kw_only=True):
    """Weights that have replaced the weights of the model folder. A new runner starts with them.

    Attributes:
        version: the user's name of the weights.
        number: number of replacements so far.
        path: folder or GGUF file of a whole checkpoint; "": the model folder.
        files: digests of its weight files (``checkpoint.file_states``).
        disk_version: version of this checkpoint.
        tensor_files: safetensors files in memory with tensors that were loaded after the checkpoint, in order.
        are_kept: False: tensors were loaded after the checkpoint that no file keeps.
        are_lost: such tensors were lost, so this is an older version than the user's last one.
    """

    version: str = "default"
    number: int = 0
    path: str = ""
    files: dict[str, str] = {}
    disk_version: str = "default"
    tensor_files: tuple[str, ...] = ()
    are_kept: bool = True
    are_lost: bool = False

    def after_loss(self) -> LoadedWeights:
        """Return the weights with which a new process starts."""
        if self.are_kept:
            return self
        return replace(self, version=self.disk_version, tensor_files=(), are_kept=True, are_lost=True)


class ModelSettings(Struct, frozen=True, kw_only=True):
    """The model folder and how to read it.

    Attributes:
        dtype: of the computation: "bfloat16", "float16" or "float32".
        checkpoint_dtype: of the stored weights.
        task: "generate", "embed" or "classify".
        hidden_size: 0 if the model returns no hidden states.
        files: digests of config.json and the weight files (``checkpoint.file_states``). The runner loads no others.
        sampling_defaults: values of sampling parameters for requests that leave them out.
        quantization: how weights are quantized while they are loaded: "fp8", "int8" or "int4"; "": they are not.
        quantization_group_size: inputs that share a scale in int4.
        draft_head: the folder has a draft head for this algorithm of speculation; "": a model.
        implementation: whose code computes the model, "aioengine" or "transformers". Only the latter may run code in
            the folder, with ``trust_remote_code``.
        weights: the weights to load instead of those in the folder.
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
    quantization: str = ""
    quantization_group_size: int = DEFAULT_GROUP_SIZE
    draft_head: str = ""
    weights: LoadedWeights = LoadedWeights()

    def with_weights(self, weights: LoadedWeights) -> ModelSettings:
        """Return the settings of a runner that starts with these weights. The folder still has its config.json."""
        files = {path: digest for path, digest in self.files.items() if not path.endswith(".safetensors")}
        own = files | weights.files if weights.path else self.files
        return replace(self, files=own, weights=weights)


class MemorySettings(Struct, frozen=True, kw_only=True):
    """The KV pool.

    Attributes:
        num_pages: its size in tokens divided by ``page_size``; page groups need a multiple (``PageGroups.pages_in``).
            None: the runner takes as many as ``mem_fraction_static`` allows.
        kv_dtype: of keys and values, as in ``kv_cache_dtype``; None: the dtype of the model.
        can_release: the memory of a running engine can be freed for a while.
    """

    page_size: int
    num_pages: int | None
    mem_fraction_static: float
    kv_dtype: str | None = None
    can_release: bool = False


class SchedulerSettings(Struct, frozen=True, kw_only=True):
    """The scheduler and the limits of one step.

    Attributes:
        chunk_tokens: the token budget of a step.
        depth: steps that may be in flight while the next one is launched; 0: no overlap.
        tenant_weights: the weight of each tenant. The default is 1.
        splits_prompts: False: tokens attend in both directions, or all tokens are pooled. Then a prompt is computed in
            one step, and is not cached. A prompt longer than ``chunk_tokens`` is alone in its step.
        decode_cost: tokens of the token budget that a decoding row uses: the prompt tokens that take the same time.
        whole_image_tokens: tokens of an image that must be computed in one step; 0: images are split like text.
        short_length: with LongRoPE, requests with more tokens use the long factors; 0 without LongRoPE.
        snapshot_tokens: snapshots of recurrent states are taken at multiples of this number, which is a multiple of the
            page size; 0: the model has no states.
        max_drafts: maximum drafts of a decode row, after its known tokens. Must be 0 for models with states.
        has_ngrams: drafts are n-grams, which the scheduler looks up; otherwise the runner proposes them.
    """

    max_running: int
    chunk_tokens: int
    context_length: int
    policy: str
    prefix_cache: bool
    depth: int
    tenant_weights: dict[str, float] = {}
    decode_cost: int = 1
    splits_prompts: bool = True
    whole_image_tokens: int = 0
    snapshot_tokens: int = 0
    short_length: int = 0
    max_drafts: int = 0
    has_ngrams: bool = False

    @property
    def min_tokens(self) -> int:
        """The tokens of a request that one step must be able to compute, so that the request advances."""
        return max(1, self.whole_image_tokens) if self.splits_prompts else self.context_length

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest step.

        Prompts get an eighth of ``chunk_tokens`` even if all rows decode. One whole image may exceed the budget.
        """
        longest = 0 if self.splits_prompts else self.context_length
        num_tokens = max(self.chunk_tokens, self.max_running + self.chunk_tokens // 8, longest)
        return num_tokens + self.whole_image_tokens


ADAPTER_RANK_UNIT: Final = 16
"""The kernels pad the ranks of LoRA adapters to a multiple of this number."""


def padded_rank(rank: int) -> int:
    """Return the rank of an adapter as the kernels store it."""
    return -(-rank // ADAPTER_RANK_UNIT) * ADAPTER_RANK_UNIT


class LoraSettings(Struct, frozen=True, kw_only=True):
    """LoRA adapters besides the base model.

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


class RankSettings(Struct, frozen=True, kw_only=True):
    """The ranks of tensor parallelism.

    Attributes:
        size: the number of ranks.
        rank: of this process. The scheduler process has rank 0.
        store_file: path of the file in which the ranks exchange their addresses. Each process sets it at its start.
    """

    size: int
    rank: int = 0
    store_file: str = ""


class DraftSettings(Struct, frozen=True, kw_only=True):
    """A draft model. It proposes no drafts for requests beyond its context length.

    Attributes:
        read_layers: of a draft head, see ``Features.layers``.
    """

    model: ModelSettings
    attention_backend: str
    read_layers: tuple[int, ...] = ()


class RunnerSettings(Struct, frozen=True, kw_only=True):
    """The runner and its device.

    Attributes:
        factory: "module:function" that builds the runner from ``Settings``. Tests and benchmarks start real processes
            with a fake runner.
        batch_invariant: a GPU computes the same bits for a request in any batch. A CPU always does.
        fallback_backend: used, with a warning, if ``attention_backend`` does not work on this machine; "": none, then
            the engine does not start.
        compile_timeout_s: limit of the compilation of kernels at the start.
        logprobs_mode: "raw" (the distribution of the model) or "processed" (after logits processors and temperature,
            before top-k, top-p and min-p).
        logits_processors: "module:Class" of the user's logits processors, which requests may name.
        lora: None if only the base model is served.
        draft: None if there is no draft model.
        ranks: None if one process computes the whole model.
        replica: the number of this copy of the model, below ``num_replicas``.
        base_gpu_id: the first GPU of the first replica. Rank r of replica i uses the GPU
            ``base_gpu_id + i * number of ranks + r``.
        options: only read by the factory.
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
    draft: DraftSettings | None = None
    ranks: RankSettings | None = None
    replica: int = 0
    num_replicas: int = 1
    base_gpu_id: int = 0
    options: dict[str, str | int | float | bool] = {}

    @property
    def num_runners(self) -> int:
        """The number of processes with a runner: the ranks of all replicas."""
        return self.num_replicas * (1 if self.ranks is None else self.ranks.size)


class TextSettings(Struct, frozen=True, kw_only=True):
    """The tokenizer and the detokenizer.

    Attributes:
        tokenizer_path: None for no tokenizer; then requests and results contain token ids only.
        allow_request_templates: see ``ModelConfig``.
        files: digests of the tokenizer's files (``checkpoint.file_states``).
        eos_token_ids: from the configuration of the model.
    """

    tokenizer_path: str | None
    allow_request_templates: bool = False
    files: dict[str, str] = {}
    eos_token_ids: tuple[int, ...] = ()


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of all child processes."""

    model: ModelSettings
    memory: MemorySettings
    scheduler: SchedulerSettings
    runner: RunnerSettings
    text: TextSettings
    random_seed: int
    log_level: str
