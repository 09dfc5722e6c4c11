"""The blocks of a decoder, made of what its config says: norms, attention, and an MLP or what takes its place.

T tokens, D model size, S chosen tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioengine.layers.attention import SelfAttention
from aioengine.layers.delta_net import GatedDeltaNet
from aioengine.layers.experts import SparseMLP
from aioengine.layers.latent_attention import LatentAttention
from aioengine.layers.layer import Layer
from aioengine.layers.mamba import Mamba
from aioengine.layers.mlp import MLP
from aioengine.layers.norm import add_to_stream, make_norm
from aioengine.layers.short_conv import ShortConv
from aioengine.layers.state_layer import StateLayer

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, StepAttention
    from aioengine.families._config import DecoderConfig
    from aioengine.layers.adapters import AdapterRows, Grouping
    from aioengine.layers.norm import Norm
    from aioengine.layers.placement import Placement
    from aioengine.layers.states import StepStates

    Tables = tuple[Tensor, Tensor]


def make_attention(
    config: DecoderConfig, layer: int, shape: AttentionShape, placement: Placement
) -> SelfAttention | LatentAttention | StateLayer:
    """The attention of this layer. Another kind is made here, as its config says."""
    if config.attention.latent is not None:
        return LatentAttention(
            config.hidden_size,
            shape,
            placement,
            config=config.attention,
            latent=config.attention.latent,
            expansion=shape.expansions[layer] if shape.expansions else None,
        )
    if config.keeps_state(layer):
        if config.short_conv is not None:
            return ShortConv(config.hidden_size, config.short_conv, placement)
        if config.mamba is not None:
            return Mamba(config.hidden_size, config.mamba, placement)
        assert config.delta_net is not None, "no layer keeps a state"
        return GatedDeltaNet(config.hidden_size, config.delta_net, config.epsilon, placement)
    rope = config.rope_of(layer)
    return SelfAttention(
        config.hidden_size,
        shape,
        placement,
        config=config.attention,
        epsilon=config.epsilon,
        rotary_size=config.head_size if rope is None else rope.rotary_size(config.head_size),
        is_transposed=config.is_transposed,
    )


def make_mlp(config: DecoderConfig, layer: int, placement: Placement) -> MLP | SparseMLP:
    """The MLP of this layer, or its experts. Another kind is made here, as its config says."""
    if (experts := config.experts_of(layer)) is not None:
        return SparseMLP(config.hidden_size, experts, placement)
    return MLP(
        config.hidden_size,
        config.intermediate_size,
        placement,
        config=config.mlp,
        is_transposed=config.is_transposed,
    )


@dataclass(frozen=True, slots=True)
class BlockStep:
    """The arguments that all blocks of a step share.

    Attributes:
        tables: of each rotary embedding of the model.
        states: None for a model that keeps none.
    """

    tables: list[Tables]
    attention: StepAttention
    adapters: AdapterRows | None = None
    states: StepStates | None = None


class Block(Layer):
    """Attention and an MLP, each with a norm before or behind it, or both; see ``BlockConfig``.

    Args:
        rope: the index of its rotary embedding in ``BlockStep.tables``.
        previous_norm: ``output_norm`` of the block before.

    Attributes:
        output_norm: the norm of what a call returns to be added to the stream; None: there is none.
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
        self._layer, self._rope = config.layers_like(layer).index(layer), rope
        norms = {name: make_norm(config.norm, config.hidden_size, config.epsilon, placement) for name in block.norms}
        self._attention_norm = norms.get(block.attention_norm)
        self._attention = make_attention(config, layer, shape, placement)
        self._attention_output_norm = norms.get(block.attention_output_norm)
        self._mlp_norm = norms.get(block.mlp_norm)
        self._mlp = make_mlp(config, layer, placement)
        self.output_norm = norms.get(block.mlp_output_norm)
        self._previous_norm = previous_norm
        prefix = block.attention
        if config.stateful is not None and config.keeps_state(layer):
            prefix = config.stateful.prefix
        self.parts = (
            (prefix, self._attention),
            (block.mlp, self._mlp),
            *((f"{name}.", norm) for name, norm in norms.items()),
        )

    def __call__(
        self, x: Tensor, delta: Tensor | None, step: BlockStep, *, outputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One block over x [T, D].

        Args:
            x: the residual stream, changed in place.
            delta: [T, D], the output of the block before, not yet normed and added to x; None for the first block.
            outputs: [S] int64, the tokens that are computed after attention; None: all.

        Returns:
            The stream and what is to be added to it next, behind ``output_norm``: [T, D] or [S, D] each.
        """
        if delta is not None:
            normed = add_to_stream(delta, x, self._previous_norm, self._attention_norm)
        else:
            normed = x if self._attention_norm is None else self._attention_norm(x)
        adapters = step.adapters
        attended = self._attended(normed, step, outputs=outputs)
        rows = None if adapters is None else adapters.tokens
        if outputs is not None:
            x = x.index_select(0, outputs)
            rows = None if adapters is None else adapters.outputs
        if self._config.is_parallel:
            return x, self._beside(x, normed, attended, rows, outputs=outputs)
        return x, self._mlp(add_to_stream(attended, x, self._attention_output_norm, self._mlp_norm), rows)

    def _attended(self, normed: Tensor, step: BlockStep, *, outputs: Tensor | None) -> Tensor:
        """normed [T, D] -> [T, D], or of ``outputs`` [S, D]."""
        if isinstance(self._attention, StateLayer):
            assert step.states is not None, "the model keeps states"
            return self._attention(normed, step.states, self._layer, outputs=outputs, adapters=step.adapters)
        tables = step.tables[self._rope]
        return self._attention(normed, tables, step.attention, self._layer, outputs=outputs, adapters=step.adapters)

    def _beside(
        self, x: Tensor, normed: Tensor, attended: Tensor, rows: Grouping | None, *, outputs: Tensor | None
    ) -> Tensor:
        """The sum of ``attended`` [S, D] and of the MLP of the same stream: x [S, D], or what attention read [T, D]."""
        if self._mlp_norm is not None:
            normed = self._mlp_norm(x)
        elif outputs is not None:
            normed = normed.index_select(0, outputs)
        return attended.add_(self._mlp(normed, rows))
