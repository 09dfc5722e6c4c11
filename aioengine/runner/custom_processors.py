"""Logits processors of the user: classes that are named when the engine is made, and chosen by each request.

``apply(logits, params)`` of such a class gets the rows of a step that use it, logits [rows, V] fp32 on the device, and
the ``custom_params`` of each, fresh objects in every step; it returns logits of the same shape. A processor keeps no
state of a request: steps are computed again after a preemption, or by another process.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from itertools import groupby
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
import torch

from aioengine.api.checks import shown
from aioengine.errors import describe
from aioengine.runner.time_limit import OutOfTimeError, run_limited

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow
    from aioengine.runner.transfer import Upload

LIMIT_S: Final = 1.0
LEAST_LIMIT_S: Final = 0.02
"""Each row of a step that runs out of time halves the limit of the rows behind it, down to this."""

_params = msgspec.json.Decoder(dict[str, Any])


class CustomLogitsProcessor(Protocol):
    def apply(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        """Logits [rows, V] -> logits [rows, V] fp32; these may be changed in place."""
        ...


class CustomProcessors:
    """All processors of the user, as one processor. The logits of a row that fails become NaN: no token is drawn.

    Attributes:
        errors: why rows failed, by uid; the caller removes what it has read.
    """

    def __init__(self, names: Sequence[str], *, vocab_size: int) -> None:
        """Raises ValueError: a name cannot be imported, or what it names is no such class."""
        self.errors: dict[int, str] = {}
        self._processors = {name: load_processor(name) for name in names}
        self._vocab_size = vocab_size

    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.custom_processor)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Change rows of logits [S, W]; those of the same processor together."""
        for name, group in groupby(sorted(rows, key=_name_of), _name_of):
            together = list(group)
            places = upload(np.array([row.index for row in together], dtype=np.int64))
            scores = logits[:, : self._vocab_size]
            try:
                scores[places] = self._result(name, scores[places], together, LIMIT_S)
            except (Exception, OutOfTimeError) as error:
                if len(together) == 1:
                    self._fail(logits, together[0], error)
                else:
                    self._apply_one_by_one(logits, together)

    def _apply_one_by_one(self, logits: Tensor, rows: list[LogitsRow]) -> None:
        """Change rows of logits [S, W], one at a time: together they failed, and only those at fault shall."""
        limit_s = LIMIT_S
        for row in rows:
            scores = logits[row.index : row.index + 1, : self._vocab_size]
            try:
                scores.copy_(self._result(_name_of(row), scores.clone(), [row], limit_s))
            except (Exception, OutOfTimeError) as error:
                self._fail(logits, row, error)
                if isinstance(error, OutOfTimeError):
                    limit_s = max(limit_s / 2, LEAST_LIMIT_S)

    def _result(self, name: str, given: Tensor, rows: list[LogitsRow], limit_s: float) -> Tensor:
        """The logits [rows, V] that the processor makes of ``given`` [rows, V].

        Raises what the processor raises, OutOfTimeError, and TypeError or ValueError for a result that is not these.
        """
        params = [_params.decode(row.sampling.custom_params or b"{}") for row in rows]
        shape = given.shape
        found: object = run_limited(partial(self._processors[name].apply, given, params), limit_s)
        if not isinstance(found, torch.Tensor):
            message = f"it returned {type(found).__name__}, not the logits"
            raise TypeError(message)
        if found.shape != shape:
            message = f"it returned logits of the shape {list(found.shape)}, not {list(shape)}"
            raise ValueError(message)
        if found.dtype != torch.float32 or found.device != given.device:
            message = f"it returned {found.dtype} on {found.device}, not torch.float32 on {given.device}"
            raise TypeError(message)
        return found

    def _fail(self, logits: Tensor, row: LogitsRow, error: BaseException) -> None:
        """Keep the error of a row of logits [S, W], and let no token be drawn of it."""
        limit = f"it took longer than {LIMIT_S:g} s (less behind other rows that did)"
        why = limit if isinstance(error, OutOfTimeError) else describe(error)
        name = _name_of(row)
        self.errors[row.uid] = f"custom_logit_processor {name!r} failed{_place(self._processors[name], error)}: {why}"
        logits[row.index] = torch.nan


def _place(processor: CustomLogitsProcessor, error: BaseException) -> str:
    """Where in the files of its classes a processor failed: the innermost line; empty where that is elsewhere."""
    modules = {sys.modules.get(base.__module__) for base in type(processor).__mro__}
    files = {getattr(module, "__file__", None) for module in modules}
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    places = [f" at {Path(name).name}:{line}" for name, line in frames if name in files]
    return places[-1] if places else ""


def _name_of(row: LogitsRow) -> str:
    return row.sampling.custom_processor


def load_processor(name: str) -> CustomLogitsProcessor:
    """An object of the class of ``"package.module:Class"``.

    Raises:
        ValueError: it cannot be imported or made, or has no method ``apply``.
    """
    module_name, _, class_name = name.partition(":")
    try:
        known = vars(importlib.import_module(module_name))
        make = known.get(class_name)
        processor: CustomLogitsProcessor | None = make() if isinstance(make, type) else None
    except Exception as error:
        message = f"logits_processors: {name!r} cannot be made: {type(error).__name__}: {error}"
        raise ValueError(message) from error
    if processor is None:
        found = "does not exist" if make is None else f"is no class, but {shown(make)}"
        classes = ", ".join(key for key, value in known.items() if callable(getattr(value, "apply", None)))
        message = f"logits_processors: {name!r} {found}; classes with apply in {module_name}: {classes or 'none'}"
        raise ValueError(message)
    if not callable(getattr(processor, "apply", None)):
        message = f"logits_processors: {name!r} has no method apply(logits, params)"
        raise ValueError(message)
    return processor
