"""JSON schemas of three kinds for benchmarks, another one for each number."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

WORDS = [
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
    "nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
]  # fmt: skip
PATTERNS = (
    r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$",
    r"^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$",
    r"^[A-Z]{2,3}-[0-9]{3,6}(/[A-Z0-9]{1,4})?$",
    r"^[a-z0-9._]{1,32}@[a-z0-9]{1,16}\.(com|org|net|io)$",
)
CURRENCIES = ["USD", "EUR", "GBP", "JPY", "CHF", "SEK", "NOK", "PLN"]


def closed(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def list_schema(number: int) -> Schema:
    """Return the schema of a list too long for 256 tokens: every token of a run is constrained."""
    draw = random.Random(number)
    words = draw.sample(WORDS, 12)
    entry: Schema = {
        words[0]: {"type": "string", "minLength": 4, "maxLength": 24},
        words[1]: {"type": "integer"},
        words[2]: {"enum": words[4:10]},
        words[3]: {"type": "boolean"},
    }
    items = {"type": "array", "minItems": 100, "items": closed(entry, words[:4])}
    return closed({"title": {"type": "string", "maxLength": 20 + number}, "items": items}, ["title", "items"])


def record_schema(number: int) -> Schema:
    """Return the schema of a record that ends well before 256 tokens."""
    words = random.Random(100 + number).sample(WORDS, 12)
    record: Schema = {
        words[0]: {"type": "string", "maxLength": 12},
        words[1]: {"type": "integer", "minimum": 0, "maximum": 999},
        words[2]: {"enum": words[5:]},
        words[3]: {"type": "boolean"},
        words[4]: {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "string", "maxLength": 8}},
    }
    return closed(record, words[:5])


def named_schema() -> Schema:
    """Return the schema of a record of short values with long names."""
    text = {"type": "string", "maxLength": 10}
    address = {"street_and_number": text, "postal_code": text, "country_code": {"enum": ["DE", "FR"]}}
    order: Schema = {
        "customer_full_name": text,
        "shipping_address": closed(address, list(address)),
        "is_returning_customer": {"type": "boolean"},
        "order_total_cents": {"type": "integer", "minimum": 0, "maximum": 99},
    }
    return closed(order, list(order))


def hard_schema(number: int) -> Schema:
    """Return a schema of 7 to 10 kB: objects to a depth of 3, enums of 20, patterns, bounds and references."""
    draw = random.Random(1000 + number)

    def name() -> str:
        return "_".join(draw.sample(WORDS, 2)) + str(draw.randint(0, 99))

    def leaf() -> Schema:
        kind = draw.randrange(9)
        if kind < len(PATTERNS):
            return {"type": "string", "pattern": PATTERNS[kind]}
        others: list[Schema] = [
            {"enum": [name() for _ in range(20)]},
            {"type": "integer", "minimum": 1, "maximum": draw.randint(1000, 99999)},
            {"type": "string", "minLength": 3, "maxLength": draw.randint(20, 60)},
            {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "string", "maxLength": 16}]},
            {"$ref": "#/$defs/money"},
        ]
        return others[kind - len(PATTERNS)]

    def nested(depth: int) -> Schema:
        properties = {name(): leaf() for _ in range(8)}
        if depth:
            properties[name()] = nested(depth - 1)
            properties[name()] = {"type": "array", "minItems": 1, "maxItems": 5, "items": nested(depth - 1)}
        return closed(properties, list(properties)[: len(properties) - 2])

    money = closed({"amount": {"type": "number"}, "currency": {"enum": CURRENCIES}}, ["amount", "currency"])
    return {**nested(2), "$defs": {"money": money}}
