"""What the user asked for (``EngineConfig``) and what it came to (``Settings``), as small frozen sections.

``EngineConfig`` may hold None and "auto"; ``resolve.resolve`` answers them once, from facts about the model and the
device, into ``Settings``, which has neither and which children receive as it is. A component is given its own
section, nothing writes to a section later.
"""

from __future__ import annotations

from msgspec import Struct


class ModelSettings(Struct, frozen=True, kw_only=True):
    """The model folder and how to read it. ``dtype``: "bfloat16", "float16" or "float32"."""

    path: str
    dtype: str
    load_format: str
    context_length: int
    vocab_size: int
    trust_remote_code: bool = False


class MemorySettings(Struct, frozen=True, kw_only=True):
    """The KV pool. ``num_pages`` None: as many as fit, found out by the runner from ``mem_fraction_static``."""

    page_size: int
    num_pages: int | None
    mem_fraction_static: float


class SchedulerSettings(Struct, frozen=True, kw_only=True):
    """What the scheduler may do in one step. ``chunk_tokens``: the token budget of a step; ``depth``: steps launched
    before the first of them is collected, less one (0: no overlap); ``stats_interval_s``: between two snapshots.
    """

    max_running: int
    chunk_tokens: int
    context_length: int
    policy: str
    prefix_cache: bool
    depth: int
    stats_interval_s: float = 0.1


class RunnerSettings(Struct, frozen=True, kw_only=True):
    """The device side. ``factory``: "module:function" that builds the runner from ``Settings``, named and not
    imported, so that tests and benchmarks start real processes with a fake one. ``options`` is the factory's own.
    """

    factory: str
    device: str
    attention_backend: str
    num_threads: int
    cuda_graph_max_rows: int = 0
    options: dict[str, str | int | float | bool] = {}


class TextSettings(Struct, frozen=True, kw_only=True):
    """The detokenizer. ``tokenizer_path`` None: no tokenizer, ids pass through without text."""

    tokenizer_path: str | None


class Settings(Struct, frozen=True, kw_only=True):
    """All that the children need to know, sent to each of them as JSON when it starts."""

    model: ModelSettings
    memory: MemorySettings
    scheduler: SchedulerSettings
    runner: RunnerSettings
    text: TextSettings
    random_seed: int
    log_level: str
