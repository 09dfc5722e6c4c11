"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, and LongRoPE for long contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, MlpConfig
from aioengine.families._config import DecoderConfig, WindowFamily
from aioengine.families._fields import not_implemented


class Phi3Family(WindowFamily, frozen=True, kw_only=True):
    default_partial: ClassVar[float | None] = 1.0
    has_one_window: ClassVar[bool] = True
    mlp = MlpConfig(first=("gate_up_proj",))

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    original_max_position_embeddings: Annotated[int, Meta(ge=1)] = 4096
    sliding_window: int | None = None

    @property
    def rotation(self) -> Mapping[str, object]:
        """``rope_parameters`` with the current name of LongRoPE, and with the original context length."""
        parameters = super().rotation
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type == "default":
            return parameters
        if rope_type not in ("longrope", "su", "yarn"):
            name = "rope_scaling" if self.rope_scaling else "rope_parameters"
            not_implemented(f"{name}.rope_type", rope_type, "longrope")
        original = self.original_max_position_embeddings
        return {**parameters, "rope_type": "longrope", "original_max_position_embeddings": original}

    def decoder(self) -> DecoderConfig:
        return replace(super().decoder(), attention=AttentionConfig(qkv=("qkv_proj",)))


PLUGIN = Phi3Family
