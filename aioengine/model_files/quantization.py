"""How a quantized checkpoint stores its linear layers, as its config.json says. Torch-free. O outputs, D inputs."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, NoReturn, cast

from msgspec import Struct

from aioengine.api.checks import shown
from aioengine.families._block_config import TensorSpec, TensorSpecs
from aioengine.families._fields import decode, not_implemented
from aioengine.families._tensors import plain_tensors
from aioengine.model_files.quantized_formats import working

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioengine.families._block_config import LinearShape

FP8_BLOCK: Final = 128
WORD: Final = 32
"""Bits of the integers that hold packed codes."""

UNUSED: Final = (".weight_shape", ".input_scale", ".k_scale", ".v_scale", ".output_scale")
"""Endings of the names of tensors that are not loaded. Inputs are quantized with a scale per token, which is at least
as exact as a stored scale.
"""

Layout = Literal["fp8", "int8", "packed", "awq", "gptq"]


class PackedTensor(NamedTuple):
    """A tensor of a quantized layer. A tensor without an axis of outputs exists once for each fused part.

    Attributes:
        dtype: in the file; "" for any floating-point dtype.
        outputs, inputs: outputs and inputs per entry of their axis; 0: the tensor has no such axis.
        is_inputs_first: the axis of the inputs comes first.
        per_element: parameters of the model per element.
    """

    dtype: str
    outputs: int = 0
    inputs: int = 0
    is_inputs_first: bool = False
    per_element: int = 0

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the shape for a layer [O, D]. A last incomplete group has an entry."""
        sizes = [-(-size // unit) for size, unit in ((outputs, self.outputs), (inputs, self.inputs)) if unit]
        return tuple(reversed(sizes) if self.is_inputs_first else sizes)

    def dim_of(self, axis: Literal["outputs", "inputs"]) -> int:
        """Return the dimension of an axis that the tensor has."""
        return int(min(self.outputs, self.inputs) > 0 and (axis == "inputs") != self.is_inputs_first)


class Scheme(Struct, frozen=True, kw_only=True):
    """How a layer is stored and computed.

    Attributes:
        layout: "fp8" and "int8" store one number per weight. The inputs of "int8" are quantized too, with a scale per
            token. The others store codes packed into 32-bit integers: "packed" as compressed-tensors does, "awq" and
            "gptq" as these libraries do.
        bits: of a code.
        group: inputs that share a scale; 0: all inputs of an output; -1: the layer has one scale.
        block: size of the square blocks that share a scale; 0: there are none.
        scale: the name of the scales.
        has_zeros: groups have zero points.
        has_order: each input belongs to the group that ``g_idx`` names.
        zero_shift: is added to stored zero points.
    """

    layout: Layout
    bits: int = 8
    group: int = 0
    block: int = 0
    scale: str = "weight_scale"
    has_zeros: bool = False
    has_order: bool = False
    zero_shift: int = 0

    def tensors(self, inputs: int) -> dict[str, PackedTensor]:
        """Return the tensors of a layer by the last part of their names, without a bias."""
        group, per_word = self.group or inputs, WORD // self.bits
        match self.layout:
            case "fp8" | "int8":
                scales = PackedTensor("") if self.group < 0 else PackedTensor("", 1, group)
                scales = PackedTensor("", self.block, self.block) if self.block else scales
                dtype = "F8_E4M3" if self.layout == "fp8" else "I8"
                return {"weight": PackedTensor(dtype, 1, 1, per_element=1), self.scale: scales}
            case "packed":
                tensors = {
                    "weight_packed": PackedTensor("I32", 1, per_word, per_element=per_word),
                    self.scale: PackedTensor("", 1, group),
                }
                if self.has_zeros:
                    tensors["weight_zero_point"] = PackedTensor("I32", per_word, group)
                return tensors | {"weight_g_idx": PackedTensor("I32", 0, 1)} if self.has_order else tensors
            case "awq":
                return {
                    "qweight": PackedTensor("I32", per_word, 1, True, per_word),
                    "qzeros": PackedTensor("I32", per_word, group, True),
                    "scales": PackedTensor("", 1, group, True),
                }
            case "gptq":
                return {
                    "qweight": PackedTensor("I32", 1, per_word, True, per_word),
                    "qzeros": PackedTensor("I32", per_word, group, True),
                    "scales": PackedTensor("", 1, group, True),
                    "g_idx": PackedTensor("I32", 0, 1),
                }

    def specs(self, linear: LinearShape, *, is_on_cpu: bool = False) -> TensorSpecs:
        """Describe the tensors of a linear layer. is_on_cpu: fp8 weights are converted when they are loaded."""
        specs = {
            name: TensorSpec(
                stored.shape(linear.outputs, linear.inputs),
                stored.dtype,
                stored.per_element,
                is_converted=is_on_cpu and stored.dtype == "F8_E4M3",
            )
            for name, stored in self.tensors(linear.inputs).items()
        }
        return specs | {"bias": TensorSpec((linear.outputs,))} if linear.has_bias else specs


class Quantization(Struct, frozen=True, kw_only=True):
    """The schemes of a checkpoint.

    Attributes:
        method: its name in config.json.
        groups: names of layers -> how they are stored. The first match counts.
        skipped: names of layers that are not quantized.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    skipped: tuple[str, ...] = ()

    def tensors_of(self, linear: LinearShape, *, is_on_cpu: bool = False) -> TensorSpecs:
        """Describe the tensors of a linear layer (``LinearTensors``). is_on_cpu: see ``Scheme.specs``."""
        scheme = self.scheme_of(linear.name)
        return plain_tensors(linear) if scheme is None else scheme.specs(linear, is_on_cpu=is_on_cpu)

    def scheme_of(self, name: str) -> Scheme | None:
        """Return how the layer ``name`` is stored; None: it is not quantized."""
        if any(_matches(pattern, name) for pattern in self.skipped):
            return None
        return next((scheme for names, scheme in self.groups if any(_matches(each, name) for each in names)), None)


ALL: Final = "Linear"
"""Stands for all linear layers."""
_HEADS: Final = ("lm_head", "score", "embed_out")
"""Layers that most methods do not quantize, and do not list in config.json."""


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern of config.json matches the name of a layer.

    A pattern is a part of the name between dots, a glob, or a regular expression that starts with "re:".
    """
    if pattern == ALL:
        return True
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


class _Weights(Struct, frozen=True):
    """The numbers of a tensor, in a config of compressed-tensors."""

    num_bits: int = 8
    type: str = "int"
    strategy: str = "tensor"
    symmetric: bool = True
    dynamic: bool | str = False
    group_size: int | None = None
    block_structure: list[int] | None = None
    actorder: str | bool | None = None


class _Group(Struct, frozen=True):
    targets: tuple[str, ...] = (ALL,)
    weights: _Weights | None = None
    input_activations: _Weights | None = None


class _Config(Struct, frozen=True):
    """The fields of all ``quantization_config``."""

    quant_method: str
    # fp8
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, int] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    # modelopt
    quant_algo: str = ""
    exclude_modules: list[str] | None = None
    # awq, gptq
    bits: int = 4
    group_size: int = 128
    zero_point: bool = True
    version: str = "gemm"
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    lm_head: bool = False
    dynamic: dict[str, object] | None = None
    # compressed-tensors
    config_groups: dict[str, _Group] = {}
    ignore: list[str] | None = None


def split_config(raw: Mapping[str, object]) -> tuple[Mapping[str, object], Quantization | None]:
    """Return config.json without its ``quantization_config``, and the quantization; None: there is none.

    The family of gpt-oss reads the quantization of its experts itself.

    Raises:
        ValueError: the format is not implemented; the message says what would work.
    """
    config = raw.get("quantization_config")
    if not isinstance(config, dict) or (quantization_method(raw) == "mxfp4" and raw.get("model_type") == "gpt_oss"):
        return raw, None
    rest = {name: value for name, value in raw.items() if name != "quantization_config"}
    return rest, read_quantization(cast("dict[str, object]", config))


def quantization_method(raw: Mapping[str, object]) -> object:
    """Return the name of the method in config.json; None: there is none."""
    config = raw.get("quantization_config")
    return cast("dict[str, object]", config).get("quant_method") if isinstance(config, dict) else None


def read_quantization(raw: Mapping[str, object]) -> Quantization:
    """Read a ``quantization_config``.

    Raises:
        ValueError: the format is not implemented; the message says what would work.
    """
    config = decode({name: value for name, value in raw.items() if value is not None}, _Config, "quantization_config")
    skipped = (*(config.modules_to_not_convert or ()), *(config.ignored_layers or ()))
    method = config.quant_method
    match method:
        case "fp8":
            return _single(method, _fp8(config), (*skipped, *_HEADS))
        case "fbgemm_fp8":
            return _single(method, Scheme(layout="fp8"), (*skipped, *_HEADS))
        case "modelopt":
            if config.quant_algo != "FP8":
                _refuse("quant_algo", config.quant_algo, "FP8")
            return _single(
                method, Scheme(layout="fp8", group=-1), (*(config.exclude_modules or ()), *(config.ignore or ()))
            )
        case "awq":
            if config.bits != 4 or config.version not in {"gemm", "GEMM"} or not config.zero_point:
                _refuse("version", config.version, "version gemm with bits 4 and zero_point true")
            scheme = Scheme(layout="awq", bits=4, group=max(config.group_size, 0), scale="scales", has_zeros=True)
            return _single(method, scheme, (*skipped, *_HEADS))
        case "gptq":
            return _gptq(config, skipped)
        case "compressed-tensors":
            groups = tuple((group.targets, _compressed(group)) for group in config.config_groups.values())
            _check_expressions([*(config.ignore or ()), *(name for names, _ in groups for name in names)])
            return Quantization(method=method, groups=groups, skipped=tuple(config.ignore or ()))
        case _:
            _refuse("quant_method", method, working("quant_method"))


def _check_expressions(patterns: Sequence[str]) -> None:
    """Raise ValueError for a pattern that is no valid regular expression."""
    for pattern in patterns:
        try:
            _matches(pattern, "")
        except re.error as error:
            raise ValueError(f"quantization_config has the pattern {shown(pattern)}, which is wrong: {error}") from None


def _refuse(field: str, value: object, implemented: str) -> NoReturn:
    not_implemented(f"quantization_config.{field}", value, implemented)


def _single(method: str, scheme: Scheme, skipped: tuple[str, ...]) -> Quantization:
    return Quantization(method=method, groups=(((ALL,), scheme),), skipped=skipped)


def _fp8(config: _Config) -> Scheme:
    if config.activation_scheme not in {"dynamic", "static"}:
        _refuse("activation_scheme", config.activation_scheme, "dynamic, static")
    if config.weight_block_size is None:
        return Scheme(layout="fp8", group=-1)
    if config.weight_block_size != (FP8_BLOCK, FP8_BLOCK):
        _refuse("weight_block_size", config.weight_block_size, f"[{FP8_BLOCK}, {FP8_BLOCK}]")
    return Scheme(layout="fp8", block=FP8_BLOCK, scale="weight_scale_inv")


def _gptq(config: _Config, skipped: tuple[str, ...]) -> Quantization:
    if config.bits not in {4, 8}:
        _refuse("bits", config.bits, "4, 8")
    if config.checkpoint_format not in {"gptq", "gptq_v2"}:
        _refuse("checkpoint_format", config.checkpoint_format, "gptq, gptq_v2")
    if config.dynamic:
        _refuse("dynamic", config.dynamic, "null")
    scheme = Scheme(
        layout="gptq",
        bits=config.bits,
        group=max(config.group_size, 0),
        scale="scales",
        has_zeros=True,
        has_order=config.desc_act,
        zero_shift=1 if config.checkpoint_format == "gptq" else 0,
    )
    return _single("gptq", scheme, skipped if config.lm_head else (*skipped, *_HEADS))


def _compressed(group: _Group) -> Scheme:
    """Return the scheme of a group of layers of compressed-tensors."""
    weights, inputs = group.weights or _Weights(), group.input_activations
    if weights.num_bits not in {4, 8}:
        _refuse("config_groups.weights.num_bits", weights.num_bits, "4, 8")
    if weights.strategy not in {"tensor", "channel", "group", "block"}:
        _refuse("config_groups.weights.strategy", weights.strategy, "tensor, channel, group, block")
    if inputs is not None and inputs.num_bits != 8:
        _refuse("config_groups.input_activations.num_bits", inputs.num_bits, "8")
    size = {"tensor": -1, "group": weights.group_size or 0}.get(weights.strategy, 0)
    if weights.type == "float":
        if weights.num_bits != 8 or weights.strategy == "group":
            _refuse("config_groups.weights", (weights.num_bits, weights.strategy), "8 bits without groups")
        block = FP8_BLOCK if weights.strategy == "block" else 0
        if block and weights.block_structure not in (None, [FP8_BLOCK, FP8_BLOCK]):
            _refuse("config_groups.weights.block_structure", weights.block_structure, f"[{FP8_BLOCK}, {FP8_BLOCK}]")
        return Scheme(layout="fp8", group=size, block=block)
    if inputs is not None:
        if weights.num_bits != 8 or weights.strategy not in {"tensor", "channel"} or not inputs.dynamic:
            _refuse("config_groups", weights.strategy, "int8 weights per tensor or channel with dynamic activations")
        return Scheme(layout="int8", group=size)
    if size < 0:
        _refuse("config_groups.weights.strategy", weights.strategy, "channel, group")
    return Scheme(
        layout="packed",
        bits=weights.num_bits,
        group=size,
        has_zeros=not weights.symmetric,
        has_order=weights.actorder in {"group", True},
    )
