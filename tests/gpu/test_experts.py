"""Experts on a GPU: kernels match torch and do not depend on the batch, and models match transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from aioengine.families._experts import RouterConfig
from aioengine.kernels import experts, routing
from aioengine.kernels.codes import Codes
from aioengine.kernels.expert_types import SILU, ChosenExperts, ExpertWeights, GateFunction, SharedOutputs
from tests.compute.kernels.test_coded_experts import KINDS, dequantized, random_weights
from tests.compute.kernels.test_coded_experts import NUM_EXPERTS as CODED_EXPERTS
from tests.compute.runner_world import World, check_greedy
from tests.kit.settings import small_settings

NUM_EXPERTS, SIZE, INNER = 12, 256, 192
PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(3 + 6 * i)] for i in range(5)]


def make_weights(gate: GateFunction, *, has_bias: bool, dtype: torch.dtype) -> ExpertWeights:
    torch.manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, SIZE) * SIZE**-0.5
    down = torch.randn(NUM_EXPERTS, SIZE, INNER) * INNER**-0.5
    biases = (torch.randn(NUM_EXPERTS, 2 * INNER), torch.randn(NUM_EXPERTS, SIZE)) if has_bias else (None, None)
    tensors = [None if tensor is None else tensor.to(dtype) for tensor in (gate_up, down, *biases)]
    assert tensors[0] is not None
    assert tensors[1] is not None
    return ExpertWeights(tensors[0], tensors[1], tensors[2], tensors[3], gate)


def on_gpu(weights: ExpertWeights) -> ExpertWeights:
    gate_up_bias, down_bias = (
        None if bias is None else bias.cuda() for bias in (weights.gate_up_bias, weights.down_bias)
    )
    return ExpertWeights(weights.gate_up.cuda(), weights.down.cuda(), gate_up_bias, down_bias, weights.gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("gate", "has_bias"), [(SILU, False), (GateFunction(0.7, 1.702), True)])
def test_kernels_equal_torch(gate: GateFunction, has_bias: bool, dtype: torch.dtype) -> None:
    weights = make_weights(gate, has_bias=has_bias, dtype=dtype)
    computed = experts.prepare(on_gpu(weights), dtype)
    tolerance = 2e-4 if dtype == torch.float32 else 5e-2
    for num_tokens in (1, 3, 20, 200, 700):
        x, logits = torch.randn(num_tokens, SIZE, dtype=dtype), torch.randn(num_tokens, NUM_EXPERTS)
        gates = torch.randn(num_tokens, 1, dtype=dtype)
        shared = SharedOutputs(torch.randn(num_tokens, SIZE, dtype=dtype), gates)
        chosen = routing.route(logits, None, 3, RouterConfig())
        there = routing.route(logits.cuda(), None, 3, RouterConfig())
        assert torch.equal(there.experts.cpu(), chosen.experts)
        expected = experts.prepare(weights, dtype)(x, chosen, shared)
        actual = computed(x.cuda(), there, SharedOutputs(shared.values.cuda(), gates.cuda()))
        torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_with_any_other_rows(dtype: torch.dtype) -> None:
    computed = experts.prepare(on_gpu(make_weights(SILU, has_bias=False, dtype=dtype)), dtype, batch_invariant=True)
    x = torch.randn(600, SIZE, dtype=dtype, device="cuda")
    chosen = routing.route(torch.randn(600, NUM_EXPERTS, device="cuda"), None, 3, RouterConfig())
    whole = computed(x, chosen)
    for rows in (slice(0, 1), slice(7, 9), slice(20, 60), slice(3, 500)):
        assert torch.equal(computed(x[rows], ChosenExperts(chosen.experts[rows], chosen.weights[rows])), whole[rows])


def coded_on_gpu(kind: str, size: int, inner: int) -> tuple[ExpertWeights, ExpertWeights]:
    """Return random weights of few bits on the GPU, and dequantized in fp32 on the CPU."""
    torch.manual_seed(0)
    weights = random_weights(kind, size, inner, torch.bfloat16, has_bias=True)
    tensors = [
        Codes(*(part.cuda() if isinstance(part, torch.Tensor) else part for part in own))
        if isinstance(own, Codes)
        else own.cuda()
        for own in weights[:4]
        if own is not None
    ]
    wide = dequantized(weights, torch.float32)
    biases = (None if bias is None else bias.float() for bias in wide[2:4])
    return ExpertWeights(*tensors, weights.gate), ExpertWeights(*wide[:2], *biases, wide.gate)


@pytest.mark.parametrize(("size", "inner"), [(192, 320), (256, 384)])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_with_codes_equal_the_dequantized_weights(kind: str, size: int, inner: int) -> None:
    coded, wide = coded_on_gpu(kind, size, inner)
    computed, expected = experts.prepare(coded, torch.bfloat16), experts.prepare(wide, torch.float32)
    for num_tokens in (1, 3, 12, 30, 80, 200, 700):
        x, logits = torch.randn(num_tokens, size).bfloat16(), torch.randn(num_tokens, CODED_EXPERTS)
        chosen = routing.route(logits, None, 3, RouterConfig())
        result = computed(x.cuda(), ChosenExperts(chosen.experts.cuda(), chosen.weights.cuda())).cpu().float()
        wanted = expected(x.float(), chosen)
        error = (result - wanted).norm() / wanted.norm()
        assert error < 0.02, (num_tokens, error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_codes_has_the_same_bits_with_any_other_rows(kind: str) -> None:
    coded, _ = coded_on_gpu(kind, 192, 320)
    computed = experts.prepare(coded, torch.bfloat16, batch_invariant=True)
    x = torch.randn(600, 192, dtype=torch.bfloat16, device="cuda")
    chosen = routing.route(torch.randn(600, CODED_EXPERTS, device="cuda"), None, 3, RouterConfig())
    whole = computed(x, chosen)
    for rows in (slice(0, 1), slice(7, 9), slice(20, 60), slice(3, 500)):
        assert torch.equal(computed(x[rows], ChosenExperts(chosen.experts[rows], chosen.weights[rows])), whole[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_restored_and_replaced_in_place(kind: str) -> None:
    coded, _ = coded_on_gpu(kind, 192, 320)
    computed = experts.prepare(coded, torch.bfloat16)
    for kept, own in zip(computed.weights()[:2], coded[:2], strict=True):
        assert isinstance(kept, Codes)
        assert isinstance(own, Codes)
        torch.testing.assert_close(kept.dequantized(torch.float32), own.dequantized(torch.float32))
    x = torch.randn(5, 192, dtype=torch.bfloat16, device="cuda")
    chosen = routing.route(torch.randn(5, CODED_EXPERTS, device="cuda"), None, 3, RouterConfig())
    before = computed(x, chosen)
    computed.update(computed.weights())
    assert torch.equal(computed(x, chosen), before)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("graphs", [0, 4])
def test_greedy_tokens_equal_transformers(family: str, graphs: int, tmp_path: Path) -> None:
    """In fp32, prompts in chunks: each token has the highest logit, but for rounding."""
    sizes: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64, "num_experts_per_tok": 3,
        "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(1)
    config = (
        Qwen3MoeConfig(**sizes, num_experts=8, moe_intermediate_size=64)
        if family == "qwen3_moe"
        else GptOssConfig(**sizes, num_local_experts=8, sliding_window=16)
    )
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    settings = small_settings(
        path=str(tmp_path), dtype="float32", load_format="auto", context_length=64, vocab_size=96, max_running=8,
        chunk_tokens=16, depth=1, device="cuda", attention_backend="triton", fallback_backend="torch",
        cuda_graph_max_rows=graphs,
    )  # fmt: skip
    check_greedy(World(settings), theirs, PROMPTS, num_new=8)
