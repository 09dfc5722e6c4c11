"""An fp8 KV cache on a GPU."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from aioengine.attention import _image_attention, _mixed
from aioengine.attention._base import AttentionShape, DecodeBuffers, kv_pool_shape
from aioengine.attention.torch import TorchAttention
from aioengine.kernels.codes import FP8
from tests.compute.attention import test_image_attention
from tests.compute.runner_world import World, make_settings, save_model
from tests.compute.stepping import write_and_attend
from tests.gpu.test_attention import NUM_PAGES, PAGE_SIZE, ROWS, make_batch
from tests.gpu.test_batch_invariance import HEADS, LENGTH, PROMPTS, SAMPLINGS, WAYS, check_attention

CUDA = torch.device("cuda")


def make_shape(num_layers: int, num_heads: int, num_kv_heads: int, head_size: int, **rules: object) -> AttentionShape:
    """Return a shape whose layers have different scales of keys and values."""
    scales = tuple(torch.tensor([0.25 + layer, 0.6], device=CUDA) for layer in range(num_layers))
    sizes = {"num_layers": num_layers, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    return AttentionShape(**sizes, scale=head_size**-0.5, dtype=torch.bfloat16, kv_scales=scales, **rules)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "rules"),
    [(16, 8, 128, {}), (71, 1, 64, {}), (14, 2, 32, {"windows": (None, 40), "soft_cap": 2.0})],
)
def test_triton_matches_torch(
    num_heads: int, num_kv_heads: int, head_size: int, rules: dict[str, object], rows: list[tuple[int, int]]
) -> None:
    check_backend("triton", make_shape(2, num_heads, num_kv_heads, head_size, **rules), rows)


@pytest.mark.parametrize("name", ["mixed, fresh ones last", "one prefill"])
def test_flashinfer_matches_torch(name: str) -> None:
    """The first test may compile FlashInfer's kernel for 16-bit pools, which also computes converted copies."""
    check_backend("flashinfer", make_shape(2, 16, 8, 128), ROWS[name])


def check_backend(name: str, shape: AttentionShape, rows: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
    shape = replace(shape, sinks=(torch.randn(num_heads, device=CUDA),) * 2)
    sizes = [kv_pool_shape(shape.part(layers), num_pages=NUM_PAGES, page_size=PAGE_SIZE) for layers in shape.groups]
    pools = [torch.randn(size, device=CUDA).to(FP8) for size in sizes]
    expected_pools = [pool.clone() for pool in pools]
    backend = _mixed.build(importlib.import_module(f"aioengine.attention.{name}").PLUGIN, shape, pools)
    reference = _mixed.build(TorchAttention, shape, expected_pools)
    batch = make_batch(rows)
    num_tokens = len(batch.slot_mapping)
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_size, device=CUDA, dtype=torch.bfloat16)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    k[0, 0, :2] = torch.tensor([3000.0, -3000.0])
    backend.prepare(batch)
    reference.prepare(batch)
    for layer in range(2):
        result = write_and_attend(backend, q, k, v, layer).float()
        expected = write_and_attend(reference, q.float(), k.float(), v.float(), layer)
        assert (result - expected).norm() / expected.norm() < 1e-2
    for pool, expected_pool in zip(pools, expected_pools, strict=True):
        assert torch.equal(pool.view(torch.uint8), expected_pool.view(torch.uint8))


@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_fixed_decode_rows_match_torch(name: str) -> None:
    torch.manual_seed(0)
    shape, num_rows, lengths = make_shape(1, 32, 8, 128), 5, [4000, 2, 900, 33, 1]
    pool = torch.randn(kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE), device=CUDA).to(FP8)
    batch = make_batch([(length - 1, 1) for length in lengths])
    reference = TorchAttention(shape, pool.clone())
    reference.prepare(batch)
    num_pages = [-(-length // PAGE_SIZE) for length in lengths]
    starts = torch.tensor([0, *np.cumsum(num_pages)], dtype=torch.int32)
    last_lengths = torch.tensor([(length - 1) % PAGE_SIZE + 1 for length in lengths], dtype=torch.int32)
    buffers = DecodeBuffers(
        slot_mapping=batch.slot_mapping.int(),
        starts=starts.cuda(),
        last_lengths=last_lengths.cuda(),
        page_ids=torch.cat([batch.page_table[row, :count] for row, count in enumerate(num_pages)]),
        max_pages=NUM_PAGES,
    )
    fixed = importlib.import_module(f"aioengine.attention.{name}").PLUGIN(shape, pool).fixed_decode(num_rows, buffers)
    fixed.plan(starts.numpy(), last_lengths.numpy())
    heads = torch.randn(num_rows, 48, 128, device=CUDA, dtype=torch.bfloat16)
    q, k, v = heads.split((32, 8, 8), dim=1)
    result, expected = (
        write_and_attend(fixed, q, k, v, 0),
        write_and_attend(reference, q.float(), k.float(), v.float(), 0),
    )
    assert (result.float() - expected).norm() / expected.norm() < 1e-2


def test_image_tokens_attend_to_stored_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from aioengine.attention.triton import build

    torch.manual_seed(0)
    scales = tuple(torch.tensor([0.25 + layer, 0.6]) for layer in range(3))
    heads = torch.randn(3, 46, 8, 16).bfloat16()
    results: list[torch.Tensor] = []
    for device, plugin, dtype in (("cpu", TorchAttention, torch.float32), ("cuda", build, torch.bfloat16)):
        on_device = tuple(scale.to(device) for scale in scales)
        shape = replace(test_image_attention.SHAPE, dtype=dtype, kv_scales=on_device)
        pools = [torch.zeros(len(layers), 2, 13, 2, 4, 16, device=device, dtype=FP8) for layers in shape.groups]
        attention = _image_attention.build(_mixed.build(plugin, shape, pools), shape, pools)
        monkeypatch.setattr(test_image_attention, "PAGES", test_image_attention.PAGES.to(device))
        with torch.device(device):
            results.append(test_image_attention.outputs(attention, heads.to(device, dtype), 0, 46).float().cpu())
    assert (results[1] - results[0]).norm() / results[0].norm() < 1e-2


@pytest.mark.parametrize(("head_size", "window"), [(128, None), (64, 100), (256, None)])
def test_results_do_not_depend_on_the_batch(head_size: int, window: int | None) -> None:
    check_attention(8, 4, head_size, torch.bfloat16, length=LENGTH, ways=WAYS, window=window, is_fp8=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_model("qwen3", path, dtype=torch.bfloat16, **HEADS)
    return path


def world(folder: Path, *, backend: str, graphs: int = 16, num_pages: int = 512, chunk_tokens: int = 512) -> World:
    sizes = {"page_size": PAGE_SIZE, "num_pages": num_pages, "chunk_tokens": chunk_tokens}
    settings = make_settings(folder, dtype="bfloat16", depth=1, **sizes)
    return World(
        msgspec.structs.replace(
            settings,
            memory=msgspec.structs.replace(settings.memory, kv_dtype="fp8_e4m3"),
            runner=msgspec.structs.replace(
                settings.runner,
                device="cuda",
                attention_backend=backend,
                batch_invariant=backend == "triton",
                cuda_graph_max_rows=graphs,
            ),
        )
    )


def test_deterministic_tokens_do_not_depend_on_the_batch(folder: Path) -> None:
    """Prompts run alone, with prefix hits, in small chunks, without graphs, and with preemptions."""
    plain = world(folder, backend="triton")
    pairs = zip(PROMPTS, SAMPLINGS, strict=True)
    alone = [plain.answers([prompt], [sampling], max_new_tokens=24)[0] for prompt, sampling in pairs]
    assert plain.answers(PROMPTS, SAMPLINGS, max_new_tokens=24) == alone
    assert sum(plain.num_cached.values()) > 0
    plain.runner.close()
    for changes in ({"chunk_tokens": 24}, {"graphs": 0}, {"num_pages": 40}):
        other = world(folder, backend="triton", **changes)
        assert other.answers(PROMPTS, SAMPLINGS, max_new_tokens=24) == alone, changes
        other.runner.close()


def test_first_tokens_with_flashinfer_match(folder: Path) -> None:
    """The next tokens may differ where two logits are close."""
    greedy = [msgspec.structs.replace(sampling, temperature=0.0) for sampling in SAMPLINGS]
    answers: list[list[list[int]]] = []
    for backend in ("triton", "flashinfer"):
        running = world(folder, backend=backend)
        assert running.runner.facts["attention_backend"] == backend
        assert int(running.runner.facts["kv_pool_bytes"]) == 513 * PAGE_SIZE * 2 * 2 * 2 * 128
        answers.append(running.answers(PROMPTS, greedy, max_new_tokens=4))
        running.runner.close()
    same = sum(first[0] == second[0] for first, second in zip(*answers, strict=True))
    assert same >= 0.75 * len(PROMPTS)
