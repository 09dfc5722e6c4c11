"""The user's logits processors. The engine gets the names of their classes; each request may choose one of them.

A processor has the method ``apply(logits, params)``. Each step calls it for the rows that use it. ``logits``
[rows, V] are fp32 on the device. ``params`` are the ``custom_params`` of each row, decoded again for each step.
``apply`` returns logits of the same shape. A processor must not keep per-request state, because steps may be repeated
after a preemption or in another process.

S sampled rows of a step, V tokens of the vocabulary, W columns of the logits (V and padding).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from aioengine.api.checks import shown
from aioengine.errors import describe
from aioengine.protocol.messages import Sampling
from aioengine.runner.request_row import LogitsRow
from aioengine.runner.time_limit import OutOfTimeError, run_limited
from aioengine.runner.transfer import Upload

LIMIT_S: Final = 1.0
"""Time limit of one call of ``apply``."""

MIN_LIMIT_S: Final = 0.02
"""If a row exceeds the time limit, the limit of later rows in the step is halved, but not below this."""

_params = msgspec.json.Decoder(dict[str, Any])


class CustomLogitsProcessor(Protocol):
    def apply(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        """Return the new logits [rows, V] fp32. May change ``logits`` [rows, V] in place."""
        ...


class CustomProcessors:
    """Applies all custom processors, as one logits processor.

    If a row fails, its logits become NaN, so no token is sampled.

    Attributes:
        errors: uid -> error of failed rows. The caller removes the entries.
    """

    def __init__(self, names: Sequence[str], *, vocab_size: int) -> None:
        """Load the classes. Raises ValueError if a class cannot be imported or has no method ``apply``."""
        self.errors: dict[int, str] = {}
        self._processors = {name: load_processor(name) for name in names}
        self._vocab_size = vocab_size

    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.custom_processor)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Change ``rows`` of logits [S, W]: one call for all rows of a processor; if it fails, one for each row."""
        for _, group in groupby(sorted(rows, key=_name_of), _name_of):
            group_rows = list(group)
            error = self._call(logits, group_rows, upload, LIMIT_S)
            if error is None:
                continue
            limit_s = LIMIT_S
            for row in group_rows:
                if len(group_rows) > 1:
                    error = self._call(logits, [row], upload, limit_s)
                if isinstance(error, OutOfTimeError):
                    limit_s = max(limit_s / 2, MIN_LIMIT_S)
                if error is not None:
                    self._fail(logits, row, error)

    def _call(self, logits: Tensor, rows: list[LogitsRow], upload: Upload, limit_s: float) -> BaseException | None:
        """Change ``rows`` of logits [S, W] with one call of their processor. Return its error: its own, an invalid
        result, or OutOfTimeError after ``limit_s``.
        """
        indices = upload(np.array([row.index for row in rows], dtype=np.int64))
        scores = logits[:, : self._vocab_size]
        try:
            params = [_params.decode(row.request.sampling.custom_params or b"{}") for row in rows]
            chosen = scores[indices]
            shape, device = chosen.shape, chosen.device
            apply = self._processors[_name_of(rows[0])].apply
            result: object = run_limited(partial(apply, chosen, params), limit_s)
            if not isinstance(result, torch.Tensor):
                raise TypeError(f"it returned {type(result).__name__}, not the logits")
            if result.shape != shape:
                raise ValueError(f"it returned logits of the shape {list(result.shape)}, not {list(shape)}")
            if result.dtype != torch.float32 or result.device != device:
                raise TypeError(f"it returned {result.dtype} on {result.device}, not torch.float32 on {device}")
            scores[indices] = result
        except (Exception, OutOfTimeError) as error:
            return error
        return None

    def _fail(self, logits: Tensor, row: LogitsRow, error: BaseException) -> None:
        """Record the error of ``row``, and set its logits in ``logits`` [S, W] to NaN."""
        limit = f"it took longer than {LIMIT_S:g} s (or a shorter limit after other slow rows)"
        reason = limit if isinstance(error, OutOfTimeError) else describe(error)
        name = _name_of(row)
        location = _location(self._processors[name], error)
        self.errors[row.request.uid] = f"custom_logit_processor {name!r} failed{location}: {reason}"
        logits[row.index] = torch.nan


def _location(processor: CustomLogitsProcessor, error: BaseException) -> str:
    """Return where the user's code failed, like " at file.py:12"; "" if no frame is in a file of its classes."""
    modules = {sys.modules.get(base.__module__) for base in type(processor).__mro__}
    files = {getattr(module, "__file__", None) for module in modules}
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    lines = [f" at {Path(name).name}:{line}" for name, line in frames if name in files]
    return lines[-1] if lines else ""


def _name_of(row: LogitsRow) -> str:
    return row.request.sampling.custom_processor


def load_processor(name: str) -> CustomLogitsProcessor:
    """Create a processor of the class ``"package.module:Class"``.

    Raises:
        ValueError: the class cannot be imported or instantiated, or has no method ``apply``.
    """
    module_name, _, class_name = name.partition(":")
    try:
        members = vars(importlib.import_module(module_name))
        member = members.get(class_name)
        processor: CustomLogitsProcessor | None = member() if isinstance(member, type) else None
    except Exception as error:
        raise ValueError(f"logits_processors: {name!r} cannot be created: {type(error).__name__}: {error}") from error
    if processor is None:
        problem = "does not exist" if member is None else f"is not a class but {shown(member)}"
        classes = ", ".join(key for key, value in members.items() if callable(getattr(value, "apply", None)))
        message = f"logits_processors: {name!r} {problem}; classes with apply in {module_name}: {classes or 'none'}"
        raise ValueError(message)
    if not callable(getattr(processor, "apply", None)):
        raise ValueError(f"logits_processors: {name!r} has no method apply(logits, params)")
    return processor
