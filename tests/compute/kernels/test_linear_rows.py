"""Matmuls on a CPU are batch-invariant: a row has the same bits for every number of rows."""

from __future__ import annotations

import itertools
from functools import partial, reduce
from typing import TYPE_CHECKING

import pytest
import torch

from aioengine.kernels import code_linear, linear, row_counts
from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.codes import FP8, Codes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from _pytest.mark import ParameterSet

DTYPES = (torch.bfloat16, torch.float32)
NUM_ROWS = (*range(1, 35), 47, 48, 64, 65, 100, 128, 255, 513)
SHAPES = ((896, 1152), (896, 896), (896, 9728), (4864, 896), (256, 4096), (100, 37), (72, 56), (24, 40), (48, 1))


def cases(shapes: tuple[tuple[int, int], ...]) -> list[ParameterSet]:
    """Return shape, dtype and number of threads. By default each shape has two of the four cases, in turns."""
    parameters: list[ParameterSet] = []
    for place, shape in enumerate(shapes):
        for dtype, num_threads in itertools.product(DTYPES, (1, 2)):
            is_default = (place + DTYPES.index(dtype) + num_threads) % 2
            parameters.append(pytest.param(shape, dtype, num_threads, marks=() if is_default else pytest.mark.slow))
    return parameters


@pytest.mark.parametrize(("shape", "dtype", "num_threads"), cases(SHAPES))
def test_rows_have_the_same_bits_for_every_row_count(
    shape: tuple[int, int], dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    in_features, out_features = shape
    matmul = linear.prepare(torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype))
    x = torch.randn(max(NUM_ROWS), in_features).to(dtype)
    expected = matmul(x)
    counts = NUM_ROWS if in_features * out_features < 5_000_000 else NUM_ROWS[::4]
    assert [count for count in counts if not torch.equal(matmul(x[:count]), expected[:count])] == []
    assert torch.equal(matmul(x[7:8]), expected[7:8])


def cancelling(
    out_features: int, in_features: int, num_rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight, rows and a bias whose products cancel in pairs, so that only the rounding error remains."""
    weight, x = torch.randn(out_features, in_features), torch.randn(num_rows, in_features)
    x *= 2.0 ** torch.randint(-8, 9, (in_features,))
    added, taken_back = torch.randperm(in_features)[: in_features // 2 * 2].chunk(2)
    weight[:, taken_back] = -weight[:, added]
    x[:, taken_back] = x[:, added]
    bias = torch.randn(out_features) * 2.0 ** torch.randint(-16, 4, (out_features,))
    return weight.to(dtype), x.to(dtype), bias.to(dtype)


def rows_that_differ(shape: tuple[int, int], dtype: torch.dtype, *, has_bias: bool) -> list[int]:
    """Return the row counts for which a matmul with a weight [O, I] of this shape gives other bits."""
    weight, x, bias = cancelling(*shape, 96, dtype)
    own_bias = bias if has_bias else None
    matmul = linear.prepare(linear.pack(weight, has_bias=has_bias), own_bias)
    expected = matmul(x)
    counts = (1, 2, 3, 5, 7, 9, 16, 23, 32, 41, 64, 80)
    layouts = (x, x.t().contiguous().t()) if linear.transposes(dtype) else (x,)
    return [
        count
        for count, rows in itertools.product(counts, layouts)
        if not torch.equal(torch.cat([matmul(part) for part in rows.split(count)]), expected)
    ]


SMALL_SHAPES = (
    *((1, 5), (300, 10), (3, 12), (128, 12), (211, 23), (24, 16), (48, 32), (8, 36), (5, 15), (8, 60), (16, 107)),
    *((240, 129), (256, 896), (32, 2880), (128, 2048), (8, 4096), (75, 6205)),
)


@pytest.mark.parametrize(
    ("dtype", "num_threads"),
    [
        (torch.bfloat16, 1),
        (torch.float32, 2),
        (torch.float16, 1),
        pytest.param(torch.bfloat16, 3, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 2, marks=pytest.mark.slow),
        pytest.param(torch.float32, 1, marks=pytest.mark.slow),
    ],
)
def test_rows_of_small_matmuls_have_the_same_bits_for_every_row_count(dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    differing = {
        (shape, has_bias): rows_that_differ(shape, dtype, has_bias=has_bias)
        for shape, has_bias in zip(SMALL_SHAPES, itertools.cycle([False, True]))
    }
    assert {key: counts for key, counts in differing.items() if counts} == {}


@pytest.mark.parametrize(
    ("shape", "dtype", "num_threads"), cases(((896, 1152), (4864, 896), (896, 256), (256, 896), (2048, 2048)))
)
def test_summation_order_is_the_same_for_every_row_count(
    shape: tuple[int, int], dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    weight, row, _ = cancelling(shape[1], shape[0], 1, dtype)
    matmul = linear.prepare(weight, None)
    x = row.repeat(max(NUM_ROWS), 1)
    expected = matmul(x[:1])
    different = [count for count in NUM_ROWS if not torch.equal(matmul(x[:count]), expected.expand(count, -1))]
    assert different == []


def test_rows_are_padded_or_split_to_usable_row_counts() -> None:
    seen: list[int] = []

    def matmul(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return x * 2

    in_pieces = row_counts.in_pieces(matmul, (4, 8, 32, 96))
    for num_rows, expected in {
        1: [4], 5: [8], 8: [8], 9: [32], 33: [32, 4], 60: [32, 32], 70: [96], 96: [96], 97: [96, 4],
        250: [96, 96, 32, 32],
    }.items():  # fmt: skip
        seen.clear()
        x = torch.arange(num_rows, dtype=torch.float32).unsqueeze(1)
        assert torch.equal(in_pieces(x), x * 2)
        assert seen == expected, num_rows


def differing_in(num_rows: Collection[int]) -> Callable[..., row_counts.Matmul]:
    """Return a ``prepare`` whose matmuls add two halves separately for these row counts."""

    def prepare(weight: torch.Tensor, _: torch.Tensor | None) -> row_counts.Matmul:
        def matmul(x: torch.Tensor) -> torch.Tensor:
            halves = (slice(0, 50), slice(50, 100)) if x.shape[0] in num_rows else (slice(0, 100),)
            terms = x[:, :, None].float() * weight.T.float()
            sums = [reduce(torch.add, terms[:, half].unbind(1)) for half in halves]
            return reduce(torch.add, sums).to(x.dtype)

        return matmul

    return prepare


WITH_UNIT = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


@pytest.mark.parametrize(
    ("dtype", "has_unit", "differing", "expected"),
    [
        (torch.float32, True, set(), linear.PADDED_COUNTS),
        (torch.float32, True, {1}, linear.PADDED_COUNTS[1:]),
        (torch.bfloat16, False, {1, 2}, linear.PADDED_COUNTS[2:]),
        (torch.bfloat16, False, {64}, tuple(count for count in linear.TILED_COUNTS if count != 64)),
        (torch.bfloat16, True, set(), WITH_UNIT),
        (torch.bfloat16, True, {1, 64}, tuple(count for count in WITH_UNIT if count not in {1, 64})),
    ],
)
def test_row_counts_with_another_summation_order_are_not_used(
    dtype: torch.dtype,
    has_unit: bool,
    differing: set[int],
    expected: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        linear,
        "_transposed_matmul" if has_unit and dtype == torch.bfloat16 else "_onednn_matmul",
        differing_in(differing),
    )
    monkeypatch.setattr(linear, "has_matrix_unit", lambda: has_unit)
    assert linear.choose_matmul.__wrapped__(48, 100, dtype, 1) == (expected, dtype)


@pytest.mark.parametrize("milliseconds", [(30, 36, 20, 20), (20, 20, 20, 20)])
def test_few_rows_are_padded_where_large_weights_are_read_slowly_with_them(
    milliseconds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "TIMED_SHAPE", (64, 64))
    monkeypatch.setattr(linear, "_onednn_matmul", differing_in(set()))
    monkeypatch.setattr(linear, "_seconds", lambda _, x: milliseconds[len(x) - 1] / 1000)
    slow = tuple(count for count in (1, 2, 3) if milliseconds[count - 1] > 22)
    assert linear.slow_counts.__wrapped__(1) == slow
    monkeypatch.setattr(linear, "has_matrix_unit", lambda: False)
    monkeypatch.setattr(linear, "slow_counts", lambda _: slow)
    for cached_bytes, first in ((1 << 20, 1), (0, 1 + len(slow))):
        monkeypatch.setattr(linear, "CACHED_BYTES", cached_bytes)
        assert linear.choose_matmul.__wrapped__(48, 100, torch.bfloat16, 1).counts[0] == first


def test_unpacked_matmuls_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for differing, first in ((set[int](), 1), ({1, 2}, 3), ({17}, 32), ({64}, 64)):
        monkeypatch.setattr(linear, "_torch_matmul", differing_in(differing))
        assert linear.independent_rows.__wrapped__(48, 100, torch.float32, 1) == range(first, 65)


def test_fp32_is_used_if_few_row_counts_agree_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_matrix_unit", lambda: False)
    in_bf16, in_fp32 = differing_in(range(9, 600)), differing_in({1})

    def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> row_counts.Matmul:
        return (in_bf16 if weight.dtype == torch.bfloat16 else in_fp32)(weight, bias)

    monkeypatch.setattr(linear, "_onednn_matmul", packed)
    choice = linear.choose_matmul.__wrapped__(48, 100, torch.bfloat16, 1)
    assert choice == (linear.PADDED_COUNTS[1:], torch.float32)
    monkeypatch.setattr(linear, "choose_matmul", lambda *_, **__: choice)
    weight, x, _ = cancelling(48, 100, 20, torch.bfloat16)
    assert linear.pack(weight) is weight
    result = linear.prepare(weight, None)(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), x.double() @ weight.double().T, rtol=0.01, atol=0.01)


def test_rows_are_multiplied_one_by_one_if_no_row_counts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(weight: torch.Tensor, *_: object) -> row_counts.Matmul:
        def matmul(x: torch.Tensor) -> torch.Tensor:
            """Return results that depend on the position of a row."""
            return x @ weight.T + torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1) / 8

        return matmul

    for name in ("_onednn_matmul", "_transposed_matmul", "_torch_matmul"):
        monkeypatch.setattr(linear, name, prepare)
    assert linear.choose_matmul.__wrapped__(48, 100, torch.bfloat16, 1) == ((1,), torch.float32)
    rows = linear.independent_rows.__wrapped__(48, 100, torch.float32, 1)
    assert not rows
    weight, x = torch.eye(4), torch.randn(5, 4)
    assert torch.equal(row_counts.in_pieces(prepare(weight), tuple(rows) or (1,))(x), x)


def test_rows_beyond_the_tried_counts_are_split() -> None:
    seen: list[int] = []

    def matmul(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return x * 2

    in_rows = row_counts.in_pieces(matmul, tuple(range(3, 65)))
    for num_rows, expected in {1: [3], 3: [3], 64: [64], 65: [64, 3], 140: [64, 64, 12]}.items():
        seen.clear()
        x = torch.arange(num_rows, dtype=torch.float32).unsqueeze(1)
        assert torch.equal(in_rows(x), x * 2)
        assert seen == expected, num_rows


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", [(64, 896), (320, 1000), (8, 40), (128, 3072)])
def test_gated_results_can_be_multiplied_in_any_number_of_rows(shape: tuple[int, int], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    hidden, inner = shape
    torch.manual_seed(0)
    gate_up, down = torch.randn(2 * inner, hidden).bfloat16(), torch.randn(hidden, inner).bfloat16()
    gated = linear.prepare_gated(gate_up, None, partial(activate_and_mul, activation="silu"))
    if gated is None:
        pytest.skip("only a CPU with a matrix unit leaves results transposed")
    matmul = linear.prepare(down, None)
    codes = Codes(torch.randint(-128, 128, (hidden, inner), dtype=torch.int8), torch.rand(hidden, 1))
    products = matmul, *(code_linear.prepare(own, None, torch.bfloat16).matmul for own in formats_of(codes))
    x = torch.randn(600, hidden).bfloat16()
    for product in products:
        expected = product(gated(x).contiguous())
        counts = [
            count for count in (1, 2, 31, 33, 100, 513) if not torch.equal(product(gated(x[:count])), expected[:count])
        ]
        assert counts == []


def formats_of(codes: Codes) -> list[Codes]:
    """Return int8 codes with one scale per output, and in formats that other code multiplies."""
    return [
        codes,
        codes._replace(offsets=torch.rand_like(codes.scales)),
        Codes(codes.packed.float().to(FP8), codes.scales),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_have_the_same_bits_for_every_row_count(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256).to(dtype).repeat(2374, 1)
    matmul = linear.prepare(weight, None)
    x = torch.randn(64, 256).to(dtype)
    expected = matmul(x)
    assert expected.shape == (64, 151_936)
    assert [count for count in (1, 2, 3, 5, 8, 31, 32) if not torch.equal(matmul(x[:count]), expected[:count])] == []
