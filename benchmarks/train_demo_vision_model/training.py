"""The model, its tokenizer and its training. A LLaVA of transformers, with a small CLIP tower and a small Llama.

Shapes: R conversations of a batch, L tokens of the longest of them.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from benchmarks.train_demo_vision_model.pictures import draw, questions, random_shapes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

IMAGE, TURN, TURN_END = "<image>", "<|im_start|>", "<|im_end|>"
PICTURE_SIDE = 48
PATCH_SIDE = 16
CONTEXT_LENGTH = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NOT_LEARNED = -100
_LEARNING_RATE = 1.2e-3
_NUM_QUESTIONS = 3
"""About each picture."""
_PIECES = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def make_tokenizer(seed: int = 0, num_pictures: int = 300) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the words that questions about pictures have."""
    random = Random(seed)
    pairs = [pair for _ in range(num_pictures) for pair in questions(random_shapes(random), random)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (TURN_END, TURN, IMAGE)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user\n", "assistant\n", *(text for pair in pairs for text in pair)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=TURN_END,
        additional_special_tokens=[TURN, IMAGE],
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Resizes pictures to 48 x 48 pixels; a placeholder for each of 9 patches."""
    sizes = {
        "size": {"shortest_edge": PICTURE_SIDE},
        "crop_size": {"height": PICTURE_SIDE, "width": PICTURE_SIDE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return LlavaProcessor(
        CLIPImageProcessorPil(**sizes),
        tokenizer,
        patch_size=PATCH_SIDE,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """About 800,000 parameters."""
    vision = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=PICTURE_SIDE,
        patch_size=PATCH_SIDE,
        projection_dim=96,
    )
    text = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.06,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=(PICTURE_SIDE // PATCH_SIDE) ** 2,
        vision_feature_layer=-1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlavaForConditionalGeneration(config)
    # Places would be learned late: beside a patch of a bright picture their first values are next to nothing.
    places = next(values for name, values in model.named_parameters() if name.endswith("position_embedding.weight"))
    torch.nn.init.normal_(places, std=0.3)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def make_batch(processor: LlavaProcessor, random: Random, num_rows: int) -> dict[str, Tensor]:
    """Conversations about a picture each. Token ids and labels [R, L], pixels [R, 3, 48, 48]."""
    tokenizer = processor.tokenizer
    pictures, rows = [], []
    for _ in range(num_rows):
        shapes = random_shapes(random)
        pictures.append(draw(shapes, random.choice((96, 120, 144))))
        placeholders = IMAGE * (PICTURE_SIDE // PATCH_SIDE) ** 2
        ids: list[int] = []
        labels: list[int] = []
        for question, answer in questions(shapes, random)[:_NUM_QUESTIONS]:
            asked = tokenizer.encode(
                f"{TURN}user\n{placeholders}{question}{TURN_END}\n{TURN}assistant\n", add_special_tokens=False
            )
            said = tokenizer.encode(f"{answer}{TURN_END}", add_special_tokens=False)
            after = tokenizer.encode("\n", add_special_tokens=False)
            ids += asked + said + after
            labels += [_NOT_LEARNED] * len(asked) + said + [_NOT_LEARNED] * len(after)
            placeholders = ""
        rows.append((ids, labels))
    length = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [_NOT_LEARNED] * (length - len(labels)) for _, labels in rows]),
        "pixel_values": processor.image_processor(pictures, return_tensors="pt")["pixel_values"],
    }


def train(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    *,
    num_steps: int,
    num_rows: int = 32,
    seed: int = 0,
) -> float:
    """Train in place; returns the mean loss of the last steps."""
    random = Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=num_steps + 1, pct_start=0.1)
    mean_loss = 0.0
    progress = tqdm(range(num_steps), desc="training", unit="step", mininterval=2.0)
    for step in progress:
        loss = model(**make_batch(processor, random, num_rows), use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{mean_loss:.4f}")
    return mean_loss


def save(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """Write a model folder, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    processor.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)  # preprocessor_config.json, as most folders have it
    model.to(torch.bfloat16).save_pretrained(folder)
