"""ModernBERT: pre-norm, gated MLP, rotary positions, and sliding windows in two of three layers."""

from __future__ import annotations

from typing import Literal

from msgspec import field

from aioengine.families._block_config import LinearShape
from aioengine.families._config import Task
from aioengine.families._encoders import GELU, EncoderFamily, Gelu, HeadConfig
from aioengine.families._fields import not_implemented
from aioengine.families._rope_config import RopeConfig, read_layer_rope

LayerType = Literal["full_attention", "sliding_attention"]


class ModernBertFamily(EncoderFamily, frozen=True, kw_only=True):
    is_pre_norm = True
    is_gated = True
    norms = ("embeddings.norm", "final_norm")
    blocks = "layers"
    block_norms = ("attn_norm", "mlp_norm")
    first_without = "attn_norm"

    hidden_activation: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"] = "gelu"
    epsilon: float = field(default=1e-5, name="norm_eps")
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    local_attention: int = 128
    global_every: int = field(default=3, name="global_attn_every_n_layers")
    layer_types: list[LayerType] | None = None
    global_rope_theta: float = 160_000.0
    local_rope_theta: float | None = 10_000.0
    rope_parameters: dict[LayerType, dict[str, object]] | None = None
    rope_scaling: dict[str, object] | None = None
    sliding_window: int | None = None
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = False
    classifier_activation: Literal["gelu"] = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window not in (None, self.local_attention // 2):
            not_implemented("sliding_window", self.sliding_window, "null or half of local_attention")
        self.check_length("layer_types", self.layer_types)

    @property
    def kinds(self) -> list[LayerType]:
        """``layer_types``, or its default."""
        layers = range(self.num_hidden_layers)
        return self.layer_types or [
            "sliding_attention" if layer % self.global_every else "full_attention" for layer in layers
        ]

    @property
    def ropes(self) -> tuple[RopeConfig, RopeConfig]:
        parameters, full_theta = self.rope_parameters or {}, self.global_rope_theta
        local_theta = full_theta if self.local_rope_theta is None else self.local_rope_theta
        return (
            read_layer_rope(parameters.get("full_attention"), self.rope_scaling, full_theta),
            read_layer_rope(parameters.get("sliding_attention"), self.rope_scaling, local_theta),
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(None if kind == "full_attention" else self.local_attention // 2 for kind in self.kinds)

    @property
    def gelu(self) -> Gelu:
        return GELU[self.hidden_activation]

    @property
    def embeddings(self) -> dict[str, int]:
        return {"embeddings.tok_embeddings": self.vocab_size}

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        outer, inner = self.hidden_size, self.intermediate_size
        return (
            LinearShape("attn.Wqkv", 3 * outer, outer, self.attention_bias),
            LinearShape("attn.Wo", outer, outer, self.attention_bias),
            LinearShape("mlp.Wi", 2 * inner, outer, self.mlp_bias),
            LinearShape("mlp.Wo", outer, inner, self.mlp_bias),
        )

    @property
    def head(self) -> HeadConfig | None:
        if self.task is not Task.CLASSIFY:
            return None
        return HeadConfig(
            dense="head.dense",
            scores="classifier",
            activation="gelu",
            dense_bias=self.classifier_bias,
            norm="head.norm",
        )

    @property
    def ignored(self) -> tuple[str, ...]:
        return ("decoder.",) if self.task is Task.CLASSIFY else ("decoder.", "head.", "classifier.")


PLUGIN = ModernBertFamily
