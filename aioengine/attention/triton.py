"""Attention on a GPU with Triton kernels, for any head size and dtype, without a C++ compiler.

It is batch-invariant (see ``kernels/triton/attention.py``). FlashInfer is faster, but not batch-invariant.

Latent attention is batch-invariant if the shape requires it. Otherwise, if the shape has ``expansions``, the backend is
``AdaptiveLatentAttention``.

T packed tokens, R rows, H query heads, K kv heads, E head size, V value size, N pages of the pool, S page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
import torch
import triton
from torch import Tensor

from aioengine.attention._base import AttentionShape, DecodeBuffers, ForwardBatch
from aioengine.attention._gpu_rows import (
    AttentionLayers,
    PagedAttention,
    PagedStep,
    attention_layers,
    paged_rows,
    run_once,
    tiles_of,
    uploaded,
)
from aioengine.attention._latent import AdaptiveLatentAttention
from aioengine.kernels.triton import attention as kernels
from aioengine.kernels.triton.attention import (
    EVEN_SPLITS,
    MAX_SHORT_LENGTH,
    PagedRows,
    head_group,
    num_splits,
    split_size,
)

ENOUGH_PROGRAMS = 256
"""Number of programs that keeps a GPU busy. With fewer (row, kv head) pairs, more than two programs compute each."""
LONG_ROW_PROGRAMS = 8
"""Minimum programs per pair if rows may be long: one long row among short rows would finish much later than they do."""
MAX_ALONE = 2048
"""Positions of a row that one program computes if there are enough pairs."""
MANY_PROGRAMS = 1024
"""With this number of pairs or more, long rows have two programs, too."""
MAX_SPLITS_BYTES = 512 << 20
"""Limit of the results of splits before they are merged."""
GLUON_VERSION = "3.6."
"""The version of Triton whose Gluon ``prompt_attention`` uses. Gluon still changes."""


@cache
def prompt_kernels() -> ModuleType | None:
    """Return ``prompt_attention``; None: it does not support this GPU or this version of Triton."""
    triton_version: str = triton.__version__  # pyright: ignore[reportAttributeAccessIssue]
    if torch.cuda.get_device_capability()[0] != 9 or not triton_version.startswith(GLUON_VERSION):
        return None
    from aioengine.kernels.triton import prompt_attention

    return prompt_attention


def num_pairs(layers: AttentionLayers, num_rows: int) -> int:
    """Return the number of pairs of a row and a tile of its heads."""
    num_heads = layers.shape.num_heads
    return num_rows * -(-num_heads // head_group(num_heads, layers.pool[0]).heads)


def choose_num_programs(layers: AttentionLayers, num_rows: int, max_splits: int) -> int:
    """Return the number of programs for the splits of a decode row and kv head; 1: use ``attend``."""
    shape, pairs = layers.shape, num_pairs(layers, num_rows)
    num_bytes = 4 * num_rows * max_splits * shape.num_heads * (shape.output_size + 2)
    is_long = max_splits > EVEN_SPLITS.value and pairs < MANY_PROGRAMS
    wanted = max(-(-ENOUGH_PROGRAMS // pairs), LONG_ROW_PROGRAMS if is_long else 2)
    return 1 if num_bytes > MAX_SPLITS_BYTES else max(min(max_splits, wanted), 2)  # 2: ``warm_up`` compiles this


def choose_max_alone(layers: AttentionLayers, num_rows: int) -> int:
    """Return ``max_alone`` of ``attend_splits``."""
    is_alone = layers.shape.value_size is None and num_pairs(layers, num_rows) >= ENOUGH_PROGRAMS
    return MAX_ALONE if is_alone else 0


def max_splits_of(layers: AttentionLayers, length: int) -> int:
    """Return the number of splits of a decode row of ``length`` positions."""
    pool = layers.pool[0]
    return num_splits(length, split_size(pool, head_group(layers.shape.num_heads, pool).decode_tile))


@dataclass(frozen=True, slots=True)
class _TritonStep(PagedStep):
    """A prepared step.

    Attributes:
        tiles: [X, 2] int32, as in ``kernels.triton.attention.attend``, the longest first.
        num_long: number of tiles that may have more positions than ``MAX_SHORT_LENGTH``.
        num_done: as in ``attend_splits``.
        max_splits: number of splits of the longest row.
        num_programs: see ``choose_num_programs``; 1 if a row has several tokens. max_alone: as in ``attend_splits``.
    """

    tiles: Tensor
    num_long: int
    num_done: Tensor
    max_splits: int
    num_programs: int
    max_alone: int

    def attend(self, q: Tensor, layer: int, *, out: Tensor) -> None:
        """Attend with q [T, H, E] to the pool of a layer -> out [T, H, V]."""
        shape, pool, rules = self.layers.shape, self.layers.pool[layer], self.layers.rules[layer]
        if self.num_programs == 1:
            tiles, fast, scale = self.tiles, prompt_kernels(), shape.scale
            has_prompts = self.num_long < len(tiles) < len(q)  # otherwise each tile is long or has one token
            if has_prompts and fast is not None and fast.supports(q, pool, rules):
                tiles, short = tiles[: self.num_long], tiles[self.num_long :]
                fast.attend(q, pool, self.rows, short, scale=scale, out=out)
            if len(tiles):
                in_splits = shape.batch_invariant or shape.value_size is None
                kernels.attend(q, pool, self.rows, tiles, scale=scale, out=out, rules=rules, in_splits=in_splits)
        else:
            splits = {"max_splits": self.max_splits, "num_programs": self.num_programs, "max_alone": self.max_alone}
            kernels.attend_splits(q, pool, self.rows, self.num_done, **splits, scale=shape.scale, out=out, rules=rules)


class TritonAttention(PagedAttention):
    """Implements ``CapturableAttention``."""

    def prepare(self, batch: ForwardBatch) -> None:
        layers = self._layers
        kv_lengths = np.array(batch.kv_lengths, dtype=np.int32)
        query_lengths = np.array(batch.query_lengths, dtype=np.int32)
        rows, _ = paged_rows(batch, query_lengths, kv_lengths, layers.page_size)
        group = head_group(layers.shape.num_heads, layers.pool[0])
        tiles = tiles_of(query_lengths, group.tokens)
        lengths = tiles[:, 1] + (kv_lengths - query_lengths)[tiles[:, 0]] + group.tokens
        num_long = int((lengths > MAX_SHORT_LENGTH).sum())
        tiles = uploaded(tiles[np.argsort(-lengths, kind="stable")], layers.device)
        longest, is_decode = int(kv_lengths.max()), int(query_lengths.max()) == 1
        self._prepared = _step_of(
            layers, batch.slot_mapping, rows, tiles, num_long=num_long, longest=longest, is_decode=is_decode
        )

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> PagedAttention:
        """Return attention for decode steps of ``num_rows`` rows."""
        layers = self._layers
        numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=layers.device)
        tiles = torch.stack((numbers[:-1], torch.zeros_like(numbers[:-1])), dim=1)
        rows = PagedRows(numbers, buffers.starts, buffers.last_lengths, buffers.page_ids)
        longest = buffers.max_pages * layers.page_size
        return PagedAttention(
            layers, _step_of(layers, buffers.slot_mapping, rows, tiles, longest=longest, is_decode=True)
        )

    def warm_up(self) -> None:
        """Compile the kernels of steps without a CUDA graph: prefill chunks and decode rows."""
        for count, num_cached in ((1, 0), (2, 0), (2, MAX_SHORT_LENGTH)):
            run_once(self, self._layers, 1, count, num_cached)


def _step_of(
    layers: AttentionLayers,
    slots: Tensor,
    rows: PagedRows,
    tiles: Tensor,
    *,
    longest: int,
    is_decode: bool,
    num_long: int = 0,
) -> _TritonStep:
    """Return a step with KV slots [T] and tiles [X, 2]. longest: positions of the longest row."""
    num_rows, max_splits = len(rows.query_starts) - 1, max_splits_of(layers, longest)
    num_done = torch.zeros(num_rows * layers.shape.num_heads, dtype=torch.int32, device=layers.device)
    num_programs = choose_num_programs(layers, num_rows, max_splits) if is_decode else 1
    max_alone = choose_max_alone(layers, num_rows)
    return _TritonStep(layers, slots, rows, tiles, num_long, num_done, max_splits, num_programs, max_alone)


def build(shape: AttentionShape, kv_pool: Tensor) -> TritonAttention | AdaptiveLatentAttention:
    """Return the backend for this model. kv_pool: [L, 1 or 2, N, K, S, E]."""
    layers = attention_layers(shape, kv_pool)
    return AdaptiveLatentAttention(layers) if shape.expansions else TritonAttention(layers)


PLUGIN = build
