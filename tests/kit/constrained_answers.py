"""A fake engine whose scripted answers follow the constraints of their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from aioengine import AsyncEngine
from aioengine.constraints.grammars import Constraint, Grammars
from aioengine.protocol.messages import Progress
from aioengine.scheduler.plan import NewRow, StepPlan
from aioengine.settings.config import Settings
from aioengine.testing import fake_engine
from aioengine.testing.fake_runner import FakeTicket
from aioengine.testing.scripted_runner import ScriptedRunner

CLOSING = b'"}]'
"""These tokens end a value. They come first where the answer is not allowed."""


class ConstrainedRunner(ScriptedRunner):
    """Replaces each token of an answer that the grammar does not allow."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._constraints: dict[int, Constraint] = {}
        self.use_grammars: Callable[[Grammars], None] = self._use_grammars  # type: ignore[assignment]

    def _use_grammars(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def launch(self, plan: StepPlan) -> FakeTicket:
        for uid in plan.closed:
            self._constraints.pop(uid, None)
        for opened in plan.new_rows:
            if (grammar := opened.sampling.grammar) is not None:
                constraint = self._grammars.open(grammar, opened.token_ids, opened.num_prompt)
                self._constraints[opened.uid] = constraint
        return super().launch(plan)

    def _token(self, opened: NewRow, checksum: int, position: int) -> int:
        token_id = super()._token(opened, checksum, position)
        constraint = self._constraints.get(opened.uid)
        if constraint is None or constraint.is_over:
            return token_id
        allowed = self._allowed(constraint)
        if token_id not in allowed:
            token_id = next((closing for closing in CLOSING if closing in allowed), min(allowed))
        constraint.advance(token_id)
        return token_id

    def _allowed(self, constraint: Constraint) -> set[int]:
        if constraint.next_token >= 0:
            return {constraint.next_token}
        masks = np.zeros((1, self._grammars.num_words), dtype=np.int32)
        self._grammars.fill([constraint], masks)
        return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist())


def build(settings: Settings, report: Callable[[Progress], None]) -> ConstrainedRunner:
    """Factory for ``RunnerSettings.factory``."""
    return ConstrainedRunner.from_settings(settings)


@contextmanager
def constrained_engine(answers: Mapping[str, str]) -> Iterator[AsyncEngine]:
    """Return a fake engine with these answers. Start it within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_engine, "SCRIPTED_RUNNER", f"{__name__}:build")
        yield fake_engine.fake_async_engine(answers)
