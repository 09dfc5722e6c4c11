"""Tiny random models that read images, arrays of random images, and reference results of transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from aioengine.protocol.messages import Media, Sampling
from tests.kit.tiny_sizes import SIZES

IMAGE = 290
"""The placeholder token."""


def _llava() -> PreTrainedModel:
    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "projection_dim": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "initializer_range": 0.2,
    }
    text = {"model_type": "llama", **SIZES}
    config = LlavaConfig(text_config=text, vision_config=tower, image_token_index=IMAGE, image_seq_length=16)
    return LlavaForConditionalGeneration(config)


def _qwen(model_type: str, head_size: int = 16) -> PreTrainedModel:
    hidden_size = 4 * head_size
    tower = {
        "depth": 3,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "initializer_range": 0.2,
        **QWEN_TOWERS[model_type],
        "hidden_size" if model_type == "qwen2_vl" else "out_hidden_size": hidden_size,
    }
    section = [size * head_size // 16 for size in ((4, 2, 2) if model_type == "qwen3_vl" else (2, 3, 3))]
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": section}
    sizes = {"num_hidden_layers": 3, "head_dim": head_size, "hidden_size": hidden_size}
    text = {**SIZES, **sizes, "rope_parameters": rope}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=tower, image_token_id=IMAGE)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def _gemma3() -> PreTrainedModel:
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "vision_use_head": False,
    }
    text = {
        **SIZES,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "head_dim": 16,
    }
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=tower, image_token_index=IMAGE, mm_tokens_per_image=16
    )
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def _tiles(model_type: str) -> PreTrainedModel:
    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "initializer_range": 0.2,
    }
    text = {"model_type": "llama", **SIZES}
    config = AutoConfig.for_model(
        model_type, text_config=text, vision_config=tower, image_token_id=IMAGE, scale_factor=2
    )
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


QWEN_TOWERS: dict[str, dict[str, object]] = {
    "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    },
}

TILES = "idefics3", "smolvlm"

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    **{model_type: partial(_qwen, model_type) for model_type in QWEN_TOWERS},
    **{model_type: partial(_tiles, model_type) for model_type in TILES},
}


def save_vision_model(model_type: str, folder: Path, *, head_size: int = 16) -> PreTrainedModel:
    """Save and return a random transformers model in fp32. ``head_size``: of Qwen models."""
    torch.manual_seed(5)
    model = (_qwen(model_type, head_size) if model_type in QWEN_TOWERS else MODELS[model_type]()).eval()
    for name, parameter in model.named_parameters():
        is_zero = name.endswith("mm_input_projection_weight")  # these weights of Gemma 3 are zeros before its training
        if is_zero or (parameter.dim() == 1 and name.endswith("bias")):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Picture:
    """The processor's arrays of an image in a file, and its tokens in a prompt."""

    arrays: dict[str, torch.Tensor]
    token_ids: list[int]
    path: Path
    grid: tuple[int, int, int] = (0, 0, 0)

    def media(self, start: int) -> Media:
        content = hashlib.sha256(b"".join(array.numpy().tobytes() for array in self.arrays.values())).digest()
        return Media(start, len(self.token_ids), self.token_ids.count(IMAGE), content, str(self.path), self.grid)


class Pictures:
    """Draws random images for a model type, each in its own file."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self._model_type = model_type
        self._folder = folder / "pictures"
        self._folder.mkdir()
        self._num_drawn = 0

    def draw(self, height: int = 0, width: int = 0) -> Picture:
        """Draw an image. ``height`` and ``width``: in patches, for models with images of any size."""
        self._num_drawn += 1
        torch.manual_seed(100 + self._num_drawn)
        path = self._folder / f"picture-{self._num_drawn}.safetensors"
        if self._model_type in QWEN_TOWERS:
            arrays = {
                "pixel_values": torch.randn(height * width, 3 * 2 * 4 * 4),
                "image_grid_thw": torch.tensor([[1, height, width]]),
            }
            save_file(arrays, path)
            return Picture(arrays, [IMAGE] * (height * width // 4), path, (1, height, width))
        if self._model_type in TILES:
            num_tiles = 1 + height * width // 12
            mask = torch.ones(1, num_tiles, 28, 28, dtype=torch.int64)
            mask[:, -1, 14:] = 0
            arrays = {"pixel_values": torch.randn(1, num_tiles, 3, 28, 28), "pixel_attention_mask": mask}
            save_file(arrays, path)
            tiles = [[281 + tile % 3, *[IMAGE] * 4] for tile in range(num_tiles)]
            return Picture(arrays, [*chain.from_iterable(tiles), 281], path)
        arrays = {"pixel_values": torch.randn(1, 3, 28, 28)}
        save_file(arrays, path)
        return Picture(arrays, [IMAGE] * 16, path)


@dataclass(frozen=True)
class Prompt:
    """Token ids with images."""

    token_ids: list[int] = field(default_factory=list[int])
    media: list[Media] = field(default_factory=list[Media])
    pictures: list[Picture] = field(default_factory=list[Picture])


def prompt_of(*parts: list[int] | Picture) -> Prompt:
    """Return a prompt of texts (token ids) and images, in this order."""
    prompt = Prompt()
    for part in parts:
        if isinstance(part, Picture):
            prompt.media.append(part.media(len(prompt.token_ids)))
            prompt.pictures.append(part)
            prompt.token_ids.extend(part.token_ids)
        else:
            prompt.token_ids.extend(part)
    return prompt


@torch.inference_mode()
def their_logits(model: PreTrainedModel, prompt: Prompt, output: list[int] | None = None) -> torch.Tensor:
    """Return transformers' logits [X, V] of the prompt followed by the output."""
    token_ids = torch.tensor([[*prompt.token_ids, *(output or [])]])
    arrays: dict[str, torch.Tensor] = {}
    for name in prompt.pictures[0].arrays if prompt.pictures else ():
        parts = [picture.arrays[name] for picture in prompt.pictures]
        arrays[name] = torch.cat(parts, 1 if parts[0].dim() == 5 or name == "pixel_attention_mask" else 0)
    if "image_grid_thw" in arrays:
        arrays["mm_token_type_ids"] = (token_ids == IMAGE).long()
    if model.config.model_type == "gemma3":
        arrays["token_type_ids"] = (token_ids == IMAGE).long()
    logits: torch.Tensor = model(input_ids=token_ids, use_cache=False, **arrays).logits[0]
    return logits


GREEDY = Sampling(1, temperature=0.0, bias_token_ids=(IMAGE,), logit_bias=(-1e9,))
"""Excludes the placeholder, which transformers would read as an image."""


def clear_tokens(logits: torch.Tensor, output: list[int], margin: float = 1e-3) -> list[int]:
    """Return the greedy tokens of transformers' logits [X, V], which end with the logits of ``output``.

    If the two best tokens are within the margin, return the token of ``output``.
    """
    answer_logits = logits[len(logits) - len(output) - 1 : -1].index_fill(1, torch.tensor([IMAGE]), -1e9)
    best = answer_logits.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > margin
    return torch.where(is_clear, answer_logits.argmax(-1), torch.tensor(output)).tolist()
