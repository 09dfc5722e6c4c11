"""A double of all processes of an engine, on the test's loop. It records every message."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

from aioengine.api.engine import AsyncEngine
from aioengine.frontend.engine_parts import Blueprint
from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import Abort, Control, End, FinishCode, Reply, Stats, Submit, TextChunks
from aioengine.settings.config import LoadedWeights, QueueConfig
from aioengine.supervision.incarnation import ProcessState
from aioengine.supervision.supervisor import Events
from tests.kit.settings import small_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioengine.protocol.messages import ToScheduler

EOS = 256
VOCAB_SIZE = 260
CONTEXT_LENGTH = 512


class CodePoints:
    """A tokenizer whose ids are the bytes of the text."""

    eos_token_id = EOS
    bos_token_id = None
    vocab_size = VOCAB_SIZE
    template_names = ()

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.decoder = "ByteLevel"
        self.delay_s = 0.0
        self.held_text = ""
        """A batch with this text waits for ``is_released``."""
        self.is_released = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.batches.append(list(texts))
        time.sleep(self.delay_s)
        if self.held_text and self.held_text in texts:
            assert self.is_released.wait(30)
        if "\x00unencodable" in texts:
            raise RuntimeError("this text breaks the tokenizer")
        return [self.encode(text) for text in texts]

    def decoding_facts(self) -> dict[str, object]:
        return {
            "decoder": {"type": self.decoder},
            "model": {"vocab": {"abcd": 0}},
            "added_tokens": [{"content": "<s>"}],
        }

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, object]], **options: object) -> str:
        if messages[0]["role"] == "nobody":
            raise ValueError("unknown role")
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


class Request:
    """A request that the double computes."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.num_output = 0

    def next_token(self) -> int:
        """Return a letter that depends on the prompt, the seed and the position."""
        prompt = self.submit.prompt_token_ids
        seed = self.submit.sampling.seed if self.submit.sampling.temperature else 0
        return 97 + (sum(prompt) + seed + self.num_output) % 26


class Double:
    """Returns one token for each live request in each step. Steps follow each other unless ``is_held`` is set."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.live: dict[int, Request] = {}
        self.submits: list[Submit] = []
        self.aborts: list[Abort] = []
        self.controls: list[Control] = []
        self.in_flight: set[int] = set()
        self.is_held = False
        self.ignores_aborts_and_controls = False
        self.is_stopped = False
        self.num_kills = 0
        self.step_s = 0.0
        self.max_live = 0
        self._is_stepping = False

    async def start(self) -> dict[str, object]:
        self.events.on_launch()
        return {"num_pages": 64, "page_size": 16, "max_total_tokens": 1024}

    def send(self, messages: Sequence[ToScheduler]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                self.submits.append(message)
                self.live[message.uid] = Request(message)
                self.max_live = max(self.max_live, len(self.live))
            elif isinstance(message, Abort):
                self.aborts.append(message)
                if not self.ignores_aborts_and_controls:
                    self.end([uid for uid in message.uids if uid in self.live], message.code)
            else:
                self.controls.append(message)
                if not self.ignores_aborts_and_controls:
                    reply = Reply(message.call_id, message.name != "flush_cache" or not self.live, "", '{"a": 1}')
                    asyncio.get_running_loop().call_soon(self.events.on_messages, [reply])
        self._step_soon()

    def end(self, uids: Sequence[int], code: FinishCode, message: str = "") -> None:
        """End requests in the next iteration of the loop."""
        finished = [End(uid, code, stage="forward", message=message, ended_at=time.monotonic()) for uid in uids]
        for uid in uids:
            del self.live[uid]
        if finished:
            chunks = TextChunks(TokenColumns(), [], finished, len(self.live))
            asyncio.get_running_loop().call_soon(self.events.on_messages, [chunks])

    def step(self) -> None:
        """Return one token for each request."""
        requests = list(self.live.items())
        finished: list[End] = []
        uids: list[int] = []
        token_ids: list[int] = []
        for uid, request in requests:
            token_ids.append(request.next_token())
            uids.append(uid)
            request.num_output += 1
            if request.num_output == request.submit.limits.max_new_tokens:
                now = time.monotonic()
                arrived_at = request.submit.arrived_at
                finished.append(
                    End(
                        uid, FinishCode.LENGTH, admitted_at=arrived_at, first_token_at=arrived_at, ended_at=now,
                        num_cached=1,
                    )
                )  # fmt: skip
                del self.live[uid]
        texts = [chr(token_id) for token_id in token_ids]
        stats = Stats(
            num_steps=1, sent_at=time.monotonic(), num_running=len(self.live), num_pages=64, num_free_pages=64
        )
        self.events.on_messages([TextChunks(TokenColumns(uids, token_ids), texts, finished, len(self.live)), stats])

    def _step_soon(self) -> None:
        if not self._is_stepping and self.live and not self.is_held:
            self._is_stepping = True
            asyncio.get_running_loop().call_later(self.step_s, self._turn)

    def _turn(self) -> None:
        self._is_stepping = False
        if not self.is_held and not self.is_stopped and self.live:
            self.step()
        self._step_soon()

    def resume(self) -> None:
        self.is_held = False
        self._step_soon()

    async def stop(self, timeout_s: float) -> None:
        self.is_stopped = True

    num_restarts = 0
    is_recovering = False
    weights = LoadedWeights()

    def kill_now(self) -> None:
        self.num_kills += 1
        self.is_stopped = True

    def uids_in_flight(self) -> set[int]:
        return self.in_flight

    def finished_ids(self, uid: int) -> list[int] | None:
        return None

    def process_states(self) -> list[ProcessState]:
        roles = enumerate(("scheduler", "detokenizer"), 11)
        return [ProcessState(role, pid, not self.is_stopped, None, None) for pid, role in roles]


class World:
    """An engine and the double of its processes."""

    def __init__(self, *, max_running: int = 8, queue: QueueConfig | None = None, with_tokenizer: bool = True) -> None:
        self.tokenizer = CodePoints()
        self.doubles: list[Double] = []
        self._max_running = max_running
        self._queue = queue or QueueConfig()
        self._with_tokenizer = with_tokenizer
        self.engine = AsyncEngine.from_blueprint(self.blueprint)

    @property
    def double(self) -> Double:
        return self.doubles[-1]

    def blueprint(self) -> Blueprint:
        return Blueprint(
            settings=small_settings(
                context_length=CONTEXT_LENGTH, vocab_size=VOCAB_SIZE, num_pages=64, max_running=self._max_running
            ),
            queue=self._queue,
            eos_token_ids=(EOS,),
            stream_interval=1,
            load_tokenizer=self.load_tokenizer if self._with_tokenizer else None,
            make_processes=self._make,
        )

    def load_tokenizer(self) -> CodePoints:
        return self.tokenizer

    def _make(self, events: Events) -> Double:
        self.doubles.append(Double(events))
        return self.double


def expected_text(prompt: str, length: int, seed: int = 0) -> str:
    """Return the answer of the double at temperature 0, or with ``seed``."""
    start = sum(prompt.encode()) + seed
    return "".join(chr(97 + (start + position) % 26) for position in range(length))
