"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with rotary embeddings.

The KV cache holds one latent vector per token. The matrix ``kv_b_proj`` expands it to keys and values of all heads.
This layer computes the absorbed form: it multiplies the queries with the key part of the matrix, and the attention
output with the value part, so keys and values are never materialized. If ``AttentionShape.expansions`` holds the
matrices, the attention backend chooses the form and multiplies with them itself.

Shape letters: T tokens, S selected tokens, D hidden size, H heads, N and P sizes of the parts of a query head without
and with rotary embedding, V latent size, E = V + P key size, O value size of a head, Q outputs of the first matmul.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.attention._base import AttentionShape, StepAttention
from aioengine.families._block_config import AttentionConfig, LatentConfig
from aioengine.families._config import DecoderConfig
from aioengine.families._tensors import mixer_linears
from aioengine.kernels import head_linear
from aioengine.kernels.heads import RotaryTables
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.latent_heads import latent_heads, rotated_queries
from aioengine.layers.heads import pair_order
from aioengine.layers.layer import Placement, Target
from aioengine.layers.linear import Linear
from aioengine.layers.mixer import BlockStep, Mixer
from aioengine.layers.norm import RMSNorm
from aioengine.quantization.stored import StoredFormat

EPSILON = 1e-6
"""Epsilon of the norms of latent vectors. The one in config.json applies to other norms only."""


class LatentAttention(Mixer):
    """[T, D] -> [T, D], or [S, D] for selected tokens. Writes latent vectors to the KV cache."""

    def __init__(
        self, config: DecoderConfig, layer: int, shape: AttentionShape, placement: Placement, *, rope: int
    ) -> None:
        """Allocate the weights. ``rope``: index of the rotary embedding in ``BlockStep.tables``."""
        attention, latent = config.attention, config.attention.latent
        assert latent is not None, "the model has no latent attention"
        expansion = shape.expansions[layer] if shape.expansions else None
        self._rope = rope
        self._sizes = latent
        self._num_heads = num_heads = shape.num_heads
        *query, kv, output = mixer_linears(config, layer)
        queries, latents = _orders(latent, num_heads, attention, placement.device)
        first = self._first_size = query[0].outputs
        first_order = queries if len(query) == 1 else torch.arange(first, device=placement.device)
        order = torch.cat((first_order, first + latents)) if attention.is_interleaved else None
        self._input = Linear.of([query[0], kv], placement, order=order)
        self._query_norm: RMSNorm | None = None
        self._query: Linear | None = None
        if len(query) > 1:
            self._query_norm = RMSNorm(first, EPSILON, placement)
            self._query = Linear.of(query[1:], placement, order=queries if attention.is_interleaved else None)
        self._latent_norm = RMSNorm(latent.rank, EPSILON, placement)
        self._has_forms = expansion is not None
        sizes = num_heads, latent.plain_size + latent.value_size, latent.rank
        self._expansion = placement.empty(*sizes) if expansion is None else expansion
        self._placement = placement
        self._stored: Linear | None = None  # the matrix as the checkpoint stores it, if it is quantized
        self._output = Linear.of([output], placement)
        self.parts = (
            ("", self._input),
            ("q_a_layernorm.", self._query_norm),
            ("", self._query),
            ("kv_a_layernorm.", self._latent_norm),
            ("", self._output),
        )

    def weights(self, prefix: str = "") -> dict[str, Target]:
        if self._stored is None and isinstance(self._placement.format_of(f"{prefix}kv_b_proj"), StoredFormat):
            outputs = self._expansion.flatten(0, 1).shape[0]
            self._stored = Linear(self._sizes.rank, {"kv_b_proj": outputs}, self._placement)
            self._stored.is_adaptable = False
            self.parts = (*self.parts, ("", self._stored))
        return super().weights(prefix)

    def own_weights(self) -> dict[str, Target]:
        return {} if self._stored else {"kv_b_proj.weight": Target(self._expansion.flatten(0, 1))}

    def finish_loading(self) -> None:
        super().finish_loading()
        if self._stored is not None:
            ones = torch.eye(self._sizes.rank, dtype=self._expansion.dtype, device=self._expansion.device)
            self._expansion.flatten(0, 1).copy_(self._stored(ones).t())
        for_keys, for_values = self._expansion.split((self._sizes.plain_size, self._sizes.value_size), dim=1)
        invariant = self._placement.batch_invariant
        self._to_latent = head_linear.prepare(for_keys, batch_invariant=invariant)
        self._from_latent = head_linear.prepare(for_values.transpose(1, 2), batch_invariant=invariant)

    def mix(self, projected: Tensor, step: BlockStep, layer: int) -> tuple[Tensor]:
        """projected [T, Q] -> attention output [T, H * V], or [T, H * O] if the backend chooses the form."""
        tables, attention = step.tables[self._rope], step.attention
        q, latents = projected.tensor_split((self._first_size,), dim=1)
        if self._query is not None and self._query_norm is not None:
            q = self._query(self._query_norm(q), step.grouping(None))
        q = q.unflatten(1, (self._num_heads, -1))
        if self._has_forms:
            return (self._attended(q, latents, tables, attention, layer=layer),)
        target = attention.target(layer)
        direct = target if isinstance(target, KVTarget) else None
        heads = None if direct is None else direct.heads
        if heads is None:
            heads = q.new_empty(len(q), self._num_heads + 1, latents.shape[1])
        norm = self._latent_norm.weight, self._latent_norm.epsilon
        latent_heads(q, latents, heads, norm=norm, tables=tables, target=direct)
        self._to_latent(q[..., : self._sizes.plain_size], heads[:, :-1, : self._sizes.rank])
        q, k = heads[:, :-1], heads[:, -1:]
        v = k[..., : self._sizes.rank]
        if not isinstance(target, KVTarget):
            target(k, v)
        return (attention.attend(q, k, v, layer),)

    def finish(self, mixed: Tensor) -> Tensor:
        """Mixed [S, H * V] or [S, H * O] -> [S, H * O]."""
        if self._has_forms:
            return mixed
        values = mixed.new_empty(len(mixed), self._num_heads, self._sizes.value_size)
        self._from_latent(mixed.unflatten(1, (self._num_heads, -1)), values)
        return values.flatten(1)

    def _attended(
        self, q: Tensor, latents: Tensor, tables: RotaryTables, attention: StepAttention, *, layer: int
    ) -> Tensor:
        """q [T, H, N + P] and latents [T, E] -> [T, H * O]. The attention backend chooses the form."""
        target = attention.target(layer)
        norm = self._latent_norm.weight, self._latent_norm.epsilon
        if isinstance(target, KVTarget):
            q = rotated_queries(q, latents, norm=norm, tables=tables, target=target)
            return attention.attend(q, q[:, :0], q[:, :0], layer)
        keys = latents.new_empty(latents.shape[0], 1, 1, latents.shape[1])
        slots = torch.arange(latents.shape[0], device=latents.device)  # pages of one token
        pages = KVTarget(slots, keys, keys[..., : self._sizes.rank])
        q, k = rotated_queries(q, latents, norm=norm, tables=tables, target=pages), keys[:, 0]
        target(k, k[..., : self._sizes.rank])
        return attention.attend(q, k, k[..., : self._sizes.rank], layer)


def _orders(
    latent: LatentConfig, num_heads: int, config: AttentionConfig, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the checkpoint index of each entry of queries [H * (N + P)] and latent vectors [V + P].

    The kernels rotate the first half of the P entries with the second half.
    """
    size, plain_size = latent.rotated_size, latent.plain_size
    pairs = pair_order(size, size, is_interleaved=config.is_interleaved) or [*range(size)]
    head = torch.tensor([*range(plain_size), *(plain_size + number for number in pairs)], device=device)
    first = torch.arange(num_heads, device=device).unsqueeze(1) * (plain_size + size)
    latents = [*range(latent.rank), *(latent.rank + number for number in pairs)]
    return (first + head).flatten(), torch.tensor(latents, device=device)
