"""Random outputs of grammars without a model. Each step draws one of the allowed tokens."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np

import aioengine
from aioengine import SamplingParams
from aioengine.api.params import sampling
from aioengine.constraints.grammars import Constraint, Grammars
from aioengine.protocol.messages import Grammar

EOS = 0
VOCAB_SIZE = 512
FOLDER = Path(aioengine.__file__).parent / "demo"


@cache
def demo_grammars() -> Grammars:
    """Return grammars over the vocabulary of the demo model."""
    return Grammars(str(FOLDER), VOCAB_SIZE)


@cache
def token_bytes() -> list[bytes]:
    grammars = demo_grammars()
    return list(grammars.open(Grammar("regex", "a", eos_token_ids=(EOS,)), [], 0).tokens)


def grammar_of(*, vocab_size: int = VOCAB_SIZE, **params: object) -> Grammar:
    """Return the grammar of a request with these sampling parameters."""
    grammar = sampling(SamplingParams(**params), vocab_size=vocab_size, eos_token_ids=(EOS,)).grammar
    assert grammar is not None
    return grammar


def allowed(constraint: Constraint) -> list[int]:
    """Return the tokens that are allowed next."""
    if constraint.is_over or constraint.next_token >= 0:
        return [] if constraint.is_over else [constraint.next_token]
    masks = np.zeros((1, demo_grammars().num_words), dtype=np.int32)
    demo_grammars().fill([constraint], masks)
    return [int(token_id) for token_id in np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))]


def walk(grammar: Grammar, seed: int, *, max_tokens: int = 300) -> tuple[list[int], bool]:
    """Return a random output, and whether it is complete."""
    constraint = demo_grammars().open(grammar, [], 0)
    drawn = random.Random(seed)
    ids: list[int] = []
    while not constraint.is_complete and len(ids) < max_tokens:
        choices = allowed(constraint)
        assert not constraint.error, constraint.error
        assert choices, f"no token is allowed after {text_of(ids)!r}"
        # closing tokens are drawn more often, so that outputs are short
        closing = [choice for choice in choices if choice == EOS or token_bytes()[choice][-1:] in b'"}],']
        token_id = drawn.choice(closing if closing and drawn.random() < 0.4 else choices)
        ids.append(token_id)
        constraint.advance(token_id)
    return ids, constraint.is_complete


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether the grammar allows each byte of the text and the complete text."""
    constraint = demo_grammars().open(grammar, [], 0)
    tokens = {data: token_id for token_id, data in enumerate(constraint.tokens) if len(data) == 1}
    for byte in text.encode():
        if constraint.is_complete:
            return False
        constraint.advance(tokens[bytes([byte])])
        if constraint.error:
            return False
    return bool(constraint.matcher.is_accepting())


def text_of(ids: list[int]) -> str:
    return b"".join(token_bytes()[token_id] for token_id in ids if token_id != EOS).decode()
