"""Which layers are quantized while loading, and their sizes in memory. Torch-free."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, cast

from msgspec import Struct

from aioengine.families._block_config import LinearShape, TensorSpec, TensorSpecs
from aioengine.families._tensors import plain_tensors
from aioengine.model_files.quantized_formats import FORMATS
from aioengine.settings.config import ModelSettings

Method = Literal["fp8", "int8", "int4"]
METHODS: Final = tuple(FORMATS["quantization"])
"""The values of ``quantization`` for checkpoints that are not quantized."""
GROUP_SIZES: Final = (256, 128, 64, 32)
"""Inputs that share a scale in int4, and in torch's product with 4-bit codes on a CPU."""
CPU_OUTPUTS: Final = 16
"""That product needs a multiple of this number of outputs."""
_HEADS: Final = frozenset(("lm_head", "embed_out"))
_UNQUANTIZED: Final = frozenset(
    ("gate", "router", "shared_expert_gate", "score", "classifier", "pooler", "head", "kv_b_proj")
)
"""Parts of the names of routers, of the heads of classifiers, and of the matrix that latent attention multiplies by."""


class Precision(NamedTuple):
    """The bits and the groups of a weight [O, I] in memory.

    Attributes:
        kind: "int4" may also be codes of a table.
        group: inputs that share a scale; 0: all inputs of an output.
        has_offsets: groups have an offset, other than the middle of the codes.
    """

    kind: Method
    group: int = 0
    has_offsets: bool = False


class OnlineQuantization(Struct, frozen=True, kw_only=True):
    """Quantization while loading.

    Attributes:
        method: with int4, the head has int8, and so have layers whose inputs are no multiple of 32. With fp8, the head
            is not quantized.
        group_size: of the largest groups in int4.
    """

    method: Method
    group_size: int = 128

    @classmethod
    def of(cls, model: ModelSettings) -> OnlineQuantization | None:
        """Return the quantization of an engine; None: the weights are loaded as they are stored."""
        if not model.quantization:
            return None
        return cls(method=cast("Method", model.quantization), group_size=model.quantization_group_size)

    def part_of(self, name: str) -> Literal["layer", "head", "unquantized"]:
        """Return the kind of the linear layer ``name``."""
        parts = {*name.split(".")}
        if parts & _UNQUANTIZED or (parts & _HEADS and self.head is None):
            return "unquantized"
        return "head" if parts & _HEADS else "layer"

    @property
    def head(self) -> Precision | None:
        """How the head is quantized, which may also be the table of token embeddings; None: it is not."""
        return None if self.method == "fp8" else Precision("int8")

    def layer(self, inputs: int) -> Precision:
        """Return how a layer with this number of inputs is quantized."""
        sizes = (size for size in GROUP_SIZES if size <= self.group_size and inputs % size == 0)
        if self.method == "int4" and (group := next(sizes, 0)):
            return Precision("int4", group)
        return Precision("fp8" if self.method == "fp8" else "int8")

    def tensors_in_memory(self, linear: LinearShape, *, is_on_cpu: bool) -> TensorSpecs:
        """Describe the tensors of a linear layer in memory (``LinearTensors``)."""
        by_part = {"layer": self.layer(linear.inputs), "head": self.head, "unquantized": None}
        return code_tensors(linear, by_part[self.part_of(linear.name)], is_on_cpu=is_on_cpu)

    def table_in_memory(self, table: LinearShape, is_head: bool) -> TensorSpecs:
        """Describe the tensors of token embeddings in memory (``TableTensors``)."""
        return code_tensors(table, self.head if is_head else None)


def code_tensors(
    linear: LinearShape, precision: Precision | None, *, is_on_cpu: bool = False, has_table: bool = False
) -> TensorSpecs:
    """Describe the tensors of a quantized layer in memory.

    Args:
        precision: how it is quantized; None: it is not.
        is_on_cpu: fp8 is converted to the dtype, and torch's product with 4-bit codes needs its own scales.
        has_table: codes are not integers, so that product cannot be used.
    """
    specs, (outputs, inputs) = plain_tensors(linear), (linear.outputs, linear.inputs)
    if precision is None:
        return specs
    group = precision.group or inputs
    specs["scales"] = scales = TensorSpec((outputs, -(-inputs // group)), "F32")
    if precision.kind == "int4" and is_on_cpu and not has_table and outputs % CPU_OUTPUTS == 0:
        size = next((size for size in GROUP_SIZES if group % size == 0), group)
        specs["factors"] = TensorSpec((outputs, inputs // size, 2), "BF16")
    elif precision.has_offsets:
        specs["offsets"] = scales
    if precision.kind != "fp8" or not is_on_cpu:
        specs["weight"] = TensorSpec((outputs, inputs // 2 if precision.kind == "int4" else inputs), "U8")
    return specs
