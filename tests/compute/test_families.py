"""Every family against transformers, in fp32, on small random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from aioengine import models
from aioengine.families._config import RopeConfig
from aioengine.layers.rope import RotaryEmbedding
from tests.compute.stepping import Stepper, options

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig, PreTrainedModel

    from aioengine.models._base import Model

NUM_TOKENS = 60
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def rope(rope_type: str, **parameters: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0, "factor": 4.0, **parameters}}


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
CASES: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "llama tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama all kv heads": (LlamaConfig, {"num_key_value_heads": 6}),
    "llama wide heads": (LlamaConfig, {"head_dim": 20}),
    "llama llama3": (LlamaConfig, LLAMA3),
    "llama linear": (LlamaConfig, rope("linear")),
    "llama yarn": (LlamaConfig, rope("yarn", original_max_position_embeddings=16)),
    "llama yarn scales": (
        LlamaConfig,
        rope("yarn", original_max_position_embeddings=16, mscale=1.5, mscale_all_dim=0.5),
    ),
    "llama yarn plain": (
        LlamaConfig,
        rope("yarn", original_max_position_embeddings=16, truncate=False, attention_factor=1.2, beta_fast=8.0),
    ),
    "llama dynamic": (LlamaConfig, rope("dynamic")),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral window": (MistralConfig, {"sliding_window": 13}),
    "mistral window of one": (MistralConfig, {"sliding_window": 1}),
    "qwen2": (Qwen2Config, {}),
    "qwen2 windows in upper layers": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2 tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "qwen3 windows by layer": (
        Qwen3Config,
        {
            "head_dim": 24,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 biases": (Qwen3Config, {"attention_bias": True, "head_dim": 8}),
}


def pair(config: PreTrainedConfig) -> tuple[PreTrainedModel, Model]:
    """The model of transformers with lively random weights, and ours with the same."""
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    ours = models.build({**config.to_dict(), "architectures": [type(theirs).__name__]}, options())
    weights = ours.weights()
    for name, tensor in theirs.state_dict().items():
        if name in weights:
            weights.pop(name).tensor.copy_(tensor)
        else:
            assert ours.is_ignored(name), name
    assert not weights
    ours.finish_loading()
    return theirs, ours


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str) -> None:
    config_type, differences = CASES[case]
    theirs, ours = pair(config_type(**{**SIZES, **differences}))
    token_ids = torch.randint(0, SIZES["vocab_size"], (NUM_TOKENS,))
    expected = theirs(token_ids.unsqueeze(0)).logits[0]
    for page_size, chunks in ((16, [NUM_TOKENS]), (4, [7, 20, 1, 24]), (1, [50, 2])):
        logits = Stepper(ours, page_size=page_size).run(token_ids.tolist(), chunks)
        torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-5)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_dynamic_scaling_beyond_the_trained_length_is_that_of_generation() -> None:
    theirs, ours = pair(LlamaConfig(**{**SIZES, **rope("dynamic"), "max_position_embeddings": 32}))
    prompt = torch.randint(0, SIZES["vocab_size"], (1, 20))
    generated = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    logits = Stepper(ours).run(generated.sequences[0].tolist()[:-1], [20])
    torch.testing.assert_close(logits[19:], torch.cat(generated.logits), atol=3e-5, rtol=1e-5)


def test_older_configs_name_the_scaling_in_rope_scaling() -> None:
    newer = LlamaConfig(**{**SIZES, **rope("linear")})
    _, ours = pair(newer)
    raw = newer.to_dict()
    parameters = raw.pop("rope_parameters")
    raw |= {"rope_theta": parameters["rope_theta"], "rope_scaling": {"type": "linear", "factor": 4.0}}
    older = models.build(raw, options())
    for name, target in older.weights().items():
        target.tensor.copy_(pair(newer)[0].state_dict()[name])
    older.finish_loading()
    token_ids = list(range(40))
    assert torch.equal(Stepper(older).run(token_ids, [40]), Stepper(ours).run(token_ids, [40]))


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic"])
def test_long_windows_have_the_rotations_of_short_ones_without_their_table(rope_type: str) -> None:
    config = RopeConfig(rope_type=rope_type, factor=4.0)  # pyright: ignore[reportArgumentType]
    short, long = (
        RotaryEmbedding(
            config, 16, max_position_embeddings=4000, num_positions=num_positions, device=torch.device("cpu")
        )
        for num_positions in (10_000, 2**31 - 1)
    )
    for num_tokens in (1, 2, 7, 1000):
        positions = torch.arange(num_tokens) * 9
        for wanted, found in zip(short.tables(positions), long.tables(positions), strict=True):
            assert torch.equal(wanted, found)
    assert long.tables(torch.tensor([2**31 - 2]))[0].isfinite().all()
