"""The interface of an attention backend: the batch of a step, the layout of the KV pool, the protocols.

Shape letters: T packed tokens of the step, R rows, P pages in the longest page table, S page size, H query heads,
K kv heads, E head size, L layers, N pages in the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from aioengine.page_groups import layer_groups

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    from aioengine.kernels.rotate_and_write import KVTarget
    from aioengine.kernels.rotate_heads import Heads

    Ints = npt.NDArray[np.int32]


class BackendUnavailableError(ValueError):
    """A backend cannot compute here; the message says why, and what would help."""


class WholeImage(NamedTuple):
    """Tokens of a row that are the rest of an image, all of which they attend to.

    Attributes:
        row: of R. first: index in T of the first of the tokens. start: its position. stop: that behind the last one.
    """

    row: int
    first: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The input of attention in one step; the tokens of a row are adjacent, rows in the order of the plan.

    Attributes:
        slot_mapping: [T] int64, where K and V of each token go: page id * page size + offset in the page.
        page_table: [R, P] int32, page ids of each row in order; entries beyond a row's pages are any valid page id.
        query_lengths: R host ints, tokens that a row computes in this step, at least 1.
        kv_lengths: R host ints, positions of the row that have K and V once this step has written its own.
        host_pages: ``page_table`` on the host, for backends that look for pages that rows share; None: they need not.
        whole_images: for ``AttentionShape.has_whole_images``.
        parts: where the groups of layers have page tables of their own, the batch of each: with another
            ``slot_mapping`` and ``page_table``. What a group does not see any more stands on the padding page there.
    """

    slot_mapping: Tensor
    page_table: Tensor
    query_lengths: list[int]
    kv_lengths: list[int]
    host_pages: Ints | None = None
    whole_images: Sequence[WholeImage] = ()
    parts: Sequence[ForwardBatch] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The facts about a model that a backend needs.

    Attributes:
        scale: multiplies the dot products of queries and keys.
        is_causal: a token attends to no later position. Otherwise it attends to all of its row, which is computed in
            one step and keeps no K and V.
        windows: for each layer, the number of positions that a token attends to, itself and those before it; where not
            causal, how far it attends to either side. None: no limit. Empty: so in all layers.
        soft_cap: a score s (scaled, before the softmax) becomes soft_cap * tanh(s / soft_cap); None: it stays.
        sinks: for each layer the logits [H] of learned sinks: each takes part in the softmax of its head and has no
            value. The tensors of the model itself, so that graphs read the weights of the moment. Empty: no sinks.
        value_size: of latent attention (arXiv 2405.04434), whose values are the first ``value_size`` numbers of the
            keys; None: values of their own, as large as keys.
        expansions: of latent attention whose form is the backend's choice: for each layer [H, N + O, V], what makes
            keys of N and values of O numbers for each head from a latent vector of V. The tensors of the model itself.
            Queries are [T, H, N + P] then, with P rotated numbers, and results [T, H, O]. Empty: the model multiplies
            queries and results with them, and attention is computed in the absorbed form.
        plain_size: with ``expansions``, N.
        has_whole_images: tokens of an image attend to all of it, though other tokens are causal.
        batch_invariant: on a GPU, the bits of a token must not depend on its batch and chunk. Backends that can do
            faster without that are then asked for the slower way.
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
    value_size: int | None = None
    expansions: tuple[Tensor, ...] = ()
    plain_size: int = 0
    has_whole_images: bool = False
    batch_invariant: bool = True

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each part of attention; those of a part have the same window (``layer_groups``)."""
        if not self.is_causal or not self.windows:
            return (tuple(range(self.num_layers)),)
        return layer_groups(self.windows)[0]

    @property
    def page_windows(self) -> tuple[int | None, ...]:
        """The window of each of ``groups`` where these have page tables of their own; empty: all have the same."""
        return layer_groups(self.windows)[1] if self.is_causal else ()

    def part(self, layers: tuple[int, ...]) -> AttentionShape:
        """The shape of these layers alone."""
        return replace(
            self,
            num_layers=len(layers),
            windows=tuple(self.windows[layer] for layer in layers) if self.windows else (),
            sinks=tuple(self.sinks[layer] for layer in layers) if self.sinks else (),
            expansions=tuple(self.expansions[layer] for layer in layers) if self.expansions else (),
        )

    @property
    def only_window(self) -> int | None:
        """The window of all layers, which have the same one."""
        window, *others = self.windows or (None,)
        assert all(other == window for other in others), "layers of other windows have a backend of their own"
        return window

    @property
    def kept_value_size(self) -> int:
        """Numbers of a value in the pool."""
        return self.head_size if self.value_size is None else self.value_size

    @property
    def query_size(self) -> int:
        """Numbers of a query head."""
        return self.plain_size + self.head_size - self.kept_value_size if self.expansions else self.head_size

    @property
    def output_size(self) -> int:
        """Numbers of what a query head gets."""
        return self.expansions[0].shape[1] - self.plain_size if self.expansions else self.kept_value_size

    @property
    def num_handed(self) -> int:
        """Heads of a token that attention gets, of ``query_size`` numbers each: q, k and v; with latent attention q and
        k, of which v is a part; with ``expansions`` q alone, for keys are read in the pool.
        """
        return self.num_heads + (0 if self.expansions else self.num_sides * self.num_kv_heads)

    @property
    def num_sides(self) -> int:
        """Tensors that the pool has of each layer: keys and values, or keys alone."""
        return 2 if self.value_size is None else 1

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep K and V for later steps."""
        return self.num_layers if self.is_causal else 0

    def window(self, layer: int, longest: int) -> int | None:
        """The window of this layer in rows of up to ``longest`` positions; None: no limit."""
        window = self.windows[layer] if self.windows else None
        return None if window is None or window >= longest else window


def kv_pool_shape(shape: AttentionShape, *, num_pages: int, page_size: int) -> tuple[int, int, int, int, int, int]:
    """The pool is one tensor [L, 2, N, K, S, E], keys at index 0 of the second axis and values at 1. L is
    ``num_kv_layers``. With latent attention it is [L, 1, N, K, S, E]: the values are a part of the keys.

    It must start as zeros: unwritten slots of a page are multiplied by zero and so have to be finite.
    """
    return (shape.num_kv_layers, shape.num_sides, num_pages, shape.num_kv_heads, page_size, shape.head_size)


def keys_and_values(kv_pool: Tensor | Sequence[Tensor], shape: AttentionShape) -> list[tuple[Tensor, Tensor]]:
    """Of each layer, views of the pool: keys [N, K, S, E] and values [N, K, S, V], where V is ``kept_value_size``."""
    return [(layer[0], layer[-1][..., : shape.kept_value_size]) for layer in kv_pool]


def handed_parts(heads: Tensor, shape: AttentionShape) -> Heads:
    """q, k and v as they stand in one tensor [T, ``num_handed``, ``query_size``]."""
    num_sides = 1 if shape.expansions else shape.num_sides
    num_kv_heads = (shape.num_handed - shape.num_heads) // num_sides
    q, k, *others = heads.split((shape.num_heads, *(num_kv_heads,) * num_sides), dim=1)
    return q, k, others[0] if others else k[..., : shape.kept_value_size]


WriteKV = Callable[["Tensor", "Tensor"], None]
"""Writes k and v of a step's tokens, [T, K, E] and rotated, to their slots."""


class StepAttention(Protocol):
    """Attention of one prepared step, as a model calls it for each layer. ``layer`` counts from 0."""

    def target(self, layer: int) -> KVTarget | WriteKV:
        """Where k and v go before ``attend``: memory for a kernel that rotates and writes at once, or a function."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attend to the KV pool, where k and v of the step's tokens are already.

        Args:
            q: [T, H, ``query_size``], rotated.
            k: [T, K, E], rotated; v likewise. Some backends read them here instead of in the pool. With latent
                attention, v [T, K, V] is a part of k; with ``expansions``, they are not read here.

        Returns:
            [T, H * ``output_size``].
        """
        ...


class AttentionBackend(StepAttention, Protocol):
    """Attention over a paged KV pool; ``PLUGIN`` of its module is the class.

    Built as ``Backend(shape, kv_pool)``, where ``kv_pool`` has the shape of ``kv_pool_shape``.
    """

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute, once per step, what all layers share. Called before the model's ``forward``."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Device memory that captured decode steps of R rows read; all tensors are int32.

    Attributes:
        slot_mapping: [R].
        starts: [R + 1], where the pages of each row start in ``page_ids``.
        last_lengths: [R], positions on the last page of each row.
        page_ids: the page tables one after the other.
        max_pages: pages of the longest possible row.
        parts: where the groups of layers have page tables of their own, the buffers of each.
    """

    slot_mapping: Tensor
    starts: Tensor
    last_lengths: Tensor
    page_ids: Tensor
    max_pages: int
    parts: Sequence[DecodeBuffers] = ()


class FixedDecode(StepAttention, Protocol):
    """Attention of decode steps with a fixed number of rows, over buffers that the caller fills before each step."""

    def plan_first(self, kv_lengths: Ints) -> None:
        """Before the capture, for rows of ``kv_lengths`` [R] positions. The buffers are filled with an empty page."""
        ...

    def plan(self, starts: Tensor, last_lengths: Tensor) -> None:
        """Before each replay, with host copies of the buffers ``starts`` [R + 1] and ``last_lengths`` [R], int32."""
        ...


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A backend for steps in CUDA graphs: decode steps as a whole, steps with prompts without their attention."""

    def warm_up(self) -> None:
        """Compile what is not compiled yet."""
        ...

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> FixedDecode:
        """Decode steps of ``num_rows`` rows."""
        ...

    def attend_into(self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, out: Tensor) -> None:
        """``attend``, to ``out`` [T, H, E]: between the CUDA graphs of all other operations, over their memory."""
        ...


@dataclass(frozen=True, slots=True)
class SharedPages:
    """The first pages of groups of rows. The rows of a group are adjacent, rows of no group come last.

    Attributes:
        row_ends: [G] int32 on the host, where the rows of each group end.
        num_pages: [G] int32 on the host, pages that the rows of each group share, all full.
        page_ids: int32 on the host, the shared pages of one group after the other.
    """

    row_ends: Ints
    num_pages: Ints
    page_ids: Ints


@dataclass(frozen=True, slots=True)
class Sharable:
    """Limits of cascade attention: a group has ``min_rows`` rows and saves ``min_spared`` page reads at least."""

    min_rows: int
    min_spared: int
    max_groups: int


class FixedCascade(FixedDecode, Protocol):
    """Decode steps whose groups of rows start with the same pages; the buffers hold the other pages of the rows."""

    def plan_shared(self, pages: SharedPages) -> None:
        """Before the first replay with these groups."""
        ...


@runtime_checkable
class CascadeAttention(CapturableAttention, Protocol):
    """A backend with cascade attention: it attends to shared pages once for all rows."""

    @property
    def sharable(self) -> Sharable: ...

    def fixed_cascade(self, num_rows: int, buffers: DecodeBuffers) -> FixedCascade: ...


@runtime_checkable
class WholeAttention(AttentionBackend, Protocol):
    """A backend whose steps can be captured in a CUDA graph together with all other operations."""

    device: torch.device
    has_kernel: bool
    """Whether the kernel that can be captured is used here."""

    def fixed_rows(self, starts: Tensor, max_length: int) -> StepAttention:
        """Attention of rows of up to ``max_length`` tokens that begin at ``starts`` [R + 1] int32, which also has the
        end of the last one. It reads this memory anew in each step. Tokens behind the last row attend to nothing, and
        what they get is undefined.
        """
        ...
