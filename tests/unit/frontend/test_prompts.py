"""Token ids as callers give them."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pytest

from aioengine.frontend.asks import to_generate
from aioengine.frontend.prompts import IdsPrompt, ids_prompt


class Letter(IntEnum):
    A = 97


@pytest.mark.parametrize(
    "given",
    [[97, 98], (97, 98), [np.int64(97), 98], [Letter.A, 98], [Letter.A, np.int32(98)]],
    ids=["list", "tuple", "numpy", "enum", "mixture"],
)
def test_all_kinds_of_integers_become_plain_ones(given: list[int] | tuple[int, ...]) -> None:
    prompt = ids_prompt("input_ids", given)
    assert isinstance(prompt, IdsPrompt)
    assert prompt.token_ids == [97, 98]
    assert {type(token_id) for token_id in prompt.token_ids} == {int}


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, [1]])
def test_what_is_no_integer_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="input_ids entries must be an integer"):
        ids_prompt("input_ids", [1, wrong])


def test_the_callers_list_may_change_afterwards() -> None:
    given = [1, 2, 3]
    prompt = ids_prompt("input_ids", given)
    given[0] = 9
    assert isinstance(prompt, IdsPrompt)
    assert prompt.token_ids == [1, 2, 3]


def test_texts_of_a_subclass_of_str_are_kept_as_plain_ones() -> None:
    class OtherStr(str):
        __slots__ = ()

    given = OtherStr("é")
    ask = to_generate("a", None, None, stream=False, options={"tenant": given, "rid": given})
    assert (type(ask.tenant), ask.tenant, type(ask.rid), ask.rid) == (str, "é", str, "é")
