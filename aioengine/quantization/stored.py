"""The linear layers of quantized checkpoints (``model_files.quantization``). O outputs, I inputs, P fused parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Final

import msgspec
import torch
from torch import Tensor

from aioengine.kernels import code_linear, int8_linear
from aioengine.kernels.codes import FP8, Codes, pack, pack_nibbles, piece_of, unpack
from aioengine.model_files.quantization import BLOCK_SCALES, MAX_TEXT, TEXTS, WORD, Axis, Quantization, Ranges, Scheme
from aioengine.quantization._base import CodesFormat, LinearFormat, LinearSpec, PreparedLinear, Tensors
from aioengine.quantization.plain import PLAIN

_DTYPES: Final = {
    "": torch.float32,
    "F8_E4M3": FP8,
    "I8": torch.int8,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in its word of output i of eight."""
_WEIGHTS: Final = ("weight", "weight_packed", "qweight")
_ONES: Final = {4: 0x11111111, 8: 0x01010101}
"""Number of bits -> a word in which each code is 1."""
_SPREADS: Final[dict[str | int, float]] = {"nf4": 0.52, "fp4": 0.49, 4: 4.6, 8: 74.0, "fp8": 1.0}
"""Standard deviations of random codes (``load_format="dummy"``)."""
_FP4: Final = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
_TABLES: Final = {
    "fp4": (*_FP4, *(-number for number in _FP4)),
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
}
"""The numbers of bitsandbytes for 4-bit codes (``bitsandbytes.functional.get_4bit_type``)."""


class _QuantState(msgspec.Struct):
    """The JSON text ``quant_state`` in checkpoints of bitsandbytes."""

    blocksize: int
    nested_blocksize: int
    nested_offset: float


class StoredFormat(CodesFormat):
    """Layers of a quantized checkpoint, stored as ``scheme`` says."""

    reorders = True

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def empty(self, layer: LinearSpec) -> Tensors:
        tensors: Tensors = {}
        for name, stored in self.scheme.tensors(layer.in_features).items():
            shapes = [stored.shape(size, layer.in_features) for size in layer.sizes]
            shape = [len(shapes), *shapes[0]]
            if stored.outputs or stored.weights:
                shape, dim = [*shapes[0]], stored.output_dim
                shape[dim] = sum(part[dim] for part in shapes)
            tensors[name] = torch.empty(shape, dtype=_DTYPES[stored.dtype], device=layer.device)
            if self.is_preset(name):
                self._preset(name, tensors[name], layer)
        return tensors | layer.empty_bias()

    def is_preset(self, name: str) -> bool:
        return name not in (*_WEIGHTS, "bias")

    def part(self, name: str, axis: Axis, ranges: Ranges, shape: tuple[int, int]) -> tuple[int, Ranges, int] | None:
        return self.scheme.part(name, axis, ranges, shape)

    def _preset(self, name: str, tensor: Tensor, layer: LinearSpec) -> None:
        """Set a tensor [...] so that, with random codes, outputs have about the magnitude of the inputs."""
        scheme, in_features = self.scheme, layer.in_features
        scale = in_features**-0.5 / _SPREADS["fp8" if scheme.layout == "fp8" else scheme.table or scheme.bits]
        if name.endswith("g_idx"):
            first = layer.first_input
            tensor.copy_(torch.arange(first, first + in_features) // (scheme.group or in_features))
        elif name.endswith(TEXTS):
            state = _QuantState(blocksize=scheme.group, nested_blocksize=BLOCK_SCALES, nested_offset=scale)
            text = msgspec.json.encode(state).ljust(MAX_TEXT, b"\0")
            tensor.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        elif name == scheme.scale and not scheme.has_scale_codes:
            tensor.fill_(scale)
        elif name in ("qzeros", "weight_zero_point"):
            middle = (1 << scheme.bits - 1) - scheme.has_lower_zeros
            tensor.view(torch.uint8).fill_(middle if scheme.bits == 8 else middle * 17)
        else:  # the scales of scales: only their offset counts
            tensor.zero_()

    def split(self, layer: LinearSpec, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Views of each part. A tensor without an axis of outputs is [P, ...]."""
        if name == "bias":
            return tensor.split(layer.sizes)
        stored = self.scheme.tensors(layer.in_features)[name]
        if not stored.outputs and not stored.weights:
            return tensor.unbind()
        dim = stored.output_dim
        return tensor.split([stored.shape(size, layer.in_features)[dim] for size in layer.sizes], dim)

    def check_of(self, layer: LinearSpec, name: str) -> Callable[[Tensor], object] | None:
        """Check ``g_idx`` [I of all ranks], and texts [bytes] of scales that are stored as codes."""
        if name.endswith("g_idx"):
            return partial(self._check_groups, layer)
        return self._quant_state if name.endswith(TEXTS) and self.scheme.has_scale_codes else None

    def codes(self, layer: LinearSpec, tensors: Tensors) -> Codes:
        """Return the weight [O, I]. ``layer`` does not allow reordered inputs."""
        [codes] = self._codes(layer, tensors)
        return codes

    def tensors(self, layer: LinearSpec, codes: Codes) -> Tensors:
        return self._stored([codes], None)

    def kept(self, tensors: Tensors) -> Tensors:
        restored = [*_WEIGHTS, self.scheme.scale] if self.scheme.has_plain_scales else _WEIGHTS
        return {name: tensor for name, tensor in tensors.items() if name not in restored}

    def prepare(self, layer: LinearSpec, tensors: Tensors) -> PreparedLinear:
        others = self.kept(tensors)
        order = None if layer.order is None else layer.order.argsort()
        has_integers = layer.device.type != "cpu" or int8_linear.part_bits()
        parts = [
            int8_linear.prepare(codes, bias)
            if self.scheme.layout == "int8" and has_integers
            else code_linear.prepare(codes, bias, layer.dtype, batch_invariant=layer.batch_invariant)
            for codes, bias in self._parts(layer, tensors)
        ]

        def joined(x: Tensor) -> Tensor:
            """[T, I] -> [T, O]."""
            return torch.cat([part.matmul(x) for part in parts], 1)

        def restore() -> Tensors:
            return others | self._stored([part.restore() for part in parts], order)

        def update(new: Tensors) -> None:
            for part, (codes, bias) in zip(parts, self._parts(layer, new), strict=True):
                assert part.update is not None
                part.update(codes, bias)

        matmul, gated = (joined, None) if len(parts) > 1 else (parts[0].matmul, parts[0].gated)
        can_update = all(part.update is not None for part in parts)
        return layer.prepared(matmul, restore, update if can_update else None, gated)

    def _parts(self, layer: LinearSpec, tensors: Tensors) -> list[tuple[Codes, Tensor | None]]:
        """Return codes [O, I] and bias [O] of the layer, or of each part if these have different orders of inputs."""
        bias, codes = tensors.get("bias"), self._codes(layer, tensors)
        if bias is not None and layer.order is not None:
            bias = bias[layer.order]
        biases = [bias] if bias is None or len(codes) == 1 else bias.split(layer.sizes)
        return list(zip_longest(codes, biases))

    def _scales(self, layer: LinearSpec, tensors: Tensors) -> Tensor:
        """Return the scales [O, G]."""
        scheme = self.scheme
        scales = tensors[scheme.scale]
        if scheme.group < 0:
            return scales.repeat_interleave(torch.tensor(layer.sizes, device=scales.device)).unsqueeze(1)
        if scheme.block:
            parts = zip(self.split(layer, scheme.scale, scales), layer.sizes, strict=True)
            return torch.cat([part.repeat_interleave(scheme.block, 0)[:size] for part, size in parts])
        if scheme.has_scale_codes:
            return self._decoded_scales(layer, tensors)
        return scales.t() if scheme.layout in {"awq", "gptq"} else scales

    def _decoded_scales(self, layer: LinearSpec, tensors: Tensors) -> Tensor:
        """Return the scales [O, I / 64] of bitsandbytes, stored as codes. Raises ValueError, see ``_quant_state``."""
        scheme = self.scheme
        names = scheme.scale, "weight.nested_absmax", "weight.nested_quant_map"
        texts = tensors[f"weight.quant_state.bitsandbytes__{scheme.table}"]
        scales: list[Tensor] = []
        for codes, nested, table, text in zip(
            *(self.split(layer, name, tensors[name]) for name in names), texts.cpu(), strict=True
        ):
            wide = nested.repeat_interleave(BLOCK_SCALES)[: codes.numel()].view_as(codes)
            scales.append(table[codes.int()] * wide + self._quant_state(text).nested_offset)
        return torch.cat(scales)

    def _quant_state(self, text: Tensor) -> _QuantState:
        """Decode a text [bytes]. Raises ValueError if it is damaged, or describes other blocks."""
        try:
            state = msgspec.json.decode(bytes(text.flatten().tolist()).rstrip(b"\0"), type=_QuantState)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"a quant_state of bitsandbytes is damaged: {error}") from error
        if (state.blocksize, state.nested_blocksize) != (self.scheme.group, BLOCK_SCALES):
            sizes = f"{state.blocksize} and {state.nested_blocksize}"
            raise ValueError(f"bitsandbytes has blocks of {sizes}; allowed: {self.scheme.group} and {BLOCK_SCALES}")
        return state

    def _codes(self, layer: LinearSpec, tensors: Tensors) -> list[Codes]:
        """Return the codes of the layer, or of each part if the parts have different orders of inputs."""
        bits, scales = self.scheme.bits, self._scales(layer, tensors)
        table: Tensor | None = None
        zeros: Tensor | None = None
        match self.scheme.layout:
            case "awq":
                codes = unpack(tensors["qweight"], bits, 1, _AWQ_ORDER).t()
                zeros = unpack(tensors["qzeros"], bits, 1, _AWQ_ORDER).t()
            case "gptq":
                codes, words = unpack(tensors["qweight"], bits, 0).t(), tensors["qzeros"]
                if self.scheme.has_lower_zeros:  # the library subtracts from words: a code of 0 borrows from the next
                    words = words + _ONES[bits]
                zeros = unpack(words, bits, 1).t()
            case "packed":
                codes = unpack(tensors["weight_packed"], bits, 1)
                zeros = torch.full_like(scales, 1 << bits - 1)
                if self.scheme.has_zeros:
                    zeros = unpack(tensors["weight_zero_point"], bits, 0)
            case "bitsandbytes":
                codes = torch.stack((tensors["weight"] >> 4, tensors["weight"] & 15), -1).flatten(1)
                table = torch.tensor(_TABLES[self.scheme.table], device=codes.device)
            case _:
                codes = tensors["weight"]
        inputs, per_word = layer.in_features, WORD // bits
        if zeros is not None:
            if self.scheme.group > 0 and inputs % self.scheme.group:
                raise ValueError(f"{inputs} inputs with groups of {self.scheme.group} are not implemented")
            # zeros of several outputs share a word, so fused layers are joined at words; AWQ packs all outputs in words
            sizes = layer.sizes if len(layer.sizes) > 1 or self.scheme.layout == "awq" else ()
            if self.scheme.has_zeros and any(size % per_word for size in sizes):
                raise ValueError(f"{sizes} outputs are not implemented; multiples of {per_word} work")
            codes, zeros = codes[:, :inputs], zeros[: len(scales)].int()
            if bits == 8:
                codes, zeros = (codes ^ 128).view(torch.int8), zeros - 128
        if bits == 4 and not piece_of(inputs):
            raise ValueError(f"{inputs} inputs with 4 bits are not implemented; multiples of 32 work")
        offsets = (-zeros * scales).contiguous() if zeros is not None and zeros.any() else None
        whole = Codes(codes, scales, offsets, table=table)
        if layer.order is not None:
            whole = whole.with_outputs(layer.order)
        groups = tensors.get("g_idx", tensors.get("weight_g_idx"))
        orders = None if groups is None else self._orders(layer, groups)
        if orders is None or (orders == orders[0]).all():
            return [_packed(whole, bits, None if orders is None else orders[0])]
        return [_packed(part, bits, order) for part, order in zip(whole.split(layer.sizes), orders, strict=True)]

    def _orders(self, layer: LinearSpec, groups: Tensor) -> Tensor | None:
        """Return the order of the inputs of each part, [P, I]; None: all are in order.

        groups: the group of each input, [P, I]. Raises ValueError if they have other sizes than in the config, or if
        ``layer`` does not allow reordered inputs.
        """
        size = self.scheme.group or layer.in_features
        inputs = torch.arange(layer.in_features, device=groups.device)
        expected = inputs // size
        # some files without an order have zeros
        groups = torch.where(groups.any(1, keepdim=True), groups - layer.first_input // size, expected)
        orders = groups.argsort(dim=1, stable=True)
        if not (groups.gather(1, orders) == expected).all():
            raise ValueError(f"the groups of its inputs (g_idx) do not have {size} inputs each")
        if (orders == inputs).all():
            return None
        if not layer.allows_order:
            raise ValueError("its inputs are reordered (desc_act), which experts do not support")
        return orders

    def _check_groups(self, layer: LinearSpec, groups: Tensor) -> None:
        """Raise ValueError for a ``g_idx`` [I of all ranks], see ``_orders``."""
        for rank, own in enumerate(groups.flatten().split(layer.in_features)):  # ranks have equal numbers of inputs
            self._orders(layer._replace(first_input=rank * layer.in_features), own.unsqueeze(0))

    def _stored(self, parts: Sequence[Codes], order: Tensor | None) -> Tensors:
        """Return the weight, and scales that are not kept, from the codes of the parts.

        order: [O], the index in the codes of each stored output.
        """
        bits, layout = self.scheme.bits, self.scheme.layout
        numbers = [part.in_input_order(part.unpacked()) for part in parts]
        codes = torch.cat(numbers) if len(numbers) > 1 else numbers[0]
        if order is not None:
            codes = codes[order]
        if bits == 8 and layout in {"gptq", "packed"}:
            codes = codes.view(torch.uint8) ^ 128
        match layout:
            case "awq":
                tensors = {"qweight": pack(codes.t(), bits, 1, _AWQ_ORDER).contiguous()}
            case "gptq":
                tensors = {"qweight": pack(codes.t(), bits, 0).contiguous()}
            case "packed":
                tensors = {"weight_packed": pack(codes, bits, 1)}
            case "bitsandbytes":
                tensors = {"weight": codes[:, ::2] << 4 | codes[:, 1::2]}
            case _:
                tensors = {"weight": codes}
        if self.scheme.has_plain_scales:
            scales = torch.cat([part.scales for part in parts])
            scales = scales if order is None else scales[order]
            tensors[self.scheme.scale] = (scales.t() if layout in {"awq", "gptq"} else scales).contiguous()
        return tensors


def _packed(codes: Codes, bits: int, order: Tensor | None) -> Codes:
    """Reorder and pack codes whose ``packed`` is [O, I] with one byte per number. order: [I]."""
    numbers = codes.packed if order is None else codes.packed[:, order]
    packed = numbers.contiguous() if bits == 8 else pack_nibbles(numbers)
    return codes._replace(packed=packed, bits=bits, order=order)


def formats(quantization: Quantization) -> Callable[[str], LinearFormat]:
    """Return the format of each linear layer of a quantized checkpoint, by name."""
    by_scheme = {None: PLAIN, **{scheme: StoredFormat(scheme) for _, scheme in quantization.rules if scheme}}
    return lambda name: by_scheme[quantization.scheme_of(name)]
