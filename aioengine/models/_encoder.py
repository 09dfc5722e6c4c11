"""Encoder models with bidirectional attention: BERT, RoBERTa, XLM-R and ModernBERT.

Shape letters: T tokens, S output tokens, D hidden size, C classes.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from aioengine.attention._base import AttentionShape, StepAttention
from aioengine.families._encoders import EncoderConfig, Gelu, HeadConfig
from aioengine.kernels.activation import gelu
from aioengine.kernels.heads import as_parts, rotate_heads
from aioengine.layers.embedding import EmbeddingTable
from aioengine.layers.layer import Layer, Placement
from aioengine.layers.linear import Linear
from aioengine.layers.mixer import BlockStep
from aioengine.layers.norm import LayerNorm
from aioengine.layers.rope import RotaryEmbedding
from aioengine.models._base import InputSpec, Model, ModelInputs, ModelOptions


class EncoderBlock(Layer):
    """Attention and MLP, pre-norm (ModernBERT) or post-norm (BERT)."""

    def __init__(self, config: EncoderConfig, placement: Placement, layer: int) -> None:
        *qkv, output, first, second = config.linears
        self._layer = layer
        self._num_heads, self._head_size = config.num_heads, config.head_size
        self._is_local = bool(config.windows) and config.windows[layer] is not None
        self._gelu: Gelu = config.gelu
        self._is_pre_norm, self._is_gated = config.is_pre_norm, config.is_gated
        self._qkv = Linear.of(qkv, placement)
        self._output, self._first, self._second = (Linear.of([part], placement) for part in (output, first, second))
        self._attention_norm, self._mlp_norm = norms = [
            LayerNorm(config.hidden_size, config.epsilon, placement, bias=config.norm_bias)
            if layer or name != config.first_without
            else None
            for name in config.block_norms
        ]
        self.parts = (
            *(("", linear) for linear in (self._qkv, self._output, self._first, self._second)),
            *((f"{name}.", norm) for name, norm in zip(config.block_norms, norms, strict=True)),
        )

    def __call__(self, x: Tensor, step: BlockStep, *, outputs: Tensor | None) -> Tensor:
        """x [T, D] -> [T, D], or [S, D] with ``outputs`` [S] int64."""
        normed = x if self._attention_norm is None or not self._is_pre_norm else self._attention_norm(x)
        attended = self._attend(normed, step)
        if outputs is not None:
            x, attended = x.index_select(0, outputs), attended.index_select(0, outputs)
        delta = self._output(attended)
        assert self._mlp_norm is not None, "only the attention norm may be missing"
        if self._is_pre_norm:
            return self._mlp(self._mlp_norm.of_sum(delta, x, keeps_sum=True)).add_(x)
        assert self._attention_norm is not None, "a post-norm model has both norms"
        x = self._attention_norm.of_sum(delta, x, keeps_sum=False)
        return self._mlp_norm.of_sum(self._mlp(x), x, keeps_sum=False)

    def _attend(self, x: Tensor, step: BlockStep) -> Tensor:
        """[T, D] -> [T, D]."""
        heads = self._qkv(x).view(x.shape[0], -1, self._head_size)
        if step.tables:
            q, k, v = rotate_heads(heads, self._num_heads, step.tables[self._is_local])
        else:
            q, k, v = as_parts(heads, self._num_heads)
        return step.attention.attend(q, k, v, self._layer)

    def _mlp(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        inner = self._first(x)
        if not self._is_gated:
            return self._second(gelu(inner, approximate=self._gelu))
        activated, factor = inner.chunk(2, dim=-1)
        return self._second(gelu(activated, approximate=self._gelu).mul_(factor))


class ClassifierHead(Layer):
    """The head of a classifier: [S, D] -> scores [S, C]."""

    def __init__(self, head: HeadConfig, config: EncoderConfig, placement: Placement) -> None:
        size = config.hidden_size
        self._dense = Linear(size, {head.dense: size}, placement, bias=head.dense_bias)
        self._scores = Linear(size, {head.scores: config.num_labels}, placement, bias=True)
        self._is_tanh = head.activation == "tanh"
        self._norm = LayerNorm(size, config.epsilon, placement, bias=config.norm_bias) if head.norm else None
        self.parts = ("", self._dense), ("", self._scores), (f"{head.norm}.", self._norm)

    def __call__(self, pooled: Tensor) -> Tensor:
        """[S, D] -> [S, C]."""
        x = self._dense(pooled)
        x = torch.tanh(x) if self._is_tanh else gelu(x)
        return self._scores(x if self._norm is None else self._norm(x))


class EncoderModel(Model):
    """An encoder as described by its config."""

    def __init__(self, config: EncoderConfig, options: ModelOptions) -> None:
        super().__init__(config, options)
        self._config = config
        self.attention_shape = AttentionShape(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5,
            is_causal=False,
            windows=config.windows,
        )
        sizes = [(rows, config.hidden_size) for rows in config.embeddings.values()]
        tables = [EmbeddingTable(options.empty(*size), options) for size in sizes]
        self._tokens, self._learned = tables[0], tables[1:]
        self.input_spec = InputSpec(token_types=len(tables) > 2 and tables[2].weight.shape[0] > 1)
        norms = [LayerNorm(config.hidden_size, config.epsilon, options, bias=config.norm_bias) for _ in config.norms]
        self._first_norm, *self._last_norm = norms
        self._ropes: list[RotaryEmbedding] = []
        if config.position_offset is None:
            self._ropes = [
                RotaryEmbedding(
                    rope,
                    config.head_size,
                    max_position_embeddings=config.max_position_embeddings,
                    num_positions=options.max_positions,
                    device=options.device,
                )
                for rope in config.ropes
            ]
        self._blocks = [EncoderBlock(config, options, layer) for layer in range(config.num_layers)]
        self._head = None if config.head is None else ClassifierHead(config.head, config, options)
        named = [*zip(config.embeddings, tables, strict=True), *zip(config.norms, norms, strict=True)]
        self.parts = (
            *((f"{config.prefix}{name}.", part) for name, part in named),
            *((f"{config.prefix}{config.blocks}.{layer}.", block) for layer, block in enumerate(self._blocks)),
            ("", self._head),
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] ids -> token embeddings [T, D], without position and token type embeddings."""
        return self._tokens(token_ids)

    def forward(self, inputs: ModelInputs, attention: StepAttention) -> Tensor:
        """Return [T, D], or [S, D] with ``inputs.outputs``. See ``Model.forward``."""
        if inputs.embeddings is not None:
            x = inputs.embeddings
        else:
            assert inputs.token_ids is not None, "inputs have neither token ids nor embeddings"
            x = self._tokens(inputs.token_ids)
        if self._learned:
            x = x + self._position_embeddings(inputs)
        x = self._first_norm(x)
        step = self._step(inputs.positions, attention)
        for layer, block in enumerate(self._blocks):
            x = block(x, step, outputs=inputs.outputs if layer == len(self._blocks) - 1 else None)
        return self._last_norm[0](x) if self._last_norm else x

    def shortened(self) -> Model:
        model = copy(self)
        model._blocks = self._blocks[-1:]
        return model

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Pooled [S, D] -> scores [S, C] of a classifier. Without a head, return ``hidden``."""
        return hidden if self._head is None else self._head(hidden)

    def _position_embeddings(self, inputs: ModelInputs) -> Tensor:
        """Return the embeddings of positions and token types: [T, D]."""
        positions, types = self._learned
        offset = self._config.position_offset or 0
        embeddings = positions(inputs.positions + offset if offset else inputs.positions)
        return embeddings + (types.weight[0] if inputs.token_types is None else types(inputs.token_types))

    def _step(self, positions: Tensor, attention: StepAttention) -> BlockStep:
        """Return the arguments of the blocks: rotary tables of layers without and with a window. positions: [T]."""
        return BlockStep([rope.tables(positions) for rope in self._ropes], attention)
