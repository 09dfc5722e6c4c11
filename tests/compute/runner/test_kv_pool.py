"""The tensors of the KV pool."""

from __future__ import annotations

import pytest
import torch

from aioengine.attention._base import AttentionShape
from aioengine.kernels.kv_target import from_stored, to_stored
from aioengine.runner.kv_pool import FIRST_PAGE, PADDING_PAGE, KVPool

SHAPE = AttentionShape(num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, scale=1.0)


@pytest.fixture
def pool() -> KVPool:
    return KVPool(SHAPE, num_pages=5, page_size=4, dtype=torch.bfloat16, device=torch.device("cpu"))


def test_pool_is_zero_and_has_an_additional_padding_page(pool: KVPool) -> None:
    assert pool.tensors[0].shape == (2, 2, 6, 2, 4, 8)
    assert pool.tensors[0].dtype == torch.bfloat16
    assert pool.facts["kv_pool_bytes"] == pool.tensors[0].nbytes
    assert not pool.tensors[0].any()
    assert (PADDING_PAGE, FIRST_PAGE + pool.num_pages) == (0, 6)


def test_cleaning_changes_only_non_finite_numbers_of_the_pages(pool: KVPool) -> None:
    pool.tensors[0].fill_(2.0)
    for page in (2, 3):
        pool.tensors[0][1, 0, page, 0, 1] = torch.nan
        pool.tensors[0][0, 1, page, 1, 0] = -torch.inf
    pool.clean([2, 4])
    assert pool.tensors[0][:, :, [2, 4]].isfinite().all()
    assert pool.tensors[0][1, 0, 2, 0].tolist() == [[2.0] * 8, [0.0] * 8, [2.0] * 8, [2.0] * 8]
    assert not pool.tensors[0][:, :, 3].isfinite().all()


def test_cleaning_an_int8_pool_sets_non_finite_scales_to_zero() -> None:
    pool = KVPool(SHAPE, num_pages=5, page_size=4, dtype=torch.int8, device=torch.device("cpu"))
    [tensor] = pool.tensors
    assert (tensor.shape, pool.facts["kv_pool_bytes"]) == ((2, 2, 6, 2, 4, 8 + 2), tensor.nbytes)
    heads = torch.full((4, 8), 2.0)
    heads[1, 3], heads[2, 0] = torch.nan, torch.inf
    tensor[:, :, [2, 3]] = to_stored(heads, torch.int8)
    pool.clean([2])
    cleaned, other = from_stored(tensor[:, :, [2, 3]], torch.float32).unbind(2)
    torch.testing.assert_close(
        cleaned, torch.tensor([2.0, 0, 0, 2]).unsqueeze(1).expand(cleaned.shape), atol=1e-2, rtol=0
    )
    assert other[:, :, :, 1:3].isnan().all()
    tensor[:, :, [2, 4]] = to_stored(heads, torch.int8)
    pool.clean_failed({0: [2], 1: [4]}, torch.tensor([-1, 5]), torch.from_numpy)
    assert from_stored(tensor[:, :, 2], torch.float32).isfinite().all()
    assert not from_stored(tensor[:, :, 4], torch.float32).isfinite().all()


def test_release_frees_the_memory(pool: KVPool) -> None:
    pool.tensors[0].fill_(1.0)
    pool.release()
    pool.release()
    assert not pool.tensors[0].any()
