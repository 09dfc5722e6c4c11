"""The sizes of CUDA graphs."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from aioengine.runner.graphs.ladder import (
    MAX_ENCODER_TOKENS,
    cascade_ladder,
    decode_ladder,
    longest_graph,
    piece_ladder,
)
from aioengine.settings.config import Settings
from aioengine.settings.resolve import PACKED
from tests.compute.runner_world import make_settings


@pytest.mark.parametrize("max_rows", [1, 2, 3, 16, 100, 256, 300, 1024])
def test_row_counts_are_close_together(max_rows: int) -> None:
    sizes = decode_ladder(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert all(after - before <= max(4, before // 2) for before, after in itertools.pairwise(sizes))
    assert all(after - before <= 16 for before, after in itertools.pairwise(sizes) if after <= 256)


def test_no_graphs() -> None:
    assert decode_ladder(0) == []


@pytest.mark.parametrize("max_rows", [48, 50, 64, 100, 256, 1024, 2000])
def test_row_counts_of_cascade_graphs(max_rows: int) -> None:
    sizes = cascade_ladder(max_rows, min_rows=48)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 48
    assert sizes[-1] == max_rows


def test_no_cascade_graphs_for_few_rows() -> None:
    assert cascade_ladder(47, min_rows=48) == []
    assert cascade_ladder(0, min_rows=48) == []


@pytest.mark.parametrize("max_tokens", [0, 20, 32, 500, 622, 1024, 1100, 8192])
def test_token_counts_of_graphs_in_pieces(max_tokens: int) -> None:
    sizes = piece_ladder(max_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[-1:] == ([max_tokens] if max_tokens else [])
    assert all(after - before <= max(64, min(before // 2, 256)) for before, after in itertools.pairwise(sizes))


def settings_of(chunk_tokens: int, *, backend: str = "triton", graph_rows: int = 8) -> Settings:
    settings = make_settings("", chunk_tokens=chunk_tokens)
    runner = replace(settings.runner, attention_backend=backend, cuda_graph_max_rows=graph_rows)
    return replace(settings, runner=runner)


def test_graphs_of_prompts_end_where_the_device_is_slower_than_the_host() -> None:
    assert longest_graph(settings_of(8192), 600_000_000) > 2048
    assert longest_graph(settings_of(8192), 2_000_000_000) == 5000
    assert 1024 < longest_graph(settings_of(8192), 8_000_000_000) < 2048
    assert longest_graph(settings_of(512), 4_000_000) == settings_of(512).scheduler.max_step_tokens
    assert longest_graph(settings_of(131_072), 4_000_000) == 8192, "a start must not take minutes"
    assert longest_graph(settings_of(8192, backend=PACKED), 4_000_000) == MAX_ENCODER_TOKENS
    assert longest_graph(settings_of(8192, graph_rows=0), 4_000_000) == 0
