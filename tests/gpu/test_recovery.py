"""Processes on a GPU are killed during many streams. In deterministic mode, text and tokens equal those of a run
without kills.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine
from tests.compute.runner_world import save_model
from tests.unit.text.sample_tokenizers import byte_level

pytestmark = pytest.mark.process

HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
CONTEXT_LENGTH = 1024
NUM_STREAMS = 40
DEVICE = "cuda"
SAMPLINGS: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 20},
    {"temperature": 1.2, "seed": 3, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.6, "presence_penalty": 0.3, "top_k": 50},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 6, "logit_bias": {"65": 3.0, "66": -2.0}, "min_new_tokens": 40},
    {"temperature": 1.0, "seed": 7, "stop": ["AA", "q!"], "stop_token_ids": [200]},
]

Answer = tuple[str, list[int], object]


class Crowd:
    """Many concurrent streams of different lengths and sampling parameters. At each number of received tokens in
    ``moments``, the current process of ``role`` is killed.

    caught: numbers of started streams and of streams without a token at each kill.
    """

    def __init__(self, engine: AsyncEngine, role: str = "", moments: tuple[int, ...] = ()) -> None:
        self.engine = engine
        self.role = role
        self.moments = list(moments)
        self.caught: list[tuple[int, int]] = []
        self.answers: list[Answer] = [("", [], None)] * NUM_STREAMS

    async def ask_all(self) -> list[Answer]:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(self._ask(number))
        return self.answers

    async def _ask(self, number: int) -> None:
        rng = random.Random(number)
        prompt = [rng.randrange(260) for _ in range(rng.choice([1, 5, 16, 33, 150, 400]))]
        params = {**SAMPLINGS[number % len(SAMPLINGS)], "max_new_tokens": rng.randrange(50, 500)}
        async for chunk in self.engine.async_generate(input_ids=prompt, sampling_params=params, stream=True):
            text, ids, reason = self.answers[number]
            assert (chunk["text_offset"], chunk["token_offset"]) == (len(text), len(ids))
            assert reason is None
            self.answers[number] = (
                text + chunk["text"],
                ids + chunk["output_ids"],
                chunk["meta_info"]["finish_reason"],
            )
            self._kill()

    def _kill(self) -> None:
        health = self.engine.health()
        num_tokens = sum(len(ids) for _, ids, _ in self.answers)
        if self.moments and num_tokens >= self.moments[0] and health["state"] == "running":
            self.moments.pop(0)
            num_started = sum(bool(ids) and reason is None for _, ids, reason in self.answers)
            self.caught.append((num_started, sum(not ids for _, ids, _ in self.answers)))
            [pid] = [process["pid"] for process in health["processes"] if process["role"] == self.role]
            os.kill(pid, signal.SIGKILL)


async def check_recovery(folder: Path, roles: list[str], **options: Any) -> None:
    """Streams of a random model equal the streams without kills, although processes of these roles are killed."""
    save_model(
        "qwen3", folder, dtype=torch.bfloat16, initializer_range=0.1, max_position_embeddings=CONTEXT_LENGTH, **HEADS
    )
    (folder / "tokenizer.json").write_text(json.dumps(byte_level().file))
    async with AsyncEngine(
        str(folder),
        device=DEVICE,
        enable_deterministic_inference=True,
        max_running_requests=24,
        chunked_prefill_size=256,
        max_total_tokens=32 * CONTEXT_LENGTH,
        max_restarts=10,
        **options,
    ) as engine:
        expected = await Crowd(engine).ask_all()
        assert len({text for text, _, _ in expected}) == NUM_STREAMS
        assert {str(reason) for _, _, reason in expected} == {"length", "stop"}
        total = sum(len(ids) for _, ids, _ in expected)
        num_restarts = 0
        for role in roles:
            moments = (total // 3,) if role == "detokenizer" else (30, total // 2)
            crowd = Crowd(engine, role, moments)
            actual = await crowd.ask_all()
            num_restarts += len(moments)
            assert engine.stats()["num_restarts"] == num_restarts, "each kill was noticed"
            assert all(num_started for num_started, _ in crowd.caught), crowd.caught
            assert crowd.caught[0][1] > 0, "some had not begun"
            for number, pair in enumerate(zip(actual, expected, strict=True)):
                assert pair[0] == pair[1], f"stream {number}, {role} killed"


async def test_deterministic_streams_equal_an_undisturbed_run(tmp_path: Path) -> None:
    await check_recovery(tmp_path, ["scheduler", "detokenizer"])
