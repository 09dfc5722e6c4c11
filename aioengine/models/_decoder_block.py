"""The blocks of decoder models: norms, attention or its replacement, and MLP or experts.

Shape letters: T tokens, S output tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.layers.attention import SelfAttention
from aioengine.layers.experts import SparseMLP
from aioengine.layers.latent_attention import LatentAttention
from aioengine.layers.layer import Layer
from aioengine.layers.mlp import MLP
from aioengine.layers.norm import add_to_stream, make_norm
from aioengine.layers.recurrent import GatedDeltaNet, Mamba, ShortConv

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape
    from aioengine.families._config import DecoderConfig
    from aioengine.layers.adapters import Grouping
    from aioengine.layers.mixer import BlockStep, Mixer
    from aioengine.layers.norm import Norm
    from aioengine.layers.placement import Placement


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
        self.parts = (
            (config.mixer_prefix(layer), self._attention),
            (block.mlp, self._mlp),
            *((f"{name}.", norm) for name, norm in norms.items()),
        )

    def __call__(
        self, x: Tensor, delta: Tensor | None, step: BlockStep, *, outputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the block on x [T, D].

        Args:
            x: the residual stream, changed in place.
            delta: [T, D], the pending update of the previous block, before its ``output_norm``; None in the first
                block.
            outputs: [S] int64, the tokens to compute after attention; None for all.

        Returns:
            The residual stream and the pending update: [T, D] or [S, D] each.
        """
        if delta is not None:
            normed = add_to_stream(delta, x, self._previous_norm, self._attention_norm)
        else:
            normed = x if self._attention_norm is None else self._attention_norm(x)
        attended = self._attention(normed, step, self._layer, outputs=outputs)
        rows = step.rows(outputs)
        if outputs is not None:
            x = x.index_select(0, outputs)
        if self._config.is_parallel:
            return x, self._parallel(x, normed, attended, rows, outputs=outputs)
        return x, self._mlp(add_to_stream(attended, x, self._attention_output_norm, self._mlp_norm), rows)

    def _parallel(
        self, x: Tensor, normed: Tensor, attended: Tensor, rows: Grouping | None, *, outputs: Tensor | None
    ) -> Tensor:
        """Return ``attended`` [S, D] plus the MLP's output [S, D] in a parallel block.

        The MLP reads the norm of x [S, D], or without an ``mlp_norm`` the input of attention, normed [T, D].
        """
        if self._mlp_norm is not None:
            normed = self._mlp_norm(x)
        elif outputs is not None:
            normed = normed.index_select(0, outputs)
        return attended.add_(self._mlp(normed, rows))
