"""Which modules of transformers our layers replace, and which they do not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import CohereConfig, Gemma2Config, LlamaConfig, Phi3Config
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from aioengine.families._config import Task
from aioengine.layers.placement import Placement
from aioengine.models._fallback import TransformersModel, build_module
from aioengine.models._fallback_swaps import find_gated, find_norm
from aioengine.quantization.plain import plain
from tests.compute.models.test_fallback import SIZES, load, save
from tests.compute.stepping import Stepper, options

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

SMALL: Any = SIZES


def placement(dtype: torch.dtype) -> Placement:
    return Placement(dtype=dtype, device=torch.device("cpu"), format_of=plain)


class WideNorm(nn.Module):
    """Multiplies in fp32."""

    def __init__(self, size: int, limit: float = 1e9) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.least, self.other, self.limit = 1e-5, 2e-3, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        wide = x.float().clamp(-self.limit, self.limit)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.least) * self.weight).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_norms_are_recognized_by_their_results(dtype: torch.dtype) -> None:
    """[1, T, D], with weights of 32 numbers."""
    given = torch.zeros(1, 3, 32, dtype=dtype)
    norms = modeling_llama.LlamaRMSNorm(32), modeling_gemma2.Gemma2RMSNorm(32), WideNorm(32), nn.RMSNorm(32, 1e-6)
    for module in norms:
        found = find_norm(module.to(dtype), given, placement(dtype))
        assert found is not None, module
        weight = torch.randn(32).to(dtype)
        module.weight.copy_(weight)
        found.tensors()["weight"].tensor.copy_(weight)
        found.finish_loading()
        x = torch.randn(40, 32).to(dtype)
        assert (found(x) != module(x)).float().mean() < 0.01 or dtype == torch.float32
        torch.testing.assert_close(found(x), module(x))
    for other in (nn.LayerNorm(32), nn.LayerNorm(32, bias=False), WideNorm(32, limit=5.0), nn.Linear(32, 32)):
        assert find_norm(other.to(dtype), given, placement(dtype)) is None


class UpFirst(nn.Module):
    """An MLP with gates last. With a limit, it differs for large values."""

    def __init__(self, limit: float = 1e9) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        return self.three(self.one(x) * functional.gelu(self.two(x).clamp(max=self.limit), approximate="tanh"))


@torch.inference_mode()
def test_gated_mlps_are_recognized_by_their_results() -> None:
    names = ["gate_proj", "up_proj"]
    llama = modeling_llama.LlamaMLP(LlamaConfig(**SMALL))
    assert find_gated(llama, names, "down_proj") == (names, "silu")
    assert find_gated(llama, names[::-1], "down_proj") == (names, "silu")
    gemma = modeling_gemma2.Gemma2MLP(Gemma2Config(**SMALL))
    assert find_gated(gemma, names, "down_proj") == (names, "gelu_tanh")
    phi = modeling_phi3.Phi3MLP(Phi3Config(**SMALL))
    assert find_gated(phi, ["gate_up_proj"], "down_proj") == (["gate_up_proj"], "silu")
    assert find_gated(UpFirst(), ["one", "two"], "three") == (["two", "one"], "gelu_tanh")
    assert find_gated(UpFirst(limit=7.0), ["one", "two"], "three") is None
    llama.act_fn = nn.Tanh()
    assert find_gated(llama, names, "down_proj") is None


def build(config: PreTrainedConfig) -> tuple[TransformersModel, list[str]]:
    """Return the model, and the classes of its modules."""
    module = build_module(config, Task.GENERATE, options(max_positions=64))
    model = TransformersModel(module, Task.GENERATE, options(max_positions=64))
    return model, [type(each).__name__ for each in module.modules()]


def test_layers_with_one_input_are_fused_and_weights_are_stored_once() -> None:
    model, kinds = build(LlamaConfig(**SMALL))
    assert not {"Linear", "LlamaRMSNorm", "LlamaMLP"} & {*kinds}
    parts = [[*linear.sizes] for _, linear in model.linears()]
    block = [["gate_proj", "up_proj"], ["down_proj"], ["q_proj", "k_proj", "v_proj"], ["o_proj"]]
    assert sorted(parts) == sorted(block * 3)
    held = {target.tensor.untyped_storage().data_ptr(): target.tensor for target in model.weights().values()}
    assert len(held) == 3 * (4 + 2) + 3
    assert sum(each.untyped_storage().nbytes() for each in held.values()) == sum(
        target.tensor.nbytes for target in model.weights().values()
    )


def test_layers_with_and_without_bias_are_not_fused_and_tied_head_has_no_weight() -> None:
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
            found = Stepper(model).run(ids.tolist(), [9])
            torch.testing.assert_close(found, reference(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


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
