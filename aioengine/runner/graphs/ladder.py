"""The sizes that get CUDA graphs: row counts of decode steps, token counts of steps with prompts."""

from __future__ import annotations

_SHORT = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, *range(64, 257, 16))


def ladder(max_rows: int) -> list[int]:
    """Row counts that get a CUDA graph, ascending; the last is ``max_rows``, none for 0.

    They are close together where a step is short, and up to 256 rows, where the time of matmuls grows with the rows.
    From 16 rows on a step is padded by at most a quarter of its rows.
    """
    sizes: list[int] = list(_SHORT)
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 512 else 128))
    return [*(size for size in sizes if size < max_rows), max_rows] if max_rows else []


_CASCADE_ROWS = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
_PIECES = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
_PIECE = 256
"""Tokens of a tile of large matmuls."""
MAX_SEEN_TOKENS = 8192
"""Tokens of the largest step that is captured or warmed up, so that a start takes seconds, not minutes."""
MAX_WHOLE_TOKENS = 2048
"""Tokens of the largest step of an encoder that is captured. Larger ones take the device longer than the host, which
launches them while the device computes the step before.
"""
_WORK = 5e12
"""Parameters times tokens of the step at which an H200 computes as long as the host launches kernels."""


def cascade_ladder(max_rows: int, *, min_rows: int) -> list[int]:
    """Row counts that get a CUDA graph with cascade attention, ascending; none below ``min_rows``."""
    sizes = [size for size in _CASCADE_ROWS if min_rows <= size < max_rows]
    return [*sizes, max_rows] if max_rows >= min_rows else []


def piece_ladder(max_tokens: int) -> list[int]:
    """Token counts that get CUDA graphs in pieces, ascending; the last is ``max_tokens``, none for 0."""
    sizes = [*_PIECES, *range(_PIECES[-1] + _PIECE, max_tokens, _PIECE)]
    return [*(size for size in sizes if size < max_tokens), max_tokens] if max_tokens else []


def longest_piece(num_active: int, chunk_tokens: int, *, is_whole: bool = False) -> int:
    """Tokens of the largest step with prompts that is faster with graphs, where a token goes through ``num_active``
    parameters. ``is_whole``: attention is captured too.
    """
    return min(chunk_tokens, int(_WORK / num_active), MAX_WHOLE_TOKENS if is_whole else MAX_SEEN_TOKENS)
