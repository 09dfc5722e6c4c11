"""Quantized checkpoints on a GPU: the logits of the weights that they stand for, with few rows and with many.

Limits of errors are wide: in bf16 the logits of a random model differ by up to 3 % between kernels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioengine import models
from aioengine.kernels import code_linear
from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.codes import Codes, pack_nibbles
from aioengine.model_files.quantization import split_config
from aioengine.models._base import Model, ModelOptions
from aioengine.quantization.plain import plain
from aioengine.quantization.stored import formats
from aioengine.runner import weights
from aioengine.runner.inputs import model_inputs
from tests.compute.quantized import METHODS, quantize_checkpoint
from tests.compute.runner_world import save_model
from tests.compute.stepping import make_batch
from tests.gpu.test_decoders import make_attention
from tests.gpu.test_model_runner import on_device

CUDA = torch.device("cuda")
FEW_ROWS = 64
"""With more rows, the inputs of fp8 products are rounded."""
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
SHAPES = [(4096, 4096), (6144, 4096), (4096, 14336), (1024, 1024)]


def loaded(folder: Path, tensors: dict[str, Tensor], quantization: object, *, batch_invariant: bool) -> Model:
    for old in folder.glob("*.safetensors"):
        old.unlink()
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    config, scheme = split_config(raw)
    options = ModelOptions(
        dtype=torch.bfloat16, device=CUDA, max_positions=256, format_of=plain, batch_invariant=batch_invariant
    )
    if scheme is not None:
        options = replace(options, format_of=formats(scheme))
    model = models.build(config, options)
    weights.load(model, folder, load_format="auto", seed=0, report=lambda done, total: None)
    return model


def logits(model: Model, num_tokens: int) -> Tensor:
    attention = make_attention(model, CUDA)
    attention.prepare(on_device(make_batch([(0, num_tokens)], [list(range(1, 13))], 16), CUDA))
    token_ids = torch.arange(num_tokens, device=CUDA) * 7 % 90 + 1
    inputs = model_inputs(model, token_ids, torch.arange(num_tokens, device=CUDA))
    return model.compute_logits(model.forward(inputs, attention)).float()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_logits_are_those_of_the_dequantized_checkpoint(name: str, batch_invariant: bool, tmp_path: Path) -> None:
    method = METHODS[name]
    save_model("qwen2", tmp_path, tie_word_embeddings=False, **SIZES)
    quantized, plain = quantize_checkpoint(load_file(tmp_path / "model.safetensors"), method)
    expected = loaded(tmp_path, plain, None, batch_invariant=batch_invariant)
    model = loaded(tmp_path, quantized, method.config, batch_invariant=batch_invariant)
    rounds_prompts = "fp8" in name or name in ("modelopt", "channels")  # a random model amplifies the errors
    for num_tokens in (1, 5, 64) if rounds_prompts and not batch_invariant else (1, 5, 64, 150):
        wanted = logits(expected, num_tokens)
        error = (logits(model, num_tokens) - wanted).norm() / wanted.norm()
        assert error < (0.25 if name == "w8a8" else 0.06), (num_tokens, error)
    if batch_invariant and name != "w8a8":
        assert torch.equal(logits(model, 150)[:5], logits(model, 5))


def random_codes(bits: int, shape: tuple[int, int], group: int) -> Codes:
    scales, offsets = torch.randn(2, shape[0], shape[1] // group, device=CUDA) * 0.01
    if bits == 8:
        return Codes(torch.randint(-128, 128, shape, dtype=torch.int8, device=CUDA), scales, offsets)
    return Codes(pack_nibbles(torch.randint(0, 16, shape, dtype=torch.uint8, device=CUDA)), scales, offsets, bits=4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 16), (8, 32), (8, 128)])
def test_products_of_codes_match_the_reference(bits: int, group: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    codes, bias = random_codes(bits, shape, group), torch.randn(shape[0], device=CUDA, dtype=torch.bfloat16)
    product = code_linear.prepare(codes, bias, torch.bfloat16)
    weight = codes.dequantized(torch.float32)
    for num_rows in (1, 3, 16, 33, 64, 65, 300):
        x = torch.randn(num_rows, shape[1], device=CUDA, dtype=torch.bfloat16)
        expected = x.float() @ weight.T + bias.float()
        result = product.matmul(x)
        error = (result.float() - expected).norm() / expected.norm()
        assert error < 5e-3, (num_rows, error)
        assert product.gated is not None
        torch.testing.assert_close(product.gated(x), activate_and_mul(result, "silu"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_products_of_bytes_match_the_reference(has_blocks: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    numbers = (torch.randn(4096, 4096, device=CUDA) * 20).to(dtype)
    scales = torch.rand(4096, 1, device=CUDA) * 0.01
    if has_blocks:
        scales = (torch.rand(32, 32, device=CUDA) * 0.01).repeat_interleave(128, 0)
    codes = Codes(numbers, scales)
    bias = torch.randn(4096, device=CUDA, dtype=torch.bfloat16)
    product, weight = code_linear.prepare(codes, bias, torch.bfloat16), codes.dequantized(torch.float32)
    assert product.gated is not None
    for num_rows in (1, 3, 8, 16, 33, 64, 65, 66, 67, 100, 129, 300):
        x = torch.randn(num_rows, 4096, device=CUDA, dtype=torch.bfloat16)
        expected = x.float() @ weight.T + bias.float()
        rounds = num_rows > FEW_ROWS and dtype != torch.int8
        for result, right in (
            (product.matmul(x), expected),
            (product.gated(x), activate_and_mul(expected.bfloat16(), "silu").float()),
        ):
            error = (result.float() - right).norm() / right.norm()
            assert error < (0.06 if rounds else 7e-3), (num_rows, error)
    plain = code_linear.prepare(codes, None, torch.bfloat16)
    assert plain.gated is not None
    torch.testing.assert_close(plain.gated(x[:1]), activate_and_mul(plain.matmul(x[:1]), "silu"))
