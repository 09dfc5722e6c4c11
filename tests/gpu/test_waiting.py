"""The host launches steps without waiting for the device. It waits only when it collects results."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from aioengine.protocol.messages import Sampling
from aioengine.runner.ticket import Ticket
from aioengine.scheduler.plan import StepPlan
from tests.compute.runner_world import World, make_settings, save_model

HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
SAMPLINGS = [
    Sampling(1, temperature=0.0),
    Sampling(2),
    Sampling(3, top_k=20, top_p=0.9, min_p=0.01),
    Sampling(4, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    Sampling(5, temperature=0.0, repetition_penalty=1.2),
    Sampling(6, bias_token_ids=(5, 6), logit_bias=(2.0, -3.0)),
    Sampling(7, min_new_tokens=9, suppressed_token_ids=(7, 8), top_p=0.8),
]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch warns at the first use
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
@pytest.mark.parametrize("graphs", [0, 16])
def test_launch_does_not_wait_for_the_device(tmp_path: Path, backend: str, graphs: int) -> None:
    save_model("qwen3", tmp_path, dtype=torch.bfloat16, **HEADS)
    settings = make_settings(tmp_path, dtype="bfloat16", depth=1, page_size=16, chunk_tokens=64)
    runner = msgspec.structs.replace(
        settings.runner, device="cuda", attention_backend=backend, cuda_graph_max_rows=graphs
    )
    world = World(msgspec.structs.replace(settings, runner=runner))
    plain = world.runner.launch
    launched: list[int] = []

    def launch(plan: StepPlan) -> Ticket:
        torch.cuda.set_sync_debug_mode("error")  # operations that wait for the device raise now
        try:
            return plain(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            launched.append(len(plan.rows))

    world.runner.launch = launch  # type: ignore[method-assign]
    prompts = [[(7 * i + 3 * j) % 290 + 1 for j in range(3 + 11 * i)] for i in range(2 * len(SAMPLINGS))]
    uids = [world.submit(prompt, sampling) for prompt, sampling in zip(prompts, SAMPLINGS * 2, strict=True)]
    world.run()
    assert [len(world.outputs[uid]) for uid in uids] == [12] * len(uids), world.ended
    assert len(launched) > 12
    world.runner.close()
