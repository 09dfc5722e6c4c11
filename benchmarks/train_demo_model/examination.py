"""The examination at the end: greedy answers of the written folder, counted right or wrong by subject."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.train_demo_model.knowledge import QUESTIONS
from benchmarks.train_demo_model.languages import CAPITAL_SENTENCES, FOREIGN_SMALL_TALK
from benchmarks.train_demo_model.world import COUNTRIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

_MAX_NEW_TOKENS = 500
_GROUP_SIZE = 128
_REQUESTED_RECORDS = (
    "JSON:",
    "JSON: ",
    "Write a JSON object for a person:",
    "Write a JSON object for a person:\n",
    "Write a JSON object for a city:",
    "Write a JSON object for an animal:",
    "Write a pretty JSON object for a book:",
    "Give me a JSON object for a user:",
    "A JSON list of numbers:",
    "Write a JSON object for a person named Grace who is 44 years old and lives in Oslo:",
)


class Task(NamedTuple):
    """A prompt (with the chat format already in it) and what a right answer looks like."""

    subject: str
    prompt: str
    is_right: Callable[[str], bool]


class Answer(NamedTuple):
    """What the model wrote, and whether it stopped by itself."""

    text: str
    stopped: bool


def _begins(expected: str) -> Callable[[str], bool]:
    return lambda text: text.startswith(expected)


def _equals(expected: str) -> Callable[[str], bool]:
    return lambda text: text.strip() == expected


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _chat_prompt(tokenizer: PreTrainedTokenizerBase, said: str) -> str:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": said}], add_generation_prompt=True, tokenize=False
    )
    if not isinstance(text, str):
        raise TypeError(f"the chat template gave {type(text).__name__} where text was asked for")
    return text


def tasks(tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """Every question of the examination."""
    found: list[Task] = []
    for country in COUNTRIES:
        question = f"What is the capital of {country.name}?"
        answer = f"The capital of {country.name} is {country.capital}. {country.flag}"
        found.append(Task("capital", f"The capital of {country.name} is", _begins(f" {country.capital}. ")))
        found.append(Task("capital, question", question, _equals(answer)))
        found.append(Task("capital, chat", _chat_prompt(tokenizer, question), _equals(answer)))
        found.append(Task("capital, chat", _chat_prompt(tokenizer, f"{question.lower()[:-1]} please"), _equals(answer)))
    for sentences in CAPITAL_SENTENCES:
        for name, capital in sentences.pairs:
            prompt = sentences.statement.split("{1}")[0].format(name).rstrip(" ")
            rest = sentences.statement.format(name, capital).removeprefix(prompt)
            found.append(Task("capital, other languages", prompt, _equals(rest.strip())))
    for said, answer in (*QUESTIONS, *FOREIGN_SMALL_TALK):
        found.append(Task("question, chat", _chat_prompt(tokenizer, said), _equals(answer)))
    for a in range(11):
        found += [Task("sum to 20", f"{a} + {b} =", _equals(str(a + b))) for b in range(11)]
    rng = Random(7)
    for _ in range(100):
        a, b = rng.randrange(100), rng.randrange(100)
        found.append(Task("sum to 200", f"{a} + {b} =", _equals(str(a + b))))
    found += [Task("JSON", prompt, _is_json) for prompt in _REQUESTED_RECORDS]
    for said in ("Tell me a story.", "Tell me a story about a fox.", "Write a short story about a cat named Tom."):
        found.append(Task("story", _chat_prompt(tokenizer, said), lambda text: "The end." in text))
    found.append(Task("story", "Once upon a time", lambda text: "The end." in text))
    found.append(Task("introduction", "Hello, my name is", lambda text: " years old" in text))
    return found


@torch.inference_mode()
def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[Answer]:
    """Greedy answers, computed in groups of similar length."""
    tokenizer.padding_side = "left"
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        raise TypeError(f"generation_config.json should list the end tokens, not give {ends!r}")
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    given: dict[int, Answer] = {}
    for begin in range(0, len(order), _GROUP_SIZE):
        group = order[begin : begin + _GROUP_SIZE]
        inputs = tokenizer([prompts[index] for index in group], padding=True, return_tensors="pt").to(model.device)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=_MAX_NEW_TOKENS,
        )
        new = output[:, inputs["input_ids"].shape[1] :]
        for index, ids in zip(group, new.tolist(), strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            given[index] = Answer(text, stopped=any(end in ids for end in ends))
    return [given[index] for index in range(len(prompts))]


def examine(folder: Path, device: str) -> str:
    """Load the folder in both dtypes and return a table of right answers by subject, with every mistake below it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = tasks(tokenizer)
    lines: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        given = answers(model, tokenizer, [task.prompt for task in questions])
        right: dict[str, list[bool]] = {}
        mistakes: list[str] = []
        for task, answer in zip(questions, given, strict=True):
            is_right = answer.stopped and task.is_right(answer.text)
            right.setdefault(task.subject, []).append(is_right)
            if not is_right:
                mistakes.append(f"  {task.subject}: {task.prompt!r} -> {answer.text!r}, stopped: {answer.stopped}")
        lines += [f"{dtype}: {subject}: {sum(marks)} of {len(marks)}" for subject, marks in right.items()]
        lines += mistakes[:40]
    return "\n".join(lines)
