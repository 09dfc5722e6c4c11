"""Embedding table, which may also be the output head.

Shape letters: T tokens, D hidden size, V vocabulary size, W rows of the table on a rank.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from aioengine.kernels import code_linear, linear
from aioengine.kernels.codes import Codes, copy_in_place
from aioengine.kernels.linear import PreparedMatmul
from aioengine.kernels.row_counts import Matmul
from aioengine.layers.layer import WHOLE, Layer, Placement, Slice, Target, Units, rank_ranges
from aioengine.layers.linear import unplaced_targets
from aioengine.quantization._base import CodesFormat, LinearSpec, Tensors


def token_embeddings(
    vocab_size: int, size: int, placement: Placement, *, is_head: bool
) -> EmbeddingTable | CodeTable | TableShard:
    """Return the table [V, D] of token embeddings. is_head: it is also the output head."""
    if placement.shard.size > 1:
        return TableShard(vocab_size, size, placement, is_head=is_head)
    table_format = placement.table_format(is_head)
    if table_format is None:
        return EmbeddingTable(placement.empty(vocab_size, size), placement)
    return CodeTable(vocab_size, size, placement, table_format)


class EmbeddingTable(Layer):
    """A table of embeddings: [T] ids -> [T, D]."""

    def __init__(self, weight: Tensor, placement: Placement) -> None:
        """Use the weight [V, D]."""
        self.weight = weight
        self._device = placement.device
        self._batch_invariant = placement.batch_invariant
        self._head: Matmul | None = None

    def own_weights(self) -> dict[str, Target]:
        return {"weight": Target(self.weight)}

    def weights(self, prefix: str = "") -> dict[str, Target]:
        if self.weight.device.type != self._device.type:  # freed
            self.weight = torch.empty_like(self.weight, device=self._device)
        return super().weights(prefix)

    def open_for_loading(self, prefix: str = "", modules: Collection[str] | None = None) -> None:
        """See ``Layer``. A head that reads a copy of the table is prepared again."""
        is_packed = linear.uses_onednn(self.weight.dtype, self.weight.device)
        if is_packed and (modules is None or prefix.removesuffix(".") in modules):
            self._head = None

    def free_weights(self) -> None:
        self.weight = self.weight.to("meta")
        self._head = None

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] int64 ids -> [T, D]."""
        return self.weight.index_select(0, input_ids)

    def as_head(self) -> Matmul:
        """Return the matmul [T, D] -> [T, V] with this weight, for models with tied embeddings.

        Call it again after new weights are loaded. On a CPU the matmul may read a packed copy, which is then replaced.
        """
        if self._head is None:
            self._head = linear.prepare(self.weight, None, batch_invariant=self._batch_invariant)
        return self._head


class CodeTable(Layer):
    """A quantized embedding table: [T] ids -> [T, D]."""

    def __init__(self, vocab_size: int, size: int, placement: Placement, table_format: CodesFormat) -> None:
        """A table [V, D]. Its tensors are allocated by ``weights``."""
        self._spec = LinearSpec(
            size, (vocab_size,), False, placement.dtype, placement.device, batch_invariant=placement.batch_invariant
        )
        self._format = table_format
        self._tensors: Tensors = {}  # while the table is open for loading
        self._codes: Codes | None = None
        self._head: PreparedMatmul[Codes] | None = None

    def weights(self, prefix: str = "") -> dict[str, Target]:
        if self._codes is None and not self._tensors:
            self._tensors = self._format.empty(self._spec)
        return super().weights(prefix)

    def own_weights(self) -> dict[str, Target]:
        if not self._tensors:
            return {}
        return {name: target for name, [target] in unplaced_targets(self._format, self._spec, self._tensors)}

    def finish_loading(self) -> None:
        if not self._tensors:
            return
        codes, self._tensors = self._format.codes(self._spec, self._tensors), {}
        if self._codes is None:
            self._codes = codes
        else:
            copy_in_place(self._codes, codes)

    def open_for_loading(self, prefix: str = "", modules: Collection[str] | None = None) -> None:
        if modules is not None and prefix.removesuffix(".") not in modules:
            return
        assert self._codes is not None, "finish_loading was not called"
        self._tensors = self._format.tensors(self._spec, self._codes)

    def free_weights(self) -> None:
        self._codes = self._head = None

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] int64 ids -> [T, D]."""
        assert self._codes is not None, "finish_loading was not called"
        return self._codes.with_outputs(input_ids).dequantized(self._spec.dtype)

    def as_head(self) -> Matmul:
        """Return the matmul [T, D] -> [T, V] with this table. Call it again after new weights are loaded."""
        assert self._codes is not None, "finish_loading was not called"
        spec = self._spec
        if self._head is not None and self._head.update is not None:
            self._head.update(self._codes, None)
        else:
            self._head = code_linear.prepare(
                self._codes, None, spec.dtype, batch_invariant=spec.batch_invariant, is_shared=True
            )
        return self._head.matmul


class TableShard(Layer):
    """The rows [W, D] of a table [V, D] that this rank has.

    As a head, it returns the logits of these tokens. ``DecoderModel.compute_logits`` gathers the logits of all ranks.
    """

    def __init__(self, vocab_size: int, size: int, placement: Placement, *, is_head: bool) -> None:
        self._group = placement.shard.group
        [(self._first, stop)] = rank_ranges([Units(vocab_size, may_be_uneven=True)], placement.shard)
        self._num_rows = stop - self._first
        self._source = Slice(0, ((self._first, stop),), vocab_size)
        self._rows = token_embeddings(self._num_rows, size, replace(placement, shard=WHOLE), is_head=is_head)
        self.parts = (("", self._rows),)

    def weights(self, prefix: str = "") -> dict[str, Target]:
        return {name: target._replace(source=self._source) for name, target in super().weights(prefix).items()}

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] int64 ids -> [T, D]. Each rank looks up the ids that it has."""
        rows = input_ids - self._first
        own = rows.clamp(0, self._num_rows - 1)
        embeddings = self._rows(own).masked_fill_((own != rows).unsqueeze(1), 0)
        return embeddings if self._group is None else self._group.all_reduce(embeddings)

    def as_head(self) -> Matmul:
        """Return the matmul [T, D] -> [T, W]; see ``EmbeddingTable.as_head``."""
        return self._rows.as_head()
