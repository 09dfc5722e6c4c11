"""Which modules of transformers our layers replace, and which they do not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import CohereConfig, Gemma2Config, LlamaConfig, Phi3Config
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from aioengine.families._config import Task
from aioengine.layers.layer import Placement
from aioengine.models._fallback import TransformersModel, build_module
from aioengine.models._fallback_swaps import find_norm, gated_activation
from aioengine.quantization.plain import plain
from tests.compute.models.test_fallback import SIZES, load, save
from tests.compute.stepping import Stepper, options

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

SMALL: Any = SIZES


def placement(dtype: torch.dtype) -> Placement:
    return Placement(dtype=dtype, device=torch.device("cpu"), format_of=plain)


class ClampedRMSNorm(modeling_llama.LlamaRMSNorm):
    """Limits its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        return super().forward(x.clamp(-5.0, 5.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rms_norms_are_replaced_if_results_match(dtype: torch.dtype) -> None:
    """[1, T, D], with weights of 32 numbers."""
    x = torch.zeros(1, 3, 32, dtype=dtype)
    for module in (modeling_llama.LlamaRMSNorm(32), modeling_gemma2.Gemma2RMSNorm(32), nn.RMSNorm(32, 1e-6)):
        norm = find_norm(module.to(dtype), x, placement(dtype))
        assert norm is not None, module
        weight = torch.randn(32).to(dtype)
        module.weight.copy_(weight)
        norm.own_weights()["weight"].tensor.copy_(weight)
        norm.finish_loading()
        x = torch.randn(40, 32).to(dtype)
        assert (norm(x) != module(x)).float().mean() < 0.01 or dtype == torch.float32
        torch.testing.assert_close(norm(x), module(x))
    for other in (nn.LayerNorm(32), ClampedRMSNorm(32), nn.Linear(32, 32)):
        assert find_norm(other.to(dtype), x, placement(dtype)) is None


@torch.inference_mode()
def test_activation_of_gated_mlp_is_determined_by_results() -> None:
    names = "gate_proj", "up_proj", "down_proj"
    llama = modeling_llama.LlamaMLP(LlamaConfig(**SMALL))
    assert gated_activation(llama, names) == "silu"
    assert gated_activation(modeling_gemma2.Gemma2MLP(Gemma2Config(**SMALL)), names) == "gelu_tanh"
    assert gated_activation(modeling_phi3.Phi3MLP(Phi3Config(**SMALL)), ("gate_up_proj", "down_proj")) == "silu"
    assert gated_activation(llama, ("up_proj", "gate_proj", "down_proj")) is None
    llama.act_fn = nn.Tanh()
    assert gated_activation(llama, names) is None


def build(config: PreTrainedConfig) -> tuple[TransformersModel, list[str]]:
    """Return the model, and the classes of its modules."""
    module = build_module(config, Task.GENERATE, options(max_positions=64))
    model = TransformersModel(module, Task.GENERATE, options(max_positions=64))
    return model, [type(part).__name__ for part in module.modules()]


def test_layers_with_one_input_are_fused_and_weights_are_stored_once() -> None:
    model, kinds = build(LlamaConfig(**SMALL))
    assert not {"Linear", "LlamaRMSNorm", "LlamaMLP"} & {*kinds}
    parts = [[*linear.sizes] for _, linear in model.linears()]
    block = [["gate_proj", "up_proj"], ["down_proj"], ["q_proj", "k_proj", "v_proj"], ["o_proj"]]
    assert sorted(parts) == sorted(block * 3)
    held = {target.tensor.untyped_storage().data_ptr(): target.tensor for target in model.weights().values()}
    assert len(held) == 3 * (4 + 2) + 3
    assert sum(tensor.untyped_storage().nbytes() for tensor in held.values()) == sum(
        target.tensor.nbytes for target in model.weights().values()
    )


def test_layers_with_and_without_bias_are_not_fused() -> None:
    model, kinds = build(CohereConfig(**SMALL, tie_word_embeddings=True))
    assert "Linear" not in kinds
    assert "lm_head.weight" not in model.weights()


@torch.inference_mode()
def test_weights_can_be_reloaded(tmp_path: Path) -> None:
    for config in (LlamaConfig(**SMALL), Gemma2Config(**SMALL, head_dim=16)):
        reference = save(config, tmp_path / config.model_type)
        model = load(tmp_path / config.model_type)
        ids = torch.randint(3, 96, (9,))
        for factor in (1.0, 0.5):
            model.open_for_loading()
            for name, target in model.weights().items():
                changed = reference.get_parameter(name).mul_(factor)
                torch.testing.assert_close(target.tensor * factor, changed)
                target.tensor.copy_(changed)
            model.finish_loading()
            actual = Stepper(model).run(ids.tolist(), [9])
            torch.testing.assert_close(actual, reference(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_code_that_reads_attributes_of_its_layers_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference = save(LlamaConfig(**SMALL), tmp_path)
    theirs = modeling_llama.LlamaDecoderLayer.forward

    def reads_weights(self: Any, x: torch.Tensor, **named: Any) -> torch.Tensor:
        """[1, T, D] -> [1, T, D]."""
        return theirs(self, x.to(self.self_attn.o_proj.weight.dtype), **named)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", reads_weights)
    with caplog.at_level(logging.INFO, "aioengine"):
        model = load(tmp_path)
    assert "no attribute 'weight'" in caplog.text
    ids = torch.randint(3, 96, (9,))
    torch.testing.assert_close(Stepper(model).run(ids.tolist(), [9]), reference(ids[None]).logits[0])
