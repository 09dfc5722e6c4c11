"""Batches with an invalid row return its exception in its place, and the answers of the other rows."""

from __future__ import annotations

import gc
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from aioengine import AsyncEngine, RequestTooLargeError, UnsupportedSchemaError
from aioengine.frontend.engine_parts import Blueprint
from aioengine.frontend.intake.prompt_options import PROMPTS_IN_PIECE
from aioengine.settings.config import PoolingSettings
from aioengine.testing.fake_engine import FakeSetup, fake_async_engine
from tests.kit.waiting import until

pytestmark = pytest.mark.one_loop

PARAMS = {"max_new_tokens": 4, "temperature": 0}
LONG = "x" * 5000
IN_USE = "in use"


Fault = tuple[dict[str, object], type[Exception], str]
"""Arguments of a call, the error of its second row, and words of the error."""


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


RIGHT: dict[str, dict[str, Any]] = {
    "generate": {"prompt": ["a", "b", "c"], "sampling_params": PARAMS},
    "chat": {"messages": [says("a"), says("b"), says("c")], "sampling_params": PARAMS},
    "encode": {"prompt": ["a", "b", "c"]},
    "rerank": {"query": [["q", "a"], ["q", "b"], ["q", "c"]]},
    "score": {"query": "", "items": ["a", "b", "c"], "label_token_ids": [97, 98]},
}


def params(wrong: object) -> dict[str, object]:
    return {"sampling_params": [PARAMS, wrong, PARAMS]}


def asks_logprobs(name: str, wrong: object, right: object = None) -> dict[str, object]:
    return {"return_logprob": True, name: [right, wrong, right]}


OF_ALL: dict[str, Fault] = {
    "unknown adapter": ({"lora_path": [None, "nope", None]}, ValueError, "'nope' is not loaded"),
    "empty adapter": ({"lora_path": [None, "", None]}, ValueError, "lora_path is empty"),
    "adapter of a wrong type": ({"lora_path": [None, ["nope"], None]}, TypeError, "lora_path must be a string"),
}
OF_CALLS: dict[str, Fault] = OF_ALL | {
    "salt": ({"cache_salt": [None, 5, None]}, TypeError, "cache_salt must be a string"),
    "long salt": ({"cache_salt": ["s", "s" * 600, None]}, ValueError, "cache_salt must be at most 512 bytes"),
    "rid": ({"rid": ["x", 5, "z"]}, TypeError, "rid must be a string"),
    "empty rid": ({"rid": ["x", "", "z"]}, ValueError, "rid is empty"),
    "rid in use": ({"rid": ["x", IN_USE, "z"]}, ValueError, "'in use' is in use"),
    "rid twice": ({"rid": ["x", "x", "z"]}, ValueError, "'x' is the id of two prompts"),
}
IMAGE = ({"image_data": [None, "a.png", []]}, ValueError, "this model accepts only text")
OF_GENERATION: dict[str, Fault] = OF_CALLS | {
    "image": IMAGE,
    "parameter": (params({"temperature": 9}), ValueError, "temperature must be"),
    "unknown parameter": (params({"temprature": 1}), TypeError, "'temprature'"),
    "type of parameters": (params(5), TypeError, "sampling_params must be"),
    "parameters of another vocabulary": (params({"logit_bias": {10**6: 1.0}}), ValueError, "logit_bias"),
    "too many new tokens": (params({"max_new_tokens": 10**6}), RequestTooLargeError, "max_new_tokens=1000000"),
    "schema": (params({"json_schema": "{"}), ValueError, "json_schema='{'"),
    "unsupported schema": (
        params({"json_schema": {"type": "object", "patternProperties": {"(?=a)": {}}}}),
        UnsupportedSchemaError,
        "cannot be enforced",
    ),
    "regex": (params({"regex": "("}), ValueError, "regex='\\('"),
    "custom_params": (params({"custom_params": {"a": 1}}), ValueError, "custom_params"),
    "unknown processor": ({"custom_logit_processor": [None, "a:B", None]}, ValueError, "'a:B' is not known"),
    "processor": ({"custom_logit_processor": [None, 5, None]}, TypeError, "custom_logit_processor must be"),
    "hidden states": ({"return_hidden_states": [None, "first", False]}, ValueError, "return_hidden_states must be"),
    "unknown session": ({"session_params": [None, {"id": "?"}, None]}, ValueError, "session '\\?' does not exist"),
    "session": ({"session_params": [None, 5, None]}, TypeError, "session_params must be a dict"),
    "return_logprob": ({"return_logprob": [True, 5, None]}, TypeError, "return_logprob must be True or False"),
    "start of logprobs": (asks_logprobs("logprob_start_len", -5), ValueError, "logprob_start_len must be"),
    "late start of logprobs": (asks_logprobs("logprob_start_len", 500), ValueError, "logprob_start_len must be at"),
    "number of logprobs": (asks_logprobs("top_logprobs_num", -1), ValueError, "top_logprobs_num must be"),
    "too many logprobs": (asks_logprobs("top_logprobs_num", 10**6), ValueError, "at most 261, the vocabulary"),
    "ids of logprobs": (asks_logprobs("token_ids_logprob", 5, [1]), TypeError, "token_ids_logprob must be a list"),
    "unknown ids of logprobs": (asks_logprobs("token_ids_logprob", [10**6]), ValueError, "from 0 to 260"),
    "texts of logprobs": (asks_logprobs("return_text_in_logprobs", 1), TypeError, "return_text_in_logprobs must"),
}
OWN: dict[str, dict[str, Fault]] = {
    "generate": {
        "prompt": ({"prompt": ["a", 5, "c"]}, TypeError, r"prompt\[1\] must be a string"),
        "empty prompt": ({"prompt": ["a", "", "c"]}, ValueError, r"prompt\[1\] is empty"),
        "long prompt": ({"prompt": ["a", LONG, "c"]}, RequestTooLargeError, "5000 tokens"),
        "lone surrogate": ({"prompt": ["a", "\ud800", "c"]}, ValueError, "lone surrogate"),
    },
    "chat": {
        "conversation": ({"messages": [says("a"), 5, says("c")]}, TypeError, r"messages\[1\] must be"),
        "message": ({"messages": [says("a"), [{"role": "user"}], says("c")]}, ValueError, "has no content"),
        "long conversation": ({"messages": [says("a"), says(LONG), says("c")]}, RequestTooLargeError, "tokens"),
        "image of a message": (
            {"messages": [says("a"), [{"role": "user", "content": [{"type": "image", "image": b"x"}]}], says("c")]},
            ValueError,
            "the messages have images",
        ),
    },
    "encode": {
        "text": ({"prompt": ["a", 5, "c"]}, TypeError, r"prompt\[1\] must be a string"),
        "long text": ({"prompt": ["a", LONG, "c"]}, RequestTooLargeError, "truncate=True"),
        "unknown id": ({"prompt": None, "input_ids": [[97], [10**6], [99]]}, ValueError, "outside the vocabulary"),
        "image": IMAGE,
    },
    "rerank": {
        "pair": ({"query": [["q", "a"], ["q"], ["q", "c"]]}, ValueError, r"query\[1\] must be a pair"),
        "document": ({"query": [["q", "a"], ["q", 5], ["q", "c"]]}, TypeError, r"query\[1\] must be a string"),
        "long pair": ({"query": [["q", "a"], ["q", LONG], ["q", "c"]]}, RequestTooLargeError, "truncate=True"),
    },
    "score": {
        "item": ({"items": ["a", 5, "c"]}, TypeError, r"items\[1\] must be a string"),
        "item of the other kind": ({"items": ["a", [5], "c"]}, ValueError, r"items\[1\] is \[5\] and query is ''"),
        "empty item": ({"items": ["a", "", "c"]}, ValueError, r"items\[1\] are both empty"),
        "long item": ({"items": ["a", LONG, "c"]}, RequestTooLargeError, "5000 tokens"),
        "labels": ({"label_token_ids": [[97, 98], 5, [97, 98]]}, TypeError, r"label_token_ids\[1\] must be a list"),
        "unknown label": (
            {"label_token_ids": [[97, 98], [10**6], [97, 98]]},
            ValueError,
            r"label_token_ids\[1\] entries",
        ),
    },
}
OTHERS = {"generate": OF_GENERATION, "chat": OF_GENERATION, "encode": OF_CALLS, "rerank": OF_CALLS, "score": OF_ALL}
FAULTS = [
    pytest.param(method, *fault, id=f"{method}: {name}")
    for method, own in OWN.items()
    for name, fault in (own | OTHERS[method]).items()
]


def reranking_blueprint() -> Blueprint:
    """Return the blueprint of a fake engine that returns its vectors as scores of a cross-encoder."""
    blueprint = FakeSetup(max_loras_per_batch=2).blueprint()
    model = replace(blueprint.settings.model, task="classify", pooling=PoolingSettings(num_labels=1))
    return replace(blueprint, settings=replace(blueprint.settings, model=model))


@pytest.fixture
async def generating() -> AsyncIterator[AsyncEngine]:
    async with fake_async_engine(max_loras_per_batch=2) as engine:
        yield engine


@pytest.fixture
async def reranking() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.from_blueprint(reranking_blueprint) as engine:
        yield engine


@pytest.fixture
def engine(request: pytest.FixtureRequest, method: str) -> AsyncEngine:
    engine: AsyncEngine = request.getfixturevalue("reranking" if method == "rerank" else "generating")
    return engine


def content(answer: Any) -> object:
    """Return an answer without ``meta_info``. Scores are random here, so return their number."""
    if not isinstance(answer, dict):
        return len(answer)
    return list(answer["embedding"]) if "embedding" in answer else answer.get("text", answer.get("score"))


async def test_invalid_image_fails_only_its_row(generating: AsyncEngine) -> None:
    outs = await generating.async_generate(["a", "b"], PARAMS, image_data=["a.png", None], return_exceptions=True)
    assert isinstance(outs[0], ValueError)
    assert isinstance(outs[1], dict)


@pytest.mark.parametrize(("method", "wrong", "error", "message"), FAULTS)
async def test_wrong_row_returns_its_exception_in_its_place(
    engine: AsyncEngine, method: str, wrong: dict[str, object], error: type[Exception], message: str
) -> None:
    call = getattr(engine, f"async_{method}")
    right = await call(**RIGHT[method])
    open_call = engine.async_encode("x", rid=IN_USE)
    with pytest.raises(error, match=message) as caught:
        await call(**RIGHT[method] | wrong)
    assert re.search(r"^prompt 1: |\w\[1\]| of prompt 1\b", str(caught.value))
    outs = await call(**RIGHT[method] | wrong, return_exceptions=True)
    assert type(outs) is type(right)
    assert [content(out) for out in (outs[0], outs[2])] == [content(out) for out in (right[0], right[2])]
    with pytest.raises(error, match=message):
        raise outs[1]
    await open_call
    assert engine.stats()["num_streams"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_salt": [5] * PROMPTS_IN_PIECE + ["s", 5, "s"]}, "cache_salt must be a string"),
        ({"lora_path": [None] * (PROMPTS_IN_PIECE + 1) + ["nope", None]}, "'nope' is not loaded"),
        ({"rid": [*map(str, range(PROMPTS_IN_PIECE + 1)), "0", "last"]}, "'0' is the id of two prompts"),
    ],
    ids=["salts", "adapters", "rids"],
)
async def test_rows_of_a_long_batch_fail_alone(generating: AsyncEngine, options: dict[str, Any], message: str) -> None:
    prompts = ["a"] * (PROMPTS_IN_PIECE + 3)
    with pytest.raises((TypeError, ValueError), match=message):
        await generating.async_generate(prompts, PARAMS, **options)
    outs = await generating.async_generate(prompts, PARAMS, **options, return_exceptions=True)
    wrong = [place for place, out in enumerate(outs) if isinstance(out, Exception)]
    assert wrong[-1] == PROMPTS_IN_PIECE + 1
    assert len(wrong) == (PROMPTS_IN_PIECE + 1 if "cache_salt" in options else 1)


async def test_unknown_adapter_of_all_rows_fails_the_call(generating: AsyncEngine) -> None:
    with pytest.raises(ValueError, match="'nope' is not loaded"):
        await generating.async_generate(["a", "b"], PARAMS, lora_path="nope", return_exceptions=True)


async def test_a_stream_names_the_error_of_a_wrong_row(generating: AsyncEngine) -> None:
    options: dict[str, Any] = {"return_logprob": [True, 5], "return_exceptions": True}
    chunks = [chunk async for chunk in generating.async_generate(["a", "b"], PARAMS, stream=True, **options)]
    [reason] = [chunk["meta_info"]["finish_reason"] for chunk in chunks if chunk["index"] == 1]
    assert reason is not None
    assert (reason["type"], reason["err_type"]) == ("abort", "TypeError")
    assert "".join(chunk["text"] for chunk in chunks if chunk["index"] == 0)


async def test_a_batch_with_a_wrong_row_is_aborted_when_it_is_dropped() -> None:
    async with fake_async_engine(step_time_s=0.001, processes=False) as engine:
        params: list[Any] = [{"max_new_tokens": 2000}, {"max_new_tokens": "x"}]
        gc.disable()  # the error of the row must not keep the call alive in a reference cycle
        try:
            generation = engine.async_generate(["a", "b"], params, return_exceptions=True)
            await until(lambda: engine.stats()["num_running"] > 0)
            del generation
            await until(lambda: engine.stats()["num_running"] == 0)
            assert engine.stats()["num_aborted"] == 1
        finally:
            gc.enable()


async def test_all_items_of_a_score_may_be_wrong(generating: AsyncEngine) -> None:
    scores = await generating.async_score("q", [5, None], [97], return_exceptions=True, return_token_logprobs=True)  # type: ignore[list-item]
    assert [type(entry) for entry in scores] == [TypeError, TypeError]
    assert (scores.prompt_tokens, scores.token_logprobs) == (0, list(scores))
