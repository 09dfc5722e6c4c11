"""How an engine divides the memory of a device: the sizes and formulas of ``plan`` and the runner. Torch-free.

Sizes are in bytes, or in elements of the model's dtype if the name says so.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from msgspec import Struct

from aioengine.families._block_config import LinearShape, MambaConfig, ShortConvConfig
from aioengine.families._config import DecoderConfig, Task, TransformerConfig
from aioengine.families._draft_heads import DraftHeadConfig
from aioengine.families._tensors import LinearTensors, TableTensors, checkpoint_tensors, plain_tensors
from aioengine.settings.config import Settings
from aioengine.settings.page_groups import PageGroups, layer_groups

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "int8": 1}
INT8_SCALE_BYTES: Final = 2
"""Size of the scale of each int8 head of a key or value in the KV cache."""
_GIB: Final = 1 << 30

GRAPH_BYTES: Final = 2 * _GIB
"""Reserved on a GPU for kernel workspaces and for CUDA graphs of decode steps. The graphs share a pool of about the
size of one step.
"""

GPU_FEATURE_BYTES: Final = _GIB
CPU_FEATURE_BYTES: Final = 256 << 20
"""Limits of cached image features. 1 GiB is enough for about a hundred images of one megapixel for a 7B model."""

SAMPLED_ROWS: Final = 256
"""Rows that the sampler processes at once. This bounds the memory of their fp32 logits."""

SNAPSHOTS_PER_ROW: Final = 16
"""Maximum number of state snapshots per running request."""

_STREAMS: Final = 3
"""Tensors [T, D] that are alive at a time in a block: residual stream, its update, and the norm's output."""


# ---------------------------------------------------------------- weights and activations


def num_parameters(config: TransformerConfig) -> int:
    """Return the number of parameters, without a vision tower. MXFP4 experts count as dequantized."""
    return sum(spec.num_parameters for spec in checkpoint_tensors(config).values())


def weights_bytes(
    config: TransformerConfig,
    itemsize: int,
    linear_tensors: LinearTensors = plain_tensors,
    table_tensors: TableTensors | None = None,
) -> int:
    """Return the bytes of the weights, without a vision tower.

    Args:
        itemsize: of the model's dtype.
        linear_tensors: describes linear layers.
        table_tensors: describes token embeddings, which may also be the head.
    """
    specs = checkpoint_tensors(config, linear_tensors)
    if table_tensors is not None and isinstance(config, DecoderConfig):
        table = LinearShape(config.names.embedding, config.vocab_size, config.hidden_size, False)
        is_head = config.task is Task.GENERATE and config.head is None
        specs |= {f"{table.name}.{name}": spec for name, spec in table_tensors(table, is_head).items()}
    return sum(spec.num_bytes(itemsize) for spec in specs.values())


def active_parameters(config: TransformerConfig) -> int:
    """Return the number of parameters that one token uses: only ``top_k`` of the experts."""
    count = num_parameters(config)
    if isinstance(config, DecoderConfig):
        for experts in map(config.experts_of, range(config.num_layers)):
            if experts is not None:
                count -= (experts.num_experts - experts.top_k) * 3 * experts.inner_size * config.hidden_size
    return count


def step_elements(config: TransformerConfig) -> int:
    """Estimate the elements per token that are alive at a time in a step, without logits."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_size  # q, k, v and the attention output
    is_gated = not isinstance(config, DecoderConfig) or config.mlp.is_gated
    inner = (2 + is_gated) * config.intermediate_size
    if isinstance(config, DecoderConfig) and (experts := config.experts) is not None:
        inner = max(inner, experts.top_k * (3 * experts.inner_size + config.hidden_size))
    return _STREAMS * config.hidden_size + max(heads, inner)


def reserved_bytes(step_bytes: int, *, max_running: int, vocab_size: int) -> int:
    """Return the memory that a GPU engine keeps free besides weights and pool, without images.

    Args:
        step_bytes: peak memory of the largest step.
    """
    counts = 4 * max_running * vocab_size  # token counts of penalties; a table that grows exists twice for a moment
    return with_margin(step_bytes) + 2 * counts + GRAPH_BYTES


def with_margin(step_bytes: int) -> int:
    """Add a quarter, because steps of different sizes fragment the memory."""
    return step_bytes + step_bytes // 4


def inbox_bytes(num_ranks: int, itemsize: int, *, max_rows: int, num_columns: int) -> int:
    """Return the bytes of the inbox for sums on a GPU: two lines per row. With more ranks it is small, as other inboxes
    are. See ``layers.ranks``.
    """
    return 4 * max_rows * num_columns if num_ranks == 2 and itemsize == 2 else 0


# ---------------------------------------------------------------- KV cache and states


class KVCache(Struct, frozen=True, kw_only=True):
    """The sizes of a model's KV cache.

    Attributes:
        num_layers: layers with a KV cache.
        layer_elements: elements per token in each of these layers.
        head_size: elements of a key or value per KV head.
        windows: the window of each of these layers; empty if no layer has one.
        feature_size: elements per token of the hidden states that are kept for a draft head, in the model's dtype.
    """

    num_layers: int
    layer_elements: int
    head_size: int
    windows: tuple[int | None, ...] = ()
    feature_size: int = 0

    @property
    def elements_per_token(self) -> int:
        """Elements per token in all layers."""
        return self.num_layers * self.layer_elements

    def token_bytes(self, elements: int, kv_dtype: str) -> int:
        """Return the bytes of this many elements of a token."""
        scales = elements // self.head_size * INT8_SCALE_BYTES if kv_dtype == "int8" else 0
        return elements * DTYPE_BYTES[kv_dtype] + scales

    def pages(self) -> tuple[int, tuple[int | None, ...]]:
        """Return the elements per token in a page, and the window of each page group (``PageGroups``)."""
        groups, windows = layer_groups(self.windows)
        return (len(groups[0]) * self.layer_elements, windows) if windows else (self.elements_per_token, (None,))


def effective_windows(windows: tuple[int | None, ...], context_length: int) -> tuple[int | None, ...]:
    """Drop windows that no request of ``context_length`` tokens exceeds. Returns () if no window is left."""
    effective = tuple(None if window is None or window >= context_length else window for window in windows)
    return effective if any(effective) else ()


def kv_cache(config: TransformerConfig, context_length: int) -> KVCache:
    """Return the KV cache of requests of up to ``context_length`` tokens. A model that is not causal has none."""
    decoder = config if isinstance(config, DecoderConfig) else None
    num_states = sum(map(decoder.keeps_state, range(config.num_layers))) if decoder is not None else 0
    sides = 1 if decoder is not None and decoder.attention.latent is not None else 2  # a latent vector; or k and v
    return KVCache(
        num_layers=config.num_layers - num_states if config.is_causal else 0,
        layer_elements=sides * config.num_kv_heads * config.head_size,
        head_size=config.head_size,
        windows=effective_windows(config.windows, context_length) if config.is_causal else (),
        feature_size=config.hidden_size if isinstance(config, DraftHeadConfig) else 0,
    )


class StateSpec(NamedTuple):
    """A tensor of a layer's recurrent state of one request. It has the model's dtype unless ``in_fp32``."""

    shape: tuple[int, ...]
    in_fp32: bool = False


def state_specs(config: DecoderConfig) -> tuple[StateSpec, ...]:
    """Return the tensors of a recurrent layer: last inputs of the convolution, and for all but LFM2 one matrix per
    head.
    """
    net = config.stateful
    if net is None:
        return ()
    if isinstance(net, ShortConvConfig):
        return (StateSpec((net.width - 1, config.hidden_size)),)
    num_heads = net.num_heads if isinstance(net, MambaConfig) else net.num_value_heads
    convolution, matrices = (net.width - 1, net.num_channels), (num_heads, net.key_size, net.value_size)
    return StateSpec(convolution), StateSpec(matrices, in_fp32=True)


def state_bytes(config: TransformerConfig, itemsize: int) -> int:
    """Return the bytes of the recurrent states of one request. ``itemsize``: of the model's dtype."""
    if not isinstance(config, DecoderConfig) or config.stateful is None:
        return 0
    sizes = [math.prod(spec.shape) * (4 if spec.in_fp32 else itemsize) for spec in state_specs(config)]
    return len(config.stateful.layers) * sum(sizes)


# ---------------------------------------------------------------- the pool


class PoolFit(NamedTuple):
    """How KV pages, states and snapshots share the memory of the pool.

    Attributes:
        num_rows: requests that can run at once; 0 if not even one state fits.
        num_snapshots: snapshots of states.
        left: bytes that remain for KV pages.
        num_pages: pages of the KV pool; 0 if a pool of the requested size does not fit.
    """

    num_rows: int
    num_snapshots: int
    left: int
    num_pages: int


class PoolDemand(Struct, frozen=True, kw_only=True):
    """The sizes that an engine needs in the pool.

    Attributes:
        num_tokens: the requested size of the KV pool in tokens; None: as many as fit and can be used.
        groups: the page groups of the model.
        page_bytes: of a page of one group.
        context_length: tokens of the longest request.
        max_running: requests that run at once if memory suffices.
        state_bytes: of the recurrent states of one request; 0 for a model without.
        has_snapshots: states are saved for the prefix cache.
    """

    num_tokens: int | None
    groups: PageGroups
    page_bytes: int
    context_length: int
    max_running: int
    state_bytes: int = 0
    has_snapshots: bool = False

    @classmethod
    def of(cls, settings: Settings, cache: KVCache, *, state_bytes: int, draft: KVCache | None = None) -> PoolDemand:
        """Return the demand of an engine. draft: the KV cache of a draft model, whose layers share one page table."""
        page_size, num_pages = settings.memory.page_size, settings.memory.num_pages
        elements, windows = cache.pages()
        kv_dtype = settings.memory.kv_dtype or settings.model.dtype
        token_bytes = cache.token_bytes(elements, kv_dtype)
        if draft is not None:
            token_bytes += draft.token_bytes(draft.elements_per_token, kv_dtype)
            token_bytes += draft.feature_size * DTYPE_BYTES[settings.model.dtype]
        return cls(
            num_tokens=None if num_pages is None else num_pages * page_size,
            groups=PageGroups(windows=windows, page_size=page_size, min_tokens=settings.scheduler.min_tokens),
            page_bytes=token_bytes * page_size,
            context_length=settings.model.context_length,
            max_running=settings.scheduler.max_running,
            state_bytes=state_bytes,
            has_snapshots=settings.scheduler.prefix_cache,
        )

    def pages_in(self, num_tokens: int) -> int:
        """Return the pages for this many tokens of requests of the context length."""
        return self.groups.pages_in(num_tokens, self.context_length)

    def tokens_in(self, num_pages: int) -> int:
        """Return the tokens of requests of the context length that fit into this many pages."""
        return self.groups.tokens_in(max(num_pages, 0), self.context_length)

    def state_limit(self, num_bytes: int) -> int:
        """Return the part of ``num_bytes`` that states may use: half, or what a pool of a requested size leaves."""
        if self.num_tokens is None:
            return num_bytes // 2
        return num_bytes - self.pages_in(self.num_tokens) * self.page_bytes

    def fit(self, num_bytes: int) -> PoolFit:
        """Divide ``num_bytes``.

        States use at most half of the memory, and snapshots a quarter of the rest. Both leave the pages of a requested
        size, and snapshots leave the pages of one context. One more state is for padding rows of CUDA graphs.
        """
        num_rows, num_snapshots, left = self.max_running, 0, num_bytes
        requested = None if self.num_tokens is None else self.pages_in(self.num_tokens)
        if self.state_bytes:
            num_rows = max(min(num_rows, self.state_limit(num_bytes) // self.state_bytes - 1), 0)
            left -= (num_rows + 1) * self.state_bytes
        if self.state_bytes and self.has_snapshots:
            kept = self.pages_in(self.context_length) if requested is None else requested
            limit = min(left // 4, left - kept * self.page_bytes)
            num_snapshots = max(min(SNAPSHOTS_PER_ROW * num_rows, limit // self.state_bytes), 0)
            left -= num_snapshots * self.state_bytes
        if requested is not None:
            num_pages = requested if requested * self.page_bytes <= left else 0
        else:
            max_pages = self.pages_in(self.context_length * self.max_running)
            num_pages = max(min(left // self.page_bytes, max_pages), 0) if self.page_bytes else max_pages
        return PoolFit(num_rows, num_snapshots, left, num_pages)


def format_bytes(num_bytes: int) -> str:
    """Return "1.5 GiB", "300.0 MiB" or "12.0 KiB"."""
    for unit, size in (("GiB", _GIB), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} KiB"
