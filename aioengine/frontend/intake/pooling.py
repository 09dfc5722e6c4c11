"""Calls of ``encode`` and ``rerank``: what they ask for, and their answers, made of the vectors of the model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from msgspec import Struct
from msgspec.structs import replace

from aioengine.api import answers, checks
from aioengine.errors import RequestError, RequestTooLargeError
from aioengine.frontend.calls.outputs import CallOutput
from aioengine.frontend.intake.prompts import MediaIds
from aioengine.protocol.columns import POOLED_VECTOR

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from aioengine.api.answers import Answer, Embedding, Ranking, RowError
    from aioengine.frontend.calls.outputs import RowStream
    from aioengine.frontend.intake.encoder import Encoded
    from aioengine.protocol.messages import End
    from aioengine.settings.config import PoolingSettings

    Vector = npt.NDArray[np.float32]

SHORTEST = 1e-12
"""Normalising divides by the length of a vector, but at least by this."""


class Pooled(Struct, frozen=True, kw_only=True):
    """What a call asks for.

    Attributes:
        is_normalized: whether vectors have the length 1; None: as the model's files say.
        dimensions: how many numbers of a vector are kept; None: all.
        truncates: texts that are too long are cut. prompt_name: of the prompt before each text; None: the usual one.
        gives_scores: each answer is a score. is_ranked: answers come best first, and only the first ``top_n``.
        has_sigmoid: the score is the sigmoid of the model's number.
    """

    is_normalized: bool | None = None
    dimensions: int | None = None
    truncates: bool = False
    prompt_name: str | None = None
    gives_scores: bool = False
    is_ranked: bool = False
    top_n: int | None = None
    has_sigmoid: bool = False

    def check(self, settings: PoolingSettings, task: str, vector_size: int) -> None:
        """Check against the model, whose vectors have ``vector_size`` numbers.

        Raises:
            ValueError: the model cannot give that.
        """
        if self.gives_scores and (task != "classify" or settings.num_labels != 1):
            found = f"gives {settings.num_labels} scores" if task == "classify" else f"has the task '{task}'"
            instead = "; score() works with it" if task == "generate" else ""
            raise ValueError(f"rerank needs a cross-encoder, which gives one score; this model {found}{instead}")
        if self.dimensions is not None and self.dimensions > vector_size:
            raise ValueError(f"dimensions must be at most {vector_size} with this model, got {self.dimensions}")
        if self.prompt_name is not None and self.prompt_name not in settings.prompts:
            known = ", ".join(map(repr, settings.prompts)) or "none"
            raise ValueError(f"prompt_name {checks.shown(self.prompt_name)} is not known; the model's prompts: {known}")


def completed(pooled: Pooled | None, settings: PoolingSettings, task: str, vector_size: int) -> Pooled | None:
    """What a call asks for, with the model's values where it gives none; None: it asks for tokens.

    Raises:
        ValueError: the model cannot give that.
    """
    if pooled is None:
        if task == "generate":
            return None
        which = "encode works" if task == "embed" else "encode and rerank work"
        raise ValueError(f"the task of this model is '{task}', and it generates nothing; {which}")
    pooled.check(settings, task, vector_size)
    is_normalized = settings.is_normalized if pooled.is_normalized is None else pooled.is_normalized
    return replace(pooled, is_normalized=is_normalized, has_sigmoid=settings.has_sigmoid)


def fitting(encoded: Encoded, pooled: Pooled, max_tokens: int, check_ids: Callable[[list[int]], None]) -> Encoded:
    """The ids of a text, cut to ``max_tokens`` where the call truncates; or the error for a text that is too long.

    One with images is never cut.
    ``check_ids`` raises ValueError for ids outside the vocabulary. It has not been called yet for too many ids.
    """
    if not isinstance(encoded, list) or len(encoded) <= max_tokens:
        return encoded
    if isinstance(encoded, MediaIds):
        return RequestTooLargeError(
            f"the prompt has {len(encoded)} tokens, {encoded.num_image_tokens} of them of its images, and {max_tokens} "
            "fit; give smaller images, or fewer"
        )
    if pooled.truncates:
        cut = encoded[:max_tokens]
        try:
            check_ids(cut)
        except ValueError as error:
            return error
        return cut
    return RequestTooLargeError(
        f"input_ids has {len(encoded)} tokens, and {max_tokens} fit; with truncate=True the end is cut"
    )


class PooledOutput(CallOutput):
    """The output of a call that wants vectors or scores. ``pooled``: what it asks for, completed from the model."""

    __slots__ = ("pooled",)

    def __init__(self, rid: str, num_rows: int, pooled: Pooled, *, is_batch: bool, returns_exceptions: bool) -> None:
        super().__init__(rid, num_rows, is_stream=False, is_batch=is_batch, returns_exceptions=returns_exceptions)
        self.pooled = pooled

    def end_row(self, row: RowStream, finished: End, delivered_at: float, error: RowError | None = None) -> None:
        """As ``CallOutput.end_row``; a row without a vector has failed."""
        if error is None and answers.error(finished) is None and _data_of(row) is None:
            reason = answers.finish_reason(finished, 0)
            error = RequestError("schedule", f"it ended before its vector was there: {dict(reason)}")
        super().end_row(row, finished, delivered_at, error)

    def answer_of(self, row: RowStream) -> Answer:
        row.join()
        info = answers.answer(row.facts, row)["meta_info"]
        vector = self._vector(_data_of(row) or b"")
        made: Embedding | Ranking = {"embedding": vector, "meta_info": info}
        if self.pooled.gives_scores:
            made = {"score": self._score(float(vector[0])), "index": row.position, "meta_info": info}
        return cast("Answer", made)

    def arranged(self) -> list[Answer | BaseException | None]:
        """The answers in the order of the rows; ranked ones best first, with the errors behind them."""
        if not self.pooled.is_ranked:
            return self.results
        ranked = [entry for entry in self.results if isinstance(entry, dict)]
        ranked.sort(key=lambda entry: -cast("Ranking", entry)["score"])
        return [*ranked[: self.pooled.top_n], *(entry for entry in self.results if isinstance(entry, BaseException))]

    def _score(self, score: float) -> float:
        if not self.pooled.has_sigmoid:
            return score
        small = math.exp(-abs(score))  # it cannot overflow
        return (1.0 if score >= 0 else small) / (1.0 + small)

    def _vector(self, data: bytes) -> Vector:
        import numpy as np  # most programs generate: they need not wait for its import

        vector = np.frombuffer(data, np.float32)[: self.pooled.dimensions].copy()
        if self.pooled.is_normalized:
            vector /= max(math.sqrt(float(vector @ vector)), SHORTEST)
        return vector


def _data_of(row: RowStream) -> bytes | None:
    return next((extra.data for (_, kind), extra in row.extras.items() if kind == POOLED_VECTOR), None)
