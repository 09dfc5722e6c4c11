"""Memory of a whole GPU: too little is a clear error of the start, and released memory is free for other processes.

Other tests on the same GPU would change the numbers, so run this file alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aioengine.protocol.messages import End, FinishCode, Limits, Sampling, Submit, TextRules
from aioengine.runner.build import build
from aioengine.scheduler.core import SchedulerCore
from aioengine.scheduler.scheduler import Scheduler
from aioengine.settings.config import MemorySettings, Settings
from tests.compute.runner_world import make_settings, save_model
from tests.gpu import test_live_weights

HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    save_model("qwen3", tmp_path, dtype=torch.bfloat16, **HEADS)
    settings = make_settings(tmp_path, dtype="bfloat16", depth=1, page_size=16, num_pages=None)
    runner = msgspec.structs.replace(settings.runner, device="cuda", attention_backend="triton", cuda_graph_max_rows=4)
    return msgspec.structs.replace(settings, runner=runner)


def fill(left_mib: int) -> torch.Tensor:
    """Allocate the memory of the GPU except about this much."""
    torch.cuda.empty_cache()
    torch.zeros(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    for more_mib in range(0, 512, 16):  # not all free memory can be allocated
        try:
            return torch.empty(free - ((left_mib + more_mib) << 20), dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            continue
    raise RuntimeError("the GPU could not be filled")


@pytest.mark.parametrize("left_mib", [0, 600, 1200])
def test_full_gpu_is_reported(settings: Settings, left_mib: int) -> None:
    hold = fill(left_mib)
    with pytest.raises(ValueError, match=r"GiB, .* free") as caught:
        build(settings, lambda _: None)
    assert any(word in str(caught.value) for word in ("Lower", "End other processes"))
    del hold
    torch.cuda.empty_cache()


def test_pool_that_is_too_large_is_refused(settings: Settings) -> None:
    memory = MemorySettings(page_size=16, num_pages=1 << 30, mem_fraction_static=0.9)
    with pytest.raises(
        ValueError, match=r"a KV pool of .* tokens needs .* GiB, but only .* are available; .* Lower max_total"
    ):
        build(msgspec.structs.replace(settings, memory=memory), lambda _: None)


def test_largest_steps_fit_into_memory(tmp_path: Path) -> None:
    """The pool uses nearly all memory. Then the largest steps run: all rows, long prompts and all penalties."""
    save_model("qwen3", tmp_path, dtype=torch.bfloat16, **{**HEADS, "vocab_size": 152_000})
    changed = make_settings(tmp_path, dtype="bfloat16", depth=1, page_size=16, num_pages=None, chunk_tokens=8192)
    settings = msgspec.structs.replace(
        changed,
        model=msgspec.structs.replace(changed.model, vocab_size=152_000),
        memory=msgspec.structs.replace(changed.memory, mem_fraction_static=0.999),
        scheduler=msgspec.structs.replace(changed.scheduler, max_running=600),
        runner=msgspec.structs.replace(
            changed.runner, device="cuda", attention_backend="triton", cuda_graph_max_rows=600
        ),
    )
    torch.cuda.empty_cache()
    runner = build(settings, lambda _: None)
    num_pages = runner.facts["num_pages"]
    assert isinstance(num_pages, int)
    core = SchedulerCore(Scheduler(settings.scheduler, num_pages=num_pages, page_size=16), runner, 1)
    for uid in range(700):
        sampling = Sampling(uid, frequency_penalty=0.5, repetition_penalty=1.2, top_p=0.9)
        prompt = [(uid * 31 + place) % 150_000 for place in range(240)]
        core.requests.submit(Submit(uid, prompt, sampling, Limits(6), TextRules()))
    ended: list[End] = []
    while core.has_work:
        output = core.step(0.0)
        ended += output.ended if output else []
    runner.close()
    assert [end.message for end in ended if end.message] == []
    assert {end.code for end in ended} == {FinishCode.LENGTH}
    assert len(ended) == 700


def test_device_info_has_the_memory(settings: Settings) -> None:
    memory = MemorySettings(page_size=16, num_pages=64, mem_fraction_static=0.9)
    runner = build(msgspec.structs.replace(settings, memory=memory), lambda _: None)
    assert runner.facts["device_name"] == torch.cuda.get_device_name()
    assert runner.facts["cuda_graph_sizes"] == "1 2 4"
    assert int(runner.facts["free_bytes"]) < int(runner.facts["total_bytes"])
    assert {"torch_version", "triton_version"} <= runner.facts.keys()
    runner.close()


@pytest.mark.process
async def test_released_memory_is_free(tmp_path: Path) -> None:
    folder = test_live_weights.save(tmp_path, 0.1)
    async with test_live_weights.engine_of(folder, enable_memory_saver=True) as engine:
        memory: Any = (await engine.get_server_info())["memory"]
        before = torch.cuda.mem_get_info()[0]
        await engine.release_memory_occupation("kv_cache")
        assert torch.cuda.mem_get_info()[0] - before > 0.9 * memory["kv_pool_bytes"]
        await engine.release_memory_occupation("weights")
        assert torch.cuda.mem_get_info()[0] - before > 0.9 * (memory["kv_pool_bytes"] + memory["weights_bytes"])
