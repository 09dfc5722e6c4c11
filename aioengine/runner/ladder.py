"""The row counts for which a decode step is captured."""

from __future__ import annotations

_SHORT = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def ladder(max_rows: int) -> list[int]:
    """Row counts that get a CUDA graph, ascending; the last is ``max_rows``, none for 0.

    They stand close together where a step is short; a step is padded by a quarter of its rows at most, from 16 on.
    """
    sizes: list[int] = list(_SHORT)
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 512 else 128))
    return [*(size for size in sizes if size < max_rows), max_rows] if max_rows else []
