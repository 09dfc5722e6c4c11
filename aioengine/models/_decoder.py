"""Decoder models: embedding, blocks, norm and head, as described by a ``DecoderConfig``.

Shape letters: T tokens, S output tokens, D hidden size, V vocabulary size, H heads. Latent attention: N + O sizes of a
key without RoPE and a value, V latent size.
"""

from __future__ import annotations

from copy import copy
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.attention._base import AttentionShape, StepAttention
from aioengine.families._config import DecoderConfig, Task
from aioengine.families._rope_config import RopeConfig
from aioengine.families._tensors import block_linears, block_tensors
from aioengine.kernels.row_counts import Matmul
from aioengine.layers.adapters import Grouping
from aioengine.layers.attention import SelfAttention
from aioengine.layers.embedding import EmbeddingTable, token_embeddings
from aioengine.layers.experts import SparseMLP
from aioengine.layers.latent_attention import LatentAttention
from aioengine.layers.layer import Layer, Placement, Shard, Slice, Target, Units, rank_ranges
from aioengine.layers.linear import Linear
from aioengine.layers.mixer import BlockStep, Mixer, StateShape, StateTensor
from aioengine.layers.mlp import MLP
from aioengine.layers.norm import Norm, add_to_stream, make_norm
from aioengine.layers.recurrent import GatedDeltaNet, Mamba, ShortConv
from aioengine.layers.rope import RotaryEmbedding
from aioengine.models._base import InputSpec, Model, ModelInputs, ModelOptions
from aioengine.settings.memory_model import effective_windows, state_specs

_KV_SCALES: Final = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale")
"""Names of the scales of keys and values, in checkpoints of several libraries."""


class DecoderModel(Model):
    """A decoder as described by its config."""

    def __init__(self, config: DecoderConfig, options: ModelOptions) -> None:
        super().__init__(config, options)
        self._config = config
        self._shard = options.shard
        self._heads = rank_heads(config, options.shard)
        self.attention_shape = attention_shape(config, options)
        if config.stateful is not None:
            specs = state_specs(config)
            tensors = (StateTensor(spec.shape, torch.float32 if spec.in_fp32 else options.dtype) for spec in specs)
            self.state_shape = StateShape(len(config.stateful.layers), tuple(tensors))
        self.input_spec = InputSpec(short_length=_short_length(config, options), states=self.state_shape is not None)
        head = config.head
        is_tied = head is None and self.task is Task.GENERATE
        self._embedding = token_embeddings(config.vocab_size, config.hidden_size, options, is_head=is_tied)
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=options.dtype).item()
        self._positions: EmbeddingTable | None = None
        if config.names.positions:
            num_positions = config.names.first_position + config.max_position_embeddings
            self._positions = EmbeddingTable(options.empty(num_positions, config.hidden_size), options)
        self._ropes = rotary_embeddings(config, options)
        ropes = _ropes(config)
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
        self._head: Linear | None = None
        if head is not None:
            divided = "outputs" if self.task is Task.GENERATE else None
            units = [Units(head.outputs, may_be_uneven=True)]
            self._head = Linear.of([head], options, divided=divided, units=units)
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

    def free_weights(self) -> None:
        super().free_weights()
        self._logits = self._head

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
        num_layers, outputs = len(self._blocks), inputs.outputs
        kept_layers = () if self.features is None else self.features.layers
        kept: dict[int, Tensor] = {}
        if num_layers in kept_layers:
            outputs = None
        for layer, block in enumerate(self._blocks):
            if layer in kept_layers:
                kept[layer] = self._stream(x, delta, layer)
            x, delta = block(x, delta, step, outputs=outputs if layer == num_layers - 1 else None)
            if inputs.deepstack is not None and layer < inputs.deepstack[1].shape[1]:
                x.index_add_(0, inputs.deepstack[0], inputs.deepstack[1][:, layer])
        if delta is None:
            hidden = self._norm(x)
        else:
            hidden = add_to_stream(delta, x, self._last_norm, self._norm, self._shard.group)
        if self.features is not None:
            self.features.store(kept | {num_layers: hidden}, inputs.slots)
            if outputs is not inputs.outputs and inputs.outputs is not None:
                hidden = hidden.index_select(0, inputs.outputs)
        return hidden

    def _stream(self, x: Tensor, delta: Tensor | None, layer: int) -> Tensor:
        """Return a copy of the input of a layer [T, D]: the residual stream with the update of the previous layer."""
        if delta is None:
            return x.clone()
        return add_to_stream(delta.clone(), x.clone(), self._blocks[layer - 1].output_norm, None, self._shard.group)

    def shortened(self) -> Model:
        model = copy(self)
        model._blocks, model.features = [self._blocks[layer] for layer in self._block_kinds], None
        return model

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
        if self.task is Task.CLASSIFY:
            assert self._logits is not None, "finish_loading was not called"
            return self._logits(hidden)
        return self.gather_logits(self.compute_own_logits(hidden))

    def compute_own_logits(self, hidden: Tensor) -> Tensor:
        """See ``Model``: [S, D] -> [S, W]."""
        assert self._logits is not None, "finish_loading was not called"
        logits, cap = _scaled(self._logits(hidden), self._config.logits_scale), self._config.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def gather_logits(self, own: Tensor) -> Tensor:
        """See ``Model``: [S, W] -> [S, V]."""
        if self._shard.group is None:
            return own
        # the parts of all ranks must have the same size
        num_missing = -(-self.vocab_size // self._shard.size) - own.shape[1]
        padded = functional.pad(own, (0, num_missing)) if num_missing else own
        return self._shard.group.all_gather(padded)[:, : self.vocab_size]


def attention_shape(config: DecoderConfig, options: ModelOptions) -> AttentionShape:
    """Return the shape of attention on this rank."""
    heads, kv_heads = rank_heads(config, options.shard)
    return AttentionShape(
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


def rotary_embeddings(config: DecoderConfig, options: ModelOptions) -> list[RotaryEmbedding]:
    """Return the rotary embeddings, in the order of ``_ropes``."""
    return [
        RotaryEmbedding(
            rope,
            config.rope_size or config.head_size,
            max_position_embeddings=config.max_position_embeddings,
            num_positions=options.max_positions,
            short_length=_short_length(config, options),
            device=options.device,
        )
        for rope in _ropes(config)
    ]


def _ropes(config: DecoderConfig) -> list[RopeConfig | None]:
    """Return the different rotary embeddings of the layers."""
    return list(dict.fromkeys(config.rope_of(layer) for layer in range(config.num_layers)))


def _short_length(config: DecoderConfig, options: ModelOptions) -> int:
    """Return ``InputSpec.short_length``."""
    return config.short_length if options.max_positions > config.short_length else 0


def rank_heads(config: DecoderConfig, shard: Shard) -> tuple[range, range]:
    """Return the query heads and the KV heads of a rank. Latent attention is not divided.

    Raises ValueError if the heads cannot be divided evenly.
    """
    if config.attention.latent is not None:
        return range(config.num_heads), range(config.num_kv_heads)
    [heads], [kv_heads] = (rank_ranges([Units(count)], shard) for count in (config.num_heads, config.num_kv_heads))
    return range(*heads), range(*kv_heads)


def _first_of_each_kind(config: DecoderConfig, options: ModelOptions) -> list[int]:
    """Return the first layer of each kind of block: kinds differ in windows, rotation, shapes or formats of weights."""
    windows = dict(zip(config.attention_layers, config.windows, strict=False))
    kinds = [
        [
            windows.get(layer),
            config.rope_of(layer),
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


def _has_forms(placement: Placement) -> bool:
    """Return whether latent attention has several forms, which is so in 16 bits on a GPU."""
    return placement.device.type == "cuda" and placement.dtype.itemsize == 2 and not placement.batch_invariant


def _kv_scales(config: DecoderConfig, options: ModelOptions) -> tuple[Tensor, ...]:
    """Return ``AttentionShape.kv_scales``, [2] per layer, with values of 1."""
    if not options.has_kv_scales or config.attention.latent is not None:
        return ()
    return tuple(torch.ones(2, device=options.device) for _ in config.attention_layers)


def _scaled(x: Tensor, scale: float) -> Tensor:
    """Multiply x [T, D] in place."""
    return x if scale == 1.0 else x.mul_(scale)


def make_attention(
    config: DecoderConfig, layer: int, shape: AttentionShape, placement: Placement, *, rope: int
) -> Mixer:
    """Build the attention of a layer, or the layer that replaces it. Add new kinds of attention here.

    ``rope``: index of the rotary embedding in ``BlockStep.tables``.
    """
    if config.attention.latent is not None:
        return LatentAttention(config, layer, shape, placement, rope=rope)
    if config.keeps_state(layer):
        if config.short_conv is not None:
            return ShortConv(config.hidden_size, config.short_conv, placement)
        if config.mamba is not None:
            return Mamba(config.hidden_size, config.mamba, placement)
        assert config.delta_net is not None, "no layer keeps a state"
        return GatedDeltaNet(config.hidden_size, config.delta_net, config.epsilon, placement)
    return SelfAttention(config, layer, shape, placement, rope=rope)


def make_mlp(config: DecoderConfig, layer: int, placement: Placement) -> MLP | SparseMLP:
    """Build the MLP or the experts of a layer. Add replacements of the MLP here."""
    size = config.hidden_size
    if (experts := config.experts_of(layer)) is not None:
        return SparseMLP(size, experts, placement)
    return MLP(size, config.intermediate_size, config.mlp, placement, is_transposed=config.is_transposed)


class Block(Layer):
    """Attention and MLP, with norms of their inputs, their outputs, or both. See ``BlockConfig``.

    Args:
        rope: index of the rotary embedding in ``BlockStep.tables``.
        previous_norm: ``output_norm`` of the previous block.

    Attributes:
        output_norm: the norm of the returned update; None if there is none. The next block applies it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        shape: AttentionShape,
        placement: Placement,
        *,
        rope: int,
        previous_norm: Norm | None,
    ) -> None:
        self._config = block = config.block
        self._layer = config.layers_like(layer).index(layer)
        norms = {name: make_norm(config.norm, config.hidden_size, config.epsilon, placement) for name in block.norms}
        self._attention_norm = norms.get(block.attention_norm)
        self._attention = make_attention(config, layer, shape, placement, rope=rope)
        self._attention_output_norm = norms.get(block.attention_output_norm)
        self._mlp_norm = norms.get(block.mlp_norm)
        self._mlp = make_mlp(config, layer, placement)
        self.output_norm = norms.get(block.mlp_output_norm)
        self._previous_norm = previous_norm
        # Each rank has a part of the MLP, and of attention with plain keys and values; other attention is whole.
        self._ranks = placement.shard.group
        self._attention_ranks = self._ranks if isinstance(self._attention, SelfAttention) else None
        self.parts = (
            (config.mixer_prefix(layer), self._attention),
            (block.mlp, self._mlp),
            *((f"{name}.", norm) for name, norm in norms.items()),
        )

    def __call__(
        self, x: Tensor, delta: Tensor | None, step: BlockStep, *, outputs: Tensor | None, beside: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the block on x [T, D].

        Args:
            x: the residual stream, changed in place.
            delta: [T, D], the pending update of the previous block, before its ``output_norm``; None in the first
                block.
            outputs: [S] int64, the tokens to compute after attention; None for all.
            beside: [T, D], joined before the input of attention (``AttentionConfig.num_inputs``); None if there is one
                input.

        Returns:
            The residual stream and the pending update: [T, D] or [S, D] each. If there are several ranks, the pending
            update is the part of this rank.
        """
        if delta is not None:
            normed = add_to_stream(delta, x, self._previous_norm, self._attention_norm, self._ranks)
        else:
            normed = x if self._attention_norm is None else self._attention_norm(x)
        if beside is not None:
            normed = torch.cat((beside, normed), dim=1)
        attended = self._attention(normed, step, self._layer, outputs=outputs)
        grouping = step.grouping(outputs)
        if outputs is not None:
            x = x.index_select(0, outputs)
        if self._config.is_parallel:
            return x, self._parallel(x, normed, attended, grouping, outputs=outputs)
        norms = self._attention_output_norm, self._mlp_norm
        return x, self._mlp(add_to_stream(attended, x, *norms, self._attention_ranks), grouping)

    def _parallel(
        self, x: Tensor, normed: Tensor, attended: Tensor, grouping: Grouping | None, *, outputs: Tensor | None
    ) -> Tensor:
        """Return ``attended`` [S, D] plus the MLP's output [S, D] in a parallel block.

        The MLP reads the norm of x [S, D], or without an ``mlp_norm`` the input of attention, normed [T, D].
        """
        if self._mlp_norm is not None:
            normed = self._mlp_norm(x)
        elif outputs is not None:
            normed = normed.index_select(0, outputs)
        return attended.add_(self._mlp(normed, grouping))
