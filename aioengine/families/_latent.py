"""Families with multi-head latent attention (arXiv 2405.04434), such as DeepSeek and MiniCPM3. Torch-free."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, LatentConfig
from aioengine.families._config import DecoderConfig, DecoderFamily
from aioengine.families._experts import ExpertsConfig, RouterConfig, SharedConfig
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
        # Heads are rotated in pairs of elements. The base class also requires an even head size, which is the sum of
        # both fields here, but its error would name head_dim.
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


class DeepseekFamily(LatentFamily, frozen=True, kw_only=True):
    """The fields that DeepSeek-V2 and DeepSeek-V3 share.

    Attributes:
        num_shared_experts: number of shared experts, which form one MLP.
        num_nextn_predict_layers, num_mtp_layers: layers for multi-token prediction in the checkpoint. They follow the
            last layer and are not used. The first field takes precedence.
    """

    experts = ExpertsConfig(router=RouterConfig(in_fp32=True))
    limits = dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "num_shared_experts"), (0, 2**14))

    first_k_dense_replace: int = 0
    num_experts: int = field(default=64, name="n_routed_experts")
    num_shared_experts: int | None = field(default=2, name="n_shared_experts")
    moe_intermediate_size: int = 1407
    experts_per_token: int = field(name="num_experts_per_tok")
    num_groups: int | None = field(default=None, name="n_group")
    topk_group: int | None = None
    norm_topk_prob: bool | None = False
    routed_scaling_factor: float = 1.0
    moe_layer_freq: Literal[1] = 1
    num_nextn_predict_layers: int | None = None
    num_mtp_layers: int = 0

    @property
    def groups(self) -> tuple[int, int]:
        """The number of expert groups, and the number of groups that the experts of a token come from."""
        num_groups = self.num_groups or 1
        return num_groups, num_groups if self.topk_group is None else self.topk_group

    @property
    def dense_layers(self) -> frozenset[int]:
        """The layers with an MLP instead of experts."""
        return frozenset(range(min(self.first_k_dense_replace, self.num_hidden_layers)))

    @property
    def ignored(self) -> tuple[str, ...]:
        """The layers for multi-token prediction."""
        num_extra = self.num_mtp_layers if self.num_nextn_predict_layers is None else self.num_nextn_predict_layers
        return tuple(f"model.layers.{self.num_hidden_layers + extra}." for extra in range(num_extra))

    def sized_experts(self) -> ExpertsConfig:
        experts, (num_groups, top_groups) = super().sized_experts(), self.groups
        assert experts is not None, "this family has experts"
        scale, shared_size = self.routed_scaling_factor, self.moe_intermediate_size * (self.num_shared_experts or 0)
        return replace(
            experts,
            router=replace(experts.router, scale=scale, num_groups=num_groups, top_groups=top_groups),
            shared=SharedConfig(inner_size=shared_size, name="shared_experts") if shared_size else None,
            dense_layers=self.dense_layers,
        )


class DeepseekV2Family(DeepseekFamily, frozen=True, kw_only=True):
    """DeepSeek-V2, DeepSeek-V2-Lite: a token uses the best experts overall, or of the groups with the best expert."""

    rope_interleave: Literal[True] = True
    mlp_bias: Literal[False] = False
    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    norm_topk_prob: Literal[False] | None = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topk_method == "group_limited_greedy" and None in (self.num_groups, self.topk_group):
            not_implemented("n_group", self.num_groups, "numbers in n_group and topk_group with 'group_limited_greedy'")

    @property
    def groups(self) -> tuple[int, int]:
        return super().groups if self.topk_method == "group_limited_greedy" else (1, 1)


class DeepseekV3Family(DeepseekFamily, frozen=True, kw_only=True):
    """DeepSeek-V3, R1, Moonlight: score and bias select experts, from the groups with the best sum of two experts."""

    experts = ExpertsConfig(router=RouterConfig(in_fp32=True, has_choice_bias=True, scoring="sigmoid", group_top=2))

    num_key_value_heads: int | None = 128
    max_position_embeddings: int = 4096
    first_k_dense_replace: int = 3
    num_experts: int = field(default=256, name="n_routed_experts")
    num_shared_experts: int | None = field(default=1, name="n_shared_experts")
    moe_intermediate_size: int = 2048
    experts_per_token: int = field(default=8, name="num_experts_per_tok")
    num_groups: int | None = field(default=8, name="n_group")
    topk_group: int | None = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    num_mtp_layers: int = 1


class Glm4MoeLiteFamily(DeepseekV3Family, frozen=True, kw_only=True):
    """GLM-4.7-Flash: DeepSeek-V3 with a list of layers with experts."""

    num_key_value_heads: int | None = 20
    max_position_embeddings: int = 202_752
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    first_k_dense_replace: Literal[1] = 1
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    num_experts: int = field(default=64, name="n_routed_experts")
    moe_intermediate_size: int = 1536
    experts_per_token: int = field(default=4, name="num_experts_per_tok")
    num_groups: int | None = field(default=1, name="n_group")
    topk_group: int | None = 1
    routed_scaling_factor: float = 1.8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_length("mlp_layer_types", self.mlp_layer_types)

    @property
    def dense_layers(self) -> frozenset[int]:
        if self.mlp_layer_types is None:
            return super().dense_layers
        return frozenset(layer for layer, kind in enumerate(self.mlp_layer_types) if kind == "dense")
