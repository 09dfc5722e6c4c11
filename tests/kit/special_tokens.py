"""Grammars and texts with more special tokens than the demo model has."""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from aioengine.constraints.grammars import Grammars
from aioengine.protocol.messages import Grammar
from tests.kit.grammar_walks import EOS, FOLDER, grammar_of

SPECIAL = (
    "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]",
    "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>",
)  # fmt: skip
NUM_PLAIN = 1 + max(json.loads((FOLDER / "tokenizer.json").read_text())["model"]["vocab"].values())
VOCAB_SIZE = NUM_PLAIN + len(SPECIAL)


@cache
def grammars() -> Grammars:
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(FOLDER, Path(folder) / "model")
        file = copy / "tokenizer.json"
        content = json.loads(file.read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"] += [
            {"id": NUM_PLAIN + i, "content": text, **flags, "special": True} for i, text in enumerate(SPECIAL)
        ]
        file.write_text(json.dumps(content))
        compiler = Grammars(str(copy), VOCAB_SIZE)
        compiler.compile(Grammar("regex", "a", eos_token_ids=(EOS,))).result()  # reads the files
        return compiler


def compiled(**params: object) -> Grammar:
    """Return the grammar of a request with these sampling parameters."""
    return grammar_of(vocab_size=VOCAB_SIZE, **params)


@cache
def ids_of_bytes() -> dict[int, int]:
    tokens = grammars().open(Grammar("regex", "a", eos_token_ids=(EOS,)), [], 0).tokens
    return {data[0]: token_id for token_id, data in enumerate(tokens) if len(data) == 1}


def encoded(text: str) -> list[int]:
    """Return the ids of a text: special tokens, and one token per byte of other text."""
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text):
        is_special = part in SPECIAL
        ids += [NUM_PLAIN + SPECIAL.index(part)] if is_special else [ids_of_bytes()[byte] for byte in part.encode()]
    return ids


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether this is a complete output of the grammar."""
    matcher = grammars().open(grammar, [], 0).matcher
    ids = encoded(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


ENDS = ("[/THINK]", "<|end|>", "</think>", "\n</parameter>\n", "}", "]", '"')


def walk(grammar: Grammar, seed: int, *, max_choices: int = 120) -> tuple[str, bool]:
    """Return a random output, and whether it is complete. Often ``ENDS`` are preferred, so that outputs are short."""
    constraint = grammars().open(grammar, [], 0)
    drawn = random.Random(seed)
    text = b""
    for _ in range(max_choices):
        while constraint.next_token >= 0 and not constraint.is_complete:
            text += constraint.tokens[constraint.next_token].removeprefix(b"\xff")
            constraint.advance(constraint.next_token)
        if constraint.is_complete:
            break
        ends = map(encoded, drawn.sample(ENDS, len(ENDS)) if drawn.random() < 0.5 else ())
        ids = next((ids for ids in ends if constraint.matcher.validate_tokens(ids) == len(ids)), None)
        if ids is None:
            masks = np.zeros((1, grammars().num_words), dtype=np.int32)
            grammars().fill([constraint], masks)
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
            ids = [int(drawn.choice(allowed))]
        if ids == [EOS]:
            return text.decode(), True
        for token_id in ids:
            text += constraint.tokens[token_id].removeprefix(b"\xff")
            constraint.advance(token_id)
        assert not constraint.error, constraint.error
    return text.decode(errors="ignore"), constraint.is_complete
