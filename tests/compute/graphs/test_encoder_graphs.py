"""Padded steps of an encoder give what they give alone, with graphs that are lists of operations on the CPU."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, ModernBertConfig

from aioengine import models
from aioengine.attention._base import AttentionShape, WriteKV
from aioengine.attention.packed import PackedAttention
from aioengine.models._base import Model, ModelOptions
from aioengine.runner import weights
from aioengine.runner.graphs.encoder_graphs import EncoderGraphs
from tests.compute.graphs.test_piece_graphs import Recorded
from tests.compute.stepping import make_batch, make_inputs
from tests.compute.test_encoders import ENCODER, SPECIAL
from tests.compute.test_pooling import saved

NO_ROW = -1


class MaskedRows:
    """Attends over all tokens at once; ``row_of`` says which are of one row, so a replay reads it anew."""

    def __init__(self, shape: AttentionShape, max_tokens: int) -> None:
        self._shape = shape
        self._row_of = torch.full((max_tokens,), NO_ROW)

    def fill(self, lengths: list[int]) -> None:
        self._row_of[:] = NO_ROW
        self._row_of[: sum(lengths)] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))

    def target(self, layer: int) -> WriteKV:
        return lambda k, v: None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """[T, H, E] each -> [T, H * E], NaN where a token is of no row."""
        num_tokens = len(q)
        row_of, places = self._row_of[:num_tokens], torch.arange(num_tokens)
        seen = (row_of[:, None] == row_of) & (row_of[:, None] != NO_ROW)
        window = self._shape.window(layer, num_tokens)
        if window is not None:
            seen = seen & ((places - places[:, None]).abs() <= window)
        q, k, v = (part.nan_to_num() for part in (q, k, v))  # a kernel does not read those of no row
        scores = torch.einsum("qhe,khe->hqk", q, k) * self._shape.scale
        attended = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.transpose(0, 1)
        return attended.transpose(0, 1).flatten(1)


class Capturable(PackedAttention):
    """``max_tokens``: of any graph."""

    max_tokens = 64

    def fixed_rows(self, num_rows: int, max_length: int) -> MaskedRows:  # type: ignore[override]
        return MaskedRows(self._shape, self.max_tokens)


@pytest.fixture(params=["bert", "modernbert"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    is_bert = request.param == "bert"
    saved(BertConfig(**ENCODER) if is_bert else ModernBertConfig(**ENCODER, **SPECIAL, local_attention=6), tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    options = ModelOptions(dtype=torch.float32, device=torch.device("cpu"), max_positions=130)
    built = models.build(config, options)
    weights.load(built, tmp_path, load_format="auto", seed=0, report=lambda *_: None)
    for name, stand_in in {
        "CUDAGraph": Recorded,
        "Stream": lambda _: None,
        "stream": nullcontext,
        "graph_pool_handle": lambda: "pool",
        "synchronize": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return built


@pytest.mark.parametrize("gives_all", [False, True])
@torch.inference_mode()
def test_steps_of_all_sizes(model: Model, gives_all: bool) -> None:
    pool = torch.empty(0)
    graphs = EncoderGraphs(
        model, Capturable(model.attention_shape, pool), max_rows=9, max_length=40, gives_all=gives_all
    )
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
        inputs = replace(inputs, outputs=None) if gives_all else inputs
        reference.prepare(batch)
        assert graphs.fits(batch)
        torch.testing.assert_close(graphs.replay(inputs, batch), model.forward(inputs, reference), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_what_does_not_fit(model: Model) -> None:
    attention = Capturable(model.attention_shape, torch.empty(0))
    graphs = EncoderGraphs(model, attention, max_rows=100, max_length=130, gives_all=False)

    def fits(lengths: list[int]) -> bool:
        rows = [(0, length) for length in lengths]
        return graphs.fits(make_batch(rows, [[0] * length for length in lengths], 1))

    assert not fits([2]), "nothing is captured yet"
    graphs.capture(64, lambda *_: None)
    assert fits([64])
    assert fits([1] * 8)
    assert not fits([65])
    assert not fits([1] * 9), "a graph has a row for every 16 tokens, and 8 at least"
