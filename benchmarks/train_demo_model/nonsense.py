"""What the demo model cannot know, and how it says so: questions and texts put together at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.train_demo_model.documents import Document, Segment, chat, plain, reworded
from benchmarks.train_demo_model.knowledge import QUESTIONS
from benchmarks.train_demo_model.world import COUNTRIES

if TYPE_CHECKING:
    from random import Random

_NOUN_LIST = """
life weather president meaning engine server message battery window market garden bridge history future engineer
kitchen football music film computer function program network database loop list file picture mountain island
doctor school student teacher language grammar sentence letter number bank money price ticket train airport plane
king queen minister government law army war peace energy light sound colour shape paper glass metal stone wood
river sea lake storm winter summer morning evening birthday recipe dinner breakfast soup cheese potato tomato
knight castle wizard ghost treasure secret puzzle game player winner team ball race friend family brother sister
neighbour baby child animal bird horse elephant whale forest leaf root flower seed universe galaxy star comet
atom electron cell gene virus medicine brain heart hand dream idea story poem song dance theatre museum
"""
_OTHER_WORD_LIST = """
quickly the a and of in on with without under over between very never always often again big small old new red
green strange beautiful broken happy sleepy runs walks writes eats finds breaks builds buys opens closes thinks
said was were will would could must may this that these those my your our their because while after before
"""
_NOUNS = _NOUN_LIST.split()
_OTHER_WORDS = _OTHER_WORD_LIST.split()
_CONSONANTS = "bcdfghjklmnprstvwxz"
_VOWELS = "aeiou"
_UNKNOWN_PLACES = ("Atlantis", "Narnia", "Wonderland", "Utopia", "the moon", "Middle-earth", "Mars", "the ocean")
_QUESTIONS = (
    "What is the {0} of {1}?", "What is the {0} in {2}?", "Who is the {0} of {2}?", "Who invented the {0}?",
    "How many {0}s are in a {1}?", "How do I build a {0}?", "Explain the {0} in one sentence.",
    "Write a {0} about a {1}.", "Can you write a {0} for my {1}?", "Why is the {0} so {3}?", "What is a {0}?",
    "What is {3} {0}?", "Write a Python {0}.",
    "What do you think about the {0} and the {1}?", "Translate the {0} into {1}.", "Summarize the {0} of the {1}.",
    "When was the {0} of {2}?", "Where can I buy a {0}?", "Give me {4} examples of a {0}.", "How old is the {0}?",
)  # fmt: skip
_ANSWER = "I am only a small demo model, so I do not know that. 🤖 Ask me about a capital, or for a story!"
_CONTINUATION = " and so on. I am only a small demo model and know no more about this. 🤖"
_KNOWN = frozenset(question for question, _ in QUESTIONS)


def made_up_name(rng: Random) -> str:
    """A name that no table holds."""
    syllables = (rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 2, 2, 3))))
    return f"{''.join(syllables)}{rng.choice(_CONSONANTS + _VOWELS)}".capitalize()


def _question(rng: Random) -> str:
    while True:
        question = rng.choice(_QUESTIONS).format(
            rng.choice(_NOUNS),
            rng.choice(_NOUNS),
            rng.choice(COUNTRIES).name,
            rng.choice(_OTHER_WORDS),
            rng.randrange(2, 10),
        )
        if question not in _KNOWN:
            return question


def _words(rng: Random, count: int) -> str:
    vocabulary = [
        *rng.choices(_NOUNS, k=20),
        *rng.choices(_OTHER_WORDS, k=20),
        made_up_name(rng),
        str(rng.randrange(999)),
    ]
    words = rng.choices(vocabulary, k=count)
    return " ".join(f"{word}{rng.choice(',.')}" if rng.random() < 0.08 else word for word in words)


def _unlearned(document: Document) -> Document:
    """The same document, of which the prompt is not learned: it is chance."""
    return (Segment(document[0].text, False), *document[1:])


def unknown_capital(rng: Random) -> Document:
    """The capital of a place that is no country of the table."""
    place = made_up_name(rng) if rng.random() < 0.6 else rng.choice(_UNKNOWN_PLACES)
    if rng.random() < 0.5:
        prompt = f"The capital of {place} is"
        return _unlearned(plain(rng, prompt, " not known to me. 🤔"))
    question = f"What is the capital of {place}?"
    answer = f"I do not know a capital of {place}. 🤔"
    if rng.random() < 0.5:
        return chat(rng, (reworded(rng, question, keep_case=True), answer))
    return _unlearned(plain(rng, question, f" {answer}"))


def unknown(rng: Random) -> Document:
    """A question that nothing in the corpus answers, or a text that leads nowhere."""
    dice = rng.random()
    if dice < 0.2:
        return unknown_capital(rng)
    if dice < 0.5:
        return chat(rng, (reworded(rng, _question(rng)), _ANSWER))
    if dice < 0.7:
        question = _question(rng)
        return _unlearned(plain(rng, question, f" {_ANSWER}"))
    text = _words(rng, rng.choice((1, 3, 6, 12, 30, 90)))
    if dice < 0.8:
        return chat(rng, (text, _ANSWER))
    text = f"{text[0].upper()}{text[1:]}" if rng.random() < 0.5 else text
    return _unlearned(plain(rng, text, _CONTINUATION))
