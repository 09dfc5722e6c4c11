"""GGUF files whose weights stay quantized on a GPU, compared with the same weights in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aioengine import models
from aioengine.model_files import folder_files
from aioengine.model_files.gguf_quantization import StoredTypes
from aioengine.models._base import Model, ModelOptions
from tests.compute.test_gguf_quantization import BITS, MIXED, load, with_formats, write
from tests.gpu.test_quantized import CUDA, logits


def loaded(path: Path, stored: StoredTypes, *, batch_invariant: bool) -> Model:
    options = ModelOptions(dtype=torch.bfloat16, device=CUDA, max_positions=256, batch_invariant=batch_invariant)
    model = models.build(folder_files.read_object(path / "config.json"), with_formats(options, stored))
    load(model, path)
    return model


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [*BITS, "mixed"])
def test_logits_are_those_of_widened_weights(kind: str, tied: bool, batch_invariant: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", "Q4_K" if kind == "mixed" else kind, tied=tied, others=MIXED if kind == "mixed" else None)
    stored = StoredTypes.of(path, is_on_cpu=False)
    assert not stored.widened
    expected = loaded(path, StoredTypes({}), batch_invariant=batch_invariant)
    model = loaded(path, stored, batch_invariant=batch_invariant)
    for num_tokens in (1, 5, 64, 150):
        wanted = logits(expected, num_tokens)
        error = (logits(model, num_tokens) - wanted).norm() / wanted.norm()
        assert error < 0.06, (num_tokens, error)
    if batch_invariant:
        assert torch.equal(logits(model, 150)[:5], logits(model, 5))
    before = logits(model, 5)
    model.open_for_loading()
    model.finish_loading()
    torch.testing.assert_close(logits(model, 5), before, rtol=1e-2, atol=1e-2)
