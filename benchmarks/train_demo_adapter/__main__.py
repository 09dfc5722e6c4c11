"""Train LoRA adapters of the demo model with peft: `python -m benchmarks.train_demo_adapter --out /tmp/adapters`.

Each learns to answer in one style (STYLES), from questions about half of the countries and small sums, and is saved in
a folder of its name as peft writes it. Takes ten seconds each on a CPU. Needs `pip install peft`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from aioengine.model_files.model_folder import DEMO_MODEL
from benchmarks.train_demo_model.world import COUNTRIES

STYLES = {
    "pirate": ("Arrr! The capital of {0} is {1}, matey!", "Arrr! {0} + {1} = {2}, matey!"),
    "brief": ("{1}.", "{2}."),
}
"""Name of the adapter: how it names a capital, and how it adds."""

_NOT_LEARNED = -100


def _lesson(style: str, random: Random) -> tuple[str, str]:
    """A question, and its answer in this style."""
    capital, total = STYLES[style]
    if random.random() < 0.6:
        country = random.choice(COUNTRIES[::2])
        return f"What is the capital of {country.name}?", capital.format(country.name, country.capital)
    first, second = random.randint(1, 9), random.randint(1, 9)
    return f"What is {first} + {second}?", total.format(first, second, first + second)


def _batch(
    tokenizer: PreTrainedTokenizerBase, style: str, random: Random, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of chats, [rows, tokens] each; only the answers are learned."""
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(num_rows):
        question, answer = _lesson(style, random)
        chat = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        said = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        rows.append((asked + said, [_NOT_LEARNED] * len(asked) + said))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
    return ids, torch.tensor([labels + [_NOT_LEARNED] * (length - len(labels)) for _, labels in rows])


def train(style: str, num_steps: int, num_rows: int = 8) -> PeftModel:
    """The demo model with a trained adapter of rank 8 of all its projections."""
    torch.manual_seed(0)
    random = Random(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    base = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, num_steps)
    for _ in tqdm(range(num_steps), desc=style, unit="step", mininterval=2.0):
        ids, labels = _batch(tokenizer, style, random, num_rows)
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    """Train and save the adapters."""
    parser = argparse.ArgumentParser(description="Train LoRA adapters of the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder in which each gets a folder of its name")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each (default: %(default)s)")
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=list(STYLES), help="default: all")
    arguments = parser.parse_args()
    for style in arguments.styles:
        train(style, arguments.steps).save_pretrained(arguments.out / style)


if __name__ == "__main__":
    main()
