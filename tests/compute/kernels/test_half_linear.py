"""Matmuls in fp32 with weights in 16 bits have the values of fp32, and equal bits for every number of rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch

from aioengine.kernels import half_linear, linear
from aioengine.kernels.half_linear import HalfWeight, PackedBlock
from tests.kit.waiting import wait_until

NUM_ROWS = (*range(1, 40), 63, 64, 65, 100, 121, 128, 200, 299, 513)

pytestmark = pytest.mark.skipif(not half_linear.is_available(), reason="torch has no FBGEMM for this CPU")


def random_weight(num_outputs: int, num_inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return numbers that ``dtype`` holds, in fp32, some of them 2 ** 26 times as large as others."""
    weight = torch.randn(num_outputs, num_inputs) * 0.02
    weight[0, 0], weight[-1, -1] = 0.5, 2.0**-27
    return weight.to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 8), (33, 17), (896, 896), (70, 4864), (half_linear.MAX_OUTPUTS + 9, 72)])
def test_matmul_has_the_values_of_fp32_and_equal_bits_for_every_row_count(
    shape: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, bias = random_weight(*shape, dtype), torch.randn(shape[0]) if has_bias else None
    packed = linear.pack(weight, has_bias=has_bias)
    assert isinstance(packed, HalfWeight)
    assert torch.equal(linear.unpack(packed), weight)
    matmul = linear.prepare(packed, bias)
    x = torch.randn(max(NUM_ROWS), shape[1])
    result = matmul(x)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert [count for count in NUM_ROWS if not torch.equal(matmul(x[:count]), result[:count])] == []
    assert torch.equal(matmul(x[7:8]), result[7:8])


def test_weights_that_fp16_does_not_hold_stay_in_fp32() -> None:
    torch.manual_seed(0)
    weight = random_weight(64, 32)
    assert half_linear.pack(weight) is not None
    weight[3, 5] = 1 / 3
    assert half_linear.pack(weight) is None
    assert linear.pack(weight).is_mkldnn  # type: ignore[union-attr]
    for number in (torch.inf, -torch.inf, torch.nan):
        weight[3, 5] = number
        assert half_linear.pack(weight) is None


@pytest.mark.parametrize("power", [-140, -126, -115, -60, 0, 60, 110])
def test_outputs_of_any_magnitude_are_exact(power: int) -> None:
    """Also beside outputs with much larger weights, and numbers that fp16 cannot hold beside the largest one."""
    torch.manual_seed(0)
    weight = random_weight(64, 256)
    weight[5] = weight[4] * 2.0**-60
    weight[7, 9] = weight[7, 8] * 2.0**-50
    weight[3] = (torch.randn(256).bfloat16().double() * 2.0**power).bfloat16().float()
    packed = half_linear.pack(weight)
    assert packed is not None
    assert torch.equal(packed.restore(), weight)
    x = torch.randn(9, 256)
    result, expected = half_linear.prepare(packed, None)(x).double(), x.double() @ weight.double().t()
    errors = (result - expected).abs().amax(0) / expected.abs().amax(0)
    assert errors[[0, 4, 5, 7]].max() < 1e-5
    if power >= -120:  # otherwise the results are subnormal numbers
        assert errors[3] < 1e-5


def test_weight_of_zeros_gives_zeros() -> None:
    packed = half_linear.pack(torch.zeros(8, 16))
    assert packed is not None
    assert torch.equal(half_linear.prepare(packed, None)(torch.ones(3, 16)), torch.zeros(3, 8))


def test_row_counts_are_those_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matmul that adds in another order for some row counts never computes these."""
    half_linear.agreeing_counts.cache_clear()
    plain = half_linear.multiply

    def multiply(x: torch.Tensor, blocks: list[Any]) -> torch.Tensor:
        half = x.shape[1] // 2
        left, right = x.clone(), x.clone()
        left[:, half:], right[:, :half] = 0, 0
        return plain(left, blocks) + plain(right, blocks) if len(x) in {1, 5, 64} else plain(x, blocks)

    monkeypatch.setattr(half_linear, "multiply", multiply)
    counts = half_linear.agreeing_counts(128, 256, torch.get_num_threads())
    half_linear.agreeing_counts.cache_clear()
    assert counts
    assert not {1, 5, 64} & {*counts}


def test_weights_are_packed_while_another_thread_waits_for_the_end_of_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter may be read while the weights of the model are being updated."""
    can_pack, pack_block = Event(), PackedBlock.of

    def pack_later(weight: torch.Tensor) -> PackedBlock:
        assert can_pack.wait(60)
        return pack_block(weight)

    monkeypatch.setattr(PackedBlock, "of", pack_later)
    weights = [random_weight(20, 24), random_weight(20, 24)]
    first = linear.pack(weights[0])
    with ThreadPoolExecutor() as threads:
        end = threads.submit(half_linear.finish_packing)
        assert wait_until(lambda: half_linear._packer.cache_info().currsize == 0)
        second = linear.pack(weights[1])
        assert not end.done()
        can_pack.set()
        end.result()
    for packed, weight in zip((first, second), weights, strict=True):
        assert isinstance(packed, HalfWeight)
        assert torch.equal(linear.unpack(packed), weight)
    half_linear.finish_packing()
