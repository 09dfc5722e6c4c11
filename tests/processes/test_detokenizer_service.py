"""The detokenizer without its process: the results of each ``StepOutput``."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from aioengine.errors import RequestError
from aioengine.processes import detokenizer_process
from aioengine.processes.detokenizer_process import DetokenizerService, TextSource, build_service
from aioengine.protocol.board import CrashBoard, blank_board, read_board
from aioengine.protocol.columns import Extra, TokenColumns
from aioengine.protocol.messages import (
    Abort,
    End,
    FinishCode,
    FirstToken,
    Message,
    StepOutput,
    TextChunks,
    TextOpened,
    TextRules,
)
from aioengine.testing.byte_tokenizer import BYTE_MODEL
from aioengine.text.open_text import OpenText
from aioengine.text.stop import RegexSearch
from aioengine.text.token_table import TokenTable
from aioengine.tokenization.tokenizer import Tokenizer
from tests.processes.engine_kit import fake_settings

DEMO = Path(detokenizer_process.__file__).parents[1] / "demo"
TOKENIZER = Tokenizer(DEMO)
NOW = 100.0


class Steps:
    """A service, and its results for each request."""

    def __init__(self, tokenizer_path: str | None = str(DEMO)) -> None:
        self.service = DetokenizerService(TextSource(tokenizer_path))
        self.sent: list[TextChunks] = []
        self.aborted: list[int] = []

    def open(self, uid: int, rules: TextRules | None = None) -> None:
        self.give(StepOutput(opened=[TextOpened(FirstToken(uid, 3, 1.0, 2.0), rules or TextRules())]))

    def give(self, *outputs: StepOutput) -> TextChunks | None:
        """Return the results of the outputs."""
        self.service.handle(list[Message](outputs), NOW)
        outbox = self.service.step(NOW)
        for message in outbox.to_peer:
            assert isinstance(message, Abort)
            assert message.code == FinishCode.STOP
            self.aborted += message.uids
        chunks = [message for message in outbox.to_frontend if isinstance(message, TextChunks)]
        chunks = [chunk for chunk in chunks if chunk.texts or chunk.tokens.extras or chunk.ended]
        self.sent += chunks
        return chunks[-1] if chunks else None

    def token(self, uid: int, token_id: int, end: End | None = None) -> TextChunks | None:
        return self.give(StepOutput(TokenColumns([uid], [token_id]), ended=[] if end is None else [end]))

    def text(self, uid: int) -> str:
        return "".join(
            text
            for message in self.sent
            for owner, text in zip(message.tokens.uids, message.texts, strict=True)
            if owner == uid
        )

    def ids(self, uid: int) -> list[int]:
        pairs = [
            pair
            for message in self.sent
            for pair in zip(message.tokens.uid_of_each(), message.tokens.token_ids, strict=True)
        ]
        return [token_id for owner, token_id in pairs if owner == uid]

    def end(self, uid: int) -> End:
        (end,) = [end for message in self.sent for end in message.ended if end.uid == uid]
        return end


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def id_of(letter: str) -> int:
    (token_id,) = ids_of(letter)
    return token_id


def play(steps: Steps, uid: int, token_ids: list[int], code: FinishCode = FinishCode.LENGTH) -> None:
    """Send all tokens of a request, and its end with the last token."""
    for token_id in token_ids[:-1]:
        steps.token(uid, token_id)
    steps.token(uid, token_ids[-1], End(uid, code))


@pytest.mark.parametrize(
    "rules",
    [
        TextRules(),
        TextRules(stream=False),
        TextRules(stream_interval=3),
        TextRules(stop=("never in it",)),
        TextRules(stop=("never",), stream=False),
        TextRules(stop_regex=("never",), stream_interval=2),
    ],
)
def test_text_and_ids_do_not_depend_on_the_chunks(rules: TextRules) -> None:
    text = "The capital of Japan is Tokyo. 東京 \U0001f600!"
    steps = Steps()
    steps.open(1, rules)
    play(steps, 1, ids_of(text))
    assert steps.text(1) == text
    assert steps.ids(1) == ids_of(text)
    assert steps.end(1) == End(1, FinishCode.LENGTH, num_cached=3, admitted_at=1.0, first_token_at=2.0, ended_at=NOW)
    assert steps.aborted == []


def test_chunks_follow_the_stream_interval_after_the_first() -> None:
    sizes: dict[str, list[int]] = {}
    rules = {"each": TextRules(), "third": TextRules(stream_interval=3), "whole": TextRules(stream=False)}
    for name, rule in rules.items():
        steps = Steps()
        steps.open(1, rule)
        play(steps, 1, list(range(50, 60)))
        sizes[name] = [len(message.tokens.token_ids) for message in steps.sent]
    assert sizes == {"each": [1] * 10, "third": [1, 3, 3, 3], "whole": [10]}


def test_long_answer_without_stream_is_sent_in_parts() -> None:
    steps = Steps()
    steps.open(1, TextRules(stream=False))
    play(steps, 1, [id_of("a")] * 150)
    assert [len(message.tokens.token_ids) for message in steps.sent] == [64, 64, 22]
    assert steps.text(1) == "a" * 150


SAMPLE = "One 🥖 two 東京, and now the END of it. More?"


@pytest.mark.parametrize(
    "rules",
    [
        TextRules(),
        TextRules(stream_interval=3),
        TextRules(stream_interval=4, stop=("the END",)),
        TextRules(stop=("END of it. No", "END of it. More"), no_stop_trim=True),
        TextRules(stop_regex=(r"E\w+ of i[a-t]",)),
        TextRules(stop=("a stop that", "More?!"), stream=False),
    ],
)
@pytest.mark.parametrize("code", [FinishCode.LENGTH, FinishCode.ABORT])
def test_request_continues_after_any_chunk_in_a_new_process(rules: TextRules, code: FinishCode) -> None:
    """Incomplete characters, held text and held ids are reconstructed."""
    token_ids = list(SAMPLE.encode())
    table = Steps(str(BYTE_MODEL))
    table.open(1, rules)
    play(table, 1, token_ids, code)
    num_chunks = len(table.sent)
    for cut in range(num_chunks):
        first, second = Steps(str(BYTE_MODEL)), Steps(str(BYTE_MODEL))
        first.open(1, rules)
        for token_id in token_ids:
            if len(first.sent) == cut:
                break
            first.token(1, token_id)
        given = first.ids(1)
        second.give(StepOutput(opened=[TextOpened(FirstToken(1, 3, 1.0, 2.0), rules, given)]))
        play(second, 1, token_ids[len(given) :], code)
        assert first.text(1) + second.text(1) == table.text(1)
        assert given + second.ids(1) == table.ids(1)
        assert (second.end(1), second.aborted) == (table.end(1), table.aborted)


def test_end_without_a_token_releases_held_text() -> None:
    steps = Steps(str(BYTE_MODEL))
    ids = list(b"stay, ST")
    steps.give(
        StepOutput(
            TokenColumns(),
            [TextOpened(FirstToken(1, 3, 1.0, 2.0), TextRules(stop=("STOP",)), ids, 5)],
            [],
            [End(1, FinishCode.ABORT)],
        )
    )
    assert steps.text(1) == "ST"
    assert steps.ids(1) == []
    assert (steps.end(1).first_token_at, steps.end(1).num_preemptions) == (2.0, 5)


def test_each_step_gives_one_message() -> None:
    steps = Steps()
    opened = [TextOpened(FirstToken(uid, 0, 1.0, 2.0), TextRules()) for uid in (1, 2, 3)]
    outputs = StepOutput(
        TokenColumns([1, 2, 3], ids_of("a") * 3), opened, [2],
        [End(3, FinishCode.LENGTH), End(9, FinishCode.DEADLINE, "queue")],
    )  # fmt: skip
    chunks = steps.give(outputs)
    assert chunks is not None
    assert (chunks.tokens, chunks.texts) == (TokenColumns([1, 2, 3], ids_of("a") * 3), ["a"] * 3)
    assert [(end.uid, end.code, end.matched) for end in chunks.ended] == [
        (3, FinishCode.LENGTH, None),
        (9, FinishCode.DEADLINE, "queue"),
    ]
    assert chunks.num_open == 2
    assert chunks.preempted == [2]
    assert steps.end(9).first_token_at is None
    steps.give(StepOutput(ended=[End(2, FinishCode.ABORT)]))
    assert steps.end(2).num_preemptions == 1


def test_stop_string_ends_the_request_at_once() -> None:
    steps = Steps()
    steps.open(1, TextRules(stop=("Tokyo",)))
    token_ids = ids_of("The capital is Tokyo, a city")
    for token_id in token_ids:
        steps.token(1, token_id)  # the scheduler continues until it receives the abort
    assert steps.text(1) == "The capital is "
    assert TOKENIZER.decode(steps.ids(1)).startswith("The capital is Tokyo")
    assert not TOKENIZER.decode(steps.ids(1)[:-1]).endswith("Tokyo")
    assert (steps.end(1).code, steps.end(1).matched) == (FinishCode.STOP, "Tokyo")
    assert steps.aborted == [1]
    steps.give(StepOutput(ended=[End(1, FinishCode.LENGTH)]))  # it ended before it received the abort
    assert steps.end(1).code == FinishCode.STOP


def test_stop_beats_the_length_on_the_same_token() -> None:
    steps = Steps()
    steps.open(1, TextRules(stop=("b",), no_stop_trim=True, stream=False))
    steps.token(1, id_of("a"))
    steps.token(1, id_of("b"), End(1, FinishCode.LENGTH))
    assert (steps.end(1).code, steps.end(1).matched) == (FinishCode.STOP, "b")
    assert steps.text(1) == "ab"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("keeps", [True, False])
def test_stop_token_has_no_text_unless_no_stop_trim(stream: bool, stop: tuple[str, ...], keeps: bool) -> None:
    steps = Steps()
    token_ids = ids_of("one two")
    steps.open(1, TextRules(stop=stop, no_stop_trim=keeps, stream=stream))
    for token_id in token_ids[:-1]:
        steps.token(1, token_id)
    steps.token(1, token_ids[-1], End(1, FinishCode.STOP, token_ids[-1]))
    assert steps.ids(1) == token_ids
    assert steps.text(1) == TOKENIZER.decode(token_ids if keeps else token_ids[:-1])
    assert steps.end(1).matched == token_ids[-1]


def test_abort_releases_held_text() -> None:
    steps = Steps()
    steps.open(1, TextRules(stop=("ab",)))
    steps.token(1, id_of("a"))
    assert steps.text(1) == ""
    steps.give(StepOutput(ended=[End(1, FinishCode.ABORT, message="by wish")]))
    assert steps.text(1) == "a"
    assert (steps.end(1).code, steps.end(1).message) == (FinishCode.ABORT, "by wish")


def test_bad_request_fails_alone() -> None:
    steps = Steps()
    steps.open(1, TextRules(stop_regex=("(",)))
    steps.open(2)
    for token_id in ids_of("some text"):
        steps.give(StepOutput(TokenColumns([1, 2], [token_id, token_id])))
    steps.give(StepOutput(ended=[End(2, FinishCode.LENGTH)]))
    assert (steps.end(1).code, steps.end(1).stage) == (FinishCode.FAILED, "detokenize")
    assert "'('" in steps.end(1).message
    assert steps.aborted == [1]
    assert (steps.text(2), steps.end(2).code) == ("some text", FinishCode.LENGTH)


def test_stop_pattern_that_takes_too_long_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(self: RegexSearch, text: str) -> NoReturn:
        raise RequestError("stop_regex", "the pattern took too long")

    monkeypatch.setattr(RegexSearch, "search", search)
    steps = Steps()
    steps.open(1, TextRules(stop_regex=("a",)))
    steps.token(1, 60)
    assert (steps.end(1).stage, steps.end(1).message) == ("stop_regex", "the pattern took too long")


@pytest.mark.parametrize("when", ["push", "flush"])
def test_failure_of_decoding_ends_that_request_alone(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    bad = 777

    def lookup(self: TokenTable, token_id: int) -> str:
        if token_id == bad:
            raise RuntimeError("no such thing")
        return "x"

    monkeypatch.setattr(TokenTable, "__missing__", lookup)
    monkeypatch.setattr(TokenTable, "__getitem__", TokenTable.__missing__)
    steps.open(1, TextRules(stream=when == "push"))
    steps.open(2)
    steps.give(StepOutput(TokenColumns([1, 2], [bad, 3])))
    steps.give(StepOutput(ended=[End(1, FinishCode.LENGTH), End(2, FinishCode.LENGTH)]))
    failed = steps.end(1)
    assert (failed.code, failed.stage, failed.message) == (
        FinishCode.FAILED,
        "detokenize",
        "RuntimeError: no such thing",
    )
    assert steps.aborted == [1]
    assert (steps.text(2), steps.end(2).code) == ("x", FinishCode.LENGTH)


def test_without_a_tokenizer_ids_pass_through() -> None:
    steps = Steps(None)
    steps.open(1)
    play(steps, 1, [5, 6, 7])
    assert steps.ids(1) == [5, 6, 7]
    assert steps.text(1) == ""


def test_prompt_context_is_not_output_text() -> None:
    special = TOKENIZER.eos_token_id
    assert special is not None
    token_ids = [*ids_of(" world"), special]
    for skips, expected in (
        (True, " world"),
        (False, " world" + TOKENIZER.decode([special], skip_special_tokens=False)),
    ):
        steps = Steps()
        steps.open(1, TextRules(context_token_ids=tuple(ids_of("Hello")), skip_special_tokens=skips))
        play(steps, 1, token_ids)
        assert steps.text(1) == expected


def test_requests_being_decoded_are_on_the_crash_board(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = blank_board(1, 8)
    boards: list[dict[int, int]] = []
    plain = OpenText.push

    def push(own: OpenText, token_id: int, end: End | None, columns: TextChunks) -> bool:
        boards.append(read_board(memory))
        return plain(own, token_id, end, columns)

    monkeypatch.setattr(OpenText, "push", push)
    service = DetokenizerService(TextSource(None), board=CrashBoard(memory))
    service.handle(
        [
            StepOutput(
                TokenColumns([4, 7], [50, 51]),
                [TextOpened(FirstToken(uid, 0, 1.0, 1.0), TextRules()) for uid in (4, 7)],
            )
        ],
        NOW,
    )
    assert [set(rows) for rows in boards] == [{4, 7}] * 2
    assert read_board(memory) == {}


def test_idle_detokenizer_sends_heartbeats() -> None:
    service = DetokenizerService(TextSource(None))
    service.handle([StepOutput(opened=[TextOpened(FirstToken(1, 0, 1.0, 1.0), TextRules())])], NOW)
    begun = [FirstToken(1, 0, 1.0, 1.0)]
    assert service.step(NOW).to_frontend == [TextChunks(num_open=1, first_tokens=begun)]
    assert service.step(NOW + 0.9).to_frontend == []
    assert 0 < service.wait_s(NOW + 0.9) < 0.2
    assert service.step(NOW + 1.1).to_frontend == [TextChunks(num_open=1)]


def test_many_requests_leak_nothing() -> None:
    steps = Steps()
    for uid in range(20_000):
        steps.open(uid, TextRules(stop=("a",), stream=False))
        steps.token(uid, id_of("a"))
    service = steps.service
    assert len(steps.aborted) == 20_000
    assert len(service._stopped) < 17_000
    chunks = steps.give(StepOutput(ended=[End(19_999, FinishCode.LENGTH), End(1, FinishCode.LENGTH)]))
    assert chunks is not None
    assert chunks.num_open == 0


def test_missing_tokenizer_is_named_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        build_service(fake_settings(tokenizer_path=str(tmp_path)))


def test_request_without_tokens_has_times_and_no_chunk() -> None:
    """As a pooled request ends: opened and ended by the same message."""
    steps = Steps()
    steps.give(
        StepOutput(opened=[TextOpened(FirstToken(1, 3, 1.0, 2.0), TextRules())], ended=[End(1, FinishCode.STOP)])
    )
    assert steps.end(1) == End(1, FinishCode.STOP, num_cached=3, admitted_at=1.0, first_token_at=2.0, ended_at=NOW)
    assert (steps.ids(1), steps.text(1)) == ([], "")


def test_several_tokens_of_a_request_in_a_step_are_decoded() -> None:
    steps = Steps()
    steps.open(1)
    steps.open(2, TextRules(stream_interval=3))
    a, b, c = ids_of("a")[0], ids_of("b")[0], ids_of("c")[0]
    steps.give(StepOutput(TokenColumns([1, 2], [a, b, c], [2, 1])))
    assert (steps.text(1), steps.ids(1), steps.text(2)) == ("ab", [a, b], "c")
    steps.give(StepOutput(TokenColumns([2, 1], [a, b], [2, 0]), ended=[End(1, FinishCode.LENGTH)]))
    assert (steps.ids(1), steps.ids(2), steps.end(1).code) == ([a, b], [c], FinishCode.LENGTH)
    steps.give(StepOutput(TokenColumns([2], [a, a, a, b], [4]), ended=[End(2, FinishCode.STOP, a)]))
    assert (steps.text(2), steps.ids(2)) == ("cabaaab", [c, a, b, a, a, a, b])


def test_only_the_last_stop_token_of_a_step_is_removed() -> None:
    steps = Steps()
    steps.open(1)
    a = ids_of("a")[0]
    steps.give(StepOutput(TokenColumns([1], [a, a], [2]), ended=[End(1, FinishCode.STOP, a)]))
    assert (steps.text(1), steps.ids(1)) == ("a", [a, a])


def test_extras_are_passed_on_as_long_as_their_request_is_open() -> None:
    steps = Steps()
    steps.open(1, TextRules(stream_interval=8))
    extras = [Extra(1, 0, "x", b"\x00"), Extra(1, 1, "y", b"\xff"), Extra(9, 0, "x", b"")]
    chunks = steps.give(StepOutput(TokenColumns([1], ids_of("a"), extras=extras)))
    assert chunks is not None
    assert chunks.tokens.extras == extras[:2]
    late = Extra(1, 2, "x", b"")
    chunks = steps.give(StepOutput(TokenColumns(extras=[late])))
    assert chunks is not None
    assert chunks.tokens == TokenColumns(extras=[late])
    steps.give(StepOutput(ended=[End(1, FinishCode.ABORT)]))
    assert steps.give(StepOutput(TokenColumns(extras=[late]))) is None
