"""The sizes of steps for which there are CUDA graphs: rows that decode, tokens of steps with prompts."""

from __future__ import annotations

_SHORT = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, *range(64, 257, 16))


def ladder(max_rows: int) -> list[int]:
    """Row counts that get a CUDA graph, ascending; the last is ``max_rows``, none for 0.

    They stand close together where a step is short, and up to 256 rows, where what matmuls take grows with the rows;
    a step is padded by a quarter of its rows at most, from 16 on.
    """
    sizes: list[int] = list(_SHORT)
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 512 else 128))
    return [*(size for size in sizes if size < max_rows), max_rows] if max_rows else []


_SHARING = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
_PIECES = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
_PIECE = 256
"""Matmuls take tokens by so many at a time."""
MAX_SEEN_TOKENS = 8192
"""Of the largest step that a start goes to some lengths for."""
_WORK = 5e12
"""Weights times tokens of a step from which on an H200 computes longer than a host takes to launch the kernels."""


def cascade_ladder(max_rows: int, *, min_rows: int) -> list[int]:
    """Row counts of steps whose rows share pages that get a CUDA graph, ascending; none below ``min_rows``."""
    sizes = [size for size in _SHARING if min_rows <= size < max_rows]
    return [*sizes, max_rows] if max_rows >= min_rows else []


def piece_ladder(max_tokens: int) -> list[int]:
    """Token counts of steps with prompts in pieces, ascending; the last is ``max_tokens``, none for 0."""
    sizes = [*_PIECES, *range(_PIECES[-1] + _PIECE, max_tokens, _PIECE)]
    return [*(size for size in sizes if size < max_tokens), max_tokens] if max_tokens else []


def longest_piece(num_weights: int, chunk_tokens: int) -> int:
    """Up to how many tokens graphs are worth their while, for a model of so many weights."""
    return min(chunk_tokens, int(_WORK / num_weights), MAX_SEEN_TOKENS)
