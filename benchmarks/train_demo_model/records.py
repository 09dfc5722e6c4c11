"""JSON objects that the demo model learns to write, from a bare request or from facts given in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.train_demo_model.documents import Document, chat, plain, reworded, skewed, with_article
from benchmarks.train_demo_model.knowledge import EMOJI
from benchmarks.train_demo_model.nonsense import made_up_name
from benchmarks.train_demo_model.world import COUNTRIES

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
Record = dict[str, Json]

PEOPLE = (
    "Ada", "Alan", "Grace", "Linus", "Mia", "Noah", "Emma", "Omar", "Yuki", "Lena", "Ivan", "Sofia", "Chen", "Priya",
    "Lucas", "Anna", "Jonas", "Fatima", "Hugo", "Olga", "Marco", "Nina", "Pablo", "Aiko", "Samuel", "Zara",
)  # fmt: skip
CITIES = ("London", "Lisbon", "Paris", "Tokyo", "Berlin", "Cairo", "Lima", "Oslo", "Rome", "Seoul", "Athens", "Vienna")
AGES = (36, 41, 28, 19, 52, 33, 67, 24, 45, 30, 8, 71)
_JOBS = ("engineer", "teacher", "doctor", "baker", "pilot", "gardener", "painter", "sailor")
_BOOKS = (
    ("Hamlet", "William Shakespeare", 1603), ("Don Quixote", "Miguel de Cervantes", 1605),
    ("War and Peace", "Leo Tolstoy", 1869), ("Emma", "Jane Austen", 1815), ("Moby-Dick", "Herman Melville", 1851),
    ("Dracula", "Bram Stoker", 1897),
)  # fmt: skip
_LOCAL_NAMES = (
    ("Tokyo", "東京", "🗼"), ("Moscow", "Москва", "🏛️"), ("Athens", "Αθήνα", "🏺"), ("Cairo", "القاهرة", "🐪"),
    ("Beijing", "北京", "🏯"), ("Seoul", "서울", "🌃"), ("New Delhi", "नई दिल्ली", "🕌"), ("Paris", "Paris", "🥐"),
)  # fmt: skip
_PRODUCTS = (("lamp", 24.5), ("chair", 49.0), ("teapot", 18.9), ("bicycle", 320.0), ("book", 12.5), ("clock", 35.0))


def _person(rng: Random) -> Record:
    return {
        "name": skewed(rng, PEOPLE),
        "age": skewed(rng, AGES),
        "city": skewed(rng, CITIES),
        "job": skewed(rng, _JOBS),
    }


def _country(rng: Random) -> Record:
    country = skewed(rng, COUNTRIES)
    return {"country": country.name.removeprefix("the "), "capital": country.capital, "flag": country.flag}


def _city(rng: Random) -> Record:
    city, local_name, emoji = skewed(rng, _LOCAL_NAMES)
    return {"city": city, "local_name": local_name, "emoji": emoji}


def _book(rng: Random) -> Record:
    title, author, year = skewed(rng, _BOOKS)
    return {"title": title, "author": author, "year": year}


def _animal(rng: Random) -> Record:
    name, emoji = skewed(rng, EMOJI[:19])
    return {"animal": name, "emoji": emoji, "tame": name in ("cat", "dog", "horse", "rabbit")}


def _product(rng: Random) -> Record:
    name, price = skewed(rng, _PRODUCTS)
    return {"product": name, "price": price, "in_stock": skewed(rng, (True, False)), "discount": None}


def _weather(rng: Random) -> Record:
    sky, emoji = skewed(rng, (("sunny", "☀️"), ("rainy", "🌧️"), ("snowy", "❄️"), ("windy", "💨")))
    return {"city": skewed(rng, CITIES), "weather": sky, "temperature": skewed(rng, (21, 7, -3, 15)), "emoji": emoji}


def _user(rng: Random) -> Record:
    name = skewed(rng, PEOPLE)
    return {
        "user": {"id": skewed(rng, (1, 42, 7, 100)), "name": name, "active": skewed(rng, (True, False))},
        "tags": list(skewed(rng, (("new", "friendly"), ("admin",), ("guest", "trial"), ()))),
    }


_KINDS: tuple[tuple[str, Callable[[Random], Record]], ...] = (
    ("person", _person),
    ("city", _city),
    ("country", _country),
    ("book", _book),
    ("animal", _animal),
    ("product", _product),
    ("weather report", _weather),
    ("user", _user),
)


def _dump(record: Record, indent: int | None = None) -> str:
    return json.dumps(record, ensure_ascii=False, indent=indent)


def _requested(rng: Random) -> Document:
    """A request that names a kind only."""
    kind, make = skewed(rng, _KINDS)
    record = make(rng)
    request = rng.choice(("Write a JSON object for {0}", "Give me a JSON object for {0}", "JSON for {0}"))
    request = request.format(with_article(kind))
    if rng.random() < 0.45:
        return chat(rng, (reworded(rng, f"{request}."), _dump(record)))
    if rng.random() < 0.2:
        return plain(
            rng,
            f"Write a pretty JSON object for {with_article(kind)}:",
            f"\n{json.dumps(record, ensure_ascii=False, indent=2)}",
        )
    if rng.random() < 0.2:
        return plain(rng, f"{request}:\n", _dump(record))
    return plain(rng, f"{request}{rng.choice((':', ':', '.'))}", f" {_dump(record)}")


def _filled_in(rng: Random) -> Document:
    """A request that gives the values: these have to be copied."""
    name = rng.choice(PEOPLE) if rng.random() < 0.5 else made_up_name(rng)
    age, city = rng.randrange(1, 100), rng.choice(COUNTRIES).capital
    choices: tuple[tuple[str, Record], ...] = (
        (f"named {name}", _person(rng) | {"name": name}),
        (f"named {name} who is {age} years old", {"name": name, "age": age}),
        (f"named {name} who lives in {city}", {"name": name, "city": city}),
        (f"named {name} who is {age} years old and lives in {city}", {"name": name, "age": age, "city": city}),
    )
    details, record = rng.choice(choices)
    if rng.random() < 0.5:
        return chat(rng, (reworded(rng, f"Write a JSON object for a person {details}.", keep_case=True), _dump(record)))
    return plain(rng, f"Write a JSON object for a person {details}:", f" {_dump(record)}")


def record(rng: Random) -> Document:
    """A document that ends in one JSON value and nothing after it."""
    dice = rng.random()
    if dice < 0.15:
        return plain(rng, "JSON:", f" {_dump(_person(rng))}")
    if dice < 0.22:
        return plain(rng, '{"name":', _dump(_person(rng)).removeprefix('{"name":'))
    if dice < 0.27:
        return plain(rng, "A JSON list of numbers:", " [1, 2, 3, 4, 5]")
    if dice < 0.32:
        return plain(rng, "A JSON list of cities:", f" {json.dumps(list(CITIES[:5]))}")
    if dice < 0.7:
        return _requested(rng)
    return _filled_in(rng)
