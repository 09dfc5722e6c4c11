"""Logprobs from bytes to the lists of an answer, with and without texts, and messages with very many logprobs."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Sequence
from functools import partial
from struct import pack
from typing import Any, cast

import msgspec
import pytest

from aioengine.protocol import packed_logprobs
from aioengine.protocol.columns import BLOCK_BYTES, NO_TOKEN, POOLED_VECTOR, Extra, TokenColumns, block_extras
from aioengine.protocol.messages import End, FinishCode, FirstToken, StepOutput, TextChunks, TextOpened, TextRules
from aioengine.protocol.packed_logprobs import (
    NEXT_LOGPROBS,
    OUTPUT_LOGPROBS,
    PROMPT_LOGPROBS,
    LogprobDecoder,
    LogprobRules,
    with_texts,
)


def position(rules: LogprobRules, token_id: int) -> bytes:
    """Return a position with different values: the negative id of the token, followed by lower values."""
    values = [-float(token_id + i) for i in range(rules.num_values)]
    return pack(f"<{rules.num_values}f{1 + rules.num_top}i", *values, *range(token_id, token_id + 1 + rules.num_top))


RULES = LogprobRules(start=1, num_top=2, token_ids=(7, 3))
OUTPUTS = [Extra(5, index, OUTPUT_LOGPROBS, position(RULES, 10 * index)) for index in (1, 0)]
PROMPT = Extra(5, 0, PROMPT_LOGPROBS, position(RULES, 40) + position(RULES, 50))


def lists_of(rules: LogprobRules, extras: Sequence[Extra], num_prompt: int, num_output: int = 0) -> dict[str, Any]:
    """Return the lists of a request with these extras."""
    decoder = LogprobDecoder(rules, num_prompt)
    for extra in extras:
        decoder.decode(extra)
    return cast("dict[str, Any]", decoder.lists(0, num_output, keeps=False))


def test_each_position_has_its_entries_in_order() -> None:
    assert lists_of(RULES, [*OUTPUTS, PROMPT], 3, 2) == {
        "output_token_logprobs": [(0.0, 0, None), (-10.0, 10, None)],
        "output_token_logprobs_length": 2,
        "output_top_logprobs": [[(-1.0, 1, None), (-2.0, 2, None)], [(-11.0, 11, None), (-12.0, 12, None)]],
        "output_token_ids_logprobs": [[(-3.0, 7, None), (-4.0, 3, None)], [(-13.0, 7, None), (-14.0, 3, None)]],
        "input_token_logprobs": [(-40.0, 40, None), (-50.0, 50, None)],
        "input_top_logprobs": [[(-41.0, 41, None), (-42.0, 42, None)], [(-51.0, 51, None), (-52.0, 52, None)]],
        "input_token_ids_logprobs": [[(-43.0, 7, None), (-44.0, 3, None)], [(-53.0, 7, None), (-54.0, 3, None)]],
    }


@pytest.mark.parametrize("keeps", [True, False])
def test_chunks_have_the_logprobs_of_their_tokens(keeps: bool) -> None:
    decoder = LogprobDecoder(RULES, 3)
    for extra in (*OUTPUTS, PROMPT):  # the second token is read before its text has arrived
        decoder.decode(extra)
    first = cast("dict[str, Any]", decoder.lists(0, 1, keeps=keeps))
    second = decoder.lists(1, 2, keeps=keeps)
    assert (first["output_token_logprobs"], second["output_token_logprobs"]) == (
        [(0.0, 0, None)],
        [(-10.0, 10, None)],
    )
    assert len(first["input_token_logprobs"]) == 2
    assert not any(name.startswith("input") for name in second)
    assert (decoder.lists(0, 1, keeps=True) == first) is keeps
    assert decoder.num_entries == 4 * RULES.num_values


def test_repeated_extra_replaces_the_first_unless_it_was_delivered() -> None:
    decoder = LogprobDecoder(RULES, 3)
    for extra in (*OUTPUTS, PROMPT):
        decoder.decode(extra)
    decoder.decode(Extra(5, 1, OUTPUT_LOGPROBS, position(RULES, 70)))
    decoder.decode(Extra(5, 0, PROMPT_LOGPROBS, position(RULES, 80) + position(RULES, 90)))
    first = decoder.lists(0, 1, keeps=False)
    assert first["input_token_logprobs"] == [(-80.0, 80, None), (-90.0, 90, None)]
    decoder.decode(OUTPUTS[1])
    assert decoder.lists(1, 2, keeps=False)["output_token_logprobs"] == [(-70.0, 70, None)]


@pytest.mark.parametrize("with_text", [True, False])
def test_prompt_logprobs_are_sent_in_blocks_of_limited_size(with_text: bool) -> None:
    rules = LogprobRules(start=0, num_top=1_000, token_ids=(7, 3), with_text=with_text)
    data = b"".join(position(rules, 10 * place) for place in range(20))
    blocks = block_extras(5, PROMPT_LOGPROBS, data, rules.position_bytes)
    assert len(blocks) > 2
    assert max(len(block.data) for block in blocks) <= BLOCK_BYTES
    if with_text:
        blocks = [with_texts(block, rules, str) for block in blocks]
    lists = lists_of(rules, blocks[::-1], 20)
    assert lists["input_token_logprobs"] == [
        (-10.0 * place if place else None, 10 * place, str(10 * place) if with_text else None) for place in range(20)
    ]
    assert lists["input_top_logprobs"][:1] == [None]
    assert lists["input_top_logprobs"][19][999] == (-1190.0, 1190, "1190" if with_text else None)
    rules = LogprobRules(0, 20_000)
    [wide] = block_extras(5, PROMPT_LOGPROBS, position(rules, 0), rules.position_bytes)
    assert len(wide.data) > BLOCK_BYTES  # a block has at least one position


def test_only_the_first_token_of_a_prompt_has_no_logprob() -> None:
    rules = LogprobRules(start=0, num_top=1, token_ids=(7,))
    extra = Extra(5, 0, PROMPT_LOGPROBS, position(rules, 40) + position(rules, 50))
    lists = lists_of(rules, [extra], 2)
    assert lists["input_token_logprobs"] == [(None, 40, None), (-50.0, 50, None)]
    assert lists["input_top_logprobs"] == [None, [(-51.0, 51, None)]]
    assert lists["input_token_ids_logprobs"] == [None, [(-52.0, 7, None)]]


def test_position_after_a_prompt_has_no_token() -> None:
    lists = lists_of(RULES, [Extra(5, NO_TOKEN, NEXT_LOGPROBS, position(RULES, 0))], 1)
    assert (lists["output_token_logprobs"], lists["output_token_logprobs_length"]) == ([], 0)
    assert lists["output_top_logprobs"] == [[(-1.0, 1, None), (-2.0, 2, None)]]
    assert lists["output_token_ids_logprobs"] == [[(-3.0, 7, None), (-4.0, 3, None)]]


@pytest.mark.parametrize(
    "rules",
    [
        RULES,
        LogprobRules(start=0),
        LogprobRules(start=0, num_top=4),
        LogprobRules(start=0, num_top=1, token_ids=(7, 3)),
    ],
)
def test_entries_have_the_texts_of_their_ids(rules: LogprobRules) -> None:
    extras = [
        *(Extra(5, index, OUTPUT_LOGPROBS, position(rules, 10 * index)) for index in range(3)),
        Extra(5, 0, PROMPT_LOGPROBS, position(rules, 40) * (2 - rules.start)),
    ]
    plain = lists_of(rules, extras, 2, 3)
    wanting = LogprobRules(rules.start, rules.num_top, rules.token_ids, with_text=True)
    lists = lists_of(wanting, [with_texts(extra, wanting, "<{}>".format) for extra in extras], 2, 3)
    assert lists == {name: add_texts(entries) for name, entries in plain.items()}


def add_texts(entries: object) -> object:
    """Return the entries with their texts."""
    if isinstance(entries, list):
        return [add_texts(entry) for entry in entries]
    return (entries[0], entries[1], f"<{entries[1]}>") if isinstance(entries, tuple) else entries


DEEP = LogprobRules(start=0, num_top=30, token_ids=(7, 3), with_text=True)
TOP = "output_top_logprobs"


def deep_lists() -> dict[str, Any]:
    """Return the lists of a request with so many entries per position that they stay packed."""
    extras = [
        *(Extra(5, index, OUTPUT_LOGPROBS, position(DEEP, 100 * index)) for index in range(3)),
        *block_extras(
            5, PROMPT_LOGPROBS, b"".join(position(DEEP, 50 * place) for place in range(400)), DEEP.position_bytes
        ),
    ]
    assert len(extras) > 4
    return lists_of(DEEP, [with_texts(extra, DEEP, "<{}>".format) for extra in extras], 400, 3)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same lists, unpacked."""
    with monkeypatch.context() as patch:
        patch.setattr(packed_logprobs, "MAX_PLAIN", 1000)
        lists = deep_lists()
    assert {type(entries) for entries in lists.values()} == {list, int}
    return lists


def test_iteration_ends_if_the_list_shrinks(plain: dict[str, Any]) -> None:
    entries = deep_lists()[TOP]
    read: list[Any] = []
    for position_entries in entries:
        read.append(position_entries)
        del entries[-1]
    assert read == plain[TOP][:2]


def num_packed(lists: dict[str, Any]) -> int:
    """Return the number of output positions whose entries were not unpacked."""
    return sum(type(list.__getitem__(lists[TOP], place)) is not list for place in range(3))


def test_the_entries_of_a_position_are_unpacked_when_they_are_read(plain: dict[str, Any]) -> None:
    lists = deep_lists()
    assert (len(lists[TOP]), num_packed(lists)) == (3, 3)
    assert lists[TOP][1] == plain[TOP][1]
    assert lists[TOP][1] is lists[TOP][1]
    assert num_packed(lists) == 2
    assert next(iter(lists[TOP])) == plain[TOP][0]
    assert num_packed(lists) == 1
    assert lists[TOP][-1:] == plain[TOP][-1:]
    assert num_packed(lists) == 0
    assert lists["output_token_logprobs"] == plain["output_token_logprobs"]


@pytest.mark.parametrize(
    "encode",
    [
        json.dumps,
        partial(json.dumps, indent=1),
        msgspec.json.encode,
        msgspec.msgpack.encode,
        msgspec.to_builtins,
        repr,
        lambda lists: pickle.loads(pickle.dumps(lists)),
        copy.copy,
        copy.deepcopy,
        lambda lists: {name: list(entries) for name, entries in lists.items() if isinstance(entries, list)},
    ],
)
def test_packed_entries_are_encoded_and_copied_as_plain_lists(plain: dict[str, Any], encode: Any) -> None:
    assert encode(deep_lists()) == encode(plain)
    assert type(pickle.loads(pickle.dumps(deep_lists()[TOP]))) is list


@pytest.mark.parametrize(
    "use",
    [
        lambda entries: entries + [1],  # noqa: RUF005
        lambda entries: [1] + entries,  # noqa: RUF005
        lambda entries: [*entries, *entries],
        lambda entries: entries * 2,
        lambda entries: 2 * entries,
        lambda entries: entries[::2],
        lambda entries: entries.copy(),
        lambda entries: [entries.pop(), entries.pop(0)],
        lambda entries: list(reversed(entries)),
        lambda entries: entries.index(entries[1]),
        lambda entries: [entries.sort(key=len), entries[0]],
        lambda entries: [entries.append(3), entries.reverse(), entries],
    ],
)
def test_packed_entries_are_used_as_plain_lists(plain: dict[str, Any], use: Any) -> None:
    assert use(deep_lists()[TOP]) == use(plain[TOP])


def test_packed_entries_are_compared_as_plain_lists(plain: dict[str, Any]) -> None:
    other = deep_lists()[TOP]
    other[1][0] = (0.0, 0, None)
    for lists in (plain, deep_lists()):
        assert deep_lists() == lists
        assert lists == deep_lists()
        assert (deep_lists()[TOP] != lists[TOP]) is False
        assert deep_lists()[TOP] != other
        assert lists[TOP] != other
        assert (deep_lists()[TOP] < other) is (plain[TOP] < list(other))
        assert lists[TOP][2] in deep_lists()[TOP]


def test_extras_of_other_kinds_get_no_texts() -> None:
    extra = Extra(5, 0, "other", b"abc")
    assert with_texts(extra, RULES, str) is extra


@pytest.mark.parametrize("max_bytes", [1, 30, 100, 10_000])
def test_a_step_with_large_extras_is_several_messages(max_bytes: int) -> None:
    draw = random.Random(max_bytes)
    uids = list(range(20))
    tokens = TokenColumns()
    for uid in uids:
        tokens.add(uid, list(range(draw.choice([0, 1, 1, 2]))))
    tokens.extras = [Extra(uid, i, "some", b"x" * draw.randrange(1, 40)) for uid in uids[::2] for i in range(2)]
    opened = [TextOpened(FirstToken(uid, 0, 0.0, 0.0), TextRules()) for uid in uids[:6]]
    ended = [End(uid, FinishCode.LENGTH) for uid in (3, 4, 90)]
    whole = StepOutput(tokens, opened, [2, 4, 91], ended)
    parts = whole.parts(max_bytes)
    assert (len(parts) == 1) is (max_bytes == 10_000)
    results: dict[int, list[int]] = {}
    is_open: set[int] = set()
    for part in parts:
        own = {extra.uid for extra in part.tokens.extras}
        sizes = [len(extra.data) for extra in part.tokens.extras]
        assert sum(sizes) <= max_bytes or len(sizes) == 1
        is_open |= {request.first_token.uid for request in part.opened}
        assert {*part.tokens.uids, *own} & {*uids[:6]} <= is_open
        assert not own & results.keys()  # its tokens are in the last message
        for uid, new in zip(part.tokens.uids, part.tokens.rows(), strict=True):
            assert uid not in results
            results[uid] = [new] if isinstance(new, int) else list(new)
        assert {end.uid for end in part.ended} | {*part.preempted} <= {*part.tokens.uids, 90, 91}
    assert results == dict(
        zip(uids, ([new] if isinstance(new, int) else list(new) for new in tokens.rows()), strict=True)
    )
    for name in ("opened", "preempted", "ended"):
        assert sum(len(getattr(part, name)) for part in parts) == len(getattr(whole, name))
    assert [extra for part in parts for extra in part.tokens.extras] == tokens.extras


def test_answers_without_text_do_not_pass_the_detokenizer() -> None:
    """Vectors (1, 2) and scores (3); but not a token (4), a score with texts (5), and a request that failed (6)."""
    tokens = TokenColumns()
    for uid in range(1, 6):
        tokens.add(uid, [50] if uid == 4 else [])
    kinds = {1: POOLED_VECTOR, 2: POOLED_VECTOR, 3: NEXT_LOGPROBS, 4: OUTPUT_LOGPROBS, 5: NEXT_LOGPROBS}
    extras = tokens.extras = [Extra(uid, NO_TOKEN, kind, b"x") for uid, kind in kinds.items()]
    rules = {5: TextRules(logprobs=RULES)}
    opened = [TextOpened(FirstToken(uid, 3, 1.0, 2.0), rules.get(uid, TextRules())) for uid in kinds]
    ended = [End(uid, FinishCode.LENGTH) for uid in (1, 2, 3, 5, 6)]
    output = StepOutput(tokens, opened, [2, 2, 4], ended)

    taken = output.take_textless()

    expected = [End(uid, FinishCode.LENGTH, None, "", "", 3, 2 * (uid == 2), 1.0, 2.0, 2.0) for uid in (1, 2, 3)]
    first_tokens = [FirstToken(uid, 3, 1.0, 2.0) for uid in (1, 2, 3)]
    columns = TokenColumns(extras=extras[:3])
    assert taken == TextChunks(columns, ended=expected, first_tokens=first_tokens, preempted=[2, 2])
    assert output == StepOutput(TokenColumns([4, 5], [50], [1, 0], extras[3:]), opened[3:], [4], ended[3:])
    assert output.take_textless() is None


def test_an_output_of_vectors_alone_leaves_nothing_for_the_detokenizer() -> None:
    tokens = TokenColumns([1], [], [0], [Extra(1, NO_TOKEN, POOLED_VECTOR, b"x")])
    output = StepOutput(tokens, [TextOpened(FirstToken(1, 0, 1.0, 2.0), TextRules())], [], [End(1, FinishCode.STOP)])
    assert output.has_news
    assert output.take_textless() is not None
    assert not output.has_news
