"""The token types of texts and pairs equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from aioengine.tokenization.tokenizer import Tokenizer
from tests.kit.embedders import write_tokenizer

WITH_TYPES, WITHOUT_TYPES = ["input_ids", "token_type_ids", "attention_mask"], ["input_ids", "attention_mask"]
PAIRS = [("the cat", "a dog sat on the mat"), ("moon", None)]


@pytest.mark.parametrize(
    "tokenizer_class", ["BertTokenizerFast", "PreTrainedTokenizerFast", "DistilBertTokenizer", None]
)
@pytest.mark.parametrize("names", [None, WITH_TYPES, WITHOUT_TYPES])
def test_token_types_equal_transformers(tmp_path: Path, tokenizer_class: str | None, names: list[str] | None) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": tokenizer_class, "model_input_names": names}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    reference, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for pair, ids in zip(PAIRS, tokenizer.encode_pairs(PAIRS), strict=True):
        inputs = reference(*pair)
        types = inputs.get("token_type_ids", [0] * len(ids))
        for ours in (ids, tokenizer.encode_cut(*pair, max_tokens=32)):
            first = ours.second_text or len(ours)
            assert (ours, [0] * first + [1] * (len(ours) - first)) == (inputs["input_ids"], types)
