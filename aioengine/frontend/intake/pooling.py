"""The options of ``encode`` and ``rerank``, checked against the model."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from aioengine.api import checks
from aioengine.settings.config import ModelSettings


class Pooled(Struct, frozen=True, kw_only=True):
    """The options of a call for vectors or scores.

    Attributes:
        is_normalized: whether vectors have length 1; None: as the model's files specify.
        dimensions: number of dimensions that are kept; None: all.
        truncates: cut texts that are too long. prompt_name: the prompt before each text; None: the default one.
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


def completed(pooled: Pooled | None, model: ModelSettings) -> Pooled | None:
    """Return the options with the model's defaults; None: the call generates tokens.

    Raises:
        ValueError: the model does not support the call.
    """
    if pooled is None:
        if model.task == "generate":
            return None
        methods = "encode()" if model.task == "embed" else "encode() or rerank()"
        raise ValueError(f"this model (task '{model.task}') does not generate; use {methods}")
    settings, task = model.pooling, model.task
    vector_size = settings.num_labels or model.hidden_size
    if pooled.gives_scores and (task != "classify" or settings.num_labels != 1):
        kind = f"gives {settings.num_labels} scores" if task == "classify" else f"has the task '{task}'"
        instead = "; score() works with it" if task == "generate" else ""
        raise ValueError(f"rerank needs a cross-encoder, which gives one score; this model {kind}{instead}")
    if pooled.dimensions is not None and pooled.dimensions > vector_size:
        raise ValueError(f"dimensions must be at most {vector_size} with this model, got {pooled.dimensions}")
    if pooled.prompt_name is not None and pooled.prompt_name not in settings.prompts:
        known = ", ".join(map(repr, settings.prompts)) or "none"
        raise ValueError(f"prompt_name {checks.shown(pooled.prompt_name)} is not known; the model's prompts: {known}")
    is_normalized = settings.is_normalized if pooled.is_normalized is None else pooled.is_normalized
    return replace(pooled, is_normalized=is_normalized, has_sigmoid=settings.has_sigmoid)
