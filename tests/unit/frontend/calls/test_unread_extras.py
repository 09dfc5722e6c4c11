"""Messages that exceed the limit of logprobs per iteration of the loop wait in order, with all later messages."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from struct import pack
from typing import Any

import pytest

from aioengine.frontend.calls.call import CallRow
from aioengine.frontend.calls.delivery import EXTRA_BYTES, MAX_EXTRA_BYTES, Delivery
from aioengine.protocol.columns import HIDDEN_STATES, Extra, TokenColumns, block_extras
from aioengine.protocol.messages import LAST_STATES, End, FinishCode, StepOutput, TextChunks
from aioengine.protocol.packed_logprobs import (
    OUTPUT_LOGPROBS,
    PROMPT_LOGPROBS,
    LogprobDecoder,
    LogprobRules,
)
from tests.kit.calls import add_row, make_call, make_reader

RULES = LogprobRules(start=0, num_top=1_000)
LARGE_PROMPT = MAX_EXTRA_BYTES // RULES.position_bytes


class CountingDecoder(LogprobDecoder):
    """Counts the bytes that were decoded since the last reset."""

    num_bytes = 0

    def decode(self, extra: Extra) -> None:
        CountingDecoder.num_bytes += len(extra.data) + EXTRA_BYTES
        super().decode(extra)


def parts_of(frame: TextChunks) -> list[TextChunks]:
    """Divide a frame as the scheduler does."""
    texts = dict(zip(frame.tokens.uids, frame.texts, strict=True))
    parts = StepOutput(frame.tokens, ended=frame.ended).parts()
    return [TextChunks(part.tokens, [texts[uid] for uid in part.tokens.uids], part.ended) for part in parts]


class World:
    """A call whose rows have logprobs, and the delivery of its frames."""

    def __init__(self, num_rows: int, num_prompt: int = 0, *, is_stream: bool = False) -> None:
        lock = threading.RLock()
        self.call = make_call(num_rows, is_batch=True, is_stream=is_stream)
        self.reader = make_reader(self.call, lock=lock)
        self.ended: list[CallRow] = []
        decoders = [CountingDecoder(RULES, num_prompt) for _ in range(num_rows)]
        rows = {uid: add_row(self.call, uid, decoders=(decoder,)) for uid, decoder in enumerate(decoders)}
        self.delivery = Delivery(rows, lock, self.ended.append)

    def deliver(self, *frames: TextChunks) -> int:
        """Deliver frames in one iteration of the loop. Return the number of read bytes."""
        CountingDecoder.num_bytes = 0
        for part in (part for frame in frames for part in parts_of(frame)):
            self.delivery.deliver(part)
        self.delivery.wake()
        return CountingDecoder.num_bytes

    async def iterate(self) -> int:
        """Run another iteration of the loop."""
        CountingDecoder.num_bytes = 0
        await asyncio.sleep(0)
        return CountingDecoder.num_bytes


def position(token_id: int) -> bytes:
    return pack(f"<{RULES.num_values}f{1 + RULES.num_top}i", *[0.5] * RULES.num_values, *[token_id] * RULES.num_values)


def frame(uids: list[int], token_id: int, *, num_prompt: int = 0, ends: bool = False) -> TextChunks:
    """Return a frame with one token per row, and its logprobs. The first frame has those of the prompt, too."""
    tokens = TokenColumns(uids, [token_id] * len(uids))
    for uid in uids:
        tokens.extras.append(Extra(uid, token_id, OUTPUT_LOGPROBS, position(token_id)))
        tokens.extras += block_extras(uid, PROMPT_LOGPROBS, position(7) * num_prompt, RULES.position_bytes)
    return TextChunks(tokens, [str(token_id)] * len(uids), [End(uid, FinishCode.LENGTH) for uid in uids if ends])


def entries_of(piece: Any, side: str = "output") -> list[int]:
    assert [len(top) for top in piece["meta_info"][f"{side}_top_logprobs"] if top] == [RULES.num_top] * len(
        [top for top in piece["meta_info"][f"{side}_top_logprobs"] if top]
    )
    return [token_id for _, token_id, _ in piece["meta_info"][f"{side}_token_logprobs"]]


async def test_a_large_prompt_is_read_in_several_iterations_before_its_row_ends() -> None:
    world = World(1, 4 * LARGE_PROMPT)
    read = [world.deliver(frame([0], 0, num_prompt=4 * LARGE_PROMPT, ends=True))]
    while not world.ended:
        read.append(await world.iterate())
    assert len(read) >= 5
    assert 0 < max(read) <= MAX_EXTRA_BYTES + 70_000  # blocks are read completely
    answer = world.reader.result()
    assert answer is not None
    assert entries_of(answer[0]) == [0]
    assert entries_of(answer[0], "input") == [7] * 4 * LARGE_PROMPT


async def test_many_rows_that_end_together_are_read_in_several_iterations() -> None:
    world = World(100)
    uids = list(range(100))
    frames = [frame(uids, 0), frame(uids, 1), frame(uids, 2, ends=True)]
    read = [world.deliver(*frames)]
    while len(world.ended) < 100:
        read.append(await world.iterate())
    assert len(read) > 100 * 3 * len(position(0)) / MAX_EXTRA_BYTES
    assert max(read) <= MAX_EXTRA_BYTES + 70_000
    answers = world.reader.result()
    assert answers is not None
    assert [entries_of(answer) for answer in answers] == [[0, 1, 2]] * 100


async def test_chunks_of_a_stream_have_their_entries() -> None:
    world = World(1, 2 * LARGE_PROMPT, is_stream=True)
    world.deliver(frame([0], 0, num_prompt=2 * LARGE_PROMPT))
    assert world.reader.take() is None
    world.deliver(frame([0], 1), frame([0], 2, ends=True))
    chunks: list[Any] = []
    while not chunks or chunks[-1]["meta_info"]["finish_reason"] is None:
        await world.iterate()
        if (chunk := world.reader.take()) is not None:
            chunks.append(chunk)
    assert "".join(chunk["text"] for chunk in chunks) == "012"
    for chunk in chunks:
        assert entries_of(chunk) == chunk["output_ids"]
    assert [
        len(entries_of(chunks[0], "input")),
        *("input_token_logprobs" in chunk["meta_info"] for chunk in chunks),
    ] == [
        2 * LARGE_PROMPT,
        True,
        *[False] * (len(chunks) - 1),
    ]


@pytest.mark.parametrize("is_batch", [True, False])
def test_an_answer_is_freed_as_soon_as_its_caller_drops_it(is_batch: bool) -> None:
    class Entry(list[object]):
        """A list with weak references."""

    world = World(1)
    world.deliver(frame([0], 0, ends=True))
    world.call.request.gives_batch = is_batch
    result = world.reader.result()
    assert result is not None
    assert world.reader.result() is result
    answer: Any = result[0] if is_batch else result
    answer["watched"] = watched = Entry()
    freed = weakref.ref(watched)
    gc.disable()  # a collection is needed, because parts of a call refer to each other
    try:
        call = world.call
        del world, watched, result, answer
        assert freed() is None
        assert call.is_over
    finally:
        gc.enable()


def test_reader_of_a_log_keeps_the_last_state_for_any_size_of_chunks() -> None:
    row = add_row(make_call(is_stream=True, resume_ttl_s=1.0), hidden_states=LAST_STATES)
    for end in (31, 60):  # the second chunk has fewer tokens
        for index in range(row.token_offset, end):
            row.put_extra(Extra(0, index, HIDDEN_STATES, pack("<f", index)))
            row.put("a", index)
        assert (end - 1, HIDDEN_STATES) in row.extras
        assert row.take()["output_ids"][-1] == end - 1


async def test_a_message_that_cannot_be_read_does_not_keep_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    world, errors = World(3, LARGE_PROMPT), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    decode = CountingDecoder.decode

    def fail_in_row_1(decoder: CountingDecoder, extra: Extra) -> None:
        if extra.uid == 1:
            raise ValueError("damaged")
        decode(decoder, extra)

    monkeypatch.setattr(CountingDecoder, "decode", fail_in_row_1)
    for uid in range(3):
        world.delivery.deliver(frame([uid], 0, num_prompt=LARGE_PROMPT, ends=True))
    for _ in range(4):
        await world.iterate()
    assert list(map(str, errors)) == ["damaged"]
    assert [row.index for row in world.ended] == [0, 2]
