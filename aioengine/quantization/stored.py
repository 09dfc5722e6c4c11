"""The linear layers of quantized checkpoints (``model_files.quantization``). O outputs, D inputs, P fused parts."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import torch

from aioengine.kernels import code_linear, int8_linear
from aioengine.kernels.codes import Codes, pack, pack_nibbles, piece_of, unpack
from aioengine.quantization.plain import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from aioengine.model_files.quantization import Quantization, Scheme
    from aioengine.quantization._base import Axis, LinearFormat, LinearSpec, Prepared, Tensors

_DTYPES: Final = {"": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32}
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output i of eight is at this place in its word."""
_SMALL: Final = ("bias", "qzeros", "weight_zero_point", "g_idx", "weight_g_idx")
"""Tensors that are kept to restore them."""


class StoredFormat:
    """Implements ``LinearFormat`` for a scheme."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def empty(self, layer: LinearSpec) -> Tensors:
        tensors: Tensors = {}
        for name, stored in self.scheme.tensors(layer.in_features).items():
            shapes = [stored.shape(size, layer.in_features) for size in layer.sizes]
            shape = [len(shapes), *shapes[0]]
            if stored.outputs:
                shape, dim = [*shapes[0]], stored.dim_of("outputs")
                shape[dim] = sum(part[dim] for part in shapes)
            tensors[name] = torch.empty(shape, dtype=_DTYPES[stored.dtype], device=layer.device)
        return tensors | layer.empty_bias()

    def split(self, layer: LinearSpec, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Views of each part. A tensor without an axis of outputs is [P, ...]."""
        if name == "bias":
            return tensor.split(layer.sizes)
        stored = self.scheme.tensors(layer.in_features)[name]
        if not stored.outputs:
            return tensor.unbind()
        return tensor.split([-(-size // stored.outputs) for size in layer.sizes], stored.dim_of("outputs"))

    def dim_of(self, name: str, axis: Axis) -> tuple[int, int] | None:
        if name == "bias":
            return PLAIN.dim_of(name, axis)
        stored = self.scheme.tensors(1)[name]
        unit = stored.outputs if axis == "outputs" else stored.inputs
        return (stored.dim_of(axis), unit) if unit else None

    def prepare(self, layer: LinearSpec, tensors: Tensors) -> Prepared:
        bias = tensors.get("bias")
        others = {name: tensor for name, tensor in tensors.items() if name in _SMALL}
        if self.scheme.layout == "int8":
            matmul = int8_linear.prepare(tensors["weight"], self._scales(layer, tensors), bias)
            return layer.prepared(matmul, lambda: tensors)
        if self.scheme.layout == "fp8":
            others[self.scheme.scale] = tensors[self.scheme.scale]
            loaded = [Codes(tensors["weight"], self._scales(layer, tensors))]
        else:
            loaded = self._codes(layer, tensors)
        biases = [bias] if bias is None or len(loaded) == 1 else bias.split(layer.sizes)
        parts = [
            code_linear.prepare(codes, part_bias, layer.dtype, batch_invariant=layer.batch_invariant)
            for codes, part_bias in zip_longest(loaded, biases)
        ]

        def joined(x: Tensor) -> Tensor:
            """[T, D] -> [T, O]."""
            return torch.cat([part.matmul(x) for part in parts], 1)

        def restore() -> Tensors:
            return others | self._stored([part.restore() for part in parts])

        return layer.prepared(joined if len(parts) > 1 else parts[0].matmul, restore)

    def _scales(self, layer: LinearSpec, tensors: Tensors) -> Tensor:
        """Return the scale of each output, [O, 1], or of each of its blocks, [O, D / 128]."""
        scales = tensors[self.scheme.scale]
        if self.scheme.group < 0:
            return scales.repeat_interleave(torch.tensor(layer.sizes, device=scales.device)).unsqueeze(1)
        if not self.scheme.block:
            return scales
        parts = zip(self.split(layer, self.scheme.scale, scales), layer.sizes, strict=True)
        return torch.cat([part.repeat_interleave(self.scheme.block, 0)[:size] for part, size in parts])

    def _codes(self, layer: LinearSpec, tensors: Tensors) -> list[Codes]:
        """Return the codes of the layer, or of each part if the parts have different orders of inputs."""
        bits, outputs, scales = self.scheme.bits, sum(layer.sizes), tensors[self.scheme.scale]
        zeros = torch.full((), 1 << bits - 1, device=scales.device)
        match self.scheme.layout:
            case "awq":
                codes = unpack(tensors["qweight"], bits, 1, _AWQ_ORDER).t()
                zeros = unpack(tensors["qzeros"], bits, 1, _AWQ_ORDER).t()
                scales = scales.t()
            case "gptq":
                codes = unpack(tensors["qweight"], bits, 0).t()
                zeros = unpack(tensors["qzeros"], bits, 1).t().int() + self.scheme.zero_shift
                scales = scales.t()
            case _:
                codes = unpack(tensors["weight_packed"], bits, 1)
                if self.scheme.has_zeros:
                    zeros = unpack(tensors["weight_zero_point"], bits, 0)
        if layer.in_features % scales.shape[1] or (bits == 4 and not piece_of(layer.in_features)):
            inputs, num_groups = layer.in_features, scales.shape[1]
            raise ValueError(f"{inputs} inputs cannot have {num_groups} equal groups of codes with {bits} bits")
        codes = codes[:, : layer.in_features]
        zeros = zeros.int() if zeros.dim() == 0 else zeros[:outputs].int()
        if bits == 8:
            codes, zeros = (codes ^ 128).view(torch.int8), zeros - 128
        whole = Codes(codes, scales.contiguous(), (-zeros * scales).contiguous() if zeros.any() else None)
        if not self.scheme.has_order:
            return [_packed(whole, bits, None)]
        groups = tensors["g_idx" if self.scheme.layout == "gptq" else "weight_g_idx"]
        orders = groups.argsort(dim=1, stable=True)
        size = layer.in_features // scales.shape[1]
        if not (groups.gather(1, orders) == torch.arange(layer.in_features, device=groups.device) // size).all():
            raise ValueError(f"the groups of its inputs (g_idx) do not have {size} inputs each")
        if (orders == orders[0]).all():
            return [_packed(whole, bits, orders[0])]
        return [_packed(part, bits, order) for part, order in zip(whole.split(layer.sizes), orders, strict=True)]

    def _stored(self, parts: Sequence[Codes]) -> Tensors:
        """Undo ``_codes``, without the small tensors."""
        if self.scheme.layout == "fp8":
            return {"weight": parts[0].packed}
        bits, layout = self.scheme.bits, self.scheme.layout
        codes = torch.cat([part.in_input_order(part.unpacked()) for part in parts])
        if bits == 8:
            codes = codes.view(torch.uint8) ^ 128
        scales = torch.cat([part.scales for part in parts])
        tensors = {self.scheme.scale: scales if layout == "packed" else scales.t()}
        if layout == "awq":
            tensors["qweight"] = pack(codes.t(), bits, 1, _AWQ_ORDER)
        elif layout == "gptq":
            tensors["qweight"] = pack(codes.t(), bits, 0)
        else:
            tensors["weight_packed"] = pack(codes, bits, 1)
        return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _packed(codes: Codes, bits: int, order: Tensor | None) -> Codes:
    """Reorder and pack codes whose ``packed`` is [O, D] with one byte per number. order: [D]."""
    numbers = codes.packed if order is None else codes.packed[:, order]
    packed = numbers.contiguous() if bits == 8 else pack_nibbles(numbers)
    return codes._replace(packed=packed, bits=bits, order=order)


def formats(quantization: Quantization) -> Callable[[str], LinearFormat]:
    """Return the format of each linear layer of a quantized checkpoint, by name."""
    by_scheme = {None: PLAIN, **{scheme: StoredFormat(scheme) for _, scheme in quantization.groups}}
    return lambda name: by_scheme[quantization.scheme_of(name)]
