"""How many ids a tokenizer.json has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import aioengine
from aioengine.runner.vocabulary import num_token_ids

DEMO = Path(aioengine.__file__).parent / "demo"


def test_the_demo_model() -> None:
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).get_vocab(with_added_tokens=True).values()
    assert num_token_ids(str(DEMO)) == max(ids) + 1
    assert num_token_ids(str(DEMO / "tokenizer.json")) == max(ids) + 1


@pytest.mark.parametrize(
    ("vocab", "added", "expected"),
    [
        ({"a": 0, "b": 7}, [], 8),
        ({"a": 0, "b": 7}, [{"id": 9, "content": "<s>", "special": True}], 10),
        ([["<unk>", 0.0], ["a", -1.5], ["b", -2.0]], [], 3),
        ([["<unk>", 0.0]], [{"id": 5, "content": "x"}], 6),
        ({}, [], 0),
    ],
)
def test_maps_lists_and_added_tokens(
    tmp_path: Path, vocab: object, added: list[dict[str, object]], expected: int
) -> None:
    tokenizer = {"version": "1.0", "added_tokens": added, "model": {"type": "Any", "vocab": vocab}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert num_token_ids(str(tmp_path)) == expected


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        num_token_ids(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json.*model"):
        num_token_ids(str(tmp_path))
