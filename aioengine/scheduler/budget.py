"""TokenBudget: how many tokens a step computes, and how several prompts share them.

Decode rows come first, all of them in every step. Each reads its whole past, so it may count as more than the one
token that it computes; else those rows would wait longer for a step the more of them there are. What is left belongs
to the prompts, in turn: one that can be finished takes what it needs, any other one half of what is left, and whatever
nobody asked for goes back to them in the same order. So a long prompt moves on in every step, a short one that arrives
behind it need not wait for its end, and the tokens of the step are used up.
"""

from __future__ import annotations

LEAST_SHARE = 16  # tokens; a smaller part of a prompt is not worth a row of its own


class TokenBudget:
    """The tokens of one step that are left for prompts."""

    __slots__ = ("left",)

    def __init__(self, chunk_tokens: int, decode_tokens: int) -> None:
        self.left = max(chunk_tokens - decode_tokens, chunk_tokens // 8, 1)

    def take_share(self, wanted: int) -> int:
        """All that is wanted if there is so much, else half of what is left."""
        return self._take(wanted if wanted <= self.left else max(self.left // 2, LEAST_SHARE))

    def take_rest(self, wanted: int) -> int:
        """Up to all that is left."""
        return self._take(wanted)

    def _take(self, wanted: int) -> int:
        taken = min(wanted, self.left)
        self.left -= taken
        return taken
