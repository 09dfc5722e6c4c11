"""No request waits for a compiler: all kernels are compiled before the engine is ready."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aioengine.protocol.messages import Sampling
from aioengine.protocol.packed_logprobs import LogprobRules
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.tiny_sizes import VOCAB_SIZE

HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}


def some_sampling(rng: random.Random, uid: int) -> Sampling:
    return rng.choice(
        [
            Sampling(uid),
            Sampling(uid, temperature=0.0),
            Sampling(uid, top_k=rng.choice([1, 7, 64]), top_p=rng.choice([0.5, 1.0]), min_p=rng.choice([0.0, 0.1])),
            Sampling(uid, frequency_penalty=0.5, repetition_penalty=1.2),
            Sampling(uid, bias_token_ids=(3, 4, 5), logit_bias=(1.0, 2.0, 3.0)),
            Sampling(uid, temperature=0.0, min_new_tokens=5, suppressed_token_ids=(1, 2)),
            Sampling(uid, allowed_token_ids=(1, 5, 9), bad_token_ids=((5,), (1, 9))),
        ]
    )


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "torch"])
@pytest.mark.parametrize("graphs", [0, 16])
def test_requests_compile_nothing(tmp_path: Path, backend: str, graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    save_model("qwen3", tmp_path, dtype=torch.bfloat16, **HEADS)
    settings = make_settings(tmp_path, dtype="bfloat16", depth=1, page_size=16, num_pages=1024, chunk_tokens=1000)
    runner = msgspec.structs.replace(
        settings.runner, device="cuda", attention_backend=backend, cuda_graph_max_rows=graphs
    )
    scheduler = msgspec.structs.replace(settings.scheduler, max_running=100)
    world = World(msgspec.structs.replace(settings, runner=runner, scheduler=scheduler))
    compiled: list[str] = []

    def note(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    rng = random.Random(0)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(64)]
    for burst in (1, 1, 2, 3, 7, 16, 20, 31, 48, 64, 100):
        for _ in range(burst):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 5, 16, 17, 40, 64, 150]))]
            prompt = shared + prompt if rng.random() < 0.3 else prompt
            logprobs = rng.choice([None, LogprobRules(num_top=5), LogprobRules(start=0, num_top=20, token_ids=(3,))])
            world.submit(prompt, some_sampling(rng, burst), max_new_tokens=rng.randrange(1, 20), logprobs=logprobs)
        for _ in range(rng.randrange(30)):
            world.step()
    world.run()
    world.runner.close()
    assert compiled == []
    assert not {end.message for end in world.ended.values() if end.message}


def test_specializations_are_compiled_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All compilations start before the first launch waits for one of them."""
    from triton import knobs

    spans: list[tuple[float, float]] = []

    def note(*, times: Any, cache_hit: bool, **_: object) -> None:
        took_us = times.ir_initialization + times.total_lowering + times.store_results
        if not cache_hit:
            spans.append((time.monotonic() - took_us / 1e6, time.monotonic()))

    monkeypatch.setattr(knobs.compilation, "listener", note)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    sizes = {**HEADS, "hidden_size": 1536, "intermediate_size": 2560}  # no other test uses these sizes
    save_model("qwen3", tmp_path, dtype=torch.bfloat16, **sizes)
    settings = make_settings(tmp_path, dtype="bfloat16", depth=1, page_size=16, num_pages=1024)
    runner = msgspec.structs.replace(settings.runner, device="cuda", attention_backend="triton", cuda_graph_max_rows=32)
    World(msgspec.structs.replace(settings, runner=runner)).runner.close()
    assert len(spans) > 8
    assert max(sum(begin <= other < end for begin, end in spans) for other, _ in spans) >= 4
