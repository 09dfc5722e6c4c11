"""MiniCPM3: latent attention, MLPs, and factors for embeddings, residuals and logits."""

from __future__ import annotations

import math
from typing import Literal

from msgspec.structs import replace

from aioengine.families._config import DecoderConfig
from aioengine.families._fields import check_factor
from aioengine.families._latent import LatentFamily


class MiniCpm3Family(LatentFamily, frozen=True, kw_only=True):
    max_position_embeddings: int = 32_768
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    rope_interleave: Literal[False] = False
    mlp_bias: bool = False
    kv_lora_rank: int = 256
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int | None = None
    scale_emb: float = 12.0
    scale_depth: float | None = 1.4
    dim_model_base: int | None = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_depth is not None:
            check_factor("scale_depth", self.scale_depth)

    def decoder(self) -> DecoderConfig:
        """Return the decoder.

        We divide the residual stream by the factor of attention and MLP outputs, so these need no factor. The norms
        cancel the factor.
        """
        decoder = super().decoder()
        depth = 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.num_hidden_layers)
        return replace(
            decoder,
            epsilon=decoder.epsilon / depth**2,
            mlp=replace(decoder.mlp, has_bias=self.mlp_bias),
            embedding_scale=self.scale_emb,
            stream_scale=1 / depth,
            logits_scale=1.0 if self.dim_model_base is None else self.dim_model_base / self.hidden_size,
        )


PLUGIN = MiniCpm3Family
