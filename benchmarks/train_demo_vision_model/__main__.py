"""Train a tiny vision model: `python -m benchmarks.train_demo_vision_model --out /tmp/vision-model`.

It names coloured shapes in drawn pictures. Takes two to three minutes on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from benchmarks.train_demo_vision_model.pictures import draw, questions, random_shapes
from benchmarks.train_demo_vision_model.training import make_model, make_processor, make_tokenizer, save, train


def _examine(folder: Path, num_pictures: int) -> str:
    """The share of right answers about new pictures, with the saved folder."""
    model = LlavaForConditionalGeneration.from_pretrained(folder)
    processor = LlavaProcessor.from_pretrained(folder)
    random = Random(1)
    num_asked = num_right = 0
    for _ in range(num_pictures):
        shapes = random_shapes(random)
        for question, answer in questions(shapes, random):
            content = [{"type": "image"}, {"type": "text", "text": question}]
            prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            inputs = processor(images=draw(shapes), text=prompt, return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            num_asked += 1
            num_right += processor.tokenizer.decode(output, skip_special_tokens=True) == answer
    return f"{num_right} of {num_asked} answers are right"


def main() -> None:
    """Train, save, examine."""
    parser = argparse.ArgumentParser(description="Train a tiny vision model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--examine", type=int, default=20, help="pictures to examine it with (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    processor = make_processor(tokenizer)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} kinds of token")
    print(f"loss {train(model, processor, num_steps=arguments.steps):.4f}")
    save(model, processor, arguments.out)
    print(_examine(arguments.out, arguments.examine))


if __name__ == "__main__":
    main()
