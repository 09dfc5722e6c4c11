"""Token ids as callers give them."""

from __future__ import annotations

from enum import Enum, IntEnum

import msgspec
import numpy as np
import pytest

from aioengine.frontend.prompts import ChatPrompt, CheckBudget, IdsPrompt, TextPrompt, ids_prompt
from aioengine.frontend.requests import chat_request, generate_request
from aioengine.params import SamplingParams


class Letter(IntEnum):
    A = 97


@pytest.mark.parametrize(
    "given",
    [[97, 98], (97, 98), [np.int64(97), 98], [Letter.A, 98], [Letter.A, np.int32(98)]],
    ids=["list", "tuple", "numpy", "enum", "mixture"],
)
def test_ids_of_all_integer_types_become_int(given: list[int] | tuple[int, ...]) -> None:
    prompt = ids_prompt("input_ids", given, CheckBudget())
    assert isinstance(prompt, IdsPrompt)
    assert prompt.token_ids == [97, 98]
    assert {type(token_id) for token_id in prompt.token_ids} == {int}


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, [1]])
def test_ids_that_are_no_integers_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="input_ids entries must be an integer"):
        ids_prompt("input_ids", [1, wrong], CheckBudget())


def test_the_callers_list_may_change_afterwards() -> None:
    given = [1, 2, 3]
    prompt = ids_prompt("input_ids", given, CheckBudget())
    given[0] = 9
    assert isinstance(prompt, IdsPrompt)
    assert prompt.token_ids == [1, 2, 3]


class OtherStr(str):
    """Its methods do not do what those of str do."""

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
def test_a_value_whose_repr_fails_is_refused_by_the_name_of_its_argument(options: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=rf"{next(iter(options))} must be .*its repr raises KeyError"):
        generate_request("a", None, None, stream=False, options=options)


IDS = list(range(1000))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([{"stop_token_ids": [*IDS]} for _ in range(66)], "have 66000 stop_token_ids, .* logit_bias entries together"),
        ([{"allowed_token_ids": [*IDS]} for _ in range(66)], "have 66000 stop_token_ids"),
        ([SamplingParams(allowed_token_ids=IDS) for _ in range(66)], "have 66000 stop_token_ids"),
        ([{"bad_words": ["x"] * 200} for _ in range(21)], r"bad_words \(each counts as 16\)"),
        ([SamplingParams(bad_words=["x"] * 200) for _ in range(21)], "have 67200 stop_token_ids"),
        ([SamplingParams(stop_token_ids=IDS) for _ in range(66)], "have 66000 stop_token_ids"),
        ([{"logit_bias": dict.fromkeys(IDS, 1.0)} for _ in range(66)], "give rows that share them the same object"),
        ([{"stop_regex": f"q{place}(a|b){{100}}"} for place in range(5000)], "the 512 different patterns of one call"),
        ([{"stop_regex": [f"{place}a", f"{place}b"]} for place in range(200)], "the 400 different patterns"),
    ],
)
def test_parameters_that_take_too_long_together_are_refused(params: list[object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate_request(["a"] * len(params), params, None, stream=False, options={})


@pytest.mark.parametrize(
    "params",
    [
        [{"stop_token_ids": IDS, "stop_regex": ["a", "b"]}] * 2000,
        [{"stop_token_ids": [1, 2], "stop_regex": "[0-9]+x"} for _ in range(2000)],
        [SamplingParams(stop_regex=f"{place}x") for place in range(1000)],
        [{"stop_regex": f"{place}x"} for place in range(300)],
    ],
)
def test_parameters_that_are_shared_or_already_checked_take_no_time(params: list[object]) -> None:
    request = generate_request(["a"] * len(params), params, None, stream=False, options={})
    while not request.is_checked:
        request.check_more()
    assert len(request.params) == len(params)


def test_rows_that_share_parameters_share_the_parsed_ones() -> None:
    shared: dict[str, object] = {"stop": ["a"]}
    ask = generate_request(["a", "b", "c"], [shared, {"stop": ["a"]}, shared], None, stream=False, options={})
    assert ask.params[0] is ask.params[2]
    assert ask.params[0] == ask.params[1]
