"""How a quantized checkpoint stores its linear layers, as its config.json says. Torch-free. O outputs, I inputs."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import combinations, groupby
from pathlib import Path
from typing import Final, Literal, NamedTuple, NoReturn, cast

from msgspec import Struct

from aioengine.families._block_config import LinearShape, TensorSpec, TensorSpecs
from aioengine.families._fields import decode, not_implemented
from aioengine.families._tensors import plain_tensors
from aioengine.model_files import folder_files
from aioengine.model_files.config_patterns import ConfigPatterns
from aioengine.model_files.online_quantization import Method, Precision, code_tensors
from aioengine.model_files.quantized_formats import FORMATS

FP8_BLOCK: Final = 128
BLOCK_SCALES: Final = 256
"""Scales of bitsandbytes that share a scale."""
WORD: Final = 32
"""Bits of the integers that hold packed codes."""
CODES_UNIT: Final = 32
"""4-bit codes are implemented for multiples of this number of inputs."""

TEXTS: Final = (".bitsandbytes__nf4", ".bitsandbytes__fp4")
"""Endings of the names of tensors that have the bytes of a JSON text. A file may have fewer than ``MAX_TEXT``."""
MAX_TEXT: Final = 512
MAX_PATTERNS: Final = 1000
"""Limits the time of matching. ModelOpt writes up to a few for each layer."""
UNUSED: Final = (
    ".weight_shape", ".input_scale", ".q_scale", ".k_scale", ".v_scale", ".output_scale", ".quant_map",
)  # fmt: skip
"""Endings of the names of tensors that are not loaded, except if a layer reads them. Inputs are quantized with a scale
per token, which is at least as exact as a stored scale.
"""

Layout = Literal["fp8", "int8", "packed", "awq", "gptq", "bitsandbytes"]
Axis = Literal["inputs", "outputs"]
"""The axis along which a layer is divided among ranks."""
Ranges = tuple[tuple[int, int], ...]
"""Ranges (start, stop) of an axis, ascending."""


class PackedTensor(NamedTuple):
    """A tensor of a quantized layer. A tensor without an axis of outputs exists once for each fused part.

    Attributes:
        dtype: in the file; "" for any floating-point dtype.
        outputs, inputs: outputs and inputs per entry of their axis; 0: the tensor has no such axis.
        is_inputs_first: the axis of the inputs comes first.
        per_element: parameters of the model per element.
        size: entries of a tensor whose size does not depend on the layer; 0: it does.
        weights: weights per entry of a tensor that has one axis for all weights; 0: it has not.
    """

    dtype: str
    outputs: int = 0
    inputs: int = 0
    is_inputs_first: bool = False
    per_element: int = 0
    size: int = 0
    weights: int = 0

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the shape for a layer [O, I]. A last incomplete group has an entry."""
        if self.size or self.weights:
            return (self.size or -(-outputs * inputs // self.weights),)
        sizes = [-(-size // unit) for size, unit in ((outputs, self.outputs), (inputs, self.inputs)) if unit]
        return tuple(reversed(sizes) if self.is_inputs_first else sizes)

    @property
    def output_dim(self) -> int:
        """The dimension of the outputs, of a tensor that has it."""
        return int(self.inputs > 0 and self.is_inputs_first)

    def part(self, axis: Axis, ranges: Ranges, total: int) -> tuple[int, Ranges, int] | None:
        """Return the entries for ``ranges`` of an axis of size ``total``: dimension, ranges and size of ``Slice``.

        None: the tensor has no entries for parts of the axis.

        Raises:
            ValueError: a range begins or ends within an entry.
        """
        unit = self.inputs if axis == "inputs" else self.outputs
        if not unit or 1 < unit >= total:
            return None
        if any(edge % unit and edge != total for pair in ranges for edge in pair):
            raise ValueError(f"ranks would divide {unit} {axis} that are stored together")
        dim = self.output_dim if axis == "outputs" else int(self.outputs > 0 and not self.is_inputs_first)
        return dim, tuple((start // unit, -(-stop // unit)) for start, stop in ranges), -(-total // unit)


class Scheme(Struct, frozen=True, kw_only=True):
    """How a layer is stored and computed.

    Attributes:
        layout: "fp8" and "int8" store one number per weight. The inputs of "int8" are quantized too, with a scale per
            token. The others store packed codes: "packed" as compressed-tensors does, "awq", "gptq" and "bitsandbytes"
            as these libraries do.
        bits: of a code.
        group: inputs that share a scale; 0: all inputs of an output; -1: the layer has one scale.
        block: size of the square blocks that share a scale; 0: there are none.
        scale: the name of the scales.
        has_zeros: groups have zero points.
        has_order: each input belongs to the group that ``g_idx`` names.
        has_lower_zeros: stored zero points are lower by 1.
        is_symmetric: all zero points are in the middle.
        table: the name of the numbers that codes stand for: "nf4" or "fp4"; "": codes are integers.
        has_scale_codes: scales are stored as codes of 8 bits.
    """

    layout: Layout
    bits: int = 8
    group: int = 0
    block: int = 0
    scale: str = "weight_scale"
    has_zeros: bool = False
    has_order: bool = False
    has_lower_zeros: bool = False
    is_symmetric: bool = False
    table: str = ""
    has_scale_codes: bool = False

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
            case "awq" | "gptq":
                units = (per_word, 1) if self.layout == "awq" else (1, per_word)
                tensors = {
                    "qweight": PackedTensor("I32", *units, True, per_word),
                    "qzeros": PackedTensor("I32", per_word, group, True),
                    "scales": PackedTensor("", 1, group, True),
                }
                return tensors | {"g_idx": PackedTensor("I32", 0, 1)} if self.layout == "gptq" else tensors
            case "bitsandbytes":
                tensors = {
                    "weight": PackedTensor("U8", 1, 2, per_element=2),
                    self.scale: PackedTensor("U8" if self.has_scale_codes else "", 1, group),
                    f"weight.quant_state.bitsandbytes__{self.table}": PackedTensor("U8", size=MAX_TEXT),
                }
                nested = {
                    "weight.nested_absmax": PackedTensor("", weights=BLOCK_SCALES * group),
                    "weight.nested_quant_map": PackedTensor("", size=256),
                }
                return tensors | nested if self.has_scale_codes else tensors

    def part(self, name: str, axis: Axis, ranges: Ranges, shape: tuple[int, int]) -> tuple[int, Ranges, int] | None:
        """Return the part of the tensor ``name`` of a layer [O, I] that a rank loads; see ``PackedTensor.part``.

        Raises:
            ValueError: the layer cannot be divided.
        """
        if axis == "inputs" and self.has_order and self.group:
            raise ValueError("ranks cannot divide inputs that are reordered (desc_act)")
        if self.has_scale_codes:
            raise ValueError("ranks cannot divide quantized scales (bnb_4bit_use_double_quant)")
        stored = self.tensors(shape[1]).get(name, PackedTensor("", 1))
        return stored.part(axis, ranges, shape[axis == "inputs"])

    @property
    def has_plain_scales(self) -> bool:
        """Whether the stored scales are the scales in memory, possibly transposed."""
        return self.group >= 0 and not self.block and not self.has_scale_codes

    def specs(self, linear: LinearShape) -> TensorSpecs:
        """Describe the tensors of a linear layer in the checkpoint."""
        specs = {
            name: TensorSpec(stored.shape(linear.outputs, linear.inputs), stored.dtype, stored.per_element)
            for name, stored in self.tensors(linear.inputs).items()
        }
        return specs | {"bias": TensorSpec((linear.outputs,))} if linear.has_bias else specs

    def specs_in_memory(self, linear: LinearShape, *, is_on_cpu: bool) -> TensorSpecs:
        """Describe the tensors of a linear layer in memory: codes, and loaded tensors that codes cannot restore."""
        kind: Method = "fp8" if self.layout == "fp8" else "int8" if self.bits == 8 else "int4"
        precision = Precision(kind, self.block or max(self.group, 0), self.has_zeros and not self.is_symmetric)
        specs = {
            name: spec._replace(dtype=spec.dtype or "F32")
            for name, spec in self.specs(linear).items()
            if not spec.per_element and not (name == self.scale and self.has_plain_scales)
        }
        if self.block and not is_on_cpu:  # torch's product takes the scales in another order
            specs["block_scales"] = specs[self.scale]
        if self.has_order:
            specs["order"] = TensorSpec((linear.inputs,), "I64")
        return specs | code_tensors(linear, precision, is_on_cpu=is_on_cpu, has_table=bool(self.table))


class Quantization(Struct, frozen=True, kw_only=True):
    """The schemes of a checkpoint.

    Attributes:
        method: its name in config.json.
        rules: pairs of a test of the layer's name and its scheme; None: not quantized. The first match applies.
        has_kv_scales: there may be scales of fp8 keys and values.
    """

    method: str
    rules: tuple[tuple[Callable[[str], bool], Scheme | None], ...]
    has_kv_scales: bool = False

    def tensors_of(self, linear: LinearShape) -> TensorSpecs:
        """Describe the tensors of a linear layer in the checkpoint (``LinearTensors``)."""
        scheme = self.scheme_of(linear.name)
        return plain_tensors(linear) if scheme is None else scheme.specs(linear)

    def tensors_in_memory(self, linear: LinearShape, *, is_on_cpu: bool) -> TensorSpecs:
        """Describe the tensors of a linear layer in memory (``LinearTensors``)."""
        scheme, plain = self.scheme_of(linear.name), plain_tensors(linear)
        specs = plain if scheme is None else scheme.specs_in_memory(linear, is_on_cpu=is_on_cpu)
        return specs | {"latent": plain["weight"]} if scheme and linear.name.endswith(".kv_b_proj") else specs

    def scheme_of(self, name: str) -> Scheme | None:
        """Return how the layer ``name`` is stored; None: it is not quantized.

        Raises ValueError if the patterns of config.json take too long.
        """
        return next((scheme for matches, scheme in self.rules if matches(name)), None)

    def per_element(self, tensor: str) -> int:
        """Return the parameters of the model per element of a checkpoint tensor."""
        layer, _, last = tensor.rpartition(".")
        if layer.endswith(".weight"):
            layer, last = layer.removesuffix(".weight"), f"weight.{last}"
        scheme = self.scheme_of(layer)
        stored = None if scheme is None else scheme.tensors(1).get(last)
        return 1 if stored is None else stored.per_element


ALL: Final = "Linear"
"""Stands for all linear layers."""
_HEADS: Final = ("lm_head", "score", "embed_out")
"""Layers that most methods do not quantize, and do not list in config.json."""
_EXPRESSION: Final = "re:"
"""Beginning of a regular expression, which must match the beginning of a name."""


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
    format: str | None = None


class _Sparsity(Struct, frozen=True):
    format: str = "dense"


class _Override(Struct, frozen=True):
    """An entry of ``dynamic``, in a config of GPTQ."""

    bits: int | None = None
    group_size: int | None = None
    desc_act: bool | None = None


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
    kv_cache_quant_algo: str | None = None
    # awq, gptq; format: compressed-tensors, too
    bits: int = 4
    group_size: int = 128
    sym: bool = False
    zero_point: bool = True
    version: str = "gemm"
    desc_act: bool = False
    format: str = ""
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False
    lm_head: bool = False
    dynamic: dict[str, _Override | None] | None = None
    # compressed-tensors
    config_groups: dict[str, _Group] = {}
    ignore: list[str] | None = None
    sparsity_config: _Sparsity = _Sparsity()
    transform_config: dict[str, object] = {}
    kv_cache_scheme: dict[str, object] | str | None = None
    # bitsandbytes
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: str = "uint8"
    llm_int8_skip_modules: list[str] | None = None


_Rules = list[tuple[str, "Scheme | None"]]


def read_config(folder: Path) -> dict[str, object] | None:
    """Return config.json; None if there is none. Older versions of ModelOpt write the quantization to another file.

    The ``speculators`` format has the config of a head's block as an object in it. Its fields are returned beside the
    others.
    """
    config = folder_files.read_json(folder / folder_files.CONFIG, dict[str, object])
    if config is not None and isinstance(config.get("transformer_layer_config"), dict):
        block = cast("dict[str, object]", config["transformer_layer_config"])
        config = {**block, **config, "model_type": block.get("model_type", "llama")}
    if config is None or config.get("quantization_config") is not None:
        return config
    older = folder_files.read_object(folder / "hf_quant_config.json").get("quantization")
    if not isinstance(older, dict):
        return config
    return config | {"quantization_config": {"quant_method": "modelopt", **cast("dict[str, object]", older)}}


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
        ValueError: the format is not implemented, or a pattern is invalid; the message says what would work.
    """
    config = decode({name: value for name, value in raw.items() if value is not None}, _Config, "quantization_config")
    rules = tuple(_matchers(_rules(config)))
    has_kv_scales = bool(config.kv_cache_quant_algo or config.kv_cache_scheme)
    return Quantization(method=config.quant_method, rules=rules, has_kv_scales=has_kv_scales)


def _matchers(rules: _Rules) -> Iterator[tuple[Callable[[str], bool], Scheme | None]]:
    """Return ``Quantization.rules``. A pattern is a part of a name between dots, a glob, ``ALL``, or an expression."""
    patterns, num_costly = ConfigPatterns("quantization_config"), 0
    for (is_costly, scheme), same in groupby(rules, lambda rule: (_is_costly(rule[0]), rule[1])):
        names = [pattern for pattern, _ in same]
        if not is_costly:
            yield (lambda name: True) if ALL in names else partial(_has_part, frozenset(names)), scheme
            continue
        num_costly += len(names)
        if num_costly > MAX_PATTERNS:
            raise ValueError(
                f"quantization_config has more than {MAX_PATTERNS} patterns of layers (globs and regular expressions); "
                "give fewer of them; any number of names is allowed"
            )
        for pattern in names:
            if pattern.startswith(_EXPRESSION):
                compiled = patterns.compiled("a list of layers", rf"\A(?:{pattern.removeprefix(_EXPRESSION)})")
                yield partial(patterns.matches, compiled), scheme
            else:
                yield partial(fnmatch.fnmatchcase, pat=pattern), scheme


def _is_costly(pattern: str) -> bool:
    return pattern.startswith(_EXPRESSION) or "*" in pattern


def _has_part(parts: frozenset[str], name: str) -> bool:
    """Return whether the name of a layer, or a part of it between dots, is in ``parts``."""
    words = name.split(".")
    ranges = combinations(range(len(words) + 1), 2)
    return any(".".join(words[start:stop]) in parts for start, stop in ranges)


def _rules(config: _Config) -> _Rules:
    """Return ``Quantization.rules`` with patterns as strings."""
    skipped = _skipped(config.modules_to_not_convert, config.ignored_layers, config.exclude_modules, config.ignore)
    match config.quant_method:
        case "fp8":
            return [*skipped, *_skipped(_HEADS), (ALL, _fp8(config))]
        case "fbgemm_fp8":
            return [*skipped, *_skipped(_HEADS), (ALL, Scheme(layout="fp8"))]
        case "modelopt":
            return [*skipped, (ALL, _modelopt(config))]
        case "awq":
            if (version := config.format or config.version).lower() != "gemm":
                _refuse("version", version, "gemm")
            if config.bits != 4:
                _refuse("bits", config.bits, "4")
            if not config.zero_point:
                _refuse("zero_point", config.zero_point, "true")
            group = _group_size("group_size", config.group_size)
            scheme = Scheme(layout="awq", bits=4, group=group, scale="scales", has_zeros=True)
            return [*skipped, *_skipped(_HEADS), (ALL, scheme)]
        case "gptq":
            return [*skipped, *([] if config.lm_head else _skipped(_HEADS)), *_gptq(config)]
        case "compressed-tensors":
            return skipped + _compressed_rules(config)
        case "bitsandbytes":
            return [*_skipped(config.llm_int8_skip_modules or _HEADS), (ALL, _bitsandbytes(config))]
        case "mxfp4":
            _refuse("quant_method", "mxfp4", "mxfp4 in models of type gpt_oss")
        case method:
            _refuse("quant_method", method, f"{', '.join(FORMATS['quant_method'])}, and models that are not quantized")


def _skipped(*patterns: Iterable[str] | None) -> _Rules:
    return [(pattern, None) for some in patterns for pattern in some or ()]


def _refuse(field: str, value: object, implemented: str) -> NoReturn:
    not_implemented(f"quantization_config.{field}", value, implemented)


def _group_size(field: str, size: int | None) -> int:
    """Return ``Scheme.group`` for the size in a config, where -1 means all inputs."""
    if size is None or (size < 1 and size != -1):
        _refuse(field, size, "at least 1, and -1 for one group per output")
    return max(size, 0)


def _fp8(config: _Config) -> Scheme:
    if config.activation_scheme not in {"dynamic", "static"}:
        _refuse("activation_scheme", config.activation_scheme, "dynamic, static")
    if config.weight_block_size is None:
        return Scheme(layout="fp8", group=-1)
    if config.weight_block_size != (FP8_BLOCK, FP8_BLOCK):
        _refuse("weight_block_size", config.weight_block_size, f"[{FP8_BLOCK}, {FP8_BLOCK}]")
    return Scheme(layout="fp8", block=FP8_BLOCK, scale="weight_scale_inv")


def _modelopt(config: _Config) -> Scheme | None:
    schemes = {
        "": None,  # only the KV cache is quantized
        "FP8": Scheme(layout="fp8", group=-1),
        "FP8_PER_CHANNEL_PER_TOKEN": Scheme(layout="fp8"),
        "FP8_PB_WO": Scheme(layout="fp8", block=FP8_BLOCK),
    }
    if config.quant_algo not in schemes:
        _refuse("quant_algo", config.quant_algo, ", ".join(filter(None, schemes)))
    return schemes[config.quant_algo]


def _gptq(config: _Config) -> _Rules:
    stored = "marlin" if config.is_marlin_format else config.format or config.checkpoint_format
    if stored not in {"gptq", "gptq_v2"}:
        _refuse("format", stored, "gptq, gptq_v2")
    rules: _Rules = []
    for pattern, entry in {**(config.dynamic or {}), ALL: None}.items():
        override = entry or _Override()
        bits = config.bits if override.bits is None else override.bits
        if bits not in {4, 8}:
            _refuse("bits", bits, "4, 8")
        group = config.group_size if override.group_size is None else override.group_size
        scheme = Scheme(
            layout="gptq",
            bits=bits,
            group=_group_size("group_size", group),
            scale="scales",
            has_zeros=True,
            has_order=config.desc_act if override.desc_act is None else override.desc_act,
            has_lower_zeros=stored == "gptq",
            is_symmetric=config.sym,
        )
        expression = pattern if pattern == ALL else _EXPRESSION + pattern.removeprefix("-:").removeprefix("+:")
        rules.append((expression, None if pattern.startswith("-:") else scheme))
    return rules


def _bitsandbytes(config: _Config) -> Scheme:
    if config.load_in_8bit:
        _refuse("load_in_8bit", True, "load_in_4bit, and models that are not quantized")
    if config.bnb_4bit_quant_type not in {"nf4", "fp4"}:
        _refuse("bnb_4bit_quant_type", config.bnb_4bit_quant_type, "nf4, fp4")
    if config.bnb_4bit_quant_storage != "uint8":
        _refuse("bnb_4bit_quant_storage", config.bnb_4bit_quant_storage, "uint8")
    return Scheme(
        layout="bitsandbytes",
        bits=4,
        group=64,
        scale="weight.absmax",
        table=config.bnb_4bit_quant_type,
        has_scale_codes=config.bnb_4bit_use_double_quant,
    )


def _compressed_rules(config: _Config) -> _Rules:
    """Return the rules for the targets of compressed-tensors: first full names, then expressions, then classes."""
    if config.sparsity_config.format != "dense":
        _refuse("sparsity_config.format", config.sparsity_config.format, "dense")
    if config.transform_config:
        _refuse("transform_config", config.transform_config, "null")
    groups = config.config_groups.values()
    for stored in (config.format, *(group.format for group in groups)):
        if stored and stored not in _FORMATS:
            _refuse("format", stored, ", ".join(_FORMATS))
    rules: _Rules = []
    for group in groups:
        for target in group.targets:
            if target != ALL and target.isidentifier() and target[0].isupper():
                _refuse("config_groups.targets", target, f"{ALL}, and names of linear layers")
            rules.append((target, _compressed(group, group.format or config.format)))
    return sorted(rules, key=lambda rule: (rule[0] == ALL, rule[0].startswith(_EXPRESSION)))


_FORMATS: Final = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def _compressed(group: _Group, stored: str) -> Scheme:
    """Return the scheme of a group of layers of compressed-tensors. stored: the format of its tensors."""
    weights, inputs = group.weights or _Weights(), group.input_activations
    if weights.type not in {"int", "float"}:
        _refuse("config_groups.weights.type", weights.type, "int, float")
    if weights.actorder not in {None, False, True, "group", "dynamic", "weight", "static"}:
        _refuse("config_groups.weights.actorder", weights.actorder, "null, group, weight")
    if weights.num_bits not in {4, 8}:
        _refuse("config_groups.weights.num_bits", weights.num_bits, "4, 8")
    if weights.strategy not in {"tensor", "channel", "group", "block"}:
        _refuse("config_groups.weights.strategy", weights.strategy, "tensor, channel, group, block")
    if inputs is not None and inputs.num_bits != 8:
        _refuse("config_groups.input_activations.num_bits", inputs.num_bits, "8")
    size = -1 if weights.strategy == "tensor" else 0
    if weights.strategy == "group":
        size = _group_size("config_groups.weights.group_size", weights.group_size)
    if weights.type == "float":
        if weights.num_bits != 8 or weights.strategy == "group":
            _refuse("config_groups.weights", (weights.num_bits, weights.strategy), "8 bits without groups")
        block = FP8_BLOCK if weights.strategy == "block" else 0
        if block and weights.block_structure not in (None, [FP8_BLOCK, FP8_BLOCK]):
            _refuse("config_groups.weights.block_structure", weights.block_structure, f"[{FP8_BLOCK}, {FP8_BLOCK}]")
        return Scheme(layout="fp8", group=size, block=block)
    if inputs is not None:
        if weights.num_bits != 8 or weights.strategy not in {"tensor", "channel"} or not inputs.dynamic:
            numbers = weights.num_bits, weights.strategy, "dynamic" if inputs.dynamic else "static"
            _refuse("config_groups", numbers, "8 bits per tensor or channel with dynamic activations")
        if not weights.symmetric:
            _refuse("config_groups.weights.symmetric", False, "true with input_activations")
        return Scheme(layout="int8", group=size)
    if stored in {"int-quantized", "naive-quantized"}:
        _refuse("format", stored, "pack-quantized, or int-quantized with input_activations")
    if weights.strategy not in {"channel", "group"}:
        _refuse("config_groups.weights.strategy", weights.strategy, "channel, group")
    return Scheme(
        layout="packed",
        bits=weights.num_bits,
        group=size,
        has_zeros=not weights.symmetric,
        has_order=weights.actorder in {"group", "dynamic", True},
    )
