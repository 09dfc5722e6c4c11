"""Which tensors of a GGUF file stay quantized in memory, and their sizes there. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from aioengine.families._tensors import plain_tensors
from aioengine.model_files.checkpoint import read_headers
from aioengine.model_files.gguf_header import BLOCKS
from aioengine.model_files.online_quantization import Numbers, code_tensors
from aioengine.model_files.quantized_formats import FORMATS, WIDENED

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.families._block_config import LinearShape, TensorSpecs

KEPT: Final = {
    "Q4_0": Numbers("int4", 32),
    "Q4_1": Numbers("int4", 32),
    "Q4_K": Numbers("int4", 32),
    "Q8_0": Numbers("int8", 32),
    "Q5_K": Numbers("int8", 32),
    "Q6_K": Numbers("int8", 16),
}
"""Types of tensors that can stay quantized -> their numbers in memory."""
WITH_OFFSETS: Final = frozenset(("Q4_1", "Q4_K", "Q5_K"))
"""Types with an offset for each group."""
_CPU_OUTPUTS: Final = 16
"""torch's product with 4-bit codes on a CPU needs a multiple of this number of outputs."""
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
        device = "cpu" if is_on_cpu else "cuda"
        allowed = {row.layout for row in FORMATS["load_format"] if row.layout and row.kept(device) != WIDENED}
        kept: dict[str, str] = {}
        widened: set[str] = set()
        for entry in read_headers(path, ""):
            is_served = not is_on_cpu or entry.shape[0] % _CPU_OUTPUTS == 0
            if len(entry.shape) == 2 and entry.name.endswith(_WEIGHT):
                if entry.dtype in allowed and is_served:
                    kept[entry.name.removesuffix(_WEIGHT)] = entry.dtype
                elif BLOCKS[entry.dtype][0] > 1:
                    widened.add(entry.dtype)
        return cls(kept, tuple(sorted(widened)))

    def tensors_of(self, linear: LinearShape) -> TensorSpecs:
        """Describe the tensors of a linear layer in memory (``LinearTensors``)."""
        kind = self.kept.get(linear.name)
        if kind is None:
            return plain_tensors(linear)
        specs = code_tensors(linear, KEPT[kind])
        return specs | {"offsets": specs["scales"]} if kind in WITH_OFFSETS else specs

    def table_tensors(self, table: LinearShape, is_head: bool) -> TensorSpecs:
        """Describe the tensors of token embeddings in memory (``TableTensors``)."""
        return self.tensors_of(table)
