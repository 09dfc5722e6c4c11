"""The stages of one request's text: detokenize, then look for stops.

Whole answers are made of the same stages as streams, so that a stream's pieces, joined, are the whole answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.text.detokenizer import Detokenizer
    from aioengine.text.stop import StopMatcher
    from aioengine.text.stop_regex import RegexSearch


class TextPipeline:
    """Turns the output ids of one request into its text, up to a stop.

    Ids are never held back; text may lag behind them, and ``flush`` gives the rest.

    Attributes:
        matched: the stop string or pattern that ended the text, else None.
    """

    __slots__ = ("_detokenizer", "_stops", "matched")

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher | None = None) -> None:
        self._detokenizer = detokenizer
        self._stops = stops if stops is not None and stops.has_stops else None
        self.matched: str | None = None

    @property
    def search(self) -> RegexSearch | None:
        """The search for stop patterns; None: the request has none."""
        return None if self._stops is None else self._stops.search

    def push(self, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """Take the next ids.

        Returns the text that has become certain, how many of the ids belong to the output (all, or up to and with the
        one that completes a stop; none behind a stop), and the stop that was matched, else None.

        Raises:
            RequestError: a stop pattern took too long.
        """
        stops = self._stops
        if stops is None:
            return self._detokenizer.push(token_ids), len(token_ids), None
        if self.matched is not None:
            return "", 0, self.matched
        text = ""
        num_consumed = 0
        for token_id in token_ids:  # one by one, to know the one that completes the stop
            text += stops.push(self._detokenizer.push((token_id,)))
            num_consumed += 1
            if stops.matched is not None:
                self.matched = stops.matched
                break
        return text, num_consumed, self.matched

    def flush(self) -> str:
        """Return the rest of the text; no more ids will come. It may itself hold a stop: see ``matched``."""
        if self._stops is None:
            return self._detokenizer.flush()
        if self.matched is not None:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        self.matched = self._stops.matched
        return text + self._stops.flush()
