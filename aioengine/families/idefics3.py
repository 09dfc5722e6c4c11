"""Idefics3 and SmolVLM without video: a SigLIP tower, pixel shuffle, and a Llama."""

from __future__ import annotations

from typing import ClassVar

from aioengine.families._vision import ImageToken, VisionFamily


class Idefics3Family(VisionFamily, frozen=True, kw_only=True):
    text_types = ("llama",)
    text_defaults: ClassVar[dict[str, object]] = {"rms_norm_eps": 1e-5}
    tower_types = ("", "idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision")
    towers = ("vision_model.", "connector.")
    renamed = (
        ("model.text_model.", "model."),
        ("model.vision_model.", "vision_model."),
        ("model.connector.", "connector."),
    )

    image_token_id: ImageToken = 128_257


PLUGIN = Idefics3Family
