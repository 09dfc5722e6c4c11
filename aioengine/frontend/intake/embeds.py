"""``input_embeds``: prompts that are embeddings. Imported only when needed, because it imports numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np

from aioengine.api import checks
from aioengine.errors import RequestTooLargeError
from aioengine.frontend.intake.prompts import DEFAULT_RULES, EmbedsIds, EncodeRules, IdsPrompt

NAME: Final = "input_embeds"
ALLOWED: Final = "a float array [tokens, D], or a list of them"
MAX_EMBEDS_BYTES: Final = 192 * 1024 * 1024
"""Maximum bytes of one prompt in fp32. It is sent in one message."""


def embeds_prompt(name: str, value: object, rules: EncodeRules = DEFAULT_RULES) -> IdsPrompt:
    """Return one prompt in fp32. Its width is checked later, against the model (``RequestChecks.check_ids``).

    Raises:
        TypeError, ValueError: it is not a float array [tokens, D] of finite numbers, nor lists of such numbers.
    """
    if rules.add_special_tokens:
        raise ValueError(f"add_special_tokens=True works only for text, and {name} has embeddings")
    rows = _rows(name, value)
    try:
        array = np.asarray(rows if rules.keep_last is None else rows[-rules.keep_last :])
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be {ALLOWED}, and cannot be converted: {error}") from None
    if array.dtype.kind != "f":
        raise TypeError(f"{name} must be {ALLOWED}, got an array of {array.dtype}")
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name} must be {ALLOWED}, none of them empty, got the shape {list(array.shape)}")
    if 4 * array.size > MAX_EMBEDS_BYTES:
        raise RequestTooLargeError(f"{name} has {4 * array.size} bytes as float32, the limit is {MAX_EMBEDS_BYTES}")
    with np.errstate(over="ignore"):
        embeds = array.astype(np.float32, order="C")
    if not np.isfinite(embeds).all():
        raise ValueError(f"{name} must have finite numbers within float32, not NaN or infinity")
    return IdsPrompt(EmbedsIds(len(embeds), embeds.shape[1], embeds.tobytes()))


def embeds_rows(value: object) -> tuple[Sequence[object], bool]:
    """Return the arrays, and whether they are a batch: a list of arrays, or an array of three dimensions."""
    rows = _rows(NAME, value)
    first = rows[0]
    is_batch = (
        isinstance(first, list | tuple | checks.Array)
        and checks.num_items(first) > 0
        and checks.num_items(cast("Sequence[object]", first)[0]) > 0
    )
    return list(rows) if is_batch else [rows], is_batch


def _rows(name: str, value: object) -> Sequence[object]:
    """Return the rows of an array or list, which must not be empty."""
    if isinstance(value, str | bytes) or not isinstance(value, list | tuple | checks.Array):
        raise checks.wrong_type(name, ALLOWED, value)
    if not checks.num_items(value):
        raise ValueError(f"{name} must be {ALLOWED}, none of them empty, got {checks.shown(value)}")
    return cast("Sequence[object]", value)
