"""The measures of ``benchmarks.cpu.quality``, on a few documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine.model_files.model_folder import DEMO_MODEL
from benchmarks.cpu import quality
from benchmarks.train_demo_model.corpus import write_corpus

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[quality.Text]:
    monkeypatch.setattr(quality, "NUM_TRAINED", 1000)
    return quality.unseen_texts(8)


def test_texts_are_not_part_of_the_training_data(texts: list[quality.Text]) -> None:
    tokenizer = quality.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    trained = {"".join(segment.text for segment in document) for document in write_corpus(1000, 0)}
    results = {tokenizer.decode(text.ids, skip_special_tokens=False) for text in texts}
    assert len(results) == 8
    assert not results & trained


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "gguf Q8_0"])
def test_quantized_demo_model_is_close_to_the_plain_one(name: str, texts: list[quality.Text], tmp_path: Path) -> None:
    plain = quality.run_demo(DEMO_MODEL, texts, CPU)
    path = quality.saved(DEMO_MODEL, quality.variants("cpu")[name], tmp_path)
    quantized = quality.run_demo(path, texts, CPU)
    assert 1 < plain.perplexity < 2
    assert quantized.perplexity != plain.perplexity
    assert quantized.perplexity == pytest.approx(plain.perplexity, rel=0.02)


@pytest.mark.parametrize(("name", "limit"), [("gptq-order", 0.005), ("w8a8", 0.02)])
def test_products_equal_those_of_the_dequantized_weight(name: str, limit: float) -> None:
    method = quality.METHODS[name]
    error = quality.product_error(method, torch.float32, torch.device("cpu"))
    assert 0 < error < limit
