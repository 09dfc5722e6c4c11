"""The LoRA adapters that requests may use: loaded at the start or later, and unloaded.

Each load has its own number, so results of an earlier load under the same name are never reused. The scheduler process
reads an adapter when it is loaded, and again when a request needs it after its eviction; the request has everything
that is needed to read it. A new scheduler process loads pinned adapters at once, and the others when they are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Final, NamedTuple, cast

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from aioengine.api import answers, checks
from aioengine.errors import EngineStartupError, RequestError, describe
from aioengine.frontend import tensor_arguments
from aioengine.frontend.controls import Controls
from aioengine.frontend.intake.prompt_options import PerPrompt, PromptCounts, per_prompt
from aioengine.model_files import adapter_folder, tensor_file
from aioengine.model_files.tensor_file import TensorFile
from aioengine.protocol.messages import LOAD_ADAPTER, UNLOAD_ADAPTER, Adapter, Argument
from aioengine.settings.config import GivenAdapter, LoraSettings
from aioengine.supervision.tasks import in_thread, post

MAX_NAME_BYTES: Final = 4096
LOAD_TIMEOUT_S: Final = 600.0
UNLOAD_TIMEOUT_S: Final = 600.0
"""Default timeout of ``unload_lora_adapter`` for the requests that use an adapter."""

BY_TENSOR: Final = "tensors"
"""In ``AdapterResult.loaded_adapters``, in place of the folder of an adapter that was given as tensors."""

_NOT_ENABLED: Final = "this engine serves no LoRA adapters; give its constructor lora_paths, or enable_lora=True"


class AdapterResult(NamedTuple):
    """The result of a call for LoRA adapters; true if it succeeded.

    ``loaded_adapters``: name -> folder of all adapters that requests may use now, or "tensors".
    """

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]

    def __bool__(self) -> bool:
        return self.success


class AdapterRules(Struct, frozen=True):
    """The requirements for adapters.

    Attributes:
        layers: name in the checkpoint -> (outputs, inputs) of each linear layer of the base model.
        given: the adapters to load at the start.
    """

    layers: dict[str, tuple[int, int]]
    settings: LoraSettings
    given: tuple[GivenAdapter, ...] = ()

    def check(self, folder: adapter_folder.AdapterFolder) -> None:
        """Raise ValueError for an adapter of another base, or beyond the limits."""
        folder.parts(self.layers, max_rank=self.settings.max_rank, allowed=self.settings.modules or None)

    def read(self, number: int, name: str, path: Path, *, is_pinned: bool, config: str = "") -> Adapter:
        """Check the folder of an adapter, without reading its weights. Blocks: do not call it on the loop's thread.

        config: see ``Adapter``.

        Raises:
            ValueError: the adapter belongs to another base, or exceeds the limits.
        """
        folder = adapter_folder.read_folder(path, config)
        self.check(folder)
        return Adapter(number, name, str(path), folder.fingerprint, is_pinned, config)


@dataclass(slots=True, eq=False)
class Load:
    """One load of an adapter.

    Attributes:
        file: its tensors, if they did not come from a folder.
        users: the calls that use it. is_leaving: it is being unloaded. idle: set when its last user leaves.
    """

    adapter: Adapter
    file: TensorFile | None = None
    users: set[AdapterChoice] = field(default_factory=set)
    is_leaving: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class AdapterChoice:
    """The adapters of a call: ``lora_path``, one for all prompts or one for each. None is the base model.

    Attributes:
        of_prompts: the name for each prompt. names: these names, each once, in the order of the prompts.
        loads: the loads that the call uses, by name.
    """

    of_prompts: PerPrompt[str | None]
    names: list[str]
    loads: dict[str, Load] = field(default_factory=dict)
    _missing: Callable[[str], ValueError] = ValueError

    def use(self, loads: dict[str, Load], missing: Callable[[str], ValueError]) -> None:
        """Use adapters until ``leave``. ``loads``: by name. ``missing`` makes the error for any other name."""
        self.loads, self._missing = loads, missing
        for load in loads.values():
            load.users.add(self)

    def of(self, prompt_index: int) -> Adapter | None:
        """Return the adapter of a prompt."""
        load = self.loads.get(self.of_prompts.of(prompt_index) or "")
        return None if load is None else load.adapter

    def error_of(self, prompt_index: int) -> ValueError | None:
        """Return the error if the adapter of a prompt is missing; None: it is loaded, or the prompt uses none."""
        name = self.of_prompts.of(prompt_index)
        return None if name is None or name in self.loads else self._missing(name)

    def leave(self) -> None:
        """Release the adapters when the call is over. Runs on the engine's loop; may be called twice."""
        loads, self.loads = self.loads, {}
        for load in loads.values():
            load.users.discard(self)
            if not load.users:
                load.idle.set()


def adapter_choice(options: Mapping[str, object], counts: PromptCounts) -> AdapterChoice | None:
    """Check the option ``lora_path``; return None if it is not set.

    Raises:
        TypeError, ValueError: it is wrong. The entries of a list are checked with their rows.
    """
    given = per_prompt("lora_path", options, _name, counts)
    if given is None:
        return None
    names = dict.fromkeys(name for name in given.values if isinstance(name, str) and name)
    return AdapterChoice(given, list(names))


def _name(value: object) -> str | None:
    return None if value is None else _checked_name("lora_path", value)


_HELD: ContextVar[AdapterChoice | None] = ContextVar("aioengine_held_adapter", default=None)
"""The choice that ``LoadedAdapters.held`` keeps for the calls in this context."""


class LoadedAdapters:
    """The adapters of an engine. ``open`` runs on any thread and takes the engine's lock; other methods on its loop."""

    def __init__(self, rules: AdapterRules | None, controls: Controls, lock: threading.RLock) -> None:
        """``rules``: None if the engine has no adapters."""
        self._rules = rules
        self._controls = controls
        self._lock = lock
        self._loads: dict[str, Load] = {}
        self._aliases: dict[str, set[str]] = {}  # last part of a path -> names of the adapters with such a path
        self._loading: dict[str, bool] = {}  # name -> whether it is pinned
        self._num_loads = 0
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._loads)

    @contextlib.contextmanager
    def held(self, name: object) -> Iterator[None]:
        """Keep one load of an adapter for all calls in this context, for a method that makes several calls.

        The calls find this load even while it is being unloaded.

        Raises:
            ValueError: the adapter is not loaded.
        """
        if not isinstance(name, str) or not name:  # the calls refuse it
            yield
            return
        choice = AdapterChoice(PerPrompt("lora_path", _name, [name], is_list=False), [name])
        self.open(choice)
        before = _HELD.get()
        _HELD.set(choice)
        try:
            yield
        finally:
            post(self._loop, choice.leave)
            _HELD.set(before)  # not a reset, because a collected coroutine may be closed in another context

    def open(self, choice: AdapterChoice, *, prompts_fail_alone: bool = False) -> None:
        """Let a call use its adapters until ``AdapterChoice.leave``.

        ``prompts_fail_alone``: the rows of missing adapters get the error of ``AdapterChoice.error_of``.

        Raises:
            ValueError: an adapter is not loaded, or the engine serves no adapters.
        """
        with self._lock:
            loads = {name: load for name in choice.names if (load := self._find(name)) is not None}
            if len(loads) < len(choice.names) and not (prompts_fail_alone and choice.of_prompts.is_list):
                name = next(name for name in choice.names if name not in loads)
                values = choice.of_prompts.values
                raise answers.named(self._missing(name), values.index(name), len(values))
            choice.use(loads, self._missing)

    def _find(self, name: str) -> Load | None:
        """Return the load for a name or alias that a new call uses; None: there is none."""
        held = _HELD.get()
        load = None if held is None else held.loads.get(name)
        if load is not None and self._loads.get(load.adapter.name) is load:
            return load
        load = self._loads.get(name)
        if load is None:
            names = self._aliases.get(name, set())
            load = self._loads.get(next(iter(names))) if len(names) == 1 else None
        return None if load is None or load.is_leaving else load

    def is_loaded(self, adapter: Adapter) -> bool:
        """Return whether this load of an adapter is still there."""
        load = self._loads.get(adapter.name)
        return load is not None and load.adapter.id == adapter.id and not load.is_leaving

    def _missing(self, name: str) -> ValueError:
        """Return the error for a name without a load."""
        paths = sorted(self._aliases.get(name, ()))
        if self._rules is None:
            return ValueError(f"lora_path is given, and {_NOT_ENABLED}")
        if len(paths) > 1:
            return ValueError(f"lora_path {checks.shown(name)} is the last part of several paths: {', '.join(paths)}")
        if name in self._loads or paths:
            why = "is being unloaded"
        elif name in self._loading:
            why = "is loading; await the call that loads it"
        else:
            known = sorted({*self._loads, *self._aliases})
            why = f"is not loaded{checks.did_you_mean(name, known)}; load_lora_adapter loads one"
        return ValueError(f"the adapter {checks.shown(name)} {why}")

    def list(self) -> AdapterResult:
        """Return the adapters that requests may use now."""
        return self._result("" if self._rules is not None else _NOT_ENABLED)

    async def load(self, lora_name: object, lora_path: object, pinned: object) -> AdapterResult:
        """Load an adapter.

        Raises:
            TypeError, ValueError: an argument has the wrong type or value.
            EngineError: the engine died, or was shut down.
        """
        name = _checked_name("lora_name", lora_name)
        is_pinned = checks.switch("pinned", pinned)
        given = str(lora_path) if isinstance(lora_path, PurePath) else lora_path
        try:
            path = absolute_folder(checks.text("lora_path", given, if_empty="give the folder of the adapter"))
        except OSError as error:  # it is relative, and the working folder is gone
            return self._result(f"the folder {lora_path!r} cannot be found: {describe(error)}")
        return self._result(await self._load(name, path, is_pinned=is_pinned))

    async def load_tensors(
        self, lora_name: object, tensors: object, config_dict: object, load_format: object, pinned: object
    ) -> AdapterResult:
        """Load an adapter from tensors. Its file is kept until it is unloaded, for new processes.

        Raises: see ``load``.
        """
        name = _checked_name("lora_name", lora_name)
        given = tensor_arguments.checked("tensors", tensors)
        config = _config(config_dict)
        tensor_arguments.check_format(load_format)
        is_pinned = checks.switch("pinned", pinned)
        file = await in_thread(partial(tensor_file.write, given))
        try:
            why = await self._load(name, Path(file.path), is_pinned=is_pinned, config=config, file=file)
        finally:
            load = self._loads.get(name)
            if load is None or load.file is not file:
                file.close()
        return self._result(_without_path(why, file.path))

    async def load_given(self) -> None:
        """Load the adapters of ``lora_paths``.

        Raises:
            EngineStartupError: one cannot be used.
        """
        all_given = () if self._rules is None else self._rules.given
        for given in all_given:
            if why := await self._load(given.name, Path(given.path), is_pinned=given.is_pinned):
                raise EngineStartupError(f"lora_paths: {why}")
        for given in all_given:
            if given.alias and given.alias != given.name:
                self._aliases.setdefault(given.alias, set()).add(given.name)

    async def unload(self, lora_name: object, timeout_s: object) -> AdapterResult:
        """Unload an adapter after its last call has ended.

        Raises:
            TypeError, ValueError: an argument has the wrong type or value.
            EngineError: the engine died, or was shut down.
        """
        name = _checked_name("lora_name", lora_name)
        timeout_s = checks.number("timeout", timeout_s, 0, 1e9)
        if self._rules is None:
            return self._result(_NOT_ENABLED)
        with self._lock:
            load = self._find(name)
            if load is None:
                return self._result(str(self._missing(name)))
            load.is_leaving = True  # no other call can use it from now on
        try:
            if load.users:
                load.idle.clear()
                async with asyncio.timeout(timeout_s):
                    await load.idle.wait()
        except BaseException as error:
            load.is_leaving = False
            if not isinstance(error, TimeoutError):
                raise
            users = checks.counted(len(load.users), "call")
            return self._result(
                f"the adapter {name!r} was still used by {users} after {timeout_s:g} s; it stays loaded"
            )
        with self._lock:
            del self._loads[load.adapter.name]
            for names in self._aliases.values():
                names.discard(load.adapter.name)
            self._aliases = {alias: names for alias, names in self._aliases.items() if names}
        try:
            with contextlib.suppress(RequestError):  # the scheduler process was lost, with its adapters
                await self._controls.ask(UNLOAD_ADAPTER, _arguments(load.adapter))
        finally:
            if load.file is not None:
                load.file.close()
        return self._result("")

    def close(self) -> None:
        """Free the tensors of adapters. No call may follow."""
        with self._lock:
            loads, self._loads = self._loads, {}
        for load in loads.values():
            if load.file is not None:
                load.file.close()

    # ------------------------------------------------------------ private

    def _result(self, why_not: str) -> AdapterResult:
        with self._lock:
            loads = [(name, load) for name, load in self._loads.items() if not load.is_leaving]
            loaded = {name: load.adapter.path if load.file is None else BY_TENSOR for name, load in loads}
        return AdapterResult(not why_not, why_not, loaded)

    def _why_not(self, name: str, *, is_pinned: bool) -> str:
        """Return the reason why a name cannot be loaded now, or an empty string."""
        if name in self._loads or name in self._aliases:
            return f"an adapter {name!r} is loaded already; unload it first, or choose another name"
        if name in self._loading:
            return f"an adapter {name!r} is being loaded already"
        if is_pinned and self._rules is not None:
            others = [*(load.adapter.is_pinned for load in self._loads.values()), *self._loading.values()]
            num_slots = self._rules.settings.num_slots
            if sum(others) >= num_slots - 1:
                pinned = checks.counted(sum(others), "pinned adapter")
                return f"the engine has {pinned}, and max_loras_per_batch={num_slots} leaves no place for another one"
        return ""

    async def _load(
        self, name: str, path: Path, *, is_pinned: bool, config: str = "", file: TensorFile | None = None
    ) -> str:
        """Load an adapter, unless the name is in use. Return the reason if it failed.

        config: see ``Adapter``. file: its tensors, if they did not come from a folder.
        """
        if self._rules is None:
            return _NOT_ENABLED
        with self._lock:
            if why := self._why_not(name, is_pinned=is_pinned):
                return why
            self._loading[name] = is_pinned
        self._num_loads += 1
        read = partial(self._rules.read, self._num_loads, name, path, is_pinned=is_pinned, config=config)
        try:
            try:
                adapter = await in_thread(read)
            except ValueError as error:
                return str(error)
            except OSError as error:
                return f"the adapter in {path} cannot be read: {describe(error)}"
            try:
                reply = await self._controls.ask(LOAD_ADAPTER, _arguments(adapter), timeout_s=LOAD_TIMEOUT_S)
            except BaseException:
                self._controls.send(UNLOAD_ADAPTER, _arguments(adapter))  # the scheduler process may have loaded it
                raise
            if reply.success:
                with self._lock:
                    self._loads[name] = Load(adapter, file)
            return reply.message
        finally:
            with self._lock:
                del self._loading[name]


def _arguments(adapter: Adapter) -> dict[str, Argument]:
    return cast("dict[str, Argument]", asdict(adapter))


def _checked_name(argument: str, value: object) -> str:
    return checks.text(argument, value, max_bytes=MAX_NAME_BYTES, if_empty="give the name of the adapter")


def _config(value: object) -> str:
    """Return ``config_dict`` as JSON. peft's ``to_dict`` contains sets and enumerations."""
    if not isinstance(value, Mapping):
        raise checks.wrong_type("config_dict", "a dict, such as LoraConfig.to_dict() of peft", value)
    try:
        return msgspec.json.encode(dict(cast("Mapping[str, object]", value))).decode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"config_dict cannot be written as JSON: {error}") from None


def _without_path(message: str, path: str) -> str:
    """Replace the path of a file in memory in a message by the names of arguments."""
    message = message.replace(f" in {path} ", " ").replace(f"{path}/{adapter_folder.CONFIG}", "config_dict")
    return message.replace(f"{path}/{adapter_folder.TENSORS}", BY_TENSOR).replace(path, BY_TENSOR)


def absolute_folder(path: str) -> Path:
    """Return the absolute path of an adapter: the scheduler process may have another working directory."""
    return Path(os.path.expanduser(path)).absolute()
