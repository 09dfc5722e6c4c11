"""Padded steps of an encoder equal steps without padding. Graphs are simulated on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, ModernBertConfig

from aioengine import models
from aioengine.attention._base import AttentionShape
from aioengine.attention.packed import PackedAttention
from aioengine.kernels.kv_target import WriteKV
from aioengine.models._base import Model, ModelOptions
from aioengine.runner import weights
from aioengine.runner.graphs.encoder_graphs import EncoderGraphs
from tests.compute.models.test_encoders import ENCODER, SPECIAL
from tests.compute.runner.graphs.test_piece_graphs import record_graphs
from tests.compute.runner.test_pooling import PROMPTS, PoolWorld, saved, settings_for
from tests.compute.stepping import make_batch, make_inputs


class MaskedRows:
    """Attends over all tokens at once. A replay reads ``starts`` again."""

    def __init__(self, shape: AttentionShape, starts: Tensor) -> None:
        self._shape = shape
        self._starts = starts

    def target(self, layer: int) -> WriteKV:
        return lambda k, v: None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q, k, v [T, H, E] -> [T, H * E], NaN for tokens without a row."""
        num_tokens = len(q)
        places = torch.arange(num_tokens)
        row_of = (places[:, None] >= self._starts[1:]).sum(-1)  # tokens after the last row: the number of rows
        seen = (row_of[:, None] == row_of) & (row_of[:, None] < len(self._starts) - 1)
        window = self._shape.window(layer, num_tokens)
        if window is not None:
            seen = seen & ((places - places[:, None]).abs() <= window)
        q, k, v = (part.nan_to_num() for part in (q, k, v))  # a kernel does not read tokens without a row
        scores = torch.einsum("qhe,khe->hqk", q, k) * self._shape.scale
        attended = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.transpose(0, 1)
        return attended.transpose(0, 1).flatten(1)


class Capturable(PackedAttention):
    def fixed_rows(self, starts: Tensor, max_length: int) -> MaskedRows:  # type: ignore[override]
        return MaskedRows(self._shape, starts)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record_graphs(monkeypatch)


@pytest.fixture(params=["bert", "modernbert"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    is_bert = request.param == "bert"
    saved(BertConfig(**ENCODER) if is_bert else ModernBertConfig(**ENCODER, **SPECIAL, local_attention=6), tmp_path)
    return tmp_path


@pytest.fixture
def model(folder: Path) -> Model:
    config = json.loads((folder / "config.json").read_bytes())
    options = ModelOptions(dtype=torch.float32, device=torch.device("cpu"), max_positions=130)
    built = models.build(config, options)
    weights.load(built, folder, load_format="auto", seed=0, report=lambda *_: None)
    return built


@pytest.mark.parametrize("returns_all", [False, True])
@torch.inference_mode()
def test_replayed_steps_match_the_model(model: Model, returns_all: bool) -> None:
    pool = torch.empty(0)
    attention = Capturable(model.attention_shape, pool)
    graphs = EncoderGraphs(model, attention, max_rows=9, max_length=40, returns_all=returns_all)
    heard: list[tuple[int, int]] = []
    graphs.capture(50, lambda *done: heard.append(done))
    assert heard == [(1, 2), (2, 2)]
    reference = PackedAttention(model.attention_shape, pool)
    for lengths in ([30, 17], [1], [40, 10], [3] * 8, [5, 1, 2]):
        rows = [(0, length) for length in lengths]
        batch, inputs = make_batch(rows, [[0] * length for length in lengths], 1), make_inputs(model, rows)
        if model.input_spec.token_types and len(lengths) == 2:
            inputs = replace(inputs, token_types=torch.arange(sum(lengths)) % 2)
        inputs = replace(inputs, token_ids=torch.randint(1, 90, inputs.positions.shape))
        inputs = replace(inputs, outputs=None) if returns_all else inputs
        reference.prepare(batch)
        step = graphs.find(len(lengths), sum(lengths))
        assert step is not None
        torch.testing.assert_close(step.replay(inputs, batch), model.forward(inputs, reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["cls", "mean"])
def test_runner_returns_the_same_vectors_with_graphs(folder: Path, kind: str) -> None:
    world = PoolWorld(settings_for(folder, "embed", kind))
    expected = world.vectors_of(PROMPTS), world.vectors_of([[7], [8]])
    shape = world.runner._model.attention_shape
    attention = Capturable(shape, torch.empty(0))
    graphs = EncoderGraphs(world.runner._model, attention, max_rows=9, max_length=130, returns_all=kind == "mean")
    with torch.inference_mode():
        graphs.capture(64, lambda *_: None)
    world.runner.prompt_graphs = graphs
    for wanted, prompts in zip(expected, (PROMPTS, [[7], [8]]), strict=True):
        for before, actual in zip(wanted, world.vectors_of(prompts), strict=True):
            torch.testing.assert_close(actual, before, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_steps_that_fit_no_graph(model: Model) -> None:
    attention = Capturable(model.attention_shape, torch.empty(0))
    graphs = EncoderGraphs(model, attention, max_rows=100, max_length=130, returns_all=False)
    assert graphs.find(1, 2) is None, "nothing is captured yet"
    graphs.capture(64, lambda *_: None)
    assert graphs.find(1, 64) is not None
    assert graphs.find(8, 8) is not None
    assert graphs.find(1, 65) is None
    assert graphs.find(9, 9) is None, "a graph has a row for every 16 tokens, and 8 at least"
