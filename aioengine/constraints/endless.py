"""Grammars with no complete text, because a rule always needs itself again."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def endless_rule(alternatives: Mapping[str, Sequence[Sequence[str]]], start: str) -> str | None:
    """Return a rule that always needs itself again, if ``start`` cannot end because of it.

    alternatives: the symbols of each alternative, by rule. Symbols that are not rules are terminals.
    """
    needed = [(rule, alternatives.keys() & symbols) for rule, entries in alternatives.items() for symbols in entries]
    uses: dict[str, list[tuple[str, set[str]]]] = defaultdict(list)
    for rule, symbols in needed:
        for symbol in symbols:
            uses[symbol].append((rule, symbols))
    endless = dict(needed)
    ends = [rule for rule, symbols in needed if not symbols]
    while ends:
        rule = ends.pop()
        if endless.pop(rule, None) is not None:
            for user, symbols in uses[rule]:
                symbols.discard(rule)
                if not symbols:
                    ends.append(user)
    seen: set[str] = set()
    while start in endless and start not in seen:
        seen.add(start)
        start = min(endless[start])
    return start if start in endless else None
