"""All stop strings of a request in one pass over its text (the automaton of Aho and Corasick, 1975)."""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache

ROOT = 0


class StopAutomaton:
    """Where the text stands in all stop strings at once.

    A state is the longest end of the text so far that begins a stop string; ``depths[state]`` is its length, which is
    exactly what has to be held back.
    """

    __slots__ = ("_begins", "_children", "_fallbacks", "depths", "stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        """``stops``: at least one, none empty."""
        self._children: list[dict[str, int]] = [{}]
        self._fallbacks = [ROOT]
        self.depths = [0]
        self.stops: list[str | None] = [None]
        """By state: the longest stop string that is complete there."""
        for stop in stops:
            self._insert(stop)
        self._link()
        self._begins = re.compile("[" + "".join(map(re.escape, self._children[ROOT])) + "]")

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """Read ``text`` up to the first end of a stop string.

        Returns the new state and how many characters were read; ``stops[state]`` tells which stop string, if any, ends
        there.
        """
        children, fallbacks, stops = self._children, self._fallbacks, self.stops
        position = 0
        while position < len(text):
            if state == ROOT:
                begin = self._begins.search(text, position)
                if begin is None:
                    return ROOT, len(text)
                position = begin.start()
            char = text[position]
            position += 1
            while (child := children[state].get(char)) is None and state != ROOT:
                state = fallbacks[state]
            state = child or ROOT
            if stops[state] is not None:
                break
        return state, position

    def _insert(self, stop: str) -> None:
        state = ROOT
        for char in stop:
            child = self._children[state].get(char)
            if child is None:
                child = len(self._children)
                self._children[state][char] = child
                self._children.append({})
                self._fallbacks.append(ROOT)
                self.depths.append(self.depths[state] + 1)
                self.stops.append(None)
            state = child
        self.stops[state] = stop

    def _link(self) -> None:
        """Find for each state the longest shorter one that the text is in as well, breadth first."""
        waiting = deque(self._children[ROOT].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._children[state].items():
                shorter = self._fallbacks[state]
                while char not in self._children[shorter] and shorter != ROOT:
                    shorter = self._fallbacks[shorter]
                self._fallbacks[child] = self._children[shorter].get(char, ROOT)
                waiting.append(child)
            if self.stops[state] is None:
                self.stops[state] = self.stops[self._fallbacks[state]]


@lru_cache(maxsize=256)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings; most requests of a program share a few sets of them."""
    return StopAutomaton(stops)
