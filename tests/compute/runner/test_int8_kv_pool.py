"""Answers with an int8 KV pool do not depend on chunks, batch, prefix cache and preemption."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from aioengine.protocol.packed_logprobs import LogprobRules
from aioengine.settings.config import Settings
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.grids import grid

PROMPTS = [[*range(1, 90)], [7] * 40, [5, 9, 200, 31], [*range(1, 60), 250, 251]]


def int8_settings(folder: Path, *, dtype: str, page_size: int = 16, num_pages: int = 64, chunk_tokens: int) -> Settings:
    options = {"page_size": page_size, "num_pages": num_pages, "chunk_tokens": chunk_tokens}
    settings = make_settings(folder, dtype=dtype, **options)
    return replace(
        settings,
        memory=replace(settings.memory, kv_dtype="int8"),
        runner=replace(settings.runner, attention_backend="fused"),
    )


def run(world: World) -> list[tuple[list[int], list[bytes]]]:
    """Return the tokens and the packed logprobs of all prompts."""
    uids = [world.submit(prompt, max_new_tokens=30, logprobs=LogprobRules(num_top=3)) for prompt in PROMPTS]
    world.run()
    return [(world.outputs[uid], [extra.data for extra in world.extras[uid]]) for uid in uids]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *grid([("qwen3",), ("gemma3_text",), ("deepseek_v3",)], [("bfloat16",), ("float32",)]),
        *(pytest.param("gpt_oss", dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float32")),
    ],
)
def test_bits_do_not_depend_on_chunks_batch_prefix_cache_and_preemption(
    family: str, dtype: str, tmp_path: Path
) -> None:
    windows = {"sliding_window": 24} if family in {"gemma3_text", "gpt_oss"} else {}
    save_model(family, tmp_path, num_hidden_layers=3, **windows)
    world = World(int8_settings(tmp_path, dtype=dtype, chunk_tokens=512))
    expected = run(world)
    assert run(world) == expected
    assert any(world.num_cached.values()), "no prefix hits in the second run"
    alone = World(int8_settings(tmp_path, dtype=dtype, chunk_tokens=512))
    for prompt, (tokens, _) in zip(PROMPTS[::-1], expected[::-1], strict=True):
        assert alone.answers([prompt], max_new_tokens=30) == [tokens]
    small = World(int8_settings(tmp_path, dtype=dtype, page_size=4, num_pages=256, chunk_tokens=13))
    uids = [small.submit(prompt, max_new_tokens=30, logprobs=LogprobRules(num_top=3)) for prompt in PROMPTS]
    num_steps = 0
    while small.core.has_work:
        small.step()
        num_steps += 1
        if num_steps % 9 == 0 and small.core.requests.running:
            small.core.requests.preempt()
    assert small.num_preemptions
    assert [(small.outputs[uid], [extra.data for extra in small.extras[uid]]) for uid in uids] == expected


def test_answers_are_close_to_those_of_a_plain_pool(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    small = int8_settings(tmp_path, dtype="float32", chunk_tokens=512)
    worlds = World(replace(small, memory=replace(small.memory, kv_dtype=None))), World(small)
    plain, rounded = (world.answers(PROMPTS, max_new_tokens=30) for world in worlds)
    assert [answer[:2] for answer in rounded] == [answer[:2] for answer in plain]
    sizes = [int(world.runner.facts["kv_pool_bytes"]) for world in worlds]
    assert sizes[0] / sizes[1] == 4 * 16 / (16 + 2)
    assert [world.runner.facts["kv_cache_dtype"] for world in worlds] == ["float32", "int8"]
