"""How prompts contain images, by ``model_type``: placeholders, and the tokens that replace them."""

from typing import Final

ALIASES: Final = {
    "gemma3": "_families:Gemma3Images",
    "idefics3": "_families:Idefics3Images",
    "llava": "_families:LlavaImages",
    "qwen2_5_vl": "_families:QwenImages",
    "qwen2_vl": "_families:QwenImages",
    "qwen3_vl": "_families:QwenImages",
    "smolvlm": "_families:SmolVlmImages",
}
"""Model type -> "file:class"."""
