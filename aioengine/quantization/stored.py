"""The linear layers of quantized checkpoints (``model_files.quantization``). O outputs, D inputs, P fused parts."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import torch

from aioengine.kernels import code_linear, int8_linear
from aioengine.kernels.codes import PACKED_COLUMNS, Codes, pack, unpack
from aioengine.quantization.plain import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from aioengine.model_files.quantization import Quantization, Scheme
    from aioengine.quantization._base import Axis, LinearFormat, LinearSpec, Prepared, Tensors

_DTYPES: Final = {"": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32}
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output i of eight is at this place in its word."""


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
        others = {} if bias is None else {"bias": bias}
        if self.scheme.layout == "int8":
            matmul = int8_linear.prepare(tensors["weight"], self._scales(layer, tensors), bias)
            return layer.prepared(matmul, lambda: tensors)
        if self.scheme.layout == "fp8":
            others = {name: tensor for name, tensor in tensors.items() if name != "weight"}
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
            return others | self._stored(layer, [part.restore() for part in parts])

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
        match self.scheme.layout:
            case "awq":
                codes = unpack(tensors["qweight"], bits, 1, _AWQ_ORDER).t()
                zeros = unpack(tensors["qzeros"], bits, 1, _AWQ_ORDER).t()
                scales = scales.t()
            case "gptq":
                codes = unpack(tensors["qweight"], bits, 0).t()
                zeros = unpack(tensors["qzeros"], bits, 1).t() + self.scheme.zero_shift
                scales = scales.t()
            case _:
                codes = unpack(tensors["weight_packed"], bits, 1)
                zeros = torch.full_like(scales, 1 << bits - 1)
                if self.scheme.has_zeros:
                    zeros = unpack(tensors["weight_zero_point"], bits, 0)
        if layer.in_features % scales.shape[1] or (bits == 4 and layer.in_features % PACKED_COLUMNS):
            inputs, num_groups = layer.in_features, scales.shape[1]
            raise ValueError(f"{inputs} inputs cannot have {num_groups} equal groups of codes with {bits} bits")
        codes, zeros = codes[:, : layer.in_features], zeros[:outputs].to(torch.int16)
        if not self.scheme.has_order:
            return [Codes.of(codes, scales, zeros, bits)]
        groups = tensors["g_idx" if self.scheme.layout == "gptq" else "weight_g_idx"]
        orders = groups.argsort(dim=1, stable=True)
        size = layer.in_features // scales.shape[1]
        if not (groups.gather(1, orders) == torch.arange(layer.in_features, device=groups.device) // size).all():
            raise ValueError(f"the groups of its inputs (g_idx) do not have {size} inputs each")
        if (orders == orders[0]).all():
            return [Codes.of(codes[:, orders[0]], scales, zeros, bits, orders[0])]
        parts = zip(*(tensor.split(layer.sizes) for tensor in (codes, scales, zeros)), orders, strict=True)
        return [Codes.of(code[:, order], scale, zero, bits, order) for code, scale, zero, order in parts]

    def _stored(self, layer: LinearSpec, parts: Sequence[Codes]) -> Tensors:
        """Undo ``_codes``."""
        if self.scheme.layout == "fp8":
            return {"weight": parts[0].packed}
        bits, layout = self.scheme.bits, self.scheme.layout
        codes = torch.cat([part.in_input_order(part.unpacked()) for part in parts])
        scales, zeros = (
            torch.cat([part.scales for part in parts]),
            torch.cat([part.zeros for part in parts if part.zeros is not None]),
        )
        tensors = {self.scheme.scale: scales if layout == "packed" else scales.t()}
        groups = torch.arange(layer.in_features, dtype=torch.int32, device=codes.device) // parts[0].group
        indices = torch.stack([part.in_input_order(groups[None])[0] for part in parts]).expand(len(layer.sizes), -1)
        if layout == "awq":
            tensors["qweight"] = pack(codes.t(), bits, 1, _AWQ_ORDER)
            tensors["qzeros"] = pack(zeros.t(), bits, 1, _AWQ_ORDER)
        elif layout == "gptq":
            tensors["qweight"] = pack(codes.t(), bits, 0)
            tensors["qzeros"] = pack(zeros.t() - self.scheme.zero_shift, bits, 1)
            tensors["g_idx"] = indices
        else:
            tensors["weight_packed"] = pack(codes, bits, 1)
            if self.scheme.has_zeros:
                tensors["weight_zero_point"] = pack(zeros, bits, 0)
            if self.scheme.has_order:
                tensors["weight_g_idx"] = indices
        return {name: tensor.contiguous() for name, tensor in tensors.items()}


def formats(quantization: Quantization) -> Callable[[str], LinearFormat]:
    """Return the format of each linear layer of a quantized checkpoint, by name."""
    by_scheme = {None: PLAIN, **{scheme: StoredFormat(scheme) for _, scheme in quantization.groups}}
    return lambda name: by_scheme[quantization.scheme_of(name)]
