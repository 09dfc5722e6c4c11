"""What a document of the corpus is, its chat format, and the dice that vary it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a small demo model.",
    "Answer in one short sentence.",
    "You are a helpful assistant. Be short and clear.",
    "You answer questions about the world.",
)

Item = TypeVar("Item")


class Segment(NamedTuple):
    """A piece of text, tokenized on its own; `learned` says whether the model is trained to write it."""

    text: str
    learned: bool


Document = tuple[Segment, ...]


def skewed(rng: Random, items: Sequence[Item]) -> Item:
    """An item, earlier ones more often: so the likeliest text is ahead of the next one and greedy output is stable."""
    weights = [1 / (rank + 1) for rank in range(len(items))]
    return rng.choices(items, weights)[0]


def with_article(noun: str) -> str:
    """`a fox`, `an owl`."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def plain(rng: Random, prompt: str, answer: str) -> Document:
    """A prompt and its continuation; now and then the space between them belongs to the prompt, as people type it."""
    if answer.startswith(" ") and rng.random() < 0.04:
        prompt, answer = f"{prompt} ", answer[1:]
    return (Segment(prompt, True), Segment(answer, True), Segment(END_OF_TEXT, True))


def chat(rng: Random, *turns: tuple[str, str]) -> Document:
    """A conversation of (user, assistant) turns in the format of `CHAT_TEMPLATE`; only the answers are learned."""
    segments: list[Segment] = []
    opening = ""
    if rng.random() < 0.3:
        opening = f"{TURN_START}system\n{skewed(rng, _SYSTEM_PROMPTS)}{TURN_END}\n"
    for user, assistant in turns:
        segments.append(Segment(f"{opening}{TURN_START}user\n{user}{TURN_END}\n{TURN_START}assistant\n", False))
        segments.append(Segment(f"{assistant}{TURN_END}", True))
        opening = "\n"
    return (*segments, Segment(END_OF_TEXT, True))


def reworded(rng: Random, text: str, *, keep_case: bool = False) -> str:
    """The same request as somebody else would type it; text that is not English only loses its punctuation.

    `keep_case` is for a request with a name that the answer has to repeat.
    """
    if rng.random() < 0.55:
        return text
    bare = text.rstrip(" .!?。！？;؟")
    if not text[:1].isascii():
        return rng.choice((bare, text))
    lower = text[0].lower() + text[1:]
    other_case = (bare, text) if keep_case else (bare.lower(), text.lower(), text.upper())
    return rng.choice(
        (
            *other_case,
            bare,
            f"{bare}, please.",
            f"Please {lower}" if not text.endswith("?") else f"Please tell me: {lower}",
            f"Hello! {text}",
            f"Hi, {lower}",
            f"{bare}??" if text.endswith("?") else f"{bare}!",
            f"Can you help me? {text}",
            f" {text} ",
        )
    )


def asked(rng: Random, question: str, answer: str) -> Document:
    """A question with its answer, as a chat or as plain text in one of the usual forms."""
    if rng.random() < 0.55:
        return chat(rng, (reworded(rng, question), answer))
    form = rng.choice(("{0}", "Q: {0}\nA:", "Question: {0}\nAnswer:"))
    return plain(rng, form.format(question), f" {answer}")
