"""The interface of a weight format for linear layers. T tokens, I inputs, O outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from aioengine.kernels import code_linear
from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.codes import Codes
from aioengine.kernels.row_counts import Matmul
from aioengine.model_files.quantization import Axis, PackedTensor, Ranges

Tensors = dict[str, Tensor]
"""The tensors of a linear layer, by the last part of their names in the checkpoint, such as "weight" and "bias"."""


class PreparedLinear(NamedTuple):
    """A linear layer after loading.

    Attributes:
        matmul: [T, I] -> [T, O].
        restore: returns tensors in the form of ``LinearFormat.empty`` with the current values, to load some or all
            again.
        update: makes ``matmul`` read new values of the tensors of ``restore``, at the addresses that CUDA graphs
            contain. None: the layer must be prepared again.
        gated: for a gated layer, [T, I] -> silu(first half of the outputs) * (second half), [T, O / 2].
    """

    matmul: Matmul
    restore: Callable[[], Tensors]
    update: Callable[[Tensors], None] | None = None
    gated: Matmul | None = None


class LinearSpec(NamedTuple):
    """A linear layer, which may fuse several layers of the checkpoint, such as query, key and value.

    Attributes:
        in_features: I.
        sizes: the output sizes of the fused layers. O is the sum.
        dtype: of the activations.
        is_gated: the layer needs ``PreparedLinear.gated``.
        batch_invariant: on a GPU, the result for a row must not depend on the number of rows.
        order: [O] int64, the index in the loaded tensors of each output; None: the outputs are in order.
        first_input: the index in the checkpoint of the first input, if ranks divide the inputs.
        allows_order: the checkpoint may store the inputs in another order.
    """

    in_features: int
    sizes: tuple[int, ...]
    has_bias: bool
    dtype: torch.dtype
    device: torch.device
    is_gated: bool = False
    batch_invariant: bool = False
    order: Tensor | None = None
    first_input: int = 0
    allows_order: bool = True

    def empty_bias(self) -> Tensors:
        """Return the uninitialized bias [O] as the entry of its name; {} without a bias."""
        return {"bias": torch.empty(sum(self.sizes), dtype=self.dtype, device=self.device)} if self.has_bias else {}

    def prepared(
        self,
        matmul: Matmul,
        restore: Callable[[], Tensors],
        update: Callable[[Tensors], None] | None = None,
        gated: Matmul | None = None,
    ) -> PreparedLinear:
        """Return a layer. gated: fuses ``matmul`` with the activation of gates."""
        gated = gated or (lambda x: activate_and_mul(matmul(x), "silu"))
        return PreparedLinear(matmul, restore, update, gated if self.is_gated else None)


class RowWriter(NamedTuple):
    """Quantizes the rows of a weight [O, I] while they are loaded.

    Attributes:
        placeholder: has the shape, dtype and device of the weight, but no memory.
        write: ``write(first, values)`` quantizes values [R, I] into the rows from ``first`` on.
        scales: [O, G]. A scale is not finite if a value of its group is not, which is checked after loading.
        num_bytes: of the quantized weight.
        is_whole: ``write`` needs all rows at once.
        stored: the type in GGUF files whose bytes [R, X] ``write`` takes; "": it takes values.
    """

    placeholder: Tensor
    write: Callable[[int, Tensor], None]
    scales: Tensor
    num_bytes: int
    is_whole: bool = False
    stored: str = ""

    def transposed(self) -> RowWriter:
        """Return a writer of values [I, O]."""
        return self._replace(
            placeholder=self.placeholder.t(), write=lambda first, values: self.write(first, values.t()), is_whole=True
        )


class LinearFormat(Protocol):
    """The tensors of a linear layer, their preparation after loading, and the matmul. One object serves all layers.

    Attributes:
        reorders: ``prepare`` and ``restore`` apply ``LinearSpec.order``. Otherwise the layer reorders the
            first dimension of all tensors, their outputs.
    """

    reorders: bool

    def empty(self, layer: LinearSpec) -> Tensors:
        """Allocate the tensors to load into, uninitialized."""
        ...

    def part(self, name: str, axis: Axis, ranges: Ranges, shape: tuple[int, int]) -> tuple[int, Ranges, int] | None:
        """Return the part of the tensor ``name`` of a layer [O, I] that a rank loads; see ``PackedTensor.part``.

        Raises:
            ValueError: the layer cannot be divided.
        """
        plain = PackedTensor(dtype="", outputs=1, inputs=1 if name == "weight" else 0)
        return plain.part(axis, ranges, shape[1] if axis == "inputs" else shape[0])

    def split(self, layer: LinearSpec, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Split ``tensor`` [...], called ``name``, into a view for each fused layer of the checkpoint."""
        ...

    def writers(self, layer: LinearSpec, tensors: Tensors) -> Mapping[str, Sequence[RowWriter]]:
        """Return the tensors that are quantized while they are loaded, with a writer for each fused layer."""
        return {}

    def is_preset(self, name: str) -> bool:
        """Return whether ``empty`` sets the tensor ``name`` to valid values; see ``Target``."""
        return False

    def check_of(self, layer: LinearSpec, name: str) -> Callable[[Tensor], object] | None:
        """Return ``Target.check`` of the tensor ``name`` [...], which must be small, because it is read once more."""
        return None

    def prepare(self, layer: LinearSpec, tensors: Tensors) -> PreparedLinear:
        """Make the matmul from loaded tensors, and keep only the tensors that it reads."""
        ...


class CodesFormat(LinearFormat):
    """A ``LinearFormat`` that keeps weights as ``Codes``. It can also store a table of embeddings.

    ``split`` returns () for a tensor that is not in the checkpoint.
    """

    reorders: bool = False

    @abstractmethod
    def codes(self, layer: LinearSpec, tensors: Tensors) -> Codes:
        """Return the weight [O, I] from loaded tensors."""

    @abstractmethod
    def tensors(self, layer: LinearSpec, codes: Codes) -> Tensors:
        """Undo ``codes``, except for the tensors that are ``kept``."""

    def kept(self, tensors: Tensors) -> Tensors:
        """Return the loaded tensors that stay in memory, because ``tensors`` cannot restore them from codes."""
        return {}

    def prepare(self, layer: LinearSpec, tensors: Tensors) -> PreparedLinear:
        """See ``LinearFormat``."""
        bias = tensors.get("bias")
        others = {} if bias is None else {"bias": bias}
        matmul, restore, replace, gated = code_linear.prepare(
            self.codes(layer, tensors), bias, layer.dtype, batch_invariant=layer.batch_invariant
        )
        update = None if replace is None else lambda new: replace(self.codes(layer, new), new.get("bias"))
        return layer.prepared(matmul, lambda: self.tensors(layer, restore()) | others, update, gated)
