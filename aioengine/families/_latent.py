"""Families with multi-head latent attention (arXiv 2405.04434): the base class, Youtu-LLM and MiniCPM3. Torch-free."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, LatentConfig
from aioengine.families._config import DecoderConfig, DecoderFamily
from aioengine.families._fields import check_factor, not_implemented
from aioengine.families._rope_config import RopeConfig


class LatentFamily(DecoderFamily, frozen=True, kw_only=True):
    """The fields of config.json for multi-head latent attention."""

    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int | None = 128
    attention_bias: bool = False
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        for name, size in (("kv_lora_rank", self.kv_lora_rank), ("qk_rope_head_dim", self.qk_rope_head_dim)):
            if size % 2:
                not_implemented(name, size, "an even number")
        super().__post_init__()
        num_heads, rotated = self.num_attention_heads, self.qk_rope_head_dim
        if self.head_dim not in (None, rotated):
            not_implemented("head_dim", self.head_dim, f"qk_rope_head_dim ({rotated}) or null")
        if self.num_kv_heads != num_heads:
            not_implemented("num_key_value_heads", self.num_kv_heads, f"num_attention_heads ({num_heads}) or null")
        if self.attention_bias and self.q_lora_rank is None:
            not_implemented("attention_bias", self.attention_bias, "false if q_lora_rank is null")

    @property
    def head_size(self) -> int:
        """The size of a key in the KV cache: latent vector and rotary part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def value_size(self) -> int:
        """The size of a value head. The default is hidden size / number of heads."""
        return self.hidden_size // self.num_attention_heads if self.v_head_dim is None else self.v_head_dim

    @property
    def rope_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(
            scale=self._scale(self.rope),
            is_interleaved=self.rope_interleave,
            latent=LatentConfig(
                rank=self.kv_lora_rank,
                query_rank=self.q_lora_rank,
                plain_size=self.qk_nope_head_dim,
                rotated_size=self.qk_rope_head_dim,
                value_size=self.value_size,
            ),
        )

    def decoder(self) -> DecoderConfig:
        return replace(super().decoder(), num_kv_heads=1)

    def _scale(self, rope: RopeConfig) -> float:
        """Return the factor of the attention scores: 1 / sqrt(query head size), times the square of YaRN's mscale."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if rope.rope_type == "default" or not rope.mscale_all_dim:
            return scale
        if rope.factor is None:
            not_implemented("rope_parameters.factor", None, "a number if mscale_all_dim is set")
        magnitude = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        return scale * magnitude * magnitude


class YoutuFamily(LatentFamily, frozen=True, kw_only=True):
    """Youtu-LLM: latent attention as in DeepSeek-V3, and an MLP in all layers."""

    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = True


class MiniCpm3Family(LatentFamily, frozen=True, kw_only=True):
    """MiniCPM3: latent attention, MLPs, and factors for embeddings, residuals and logits."""

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
    embedding_scale: float = field(default=12.0, name="scale_emb")
    scale_depth: float | None = 1.4
    dim_model_base: int | None = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_depth is not None:
            check_factor("scale_depth", self.scale_depth)

    def decoder(self) -> DecoderConfig:
        """Return the decoder.

        MiniCPM3 multiplies the outputs of attention and MLP by ``depth`` before it adds them to the residual stream.
        We instead divide the inputs of the first block by ``depth``, so the whole residual stream is divided by it. The
        norms cancel this constant, because their epsilon is divided by its square.
        """
        depth = 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.num_hidden_layers)
        return replace(
            super().decoder(),
            epsilon=self.rms_norm_eps / depth**2,
            stream_scale=1 / depth,
            logits_scale=1.0 if self.dim_model_base is None else self.dim_model_base / self.hidden_size,
        )
