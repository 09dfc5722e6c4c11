"""Quantized checkpoints for tests, written from the descriptions of their formats, without code of the package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aioengine.kernels import int8_linear

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP8 = torch.float8_e4m3fn


class Quantized(NamedTuple):
    """The tensors of a layer by the last part of their names, and the weight [O, D] that they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


class Method(NamedTuple):
    """``config``: the ``quantization_config``. ``quantize``: converts a weight [O, D]."""

    config: dict[str, Any]
    quantize: Callable[[Tensor], Quantized]


def assert_close(result: Tensor, expected: Tensor, bits: int) -> None:
    """Compare with results of the dequantized weights in fp32. bits: of the weights.

    On a CPU, products of 8 bits round activations to integers of 16 bits, or of 14 bits, whose rounding is 4 times as
    large. Products of 4 bits round activations, scales and offsets to bf16.
    """
    limit = {4: 5e-2, 8: 3e-4 if int8_linear.part_bits() == 8 else 12e-4}.get(bits, 1e-5)
    assert (result - expected).norm() < limit * expected.norm()


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [X, N * 32 / bits] -> [X, N] int32. order: the code at each place of a word; by default in order."""
    parts = codes.long().unflatten(1, (-1, 32 // bits))
    if order:
        parts = parts[:, :, list(order)]
    packed = (parts << torch.arange(0, 32, bits)).sum(2)
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)


class Groups(NamedTuple):
    """codes [O, D], scales and zeros [O, G]. groups: the group of each input [D]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def weight(self) -> Tensor:
        return (self.codes - self.zeros[:, self.groups]) * self.scales[:, self.groups]


def in_groups(weight: Tensor, bits: int, size: int, *, symmetric: bool = False, shuffle: bool = False) -> Groups:
    """Round a weight [O, D] to codes with a scale and a zero point per ``size`` inputs."""
    num_inputs = weight.shape[1]
    groups = torch.arange(num_inputs) // size
    if shuffle:
        groups = groups[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1))]
    most, num_groups = 2**bits - 1, num_inputs // size
    low = torch.stack([weight[:, groups == group].amin(1) for group in range(num_groups)], 1)
    high = torch.stack([weight[:, groups == group].amax(1) for group in range(num_groups)], 1)
    if symmetric:
        scales = torch.maximum(low.abs(), high.abs()) / (most // 2)
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        scales = (high.clamp_min(0) - low.clamp_max(0)) / most
        zeros = (-low.clamp_max(0) / scales).round().clamp(1, most)
    scales = scales.half().float()
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return Groups(codes.int(), scales, zeros.int(), groups)


def awq(weight: Tensor) -> Quantized:
    parts = in_groups(weight, 4, 32)
    tensors = {
        "qweight": words(parts.codes.T, 4, AWQ_ORDER),
        "qzeros": words(parts.zeros.T, 4, AWQ_ORDER),
        "scales": parts.scales.T.contiguous().half(),
    }
    return Quantized(tensors, parts.weight)


def gptq(weight: Tensor, *, bits: int, shuffle: bool, shift: int) -> Quantized:
    parts = in_groups(weight, bits, 32, shuffle=shuffle)
    tensors = {
        "qweight": words(parts.codes.T.T, bits).T.contiguous(),
        "qzeros": words(parts.zeros.T - shift, bits),
        "scales": parts.scales.T.contiguous().half(),
        "g_idx": parts.groups.int(),
    }
    return Quantized(tensors, parts.weight)


def packed(weight: Tensor, *, bits: int, symmetric: bool, shuffle: bool = False) -> Quantized:
    """Quantize to the format "pack-quantized" of compressed-tensors."""
    parts = in_groups(weight, bits, 32, symmetric=symmetric, shuffle=shuffle)
    tensors = {
        "weight_packed": words(parts.codes, bits),
        "weight_scale": parts.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(parts.zeros.T, bits).T.contiguous()
    if shuffle:
        tensors["weight_g_idx"] = parts.groups.int()
    return Quantized(tensors, parts._replace(scales=tensors["weight_scale"].float()).weight)


def fp8(weight: Tensor, scales: Tensor, name: str = "weight_scale") -> Quantized:
    """scales: broadcast to [O, D] after blocks of 128 x 128 are expanded."""
    wide = scales
    if name == "weight_scale_inv":
        wide = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
    values = (weight / wide).to(FP8)
    return Quantized({"weight": values, name: scales}, values.float() * wide)


def fp8_per_tensor(weight: Tensor, **others: Tensor) -> Quantized:
    quantized = fp8(weight, weight.abs().amax() / 448)
    return quantized._replace(tensors=quantized.tensors | others)


def fp8_per_channel(weight: Tensor) -> Quantized:
    return fp8(weight, weight.abs().amax(1, keepdim=True) / 448)


def fp8_in_blocks(weight: Tensor) -> Quantized:
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = weight[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            scales[row, column] = block.abs().amax() / 448
    return fp8(weight, scales, "weight_scale_inv")


def int8_per_channel(weight: Tensor) -> Quantized:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return Quantized({"weight": codes, "weight_scale": scales}, codes * scales)


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)


def bitsandbytes(weight: Tensor, kind: str, *, doubly: bool) -> Quantized:
    """Blocks of 64 weights in the order of memory. doubly: their scales are codes in blocks of 256."""
    table = torch.tensor(NF4 if kind == "nf4" else FP4) / (1 if kind == "nf4" else 12)
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1)
    tensors = {"weight.quant_map": table, "weight.absmax": scales}
    state: dict[str, object] = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    if doubly:
        map8 = torch.linspace(-1, 1, 256) ** 3
        offset = scales.mean().item()
        padded = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
        nested = padded.abs().amax(1)
        codes = ((padded / nested[:, None]).unsqueeze(-1) - map8).abs().argmin(-1)
        scales = (map8[codes] * nested[:, None]).flatten()[: len(scales)] + offset
        tensors |= {
            "weight.absmax": codes.flatten()[: len(scales)].byte(),
            "weight.nested_absmax": nested,
            "weight.nested_quant_map": map8,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    values = ((blocks / scales[:, None]).unsqueeze(-1) - table).abs().argmin(-1)
    high, low = values.flatten().view(-1, 2).unbind(1)
    tensors["weight"] = (high << 4 | low).byte().unsqueeze(1)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
    return Quantized(tensors, (table[values] * scales[:, None]).view_as(weight))


def compressed(weights: Mapping[str, object], inputs: Mapping[str, object] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["re:.*lm_head"]}


def _gptq_config(bits: int, **others: object) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, **others}


def _bitsandbytes_method(kind: str, *, doubly: bool) -> Method:
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": doubly}
    return Method({"quant_method": "bitsandbytes", **config}, lambda w: bitsandbytes(w, kind, doubly=doubly))


_IN_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
METHODS: dict[str, Method] = {
    "awq": Method({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "gptq": Method(_gptq_config(4, desc_act=False), lambda w: gptq(w, bits=4, shuffle=False, shift=1)),
    "gptq-order": Method(_gptq_config(4, desc_act=True), lambda w: gptq(w, bits=4, shuffle=True, shift=1)),
    "gptq-8": Method(_gptq_config(8, desc_act=True), lambda w: gptq(w, bits=8, shuffle=True, shift=1)),
    "gptq-v2": Method(_gptq_config(4, checkpoint_format="gptq_v2"), lambda w: gptq(w, bits=4, shuffle=False, shift=0)),
    "packed": Method(compressed(_IN_GROUPS), lambda w: packed(w, bits=4, symmetric=True)),
    "packed-zeros": Method(compressed(_IN_GROUPS | {"symmetric": False}), lambda w: packed(w, bits=4, symmetric=False)),
    "packed-order": Method(
        compressed(_IN_GROUPS | {"actorder": "group"}), lambda w: packed(w, bits=4, symmetric=True, shuffle=True)
    ),
    "packed-8": Method(compressed(_IN_GROUPS | {"num_bits": 8}), lambda w: packed(w, bits=8, symmetric=True)),
    "nf4": _bitsandbytes_method("nf4", doubly=False),
    "nf4-double": _bitsandbytes_method("nf4", doubly=True),
    "fp4-double": _bitsandbytes_method("fp4", doubly=True),
    "fp8": Method({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_per_tensor),
    "fp8-static": Method(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: fp8_per_tensor(w, input_scale=torch.tensor([0.05])),
    ),
    "fp8-blocks": Method(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, fp8_in_blocks
    ),
    "modelopt": Method(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        lambda w: fp8_per_tensor(w, input_scale=torch.tensor(0.05)),
    ),
    "fbgemm_fp8": Method({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_per_channel),
    "channels": Method(compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, _TOKENS), fp8_per_channel),
    "w8a8": Method(compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, _TOKENS), int8_per_channel),
}


def bits_of(name: str) -> int:
    """Return 4 for methods of 4-bit integers. Products of the others are as exact as in 32 bits, except "w8a8"."""
    return 4 if name.startswith(("awq", "gptq", "packed")) and not name.endswith("-8") else 32


def quantize_checkpoint(
    tensors: Mapping[str, Tensor], method: Method, layers: tuple[str, ...] = ("proj",), *, is_transposed: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Quantize the layers with parts of ``layers`` in their names.

    Return the checkpoint, and the plain one that it stands for. is_transposed: the plain one has weights [D, O].
    """
    quantized: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(".weight") or tensor.dim() < 2 or not any(part in name for part in layers):
            quantized[name] = plain[name] = tensor
            continue
        layer = method.quantize((tensor.T if is_transposed else tensor).float())
        prefix = name.removesuffix("weight")
        quantized |= {f"{prefix}{part}": value.contiguous() for part, value in layer.tensors.items()}
        plain[name] = layer.weight.T.contiguous() if is_transposed else layer.weight
    return quantized, plain


def rounded(weight: Tensor, method: str, group: int = 0) -> Tensor:
    """Quantize a weight [O, D] like ``quantization="fp8"``, "int8" or "int4", and dequantize it.

    group: inputs that share a scale; 0: all inputs of an output.
    """
    parts = weight.float().view(len(weight), -1, group or weight.shape[1])
    if method == "int4":
        largest = torch.where(parts.amax(2) > -parts.amin(2), parts.amax(2), parts.amin(2)).unsqueeze(2)
        tried = torch.stack([_four_bits(parts, (largest * factor / -8).bfloat16()) for factor in (1.0, 0.93, 0.87)])
        best = (tried - parts).square().sum(3, keepdim=True).argmin(0, keepdim=True)
        return tried.gather(0, best.expand(1, *parts.shape)).view(weight.shape)
    largest = parts.abs().amax(2, keepdim=True)
    if method == "int8":
        scale = (largest / 127).bfloat16().float()
        return ((parts / scale).nan_to_num().round().clamp(-127, 127) * scale).view(weight.shape)
    numbers = (parts / (largest / 448)).nan_to_num().to(torch.float8_e4m3fn)
    return (numbers.float() * (largest / 448)).view(weight.shape)


def _four_bits(weight: Tensor, scales: Tensor) -> Tensor:
    """Round to -8 to 7 times the scales."""
    return (weight / scales).nan_to_num().round().clamp(-8, 7) * scales
