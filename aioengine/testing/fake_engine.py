"""The real engine with a fake model, for tests of programs that use aioengine.

It has the complete API of a real engine: the same calls, streams, errors, queues and scheduler. Instead of a model, it
has a byte tokenizer (one token for each byte of UTF-8) and the answers of the test.

    from aioengine.testing.fake_engine import fake_async_engine

    async with fake_async_engine(answers={"France": "Paris.", "": "I do not know."}) as engine:
        out = await engine.async_generate("The capital of France is")
        assert out["text"] == "Paris."
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from aioengine.api.args import MAX_WEIGHT
from aioengine.api.engine import AsyncEngine
from aioengine.api.sync import Engine
from aioengine.frontend.engine_parts import Blueprint
from aioengine.frontend.loaded_adapters import AdapterRules
from aioengine.protocol.orders import roles_of
from aioengine.settings.config import (
    DeliveryConfig,
    LoraSettings,
    MemorySettings,
    ModelSettings,
    QueueConfig,
    RankSettings,
    RunnerSettings,
    SchedulerSettings,
    Settings,
    SupervisionConfig,
    TextSettings,
)
from aioengine.supervision.fleet import Fleet, Processes
from aioengine.supervision.supervisor import Events, Supervisor
from aioengine.testing.byte_tokenizer import BYTE_MODEL, EOS_TOKEN_ID, VOCAB_SIZE
from aioengine.testing.fake_runner import HIDDEN_SIZE, PRINTABLE
from aioengine.testing.faults import Faults
from aioengine.testing.scripted_runner import ANSWERS_OPTION
from aioengine.tokenization.tokenizer import Tokenizer

FAKE_RUNNER = "aioengine.testing.fake_runner:build"
SCRIPTED_RUNNER = "aioengine.testing.scripted_runner:build"
PAGE_SIZE = 16
STARTUP_TIMEOUT_S = 60.0
MAX_RANK: Final = 64
LAYERS: Final = {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.0.self_attn.v_proj": (8, 8)}


_Count = Annotated[int, Meta(ge=0)]
_Size = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0, le=86400)]
_Timeout = Annotated[float, Meta(gt=0, le=86400)]


class FakeSetup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a fake engine.

    answers: text in a prompt -> answer. If several texts are in the prompt, the longest one counts; "" is in each one.
        Without a match, the answer is empty. None: each answer consists of ``max_new_tokens`` random letters, which
        depend on the prompt.
    step_time_s: duration of each step. faults: the faults to inject.
    processes: True: use subprocesses like a real engine. False: run everything on the event loop of the engine, which
        starts immediately. None: use subprocesses only if a fault kills, stalls or delays one, steps take
        time, or there are several ranks.
    max_loras_per_batch: 0: no adapters. The linear layers of the model are ``LAYERS``, and adapters are in fp32.
    adapter_s: time to read an adapter.
    context_length, num_pages (of 16 tokens), max_running, max_queued: limits, which may be very small. The other fields
        are arguments of the constructor of a real engine.
    """

    answers: Mapping[str, str] | None = None
    step_time_s: _Seconds = 0.0
    faults: Faults | None = None
    processes: bool | None = None
    context_length: _Size = 2048
    num_pages: _Size = 1024
    max_running: _Size = 64
    max_queued: _Count = 4096
    chunk_tokens: _Size = 512
    tenant_weights: Mapping[str, Annotated[float, Meta(gt=0, le=MAX_WEIGHT)]] = {}
    random_seed: _Count = 0
    stall_timeout_s: _Timeout = 600.0
    slow_reader: Literal["coalesce", "pause", "abort"] = "coalesce"
    slow_reader_timeout_s: _Timeout = 30.0
    max_restarts: _Count = 3
    restart_window_s: _Timeout = 600.0
    allow_request_templates: bool = False
    max_loras_per_batch: _Count = 0
    max_loaded_loras: _Size | None = None
    adapter_s: _Seconds = 0.0
    tp_size: _Size = 1
    dp_size: _Size = 1

    @property
    def has_processes(self) -> bool:
        """Whether it uses subprocesses."""
        if self.processes is not None:
            return self.processes
        faults = self.faults or Faults()
        kills = faults.kill_at or faults.exit_at or faults.poison_token_id >= 0 or faults.kill_at_control
        return bool(kills or faults.stall_at or faults.start_s or self.step_time_s or self.tp_size > 1)

    def settings(self) -> Settings:
        """Return the settings of the processes."""
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
            # mem_fraction_static has no effect, because num_pages is given
            memory=MemorySettings(page_size=PAGE_SIZE, num_pages=self.num_pages, mem_fraction_static=0.1),
            scheduler=SchedulerSettings(
                max_running=self.max_running,
                chunk_tokens=max(self.chunk_tokens, self.max_running),  # each decode row must fit into a step
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
                ranks=RankSettings(size=self.tp_size) if self.tp_size > 1 else None,
                num_replicas=self.dp_size,
            ),
            text=TextSettings(tokenizer_path=folder, allow_request_templates=self.allow_request_templates),
            random_seed=self.random_seed,
            log_level="error",
        )

    @property
    def lora(self) -> LoraSettings | None:
        """The settings of adapters."""
        if not self.max_loras_per_batch:
            return None
        return LoraSettings(num_slots=self.max_loras_per_batch, max_rank=MAX_RANK, max_loaded=self.max_loaded_loras)

    def blueprint(self) -> Blueprint:
        """Return the argument of ``from_blueprint`` of both engines."""
        settings = self.settings()
        limits = SupervisionConfig(
            max_restarts=self.max_restarts,
            restart_window_s=self.restart_window_s,
            stall_timeout_s=self.stall_timeout_s,
            startup_timeout_s=STARTUP_TIMEOUT_S,
        )

        def make_replica(number: int, events: Events) -> Supervisor:
            own = replace(settings, runner=replace(settings.runner, replica=number))
            if not self.has_processes:
                return Supervisor(own, limits, launcher="inline", events=events)
            return Supervisor(own, limits, launcher="process", events=events, roles=roles_of(own))

        def make_processes(events: Events) -> Processes:
            if self.dp_size == 1:
                return make_replica(0, events)
            return Fleet([partial(make_replica, number) for number in range(self.dp_size)], events)

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
    """Return an ``AsyncEngine`` with a fake model. setup: the other fields of ``FakeSetup``.

    Raises:
        ValueError: a field does not exist, or has a wrong value.
    """
    return AsyncEngine.from_blueprint(_setup(answers, setup).blueprint)


def fake_engine(answers: Mapping[str, str] | None = None, **setup: object) -> Engine:
    """Return a started ``Engine`` with a fake model. setup: the other fields of ``FakeSetup``.

    Raises:
        ValueError: a field does not exist, or has a wrong value.
    """
    return Engine.from_blueprint(_setup(answers, setup).blueprint)


def _setup(answers: Mapping[str, str] | None, setup: Mapping[str, object]) -> FakeSetup:
    try:
        return msgspec.convert({"answers": answers, **setup}, FakeSetup, from_attributes=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"wrong arguments of a fake engine: {error}") from None
