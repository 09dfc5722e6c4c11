"""The actor of a replica: starts the child processes on its node, watches them, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import ray.actor
from msgspec import Struct
from msgspec.structs import replace

from aioengine.model_files.checkpoint import file_states
from aioengine.model_files.model_folder import ModelFacts, find_facts
from aioengine.protocol.messages import SCHEDULER, Role
from aioengine.protocol.orders import SecureEndpoint
from aioengine.settings.config import ModelConfig, ModelSettings, Settings
from aioengine.supervision.launchers._child_folder import ChildFolder
from aioengine.supervision.launchers._process_child import KILL_WAIT_S, ProcessChild
from aioengine.transport.curve import new_keys

REPORT_S: Final = 1.0
"""Maximum time between two reports of an actor."""


class ChildState(Struct, frozen=True):
    """The state of a child process.

    has_exited, exit_code, log_lines: as in ``ProcessChild``. rows: as in ``ProcessChild.uids_in_flight``.
    """

    role: Role
    pid: int
    has_exited: bool
    exit_code: int | None
    rows: dict[int, int]
    log_lines: tuple[str, ...]


class FrontendAddresses(Struct, frozen=True):
    """The addresses at which the frontend listens, and their public key."""

    to_frontend: str
    from_frontend: str
    public_key: str


class ReplicaHost:
    """Owns the child processes of one incarnation. They end with the process of the actor.

    All methods run on the event loop of the actor.
    """

    def __init__(self) -> None:
        self._keys = new_keys()
        self._children: list[ProcessChild] = []
        self._has_exited = asyncio.Event()  # a child, since the last report
        self._closing = contextlib.ExitStack()
        self._facts: list[ModelFacts] = []
        self._folder: ChildFolder
        self._frontend: FrontendAddresses

    async def prepare(self, models: Sequence[ModelConfig]) -> str:
        """Find the model, and the draft model if there is one, on this machine. This may download them.

        Return the public key of the child processes.

        Raises:
            ValueError: a model is not on this machine, and cannot be downloaded.
        """
        self._facts = [await asyncio.to_thread(find_facts, model) for model in models]
        return self._keys.public

    async def start(
        self, settings: Settings, roles: Sequence[Role], epoch: int, frontend: FrontendAddresses
    ) -> list[ChildState]:
        """Start a child process for each role.

        Raises:
            EngineStartupError, OSError: a child could not be started.
        """
        self._frontend = frontend
        self._folder = ChildFolder(on_this_machine(settings, self._facts), roles)
        self._closing.callback(self._folder.close)
        for role in roles:
            self._start(role, epoch)
        return self._states()

    async def restart(self, role: Role, epoch: int) -> list[ChildState]:
        """Start another child process instead of one that has exited."""
        before = next(child for child in self._children if child.role == role)
        before.close()
        self._children.remove(before)
        self._start(role, epoch)
        return self._states()

    async def report(self) -> list[ChildState]:
        """Wait until a child exits, for at most ``REPORT_S``. Return the states of all children."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await self._has_exited.wait()
        self._has_exited.clear()
        return self._states()

    async def end(self, role: Role, *, is_killed: bool) -> None:
        """Kill a child process, or ask it to exit."""
        for child in self._children:
            if child.role == role:
                child.kill() if is_killed else child.terminate()

    async def close(self) -> None:
        """Kill the children, remove their files, and end the process of the actor."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.reap(KILL_WAIT_S)
            child.close()
        self._closing.close()
        ray.actor.exit_actor()

    def _start(self, role: Role, epoch: int) -> None:
        frontend = self._frontend
        to_frontend = SecureEndpoint(frontend.to_frontend, *self._keys, frontend.public_key)
        from_frontend = SecureEndpoint(frontend.from_frontend, *self._keys, frontend.public_key)
        child = self._folder.start(role, epoch, to_frontend, from_frontend if role == SCHEDULER else None)
        self._children.append(child)
        child.watch(self._has_exited.set)

    def _states(self) -> list[ChildState]:
        states: list[ChildState] = []
        for child in self._children:
            has_exited = not child.is_alive
            log_lines = child.log_lines() if has_exited else ()
            rows = child.uids_in_flight()
            states.append(ChildState(child.role, child.pid, has_exited, child.exit_code, rows, log_lines))
        return states


def on_this_machine(settings: Settings, facts: Sequence[ModelFacts]) -> Settings:
    """Return settings with the paths and file digests of this machine.

    facts: of the model, and of the draft model if there is one; empty: the settings need no change.
    """
    if not facts:
        return settings
    model, drafts = facts[0], facts[1:]
    draft = settings.runner.draft
    if draft is not None:
        draft = replace(draft, model=_local(draft.model, drafts[0]))
    text = settings.text
    if text.tokenizer_path is not None:
        text = replace(text, tokenizer_path=model.tokenizer_path, files=model.weights.tokenizer_files)
    runner = replace(settings.runner, draft=draft)
    return replace(settings, model=_local(settings.model, model), runner=runner, text=text)


def _local(settings: ModelSettings, facts: ModelFacts) -> ModelSettings:
    local = replace(settings, path=facts.path, files=facts.weights.files)
    weights = settings.weights
    if not weights.number:
        return local
    return local.with_weights(replace(weights, files=file_states(map(Path, weights.files))))
