"""The interface of attention backends: the batch of a step, the layout of the KV pool, the protocols.

T packed tokens of the step, R rows, P pages of the longest page table, S page size, H query heads, K kv heads, E head
size, V value size, O output size, L layers, N pages of the pool, G groups of rows with shared pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from aioengine.kernels.arrays import Ints32
from aioengine.kernels.heads import Heads
from aioengine.kernels.kv_target import KVTarget, WriteKV
from aioengine.settings.page_groups import layer_groups


class BackendUnavailableError(ValueError):
    """A backend cannot be used on this machine. The message contains the reason and a remedy."""


class BidirectionalImage(NamedTuple):
    """The tokens of an image that are computed in this step (the others are in the prefix cache).

    Attributes:
        row: index of the row.
        first: index of the first of these tokens in the step. start: its position in the row.
        stop: position after the last token of the image.
    """

    row: int
    first: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The input of attention in one step. Rows are in the order of the plan, and the tokens of a row are adjacent.

    Attributes:
        slot_mapping: [T] int64, the KV slot of each token: page id * page size + offset.
        page_table: [R, P] int32, page ids of each row; entries beyond a row's pages are any valid page id.
        query_lengths: R host ints, number of tokens that a row computes in this step, at least 1.
        kv_lengths: R host ints, number of positions of a row with K and V, including this step's tokens.
        host_pages: ``page_table`` on the host, for backends that search for shared pages; None: no search.
        bidirectional_images: the images in this step, if ``AttentionShape.has_bidirectional_images``.
        parts: the batch of each page group, with its own ``slot_mapping`` and ``page_table``. In this page table,
            positions before the group's window are on the padding page. Empty: all layers share one page table.
    """

    slot_mapping: Tensor
    page_table: Tensor
    query_lengths: list[int]
    kv_lengths: list[int]
    host_pages: Ints32 | None = None
    bidirectional_images: Sequence[BidirectionalImage] = ()
    parts: Sequence[ForwardBatch] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The properties of a model that a backend needs.

    Attributes:
        scale: factor of the dot products of queries and keys.
        is_causal: tokens attend to no later position. If False, a token attends to all tokens of its row. Such a row is
            computed in one step without a KV cache.
        windows: for each layer, the number of positions that a token attends to, including its own. If not causal, the
            maximum distance in both directions. None: no limit. Empty: no limit in all layers.
        soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap) before the softmax; None: no cap.
        sinks: for each layer, the logits [H] of learned sinks. A sink is an additional softmax entry of a head, without
            a value. They are the model's own tensors, so graphs read the current weights. Empty: no sinks.
        kv_scales: for each layer, fp32 [2]: the factors of fp8 keys and values in the pool. They are the model's own
            tensors, too. Unused with a pool of another dtype. Empty: 1.
        value_size: V with latent attention (arXiv 2405.04434). The pool has one latent vector per position and no
            values: the values are the first V elements of the keys. None: separate values, as large as keys.
        expansions: for each layer the matrices [H, ``plain_size`` + O, V] of latent attention, the model's own tensors.
            They expand a latent vector [V] to a key (without its rotated elements) and a value for each head. The
            backend chooses whether it expands the latent vectors, or multiplies queries and results by the matrices
            (the absorbed form). Queries are [T, H, ``query_size``], results [T, H, O]. Empty: the model itself
            multiplies queries and results by the matrices, and the backend reads only latent vectors.
        plain_size: with ``expansions``, the number of elements of a key that are not rotated.
        has_bidirectional_images: tokens of an image attend to the whole image, other tokens are causal.
        dtype: of queries and results; None: the dtype of the pool.
        batch_invariant: on a GPU, the result of a token must not depend on its batch and chunk. Backends with a faster
            implementation that is not batch-invariant then use the slower one.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    is_causal: bool = True
    windows: tuple[int | None, ...] = ()
    soft_cap: float | None = None
    sinks: tuple[Tensor, ...] = ()
    kv_scales: tuple[Tensor, ...] = ()
    value_size: int | None = None
    expansions: tuple[Tensor, ...] = ()
    plain_size: int = 0
    has_bidirectional_images: bool = False
    dtype: torch.dtype | None = None
    batch_invariant: bool = True

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of layers with the same window, see ``layer_groups``. Each has its own backend."""
        if not self.is_causal or not self.windows:
            return (tuple(range(self.num_layers)),)
        return layer_groups(self.windows)[0]

    @property
    def page_windows(self) -> tuple[int | None, ...]:
        """The window of each page group; empty: all layers share one page table."""
        return layer_groups(self.windows)[1] if self.is_causal else ()

    def part(self, layers: tuple[int, ...]) -> AttentionShape:
        """Return the shape of a model with only these layers."""
        names = "windows", "sinks", "kv_scales", "expansions"
        by_layer = {name: values for name in names if (values := getattr(self, name))}
        parts = {name: tuple(values[layer] for layer in layers) for name, values in by_layer.items()}
        return replace(self, num_layers=len(layers), **parts)

    @property
    def common_window(self) -> int | None:
        """The window of all layers, which must be equal."""
        windows = set(self.windows or (None,))
        assert len(windows) == 1, "layers with different windows use separate backends"
        return windows.pop()

    @property
    def stored_value_size(self) -> int:
        """V: number of elements of a value in the pool."""
        return self.head_size if self.value_size is None else self.value_size

    @property
    def query_size(self) -> int:
        """Number of elements of a query head."""
        return self.plain_size + self.head_size - self.stored_value_size if self.expansions else self.head_size

    @property
    def output_size(self) -> int:
        """O: number of elements of the result per query head."""
        return self.expansions[0].shape[1] - self.plain_size if self.expansions else self.stored_value_size

    @property
    def num_input_heads(self) -> int:
        """Number of heads per token in the input of attention, with ``query_size`` elements each.

        The input has q, k and v. With latent attention it has q and k, because v is a part of k. With ``expansions`` it
        has only q, because the backend reads k from the pool.
        """
        return self.num_heads + (0 if self.expansions else self.num_sides * self.num_kv_heads)

    @property
    def num_sides(self) -> int:
        """Tensors per layer in the pool: 2 (keys and values), or 1 (only keys)."""
        return 2 if self.value_size is None else 1

    @property
    def num_kv_layers(self) -> int:
        """Number of layers with a KV cache."""
        return self.num_layers if self.is_causal else 0

    def scales(self, layer: int) -> Tensor | None:
        """Return the scales [2] of a layer's fp8 keys and values; None: 1."""
        return self.kv_scales[layer] if self.kv_scales else None

    def window(self, layer: int, longest: int) -> int | None:
        """Return the window of this layer in rows of up to ``longest`` positions; None: no limit."""
        window = self.windows[layer] if self.windows else None
        return None if window is None or window >= longest else window


def kv_pool_shape(
    shape: AttentionShape, *, num_pages: int, page_size: int, scale_bytes: int = 0
) -> tuple[int, int, int, int, int, int]:
    """Return the shape of the pool: [L, 2, N, K, S, E], with keys at index 0 and values at index 1 of the second axis.
    L is ``num_kv_layers``. With latent attention it is [L, 1, N, K, S, E], because values are a part of the keys.

    The pool must be initialized with zeros: unwritten slots are multiplied by zero, so they must be finite.

    scale_bytes: int8 numbers of a head are followed by a scale of this size (``kernels/kv_target.py``).
    """
    size = shape.head_size + scale_bytes
    return (shape.num_kv_layers, shape.num_sides, num_pages, shape.num_kv_heads, page_size, size)


def pools_by_layer(groups: Sequence[Sequence[int]], kv_pools: Sequence[Tensor]) -> list[Tensor]:
    """Return the pool [1 or 2, N, K, S, E] of each layer, from the pools [L, ...] of groups of layers."""
    by_layer = {
        layer: kv_layer
        for layers, kv_pool in zip(groups, kv_pools, strict=True)
        for layer, kv_layer in zip(layers, kv_pool, strict=False)  # empty for a model without KV cache
    }
    return [by_layer[layer] for layer in sorted(by_layer)]


def keys_and_values(kv_pool: Tensor | Sequence[Tensor], shape: AttentionShape) -> list[tuple[Tensor, Tensor]]:
    """Return views of the pool for each layer: keys [N, K, S, E], values [N, K, S, V]; V is ``stored_value_size``."""
    return [(layer[0], layer[-1][..., : shape.stored_value_size]) for layer in kv_pool]


def split_heads(heads: Tensor, shape: AttentionShape) -> Heads:
    """Split one tensor [T, ``num_input_heads``, ``query_size``] into q, k and v."""
    num_sides = 1 if shape.expansions else shape.num_sides
    num_kv_heads = (shape.num_input_heads - shape.num_heads) // num_sides
    q, k, *v = heads.split((shape.num_heads, *(num_kv_heads,) * num_sides), dim=1)
    return q, k, v[0] if v else k[..., : shape.stored_value_size]


class StepAttention(Protocol):
    """Attention of one prepared step. The model calls it for each layer; layers count from 0."""

    def target(self, layer: int) -> KVTarget | WriteKV:
        """Return the destination of k and v before ``attend``: memory for a fused kernel, or a function."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attend to the KV pool, which already contains k and v of the step's tokens.

        Args:
            q: [T, H, ``query_size``], rotated.
            k: [T, K, E], rotated; v: [T, K, E]. Some backends read them instead of the pool. With latent attention,
                v [T, K, V] is a part of k; with ``expansions``, k and v are not read.

        Returns:
            [T, H * ``output_size``].
        """
        ...


class AttentionBackend(StepAttention, Protocol):
    """Attention over a paged KV pool.

    ``PLUGIN(shape, kv_pool)`` of its module creates it. ``kv_pool`` has the shape of ``kv_pool_shape``.
    """

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare a step for all layers. Called before the model's ``forward``."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Device memory read by captured decode steps of R rows; all tensors are int32.

    Attributes:
        slot_mapping: [R].
        starts: [R + 1], start of each row in ``page_ids``.
        last_lengths: [R], number of positions on the last page of each row. If rows share a page table, it has the
            pages of the last of them, so other rows may have less than one position there.
        page_ids: the concatenated page tables.
        max_pages: pages of the longest possible row.
        are_bounds: ``FixedDecode.plan`` gets upper bounds. The rows in these buffers may be shorter.
        max_row_tokens: adjacent rows of one request, up to this number, may share a page table.
        parts: the buffers of each page group; empty: all layers share one page table.
    """

    slot_mapping: Tensor
    starts: Tensor
    last_lengths: Tensor
    page_ids: Tensor
    max_pages: int
    are_bounds: bool = False
    max_row_tokens: int = 1
    parts: Sequence[DecodeBuffers] = ()


class FixedDecode(StepAttention, Protocol):
    """Attention of decode steps with a fixed number of rows. The caller fills the buffers before each step.

    Attributes:
        max_row_tokens: maximum number of rows that share a page table.
    """

    max_row_tokens: int

    def plan(self, starts: Ints32, last_lengths: Ints32, tables: Ints32 | None = None) -> None:
        """Plan a capture or a replay, from host copies of the buffers ``starts`` [R + 1] and ``last_lengths`` [R].

        tables: [X + 1] first row of each page table, and R; None: each row has its own.
        """
        ...


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A backend for CUDA graphs.

    A decode step is one graph that includes attention. A step with prompts is captured in pieces, and attention runs
    between these graphs.
    """

    def warm_up(self) -> None:
        """Compile all kernels that are not compiled yet."""
        ...

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> FixedDecode:
        """Return attention for decode steps of ``num_rows`` rows."""
        ...

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Callable[[int], None]:
        """Return a function of the layer: ``attend`` into ``out`` [T, H, O], with the same tensors in each layer.

        It is called between the CUDA graphs of the other operations.
        """
        ...


class SharedPages(NamedTuple):
    """The shared first pages of groups of rows. The rows of a group are adjacent; rows without a group come last.

    Attributes:
        row_ends: [G] int32 on the host, end of the rows of each group.
        num_pages: [G] int32 on the host, number of shared full pages of each group.
        page_ids: int32 on the host, the concatenated shared pages.
    """

    row_ends: Ints32
    num_pages: Ints32
    page_ids: Ints32


class CascadeLimits(NamedTuple):
    """Limits of cascade attention.

    A group has at least ``min_rows`` rows, and saves the reads of at least ``min_saved`` pages.
    """

    min_rows: int
    min_saved: int
    max_groups: int


class FixedCascade(FixedDecode, Protocol):
    """Attention of decode steps with groups of rows that share their first pages.

    ``DecodeBuffers`` have the pages that are not shared.
    """

    def plan_shared(self, pages: SharedPages) -> None:
        """Plan these groups, before their first replay. A capture needs no groups."""
        ...


@runtime_checkable
class CascadeAttention(CapturableAttention, Protocol):
    """A backend with cascade attention: shared pages are read once for all rows."""

    @property
    def cascade_limits(self) -> CascadeLimits: ...

    def fixed_cascade(self, num_rows: int, buffers: DecodeBuffers) -> FixedCascade: ...


@runtime_checkable
class FullGraphAttention(AttentionBackend, Protocol):
    """A backend whose steps can be captured in one CUDA graph together with all other operations."""

    device: torch.device
    has_kernel: bool
    """Whether steps use the kernel that can be captured. It depends on the device and the dtype."""

    def fixed_rows(self, starts: Tensor, max_length: int) -> StepAttention:
        """Return attention for rows of up to ``max_length`` tokens.

        ``starts`` [R + 1] int32 has the start of each row and the end of the last one. Each step reads it again. The
        results of tokens after the last row are undefined.
        """
        ...
