"""Models with recurrent states: kernels match torch, and tokens of the runner match those on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from aioengine.kernels.causal_conv import causal_conv
from aioengine.kernels.gated_delta import gated_delta
from aioengine.kernels.norms import gated_rms_norm
from aioengine.kernels.state_types import DeltaGates, StateRows
from aioengine.layers.mixer import token_blocks
from tests.compute.models.test_hybrids import WITH_EXPERTS, make_config, make_granite, make_lfm2, make_settings
from tests.compute.runner_world import World
from tests.gpu.test_kernels import in_torch
from tests.kit.hybrid_models import save_hybrid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedConfig

PROMPTS = [[(7 * i + 3 * j) % 95 + 1 for j in range(1 + 9 * i)] for i in range(10)]
"""Some longer than a block of tokens, and longer than a step."""


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": lambda: make_config(head_dim=64),
    "qwen3_next with experts": lambda: make_config(head_dim=64, **WITH_EXPERTS, shared_expert_intermediate_size=16),
    "lfm2": lambda: make_lfm2(hidden_size=128, num_attention_heads=2, conv_bias=True),
    "granitemoehybrid": lambda: make_granite(hidden_size=128, num_attention_heads=2, mamba_d_state=32),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(CONFIGS[request.param](), tmp_path_factory.mktemp("hybrid"))


def run(folder: Path, *, device: str, **changes: object) -> list[list[int]]:
    settings = make_settings(folder, page_size=16, num_pages=128, chunk_tokens=70, **changes)
    runner = msgspec.structs.replace(settings.runner, device=device)
    world = World(msgspec.structs.replace(settings, runner=runner))
    assert (world.runner.prompt_graphs is not None) == bool(runner.cuda_graph_max_rows)
    answers = world.answers(PROMPTS, max_new_tokens=24)
    world.runner.close()
    return answers


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return run(folder, device="cpu")


@pytest.mark.parametrize(
    ("graphs", "depth", "backend", "is_invariant"),
    [(0, 0, "torch", False), (8, 1, "triton", False), (3, 1, "triton", True)],
)
def test_greedy_tokens_in_fp32_equal_the_cpu(
    folder: Path, expected: list[list[int]], graphs: int, depth: int, backend: str, is_invariant: bool
) -> None:
    actual = run(
        folder,
        device="cuda",
        depth=depth,
        attention_backend=backend,
        batch_invariant=is_invariant,
        cuda_graph_max_rows=graphs,
        max_running=graphs or 8,
    )
    assert actual == expected


@pytest.mark.parametrize("graphs", [0, 8])
def test_turns_start_from_snapshots_and_have_the_tokens_of_the_cpu(folder: Path, graphs: int) -> None:
    settings = make_settings(folder, page_size=16, chunk_tokens=70, depth=1)
    runner = msgspec.structs.replace(
        settings.runner, device="cuda", attention_backend="triton", cuda_graph_max_rows=graphs
    )
    worlds = World(make_settings(folder, prefix_cache=False)), World(msgspec.structs.replace(settings, runner=runner))
    histories = [prompt[:40] for prompt in PROMPTS[2:6]]
    for turn in range(3):
        answers = [world.answers(histories, max_new_tokens=20) for world in worlds]
        assert answers[0] == answers[1]
        cached = [worlds[1].num_cached[uid] for uid in sorted(worlds[1].num_cached)[-len(histories) :]]
        assert all(len(ids) - num_cached < 32 for ids, num_cached in zip(histories, cached, strict=True)) == (turn > 0)
        histories = [ids + answer + [turn + 1] * 3 for ids, answer in zip(histories, answers[1], strict=True)]
    worlds[1].runner.close()


def test_preempted_requests_continue_from_snapshots(folder: Path) -> None:
    settings = make_settings(folder, num_pages=34, depth=1)
    runner = msgspec.structs.replace(settings.runner, device="cuda", attention_backend="triton", cuda_graph_max_rows=8)
    prompts = [PROMPTS[3], PROMPTS[4], PROMPTS[6]] * 2
    world = World(msgspec.structs.replace(settings, runner=runner))
    result = world.answers(prompts, max_new_tokens=40)
    assert world.num_preemptions > 0
    world.runner.close()
    assert result == World(make_settings(folder)).answers(prompts, max_new_tokens=40)


class Layer:
    """Inputs, and a pool with NaN in its slots, in the sizes of Qwen3-Next."""

    def __init__(self, counts: list[int], starts: list[int], dtype: torch.dtype) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            """[*shape]."""
            return torch.randn(shape, device="cuda", generator=generator)

        num_tokens, num_slots = sum(counts), len(counts) + 1
        blocks = None if max(counts) == 1 else torch.from_numpy(token_blocks(torch.tensor(counts).numpy())).cuda()
        slots = torch.randperm(num_slots, device="cuda", generator=generator)[: len(counts)]
        self.rows = StateRows(
            slots, torch.tensor(starts, device="cuda"), torch.tensor(counts, device="cuda").cumsum(0), blocks
        )
        self.x = random(num_tokens, 12288 + 64).to(dtype)
        self.given, self.output_gates, scores, steps = self.x.split([8192, 4096, 32, 32], dim=1)
        self.weight = (random(8192, 4) / 2).to(dtype)
        self.norm = random(128).to(dtype)
        self.gates = DeltaGates(steps=steps, scores=scores, log_rate=random(32), bias=random(32))
        self.inputs = random(num_slots, 3, 8192).to(dtype)
        self.matrices = random(num_slots, 32, 128, 128) / 8
        for slot, start in zip(slots.tolist(), starts, strict=True):
            if start == 0:
                self.inputs[slot], self.matrices[slot] = torch.nan, torch.nan

    def run(self, *, is_reference: bool, in_blocks: bool) -> list[torch.Tensor]:
        """Return channels, outputs, normed outputs, and both states [N, ...] of the used slots."""
        inputs, matrices, rows = self.inputs.clone(), self.matrices.clone(), self.rows

        def compute() -> list[torch.Tensor]:
            channels = causal_conv(self.given, self.weight, inputs, rows)
            outputs = gated_delta(channels, self.gates, matrices, rows, in_blocks=in_blocks)
            normed = gated_rms_norm(outputs, self.output_gates, self.norm, torch.tensor(1e-6, device="cuda"))
            return [channels, outputs, normed]

        results = in_torch(compute) if is_reference else compute()
        return [*results, inputs[rows.slots], matrices[rows.slots]]


STEPS = [
    ([1] * 5, [3, 0, 9, 700, 1]),
    ([200, 1, 31, 64, 32, 2], [0, 5, 0, 128, 7, 1]),
    ([65, 300], [3, 0]),
]


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counts", "starts"), STEPS)
def test_state_kernels_equal_plain_torch(
    counts: list[int], starts: list[int], dtype: torch.dtype, in_blocks: bool
) -> None:
    layer = Layer(counts, starts, dtype)
    tolerance = 2e-4 if dtype == torch.float32 and not in_blocks else 3e-2
    actual = layer.run(is_reference=False, in_blocks=in_blocks)
    for ours, expected in zip(actual, layer.run(is_reference=True, in_blocks=False), strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_with_repeated_keys_and_slow_decay_match_torch(dtype: torch.dtype) -> None:
    layer = Layer([200, 70], [0, 9], dtype)
    layer.given[:, :4096] = layer.given[:9, :4096].repeat(30, 1)
    layer.gates.scores.add_(3)
    layer.gates.log_rate.sub_(5)
    _, outputs, _, _, states = layer.run(is_reference=False, in_blocks=True)
    _, expected, _, _, expected_states = layer.run(is_reference=True, in_blocks=False)
    torch.testing.assert_close(outputs, expected, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(states, expected_states, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_blocks_a_token_has_the_same_bits_in_any_chunk(dtype: torch.dtype) -> None:
    layer = Layer([150], [0], dtype)
    whole = layer.run(is_reference=False, in_blocks=False)
    inputs, matrices = layer.inputs.clone(), layer.matrices.clone()
    start, slot = 0, layer.rows.slots
    for count in (1, 70, 3, 1, 75):
        part = slice(start, start + count)
        counts = torch.tensor([count])
        blocks = None if count == 1 else torch.from_numpy(token_blocks(counts.numpy())).cuda()
        rows = StateRows(slot, torch.tensor([start], device="cuda"), counts.cuda(), blocks)
        gates = DeltaGates(
            steps=layer.gates.steps[part],
            scores=layer.gates.scores[part],
            log_rate=layer.gates.log_rate,
            bias=layer.gates.bias,
        )
        channels = causal_conv(layer.given[part], layer.weight, inputs, rows)
        outputs = gated_delta(channels, gates, matrices, rows)
        assert torch.equal(channels, whole[0][part])
        assert torch.equal(outputs, whole[1][part])
        start += count
    assert torch.equal(inputs[slot], whole[3])
    assert torch.equal(matrices[slot], whole[4])
