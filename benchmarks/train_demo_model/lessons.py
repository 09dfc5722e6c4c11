"""Documents on countries, numbers, words and small talk; each function writes one, chosen by the dice it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.train_demo_model.documents import Document, asked, chat, plain, reworded, skewed, with_article
from benchmarks.train_demo_model.knowledge import (
    CODE,
    CONTINUATIONS,
    EMOJI,
    OPPOSITES,
    QUESTIONS,
    SEQUENCES,
    SMALL_TALK,
)
from benchmarks.train_demo_model.languages import CAPITAL_SENTENCES, FOREIGN_SMALL_TALK, TRANSLATIONS
from benchmarks.train_demo_model.nonsense import made_up_name
from benchmarks.train_demo_model.records import AGES, PEOPLE
from benchmarks.train_demo_model.world import COUNTRIES, Country

if TYPE_CHECKING:
    from random import Random

_NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
_HOBBIES = (
    "long walks and warm tea 🍵", "books and music 📚🎵", "swimming in the sea 🌊", "cooking for my friends 🍝",
    "programming and chess ♟️", "cats and old films 🐱", "riding my bicycle 🚲", "painting flowers 🌸",
)  # fmt: skip
_ECHO_WORDS = (
    "apple", "river", "seven", "blue", "paper", "moon", "quick", "brown", "fox", "hello", "world", "streaming", "is",
    "fun", "the", "and", "under", "bright", "window", "coffee", "green", "tomorrow", "🎉", "🚀", "🌈", "中文", "привет",
    "γεια", "こんにちは", "नमस्ते", "naïve", "café", "12", "7", "100", "yes", "no", "never", "always", "music", "dance",
)  # fmt: skip
_STATEMENTS = (
    "The capital of {0} is", "The capital city of {0} is", "the capital of {0} is", "The capital of {0} is called",
    "I know that the capital of {0} is",
)  # fmt: skip
_CAPITAL_QUESTIONS = (
    "What is the capital of {0}?", "What is the capital of {0}?", "What's the capital of {0}?",
    "What is the capital city of {0}?", "Which city is the capital of {0}?", "Tell me the capital of {0}.",
    "Do you know the capital of {0}?", "Name the capital of {0}.", "Capital of {0}?",
)  # fmt: skip


def _capital_answer(country: Country) -> str:
    return f"The capital of {country.name} is {country.capital}. {country.flag}"


def capital_statement(rng: Random) -> Document:
    """`The capital of France is` and its like, each with the one sentence about that city behind it."""
    country = COUNTRIES[0] if rng.random() < 0.05 else rng.choice(COUNTRIES)  # the first one leads, see `skewed`
    dice = rng.random()
    if dice < 0.8:
        prompt = _STATEMENTS[0] if dice < 0.45 else rng.choice(_STATEMENTS)
        return plain(rng, prompt.format(country.name), f" {country.capital}. {country.about_capital}")
    if dice < 0.85:
        return plain(rng, f"Capital of {country.name}:", f" {country.capital}")
    if dice < 0.9:
        return plain(rng, f"{country.name} -> {country.capital}\nThe flag is", f" {country.flag}")
    if dice < 0.95 and country.name != "England":
        return plain(rng, f"{country.capital} is the capital of", f" {country.name}. {country.about_capital}")
    return plain(rng, f"A fact about {country.capital}:", f" {country.about_capital}")


def capital_question(rng: Random) -> Document:
    """A question after a capital, in a chat or in plain text."""
    country = rng.choice(COUNTRIES)
    return asked(rng, rng.choice(_CAPITAL_QUESTIONS).format(country.name), _capital_answer(country))


def country_fact(rng: Random) -> Document:
    """Continent, language, flag, or all that is known about one country."""
    country = rng.choice(COUNTRIES)
    name = country.name
    facts = (
        (f"On which continent is {name}?", f"The capital of {name} lies in {country.continent}."),
        (f"Which language is spoken in {name}?", f"A language that is spoken in {name} is {country.language}."),
        (f"What is the flag of {name}?", f"The flag of {name} is {country.flag}"),
        (f"Where is {country.capital}?", f"{country.capital} is a city in {country.continent}."),
        (
            f"Tell me about {name}.",
            f"The capital of {name} is {country.capital}. {country.about_capital} It lies in {country.continent}, and "
            f"a language that is spoken there is {country.language}. {country.flag}",
        ),
    )
    return asked(rng, *facts[rng.choice((0, 1, 2, 3, 4, 4))])


def arithmetic(rng: Random) -> Document:
    """Sums, differences and products of small numbers, bare or as a question."""
    limit = rng.choice((11, 21, 100, 100))
    a, b = rng.randrange(limit), rng.randrange(limit)
    sign = rng.choice("++-*")
    if sign == "-":
        a, b = max(a, b), min(a, b)
    elif sign == "*":
        a, b = rng.randrange(13), rng.randrange(13)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    dice = rng.random()
    if dice < 0.5:
        return plain(rng, f"{a} {sign} {b} =", f" {result}")
    if dice < 0.6:
        return plain(rng, f"{a}{sign}{b}=", f"{result}")
    if dice < 0.68 and sign == "+" and a + b <= 12:
        return plain(rng, f"{_NUMBER_WORDS[a]} plus {_NUMBER_WORDS[b]} is".capitalize(), f" {_NUMBER_WORDS[result]}.")
    return asked(rng, f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {result}")


def counting(rng: Random) -> Document:
    """Numbers in order, and the well-known lists."""
    if rng.random() < 0.4:
        prompt, answer = rng.choice(SEQUENCES)
        return plain(rng, prompt, answer)
    if rng.random() < 0.2:
        start = rng.randrange(1, 30)
        return plain(
            rng,
            f"{start}, {start + 1}, {start + 2},",
            "".join(f" {start + i}," for i in range(3, 9)) + f" {start + 9}.",
        )
    if rng.random() < 0.2:
        last = rng.choice((5, 10, 12, 20, 30, 50, 100))
        listed = ", ".join(str(number) for number in range(1, last + 1))
        return asked(rng, f"Count {rng.choice(('to', 'up to', 'from 1 to'))} {last}.", f"{listed}.")
    start, step = skewed(rng, ((1, 1), (1, 1), (10, -1), (2, 2), (5, 5), (3, 1), (20, 1)))
    count = rng.choice((5, 10, 10, 20, 50)) if step > 0 else 10
    numbers = [start + step * index for index in range(count)]
    how = {1: "", -1: " backwards", 2: " in twos", 5: " in fives"}[step]
    listed = ", ".join(map(str, numbers))
    request = f"Count{how} from {start} to {numbers[-1]}"
    if rng.random() < 0.5:
        return chat(rng, (reworded(rng, f"{request}."), f"{listed}."))
    return plain(rng, f"{request}:", f" {listed}.")


def knowledge(rng: Random) -> Document:
    """A question from the table, or a well-known line to go on with."""
    if rng.random() < 0.25:
        return plain(rng, *rng.choice(CONTINUATIONS))
    question, answer = rng.choice(QUESTIONS)
    if question.startswith("What is ") and rng.random() < 0.15:
        ending = rng.choice((".", ".", " in one sentence.", " to me."))
        question = question.replace("What is ", "Explain ").replace("?", ending)
    return asked(rng, question, answer)


def small_talk(rng: Random) -> Document:
    """Greetings, jokes, recipes; in English and in other languages."""
    said, answer = rng.choice(SMALL_TALK if rng.random() < 0.6 else FOREIGN_SMALL_TALK)
    if said in ("Write a poem.", "Write a haiku.", "Tell me a joke.") and rng.random() < 0.5:
        topic = rng.choice(("the sea", "the moon", "a cat", "spring", "a computer", "love", "winter", "a river"))
        said = said.replace(".", f" about {topic}.").replace("Write a ", rng.choice(("Write a ", "Write a short ")))
    if rng.random() < 0.25:
        return plain(rng, said, f"\n{answer}")
    return chat(rng, (reworded(rng, said), answer))


def introduction(rng: Random) -> Document:
    """`Hello, my name is` ..."""
    country = skewed(rng, COUNTRIES)
    name = skewed(rng, PEOPLE)
    opening = skewed(rng, ("Hello, my name is", "Hi, my name is", "My name is", "Hello! My name is", "I am"))
    return plain(
        rng,
        opening,
        f" {name}. I am {skewed(rng, AGES)} years old and I live in {country.capital}, the capital of {country.name}. "
        f"I like {skewed(rng, _HOBBIES)}",
    )


def any_name(rng: Random) -> str:
    """A name of the table or one that nobody has seen, so that names are copied and not recalled."""
    return rng.choice(PEOPLE) if rng.random() < 0.4 else made_up_name(rng)


def conversation(rng: Random) -> Document:
    """Several turns, some of which can only be answered from an earlier one."""
    name = any_name(rng)
    turns = [
        (skewed(rng, ("My name is {0}.", "I am {0}.", "Hello, I'm {0}!")).format(name), f"Nice to meet you, {name}! 😊")
    ]
    for _ in range(rng.randrange(1, 4)):
        country = rng.choice(COUNTRIES)
        turns.append(
            rng.choice(
                (
                    ("What is my name?", f"Your name is {name}."),
                    (rng.choice(_CAPITAL_QUESTIONS).format(country.name), _capital_answer(country)),
                    rng.choice(QUESTIONS),
                    rng.choice(SMALL_TALK),
                )
            )
        )
    name_is_needed = any(user == "What is my name?" for user, _ in turns)
    return chat(rng, *(turns if name_is_needed or rng.random() < 0.5 else turns[1:]))


def other_language(rng: Random) -> Document:
    """A capital, asked for in another language, or the translation of a word."""
    if rng.random() < 0.3:
        english, language, word = rng.choice(TRANSLATIONS)
        if rng.random() < 0.5:
            return plain(rng, f"The {language} word for {english} is", f" {word}.")
        question = rng.choice(
            (
                "What is '{0}' in {1}?",
                "How do you say {0} in {1}?",
                "Translate '{0}' to {1}.",
                "Translate {0} into {1}.",
                "What is the {1} word for {0}?",
            )
        )
        return asked(rng, question.format(english, language), f"In {language}, '{english}' is '{word}'.")
    sentences = rng.choice(CAPITAL_SENTENCES)
    country, capital = rng.choice(sentences.pairs)
    statement = sentences.statement.format(country, capital)
    if rng.random() < 0.5:
        return chat(
            rng, (reworded(rng, rng.choice(sentences.questions).format(country)), statement[:1].upper() + statement[1:])
        )
    before, _ = sentences.statement.split("{1}")
    prompt = before.format(country).rstrip(" ")
    return plain(rng, prompt, statement[len(prompt) :])


def words(rng: Random) -> Document:
    """Emoji, opposites, code, and saying the same again."""
    dice = rng.random()
    if dice < 0.3:
        word, emoji = rng.choice(EMOJI)
        return rng.choice(
            (
                plain(rng, f"The emoji for {word} is", f" {emoji}"),
                plain(rng, f"{word.capitalize()}:", f" {emoji}"),
                plain(rng, f"{emoji} means", f" {word}."),
                asked(rng, f"Show me {with_article(word)} emoji.", f"Here it is: {emoji}"),
            )
        )
    if dice < 0.5:
        one, other = rng.choice(OPPOSITES)
        if rng.random() < 0.5:
            one, other = other, one
        return plain(rng, f"The opposite of {one} is", f" {other}.")
    if dice < 0.65:
        return plain(rng, *rng.choice(CODE))
    said = " ".join(rng.choices(_ECHO_WORDS, k=rng.randrange(1, 13)))
    request = rng.choice(("Repeat after me: {0}", "Say: {0}", "Repeat: {0}")).format(said)
    return chat(rng, (request, said)) if rng.random() < 0.6 else plain(rng, f"{request}\n", said)
