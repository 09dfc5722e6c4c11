"""[plug-ins] The images of a prompt, by ``model_type``: what stands for them, and how many tokens they take."""

from typing import Final

ALIASES: Final = {
    "idefics3": "_tiles:Idefics3Images",
    "qwen2_5_vl": "_qwen:QwenImages",
    "qwen2_vl": "_qwen:QwenImages",
    "qwen3_vl": "_qwen:QwenImages",
    "smolvlm": "_tiles:SmolVlmImages",
}
"""Model types without a file of their own, see ``plugins``."""
