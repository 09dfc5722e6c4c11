"""Llama, and families that differ from it by a few fields: Mistral, Granite, Cohere and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta, field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, MambaConfig, MlpConfig, NormConfig
from aioengine.families._config import DecoderConfig, DecoderFamily
from aioengine.families._experts import ExpertsConfig, RouterConfig
from aioengine.families._fields import check_factor, not_implemented
from aioengine.families._rope_config import RopeConfig


class LlamaFamily(DecoderFamily, frozen=True, kw_only=True):
    """Llama, with optional biases in attention and MLP."""

    attention_bias: bool = False
    mlp_bias: bool = False


class SeedOssFamily(DecoderFamily, frozen=True, kw_only=True):
    """Seed-OSS: Llama with biases on queries, keys and values."""

    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 524_288
    qkv_bias: bool = field(default=True, name="attention_bias")
    output_bias: bool = field(default=False, name="attention_out_bias")
    mlp_bias: bool = False


class Ernie45Family(DecoderFamily, frozen=True, kw_only=True):
    """ERNIE 4.5, dense: Llama with interleaved rotary embedding."""

    mlp_bias = None
    default_theta = 5e5
    attention = AttentionConfig(is_interleaved=True)

    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = True
    attention_bias: bool | None = field(default=False, name="use_bias")


class GlmFamily(DecoderFamily, frozen=True, kw_only=True):
    """GLM-4 (2024) and GLM-Edge: interleaved rotary embedding on half of each head."""

    default_partial = 0.5
    attention = AttentionConfig(is_interleaved=True)
    mlp = MlpConfig(first=("gate_up_proj",))

    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1.5625e-7
    max_position_embeddings: int = 131_072
    qkv_bias: bool = field(default=True, name="attention_bias")


class Glm4Family(GlmFamily, frozen=True, kw_only=True):
    """GLM-4 (2025): norms before and after attention and MLP."""

    block = BlockConfig(attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm")


class SmolLM3Family(LlamaFamily, frozen=True, kw_only=True):
    """SmolLM3: Llama without rotary embedding in every fourth layer."""

    default_theta = 2e6

    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Annotated[int, Meta(ge=1)] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_length("no_rope_layers", self.rotated)

    def has_window(self, layer: int) -> bool:
        return not self.rotated[layer]  # as in transformers, if the file sets a window

    @property
    def rotated(self) -> list[bool]:
        """For each layer, whether it has a rotary embedding."""
        if self.no_rope_layers is not None:  # despite its name, 1 means that a layer has one
            return [bool(value) for value in self.no_rope_layers[: self.num_hidden_layers]]
        return [(layer + 1) % self.no_rope_layer_interval != 0 for layer in range(self.num_hidden_layers)]

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        rope = self.rope
        return tuple(rope if is_rotated else None for is_rotated in self.rotated)


class MistralFamily(DecoderFamily, frozen=True, kw_only=True):
    """Mistral: Llama without biases, and a sliding window in all layers or in none."""

    has_one_window = True

    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096


class MinistralFamily(MistralFamily, frozen=True, kw_only=True):
    """Ministral: Mistral with a sliding window in some layers."""

    has_one_window = False


class MixtralFamily(MistralFamily, frozen=True, kw_only=True):
    """Mixtral: Mistral with experts in all layers. ``router_jitter_noise`` affects training only."""

    default_theta = 1e6
    block = BlockConfig(mlp="block_sparse_moe.")
    experts = ExpertsConfig(names=("w1", "w3", "w2"))

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_experts: int = field(default=8, name="num_local_experts")
    experts_per_token: int = field(default=2, name="num_experts_per_tok")


_NO_LIMIT: Final = float("inf")


class GraniteFamily(LlamaFamily, frozen=True, kw_only=True):
    """Granite: Llama with factors for embeddings, residuals, attention scores and logits."""

    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor("logits_scaling", abs(self.logits_scaling))
        check_factor("residual_multiplier", self.residual_multiplier)

    def decoder(self) -> DecoderConfig:
        """Return the decoder.

        We scale the residual stream by 1 / ``residual_multiplier``, so attention and MLP outputs need no factor. The
        norms cancel the factor.
        """
        return replace(
            super().decoder(),
            epsilon=self.rms_norm_eps / self.residual_multiplier**2,
            stream_scale=self.embedding_multiplier / self.residual_multiplier,
            logits_scale=1 / self.logits_scaling,
        )

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(scale=self.attention_multiplier)


class GraniteMoeFamily(GraniteFamily, frozen=True, kw_only=True):
    """GraniteMoE: Granite with experts in all layers."""

    block = BlockConfig(mlp="block_sparse_moe.")
    experts = ExpertsConfig(
        router=RouterConfig(name="router.layer"), stored="packed", names=("input_linear.weight", "output_linear.weight")
    )

    num_experts: int = field(default=8, name="num_local_experts")
    experts_per_token: int = field(default=2, name="num_experts_per_tok")


class GraniteMoeHybridFamily(GraniteFamily, frozen=True, kw_only=True):
    """Granite 4 without experts: Mamba 2 layers instead of attention in some layers, or in none."""

    limits: ClassVar[Mapping[str, tuple[int, int]]] = {
        "num_local_experts": (0, 2**14),
        "shared_intermediate_size": (1, 2**24),
        "mamba_n_heads": (1, 2**14),
        "mamba_d_state": (1, 256),
        "mamba_d_conv": (2, 64),
    }
    block = BlockConfig(mlp="shared_mlp.")
    mlp = MlpConfig(first=("input_linear",), second="output_linear")

    layer_types: list[Literal["attention", "full_attention", "mamba", "linear_attention"]] | None = None
    num_local_experts: int = 8
    shared_intermediate_size: int = 1024
    position_embedding_type: Literal["rope", "nope"] | None = None
    mamba_n_heads: int = 128
    mamba_n_groups: Literal[1] = 1
    mamba_d_state: int = 256
    mamba_d_head: int | Literal["auto"] = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float | dict[str, str], float | dict[str, str]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_local_experts:
            not_implemented("num_local_experts", self.num_local_experts, "0")
        if len(self.mamba_layers) == self.num_hidden_layers:
            not_implemented("layer_types", self.layer_types, "attention in at least one layer")
        if self.mamba_layers:
            self._check_heads()

    def _check_heads(self) -> None:
        inner = self.mamba_expand * self.hidden_size
        head_size = inner // self.mamba_n_heads
        if inner < 1 or inner % self.mamba_n_heads:
            not_implemented("mamba_n_heads", self.mamba_n_heads, f"a divisor of {inner}")
        if self.mamba_d_head not in ("auto", head_size):
            not_implemented("mamba_d_head", self.mamba_d_head, f"{head_size}")
        if head_size > 256:
            not_implemented("mamba_d_head", head_size, "1 to 256")

    @property
    def mamba_layers(self) -> frozenset[int]:
        """The Mamba 2 layers."""
        kinds = self.layer_types or ["mamba"] * self.num_hidden_layers
        return frozenset(layer for layer, kind in enumerate(kinds) if kind in ("mamba", "linear_attention"))

    @property
    def time_limits(self) -> tuple[float, float]:
        """Minimum and maximum of the time step. transformers writes infinity as an object."""
        minimum, maximum = self.time_step_limit or (0.0, _NO_LIMIT)
        if isinstance(maximum, dict) and maximum == {"__float__": "Infinity"}:
            maximum = _NO_LIMIT
        if isinstance(minimum, dict) or isinstance(maximum, dict) or not 0 <= minimum < maximum:
            not_implemented("time_step_limit", self.time_step_limit, "two non-negative numbers in ascending order")
        return minimum, maximum

    @property
    def mamba(self) -> MambaConfig | None:
        """The config of the Mamba 2 layers; None if all layers have attention."""
        if not self.mamba_layers:
            return None
        return MambaConfig(
            layers=self.mamba_layers,
            num_heads=self.mamba_n_heads,
            num_groups=self.mamba_n_groups,
            value_size=self.mamba_expand * self.hidden_size // self.mamba_n_heads,
            key_size=self.mamba_d_state,
            width=self.mamba_d_conv,
            has_conv_bias=self.mamba_conv_bias,
            has_bias=self.mamba_proj_bias,
            time_limits=self.time_limits,
            epsilon=self.rms_norm_eps,
        )

    @property
    def keeps_states(self) -> bool:
        return bool(self.mamba_layers)

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        return () if self.position_embedding_type == "rope" else (None,) * self.num_hidden_layers

    def decoder(self) -> DecoderConfig:
        decoder = super().decoder()
        mlp = replace(decoder.mlp, has_bias=False)
        return replace(decoder, intermediate_size=self.shared_intermediate_size, mlp=mlp)


class CohereFamily(DecoderFamily, frozen=True, kw_only=True):
    """Cohere (Command R, R+, Aya): parallel attention and MLP, LayerNorm, interleaved rotary embedding."""

    default_theta = 5e5
    norm = NormConfig(kind="layer")
    block = BlockConfig(is_parallel=True, mlp_norm="")

    rms_norm_eps: float = field(default=1e-5, name="layer_norm_eps")
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    logits_scale: float = field(default=0.0625, name="logit_scale")
    attention_bias: bool = False
    use_qk_norm: bool = False

    @property
    def attention(self) -> AttentionConfig:
        head_norm = HeadNorm(norm=self.norm, extent="each_head") if self.use_qk_norm else None
        return AttentionConfig(is_interleaved=True, head_norm=head_norm)


class Cohere2Family(CohereFamily, frozen=True, kw_only=True):
    """Cohere 2 (Command R7B, Command A): Cohere with sliding windows, no RoPE in full-attention layers."""

    default_theta = 10_000.0

    use_qk_norm: Literal[False] | None = False
    sliding_window: int | None = 4096
    sliding_window_pattern: Annotated[int, Meta(ge=1)] = 4

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        rope, windows = self.rope, self.windows or (None,) * self.num_hidden_layers
        return tuple(None if window is None else rope for window in windows)


PLUGIN = LlamaFamily
