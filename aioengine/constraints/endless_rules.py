"""Finds the rules of a grammar that can never end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence


def endless_rule(alternatives: Mapping[str, Sequence[Sequence[str]]], start: str) -> str | None:
    """Return a rule that keeps ``start`` from ending, because it needs itself again. None: ``start`` can end.

    A rule can end if one of its alternatives has only terminals and rules that can end.

    alternatives: rule -> its alternatives, as lists of symbols. Symbols that are not rules are terminals.
    """
    # for each alternative: its rule, and the rules in it that are not known to end
    needed = [(rule, alternatives.keys() & symbols) for rule, entries in alternatives.items() for symbols in entries]
    uses: dict[str, list[tuple[str, set[str]]]] = defaultdict(list)
    for rule, symbols in needed:
        for symbol in symbols:
            uses[symbol].append((rule, symbols))
    # Remove each rule that can end from all alternatives. When an alternative becomes empty, its rule can end too.
    endless = dict(needed)  # rule -> the rules that its last alternative still needs
    ends = [rule for rule, symbols in needed if not symbols]
    while ends:
        rule = ends.pop()
        if endless.pop(rule, None) is not None:
            for user, symbols in uses[rule]:
                symbols.discard(rule)
                if not symbols:
                    ends.append(user)
    # From ``start``, follow needed rules until one repeats.
    seen: set[str] = set()
    while start in endless and start not in seen:
        seen.add(start)
        start = min(endless[start])
    return start if start in endless else None
