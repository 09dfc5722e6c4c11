"""Token ids, texts and messages of all types that callers pass."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from aioengine.api.params import SamplingParams
from aioengine.frontend.intake.prompts import (
    ChatPrompt,
    IdsPrompt,
    TextPrompt,
    ids_prompt,
)
from aioengine.frontend.intake.requests import PROMPTS_IN_PIECE, chat_request, generate_request


class Letter(IntEnum):
    A = 97


@pytest.mark.parametrize(
    "given",
    [[97, 98], (97, 98), [np.int64(97), 98], [Letter.A, 98], [Letter.A, np.int32(98)]],
    ids=["list", "tuple", "numpy", "enum", "mixture"],
)
def test_ids_of_all_integer_types_become_int(given: list[int] | tuple[int, ...]) -> None:
    prompt = ids_prompt("input_ids", given)
    assert isinstance(prompt, IdsPrompt)
    assert prompt.token_ids == [97, 98]
    assert {type(token_id) for token_id in prompt.token_ids} == {int}


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, [1]])
def test_ids_that_are_not_integers_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="input_ids entries must be an integer"):
        ids_prompt("input_ids", [1, wrong])


def test_the_callers_list_may_change_afterwards() -> None:
    given = [1, 2, 3]
    prompt = ids_prompt("input_ids", given)
    given[0] = 9
    assert isinstance(prompt, IdsPrompt)
    assert prompt.token_ids == [1, 2, 3]


class OtherList(list[Any]):
    """A subclass, like those of some libraries."""


class OtherTuple(tuple[Any, ...]):
    __slots__ = ()


MESSAGE = {"role": "user", "content": [{"type": "text", "text": "a"}]}
OTHER_PARAMS: list[dict[str, Any]] = [
    {"stop": ["a", "b"]},
    {"stop_token_ids": [1, 2]},
    {"stop_token_ids": [1, None]},
    {"allowed_token_ids": [3]},
    {"bad_words": ["x"]},
    {"stop_regex": ["a+"]},
]


@pytest.mark.parametrize("other", [OtherList, OtherTuple])
def test_subclasses_of_list_and_tuple_are_accepted(other: Callable[[Any], Any]) -> None:
    for params in OTHER_PARAMS:
        [(name, values)] = params.items()
        assert SamplingParams(**{name: other(values)}) == SamplingParams(**params)
        single = generate_request(["a"], [{name: other(values)}], None, stream=False, options={})
        assert single.params == [SamplingParams(**params)]
    options = {"rid": other("xy"), "cache_salt": other("vw")}
    batch = generate_request(other("ab"), other([None, None]), None, stream=False, options=options)
    assert [prompt.text for prompt in batch.prompts if isinstance(prompt, TextPrompt)] == ["a", "b"]
    assert (batch.num_rows, batch.rids) == (2, ["x", "y"])
    for given in (other([1, 2]), other([other([1, 2])]), [other([1, 2])]):
        ids = generate_request(None, None, given, stream=False, options={})
        assert ids.num_rows == 1
        assert ids.prompts == [IdsPrompt([1, 2])]
    for given in (other([MESSAGE]), [other([MESSAGE])], [MESSAGE | {"content": other(MESSAGE["content"])}]):
        [chat] = chat_request(given, None, stream=False, options={}).prompts
        assert isinstance(chat, ChatPrompt)
        assert chat.messages == [MESSAGE]


class Rows:
    """An array of two dimensions that must not be converted as a whole."""

    ndim = 2

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def tolist(self) -> object:
        raise AssertionError("all of it at once")


def test_the_rows_of_an_array_are_read_one_by_one() -> None:
    rows = np.arange(6 * PROMPTS_IN_PIECE).reshape(-1, 3)
    request = generate_request(None, None, Rows(rows), stream=False, options={})
    assert (request.num_rows, len(request.prompts)) == (len(rows), PROMPTS_IN_PIECE)
    while not request.is_checked:
        request.check_more()
    prompts = [prompt for prompt in request.prompts if isinstance(prompt, IdsPrompt)]
    assert [prompt.token_ids for prompt in prompts] == rows.tolist()


@pytest.mark.parametrize("make", [torch.tensor, memoryview, np.asfortranarray, lambda rows: rows.astype(object)])
def test_arrays_of_any_kind_are_divided_into_rows(make: Callable[[Any], Any]) -> None:
    rows = np.array([[1, 2], [3, 4]])
    given = generate_request(None, None, make(rows), stream=False, options={}).prompts
    assert [prompt.token_ids for prompt in given if isinstance(prompt, IdsPrompt)] == rows.tolist()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0), (2, 2, 2)])
def test_arrays_without_rows_of_ids_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises((TypeError, ValueError), match="input_ids"):
        generate_request(None, None, np.zeros(shape, dtype=int), stream=False, options={})


class OtherStr(str):
    """Its methods differ from those of str."""

    __slots__ = ()

    def __str__(self) -> str:
        return "other"

    def __len__(self) -> int:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        raise RuntimeError

    def isascii(self) -> bool:
        raise RuntimeError


class Word(str, Enum):  # noqa: UP042  # not StrEnum: its str() is "Word.HI"
    HI = "é"
    USER = "user"
    TEXT = "text"


@pytest.mark.parametrize("given", [OtherStr("é"), Word.HI], ids=["subclass", "enum"])
def test_texts_of_a_subclass_of_str_become_str(given: str) -> None:
    request = generate_request(given, None, None, stream=False, options={"tenant": given, "rid": given})
    prompt = request.prompts[0]
    assert isinstance(prompt, TextPrompt)
    for kept in (request.tenant, request.rid, prompt.text):
        assert (type(kept), kept) == (str, "é")
    rows = generate_request([given, "b"], None, None, stream=False, options={"rid": [given, "c"]})
    assert [type(text.text) for text in rows.prompts if isinstance(text, TextPrompt)] == [str, str]
    assert [type(rid) for rid in rows.rids or ()] == [str, str]
    for params in ({"stop": given}, {"stop": [given]}, {"stop_regex": given}, {"stop_regex": [given]}):
        assert repr(SamplingParams.parse(params)).count("é") == 1
        assert "Word" not in repr(SamplingParams.parse(params))


@pytest.mark.parametrize(
    ("role", "text"), [(OtherStr("user"), OtherStr("é")), (Word.USER, Word.HI)], ids=["subclass", "enum"]
)
def test_strings_in_messages_become_str(role: str, text: str) -> None:
    messages = [{"role": role, "content": text}, {"role": role, "content": [{"type": Word.TEXT, "text": text}]}]
    (prompt,) = chat_request(messages, None, stream=False, options={}).prompts
    assert isinstance(prompt, ChatPrompt)
    first, second = prompt.messages
    assert msgspec.json.encode(first) == '{"role":"user","content":"é"}'.encode()
    assert msgspec.json.encode(second) == '{"role":"user","content":[{"type":"text","text":"é"}]}'.encode()
    assert type(first["role"]) is type(first["content"]) is str


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError


@pytest.mark.parametrize("options", [{"rid": Unprintable()}, {"tenant": Unprintable()}, {"timeout": Unprintable()}])
def test_value_with_a_failing_repr_is_refused_with_the_name_of_its_argument(options: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=rf"{next(iter(options))} must be .*its repr raises KeyError"):
        generate_request("a", None, None, stream=False, options=options)


IDS = list(range(1000))


def test_wrong_parameters_are_an_error_of_their_row() -> None:
    params: list[object] = [{"bad_words": ["x"] * 200, "top_k": row % 10 + 1} for row in range(40)]
    params[33] = {"top_p": 7}
    request = generate_request(["a"] * 40, params, None, stream=False, options={"return_exceptions": True})
    errors = {place: str(prompt) for place, prompt in enumerate(request.prompts) if isinstance(prompt, ValueError)}
    assert [(place, error[:5]) for place, error in errors.items()] == [(33, "top_p")]


def test_parameters_that_rows_share_are_parsed_once() -> None:
    shared: dict[str, object] = {"stop": ["a"]}
    ask = generate_request(["a", "b", "c"], [shared, {"stop": ["a"]}, shared], None, stream=False, options={})
    assert ask.params[0] is ask.params[2]
    assert ask.params[0] == ask.params[1]


@pytest.mark.parametrize("embeds", [[{"a": 1}], [{1}], [""], [["a"]], [[{"a": 1}]]])
def test_input_embeds_of_a_wrong_type_is_a_type_error(embeds: object) -> None:
    with pytest.raises(TypeError, match=r"^input_embeds.* must be a float array"):
        generate_request(None, None, None, stream=False, options={"input_embeds": embeds})


def test_long_unknown_names_are_cut_in_the_error() -> None:
    with pytest.raises(TypeError, match="unexpected argument 'xxx") as caught:
        generate_request("a", None, None, stream=False, options={"x" * 1_000_000: 1})
    assert len(str(caught.value)) < 900
