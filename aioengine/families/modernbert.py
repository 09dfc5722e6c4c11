"""ModernBERT: pre-norm, gated MLP, rotary positions, and sliding windows in two of three layers."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import LinearShape
from aioengine.families._config import Task
from aioengine.families._encoders import GELU, EncoderConfig, EncoderFamily, HeadConfig
from aioengine.families._fields import not_implemented
from aioengine.families._rope_config import RopeConfig, read_layer_rope

LayerType = Literal["full_attention", "sliding_attention"]


class ModernBertFamily(EncoderFamily, frozen=True, kw_only=True):
    hidden_activation: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"] = "gelu"
    epsilon: float = msgspec.field(default=1e-5, name="norm_eps")
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    local_attention: int = 128
    global_every: int = msgspec.field(default=3, name="global_attn_every_n_layers")
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

    def types(self) -> list[LayerType]:
        """Return the type of each layer."""
        types = self.layer_types or [
            "sliding_attention" if layer % self.global_every else "full_attention"
            for layer in range(self.num_hidden_layers)
        ]
        if len(types) != self.num_hidden_layers:
            length = f"of length {len(types)}"
            not_implemented("layer_types", length, f"one entry per layer ({self.num_hidden_layers})")
        return types

    def rope(self, kind: LayerType, theta: float) -> RopeConfig:
        """Return the rotary embedding of a layer type. ``theta``: default of ``rope_theta``."""
        return read_layer_rope((self.rope_parameters or {}).get(kind), self.rope_scaling, theta)

    def encoder(self) -> EncoderConfig:
        outer, inner = self.hidden_size, self.intermediate_size
        head = HeadConfig(
            dense="head.dense",
            scores="classifier",
            activation="gelu",
            dense_bias=self.classifier_bias,
            norm="head.norm",
        )
        is_classifier = self.task is Task.CLASSIFY
        local_theta = self.global_rope_theta if self.local_rope_theta is None else self.local_rope_theta
        return replace(
            super().encoder(),
            is_pre_norm=True,
            is_gated=True,
            gelu=GELU[self.hidden_activation],
            norm_bias=self.norm_bias,
            ropes=(
                self.rope("full_attention", self.global_rope_theta),
                self.rope("sliding_attention", local_theta),
            ),
            windows=tuple(None if kind == "full_attention" else self.local_attention // 2 for kind in self.types()),
            embeddings={"embeddings.tok_embeddings": self.vocab_size},
            norms=("embeddings.norm", "final_norm"),
            blocks="layers",
            linears=(
                LinearShape("attn.Wqkv", 3 * outer, outer, self.attention_bias),
                LinearShape("attn.Wo", outer, outer, self.attention_bias),
                LinearShape("mlp.Wi", 2 * inner, outer, self.mlp_bias),
                LinearShape("mlp.Wo", outer, inner, self.mlp_bias),
            ),
            block_norms=("attn_norm", "mlp_norm"),
            first_without="attn_norm",
            head=head if is_classifier else None,
            classifier_pooling=self.classifier_pooling,
            ignored=("decoder.",) if is_classifier else ("decoder.", "head.", "classifier."),
        )


PLUGIN = ModernBertFamily
