"""Decoder models: embedding, blocks, norm and head, as described by a ``DecoderConfig``.

Shape letters: T tokens, S output tokens, D hidden size, V vocabulary size, H heads. Latent attention: N + O sizes of a
key without RoPE and a value, V latent size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

from aioengine.attention._base import AttentionShape
from aioengine.families._config import Task
from aioengine.families._tensors import block_linears, block_tensors
from aioengine.layers.embedding import EmbeddingTable, token_embeddings
from aioengine.layers.linear import Linear
from aioengine.layers.mixer import BlockStep
from aioengine.layers.norm import add_to_stream, make_norm
from aioengine.layers.placement import Placement, Slice, Target, Units, rank_ranges
from aioengine.layers.rope import RotaryEmbedding
from aioengine.layers.states import StateShape, StateTensor
from aioengine.models._base import InputSpec, Model, ModelInputs
from aioengine.models._decoder_block import Block
from aioengine.settings.memory_model import effective_windows, state_specs

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import StepAttention
    from aioengine.families._config import DecoderConfig
    from aioengine.families._rope_config import RopeConfig
    from aioengine.kernels.linear import Matmul
    from aioengine.layers.norm import Norm
    from aioengine.layers.placement import Shard
    from aioengine.models._base import ModelOptions


_KV_SCALES: Final = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale")
"""Names of the scales of keys and values, in checkpoints of several libraries."""


class DecoderModel(Model):
    """A decoder as described by its config."""

    def __init__(self, config: DecoderConfig, options: ModelOptions) -> None:
        super().__init__(config, options)
        self._config = config
        self._shard = options.shard
        heads, kv_heads = self._heads = rank_heads(config, options.shard)
        self.attention_shape = AttentionShape(
            num_layers=len(config.attention_layers),
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            head_size=config.head_size,
            scale=config.head_size**-0.5 if config.attention.scale is None else config.attention.scale,
            is_causal=config.is_causal,
            windows=effective_windows(config.windows, options.max_positions),
            soft_cap=config.attention.soft_cap,
            sinks=tuple(options.empty(len(heads)) for _ in range(config.num_layers * config.attention.has_sinks)),
            kv_scales=_kv_scales(config, options),
            value_size=None if config.attention.latent is None else config.attention.latent.rank,
            expansions=_expansions(config, options),
            plain_size=0 if config.attention.latent is None else config.attention.latent.plain_size,
            batch_invariant=options.batch_invariant,
        )
        is_longer = options.max_positions > config.short_length
        short_length = config.short_length if is_longer else 0
        self.state_shape = None if config.stateful is None else _state_shape(config, options.dtype)
        self.input_spec = InputSpec(short_length=short_length, states=self.state_shape is not None)
        head = config.head
        self._device = options.device
        is_tied = not head and self.task is Task.GENERATE
        self._embedding = token_embeddings(config.vocab_size, config.hidden_size, options, is_head=is_tied)
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=options.dtype).item()
        self._positions: EmbeddingTable | None = None
        if config.names.positions:
            num_positions = config.names.first_position + config.max_position_embeddings
            self._positions = EmbeddingTable(options.empty(num_positions, config.hidden_size), options)
        ropes = list(dict.fromkeys(config.rope_of(layer) for layer in range(config.num_layers)))
        self._ropes = [_rotary_embedding(rope, config, options, self.input_spec.short_length) for rope in ropes]
        self._blocks: list[Block] = []
        previous_norm: Norm | None = None
        for layer in range(config.num_layers):
            rope = ropes.index(config.rope_of(layer))
            block = Block(config, layer, self.attention_shape, options, rope=rope, previous_norm=previous_norm)
            self._blocks.append(block)
            previous_norm = block.output_norm
        self._last_norm = previous_norm
        self._block_kinds = _first_of_each_kind(config, options)
        self._norm = make_norm(config.norm, config.hidden_size, config.epsilon, options)
        has_bias = config.head_bias and config.names.head in head
        self._head: Linear | None = None
        if head:
            units = [Units(size, may_be_uneven=True) for size in head.values()]
            divided = "outputs" if self.task is Task.GENERATE else None
            self._head = Linear(config.hidden_size, head, options, bias=has_bias, divided=divided, units=units)
            self._head.is_adaptable = False
        self._logits: Matmul | None = self._head
        names = config.names
        self.parts = (
            (f"{names.embedding}.", self._embedding),
            (f"{names.norm}.", self._norm),
            (f"{names.positions}.", self._positions),
            *((names.block(layer), block) for layer, block in enumerate(self._blocks)),
            ("", self._head),
        )

    def own_weights(self) -> dict[str, Target]:
        names, attention = self._config.names, self._config.block.attention
        heads = self._heads[0]
        source = Slice(0, ((heads.start, heads.stop),), self._config.num_heads) if self._shard.size > 1 else None
        targets = {
            f"{names.block(layer)}{attention}sinks": Target(sinks, source)
            for layer, sinks in enumerate(self.attention_shape.sinks)
        }
        for layer, scales in zip(self._config.attention_layers, self.attention_shape.kv_scales, strict=False):
            for scale, side in zip(scales.split(1), "kv", strict=True):
                target = Target(scale, is_optional=True)
                prefix = f"{names.block(layer)}{attention}"
                targets |= {f"{prefix}{name.format(side, side)}": target for name in _KV_SCALES}
        return targets

    def finish_loading(self) -> None:
        super().finish_loading()
        for scales in self.attention_shape.kv_scales:
            scales.copy_(scales.where(scales > 0, 1.0))  # other numbers mean that keys or values were not observed
        if self._head is None and self.task is Task.GENERATE:
            self._logits = self._embedding.as_head()

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] ids -> [T, D]."""
        return _scaled(self._embedding(token_ids), self._embedding_scale)

    def forward(self, inputs: ModelInputs, attention: StepAttention) -> Tensor:
        """Return [T, D], or [S, D] with ``inputs.outputs``. See ``Model.forward``."""
        step = self._step(inputs, attention)
        if inputs.embeddings is not None:
            x = inputs.embeddings.clone()  # blocks change it in place
        else:
            assert inputs.token_ids is not None, "inputs have neither token ids nor embeddings"
            x = self.embed(inputs.token_ids)
        x = _scaled(x, self._config.stream_scale)
        if self._positions is not None:
            first = self._config.names.first_position
            x.add_(self._positions(inputs.positions + first if first else inputs.positions))
        delta: Tensor | None = None
        for layer, block in enumerate(self._blocks):
            is_last = layer == len(self._blocks) - 1
            x, delta = block(x, delta, step, outputs=inputs.outputs if is_last else None)
            if inputs.deepstack is not None and layer < inputs.deepstack[1].shape[1]:
                x.index_add_(0, inputs.deepstack[0], inputs.deepstack[1][:, layer])
        return self._norm(x) if delta is None else add_to_stream(delta, x, self._last_norm, self._norm)

    def forward_block(self, num_tokens: int, attention: StepAttention) -> None:
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        step = self._step(ModelInputs(positions=positions), attention)
        for layer in self._block_kinds:
            x = torch.zeros(num_tokens, self.hidden_size, dtype=self.dtype, device=self._device)
            self._blocks[layer](x, None, step, outputs=None)

    def _step(self, inputs: ModelInputs, attention: StepAttention) -> BlockStep:
        """Return the arguments of the blocks. Without states in the inputs, use states that are dropped."""
        positions, states = inputs.positions, inputs.states
        if states is None and self.state_shape is not None:
            states = self.state_shape.one_row(len(positions), positions.device)
        return BlockStep([rope.tables(positions) for rope in self._ropes], attention, inputs.adapters, states)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, D] -> logits [S, V], or scores of a classifier. Without a head, return ``hidden``."""
        if self.task is Task.EMBED:
            return hidden
        assert self._logits is not None, "finish_loading was not called"
        logits = self._logits(hidden)
        if self.task is Task.CLASSIFY:
            return logits
        if self._shard.group is not None:
            num_missing = -(-self.vocab_size // self._shard.size) - logits.shape[1]
            padded = functional.pad(logits, (0, num_missing)) if num_missing else logits
            logits = self._shard.group.joined(padded)[:, : self.vocab_size]
        logits, cap = _scaled(logits, self._config.logits_scale), self._config.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def rank_heads(config: DecoderConfig, shard: Shard) -> tuple[range, range]:
    """Return the query heads and the KV heads of a rank. Latent attention is not divided.

    Raises ValueError if the heads cannot be divided evenly.
    """
    if config.attention.latent is not None:
        return range(config.num_heads), range(config.num_kv_heads)
    [heads], [kv_heads] = (rank_ranges([Units(count)], shard) for count in (config.num_heads, config.num_kv_heads))
    return range(*heads), range(*kv_heads)


def _state_shape(config: DecoderConfig, dtype: torch.dtype) -> StateShape:
    tensors = (StateTensor(spec.shape, torch.float32 if spec.in_fp32 else dtype) for spec in state_specs(config))
    num_layers = sum(config.keeps_state(layer) for layer in range(config.num_layers))
    return StateShape(num_layers, tuple(tensors))


def _first_of_each_kind(config: DecoderConfig, options: ModelOptions) -> list[int]:
    """Return the first layer of each kind of block, where kinds differ in tensor shapes or formats of linear layers."""
    kinds = [
        [
            *block_tensors(config, layer).values(),
            *(options.format_of(linear.name) for linear in block_linears(config, layer)),
        ]
        for layer in range(config.num_layers)
    ]
    return [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]


def _expansions(config: DecoderConfig, placement: Placement) -> tuple[Tensor, ...]:
    """Return ``AttentionShape.expansions``: [H, N + O, V] per layer, or () if there is only the absorbed form."""
    latent = config.attention.latent
    if latent is None or not _has_forms(placement):
        return ()
    sizes = config.num_heads, latent.plain_size + latent.value_size, latent.rank
    return tuple(placement.empty(*sizes) for _ in range(config.num_layers))


def _kv_scales(config: DecoderConfig, options: ModelOptions) -> tuple[Tensor, ...]:
    """Return ``AttentionShape.kv_scales``, [2] per layer, with values of 1."""
    if not options.has_kv_scales or config.attention.latent is not None:
        return ()
    return tuple(torch.ones(2, device=options.device) for _ in config.attention_layers)


def _has_forms(placement: Placement) -> bool:
    """Return whether latent attention has several forms, which is so in 16 bits on a GPU."""
    return placement.device.type == "cuda" and placement.dtype.itemsize == 2 and not placement.batch_invariant


def _scaled(x: Tensor, scale: float) -> Tensor:
    """Multiply x [T, D] in place."""
    return x if scale == 1.0 else x.mul_(scale)


def _rotary_embedding(
    rope: RopeConfig | None, config: DecoderConfig, options: ModelOptions, short_length: int
) -> RotaryEmbedding:
    """Return the rotary embedding. ``rope``: None for no rotation. ``short_length``: see ``InputSpec``."""
    return RotaryEmbedding(
        rope,
        config.rope_size or config.head_size,
        max_position_embeddings=config.max_position_embeddings,
        num_positions=options.max_positions,
        short_length=short_length,
        device=options.device,
    )
