"""The model of a router: its names, its adapters, and its state."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Final

from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineOverloadedError
from aioengine.openai.replies import CallError
from aioengine.openai.stored_responses import StoredResponses
from aioengine.parsing import OutputFormat, output_format

_HUB_FOLDER: Final = re.compile(r".*/models--([^/]+?)--([^/]+)/snapshots/[^/]+")


class ServedModel:
    """An engine and the names by which clients ask for it. The names of its adapters are models too.

    Attributes:
        created: unix time, for ``created`` in lists of models.
    """

    def __init__(
        self, engine: AsyncEngine, names: Sequence[str], tool_parser: str | None, reasoning_parser: str | None
    ) -> None:
        """``names``: empty: the name of the model's folder, or its hub id. Raises ValueError for unknown parsers."""
        self.engine = engine
        self._find_format = partial(output_format, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        self._find_format("")
        self.created = int(time.time())
        self.stored_responses = StoredResponses()
        self._names = list(names)
        self._overloaded_until = 0.0

    @cached_property
    def output_format(self) -> OutputFormat:
        """How the model marks reasoning and tool calls. The engine must be started."""
        return self._find_format(self.engine.tokenizer.chat_template)

    async def names(self) -> list[str]:
        """Return the names of the base model."""
        if not self._names:
            path = (await self.engine.get_model_info())["model_path"].rstrip("/")
            self._names = [_HUB_FOLDER.sub(r"\1/\2", path) if _HUB_FOLDER.fullmatch(path) else path.split("/")[-1]]
        return self._names

    async def adapters(self) -> list[str]:
        """Return the names of the loaded adapters."""
        return list((await self.engine.list_lora_adapters()).loaded_adapters)

    async def find(self, name: str) -> tuple[str, str | None]:
        """Return the full name of a client's model, and its adapter (None: the base model). "" is the base model.

        Raises:
            CallError: there is no such model.
        """
        names = await self.names()
        if not name or name in names:
            return name or names[0], None
        adapters = await self.adapters()
        if name in adapters:
            return name, name
        message = f"the model {name[:200]!r} does not exist; allowed: {', '.join([*names, *adapters])}"
        raise CallError(message, 404, code="model_not_found", param="model")

    def note(self, error: Exception) -> None:
        """Note a refused call: until it may be tried again, the model is not ready."""
        if isinstance(error, EngineOverloadedError):
            self._overloaded_until = time.monotonic() + error.retry_after

    @property
    def readiness(self) -> str:
        """``running`` if requests are accepted, otherwise why not: ``overloaded``, or the state of the engine."""
        state = self.engine.health()["state"]
        return "overloaded" if state == "running" and time.monotonic() < self._overloaded_until else state
