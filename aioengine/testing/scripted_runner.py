"""A runner with scripted answers. A part of the prompt selects the answer, one byte per token, then end-of-text.

It uses ``FakeRunner`` for pages, timing and faults, and replaces its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aioengine.protocol.columns import Extra, TokenColumns
from aioengine.protocol.packed_logprobs import OUTPUT_LOGPROBS
from aioengine.scheduler.plan import TOKENS
from aioengine.testing import fake_runner
from aioengine.testing.byte_tokenizer import EOS_TOKEN_ID, NUM_BYTES, VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.protocol.messages import Progress
    from aioengine.scheduler.plan import NewRow, Row, StepPlan, StepResult
    from aioengine.settings.config import Settings
    from aioengine.testing.fake_runner import FakeRunner, FakeTicket

ANSWERS_OPTION = "answers"


class ScriptedRunner:
    """Implements ``Runner`` for the byte tokenizer.

    answers: the longest key in the prompt selects the answer. The key "" matches any prompt.
    """

    def __init__(self, inner: FakeRunner, answers: Mapping[str, str]) -> None:
        self._inner = inner
        self.adapters = None
        self.use_grammars = None
        self.controls = inner.controls
        self._answers = sorted(answers.items(), key=lambda entry: -len(entry[0]))
        self._rows: dict[int, tuple[NewRow, bytes]] = {}

    @property
    def facts(self) -> Mapping[str, str | int | float | bool]:
        return self._inner.facts

    def launch(self, plan: StepPlan) -> FakeTicket:
        """Launch the step with the tokens of the answers."""
        for uid in plan.closed:
            self._rows.pop(uid, None)
        for opened in plan.new_rows:
            self._rows[opened.uid] = opened, self._answer(opened)
        ticket = self._inner.launch(plan)
        inner = ticket.result.tokens
        tokens = TokenColumns(extras=[extra for extra in inner.extras if extra.kind != OUTPUT_LOGPROBS])
        rows = [row for row in plan.rows if row.outputs]
        for row, new in zip(rows, inner.rows(), strict=True):
            if not row.outputs & TOKENS or row.uid in ticket.result.failed:
                tokens.add(row.uid, [new] if isinstance(new, int) else new)
            else:
                self._add(row, tokens)
        ticket.result = msgspec.structs.replace(ticket.result, tokens=tokens)
        return ticket

    def collect(self, ticket: FakeTicket) -> StepResult:
        """Wait for the simulated device."""
        return self._inner.collect(ticket)

    def close(self) -> None:
        self._rows.clear()
        self._inner.close()

    def _answer(self, opened: NewRow) -> bytes:
        prompt = bytes(token_id for token_id in opened.token_ids[: opened.num_prompt] if token_id < NUM_BYTES)
        text = prompt.decode(errors="replace")
        return next((answer.encode() for key, answer in self._answers if key in text), b"")

    def _add(self, row: Row, tokens: TokenColumns) -> None:
        """Add the token after the positions of a row, with its logprobs."""
        opened, answer = self._rows[row.uid]
        position = row.start + row.count - opened.num_prompt
        token_id = answer[position] if position < len(answer) else EOS_TOKEN_ID
        tokens.add(row.uid, (token_id,))
        if opened.logprobs is not None:
            numbers = fake_runner.fake_logprobs(opened.logprobs, token_id, VOCAB_SIZE)
            tokens.extras.append(Extra(row.uid, position, OUTPUT_LOGPROBS, numbers))


def build(settings: Settings, report: Callable[[Progress], None]) -> ScriptedRunner:
    """The factory for ``RunnerSettings.factory``. ``options`` has the answers as JSON, and the options of the fake."""
    options = dict(settings.runner.options)
    answers = msgspec.json.decode(str(options.pop(ANSWERS_OPTION)), type=dict[str, str])
    runner = msgspec.structs.replace(settings.runner, options=options)
    return ScriptedRunner(fake_runner.build(msgspec.structs.replace(settings, runner=runner), report), answers)
