"""Fast kernels of operations match their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import pytest
import torch
from torch.nn import functional

from aioengine.families._block_config import Activation
from aioengine.kernels import gated_linear, linear, token_logprobs
from aioengine.kernels.activation import activate_and_mul, gelu
from aioengine.kernels.heads import RotaryTables, rotate_heads
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.norms import add_layer_norm, add_rms_norm, norm_and_add, rms_norm
from aioengine.kernels.triton import launcher
from aioengine.runner.sampling.philox import uniforms
from aioengine.runner.sampling.truncation import draw, kept

SIZES = [(1, 1024), (3, 4096), (257, 896)]


P = ParamSpec("P")
R = TypeVar("R")


def in_torch(operation: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the result of an operation on a GPU without Triton's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "supports", lambda x: False)
        return operation(*args, **kwargs)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize(("num_rows", "size"), SIZES)
def test_norms(num_rows: int, size: int) -> None:
    x, delta, weight = random(num_rows, size), random(num_rows, size), random(size)
    epsilon = torch.tensor(1e-6, device="cuda")
    assert error(rms_norm(x, weight, epsilon), in_torch(rms_norm, x, weight, epsilon)) < 2e-3
    residual, expected_residual = x.clone(), x.clone()
    actual = add_rms_norm(delta, residual, weight, epsilon)
    expected = in_torch(add_rms_norm, delta, expected_residual, weight, epsilon)
    assert torch.equal(residual, expected_residual)
    assert error(actual, expected) < 2e-3


@pytest.mark.parametrize("keeps_sum", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rows", "size"), [*SIZES, (5, 768)])
def test_layer_norm_of_a_sum(num_rows: int, size: int, dtype: torch.dtype, keeps_sum: bool) -> None:
    x, delta = random(num_rows, size, dtype=dtype), random(num_rows, size, dtype=dtype)
    for bias in (None, random(size, dtype=dtype)):
        options = {"weight": random(size, dtype=dtype), "bias": bias, "epsilon": 1e-5, "keeps_sum": keeps_sum}
        residual, expected_residual = x.clone(), x.clone()
        actual = add_layer_norm(delta, residual, **options)
        expected = in_torch(add_layer_norm, delta, expected_residual, **options)
        assert torch.equal(residual, expected_residual)
        assert error(actual, expected) < (2e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "size"), [*SIZES, (5, 771)])
def test_gelu(num_rows: int, size: int, dtype: torch.dtype) -> None:
    x = 3 * random(num_rows, size, dtype=dtype)
    expected = functional.gelu(x.double())
    torch.testing.assert_close(gelu(x).double(), expected, atol=2e-6, rtol=1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize(("num_rows", "size"), SIZES)
def test_activation(num_rows: int, size: int) -> None:
    x = random(num_rows, 2 * size)
    assert error(activate_and_mul(x, "silu"), in_torch(activate_and_mul, x, "silu")) < 4e-3


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norms_sum", [True, False])
def test_norm_and_add(norms_sum: bool, weights: torch.dtype) -> None:
    epsilon = torch.tensor(1e-6, device="cuda")
    for num_rows, size in ((1, 2304), (33, 100), (700, 5376)):
        delta, residual = random(num_rows, size), random(num_rows, size)
        behind, before = random(size, dtype=weights), random(size, dtype=weights) if norms_sum else None
        expected_residual = residual.clone()
        expected = in_torch(norm_and_add, delta, expected_residual, behind, before, epsilon=epsilon)
        actual = norm_and_add(delta, residual, behind, before, epsilon=epsilon)
        assert error(actual, expected) < 3e-3
        assert error(residual, expected_residual) < 3e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gated_gelu(name: Activation, dtype: torch.dtype) -> None:
    for num_rows, size in ((1, 9216), (37, 100), (600, 2048)):
        x = torch.randn(num_rows, 2 * size, device="cuda").to(dtype)
        assert error(activate_and_mul(x, name), in_torch(activate_and_mul, x, name)) < 4e-3


@pytest.mark.parametrize(
    ("size", "num_outputs"),
    [(1024, 4096), (1024, 70_001), (3072, 1024), (896, 1000), (14336, 4096), (4096, 6144), (4096, 20_001)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_matrix_with_few_vectors(size: int, num_outputs: int, has_bias: bool) -> None:
    weight, x = random(num_outputs, size), random(1, size)
    bias = random(num_outputs) if has_bias else None
    matmul = linear.prepare(weight, bias)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert error(matmul(x), expected) < 4e-3
    for num_rows in (3, 16, 17, 33, 64, 65, 128, 129):
        x = random(num_rows, size)
        expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        actual = matmul(x)
        assert error(actual, expected) < 4e-3
        assert torch.equal(matmul(x), actual), "shares are added up in one order"


@pytest.mark.parametrize(
    ("size", "num_outputs", "dtype"),
    [(4096, 14_336, torch.bfloat16), (1088, 8200, torch.float16), (1024, 3072, torch.bfloat16)],
)
def test_gated_product(size: int, num_outputs: int, dtype: torch.dtype) -> None:
    weight = random(2 * num_outputs, size, dtype=dtype) * 0.1
    matmul = gated_linear.prepare(linear.prepare(weight, None), weight, None)
    for num_rows in (1, 2, 16, 17, 33, 64, 65, 80, 81, 96, 97, 128, 129):
        x = random(num_rows, size, dtype=dtype)
        expected = in_torch(activate_and_mul, functional.linear(x.double(), weight.double()), "silu")
        actual = matmul(x)
        assert actual.shape == (num_rows, num_outputs)
        assert error(actual, expected) < 6e-3
        assert torch.equal(matmul(x), actual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("size", "num_outputs"), [(1024, 4096), (3072, 1024), (4096, 28672), (200, 1000)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_invariant_product(size: int, num_outputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight, x = random(num_outputs, size, dtype=dtype), random(700, size, dtype=dtype)
    bias = random(num_outputs, dtype=dtype) if has_bias else None
    matmul = linear.prepare(weight, bias, batch_invariant=True)
    whole = matmul(x)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert error(whole, expected) < (4e-3 if dtype == torch.bfloat16 else 1e-5)
    for num_rows in (1, 2, 7, 16, 33, 64, 65, 128, 200, 512):
        assert torch.equal(matmul(x[:num_rows]), whole[:num_rows]), num_rows
    assert torch.equal(matmul(x[5:6]), whole[5:6])


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(16, 8, 128), (32, 8, 128), (4, 2, 32)])
def test_rotation(num_heads: int, num_kv_heads: int, head_size: int, has_norms: bool) -> None:
    heads = random(5, num_heads + 2 * num_kv_heads, head_size)
    angles = random(5, 1, head_size // 2, dtype=torch.float32)
    tables = RotaryTables(torch.cat((angles.cos(), angles.sin()), 1))
    norms = (random(head_size), random(head_size), torch.tensor(1e-6, device="cuda")) if has_norms else None
    expected = in_torch(rotate_heads, heads.clone(), num_heads, tables, norms)
    for actual, wanted in zip(rotate_heads(heads, num_heads, tables, norms), expected, strict=True):
        assert error(actual, wanted) < 4e-3


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(16, 8, 128), (4, 2, 32), (7, 1, 64)])
def test_rotation_into_the_pool(
    num_heads: int, num_kv_heads: int, head_size: int, has_norms: bool, moves: bool
) -> None:
    heads = random(5, num_heads + 2 * num_kv_heads, head_size)
    angles = random(5, 1, head_size // 2, dtype=torch.float32)
    tables = RotaryTables(torch.cat((angles.cos(), angles.sin()), 1))
    norms = (random(head_size), random(head_size), torch.tensor(1e-6, device="cuda")) if has_norms else None
    slots = torch.tensor([16, 17, 5, 95, 40], dtype=torch.int32, device="cuda")
    pools = [random(6, num_kv_heads, 16, head_size) for _ in range(2)]
    expected_pools = [pool.clone() for pool in pools]
    expected = in_torch(rotate_heads, heads.clone(), num_heads, tables, norms, KVTarget(slots, *expected_pools))
    target = KVTarget(slots, *pools, torch.empty_like(heads) if moves else None)
    for actual, wanted in zip(rotate_heads(heads, num_heads, tables, norms, target), expected, strict=True):
        assert error(actual, wanted) < 4e-3
    assert torch.equal(pools[1], expected_pools[1])
    assert error(pools[0], expected_pools[0]) < 4e-3


def test_sampling() -> None:
    from aioengine.kernels.triton.sampling import Draws, SamplingKernels

    generator = np.random.default_rng(0)
    num_rows, vocab_size = 64, 151_936
    logits = random(num_rows, vocab_size, dtype=torch.float32) * 3
    logits[5] = logits[5].round()  # ties
    logits[6, 77] = logits[3, 99_999] = torch.nan
    logits[1, :10_000] = logits[7, :10_000] = -torch.inf
    seeds = generator.integers(0, 2**63, num_rows, dtype=np.uint64)
    positions = np.arange(num_rows) * 1000
    temperatures = np.linspace(0.3, 1.7, num_rows).astype(np.float32)
    fields = np.zeros((5, num_rows), dtype=np.int32)
    fields[0] = (seeds & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    fields[1] = (seeds >> np.uint64(32)).astype(np.uint32).view(np.int32)
    fields[2] = positions
    fields[3] = (1 / temperatures).view(np.int32)
    fields[4, :4] = 1
    kernels = SamplingKernels(
        max_rows=num_rows, vocab_size=vocab_size, num_embeddings=vocab_size, device=torch.device("cuda")
    )
    out = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    indices = torch.randperm(num_rows, dtype=torch.int32, device="cuda")
    tokens = torch.full((num_rows + 1,), 7, dtype=torch.int64, device="cuda")
    kernels.sample(logits, Draws(torch.from_numpy(fields).cuda()), out, (indices, tokens))
    assert torch.equal(tokens[indices], out.clamp(min=0))
    assert tokens[-1] == 7
    left_out, again = indices.clone(), torch.empty_like(out)
    left_out[9] = -1
    tokens.fill_(7)
    kernels.sample(logits, Draws(torch.from_numpy(fields).cuda()), again, (left_out, tokens))
    expected = out.clone()
    expected[9] = -1
    assert torch.equal(again, expected)
    assert tokens[indices[9]] == 7
    assert torch.equal(out[:3], logits[:3].argmax(-1))
    assert out[[3, 6]].tolist() == [-1, -1]
    probabilities = torch.softmax(logits.cpu() / torch.from_numpy(temperatures)[:, None], -1).nan_to_num(1.0)
    uniform = uniforms(seeds, positions)
    good = [row for row in range(4, num_rows) if row != 6]
    same = (out.cpu().numpy() == draw(probabilities, uniform))[good]
    assert same.mean() > 0.9, "rarely, rounding selects the next token"

    rows = np.array(good, dtype=np.int32)
    rules = (
        generator.choice([1, 5, 200, 1 << 30], len(rows)).astype(np.int32),
        generator.choice([0.1, 0.5, 0.9, 1.0], len(rows)).astype(np.float32),
        generator.choice([0.0, 0.1, 0.02], len(rows)).astype(np.float32),
    )
    draws = Draws(torch.from_numpy(fields).cuda(), tuple(torch.from_numpy(x).cuda() for x in (rows, *rules)))
    kernels.sample(logits, draws, out)
    num_same = 0
    for row, top_k, top_p, min_p in zip(rows, *rules, strict=True):
        keep = kept(probabilities[row].numpy(), top_k=int(top_k), top_p=float(top_p), min_p=float(min_p))
        mass = np.where(keep, probabilities[row].numpy(), 0).cumsum(dtype=np.float64)
        expected = int(np.searchsorted(mass, float(uniform[row]) * mass[-1], side="right"))
        num_same += int(out[row]) == expected
    assert num_same > 0.9 * len(rows)


@pytest.mark.parametrize("vocab_size", [151_936, 151_937])
def test_sampling_does_not_depend_on_the_type_of_logits(vocab_size: int) -> None:
    """If a row has a logits processor, all rows are sampled from an fp32 copy."""
    from aioengine.kernels.triton.sampling import Draws, SamplingKernels

    num_rows, device = 256, torch.device("cuda")
    kernels = SamplingKernels(max_rows=num_rows, vocab_size=vocab_size, num_embeddings=vocab_size, device=device)
    logits = random(num_rows, vocab_size)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    top_p, min_p = torch.full((num_rows,), 0.8, device=device), torch.zeros(num_rows, device=device)
    fields = torch.zeros(5, num_rows, dtype=torch.int32, device=device)
    fields[3] = torch.linspace(0.7, 2, num_rows, device=device).view(torch.int32)
    for step in range(40):
        fields[2] = rows + 1000 * step
        for rules in (None, (rows, torch.full_like(rows, 1 << 30), top_p, min_p)):
            results: list[torch.Tensor] = []
            for scores in (logits, logits.float()):
                out = torch.empty(num_rows, dtype=torch.int64, device=device)
                kernels.sample(scores, Draws(fields, rules), out)
                results += [out, kernels._masses.clone()]
            assert torch.equal(results[0], results[2])
            assert torch.equal(results[1], results[3])


@pytest.mark.parametrize("num_tokens", [96, 2048, 151_936, 151_937])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks_of_grammars(num_tokens: int, dtype: torch.dtype) -> None:
    from aioengine.kernels.triton.logits import mask

    words = torch.randint(-(2**31), 2**31, (3, -(-num_tokens // 32)), device="cuda", dtype=torch.int64).int()
    logits = random(6, num_tokens + 5, dtype=dtype)[:, :num_tokens]
    rules = torch.tensor([[4, -1], [2, 33], [0, -3], [3, -2]], dtype=torch.int32, device="cuda")
    bits = (words[:, :, None] >> torch.arange(32, device="cuda")) & 1
    is_banned = torch.zeros(6, num_tokens, dtype=torch.bool, device="cuda")
    is_banned[[4, 3, 0]] = bits.flatten(1)[:, :num_tokens] == 0
    is_banned[2] = torch.arange(num_tokens, device="cuda") != 33
    expected = logits.masked_fill(is_banned, -torch.inf)
    mask(logits, rules, words)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("num_tokens", [1, 300, 2048, 151_936, 151_937])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs(num_tokens: int, dtype: torch.dtype) -> None:
    logits = 4 * random(7, num_tokens + 3, dtype=dtype)[:, :num_tokens]
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, : num_tokens // 2] = -torch.inf
    token_ids = torch.randint(num_tokens, (7,), device="cuda")
    token_ids[3] = num_tokens - 1
    for num_top in {0, 1, 8, 9, 64, 65} - set(range(num_tokens + 1, 100)):
        for num_asked in (0, 3, 70):
            asked = torch.randint(num_tokens, (7, num_asked), device="cuda") if num_asked else None
            actual = token_logprobs.measure(logits, token_ids, num_top, asked)
            expected = in_torch(token_logprobs.measure, logits, token_ids, num_top, asked)
            num_values = 1 + num_top + num_asked
            assert torch.equal(actual[:, num_values:], expected[:, num_values:])
            values, exact = (part[:, :num_values].contiguous().view(torch.float32) for part in (actual, expected))
            torch.testing.assert_close(values, exact, atol=3e-5, rtol=1e-5)
            alone = token_logprobs.measure(logits[2:3], token_ids[2:3], num_top, None if asked is None else asked[2:3])
            assert torch.equal(alone, actual[2:3]), "a position gives the same bits in any batch"
