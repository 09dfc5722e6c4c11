"""SamplingParams: ranges of the fields, errors, and conversion to messages."""

from __future__ import annotations

import copy
import enum
import inspect
import json
import math
import pickle
from array import array
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from aioengine.api.params import ALIASES, PARAMETERS, SamplingParams, output_limit, sampling, stop_ids, text_rules
from aioengine.errors import RequestTooLargeError, UnknownParameterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

HUGE = 10**40

OUTSIDE = {
    "max_new_tokens": [-1, HUGE],
    "min_new_tokens": [-1, 129, HUGE],
    "temperature": [-0.01, 2.01, math.nan, math.inf, -math.inf, HUGE],
    "top_p": [0, -0.1, 1.01, math.nan],
    "top_k": [-2, HUGE],
    "min_p": [-0.1, 1.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.inf],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "repetition_penalty": [0, -1, 2.1, math.nan, 1e-300, 5e-324, 0.0099],
    "n": [0, -1, 1025, HUGE],
    "stream_interval": [0, -5, HUGE],
    "sampling_seed": [2**63, -(2**63) - 1],
    "stop": [["x"] * 33, "x" * 5000, "\ud800"],
    "stop_regex": [["x"] * 33, "é" * 129, "(", "[a", "*", "", ["a", ""]],
    "stop_token_ids": [[-1], [HUGE], [0] * 2000, set(range(2000)), {-1}, np.array([-1])],
    "logit_bias": [
        {-1: 1.0},
        {1: math.nan},
        {1: math.inf},
        {1: 1e7},
        {1: 0.5, "1": 0.5},
        dict.fromkeys(range(4097), 1.0),
    ],
    "allowed_token_ids": [[], [None], [-1], [HUGE], [0] * 65_537],
    "custom_params": [{"a": math.nan}, {"a": 1j}, {"a": {1, 2}}, {"a": "x" * 20_000}, {(1, 2): 3}],
    "bad_words": [[""], ["x"] * 257, ["x" * 257], ["\ud800"]],
    "json_schema": ["{", "[]", "nonsense", {"type": "text"}],
    "regex": ["(", "[a", "\ud800"],
    "choice": [[], [""], ["a", ""]],
    "structural_tag": ["{", "{}", {"format": {"type": "sequence"}}],
    "whitespace": ["a", "\\s", ".", "flexible"],
    "reasoning_end": ["</think>", [-1]],
    "max_thinking_tokens": [-1, 5],
}

WRONG_TYPES = {
    "max_new_tokens": [True, "5", 1.5, [1]],
    "min_new_tokens": [False, 0.0, "0"],
    "temperature": [True, "0.5", [0.5], b"1", 1j],
    "top_p": ["1", {}],
    "top_k": [1.0, True],
    "min_p": ["0"],
    "frequency_penalty": ["0"],
    "presence_penalty": [True],
    "repetition_penalty": [[1.0]],
    "n": [True, 1.0, "1"],
    "ignore_eos": [0, 1, "true"],
    "skip_special_tokens": [1],
    "spaces_between_special_tokens": ["yes"],
    "no_stop_trim": [0],
    "stream_interval": [1.0, "1", True],
    "sampling_seed": [1.0, "1", True],
    "stop": [5, b"x", [1], {"a": 1}, {"a"}, [["a"]]],
    "stop_regex": [5, [5], b"x"],
    "stop_token_ids": [
        5,
        "5",
        ["5"],
        [True],
        [np.float32(5)],
        np.array([5.0]),
        np.array(5),
        torch.tensor([True]),
        {"5"},
    ],
    "logit_bias": [[1], "x", {1: "1"}, {1.5: 1.0}, {"x": 1.0}, {1: True}],
    "allowed_token_ids": [5, "5", ["5"], [True], [1.0]],
    "custom_params": [5, "{}", [1], [["a", 1]]],
    "bad_words": ["x", 5, [5], [["x"]], [b"x"]],
    "json_schema": [5, True, ["a"], b"{}", {1}],
    "json_object": [1, "true"],
    "regex": [5, ["a"], b"a"],
    "ebnf": [5, ["a"]],
    "choice": ["yes", 5, [1], {"a": 1}],
    "structural_tag": [5, ["a"]],
    "whitespace": [5, True],
    "reasoning_end": [5, ["a"], [True]],
    "max_thinking_tokens": ["5", True, 1.5],
}


def by_keyword(given: dict[str, object]) -> SamplingParams:
    return SamplingParams(**given)  # type: ignore[arg-type]


def pairs(table: dict[str, list[object]]) -> list[object]:
    return [
        pytest.param(name, value, id=f"{name}-{index}") for name in table for index, value in enumerate(table[name])
    ]


@pytest.mark.parametrize(("name", "value"), pairs(OUTSIDE))
def test_value_outside_the_range_is_a_value_error(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams.parse({name: value})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("name", "value"), pairs(WRONG_TYPES))
def test_a_wrong_type_is_a_type_error_that_names_the_field(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams.parse({name: value})
    with pytest.raises(TypeError, match=name):
        by_keyword({name: value})


def test_wrong_types_are_tested_for_every_field() -> None:
    assert WRONG_TYPES.keys() == PARAMETERS.keys() == SamplingParams.__struct_fields__ - ALIASES.keys()


def test_error_names_field_value_and_range() -> None:
    with pytest.raises(ValueError, match=r"temperature must be a number from 0 to 2, got 3\.5"):
        SamplingParams(temperature=3.5)
    with pytest.raises(TypeError, match="n must be an integer from 1 to 1024, got 'two' of type str"):
        SamplingParams.parse({"n": "two"})
    with pytest.raises(ValueError, match="max_new_tokens must be an integer from 0 to 2147483647, got 10{12}"):
        SamplingParams(max_new_tokens=10**12)
    with pytest.raises(TypeError, match="stop must be a string or a list of strings, got 5"):
        SamplingParams.parse({"stop": 5})
    with pytest.raises(ValueError, match=r"stop_regex 'x\*' matches the empty text"):
        SamplingParams(stop_regex="x*")
    with pytest.raises(ValueError, match=r"stop_regex '\(' is not a valid pattern: missing \)"):
        SamplingParams(stop_regex="(")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", 1),
        ("min_p", 1),
        ("repetition_penalty", 2),
        ("max_new_tokens", 0),
        ("max_new_tokens", None),
        ("sampling_seed", -(2**63)),
        ("stop", ["x"] * 32),
        ("stop_regex", "é" * 128),
        ("n", 1024),
    ],
)
def test_ends_of_the_ranges_are_accepted(name: str, value: object) -> None:
    assert getattr(SamplingParams.parse({name: value}), name) == value


def test_unknown_keys_are_named_with_the_nearest() -> None:
    for make in (SamplingParams.parse, by_keyword):
        with pytest.raises(UnknownParameterError, match=r"'temprature' \(did you mean 'temperature'\?\)"):
            make({"temprature": 1})
    with pytest.raises(TypeError, match="SamplingParams takes only keywords"):
        SamplingParams({"temperature": 1})  # type: ignore[misc]
    with pytest.raises(TypeError, match="unknown sampling parameter 5"):
        SamplingParams.parse({5: 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="watermarking"):
        SamplingParams.parse({"watermark": {"a": 1}})


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("max_tokens", "max_new_tokens", 5),
        ("max_completion_tokens", "max_new_tokens", 5),
        ("min_tokens", "min_new_tokens", 5),
        ("seed", "sampling_seed", 5),
        ("stop_sequences", "stop", "x"),
        ("stop_strings", "stop", "x"),
        ("include_stop_str_in_output", "no_stop_trim", True),
    ],
)
def test_other_names_set_the_parameter_and_refuse_both_names(alias: str, name: str, value: object) -> None:
    assert f"``{alias}``" in (SamplingParams.__doc__ or "")
    for make in (SamplingParams.parse, by_keyword):
        assert getattr(make({alias: value}), name) == value
        with pytest.raises(ValueError, match=f"'{name}' is given twice, as '{alias}' and '{name}'"):
            make({alias: value, name: value})


def test_parse_accepts_none_an_object_or_a_dict() -> None:
    params = SamplingParams(temperature=0)
    assert SamplingParams.parse(params) is params
    assert SamplingParams.parse(None) == SamplingParams.parse({}) == SamplingParams()
    for make in (SamplingParams.parse, by_keyword):
        assert make({"temperature": None, "stop": None}) == SamplingParams()
        assert make({"max_new_tokens": None}).max_new_tokens is None
    for wrong in ("temperature=0", 5, [("temperature", 0)]):
        with pytest.raises(TypeError, match="sampling_params must be"):
            SamplingParams.parse(wrong)  # type: ignore[arg-type]


def test_the_default_length_is_clipped_and_an_explicit_one_refused() -> None:
    room = {"context_length": 100, "max_total_tokens": 1000}
    assert SamplingParams().max_new_tokens == 128
    assert output_limit(SamplingParams(), 10, **room) == 90
    assert output_limit(pickle.loads(pickle.dumps(SamplingParams())), 10, **room) == 90
    assert output_limit(SamplingParams(max_new_tokens=None), 10, **room) == 90
    assert output_limit(SamplingParams(max_new_tokens=90), 10, **room) == 90
    with pytest.raises(RequestTooLargeError, match=r"max_new_tokens=128 .* 10 tokens .* context of 100 "):
        output_limit(SamplingParams(max_new_tokens=128), 10, **room)
    with pytest.raises(RequestTooLargeError, match="KV pool of 50 tokens"):
        output_limit(SamplingParams(max_new_tokens=50), 10, context_length=100, max_total_tokens=50)
    for params in (SamplingParams(), SamplingParams(max_new_tokens=None), SamplingParams(max_new_tokens=0)):
        with pytest.raises(RequestTooLargeError, match="the prompt has 100 tokens"):
            output_limit(params, 100, **room)


@pytest.mark.parametrize("off", [0, -1, None, np.int64(0)])
def test_top_k_of_0_or_minus_1_is_off(off: object) -> None:
    params = by_keyword({"top_k": off})
    assert params.top_k == sampling(params, vocab_size=10, eos_token_ids=()).top_k == -1


DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
SAME_AS_OURS = {"temperature": 1.0, "top_p": 1, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_a_model_fill_the_parameters_that_a_request_leaves_out(name: str) -> None:
    def filled(params: SamplingParams) -> dict[str, object]:
        result = sampling(params, vocab_size=10, eos_token_ids=(), defaults=DEFAULTS)
        return {field: getattr(result, field) for field in DEFAULTS}

    explicit = by_keyword({name: SAME_AS_OURS[name], "n": 2})
    for copied in (
        explicit,
        copy.deepcopy(explicit),
        pickle.loads(pickle.dumps(explicit)),
        msgspec.structs.replace(explicit, n=3),
        msgspec.json.decode(msgspec.json.encode(explicit), type=SamplingParams),
        SamplingParams.parse({name: SAME_AS_OURS[name]}),
    ):
        assert filled(copied) == DEFAULTS | {name: SAME_AS_OURS[name]}
    for silent in (SamplingParams(), SamplingParams.parse(None), by_keyword({name: None, "n": 2})):
        for copied in (
            silent,
            copy.deepcopy(silent),
            pickle.loads(pickle.dumps(silent)),
            msgspec.structs.replace(silent, n=3),
            msgspec.json.decode(msgspec.json.encode(silent), type=SamplingParams),
            by_keyword({name: getattr(silent, name)}),
        ):
            assert filled(copied) == DEFAULTS
            assert getattr(copied, name) == SAME_AS_OURS[name]


def test_the_repr_shows_the_parameters_that_were_given() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(temperature=1.0, top_k=-1)) == "SamplingParams(temperature=1.0, top_k=-1)"


@pytest.mark.parametrize(("name", "value"), [("temperature", 1.0), ("top_k", -1), ("max_new_tokens", 128)])
def test_a_default_differs_from_the_same_number_in_a_request(name: str, value: object) -> None:
    assert by_keyword({name: value}) == by_keyword({name: value})
    assert by_keyword({name: value}) != SamplingParams()
    assert SamplingParams(n=1) == SamplingParams()


@pytest.mark.parametrize("given", [{}, {"temperature": 0.5, "top_p": 1}, {"stop": ["a"], "logit_bias": {5: 1}}])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))])
def test_copies_have_the_same_repr(
    given: dict[str, object], copied: Callable[[SamplingParams], SamplingParams]
) -> None:
    params = by_keyword(given)
    copy_of_params = copied(params)
    assert (copy_of_params, repr(copy_of_params), hash(copy_of_params)) == (params, repr(params), hash(params))
    assert msgspec.json.encode(copy_of_params) == msgspec.json.encode(params)
    assert sampling(copy_of_params, vocab_size=10, eos_token_ids=()) == sampling(
        params, vocab_size=10, eos_token_ids=()
    )


def test_copies_and_changed_copies_equal_their_originals() -> None:
    params = SamplingParams(seed=7, stop=["a"], max_new_tokens=None)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert msgspec.structs.replace(params, temperature=0.5) == SamplingParams(
        sampling_seed=7, stop=["a"], max_new_tokens=None, temperature=0.5
    )
    assert "sampling_seed" in inspect.signature(SamplingParams).parameters


def test_equal_fields_share_one_object() -> None:
    params = SamplingParams.parse({"temperature": 1.0, "n": 1})
    assert SamplingParams.parse({"temperature": 1.0, "n": 1}) is params
    assert SamplingParams.parse({"temperature": 1.0, "n": 2}).n == 2
    for wrong in ({"temperature": 1.0, "n": True}, {"temperature": 1.0, "n": 1.0}, {"temperature": True, "n": 1}):
        with pytest.raises(TypeError):
            SamplingParams.parse(wrong)
    stops = ["a"]
    assert SamplingParams.parse({"stop": stops}).stop == ["a"]
    stops[0] = ""
    stops.append("b")
    params = SamplingParams.parse({"stop": stops})
    stops.append("c")
    assert text_rules(params, stream_interval=1).stop == ("b",)


IDS = [[7, 2], (7, 2), {2: 0, 7: 0}.keys(), {7, 2}, frozenset((2, 7)), np.array([7, 2]), torch.tensor([7, 2]),
       [np.int32(7), torch.tensor(2)], [7, None, 2], array("q", [7, 2])]  # fmt: skip


@pytest.mark.parametrize("given", IDS)
def test_ids_may_be_sets_arrays_and_scalars_of_other_packages(given: object) -> None:
    params = by_keyword({"stop_token_ids": given})
    assert params == SamplingParams.parse({"stop_token_ids": given})
    assert params.stop_token_ids in ([2, 7], [7, 2])
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


BIASES = [{3: 1, 4: -2.5}, {"3": 1, "4": -2.5}, {np.int64(3): np.float64(1), torch.tensor(4): torch.tensor(-2.5)}]


@pytest.mark.parametrize("given", BIASES)
def test_biases_may_be_numbers_of_other_packages(given: object) -> None:
    assert by_keyword({"logit_bias": given}).logit_bias == {3: 1, 4: -2.5}


def test_a_bias_of_minus_infinity_excludes_a_token() -> None:
    for infinity in (-math.inf, np.float32("-inf"), torch.tensor(-math.inf)):
        params = by_keyword({"logit_bias": {5: infinity, 6: -1}})
        assert params.logit_bias == {5: -1e6, 6: -1}
        assert sampling(params, vocab_size=10, eos_token_ids=()).logit_bias == (-1e6, -1)


ROUND_TRIPS = [
    {},
    {"temperature": 0, "max_new_tokens": 128},
    {"max_new_tokens": None, "n": 3, "top_k": 5, "ignore_eos": True},
    {"stop": "x", "stop_regex": "[0-9]+x"},
    {"stop": ["x", "y"], "stop_regex": ["a+", "b+"], "stop_token_ids": {5, 6}},
    {"logit_bias": {"5": 1, 6: -math.inf}, "seed": 7, "max_tokens": 5},
    {"temperature": np.float32(0.5), "top_p": 1, "min_new_tokens": np.int64(3)},
]


@pytest.mark.parametrize("given", ROUND_TRIPS)
@pytest.mark.parametrize("form", [msgspec.json, msgspec.msgpack])
def test_encoded_parameters_are_the_same_when_decoded(given: dict[str, object], form: ModuleType) -> None:
    params = by_keyword(given)
    for original in (params, copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        decoded = form.decode(form.encode(original), type=SamplingParams)
        assert decoded == params
        assert decoded.is_length_explicit == params.is_length_explicit
    assert msgspec.convert(msgspec.to_builtins(params, str_keys=True), SamplingParams, strict=False) == params
    assert SamplingParams.parse(json.loads(msgspec.json.encode(params))) == params


def test_decoding_takes_other_names_and_checks_every_value() -> None:
    def decode(text: str) -> SamplingParams:
        return msgspec.json.decode(text, type=SamplingParams)

    assert decode("{}") == SamplingParams()
    assert msgspec.json.encode(SamplingParams()) == b"{}"
    assert not decode("{}").is_length_explicit
    assert decode('{"seed": 7, "max_tokens": 5, "stop_sequences": ["a"]}') == by_keyword(
        {"sampling_seed": 7, "max_new_tokens": 5, "stop": ["a"]}
    )
    assert repr(decode('{"seed": 7}')) == "SamplingParams(sampling_seed=7)"
    for text, message in [
        ('{"temprature": 1}', "temprature"),
        ('{"temperature": 3}', r"temperature must be a number from 0 to 2, got 3\.0"),
        ('{"seed": 7, "sampling_seed": 8}', "'sampling_seed' is given twice, as 'seed' and 'sampling_seed'"),
        ('{"max_tokens": 7, "max_completion_tokens": 8}', "'max_new_tokens' is given twice, as"),
        ('{"seed": 1.5}', "Expected `int"),
        ('{"stop_regex": "("}', "is not a valid pattern"),
        ('{"logit_bias": {"x": 1}}', "Expected `int"),
    ]:
        with pytest.raises(msgspec.ValidationError, match=message):
            decode(text)


def test_parameters_are_converted_to_the_sampling_message() -> None:
    params = SamplingParams.parse(
        {"temperature": 1e-7, "logit_bias": {"3": 1, 4: -2.5}, "min_new_tokens": 2, "stop_token_ids": [7, None, 2]}
    )
    wire = sampling(params, vocab_size=10, eos_token_ids=(2,))
    assert wire.is_greedy
    assert (wire.bias_token_ids, wire.logit_bias) == ((3, 4), (1.0, -2.5))
    assert (wire.min_new_tokens, wire.suppressed_token_ids) == (2, (2, 7))
    assert sampling(SamplingParams(), vocab_size=10, eos_token_ids=(2,)).suppressed_token_ids == ()


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="logit_bias must be token ids from 0 to 9, got 10"):
        sampling(SamplingParams(logit_bias={10: 1.0}), vocab_size=10, eos_token_ids=())
    with pytest.raises(ValueError, match="stop_token_ids must be token ids from 0 to 9, got 10"):
        stop_ids(SamplingParams(stop_token_ids=[10]), vocab_size=10, eos_token_ids=())


def test_min_new_tokens_needs_a_token_that_does_not_stop() -> None:
    params = SamplingParams(stop_token_ids=list(range(9)), min_new_tokens=2)
    assert len(sampling(params, vocab_size=10, eos_token_ids=(8,)).suppressed_token_ids) == 9
    with pytest.raises(ValueError, match="min_new_tokens=2 cannot be kept: all 10 tokens stop"):
        sampling(params, vocab_size=10, eos_token_ids=(9,))
    free = SamplingParams(stop_token_ids=list(range(10)))
    assert sampling(free, vocab_size=10, eos_token_ids=(9,)).suppressed_token_ids == ()


def test_ignore_eos_turns_all_stop_tokens_off() -> None:
    params = SamplingParams(stop_token_ids=[5], ignore_eos=True, min_new_tokens=3)
    assert stop_ids(params, vocab_size=10, eos_token_ids=(1,)) == ()
    assert sampling(params, vocab_size=10, eos_token_ids=(1,)).suppressed_token_ids == ()


def test_parameters_are_converted_to_text_rules() -> None:
    params = SamplingParams(
        min_new_tokens=9, stop=["a", "", "b"], stop_regex="c+", stream_interval=3, no_stop_trim=True
    )
    rules = text_rules(params, stream_interval=1)
    assert (rules.stop, rules.stop_regex, rules.stream_interval) == (("a", "b"), ("c+",), 3)
    assert rules.no_stop_trim
    assert text_rules(SamplingParams(), stream_interval=2).stream_interval == 2


class OtherStr(str):
    """A subclass of str, like the strings of numpy."""

    __slots__ = ()


class OtherInt(int):
    pass


class OtherFloat(float):
    pass


class Word(enum.StrEnum):
    END = "end"


class IndexOnly:
    def __index__(self) -> int:
        return 5


class FloatOnly:
    def __float__(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": OtherStr("é")}, {"stop": "é"}),
        ({"stop": [np.str_("a"), Word.END]}, {"stop": ["a", "end"]}),
        ({"stop": np.array(["a", "b"])}, {"stop": ["a", "b"]}),
        ({"stop": np.array("a")}, {"stop": "a"}),
        ({"stop": ("a", "b")}, {"stop": ["a", "b"]}),
        ({"stop_regex": OtherStr("a+")}, {"stop_regex": "a+"}),
        ({"stop_regex": (np.str_("a+"), "b")}, {"stop_regex": ["a+", "b"]}),
        ({"max_new_tokens": OtherInt(5), "n": IndexOnly()}, {"max_new_tokens": 5, "n": 5}),
        ({"top_k": IndexOnly(), "stream_interval": OtherInt(2)}, {"top_k": 5, "stream_interval": 2}),
        ({"temperature": Fraction(1, 2), "top_p": Decimal("0.5")}, {"temperature": 0.5, "top_p": 0.5}),
        ({"min_p": np.longdouble(0.25), "top_p": FloatOnly()}, {"min_p": 0.25, "top_p": 0.5}),
        ({"temperature": OtherFloat(0.5), "seed": OtherInt(3)}, {"temperature": 0.5, "seed": 3}),
        ({"stop_token_ids": [OtherInt(4), IndexOnly()]}, {"stop_token_ids": [4, 5]}),
        ({"logit_bias": {OtherInt(3): Fraction(1, 2)}}, {"logit_bias": {3: 0.5}}),
        ({"logit_bias": {OtherStr("3"): OtherFloat(1)}}, {"logit_bias": {3: 1.0}}),
    ],
)
def test_values_of_other_types_become_plain_values(given: dict[str, object], kept: dict[str, object]) -> None:
    parsed, plain = SamplingParams.parse(given), SamplingParams.parse(kept)
    assert parsed == plain
    assert repr(parsed) == repr(plain)
    assert msgspec.json.decode(msgspec.json.encode(parsed), type=SamplingParams) == plain
    rules = text_rules(parsed, stream_interval=1)
    assert {*map(type, (*rules.stop, *rules.stop_regex))} <= {str}
    msgspec.msgpack.encode([rules, sampling(parsed, vocab_size=100, eos_token_ids=())])


def test_custom_params_are_decoded_from_their_json() -> None:
    given = {"a": (1, 2.5, None), "b": {3: "x"}}
    params = SamplingParams(custom_params=given)
    assert params.custom_params == {"a": [1, 2.5, None], "b": {"3": "x"}}
    assert json.loads(sampling(params, vocab_size=10, eos_token_ids=()).custom_params) == params.custom_params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("large", [[0] * 20_000, "x" * 20_000, 10**20_000, [[None] * 10_000] * 10_000], ids=type)
def test_custom_params_that_are_too_large_are_refused_before_they_become_json(
    large: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "dumps", None)
    with pytest.raises(ValueError, match="custom_params must have at most 16384 characters of JSON, and it has more"):
        SamplingParams(custom_params={"a": large})


def test_a_bad_word_means_two_sequences_of_tokens() -> None:
    def tokenize(texts: Sequence[str]) -> list[list[int]]:
        return [[ord(character) for character in text] for text in texts]

    def bad_token_ids(words: list[str], **others: object) -> tuple[tuple[int, ...], ...]:
        params = SamplingParams.parse({"bad_words": words, **others})
        return sampling(params, vocab_size=128, eos_token_ids=(), tokenize=tokenize).bad_token_ids

    assert bad_token_ids(["a"]) == bad_token_ids([" a", "a"]) == ((97,), (32, 97))
    assert bad_token_ids(["ab", "\n", " "]) == ((97, 98), (10,), (32,), (32, 97, 98), (32, 10), (32, 32))
    with pytest.raises(ValueError, match="bad_words rule out every token that allowed_token_ids allow"):
        bad_token_ids(["a", "b"], allowed_token_ids=[97, 98])
    with pytest.raises(ValueError, match="bad_words needs a tokenizer"):
        sampling(SamplingParams(bad_words=["a"]), vocab_size=128, eos_token_ids=())
    with pytest.raises(ValueError, match="allowed_token_ids must be token ids from 0 to 9, got 10"):
        sampling(SamplingParams(allowed_token_ids=[3, 10]), vocab_size=10, eos_token_ids=())


def test_logit_bias_with_too_many_entries_is_refused_early() -> None:
    with pytest.raises(ValueError, match="logit_bias must have at most 4096 entries, got 100000"):
        SamplingParams(logit_bias=dict.fromkeys(range(100_000), "no number"))  # type: ignore[arg-type]
    assert SamplingParams(logit_bias=dict.fromkeys(range(4096), 1.0)).logit_bias is not None
