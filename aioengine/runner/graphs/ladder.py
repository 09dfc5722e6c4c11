"""The sizes of CUDA graphs: row counts of decode steps, token counts of steps with prompts."""

from __future__ import annotations

from aioengine.settings.config import Settings
from aioengine.settings.resolve import PACKED

_FEW_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, *range(64, 257, 16))


def decode_ladder(max_rows: int) -> list[int]:
    """Return the row counts with a CUDA graph, ascending up to ``max_rows``; empty for 0.

    Small counts are close together, because padding matters most there. From 18 rows on, padding is at most a quarter.
    """
    sizes: list[int] = list(_FEW_ROWS)
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 512 else 128))
    return [*(size for size in sizes if size < max_rows), max_rows] if max_rows else []


_CASCADE_ROWS = (64, 96, 128, 192, 256, 384, 512, 768, 1024)


def cascade_ladder(max_rows: int, *, min_rows: int) -> list[int]:
    """Return the row counts with a CUDA graph for cascade attention, ascending; none below ``min_rows``."""
    sizes = [size for size in _CASCADE_ROWS if min_rows <= size < max_rows]
    return [*sizes, max_rows] if max_rows >= min_rows else []


_SHORT_STEPS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
_TILE_TOKENS = 256
"""Tokens per tile of large matmuls."""


def piece_ladder(max_tokens: int) -> list[int]:
    """Return the token counts with CUDA graphs in pieces, ascending up to ``max_tokens``; empty for 0."""
    sizes = [*_SHORT_STEPS, *range(_SHORT_STEPS[-1] + _TILE_TOKENS, max_tokens, _TILE_TOKENS)]
    return [*(size for size in sizes if size < max_tokens), max_tokens] if max_tokens else []


MAX_WARM_TOKENS = 8192
"""Tokens of the largest step that is captured or warmed up. This limits the time of a start to seconds."""
MAX_ENCODER_TOKENS = 2048
"""Tokens of the largest encoder step that is captured. For larger steps, the device takes longer than the host needs to
launch kernels.
"""
_WORK = 1e13
"""Parameters times tokens of a step for which an H200 takes as long as the host needs to launch its kernels."""


def longest_graph(settings: Settings, num_active: int) -> int:
    """Return the number of tokens of the largest step with prompts that has CUDA graphs; 0: none.

    Larger steps would not be faster with graphs. num_active: as in ``Model``.
    """
    if not settings.runner.cuda_graph_max_rows:
        return 0
    is_encoder = settings.runner.attention_backend == PACKED
    max_tokens = MAX_ENCODER_TOKENS if is_encoder else MAX_WARM_TOKENS
    return min(settings.scheduler.max_step_tokens, int(_WORK / num_active), max_tokens)
