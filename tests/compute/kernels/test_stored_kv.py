"""Numbers of keys and values in a KV pool of another dtype."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels.codes import FP8
from aioengine.kernels.kv_target import from_stored, to_stored

DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_error_is_at_most_half_a_step_of_the_largest_number(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(500, 4, 64) * torch.logspace(-20, 20, 500)[:, None, None]).to(dtype)
    restored = from_stored(to_stored(x, torch.int8), torch.float32)
    largest = x.float().abs().amax(-1, keepdim=True)
    assert ((restored - x.float()).abs() <= largest * (0.5 / 127 + 2**-8)).all()
    assert torch.equal(from_stored(to_stored(x, torch.int8), torch.bfloat16), restored.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_numbers_of_a_head_do_not_depend_on_other_heads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(67, 3, 72).to(dtype)
    whole = to_stored(x, torch.int8)
    assert whole.shape == (67, 3, 74)
    for start, count in ((0, 1), (5, 2), (30, 37)):
        assert torch.equal(to_stored(x[start : start + count], torch.int8), whole[start : start + count])


def test_int8_keeps_zeros_and_marks_heads_with_nan_or_inf() -> None:
    x = torch.zeros(4, 8)
    x[1, 2], x[2, 3], x[3, 5] = torch.nan, -torch.inf, 1e-38
    restored = from_stored(to_stored(x, torch.int8), torch.float32)
    assert not restored[[0, 3]].any()
    assert restored[[1, 2]].isnan().all()


def test_other_dtypes_are_converted() -> None:
    x = torch.randn(5, 8)
    assert to_stored(x, torch.float32) is from_stored(x, torch.float32) is x
    assert torch.equal(from_stored(to_stored(x, torch.bfloat16), torch.float32), x.bfloat16().float())


def test_fp8_numbers_are_scaled_and_limited() -> None:
    x = torch.tensor([[1.0, -3.0, 1e9, -1e9, 0.3], [torch.inf, -torch.inf, torch.nan, 0.0, 448.0]])
    plain = from_stored(to_stored(x, FP8), torch.float32)
    assert plain[0].tolist() == [1.0, -3.0, 448.0, -448.0, 0.3125]
    assert plain[1, :3].isnan().all()
    assert plain[1, 3:].tolist() == [0.0, 448.0]
    scaled = from_stored(to_stored(x, FP8, torch.tensor(0.5)), torch.float32, torch.tensor(0.5))
    assert scaled[0].tolist() == [1.0, -3.0, 224.0, -224.0, 0.3125]
