"""Folders of models with images, without weights, and their transformers processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TILE_TOKENS = [
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{i}_col_{j}>" for i in (1, 2, 3) for j in (1, 2, 3, 4)),
]
SPECIAL = [
    "<s>",
    "</s>",
    "<image>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
    *TILE_TOKENS,
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
]
NUM_BYTES = 256
TEXT_CONFIG = {
    "vocab_size": NUM_BYTES + len(SPECIAL),
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ENDS = "USER: {} ASSISTANT:"
PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACEHOLDER"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


class Family(NamedTuple):
    """``prompt``: the placeholder of an image. ``processor``: the fields of preprocessor_config.json."""

    model_type: str
    prompt: str
    config: dict[str, Any]
    processor: dict[str, Any]


def token_id(text: str) -> int:
    return NUM_BYTES + SPECIAL.index(text)


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "llava",
            "<image>",
            {
                "image_token_index": token_id("<image>"),
                "vision_feature_select_strategy": "default",
                "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7},
            },
            {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 28},
                "crop_size": {"height": 28, "width": 28},
            },
        ),
        Family(
            "gemma3",
            "<start_of_image>",
            {"image_token_index": token_id("<image_soft_token>"), "mm_tokens_per_image": 4},
            {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        ),
        *(
            Family(
                model_type,
                "<|vision_start|><|image_pad|><|vision_end|>",
                {
                    "image_token_id": token_id("<|image_pad|>"),
                    "vision_config": {"spatial_merge_size": 2, "patch_size": 4},
                },
                {
                    "image_processor_type": "Qwen2VLImageProcessorFast",
                    "min_pixels": 64,
                    "max_pixels": 64 * 64,
                    "patch_size": 4,
                    "merge_size": 2,
                },
            )
            for model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
        ),
        *(
            Family(
                model_type,
                "<image>",
                {
                    "image_token_id": token_id("<image>"),
                    "scale_factor": 2,
                    "vision_config": {"image_size": 28, "patch_size": 7},
                },
                {
                    "image_processor_type": f"{name}ImageProcessor",
                    "size": {"longest_edge": 84},
                    "max_image_size": {"longest_edge": 28},
                },
            )
            for model_type, name in (("idefics3", "Idefics3"), ("smolvlm", "SmolVLM"))
        ),
    )
}


def write_image_folder(folder: Path, family: Family) -> Path:
    """Write a folder with the image files, and a byte tokenizer with the special tokens of all families."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family.model_type, "text_config": TEXT_CONFIG, **family.config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(family.processor))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    template = PARTS_TEMPLATE.replace("PLACEHOLDER", family.prompt)
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": template}))
    return folder


def byte_tokenizer(special: list[str] = SPECIAL) -> Tokenizer:
    """Return a tokenizer with one token per byte, followed by special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def add_image_files(folder: Path, model_type: str, placeholder_id: int, vocab_size: int) -> None:
    """Add the image files and a tokenizer to a folder with weights and config.json."""
    family, config = FAMILIES[model_type], (folder / "config.json").read_text()
    write_image_folder(folder, family)
    (folder / "config.json").write_text(config)
    placeholder = {"gemma3": "<image_soft_token>"}.get(
        model_type, "<|image_pad|>" if "<|image_pad|>" in family.prompt else "<image>"
    )
    special = [text for text in SPECIAL if text != placeholder]
    special += [f"<unused_{number}>" for number in range(placeholder_id - NUM_BYTES - len(special))]
    special.append(placeholder)
    special += [f"<unused_{number}>" for number in range(len(special), vocab_size - NUM_BYTES)]
    byte_tokenizer(special).save(str(folder / "tokenizer.json"))
