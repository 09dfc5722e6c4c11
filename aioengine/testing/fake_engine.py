"""An engine without a model, for tests of programs that use aioengine.

It has the whole API of the real one: the same calls, streams, errors, queues and scheduler. Only the model is missing:
a tokenizer of bytes (one token for each byte of UTF-8) and answers that the test gives.

    from aioengine.testing.fake_engine import fake_async_engine

    async with fake_async_engine(answers={"France": "Paris.", "": "I do not know."}) as engine:
        out = await engine.async_generate("The capital of France is")
        assert out["text"] == "Paris."
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, cast

import msgspec
from msgspec import Struct

from aioengine.api import checks
from aioengine.api.args import MAX_WEIGHT
from aioengine.api.engine import AsyncEngine
from aioengine.api.sync import Engine
from aioengine.frontend.loaded_adapters import AdapterRules
from aioengine.frontend.startup import Blueprint
from aioengine.settings.config import (
    DeliveryConfig,
    LoraSettings,
    MemorySettings,
    ModelSettings,
    QueueConfig,
    RunnerSettings,
    SchedulerSettings,
    Settings,
    SupervisionConfig,
    TextSettings,
)
from aioengine.supervision.supervisor import Supervisor
from aioengine.testing.byte_tokenizer import BYTE_MODEL, EOS_TOKEN_ID, VOCAB_SIZE
from aioengine.testing.fake_runner import HIDDEN_SIZE, PRINTABLE
from aioengine.testing.faults import Faults
from aioengine.testing.scripted_runner import ANSWERS_OPTION
from aioengine.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from aioengine.supervision.processes import Events, Processes

FAKE_RUNNER = "aioengine.testing.fake_runner:build"
SCRIPTED_RUNNER = "aioengine.testing.scripted_runner:build"
PAGE_SIZE = 16
STARTUP_TIMEOUT_S = 60.0
MAX_S: Final = 86400.0
MAX_RANK: Final = 64
LAYERS: Final = {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.0.self_attn.v_proj": (8, 8)}


class FakeSetup(Struct, frozen=True, kw_only=True):
    """What a fake engine is like.

    answers: part of a prompt -> the answer to it (the longest that is found counts, "" is for all others, which else
        get an empty one). None: every prompt is answered with letters that depend on it, until the length that was
        asked for.
    step_time_s: how long each step takes. faults: what goes wrong, and when.
    processes: real subprocesses, as the real engine has them; else everything runs on the engine's own loop, which
        starts at once. None: only where a fault kills or stalls a process, or steps take time.
    max_loras_per_batch: 0: no adapters. The linear layers of the model are ``LAYERS``, and adapters are in fp32.
    adapter_s: how long it takes to read one.
    context_length, num_pages (of 16 tokens), max_running, max_queued: as small as a test wants them. The other fields
        are the constructor's arguments of such a name.
    """

    answers: Mapping[str, str] | None = None
    step_time_s: float = 0.0
    faults: Faults | None = None
    processes: bool | None = None
    context_length: int = 2048
    num_pages: int = 1024
    max_running: int = 64
    max_queued: int = 4096
    chunk_tokens: int = 512
    tenant_weights: Mapping[str, float] = {}
    random_seed: int = 0
    stall_timeout_s: float = 600.0
    slow_reader: str = "coalesce"
    slow_reader_timeout_s: float = 30.0
    max_restarts: int = 3
    restart_window_s: float = 600.0
    allow_request_templates: bool = False
    max_loras_per_batch: int = 0
    max_loaded_loras: int | None = None
    adapter_s: float = 0.0

    def __post_init__(self) -> None:
        checks.whole("context_length", self.context_length, 1)
        checks.whole("num_pages", self.num_pages, 1)
        checks.whole("max_running", self.max_running, 1)
        checks.whole("max_queued", self.max_queued, 0)
        checks.whole("chunk_tokens", self.chunk_tokens, 1)
        checks.whole("random_seed", self.random_seed, 0, 2**63 - 1)
        checks.whole("max_restarts", self.max_restarts, 0)
        checks.whole("max_loras_per_batch", self.max_loras_per_batch, 0)
        checks.switch("allow_request_templates", self.allow_request_templates)
        if self.max_loaded_loras is not None:
            checks.whole("max_loaded_loras", self.max_loaded_loras, 1)
        checks.number("step_time_s", self.step_time_s, 0, MAX_S)
        checks.number("adapter_s", self.adapter_s, 0, MAX_S)
        checks.number("stall_timeout_s", self.stall_timeout_s, 0, MAX_S, above=True)
        checks.number("slow_reader_timeout_s", self.slow_reader_timeout_s, 0, MAX_S, above=True)
        checks.number("restart_window_s", self.restart_window_s, 0, MAX_S, above=True)
        checks.choice("slow_reader", self.slow_reader, {word: word for word in ("coalesce", "pause", "abort")})
        if self.processes is not None:
            checks.switch("processes", self.processes)
        if not isinstance(cast("object", self.faults), Faults | None):
            raise checks.wrong_type("faults", "Faults(...) or None", self.faults)
        for text in _entries("answers", {} if self.answers is None else self.answers, "text"):
            checks.text("answers values", text)
        for weight in _entries("tenant_weights", self.tenant_weights, "number"):
            checks.number("tenant_weights values", weight, 0, MAX_WEIGHT, above=True)

    @property
    def has_processes(self) -> bool:
        """Whether real subprocesses are needed, or wanted."""
        if self.processes is not None:
            return self.processes
        faults = self.faults or Faults()
        kills = faults.kill_at or faults.exit_at or faults.poison_token_id >= 0 or faults.kill_order
        return bool(kills or faults.stall_at or faults.start_s or self.step_time_s)

    def settings(self) -> Settings:
        """The settings of such an engine."""
        options: dict[str, str | int | float | bool] = {
            "step_time_s": self.step_time_s,
            "adapter_s": self.adapter_s,
            "alphabet": PRINTABLE,
        }
        if self.answers is not None:
            options[ANSWERS_OPTION] = msgspec.json.encode(dict(self.answers)).decode()
        if self.faults is not None:
            options |= msgspec.structs.asdict(self.faults)
        folder = str(BYTE_MODEL)
        return Settings(
            model=ModelSettings(
                path=folder,
                dtype="none",
                load_format="dummy",
                context_length=self.context_length,
                vocab_size=VOCAB_SIZE,
                hidden_size=HIDDEN_SIZE,
            ),
            memory=MemorySettings(page_size=PAGE_SIZE, num_pages=self.num_pages, mem_fraction_static=0.1),
            scheduler=SchedulerSettings(
                max_running=self.max_running,
                chunk_tokens=max(self.chunk_tokens, self.max_running),
                context_length=self.context_length,
                policy="priority",
                prefix_cache=True,
                depth=1,
                tenant_weights=dict(self.tenant_weights),
            ),
            runner=RunnerSettings(
                factory=FAKE_RUNNER if self.answers is None else SCRIPTED_RUNNER,
                device="cpu",
                attention_backend="fake",
                num_threads=1,
                lora=self.lora,
                options=options,
            ),
            text=TextSettings(tokenizer_path=folder, allow_request_templates=self.allow_request_templates),
            random_seed=self.random_seed,
            log_level="error",
        )

    @property
    def lora(self) -> LoraSettings | None:
        """The settings of its adapters."""
        if not self.max_loras_per_batch:
            return None
        return LoraSettings(num_slots=self.max_loras_per_batch, max_rank=MAX_RANK, max_loaded=self.max_loaded_loras)

    def blueprint(self) -> Blueprint:
        """What ``AsyncEngine.from_blueprint`` and ``Engine.from_blueprint`` take, once it is called."""
        settings = self.settings()
        limits = SupervisionConfig(
            max_restarts=self.max_restarts,
            restart_window_s=self.restart_window_s,
            stall_timeout_s=self.stall_timeout_s,
            startup_timeout_s=STARTUP_TIMEOUT_S,
        )

        def make_processes(events: Events) -> Processes:
            return Supervisor(settings, limits, launcher="process" if self.has_processes else "inline", events=events)

        return Blueprint(
            settings=settings,
            queue=QueueConfig(max_requests=self.max_queued),
            delivery=DeliveryConfig(slow_reader=self.slow_reader, slow_reader_timeout_s=self.slow_reader_timeout_s),
            eos_token_ids=(EOS_TOKEN_ID,),
            stream_interval=1,
            load_tokenizer=lambda: Tokenizer(BYTE_MODEL),
            make_processes=make_processes,
            adapters=None if self.lora is None else AdapterRules(LAYERS, self.lora),
        )


def fake_async_engine(answers: Mapping[str, str] | None = None, **setup: object) -> AsyncEngine:
    """An ``AsyncEngine`` without a model; ``setup`` are the other fields of ``FakeSetup``.

    Raises:
        TypeError, ValueError: a field that does not exist, or a value that it cannot have.
    """
    return AsyncEngine.from_blueprint(_setup(answers, setup).blueprint)


def fake_engine(answers: Mapping[str, str] | None = None, **setup: object) -> Engine:
    """An ``Engine`` without a model, started; ``setup`` are the other fields of ``FakeSetup``.

    Raises:
        TypeError, ValueError: a field that does not exist, or a value that it cannot have.
    """
    return Engine.from_blueprint(_setup(answers, setup).blueprint)


def _setup(answers: Mapping[str, str] | None, setup: Mapping[str, object]) -> FakeSetup:
    unknown = setup.keys() - set(FakeSetup.__struct_fields__)
    if unknown:
        known = ", ".join(FakeSetup.__struct_fields__)
        raise TypeError(f"a fake engine has no {', '.join(sorted(unknown))}; there are {known}")
    return FakeSetup(answers=answers, **setup)  # type: ignore[arg-type]  # __post_init__ checks every value


def _entries(name: str, value: object, kind: str) -> Collection[object]:
    """The values of a dict with keys of text."""
    if not isinstance(value, Mapping):
        raise checks.wrong_type(name, f"a dict of text to {kind}", value)
    given = cast("Mapping[object, object]", value)
    for key in given:
        checks.text(f"{name} keys", key)
    return given.values()
