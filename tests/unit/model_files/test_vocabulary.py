"""Number of ids of a tokenizer."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import aioengine
from aioengine.api.args import engine_config
from aioengine.frontend.startup import blueprint_of
from aioengine.model_files.vocabulary import num_token_ids, sampled_vocab_size
from aioengine.processes.detokenizer_process import build_service
from aioengine.tokenization.tokenizer import Tokenizer as OwnTokenizer

DEMO = Path(aioengine.__file__).parent / "demo"


def test_vocabulary_size_of_the_demo_model() -> None:
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).get_vocab(with_added_tokens=True).values()
    assert num_token_ids(str(DEMO)) == max(ids) + 1


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_that_changed_after_the_constructor_is_refused(name: str, tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "m")
    config = engine_config(str(tmp_path / "m"), {"device": "cpu"})
    blueprint = blueprint_of(config)
    settings, load = blueprint.settings, blueprint.load_tokenizer
    assert load is not None
    assert load().vocab_size == sampled_vocab_size(settings)
    file = tmp_path / "m" / name
    file.chmod(0o644)
    file.write_bytes(file.read_bytes() + b" ")
    for use in (load, partial(sampled_vocab_size, settings), partial(build_service, settings)):
        with pytest.raises(ValueError, match=f"{name} was changed since the engine was created"):
            use()


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
def test_vocabularies_may_be_maps_or_lists_with_added_tokens(
    tmp_path: Path, vocab: object, added: list[dict[str, object]], expected: int
) -> None:
    tokenizer = {"version": "1.0", "added_tokens": added, "model": {"type": "Any", "vocab": vocab}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert num_token_ids(str(tmp_path)) == expected


def test_invalid_tokenizer_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        num_token_ids(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json' cannot be read: .*model"):
        num_token_ids(str(tmp_path))


def test_invalid_entries_of_a_list_are_refused_with_the_file_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": [["a", 0.0], 5]}}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json' cannot be read: Expected `array`"):
        num_token_ids(str(tmp_path))


ADDED = {"content": "<end>", "special": True}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"added_tokens_decoder": {"3072": ADDED}, "eos_token": "<end>"}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"3072": ADDED, "3073": {"content": "<more>"}}}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"0": {"content": "<|end|>"}}, "pad_token": "the"}},
        {"tokenizer_config.json": {"eos_token": "<end>", "additional_special_tokens": ["<a>", {"content": "<b>"}]}},
        {"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": {"content": "<end>"}}},
        {},
    ],
)
def test_tokens_added_by_other_files_are_counted_like_the_tokenizer(tmp_path: Path, files: dict[str, object]) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert num_token_ids(str(tmp_path)) == OwnTokenizer(tmp_path).vocab_size


def test_invalid_added_tokens_are_refused_with_the_file_name(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3072": "<end>"}}')
    with pytest.raises(ValueError, match=r"added_tokens_decoder in .*tokenizer_config\.json"):
        num_token_ids(str(tmp_path))
