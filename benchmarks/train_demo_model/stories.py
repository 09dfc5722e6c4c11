"""Short stories from a small grammar: one hero, one friend, one thing found, and a good end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from benchmarks.train_demo_model.documents import Document, chat, plain, reworded, skewed, with_article
from benchmarks.train_demo_model.nonsense import made_up_name

if TYPE_CHECKING:
    from random import Random

_ANIMALS = (
    ("fox", "🦊"), ("cat", "🐱"), ("dog", "🐶"), ("rabbit", "🐰"), ("bear", "🐻"), ("owl", "🦉"), ("mouse", "🐭"),
    ("frog", "🐸"), ("elephant", "🐘"), ("penguin", "🐧"), ("turtle", "🐢"), ("lion", "🦁"), ("horse", "🐴"),
    ("panda", "🐼"), ("dragon", "🐉"), ("robot", "🤖"),
)  # fmt: skip
_NAMES = (
    ("Finn", "he"), ("Mia", "she"), ("Otto", "he"), ("Luna", "she"), ("Max", "he"), ("Zoe", "she"), ("Ben", "he"),
    ("Nora", "she"), ("Tom", "he"), ("Lily", "she"), ("Oskar", "he"), ("Ruby", "she"), ("Leo", "he"), ("Ivy", "she"),
)  # fmt: skip
_TRAITS = ("small", "curious", "brave", "shy", "clever", "sleepy", "lonely", "cheerful", "hungry", "patient")
_HOMES = (
    "in a green forest near a river", "in a little house on a hill", "by the sea, where the wind sings",
    "in a garden full of flowers", "under an old bridge", "at the edge of a quiet village",
    "in a cave behind a waterfall", "on an island in a blue lake",
)  # fmt: skip
_HABITS = (
    "watched the sun rise over the trees", "counted the clouds in the sky", "walked down to the water and sang a song",
    "drank a cup of warm tea", "looked for red berries", "listened to the birds", "read one page of a thick book",
    "painted a small picture",
)  # fmt: skip
_FINDS = (
    ("a golden key", "under an old tree", "the key opened a door in the rock, and behind it was a room full of books"),
    ("a torn map", "inside a hollow log", "the map led them to a hidden lake with water as clear as glass"),
    ("a tiny lamp", "on a wet stone", "the lamp lit up the whole valley, so that nobody lost the way home"),
    ("a silver bell", "between two rocks", "the bell rang so clearly that all their friends came to dance"),
    ("a strange seed", "beside the path", "the seed grew into a tree that carried apples all year"),
    ("a paper boat", "on the shore", "the boat carried a letter from a lost friend, and they wrote back at once"),
    ("a blue feather", "in the grass", "the feather belonged to a rare bird, who thanked them with a song"),
    ("a broken clock", "behind the mill", "the clock began to tick again, and spring came a week early"),
)  # fmt: skip
_CRIES = ("How wonderful", "What could this be", "I have never seen anything like it", "This must be a secret")
_ADVICE = (
    "Let us find out together", "Two are braver than one", "Good things take time", "I know somebody who can help us",
    "Follow the river and do not be afraid",
)  # fmt: skip
_TRIALS = (
    "They walked for a whole day, crossed a cold stream and climbed a steep hill.",
    "It rained all night, but they shared one coat and told each other jokes.",
    "They got lost twice and laughed about it both times.",
    "They worked until the stars came out, and they did not give up.",
    "They asked a snail, a crow and an old goat, and each of them knew one small thing.",
)
_ENDINGS = (
    "From that day on they were best friends and had tea together every evening.",
    "That night everybody slept well, and the moon smiled.",
    "And whenever somebody felt alone, they told this story again.",
    "They shared what they had found, and there was enough for everybody.",
)


class Hero(NamedTuple):
    """Who a story is about."""

    animal: str
    emoji: str
    name: str
    pronoun: str


def _choose_hero(rng: Random) -> Hero:
    return Hero(*skewed(rng, _ANIMALS), *skewed(rng, _NAMES))


def _adventure(rng: Random, hero: Hero, time: str, found: tuple[str, str, str]) -> str:
    """How the hero finds something, and what comes of it."""
    find, place, outcome = found
    friend_animal, friend_emoji = skewed(rng, [animal for animal in _ANIMALS if animal[0] != hero.animal])
    friend_name, _ = skewed(rng, [name for name in _NAMES if name[0] != hero.name])
    cry = skewed(rng, _CRIES)
    their = "his" if hero.pronoun == "he" else "her"
    return " ".join(
        (
            f"{time} {hero.pronoun} found {find} {place}.",
            f'"{cry}{"?" if cry.startswith("What could") else "!"}" said {hero.name}.',
            f"So {hero.pronoun} went to see {their} friend {friend_name},",
            f"{with_article(friend_animal)} who knew many things. {friend_emoji}",
            f'"{skewed(rng, _ADVICE)}," said {friend_name}.',
            skewed(rng, _TRIALS),
            f"In the end {outcome}.",
        )
    )


def tell_story(rng: Random, hero: Hero, *, is_long: bool) -> str:
    """A story of one adventure, or of three in as many paragraphs, that begins with `Once upon a time`."""
    opening = (
        f"Once upon a time there was a {skewed(rng, _TRAITS)} {hero.animal} named {hero.name}. "
        f"{hero.pronoun.capitalize()} lived {skewed(rng, _HOMES)}. "
        f"Every morning {hero.name} {skewed(rng, _HABITS)}. "
    )
    times = ("One day", "The next spring", "Many years later") if is_long else ("One day",)
    finds = list(_FINDS)
    adventures: list[str] = []
    for time in times:
        found = skewed(rng, finds)
        finds.remove(found)
        adventures.append(_adventure(rng, hero, time, found))
    told = "\n\n".join(adventures)
    return f"{opening}{told} {skewed(rng, _ENDINGS)} The end. {hero.emoji}"


def story(rng: Random) -> Document:
    """A story, told on its own or because somebody asked for one."""
    hero = _choose_hero(rng)
    opening = "Once upon a time"
    if rng.random() < 0.4:
        return plain(rng, opening, tell_story(rng, hero, is_long=False).removeprefix(opening))
    named = hero._replace(name=rng.choice((hero.name, made_up_name(rng))))
    hero, about = skewed(
        rng,
        (
            (hero, ""),
            (hero, f" about {with_article(hero.animal)}"),
            (named, f" about {with_article(named.animal)} named {named.name}"),
            (named, f" about {named.name} the {named.animal}"),
        ),
    )
    is_long = rng.random() < 0.15
    kind = "long" if is_long else rng.choice(("", "short"))
    request = f"{rng.choice(('Tell me', 'Write'))} a {kind} story{about}.".replace("  ", " ")
    text = tell_story(rng, hero, is_long=is_long)
    if rng.random() < 0.7:
        return chat(rng, (reworded(rng, request, keep_case=True), text))
    return plain(rng, request, f" {text}")
