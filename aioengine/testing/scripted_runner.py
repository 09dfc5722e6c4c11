"""A runner with scripted answers: a part of the prompt selects the answer, given byte by byte, then end-of-text.

It stands on ``FakeRunner`` for pages, pace and faults, and replaces the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aioengine.protocol.columns import TokenColumns
from aioengine.scheduler.plan import TOKENS
from aioengine.testing import fake_runner
from aioengine.testing.byte_tokenizer import EOS_TOKEN_ID, NUM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.config import Settings
    from aioengine.protocol.messages import Control, Progress, Reply
    from aioengine.scheduler.plan import NewRow, Plan, Row, StepResult
    from aioengine.testing.fake_runner import FakeRunner, FakeTicket

ANSWERS_OPTION = "answers"


class ScriptedRunner:
    """Implements ``Runner`` for the tokenizer of bytes.

    ``answers``: the longest key that the prompt holds chooses the answer; the key "" is for all other prompts.
    """

    def __init__(self, inner: FakeRunner, answers: Mapping[str, str]) -> None:
        self._inner = inner
        self._answers = sorted(answers.items(), key=lambda entry: -len(entry[0]))
        self._rows: dict[int, tuple[int, bytes]] = {}

    @property
    def facts(self) -> Mapping[str, str | int | float | bool]:
        return self._inner.facts

    def launch(self, plan: Plan) -> FakeTicket:
        """As of ``FakeRunner``, with the tokens of the answers."""
        for uid in plan.closed:
            self._rows.pop(uid, None)
        for opened in plan.new_rows:
            self._rows[opened.uid] = (opened.num_prompt, self._answer(opened))
        ticket = self._inner.launch(plan)
        sampling = [row for row in plan.rows if row.gives & TOKENS]
        token_ids = [
            token_id if row.uid in ticket.result.failed else self._token(row)
            for row, token_id in zip(sampling, ticket.result.tokens.token_ids, strict=True)
        ]
        ticket.result = msgspec.structs.replace(
            ticket.result, tokens=TokenColumns([row.uid for row in sampling], token_ids)
        )
        return ticket

    def collect(self, ticket: FakeTicket) -> StepResult:
        """Wait until the simulated device is done."""
        return self._inner.collect(ticket)

    def control(self, order: Control) -> Reply:
        """As of ``FakeRunner``."""
        return self._inner.control(order)

    def close(self) -> None:
        self._rows.clear()
        self._inner.close()

    def _answer(self, opened: NewRow) -> bytes:
        prompt = bytes(token_id for token_id in opened.token_ids[: opened.num_prompt] if token_id < NUM_BYTES)
        text = prompt.decode(errors="replace")
        return next((answer.encode() for key, answer in self._answers if key in text), b"")

    def _token(self, row: Row) -> int:
        """The token at the position behind the row's last."""
        num_prompt, answer = self._rows[row.uid]
        position = row.start + row.count - num_prompt
        return answer[position] if position < len(answer) else EOS_TOKEN_ID


def build(settings: Settings, report: Callable[[Progress], None]) -> ScriptedRunner:
    """The factory for ``RunnerSettings.factory``: ``options`` has JSON under "answers" beside those of the fake."""
    options = dict(settings.runner.options)
    answers = msgspec.json.decode(str(options.pop(ANSWERS_OPTION)), type=dict[str, str])
    runner = msgspec.structs.replace(settings.runner, options=options)
    return ScriptedRunner(fake_runner.build(msgspec.structs.replace(settings, runner=runner), report), answers)
