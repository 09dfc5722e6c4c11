"""A runner with scripted answers. A part of the prompt selects the answer, one byte per token, then end-of-text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import msgspec
from msgspec.structs import replace

from aioengine.protocol.messages import Progress
from aioengine.scheduler.plan import NewRow, StepPlan
from aioengine.settings.config import Settings
from aioengine.testing.byte_tokenizer import EOS_TOKEN_ID, NUM_BYTES
from aioengine.testing.fake_runner import FakeRunner, FakeTicket

ANSWERS_OPTION = "answers"


class ScriptedRunner(FakeRunner):
    """Replaces the tokens of ``FakeRunner`` by answers, for the byte tokenizer."""

    _answers: Mapping[str, str]
    _texts: dict[int, bytes]  # uid -> the answer of an open request

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Build a runner. ``options`` has the answers as JSON, and the options of ``FakeRunner``."""
        options = dict(settings.runner.options)
        answers = msgspec.json.decode(str(options.pop(ANSWERS_OPTION)), type=dict[str, str])
        runner = super().from_settings(replace(settings, runner=replace(settings.runner, options=options)))
        runner._answers, runner._texts = answers, {}
        return runner

    def launch(self, plan: StepPlan) -> FakeTicket:
        for uid in plan.closed:
            self._texts.pop(uid, None)
        for opened in plan.new_rows:
            self._texts[opened.uid] = self._answer(opened)
        return super().launch(plan)

    def _answer(self, opened: NewRow) -> bytes:
        """Return the answer of the longest key in the prompt. The key "" matches any prompt."""
        prompt = bytes(token_id for token_id in opened.token_ids[: opened.num_prompt] if token_id < NUM_BYTES)
        text = prompt.decode(errors="replace")
        key = max((key for key in self._answers if key in text), key=len, default=None)
        return b"" if key is None else self._answers[key].encode()

    def _token(self, opened: NewRow, checksum: int, position: int) -> int:
        answer, index = self._texts[opened.uid], position - opened.num_prompt
        return answer[index] if index < len(answer) else EOS_TOKEN_ID


def build(settings: Settings, report: Callable[[Progress], None]) -> ScriptedRunner:
    """The factory for ``RunnerSettings.factory``."""
    return ScriptedRunner.from_settings(settings)
