"""Settings of small engines."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from aioengine.settings.config import (
    MemorySettings,
    ModelSettings,
    RunnerSettings,
    SchedulerSettings,
    Settings,
    TextSettings,
)

SMALL = Settings(
    model=ModelSettings(path="none", dtype="float32", load_format="dummy", context_length=4096, vocab_size=1000),
    memory=MemorySettings(page_size=16, num_pages=512, mem_fraction_static=0.4),
    scheduler=SchedulerSettings(
        max_running=16, chunk_tokens=64, context_length=4096, policy="fcfs", prefix_cache=True, depth=0
    ),
    runner=RunnerSettings(factory="", device="cpu", attention_backend="torch", num_threads=1),
    text=TextSettings(tokenizer_path=None),
    random_seed=0,
    log_level="error",
)
SECTIONS = ("model", "memory", "scheduler", "runner", "text")


def small_settings(**changes: object) -> Settings:
    """Return ``SMALL`` with changed fields. They are named without their section.

    A field of two sections (``context_length``) is changed in both.
    """
    sections = {name: _changed(getattr(SMALL, name), changes) for name in SECTIONS}
    known = {field for struct in (SMALL, *sections.values()) for field in struct.__struct_fields__}
    assert changes.keys() <= known, changes.keys() - known
    return replace(_changed(SMALL, changes), **sections)


def _changed(struct: msgspec.Struct, changes: dict[str, object]) -> msgspec.Struct:
    return replace(struct, **{name: value for name, value in changes.items() if name in struct.__struct_fields__})
