"""Structured output of the complete engine with the demo model. Every answer follows its grammar."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pytest

from aioengine import AsyncEngine, Engine, UnsupportedSchemaError
from tests.kit.waiting import until, wait_until
from tests.processes.restart_kit import Rows, pid_of, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process


@dataclass
class Cat:
    name: str
    lives: int


class Dog(msgspec.Struct):
    breed: str


SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["id", "tags", "ok"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<n>", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "end": "</n>"}],
    "triggers": ["<n>"],
}

REQUESTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA, "temperature": 0},
    "hot": {"json_schema": SCHEMA, "temperature": 2, "seed": 1, "frequency_penalty": 1.5, "n": 2},
    "biased": {"json_schema": json.dumps(SCHEMA), "seed": 2, "logit_bias": {"40": 50.0, "41": -50.0}, "top_k": 3},
    "regex": {"regex": r"[a-f]{5,20}-\d{1,9}!", "seed": 3, "temperature": 1.5, "min_p": 0.01},
    "ended": {"regex": r"\w{4,12}", "seed": 4, "ignore_eos": True, "min_new_tokens": 2},
    "choice": {"choice": ["certainly", "certainly not", "never"], "seed": 5, "repetition_penalty": 1.5},
    "ebnf": {"ebnf": 'root ::= "x" [0-9]{2,4} ("y" | "z")', "seed": 6},
    "free": {"seed": 7, "max_new_tokens": 12},
    "thought": {
        "json_schema": SCHEMA, "reasoning_end": "</think>", "max_thinking_tokens": 6, "seed": 8, "temperature": 0.7,
    },
    "class": {"json_schema": Cat, "seed": 9, "max_new_tokens": 80, "temperature": 0},
    "cut": {"json_object": True, "seed": 10, "max_new_tokens": 4},
    "forced": {"regex": r"[a-f]{2,9} and what follows is forced, \d{2,4} as well as this", "seed": 11},
}  # fmt: skip


async def ask(engine: Engine | AsyncEngine, name: str, *, stream: bool = False) -> Rows:
    params = {"max_new_tokens": 96, **REQUESTS[name]}
    return await rows_of(engine, f"A question for {name}: ", params, stream=stream)


async def ask_all(engine: Engine | AsyncEngine, *, stream: bool = False) -> dict[str, Rows]:
    rows = await asyncio.gather(*(ask(engine, name, stream=stream) for name in REQUESTS))
    return dict(zip(REQUESTS, rows, strict=True))


def check(name: str, text: str, reason: object) -> None:
    params = REQUESTS[name]
    if name in {"free", "cut"}:
        return
    if reason == "length":  # only these answers may be incomplete
        return
    assert reason == "stop"
    if name == "thought":
        text = text.partition("</think>")[2]
    if name in {"schema", "hot", "biased", "thought"}:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif name == "class":
        msgspec.json.decode(text, type=Cat)
    elif "regex" in params:
        assert re.fullmatch(params["regex"], text)
    elif "choice" in params:
        assert text in params["choice"]
    else:
        assert re.fullmatch("x[0-9]{2,4}[yz]", text)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as started:
        assert wait_until(lambda: started.get_server_info()["internal_states"][0]["grammars_prepared"])  # while idle
        assert started.stats()["num_steps"] == 0
        yield started


@pytest.fixture(scope="module")
def single_answers(engine: Engine) -> dict[str, Rows]:
    """Return the answers of single requests. All other ways to send them must return the same."""
    return {name: asyncio.run(ask(engine, name)) for name in REQUESTS}


async def test_answers_follow_their_grammar_alone_in_a_batch_and_in_streams(
    engine: Engine, single_answers: dict[str, Rows]
) -> None:
    for name, rows in single_answers.items():
        for text, _, reason in rows:
            check(name, text, reason)
    for name in ("schema", "regex", "choice", "ebnf", "forced"):  # grammars with fewer tokens than max_new_tokens
        assert single_answers[name][0][2] == "stop", name
    assert await ask_all(engine) == single_answers
    assert await ask_all(engine, stream=True) == single_answers


async def test_answers_are_the_same_when_the_scheduler_is_killed(
    engine: Engine, single_answers: dict[str, Rows]
) -> None:
    names = ("schema", "hot", "regex", "thought", "forced")
    before = engine.stats()
    asked = [asyncio.create_task(ask(engine, name)) for name in names]
    await until(lambda: engine.stats()["output_tokens"] > before["output_tokens"] + 20)
    scheduler = pid_of(engine, "scheduler")
    os.kill(scheduler, signal.SIGSTOP)  # so that at least the last request is unfinished when the scheduler dies
    asked.append(asyncio.create_task(ask(engine, "choice")))
    opening = asyncio.ensure_future(engine.async_generate("x", {"choice": ["yes"]}, stream=True))
    await until(lambda: engine.stats()["num_streams"] >= 2)
    os.kill(scheduler, signal.SIGKILL)
    assert "".join([chunk["text"] async for chunk in await opening]) == "yes"
    assert await asyncio.gather(*asked) == [single_answers[name] for name in (*names, "choice")]
    assert engine.stats()["num_restarts"] == before["num_restarts"] + 1


async def count_steps(engine: Engine, name: str, *, return_logprob: bool) -> tuple[dict[str, Any], int]:
    """Return an answer, and the number of its steps."""
    await until(lambda: not engine.stats()["num_running"])  # the statistics of earlier requests have arrived
    before = engine.stats()
    params = {"max_new_tokens": 64, **REQUESTS[name]}
    answer = await engine.async_generate("Who? ", params, return_logprob=return_logprob)
    await until(lambda: engine.stats()["num_finished"] > before["num_finished"])
    return answer, engine.stats()["num_steps"] - before["num_steps"]


@pytest.mark.parametrize("name", ["schema", "forced", "class", "thought"])
async def test_forced_tokens_take_no_steps_and_change_nothing(engine: Engine, name: str) -> None:
    # each token that has a logprob is computed in a step of its own
    plain, num_plain_steps = await count_steps(engine, name, return_logprob=True)
    jumped, num_steps = await count_steps(engine, name, return_logprob=False)
    assert (jumped["output_ids"], jumped["text"]) == (plain["output_ids"], plain["text"])
    num_tokens = len(plain["output_ids"])
    assert num_plain_steps >= num_tokens
    if name == "forced":
        assert num_steps < num_tokens / 2


async def test_end_of_text_is_sampled_only_if_the_grammar_can_end(engine: Engine) -> None:
    out = await engine.async_generate("x", {"regex": "ab|abc", "temperature": 0, "ignore_eos": True})
    assert (out["text"], out["meta_info"]["finish_reason"]) == ("abc", "stop")
    out = await engine.async_generate("x", {"regex": "abc", "min_new_tokens": 50, "max_new_tokens": 60})
    assert (out["text"], out["meta_info"]["finish_reason"]) == ("abc", "stop")
    num_tokens = len(out["output_ids"])
    out = await engine.async_generate("x", {"regex": "abc", "max_new_tokens": num_tokens})
    assert out["meta_info"]["finish_reason"] == "stop"
    out = await engine.async_generate("x", {"regex": "abc", "max_new_tokens": num_tokens - 1})
    assert out["meta_info"]["finish_reason"] == "length"
    out = await engine.async_generate("x", {"regex": "[a-z]+q[a-z]*", "stop": ["q"], "max_new_tokens": 200, "seed": 1})
    assert out["meta_info"]["finish_reason"] in ("stop", "length")


async def test_thinking_ends_by_itself_by_force_or_in_the_prompt(engine: Engine) -> None:
    ids = engine.tokenizer.encode("</think>", add_special_tokens=False)
    for end in ("</think>", ids):
        params = {"choice": ["yes"], "reasoning_end": end, "max_thinking_tokens": 3, "max_new_tokens": 40, "seed": 1}
        text = (await engine.async_generate("Think: ", params))["text"]
        assert text.endswith("</think>yes")
        out = await engine.async_generate("Think: <think></think>\n", params)
        assert out["text"] == "yes"
    params = {"choice": ["yes"], "reasoning_end": "</think>", "max_thinking_tokens": 0, "max_new_tokens": 40}
    assert (await engine.async_generate("Think: ", params))["text"] == "</think>yes"


async def test_tags_may_be_in_free_text(engine: Engine) -> None:
    params = {"structural_tag": TAG, "max_new_tokens": 30, "seed": 3, "logit_bias": {"0": 8.0}}
    out = await engine.async_generate("Text: ", params)
    assert all(re.match(r"\d</n>", part) for part in out["text"].split("<n>")[1:] if len(part) > 5)


async def test_grammar_refused_by_the_compiler_fails_alone(engine: Engine) -> None:
    empty = {"allOf": [{"type": "string", "pattern": "^a$"}, {"type": "string", "pattern": "^b$"}]}
    bad = [{"ebnf": "root ::= ("}, {"ebnf": "start: %%%"}, {"json_schema": empty}]
    good = asyncio.create_task(ask(engine, "schema"))
    for params in bad:
        [(name, value)] = params.items()
        shown = json.dumps(value) if isinstance(value, dict) else value
        with pytest.raises(UnsupportedSchemaError) as raised:
            await engine.async_generate("x", params)
        assert str(raised.value).startswith(f"{name}={shown[:80]!r}"), raised.value
        assert "cannot be enforced: " in str(raised.value)
        with pytest.raises(UnsupportedSchemaError) as raised:
            await engine.async_generate("x", params, stream=True)
        assert (raised.value.pointer, raised.value.keyword) == ("", name)
    rows = await engine.async_generate(["x", "y"], [bad[0], {"choice": ["z"]}], return_exceptions=True)
    assert isinstance(rows[0], UnsupportedSchemaError)
    assert rows[1]["text"] == "z"
    check("schema", (await good)[0][0], (await good)[0][2])


@pytest.mark.parametrize(
    ("ebnf", "rule"), [('root ::= "a" root', "root"), ('root ::= "a" my-rule\nmy-rule ::= my-rule', "my-rule")]
)
async def test_grammar_that_can_never_end_is_refused_before_generation(engine: Engine, ebnf: str, rule: str) -> None:
    reason = f"the rule '{rule}' can never end: each alternative repeats rules endlessly; add one that ends"
    with pytest.raises(UnsupportedSchemaError, match=reason):
        await engine.async_generate("x", {"ebnf": ebnf}, stream=True)
    with pytest.raises(UnsupportedSchemaError, match=reason):
        await anext(engine.async_generate("x", {"ebnf": ebnf}, stream=True))
    rows = await engine.async_generate(["x", "y"], [{"ebnf": ebnf}, {"choice": ["z"]}], return_exceptions=True)
    assert isinstance(rows[0], UnsupportedSchemaError)
    assert (rows[0].keyword, rows[1]["text"]) == ("ebnf", "z")


async def test_schema_in_an_ebnf_is_refused_with_its_position(engine: Engine) -> None:
    with pytest.raises(UnsupportedSchemaError) as raised:
        await engine.async_generate("x", {"ebnf": 'start: %json {"items": {"contains": {}}}'})
    assert (raised.value.pointer, raised.value.keyword) == ("/items", "contains")


async def test_a_request_that_waits_for_its_grammar_can_be_left(engine: Engine) -> None:
    words = [f"word{number}" for number in range(900)]
    long = {"regex": f"({'|'.join(words)})[ab]{{900}}", "max_new_tokens": 1000}  # it takes seconds if it is not left
    task = asyncio.ensure_future(engine.async_generate("x", long, timeout=20))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await engine.async_generate("x", {"choice": words}))["text"] in words
    await until(lambda: engine.stats()["num_streams"] == 0)
