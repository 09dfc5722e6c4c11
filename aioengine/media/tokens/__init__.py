"""How prompts contain images, by ``model_type``: placeholders, and the tokens that replace them."""

from typing import Final

ALIASES: Final = {
    "idefics3": "_tiles:Idefics3Images",
    "qwen2_5_vl": "_qwen:QwenImages",
    "qwen2_vl": "_qwen:QwenImages",
    "qwen3_vl": "_qwen:QwenImages",
    "smolvlm": "_tiles:SmolVlmImages",
}
"""Model type -> "file:class", for model types that share a file."""
