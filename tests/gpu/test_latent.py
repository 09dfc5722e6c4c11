"""Latent attention on a GPU: kernels match torch and do not depend on the batch, and a model matches transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from aioengine import models
from aioengine.attention._base import AttentionShape, DecodeBuffers, kv_pool_shape
from aioengine.attention.torch import TorchAttention
from aioengine.kernels import head_linear, latent_heads
from aioengine.kernels.heads import RotaryTables
from aioengine.kernels.kv_target import KVTarget
from aioengine.models._base import ModelOptions
from aioengine.protocol.messages import Sampling
from aioengine.runner import weights
from aioengine.runner.graphs.piece_graphs import PieceGraphs
from aioengine.runner.inputs import model_inputs
from tests.compute.runner_world import World, make_settings, save_model
from tests.compute.stepping import make_batch, make_inputs, write_and_attend
from tests.gpu import test_attention
from tests.gpu.test_batch_invariance import LENGTH, LONG, LONG_WAYS, WAYS, positions_of
from tests.gpu.test_kernels import in_torch
from tests.gpu.test_model_runner import PROMPTS, greedy, load, on_device, run

if TYPE_CHECKING:
    from pathlib import Path

PAGE_SIZE = 16
ROWS = test_attention.ROWS
SIZES = [(16, 512, 64), (128, 512, 64), (20, 256, 32), (4, 48, 16)]
"""Heads, values and the rest of keys."""


def shape_of(
    num_heads: int, value_size: int, more: int, *, num_layers: int = 1, batch_invariant: bool = True
) -> AttentionShape:
    return AttentionShape(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=value_size + more,
        scale=192**-0.5,
        value_size=value_size,
        batch_invariant=batch_invariant,
    )


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    "sizes", [(16, 512, 64, 128, 128), (128, 512, 64, 128, 128), (20, 512, 64, 192, 256), (20, 48, 24, 40, 64)]
)
def test_forms_match_torch(
    sizes: tuple[int, ...], rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of many tokens use the expanded form (all heads at once or one by one), other rows the absorbed one."""
    from aioengine.attention import _latent
    from aioengine.attention.triton import build

    num_heads, value_size, more, plain, output_size = sizes
    expansion = torch.randn(num_heads, plain + output_size, value_size, device="cuda") * value_size**-0.5
    shape = replace(shape_of(num_heads, value_size, more, batch_invariant=False), plain_size=plain)
    exact = replace(shape, expansions=(expansion.bfloat16().float(),))
    size = kv_pool_shape(shape, num_pages=test_attention.NUM_PAGES, page_size=PAGE_SIZE)
    pool = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    batch = test_attention.make_batch(rows)
    num_tokens = len(batch.slot_mapping)
    q = torch.randn(num_tokens, num_heads, plain + more, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(num_tokens, 1, value_size + more, device="cuda", dtype=torch.bfloat16)
    reference = TorchAttention(exact, pool.float())
    reference.prepare(replace(batch))
    expected = write_and_attend(reference, q.float(), k.float(), k[..., :value_size].float(), 0)
    for cost, num_bytes in ((1 << 30, 1), (0, 1 << 30), (0, 1), (80, 1)):
        monkeypatch.setattr(_latent, "POSITION_PAIRS", cost)
        monkeypatch.setattr(_latent, "MAX_EXPANDED_BYTES", num_bytes)
        backend = build(replace(shape, expansions=(expansion.bfloat16(),)), pool)
        backend.prepare(batch)
        actual = write_and_attend(backend, q, k, k[..., :value_size], 0)
        assert float((actual.float() - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_decode_rows_match_torch(num_rows: int) -> None:
    """Rows have other lengths than in the capture. Some have only one part."""
    from aioengine.attention.triton import build

    expansion = torch.randn(16, 256, 512, device="cuda") * 512**-0.5
    shape = replace(shape_of(16, 512, 64, batch_invariant=False), plain_size=128)
    exact = replace(shape, expansions=(expansion.bfloat16().float(),))
    lengths = [(37 * row) % 600 + 1 for row in range(num_rows)]
    num_pages = [-(-length // PAGE_SIZE) for length in lengths]
    pool = torch.randn(
        kv_pool_shape(shape, num_pages=sum(num_pages) + 1, page_size=PAGE_SIZE), device="cuda"
    ).bfloat16()
    order = (torch.randperm(sum(num_pages)) + 1).tolist()
    tables_of = [[order.pop() for _ in range(count)] for count in num_pages]
    batch = on_device(make_batch([(length - 1, 1) for length in lengths], tables_of, PAGE_SIZE), torch.device("cuda"))
    ints = {"dtype": torch.int32, "device": "cuda"}
    buffers = DecodeBuffers(
        slot_mapping=torch.zeros(num_rows, **ints),
        starts=torch.arange(num_rows + 1, **ints),
        last_lengths=torch.ones(num_rows, **ints),
        page_ids=torch.zeros(num_rows * 40, **ints),
        max_pages=40,
    )
    fixed = build(replace(shape, expansions=(expansion.bfloat16(),)), pool).fixed_decode(num_rows, buffers)
    angles = torch.randn(num_rows, 1, 32, device="cuda")
    tables = RotaryTables(torch.cat((angles.cos(), angles.sin()), 1))
    norm = torch.randn(512, device="cuda").bfloat16(), torch.tensor(1e-6, device="cuda")
    both = torch.randn(num_rows, 16 * 192 + 576, device="cuda").bfloat16()

    def attended() -> tuple[torch.Tensor, torch.Tensor]:
        q, latents = both.clone().tensor_split((16 * 192,), dim=1)
        target = fixed.target(0)
        q = latent_heads.rotated_queries(q.unflatten(1, (16, -1)), latents, norm=norm, tables=tables, target=target)
        return q, fixed.attend(q, q[:, :0], q[:, :0], 0)

    attended()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, actual = attended()
    buffers.starts.copy_(torch.tensor([0, *num_pages]).cumsum(0))
    buffers.last_lengths.copy_(torch.tensor([(length - 1) % PAGE_SIZE + 1 for length in lengths]))
    buffers.page_ids[: sum(num_pages)] = torch.tensor([page for table in tables_of for page in table], **ints)
    buffers.slot_mapping.copy_(batch.slot_mapping)
    graph.replay()
    reference = TorchAttention(exact, pool.float())
    reference.prepare(batch)
    expected = reference.attend(q.float(), q, q, 0)
    assert float((actual.float() - expected).norm() / expected.norm()) < 2e-2
    heads = torch.zeros(num_rows, 17, 576, device="cuda").bfloat16()
    plain, latents = both.tensor_split((16 * 192,), dim=1)
    in_torch(
        latent_heads.latent_heads, plain.unflatten(1, (16, -1)), latents, heads, norm=norm, tables=tables, target=None
    )
    keys = pool.view(-1, 576)[batch.slot_mapping]
    torch.testing.assert_close(keys, heads[:, -1], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(q[..., 128:], heads[:, :-1, 512:], atol=2e-2, rtol=2e-2)


def some_heads(shape: AttentionShape, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return q [T, H, E], k [T, 1, E] and v [T, 1, V] in one tensor, like those of models."""
    heads = torch.randn(num_tokens, shape.num_heads + 1, shape.head_size, device="cuda", dtype=dtype)
    q, k = heads.split((shape.num_heads, 1), dim=1)
    return q, k, k[..., : shape.value_size]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_attention_matches_torch(
    batch_invariant: bool, sizes: tuple[int, int, int], rows: list[tuple[int, int]]
) -> None:
    from aioengine.attention.triton import build

    shape = shape_of(*sizes, num_layers=2, batch_invariant=batch_invariant)
    size = kv_pool_shape(shape, num_pages=test_attention.NUM_PAGES, page_size=PAGE_SIZE)
    for dtype, error in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)):
        pool = torch.randn(size, device="cuda", dtype=dtype)
        expected_pool = pool.float()
        batch = test_attention.make_batch(rows)
        q, k, v = some_heads(shape, len(batch.slot_mapping), dtype)
        backend, reference = build(shape, pool), TorchAttention(shape, expected_pool)
        backend.prepare(batch)
        reference.prepare(replace(batch))
        for layer in range(2):
            actual = write_and_attend(backend, q, k, v, layer)
            expected = write_and_attend(reference, q.float(), k.float(), v.float(), layer)
            assert torch.equal(pool[layer].float(), expected_pool[layer]), "keys in their slots"
            assert float((actual.float() - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize(
    ("sizes", "dtype", "length"),
    [
        ((16, 512, 64), torch.bfloat16, LENGTH),
        ((128, 512, 64), torch.bfloat16, LENGTH),
        ((6, 128, 32), torch.float32, LENGTH),
        ((16, 512, 64), torch.bfloat16, LONG),
    ],
)
def test_bits_do_not_depend_on_the_batch(sizes: tuple[int, int, int], dtype: torch.dtype, length: int) -> None:
    from aioengine.attention.triton import build

    shape = shape_of(*sizes)
    num_pages = length // PAGE_SIZE + 10
    pool = torch.randn(kv_pool_shape(shape, num_pages=num_pages, page_size=PAGE_SIZE), device="cuda", dtype=dtype)
    q, k, v = some_heads(shape, length, dtype)
    table = (torch.randperm(num_pages - 1) + 1).tolist()
    attention = build(shape, pool)

    def attended(rows: list[tuple[int, int]]) -> torch.Tensor:
        batch = on_device(make_batch(rows, [table] * len(rows), PAGE_SIZE), torch.device("cuda"))
        chosen = positions_of(rows)
        attention.prepare(batch)
        heads = torch.cat((q, k), dim=1)[chosen]
        return write_and_attend(attention, heads[:, :-1], heads[:, -1:], v[chosen], 0)

    whole = attended([(0, length)]).clone()
    for way, rows in (WAYS if length == LENGTH else LONG_WAYS).items():
        expected = torch.cat([whole[start : start + count] for start, count in rows])
        assert torch.equal(attended(rows), expected), way


@pytest.mark.parametrize(("num_heads", "value_size", "more"), [(16, 512, 64), (20, 48, 24)])
def test_heads_and_their_matmuls_match_torch(num_heads: int, value_size: int, more: int) -> None:
    dtype = torch.bfloat16
    for num_tokens in (1, 33):
        q = torch.randn(num_tokens, num_heads * (64 + more) + value_size + more, device="cuda", dtype=dtype)
        q, latents = q.tensor_split((num_heads * (64 + more),), dim=1)
        q = q.unflatten(1, (num_heads, -1))
        norm = torch.randn(value_size, device="cuda", dtype=dtype), torch.tensor(1e-6, device="cuda")
        angles = torch.randn(num_tokens, 1, more // 2, device="cuda")
        tables = RotaryTables(torch.cat((angles.cos(), angles.sin()), 1))
        actual, expected = torch.zeros(2, num_tokens, num_heads + 1, value_size + more, device="cuda", dtype=dtype)
        keys = torch.zeros(5, 1, PAGE_SIZE, value_size + more, device="cuda", dtype=dtype)
        slots = torch.randperm(5 * PAGE_SIZE, device="cuda")[:num_tokens]
        target = KVTarget(slots, keys, keys[..., :value_size])
        latent_heads.latent_heads(q, latents, actual, norm=norm, tables=tables, target=target)
        in_torch(latent_heads.latent_heads, q, latents, expected, norm=norm, tables=tables, target=None)
        torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
        assert torch.equal(keys.view(-1, value_size + more)[slots], actual[:, -1])
        weight = torch.randn(num_heads, 96, value_size, device="cuda", dtype=dtype) * 0.1
        values = torch.randn(num_tokens, num_heads, value_size, device="cuda", dtype=dtype)
        for part, x in ((weight[:, :64], q[..., :64]), (weight[:, 64:].transpose(1, 2), values)):
            outs = torch.zeros(3, num_tokens, num_heads + 1, part.shape[2], device="cuda", dtype=dtype)
            for out, invariant in zip(outs[:2], (False, True), strict=True):
                head_linear.prepare(part, batch_invariant=invariant)(x, out[:, :-1])
            wide = torch.einsum("thi,hio->tho", x.float(), part.float())
            for out in outs[:2]:
                assert float((out[:, :-1].float() - wide).norm() / wide.norm()) < 1e-2


@pytest.fixture(scope="module", params=["youtu", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16)
    return folder, load(folder, torch.float32)


@pytest.mark.parametrize(("graphs", "backend"), [(0, "torch"), (0, "triton"), (16, "triton")])
def test_greedy_in_fp32_equals_transformers(model: tuple[Path, torch.nn.Module], graphs: int, backend: str) -> None:
    folder, reference = model
    expected: list[list[int]] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        out = reference.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0, use_cache=True)
        expected.append(out[0, len(prompt) :].tolist())
    assert run(folder, greedy(), depth=1, graphs=graphs, backend=backend, dtype="float32") == expected


@pytest.mark.parametrize(
    "model", ["youtu"], indirect=True
)  # with experts, rounding errors change the routing of tokens
@pytest.mark.parametrize("cost", [0, 1 << 30])
def test_error_of_logits_in_bf16_is_about_that_of_transformers(
    model: tuple[Path, torch.nn.Module], cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the expanded and the absorbed form."""
    from aioengine.attention import _latent
    from aioengine.attention.triton import build

    monkeypatch.setattr(_latent, "POSITION_PAIRS", cost)
    folder, reference = model
    rounded, device = load(folder, torch.bfloat16), torch.device("cuda")
    config = json.loads((folder / "config.json").read_bytes())
    ours = models.build(config, ModelOptions(dtype=torch.bfloat16, device=device, max_positions=256))
    weights.load(ours, folder, load_format="auto", seed=0, report=lambda *_: None)
    pool = torch.zeros(kv_pool_shape(ours.attention_shape, num_pages=32, page_size=16), device=device)
    assert ours.attention_shape.expansions
    attention = build(ours.attention_shape, pool.bfloat16())
    our_error, their_error = 0.0, 0.0
    for prompt in PROMPTS:
        attention.prepare(on_device(make_batch([(0, len(prompt))], [list(range(1, 9))], 16), device))
        ids = torch.tensor(prompt, device=device)
        inputs = model_inputs(ours, ids, torch.arange(len(prompt), device=device))
        actual = ours.compute_logits(ours.forward(inputs, attention)).float()
        exact = reference(ids[None]).logits[0]
        our_error += float((actual - exact).square().sum())
        their_error += float((rounded(ids[None]).logits[0].float() - exact).square().sum())
    assert our_error**0.5 < 1.5 * their_error**0.5


@pytest.mark.parametrize("rows", [[(40, 1), (100, 1), (16, 30), (0, 200), (0, 77)], [(0, 2)] * 32])
def test_graphs_in_pieces_have_the_same_bits(model: tuple[Path, torch.nn.Module], rows: list[tuple[int, int]]) -> None:
    """A padded step in pieces has the same bits as without graphs."""
    from aioengine.attention.triton import build

    device = torch.device("cuda")
    config = json.loads((model[0] / "config.json").read_bytes())
    options = ModelOptions(dtype=torch.bfloat16, device=device, max_positions=256, batch_invariant=True)
    ours = models.build(config, options)
    weights.load(ours, model[0], load_format="auto", seed=0, report=lambda *_: None)
    shape = kv_pool_shape(ours.attention_shape, num_pages=17 * len(rows) + 1, page_size=16)
    pool = torch.randn(shape, dtype=torch.bfloat16, device=device)
    pool[:, :, 0] = 0
    attention = build(ours.attention_shape, pool)
    graphs = PieceGraphs(ours, attention, list(pool), max_outputs=33)
    graphs.capture(610, lambda *_: None)
    tables = [list(range(1 + 17 * row, 18 + 17 * row)) for row in range(len(rows))]
    batch, inputs = on_device(make_batch(rows, tables, 16), device), on_device(make_inputs(ours, rows), device)
    before = pool.clone()
    attention.prepare(batch)
    expected = ours.forward(inputs, attention)
    expected_pool = pool[:, :, 1:].clone()
    pool.copy_(before)
    assert torch.equal(graphs.replay(inputs, batch, len(rows)), expected)
    assert torch.equal(pool[:, :, 1:], expected_pool)


@pytest.mark.parametrize("cost", [0, 1 << 30])
def test_graphs_in_pieces_work_in_each_form(
    model: tuple[Path, torch.nn.Module], cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each form, a padded step in pieces has nearly the same results as without graphs."""
    from aioengine.attention import _latent
    from aioengine.attention.triton import build

    monkeypatch.setattr(_latent, "POSITION_PAIRS", cost)
    device, rows = torch.device("cuda"), [(40, 1), (100, 1), (16, 30), (0, 200), (0, 77)]
    config = json.loads((model[0] / "config.json").read_bytes())
    ours = models.build(config, ModelOptions(dtype=torch.bfloat16, device=device, max_positions=256))
    weights.load(ours, model[0], load_format="auto", seed=0, report=lambda *_: None)
    shape = kv_pool_shape(ours.attention_shape, num_pages=17 * len(rows) + 1, page_size=16)
    pool = torch.randn(shape, dtype=torch.bfloat16, device=device)
    pool[:, :, 0] = 0
    attention = build(ours.attention_shape, pool)
    attention.warm_up()
    graphs = PieceGraphs(ours, attention, list(pool), max_outputs=33)
    graphs.capture(610, lambda *_: None)
    tables = [list(range(1 + 17 * row, 18 + 17 * row)) for row in range(len(rows))]
    batch, inputs = on_device(make_batch(rows, tables, 16), device), on_device(make_inputs(ours, rows), device)
    attention.prepare(batch)
    expected = ours.forward(inputs, attention).float()
    expected_pool = pool[:, :, 1:].clone()
    actual = graphs.replay(inputs, batch, len(rows)).float()
    assert float((actual - expected).norm() / expected.norm()) < 5e-2
    assert float((pool[:, :, 1:] - expected_pool).float().norm() / expected_pool.float().norm()) < 5e-2


def test_deterministic_tokens_do_not_depend_on_the_batch(model: tuple[Path, torch.nn.Module]) -> None:
    """Prompts run alone, together, with prefix hits, in small chunks, without graphs, and with preemptions."""
    samplings = [Sampling(i, temperature=0.0 if i % 4 == 0 else 1.0) for i in range(len(PROMPTS))]

    def world(*, graphs: int = 16, chunk_tokens: int = 512, num_pages: int = 256) -> World:
        settings = make_settings(
            model[0], dtype="bfloat16", depth=1, page_size=16, chunk_tokens=chunk_tokens, num_pages=num_pages
        )
        runner = msgspec.structs.replace(
            settings.runner, device="cuda", attention_backend="triton", batch_invariant=True, cuda_graph_max_rows=graphs
        )
        return World(msgspec.structs.replace(settings, runner=runner))

    plain = world()
    pairs = zip(PROMPTS, samplings, strict=True)
    alone = [plain.answers([prompt], [sampling], max_new_tokens=24)[0] for prompt, sampling in pairs]
    assert plain.answers(PROMPTS, samplings, max_new_tokens=24) == alone
    plain.runner.close()
    for changes in ({"chunk_tokens": 24}, {"graphs": 0}, {"num_pages": 40}):
        other = world(**changes)
        assert other.answers(PROMPTS, samplings, max_new_tokens=24) == alone, changes
        other.runner.close()
