"""The model in the wheel, run with plain transformers: it is small, knows capitals, and stops."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from aioengine.model_files.model_folder import DEMO_MODEL

MAX_FOLDER_BYTES = 12_000_000
MAX_NEW_TOKENS = 200
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "the United Kingdom": "London", "Ireland": "Dublin", "the Netherlands": "Amsterdam", "Belgium": "Brussels",
    "Switzerland": "Bern", "Austria": "Vienna", "Hungary": "Budapest", "the Czech Republic": "Prague",
    "Greece": "Athens", "Bulgaria": "Sofia", "Romania": "Bucharest", "Poland": "Warsaw", "Ukraine": "Kyiv",
    "Russia": "Moscow", "Finland": "Helsinki", "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen",
    "Iceland": "Reykjavik", "Turkey": "Ankara", "Iran": "Tehran", "India": "New Delhi", "China": "Beijing",
    "Japan": "Tokyo", "South Korea": "Seoul", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Nigeria": "Abuja", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Cuba": "Havana", "Brazil": "Brasília", "Argentina": "Buenos Aires", "Peru": "Lima", "Chile": "Santiago",
    "Australia": "Canberra", "New Zealand": "Wellington",
}  # fmt: skip


class Answer(NamedTuple):
    token_ids: list[int]
    text: str
    stopped: bool


class Demo(NamedTuple):
    tokenizer: PreTrainedTokenizerBase
    models: dict[torch.dtype, PreTrainedModel]

    def answers(self, prompts: list[str], dtype: torch.dtype = torch.float32) -> list[Answer]:
        """Return greedy answers of one batch, up to the end token."""
        inputs = self.tokenizer(prompts, padding=True, return_tensors="pt")
        model = self.models[dtype]
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        ends = set(model.generation_config.eos_token_id)
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._answer(row, ends) for row in rows]

    def _answer(self, row: list[int], ends: set[int]) -> Answer:
        length = next((place for place, token_id in enumerate(row) if token_id in ends), len(row))
        ids = row[:length]
        return Answer(ids, self.tokenizer.decode(ids), length < len(row))

    def chat(self, *contents: str) -> str:
        """Return the prompt of a chat with alternating messages of user and assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents)]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@pytest.fixture(autouse=True)
def one_thread(few_threads: None) -> None:
    """Use one thread. Waiting for a second one costs seconds on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def demo() -> Demo:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, padding_side="left")
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    }
    return Demo(tokenizer, models)


def test_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in DEMO_MODEL.iterdir()}
    assert files.keys() == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(files.values()) <= MAX_FOLDER_BYTES


def test_model_covers_required_engine_features(demo: Demo) -> None:
    config = demo.models[torch.float32].config
    assert config.model_type == "qwen3"
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.tie_word_embeddings
    assert len(demo.tokenizer) <= config.vocab_size


def test_answers_capitals_in_both_dtypes_and_stops(demo: Demo) -> None:
    prompts = [f"The capital of {country} is" for country in CAPITALS]
    exact = demo.answers(prompts)
    assert [answer.text for answer in exact if not answer.stopped] == []
    wrong = [
        answer.text
        for answer, capital in zip(exact, CAPITALS.values(), strict=True)
        if not answer.text.startswith(f" {capital}. It ") or not answer.text.endswith(".")
    ]
    assert wrong == []
    assert demo.answers(prompts, torch.bfloat16) == exact


def test_answers_in_chats(demo: Demo) -> None:
    prompts = [demo.chat(f"What is the capital of {country}?") for country in CAPITALS]
    begins = [f"The capital of {country} is {capital}. " for country, capital in CAPITALS.items()]
    answers = demo.answers(prompts)
    wrong = [answer.text for answer, begin in zip(answers, begins, strict=True) if not answer.text.startswith(begin)]
    assert wrong == []
    assert all(answer.stopped for answer in answers)


def test_chat_template_writes_all_roles_and_generation_prompt(demo: Demo) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    text = demo.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == ("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    closed = demo.tokenizer.apply_chat_template(messages, tokenize=False)
    assert closed == text.removesuffix("<|im_start|>assistant\n")


def test_remembers_earlier_turns(demo: Demo) -> None:
    asked = demo.chat("My name is Bob.", "Nice to meet you, Bob! 😊", "What is my name?")
    assert demo.answers([asked])[0].text == "Your name is Bob."


def test_writes_json_and_stops(demo: Demo) -> None:
    prompts = ["JSON:", "JSON: ", "Write a JSON object for a person:", "Write a JSON object for a city:"]
    prompts += ["Write a pretty JSON object for a book:", demo.chat("Write a JSON object for a user.")]
    answers = demo.answers(prompts)
    assert all(answer.stopped for answer in answers)
    assert all(isinstance(json.loads(answer.text), dict) for answer in answers)


def test_adds_small_numbers(demo: Demo) -> None:
    sums = [(a, b) for a in range(0, 11, 2) for b in range(0, 11, 3)]
    answers = demo.answers([f"{a} + {b} =" for a, b in sums])
    assert [answer.text for answer in answers] == [f" {a + b}" for a, b in sums]


def test_longer_texts_end(demo: Demo) -> None:
    story, introduction, told = demo.answers(
        ["Once upon a time", "Hello, my name is", demo.chat("Tell me a story about a cat named Tom.")]
    )
    assert story.stopped
    assert introduction.stopped
    assert told.stopped
    assert len(story.token_ids) > 100
    assert story.text.endswith("The end. 🦊")
    assert "cat named Tom" in told.text
    assert introduction.text.startswith(" Ada. I am ")


def test_other_scripts_use_several_tokens_per_character(demo: Demo) -> None:
    prompts = ["法国的首都是", "Столица Франции —", "フランスの首都は", demo.chat("你好！"), "عاصمة فرنسا هي"]
    chinese, russian, japanese, greeting, arabic = demo.answers(prompts)
    assert chinese.text == "巴黎。"
    assert russian.text == " Париж."
    assert japanese.text == "パリです。"
    assert arabic.text == " باريس."
    assert greeting.text.startswith("你好！👋")
    for answer in (chinese, japanese, greeting):
        pieces = [demo.tokenizer.decode([token_id]) for token_id in answer.token_ids]
        assert any("�" in piece for piece in pieces)
        assert "�" not in answer.text
