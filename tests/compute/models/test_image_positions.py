"""Three-axis positions with and without tables, and windows and positions of patches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModel
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from aioengine.families._rope_config import RopeConfig
from aioengine.layers.rope import RotaryEmbedding
from aioengine.models._qwen_tower import patch_positions, windows_of
from aioengine.protocol.messages import Media
from aioengine.runner.images import grid_positions
from tests.kit.vision_models import MODELS

GRIDS = [(1, 4, 6), (1, 2, 2), (1, 10, 4), (1, 2, 12)]


def test_prompt_positions_match_transformers() -> None:
    model = AutoModel.from_config(MODELS["qwen2_5_vl"]().config)
    types: list[int] = [0, 0, 0]
    media: list[Media] = []
    for grid in GRIDS:
        num_tokens = grid[1] * grid[2] // 4
        media.append(Media(len(types), num_tokens, num_tokens, b"", "", grid))
        types += [1] * num_tokens + [0, 0]
    positions, deltas = model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64), torch.tensor([types]), image_grid_thw=torch.tensor(GRIDS)
    )
    reversed_positions = grid_positions(len(types), media[::-1])
    assert np.array_equal(reversed_positions, positions[:, 0].numpy())
    assert reversed_positions.max() + 1 - len(types) == int(deltas[0])


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_each_axis_rotates_its_pairs(is_interleaved: bool) -> None:
    config = RopeConfig(mrope_section=(4, 2, 2), mrope_interleaved=is_interleaved)
    axes = [0, 1, 2, 0, 1, 2, 0, 0] if is_interleaved else [0, 0, 0, 0, 1, 1, 2, 2]
    positions = torch.randint(0, 500, (3, 40))
    short, long = (
        RotaryEmbedding(config, 16, max_position_embeddings=600, num_positions=size, device=torch.device("cpu"))
        for size in (600, 2**31 - 1)
    )
    result, by_axis = short.tables(positions).pairs, [short.tables(positions[axis]).pairs for axis in range(3)]
    assert torch.equal(result, long.tables(positions).pairs)
    for pair, axis in enumerate(axes):
        assert torch.equal(result[..., pair], by_axis[axis][..., pair])
    assert torch.equal(short.tables(positions[0].expand(3, -1)).pairs, by_axis[0])


@pytest.mark.parametrize("grid", [*GRIDS, (2, 6, 10), (1, 22, 14)])
def test_patches_and_windows_match_transformers(grid: tuple[int, int, int]) -> None:
    places = get_vision_position_ids(torch.tensor([grid]), 2)
    assert np.array_equal(np.stack(patch_positions(grid, 2), -1), places.numpy())
    order, ends = get_vision_window_index(torch.tensor([grid]), spatial_merge_size=2, window_size=24, patch_size=4)
    windows, lengths = windows_of(grid, merge=2, side=3)
    assert np.array_equal(windows, order.numpy())
    assert np.array_equal(4 * lengths.cumsum(), ends[1:].numpy())
