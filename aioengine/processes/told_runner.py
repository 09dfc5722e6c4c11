"""A runner whose steps are told on a board before they begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.protocol.board import StepBoard
    from aioengine.protocol.messages import Control, Reply
    from aioengine.scheduler.core import Runner
    from aioengine.scheduler.plan import Plan, StepResult

Ticket = TypeVar("Ticket")


class ToldRunner(Generic[Ticket]):
    """Implements ``Runner`` by another one."""

    def __init__(self, runner: Runner[Ticket], board: StepBoard) -> None:
        self._runner = runner
        self._board = board

    @property
    def facts(self) -> Mapping[str, str | int | float | bool]:
        return self._runner.facts

    def launch(self, plan: Plan) -> Ticket:
        rows = plan.rows
        self._board.begin([row.uid for row in rows], lambda: [row.start + row.count for row in rows])
        try:
            return self._runner.launch(plan)
        except Exception:
            self._board.forget()
            raise

    def collect(self, ticket: Ticket) -> StepResult:
        try:
            return self._runner.collect(ticket)
        finally:
            self._board.end()

    def control(self, order: Control) -> Reply:
        """No step is in flight and the board is empty: no request is suspected when the process dies here."""
        return self._runner.control(order)

    def close(self) -> None:
        self._runner.close()
