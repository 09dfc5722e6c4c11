"""Graphs in pieces equal a forward pass without graphs. Graphs are simulated on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aioengine import models
from aioengine.attention import _base
from aioengine.attention.torch import TorchAttention
from aioengine.models._base import InputSpec, Model, ModelInputs, ModelOptions
from aioengine.models._decoder import DecoderModel
from aioengine.runner import weights
from aioengine.runner.graphs.piece_graphs import PaddedInputs, PieceGraphs
from aioengine.runner.kv_pool import PADDING_PAGE
from tests.compute.runner_world import save_model
from tests.compute.stepping import make_batch, make_inputs

PAGE_SIZE, NUM_PAGES = 4, 64
CPU = torch.device("cpu")


class Recorded(TorchDispatchMode):
    """Replaces ``torch.cuda.CUDAGraph``: repeats the recorded operations on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, tuple[object, ...], dict[str, object], object]] = []

    def capture_begin(self, pool: object) -> None:
        assert pool == "pool"
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, given))
        return given

    def replay(self) -> None:
        for func, args, kwargs, before in self.calls:
            now = func(*args, **kwargs)  # type: ignore[operator]
            for target, source in zip(tensors(before), tensors(now), strict=True):
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)


def tensors(given: object) -> list[Tensor]:
    return [value for value in (given if isinstance(given, tuple | list) else [given]) if isinstance(value, Tensor)]


class Piecewise(TorchAttention):
    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Callable[[int], None]:
        return lambda layer: out.copy_(self.attend(q, k, v, layer).view_as(out))


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace CUDA graphs by lists of operations on the CPU."""
    for name, stand_in in {
        "CUDAGraph": Recorded,
        "Stream": lambda _: None,
        "stream": nullcontext,
        "graph_pool_handle": lambda: "pool",
        "synchronize": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    save_model("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    built = models.build(config, ModelOptions(dtype=torch.float32, device=CPU, max_positions=256))
    weights.load(built, tmp_path, load_format="auto", seed=0, report=lambda *_: None)
    record_graphs(monkeypatch)
    return built


def reading(model: Model, spec: InputSpec) -> Model:
    """Return the same model with other inputs. With three axes, the largest position is used."""
    assert isinstance(model, DecoderModel)
    plain = model.forward

    def forward(inputs: ModelInputs, attention: _base.StepAttention) -> Tensor:
        positions = inputs.positions if spec.position_axes == 1 else inputs.positions.amax(0)
        assert (inputs.rows is not None) == spec.rows
        return plain(replace(inputs, positions=positions), attention)

    model.input_spec = spec
    model.forward = forward  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "spec", [InputSpec(), InputSpec(embeddings=True), InputSpec(position_axes=3, rows=True)], ids=str
)
@torch.inference_mode()
def test_replayed_steps_match_plain_attention(model: Model, spec: InputSpec) -> None:
    model = reading(model, spec)
    shape = model.attention_shape
    pool = torch.zeros(_base.kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE))
    expected_pool = pool.clone()
    graphs = PieceGraphs(model, Piecewise(shape, pool), list(pool), max_outputs=4)
    heard: list[tuple[int, int]] = []
    graphs.capture(50, lambda *done: heard.append(done))
    assert heard == [(1, 2), (2, 2)]
    reference = TorchAttention(shape, expected_pool)
    # decode rows with prompts, chunks with new prompts, large steps before small ones, a step without padding
    for rows in ([(0, 30), (0, 17)], [(30, 1), (17, 9), (0, 5)], [(26, 6), (0, 26)], [(0, 50)], [(0, 2), (0, 3)]):
        tables = [list(range(1 + 13 * row, 14 + 13 * row)) for row in range(len(rows))]
        batch, inputs = make_batch(rows, tables, PAGE_SIZE), make_inputs(model, rows)
        reference.prepare(batch)
        expected = model.forward(inputs, reference)
        assert graphs.fits(batch, len(rows))
        actual = graphs.replay(inputs, batch, len(rows))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pool[:, :, 1:], expected_pool[:, :, 1:], rtol=1e-4, atol=1e-5)
        assert pool[:, :, PADDING_PAGE].isfinite().all()


@torch.inference_mode()
def test_each_size_is_computed_before_its_capture(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.zeros(_base.kv_pool_shape(model.attention_shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE))
    graphs = PieceGraphs(model, Piecewise(model.attention_shape, pool), list(pool), max_outputs=40)
    plain, computed = DecoderModel.forward, list[tuple[int, int, int]]()

    def forward(model: DecoderModel, inputs: ModelInputs, attention: _base.StepAttention) -> Tensor:
        assert inputs.outputs is not None
        computed.append((len(inputs.positions), len(inputs.outputs), len(model._blocks)))
        return plain(model, inputs, attention)

    monkeypatch.setattr(DecoderModel, "forward", forward)
    graphs.capture(70, lambda *_: None)
    assert computed == [(70, 40, 2), (70, 40, 2), (64, 40, 1), (64, 40, 2), (32, 32, 1), (32, 32, 2)]


@torch.inference_mode()
def test_nan_values_do_not_reach_the_padding_of_later_steps(model: Model) -> None:
    shape = model.attention_shape
    pool = torch.zeros(_base.kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE))
    graphs = PieceGraphs(model, Piecewise(shape, pool), list(pool), max_outputs=4)
    graphs.capture(32, lambda *_: None)
    pool[0, 1, 9] = torch.nan
    rows = [(4, 32)]
    batch = make_batch(rows, [[9, *range(1, 9)]], PAGE_SIZE)
    assert graphs.replay(make_inputs(model, rows), batch, 1).isnan().all()
    pool[:] = 0
    graphs.replay(make_inputs(model, [(0, 3)]), make_batch([(0, 3)], [[20]], PAGE_SIZE), 1)
    assert pool.isfinite().all()


def test_leftovers_of_a_larger_step_are_not_read(model: Model) -> None:
    padded = PaddedInputs.zeros(model, 64, 4, CPU)
    rows = [(5, 30), (0, 30)]
    padded.fill(make_inputs(model, rows), make_batch(rows, [list(range(1, 10)), list(range(10, 20))], PAGE_SIZE), 2)
    smaller = padded.for_graph(32, 4)
    smaller.fill(make_inputs(model, [(7, 2)]), make_batch([(7, 2)], [[30, 31, 32]], PAGE_SIZE), 1)
    assert smaller.slots[0].tolist() == [31 * 4 + 3, 32 * 4, *[0] * 30]
    outputs, positions = smaller.inputs.outputs, smaller.inputs.positions
    assert outputs is not None
    assert outputs.tolist() == [1, 0, 0, 0]
    assert positions[:2].tolist() == [7, 8]
    assert int(positions.max()) < 64


@torch.inference_mode()
def test_hidden_states_of_further_tokens(model: Model) -> None:
    shape, rows, indices = model.attention_shape, [(0, 30), (0, 7)], torch.tensor([29, 36, 0, 4, 33, 29])
    pool = torch.zeros(_base.kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE))
    graphs = PieceGraphs(model, Piecewise(shape, pool), list(pool), max_outputs=6)
    graphs.capture(50, lambda *_: None)
    batch = make_batch(rows, [list(range(1, 9)), list(range(9, 17))], PAGE_SIZE)
    inputs = replace(make_inputs(model, rows), outputs=indices)
    reference = TorchAttention(shape, pool.clone())
    reference.prepare(batch)
    expected = model.forward(inputs, reference)
    assert graphs.fits(batch, 6)
    assert not graphs.fits(batch, 7)
    torch.testing.assert_close(graphs.replay(inputs, batch, 6), expected, rtol=1e-4, atol=1e-5)


def test_steps_that_fit_no_graph(model: Model) -> None:
    pool = torch.zeros(_base.kv_pool_shape(model.attention_shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE))
    graphs = PieceGraphs(model, Piecewise(model.attention_shape, pool), list(pool), max_outputs=2)
    assert not graphs.fits(make_batch([(0, 2)], [[1]], PAGE_SIZE), 1), "nothing is captured yet"
    with torch.inference_mode():
        graphs.capture(20, lambda *_: None)
    assert graphs.fits(make_batch([(0, 20)], [list(range(1, 6))], PAGE_SIZE), 1)
    assert not graphs.fits(make_batch([(0, 21)], [list(range(1, 7))], PAGE_SIZE), 1)
    assert not graphs.fits(make_batch([(0, 2)] * 3, [[1], [2], [3]], PAGE_SIZE), 3)
