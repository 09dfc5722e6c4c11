"""Cuts texts into pieces, like those of a stream."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def cut_up(text: str, cuts: Iterable[int]) -> list[str]:
    """Cut ``text`` at ``cuts``. Equal cuts result in empty pieces."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]
