"""The decoder that most families share: pre-norm blocks of attention and a gated MLP, rotary positions.

A family's file in ``families`` reads its config.json.
T tokens, D model size, V vocabulary, S sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aioengine.attention._base import AttentionShape
from aioengine.families._config import Task
from aioengine.families._tensors import is_ignored
from aioengine.layers.attention import SelfAttention
from aioengine.layers.embedding import Embedding
from aioengine.layers.linear import Linear
from aioengine.layers.mlp import GatedMLP
from aioengine.layers.norm import RMSNorm
from aioengine.layers.placement import Placement
from aioengine.layers.rope import RotaryEmbedding
from aioengine.models._base import InputSpec

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import StepAttention
    from aioengine.families._config import DecoderConfig
    from aioengine.kernels.linear import Matmul
    from aioengine.layers.adapters import AdapterRows
    from aioengine.layers.placement import Target
    from aioengine.models._base import ModelInputs, ModelOptions


@dataclass(frozen=True, slots=True)
class _Step:
    """The arguments that all blocks of a step share."""

    tables: tuple[Tensor, Tensor]
    attention: StepAttention
    adapters: AdapterRows | None = None


class _Block:
    def __init__(self, config: DecoderConfig, shape: AttentionShape, placement: Placement) -> None:
        self._attention_norm = RMSNorm(config.hidden_size, config.epsilon, placement)
        self._attention = SelfAttention(
            config.hidden_size,
            shape,
            placement,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            head_norm=config.head_norm,
        )
        self._mlp_norm = RMSNorm(config.hidden_size, config.epsilon, placement)
        self._mlp = GatedMLP(config.hidden_size, config.intermediate_size, placement, bias=config.mlp_bias)

    def weights(self, prefix: str) -> dict[str, Target]:
        return (
            self._attention_norm.weights(f"{prefix}input_layernorm")
            | self._attention.weights(f"{prefix}self_attn.")
            | self._mlp_norm.weights(f"{prefix}post_attention_layernorm")
            | self._mlp.weights(f"{prefix}mlp.")
        )

    def linears(self, prefix: str) -> list[tuple[str, Linear]]:
        """Each linear layer, with the prefix of its parts in the checkpoint."""
        in_attention = [(f"{prefix}self_attn.", linear) for linear in self._attention.linears()]
        return in_attention + [(f"{prefix}mlp.", linear) for linear in self._mlp.linears()]

    def finish_loading(self) -> None:
        self._attention.finish_loading()
        self._mlp.finish_loading()

    def open_for_loading(self) -> None:
        self._attention.open_for_loading()
        self._mlp.open_for_loading()

    def __call__(
        self, x: Tensor, delta: Tensor | None, step: _Step, layer: int, *, outputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One block over x [T, D].

        Args:
            x: the residual stream, changed in place.
            delta: [T, D], the output of the block before, not yet added to x; None for the first block.
            outputs: [S] int64, the tokens that are computed after attention; None: all.

        Returns:
            The stream and what is to be added to it next, [T, D] or [S, D] each.
        """
        normed = self._attention_norm(x) if delta is None else self._attention_norm.after(delta, x)
        adapters = step.adapters
        attended = self._attention(normed, step.tables, step.attention, layer, outputs=outputs, adapters=adapters)
        rows = None if adapters is None else adapters.tokens
        if outputs is not None:
            x = x.index_select(0, outputs)
            rows = None if adapters is None else adapters.outputs
        return x, self._mlp(self._mlp_norm.after(attended, x), rows)


def reached_windows(windows: tuple[int | None, ...], longest: int) -> tuple[int | None, ...]:
    """The windows of layers without those that rows of ``longest`` positions do not exceed; empty if none is left."""
    kept = tuple(None if window is None or window >= longest else window for window in windows)
    return kept if any(kept) else ()


class Decoder:
    """See ``models._base.Model``; families subclass it only to read their config."""

    def __init__(self, config: DecoderConfig, options: ModelOptions) -> None:
        self._config = config
        placement = Placement(
            dtype=options.dtype,
            device=options.device,
            linear_format=options.linear_format,
            batch_invariant=options.batch_invariant,
        )
        self.attention_shape = AttentionShape(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5,
            is_causal=config.is_causal,
            windows=reached_windows(config.windows, options.max_positions),
        )
        self.task = config.task
        self.input_spec = InputSpec()
        self.dtype = options.dtype
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.prefix = config.prefix
        self.renamed = config.renamed
        self._embedding = Embedding(config.vocab_size, config.hidden_size, placement)
        self._rotary = RotaryEmbedding(
            config.rope,
            config.head_size,
            max_position_embeddings=config.max_position_embeddings,
            num_positions=options.max_positions,
            device=options.device,
        )
        self._blocks = [_Block(config, self.attention_shape, placement) for _ in range(config.num_layers)]
        self._norm = RMSNorm(config.hidden_size, config.epsilon, placement)
        self._head = Linear(config.hidden_size, config.head, placement) if config.head else None
        self._logits: Matmul | None = self._head

    def weights(self) -> dict[str, Target]:
        found = self._embedding.weights("model.embed_tokens") | self._norm.weights("model.norm")
        for index, block in enumerate(self._blocks):
            found |= block.weights(f"model.layers.{index}.")
        return found if self._head is None else found | self._head.weights("")

    def linears(self) -> list[tuple[str, Linear]]:
        """See ``models._base.AdaptableModel``."""
        return [found for index, block in enumerate(self._blocks) for found in block.linears(f"model.layers.{index}.")]

    def is_ignored(self, name: str) -> bool:
        return is_ignored(self._config, name)

    def finish_loading(self) -> None:
        for block in self._blocks:
            block.finish_loading()
        if self._head is not None:
            self._head.finish_loading()
        elif self.task is Task.GENERATE:
            self._logits = self._embedding.as_head()

    def open_for_loading(self) -> None:
        for block in self._blocks:
            block.open_for_loading()
        if self._head is not None:
            self._head.open_for_loading()

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] ids -> [T, D]."""
        return self._embedding(token_ids)

    def forward(self, inputs: ModelInputs, attention: StepAttention) -> Tensor:
        """[T, D], or [S, D] of ``inputs.outputs``; see ``Model.forward``."""
        step = _Step(self._rotary.tables(inputs.positions), attention, inputs.adapters)
        if inputs.embeddings is not None:
            x = inputs.embeddings.clone()  # the blocks change it in place
        else:
            assert inputs.token_ids is not None, "neither token ids nor embeddings"
            x = self._embedding(inputs.token_ids)
        delta: Tensor | None = None
        for layer, block in enumerate(self._blocks):
            is_last = layer == len(self._blocks) - 1
            x, delta = block(x, delta, step, layer, outputs=inputs.outputs if is_last else None)
            if inputs.deepstack is not None and layer < inputs.deepstack[1].shape[1]:
                x.index_add_(0, inputs.deepstack[0], inputs.deepstack[1][:, layer])
        return self._norm(x) if delta is None else self._norm.after(delta, x)

    def forward_block(self, num_tokens: int, attention: StepAttention) -> None:
        x = self._norm.weight.new_zeros(num_tokens, self.hidden_size)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=x.device)
        self._blocks[0](x, None, _Step(self._rotary.tables(positions), attention), 0, outputs=None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, D] -> [S, V]; of a classifier, its scores; without a head, what is given."""
        if self.task is Task.EMBED:
            return hidden
        assert self._logits is not None, "finish_loading was not called"
        return self._logits(hidden)
