"""Granite: Llama with factors for embeddings, residuals, attention scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, MambaConfig, MlpConfig
from aioengine.families._config import DecoderConfig
from aioengine.families._experts import ExpertsConfig, RouterConfig
from aioengine.families._fields import check_factor, not_implemented
from aioengine.families._rope_config import RopeConfig
from aioengine.families.llama import LlamaFamily

_NO_LIMIT: Final = float("inf")


class GraniteFamily(LlamaFamily, frozen=True, kw_only=True):
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
        router=RouterConfig(name="router.layer"),
        stored="packed",
        names=("input_linear.weight", "output_linear.weight"),
    )

    num_experts: int = field(default=8, name="num_local_experts")
    experts_per_token: int = field(default=2, name="num_experts_per_tok")


class GraniteMoeHybridFamily(GraniteFamily, frozen=True, kw_only=True):
    """Granite 4 without experts: Mamba 2 layers instead of attention in some layers, or in none."""

    limits: ClassVar[Mapping[str, tuple[int, int]]] = {
        "num_local_experts": (0, 2**14),
        "shared_intermediate_size": (1, 2**24),
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
            self._check_mamba()

    def _check_mamba(self) -> None:
        inner = self.mamba_expand * self.hidden_size
        if not 1 <= self.mamba_n_heads <= 2**14 or inner < 1 or inner % self.mamba_n_heads:
            not_implemented("mamba_n_heads", self.mamba_n_heads, f"a divisor of {inner}")
        if self.mamba_d_head not in ("auto", inner // self.mamba_n_heads):
            not_implemented("mamba_d_head", self.mamba_d_head, f"{inner // self.mamba_n_heads}")
        for name, size in (("mamba_d_state", self.mamba_d_state), ("mamba_d_head", inner // self.mamba_n_heads)):
            if not 1 <= size <= 256:
                not_implemented(name, size, "1 to 256")
        if not 2 <= self.mamba_d_conv <= 64:
            not_implemented("mamba_d_conv", self.mamba_d_conv, "2 to 64")

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


PLUGIN = GraniteFamily
