"""Settings and a small frontend for tests with real children and a fake runner."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from aioengine.protocol.messages import (
    SCHEDULER,
    Control,
    End,
    Limits,
    Progress,
    Reply,
    Role,
    Sampling,
    Stats,
    Submit,
    TextChunks,
    TextRules,
    ToFrontend,
)
from aioengine.protocol.orders import ROLES, Orders
from aioengine.settings.config import SupervisionConfig
from aioengine.supervision.supervisor import Events, Supervisor
from tests.kit.settings import small_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioengine.errors import EngineError
    from aioengine.settings.config import Settings

T = TypeVar("T")

FAKE = "aioengine.testing.fake_runner:build"


def fake_settings(
    *, factory: str = FAKE, tokenizer_path: str | None = None, **options: str | int | float | bool
) -> Settings:
    """Return settings for the fake runner."""
    return small_settings(
        factory=factory, tokenizer_path=tokenizer_path, options=options, max_running=64, chunk_tokens=256, depth=1
    )


def fake_orders(*, board: str) -> Orders:
    """Return orders for a scheduler that is never started."""
    return Orders(
        role=SCHEDULER,
        epoch=2**61 + 1,
        frontend="ipc://a",
        endpoints={"scheduler": "ipc://b", "detokenizer": "ipc://c"},
        board=board,
        parent_pid=1,
        settings=fake_settings(),
    )


class Frontend:
    """A supervisor, and its received messages."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        launcher: str = "process",
        startup_timeout_s: float = 30.0,
        stall_timeout_s: float = 60.0,
        max_restarts: int = 0,
        roles: Sequence[Role] = ROLES,
    ) -> None:
        self.heard: list[ToFrontend] = []
        self.failures: list[EngineError] = []
        self.progress: list[Progress] = []
        self.news = asyncio.Event()
        limits = SupervisionConfig(
            max_restarts=max_restarts, stall_timeout_s=stall_timeout_s, startup_timeout_s=startup_timeout_s
        )
        self.supervisor = Supervisor(
            settings or fake_settings(),
            limits,
            launcher=launcher,
            events=Events(self._on_messages, self._on_failure, self.progress.append, lambda: None),
            roles=roles,
        )

    async def __aenter__(self) -> Frontend:
        await self.supervisor.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop(5.0)

    def submit(self, uid: int, *, num_tokens: int = 8, text: TextRules | None = None, num_prompt: int = 5) -> None:
        prompt = [(uid * 7 + index) % 900 for index in range(num_prompt)]
        submit = Submit(uid, prompt, Sampling(seed=uid), Limits(num_tokens), text or TextRules())
        self.supervisor.send([submit])

    async def finished(self, uid: int, timeout_s: float = 30.0) -> End:
        """Wait for the end of a request."""
        return await self._wait(lambda: self._finished(uid), timeout_s)

    async def call(self, name: str, call_id: int = 1) -> Reply:
        """Send a control call, and return its reply."""
        self.supervisor.send([Control(call_id, name)])
        return await self._wait(
            lambda: next(
                (message for message in self.heard if isinstance(message, Reply) and message.call_id == call_id), None
            ),
            30.0,
        )

    async def failure(self, timeout_s: float = 30.0) -> EngineError:
        return await self._wait(lambda: self.failures[0] if self.failures else None, timeout_s)

    async def idle_stats(self) -> Stats:
        """Wait for statistics without running or waiting requests."""
        self.heard.clear()
        return await self._wait(lambda: next((message for message in self.heard if _is_idle(message)), None), 30.0)

    def token_ids(self, uid: int) -> list[int]:
        """Return the output ids of a request."""
        ids: list[int] = []
        for chunks in self.heard:
            if isinstance(chunks, TextChunks):
                pairs = zip(chunks.tokens.uid_of_each(), chunks.tokens.token_ids, strict=True)
                ids += [token_id for owner, token_id in pairs if owner == uid]
        return ids

    def text(self, uid: int) -> str:
        """Return the text of a request."""
        return "".join(
            text
            for chunks in self.heard
            if isinstance(chunks, TextChunks)
            for owner, text in zip(chunks.tokens.uids, chunks.texts, strict=True)
            if owner == uid
        )

    def _finished(self, uid: int) -> End | None:
        ends = [
            end for message in self.heard if isinstance(message, TextChunks) for end in message.ended if end.uid == uid
        ]
        assert len(ends) < 2
        return ends[0] if ends else None

    async def _wait(self, look: Callable[[], T | None], timeout_s: float) -> T:
        async with asyncio.timeout(timeout_s):
            while (value := look()) is None:
                self.news.clear()
                await self.news.wait()
        return value

    def _on_messages(self, messages: list[ToFrontend]) -> None:
        self.heard += messages
        self.news.set()

    def _on_failure(self, error: EngineError) -> None:
        self.failures.append(error)
        self.news.set()


def _is_idle(message: ToFrontend) -> TypeGuard[Stats]:
    return isinstance(message, Stats) and message.num_running == 0 and message.num_waiting == 0
