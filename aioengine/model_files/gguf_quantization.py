"""Which tensors of a GGUF file stay quantized in memory, and their sizes there. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from msgspec import Struct

from aioengine.families._block_config import LinearShape, TensorSpecs
from aioengine.model_files.checkpoint import read_headers
from aioengine.model_files.gguf_header import BLOCKS
from aioengine.model_files.online_quantization import CPU_OUTPUTS, Precision, code_tensors

KEPT: Final = {
    "Q4_0": Precision("int4", 32),
    "Q4_1": Precision("int4", 32, has_offsets=True),
    "Q4_K": Precision("int4", 32, has_offsets=True),
    "Q8_0": Precision("int8", 32),
    "Q5_K": Precision("int8", 32, has_offsets=True),
    "Q6_K": Precision("int8", 16),
}
"""Types of tensors that can stay quantized -> their precision in memory. On a CPU, only 4-bit types can."""
_WEIGHT: Final = ".weight"


class StoredTypes(Struct, frozen=True):
    """The types of matrices in a GGUF file.

    Attributes:
        kept: layer -> type of a weight that stays quantized. Other weights are widened.
        widened: quantized types of matrices that are widened, in the order of their names.
    """

    kept: dict[str, str]
    widened: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path, *, is_on_cpu: bool) -> StoredTypes:
        """Read the header of the file. Raises ValueError if it cannot be read."""
        allowed = [kind for kind, precision in KEPT.items() if precision.kind == "int4" or not is_on_cpu]
        kept: dict[str, str] = {}
        widened: set[str] = set()
        for entry in read_headers(path, ""):
            is_supported = not is_on_cpu or entry.shape[0] % CPU_OUTPUTS == 0
            if len(entry.shape) == 2 and entry.name.endswith(_WEIGHT):
                if entry.dtype in allowed and is_supported:
                    kept[entry.name.removesuffix(_WEIGHT)] = entry.dtype
                elif BLOCKS[entry.dtype][0] > 1:
                    widened.add(entry.dtype)
        return cls(kept, tuple(sorted(widened)))

    def tensors_in_memory(self, linear: LinearShape, *, is_on_cpu: bool) -> TensorSpecs:
        """Describe the tensors of a linear layer in memory (``LinearTensors``)."""
        kind = self.kept.get(linear.name, "")
        return code_tensors(linear, KEPT.get(kind), is_on_cpu=is_on_cpu)

    def table_in_memory(self, table: LinearShape, is_head: bool, *, is_on_cpu: bool) -> TensorSpecs:
        """Describe the tensors of token embeddings in memory (``TableTensors``)."""
        specs = self.tensors_in_memory(table, is_on_cpu=False)
        if not is_head or not is_on_cpu:
            return specs
        head = self.tensors_in_memory(table, is_on_cpu=True)
        return specs | {"head": head["weight"], "factors": head["factors"]} if "factors" in head else specs
