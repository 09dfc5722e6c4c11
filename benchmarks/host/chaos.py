"""Chaos: random load on an engine whose processes are killed and stopped; readers leave, dawdle and come back.

    python -m benchmarks.host.chaos [--minutes 20] [--workers 48] [--seed 1] [--no-kills] [--tp-size 2] [--dp-size 2]
        [--json]

Real processes with a fake model, whose output is known, so every byte that anybody reads is compared. Beside the load:
SIGKILL and SIGSTOP to the engine's processes, requests that kill the scheduler (one of them fails, nobody else),
requests that are wrong in all kinds of ways, garbage on the engine's sockets, stop patterns that take exponential
time, texts at which the tokenizer panics, a signal handler and finalizers that abort requests, times without a free
file descriptor, and other engines whose tasks are cancelled. Nobody may wait for longer than a minute, and no callback
of the program's loop may use more than 50 ms of CPU time. At the end nothing may be left: requests, pages, processes,
descriptors, threads, files.

The exit status is 1 after any mismatch, hang, leak or slow callback, and the seed repeats the choices (not the timing).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import zmq

from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineOverloadedError, RequestError
from aioengine.testing.byte_tokenizer import BYTE_MODEL
from aioengine.testing.fake_engine import FakeSetup
from aioengine.testing.faults import Faults
from benchmarks.host import chaos_program
from benchmarks.host.chaos_program import AbortingFinalizer, AbortingSignalHandler, CallbackWatch, PanickingTokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aioengine.api.stream import Stream
    from aioengine.frontend.engine_parts import Blueprint

NUM_PROMPTS = 24
MAX_OUTPUT = 120
HANG_S = 60.0
POISON = "\x07"
"""The fake model kills its process when it computes this byte of a prompt."""

KILL_EVERY_S = (1.0, 5.0)
STOP_EVERY_S = (1.0, 4.0)
POISON_EVERY_S = (6.0, 15.0)
SHORTAGE_EVERY_S = (5.0, 15.0)
CANCEL_EVERY_S = (4.0, 10.0)
MAX_CALLBACK_S = 0.05
SETTLE_S = 30.0


class Mismatch(Exception):  # not an error of the engine's tree: what this program looks for
    """Somebody read something else than there should have been."""


class Chaos:
    """One engine, everything that is done to it, and what came of it."""

    def __init__(self, engine: AsyncEngine, place: Path, seed: int) -> None:
        self.engine = engine
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.expected: list[str] = []
        self.is_over = False
        self._place = place
        self._draw = random.Random(seed)
        self._num_asked = 0
        self._descriptors = asyncio.Lock()  # held where they are short, and where this program needs some
        self._handler = AbortingSignalHandler(engine, seed)

    def prompt(self, number: int) -> str:
        """Return a prompt. Some share long beginnings, and some are long."""
        return f"{'chaos ' * (number % 5) * 8}prompt {number}"

    async def learn(self) -> None:
        """Record the answer to every prompt while nothing is disturbed."""
        params = {"max_new_tokens": MAX_OUTPUT, "temperature": 0}
        outs = await self.engine.async_generate([self.prompt(number) for number in range(NUM_PROMPTS)], params)
        self.expected = [out["text"] for out in outs]

    # ------------------------------------------------------------ the load

    async def work(self) -> None:
        """Ask for one thing after the other."""
        behaviours = [
            self.whole, self.read, self.read, self.dawdle, self.leave, self.leave, self.drop, self.abort, self.batch,
            self.come_back, self.come_back, self.hurry, self.stand_in_line, self.be_interrupted, self.be_collected,
            self.match_slowly, self.panic,
        ]  # fmt: skip
        while not self.is_over:
            behaviour = self._draw.choice(behaviours)
            await self.watched(behaviour.__name__, behaviour())

    async def watched(self, name: str, asking: Awaitable[None]) -> None:
        """Check that ``asking`` ends, in one of the allowed ways."""
        self.counts["requests"] += 1
        try:
            async with asyncio.timeout(HANG_S):
                await asking
            self.counts[name] += 1
        except TimeoutError:
            self.counts["hangs"] += 1
            self.problems.append(f"{name} did not end within {HANG_S:g} s: {self.engine.stats()}")
        except Mismatch as mismatch:
            self.counts["mismatches"] += 1
            self.problems.append(f"{name}: {mismatch}")
        except EngineOverloadedError:
            self.counts["refused"] += 1
            await asyncio.sleep(0.05)
        except RequestError as error:
            if error.stage != "crash":
                raise
            self.counts["blamed"] += 1  # it was alone with a process that this program killed, twice

    def ask(self) -> tuple[int, int, dict[str, object]]:
        """Return a prompt, a length, and options."""
        number, length = self._draw.randrange(NUM_PROMPTS), self._draw.randint(1, MAX_OUTPUT)
        tenant = self._draw.choice(["gold", "free", None])
        return number, length, {"tenant": tenant, "priority": self._draw.randint(-1, 1)}

    def stream(self, number: int, length: int, **options: object) -> Stream:
        params = {"max_new_tokens": length, "temperature": 0}
        return self.engine.async_generate(self.prompt(number), params, stream=True, **options)  # type: ignore[call-overload,no-any-return]

    def compare(self, number: int, text: str, start: int, end: int | None) -> None:
        """Check that ``text`` is the answer from ``start`` to ``end``, if the end is known."""
        wanted = self.expected[number][start : start + len(text) if end is None else end]
        if text != wanted:
            raise Mismatch(f"prompt {number} from {start} to {end}: got {text!r}, wanted {wanted!r}")
        self.counts["tokens"] += len(text)

    async def whole(self) -> None:
        number, length, options = self.ask()
        params = {"max_new_tokens": length, "temperature": 0}
        out = await self.engine.async_generate(self.prompt(number), params, **options)  # type: ignore[call-overload]
        self.compare(number, out["text"], 0, length)

    async def read(self, pause_s: float = 0.0) -> None:
        number, length, options = self.ask()
        text, is_over = "", False
        async for chunk in self.stream(number, length, **options):
            if is_over or chunk["text_offset"] != len(text) or chunk["token_offset"] != len(text):
                raise Mismatch(f"prompt {number}: a chunk at {chunk['text_offset']} after {len(text)} characters")
            text += chunk["text"]
            is_over = chunk["meta_info"]["finish_reason"] is not None
            if pause_s:
                await asyncio.sleep(self._draw.random() * pause_s)
        self.compare(number, text, 0, length)

    async def dawdle(self) -> None:
        """Read slowly, sometimes so slowly that the request is suspended."""
        await self.read(pause_s=1.0)

    async def leave(self) -> None:
        """Cancel a task at any moment."""
        reading = asyncio.ensure_future(self._draw.choice([self.whole, self.read, self.batch])())
        await asyncio.wait([reading], timeout=self._draw.random() * 0.2)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading

    async def drop(self) -> None:
        number, length, options = self.ask()
        held = [self.stream(number, length, **options)]
        await asyncio.sleep(self._draw.random() * 0.1)
        held.clear()

    async def abort(self) -> None:
        """Abort, and check the text until then and the reason."""
        number, length, options = self.ask()
        self._num_asked += 1
        rid = f"abort-{self._num_asked}"
        stream = self.stream(number, length, rid=rid, **options)
        asyncio.get_running_loop().call_later(self._draw.random() * 0.1, self.engine.abort_request, rid)
        await self.read_aborted(stream, number, length)

    async def be_interrupted(self) -> None:
        """Let the signal handler abort this request."""
        number, length, options = self.ask()
        stream = self.stream(number, length, **options)
        self._handler.targets.append(stream)
        try:
            await self.read_aborted(stream, number, length)
        finally:
            self._handler.targets.remove(stream)

    async def be_collected(self) -> None:
        """Let a finalizer abort this request and close another, when garbage collection runs it."""
        number, length, options = self.ask()
        stream = self.stream(number, length, **options)
        AbortingFinalizer(self.engine, stream, self.stream(number, length, **options))
        await self.read_aborted(stream, number, length)

    async def match_slowly(self) -> None:
        """Send a request with the slow pattern. It may fail, but no other one."""
        number, length, options = self.ask()
        params = {
            "max_new_tokens": length,
            "temperature": 0,
            "stop_regex": self._draw.choices(chaos_program.SLOW_PATTERNS, k=self._draw.randint(1, 3)),
        }
        try:
            await self.engine.async_generate(self.prompt(number), params, **options)  # type: ignore[call-overload]
        except RequestError as error:
            self.counts["slow patterns ended"] += 1
            if error.stage == "crash":
                raise

    async def panic(self) -> None:
        """Send a request for whose text the tokenizer panics. It fails, but no other one."""
        try:
            await self.engine.async_generate(f"x{chaos_program.PANIC}", {"max_new_tokens": 5})
            self.problems.append("a request at whose text the tokenizer panics got an answer")
            self.counts["mismatches"] += 1
        except RequestError as error:
            if error.stage != "tokenize":
                raise
            self.counts["panics"] += 1

    async def read_aborted(self, stream: Stream, number: int, length: int) -> None:
        text, reason = "", ""
        async for chunk in stream:
            text += chunk["text"]
            reason = str(chunk["meta_info"]["finish_reason"])
        self.compare(number, text, 0, None if reason == "abort" else length)

    async def batch(self) -> None:
        numbers = [self._draw.randrange(NUM_PROMPTS) for _ in range(4)]
        params = {"max_new_tokens": 20, "temperature": 0, "n": 2}
        outs = await self.engine.async_generate([self.prompt(number) for number in numbers], params)
        for place, out in enumerate(outs):
            self.compare(numbers[place // 2], out["text"], 0, 20)

    async def come_back(self) -> None:
        """Leave, and continue after the text that was read, until the end."""
        number, length, options = self.ask()
        self._num_asked += 1
        rid = f"back-{self._num_asked}"
        stream, text, is_over = self.stream(number, length, rid=rid, resume_ttl=HANG_S, **options), "", False
        while not is_over:
            num_chunks = self._draw.randint(1, 20)
            async for chunk in stream:
                if chunk["text_offset"] != len(text):
                    raise Mismatch(f"prompt {number}: a chunk at {chunk['text_offset']} after {len(text)} characters")
                text += chunk["text"]
                is_over = chunk["meta_info"]["finish_reason"] is not None
                num_chunks -= 1
                if not num_chunks:
                    break
            await stream.aclose()
            await asyncio.sleep(self._draw.random() * 0.05)
            if not is_over:
                stream = self.engine.attach(rid, len(text))
        self.compare(number, text, 0, length)

    async def hurry(self) -> None:
        """Send requests with deadlines of all kinds, some too short."""
        number, length, options = self.ask()
        kind = self._draw.choice(["timeout", "queue_timeout", "first_token_timeout"])
        options[kind] = 1e-3 + 0.3 * self._draw.random()
        options["refuse_late"] = self._draw.random() < 0.3
        params = {"max_new_tokens": length, "temperature": 0}
        out = await self.engine.async_generate(self.prompt(number), params, **options)  # type: ignore[call-overload]
        in_time = out["meta_info"]["finish_reason"] != "deadline"
        self.compare(number, out["text"], 0, length if in_time else None)

    async def stand_in_line(self) -> None:
        await self.engine.admit()
        await self.read()

    # ------------------------------------------------------------ what is done to it

    async def every(self, seconds: tuple[float, float], act: Callable[[], Awaitable[None]]) -> None:
        while not self.is_over:
            await asyncio.sleep(self._draw.uniform(*seconds))
            if not self.is_over:
                await act()

    def victim(self) -> int | None:
        pids = self.engine.get_all_child_pids()
        return self._draw.choice(pids) if pids else None

    async def kill(self) -> None:
        if (pid := self.victim()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.counts["kills"] += 1

    async def stop(self) -> None:
        """Stop a process for a while: it then continues."""
        if (pid := self.victim()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self.counts["stops"] += 1
                await asyncio.sleep(self._draw.random())
                os.kill(pid, signal.SIGCONT)

    async def poison(self) -> None:
        """Send a request that kills the scheduler whenever it is computed. It ends, but no other one."""
        try:
            async with asyncio.timeout(HANG_S):
                await self.engine.async_generate(f"poison {POISON}", {"max_new_tokens": 5})
            self.problems.append("a request that kills its process got an answer")
            self.counts["mismatches"] += 1
        except RequestError:
            self.counts["poisons found"] += 1
        except EngineOverloadedError:
            self.counts["refused"] += 1
        except TimeoutError:
            self.counts["hangs"] += 1
            self.problems.append("a request that kills its process did not end")

    async def be_hostile(self) -> None:
        """Send requests that are wrong, each in its own way: every one is refused, and none does harm."""
        wrong: list[tuple[object, object, dict[str, object]]] = [
            ("x", {"temperature": math.nan}, {}),
            ("x", {"nonsense": 1}, {}),
            ("x", {"max_new_tokens": 10**9}, {}),
            ("x" * 3_000_000, None, {}),
            ("\ud800", None, {}),
            ("", None, {}),
            (17, None, {}),
            (["x", None], None, {}),
            ("x", {"stop_regex": "("}, {}),
            ("x", {"logit_bias": {"9" * 30: 1}}, {}),
            ("x", None, {"timeout": -1}),
            ("x", None, {"priority": 10**30}),
            ("x", None, {"resume_ttl": 1}),
            ("x", None, {"rid": "y" * 10_000}),
        ]
        prompt, params, options = self._draw.choice(wrong)
        try:
            async with asyncio.timeout(HANG_S):
                await self.engine.async_generate(prompt, params, **options)  # type: ignore[call-overload]
            self.problems.append(f"a wrong request was answered: {params!r} {options!r}")
            self.counts["mismatches"] += 1
        except (ValueError, TypeError):
            self.counts["hostile requests"] += 1
        except EngineOverloadedError:
            self.counts["refused"] += 1
        with contextlib.suppress(ValueError):
            self.engine.attach("nobody", 10**12)
        self.engine.abort_request("nobody")

    async def use_up_descriptors(self) -> None:
        """Use up the descriptors for a while, in which processes may die."""
        async with self._descriptors:
            undo = chaos_program.use_up_descriptors(self._draw.choice([0, 0, 1, 3, 10]))
            self.counts["descriptor shortages"] += 1
            try:
                await asyncio.sleep(self._draw.random())
                if self._draw.random() < 0.5:
                    await self.kill()
                await asyncio.sleep(self._draw.random())
            finally:
                undo()

    async def cancel_tasks(self) -> None:
        """Cancel tasks of another engine, on a loop of its own."""
        blueprint = setup_of(self._draw.randrange(1000), kills=False).blueprint
        seed = self._draw.randrange(1000)
        async with self._descriptors:
            counts, problems = await asyncio.to_thread(chaos_program.cancel_tasks, blueprint, seed)
        self.counts += counts
        self.problems += problems

    async def send_garbage(self) -> None:
        """Send garbage to every socket that the engine has now."""
        async with self._descriptors:
            await asyncio.to_thread(self._send_garbage)

    def _send_garbage(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for folder in self._place.glob("aioengine-*"):
            for name in ("scheduler", "detokenizer", "frontend", "runner-1"):
                if not (folder / name).is_socket():
                    continue
                with context.socket(zmq.PUSH) as stranger:
                    stranger.setsockopt(zmq.LINGER, 100)
                    stranger.setsockopt(zmq.SNDTIMEO, 100)
                    stranger.connect(f"ipc://{folder}/{name}")
                    with contextlib.suppress(zmq.Again):
                        for data in (b"", b"\x01", b"\x01\x94\x05\x01\x00\x90", os.urandom(5000), b"GET / HTTP/1.1"):
                            stranger.send(data)
                            self.counts["bad frames"] += 1
        context.term()

    # ------------------------------------------------------------ all of it

    async def run(self, seconds: float, *, num_workers: int, kills: bool) -> None:
        """Do everything at once for this time. Then do nothing more to the engine, and let open requests end."""
        await self.learn()
        disturbing = [
            self.every(STOP_EVERY_S, self.stop),
            self.every((0.02, 0.2), self.be_hostile),
            self.every((0.5, 2.0), self.send_garbage),
        ]
        if kills:
            disturbing += [
                self.every(KILL_EVERY_S, self.kill),
                self.every(POISON_EVERY_S, self.poison),
                self.every(SHORTAGE_EVERY_S, self.use_up_descriptors),
                self.every(CANCEL_EVERY_S, self.cancel_tasks),
            ]
        with CallbackWatch(MAX_CALLBACK_S) as watch, self._handler:
            async with asyncio.TaskGroup() as group:
                for act in disturbing:
                    group.create_task(act)
                for _ in range(num_workers):
                    group.create_task(self.work())
                await asyncio.sleep(seconds)
                self.is_over = True
        self.counts["signals handled"] = self._handler.num_calls
        self.counts["slow callbacks"] = len(watch.slow)
        self.counts["longest callback, us"] = round(watch.longest_s * 1e6)
        self.counts["longest garbage collection, us"] = round(watch.longest_collection_s * 1e6)
        self.problems += watch.slow

    async def settle(self) -> None:
        """Check that nothing is left in the engine."""
        names = ("num_running", "num_waiting", "num_streams", "num_detokenizing")
        deadline = time.monotonic() + SETTLE_S
        while True:
            gc.collect()
            stats = self.engine.stats()
            if not any(stats[name] for name in names) and stats["num_free_pages"] == stats["num_pages"]:
                break
            if time.monotonic() > deadline:
                self.leak(f"requests or pages are left: {stats}")
                break
            await asyncio.sleep(0.05)
        self.counts["restarts"] = self.engine.stats()["num_restarts"]
        await self.read()

    def leak(self, what: str) -> None:
        self.counts["leaks"] += 1
        self.problems.append(what)


def setup_of(seed: int, *, kills: bool) -> FakeSetup:
    """Return settings with few pages, rows and places in the queue."""
    return FakeSetup(
        processes=True,
        step_time_s=0.001,
        faults=Faults(poison_token_id=ord(POISON)) if kills else None,
        num_pages=160,
        max_running=12,
        max_queued=64,
        chunk_tokens=128,
        tenant_weights={"gold": 3.0},
        random_seed=seed,
        stall_timeout_s=10.0,
        max_restarts=1_000_000 if kills else 0,
        slow_reader="pause",
        slow_reader_timeout_s=0.4,
    )


def blueprint_of(setup: FakeSetup) -> Blueprint:
    """Return a blueprint with a tokenizer that panics on some texts."""
    return msgspec.structs.replace(setup.blueprint(), load_tokenizer=lambda: PanickingTokenizer(BYTE_MODEL))


def held() -> dict[str, int]:
    """Return the resources of the system that this process has."""
    gc.collect()
    this = psutil.Process()
    children = [child for child in this.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return {"descriptors": this.num_fds(), "threads": threading.active_count(), "processes": len(children)}


def open_files() -> list[str]:
    """Return what each descriptor of this process is."""
    return [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


async def unleash(seconds: float, setup: FakeSetup, *, seed: int, num_workers: int, kills: bool) -> Chaos:
    """Run an engine through it; its counts hold mismatches, hangs and leaks."""
    with tempfile.TemporaryDirectory(prefix="aio-", dir="/tmp") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        async with AsyncEngine.from_blueprint(setup.blueprint) as engine:  # what is made once for all is made here
            await engine.async_generate("x", {"max_new_tokens": 2})
        await asyncio.to_thread(int)  # a thread of the loop's own
        before = held()
        async with AsyncEngine.from_blueprint(lambda: blueprint_of(setup)) as engine:
            chaos = Chaos(engine, Path(folder), seed)
            try:
                async with asyncio.timeout(seconds + 3 * HANG_S):
                    await chaos.run(seconds, num_workers=num_workers, kills=kills)
                    await chaos.settle()
            except TimeoutError:
                chaos.counts["hangs"] += 1
                chaos.problems.append(f"it did not come to its end: {engine.health()} {engine.stats()}")
        await asyncio.sleep(0.2)
        after = held()
        for name, count in after.items():
            if count > before[name] + (8 if name == "threads" else 0):  # threads of the loop's own pool come by need
                chaos.leak(f"{count} {name} after it, {before[name]} before; open files are now {open_files()}")
        if left := os.listdir(folder):
            chaos.leak(f"files are left: {left}")
    return chaos


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=48, help="that ask for one thing after the other")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-kills", action="store_true", help="no process dies")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    logging.getLogger("aioengine").setLevel(logging.CRITICAL)  # it would tell of each process that is replaced
    seed, kills = arguments.seed, not arguments.no_kills
    setup = msgspec.structs.replace(setup_of(seed, kills=kills), tp_size=arguments.tp_size, dp_size=arguments.dp_size)
    chaos = asyncio.run(unleash(60 * arguments.minutes, setup, seed=seed, num_workers=arguments.workers, kills=kills))
    counts = {"mismatches": 0, "hangs": 0, "leaks": 0, "slow callbacks": 0, **chaos.counts}
    if arguments.json:
        print(json.dumps({"minutes": arguments.minutes, "counts": counts, "problems": chaos.problems}))
    else:
        for name, count in sorted(counts.items()):
            print(f"{count:>12,}  {name.replace('_', ' ')}")
        print(*chaos.problems, sep="\n")
    return 1 if any(counts[name] for name in ("mismatches", "hangs", "leaks", "slow callbacks")) else 0


if __name__ == "__main__":
    sys.exit(main())
