"""OpenAI's client with the app of the guide and the demo model: chats, completions, streams, formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import openai
import pytest

from aioengine.openai import openai_router
from tests.kit.pages import GUIDES, blocks
from tests.openai_api.serving import Served, app_served

pytestmark = pytest.mark.process

MODEL = "demo"
PERU: Any = [{"role": "user", "content": "What is the capital of Peru?"}]
FRANCE = "The capital of France is"


GUIDE = [block.code for block in blocks((GUIDES / "openai.md").read_text()) if block.language == "python"]
APPS = [code for code in GUIDE if "FastAPI(" in code]
PROGRAMS = [code for code in GUIDE if "localhost:8000" in code]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    names: dict[str, Any] = {}
    exec(APPS[0], names)
    router = openai_router(names["engine"], tool_parser="hermes")
    names["app"].include_router(router, prefix="/tools")
    with app_served(names["app"], names["engine"]) as running:
        yield running


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_code_of_the_guide_runs(server: Served, number: int) -> None:
    names: dict[str, Any] = {}
    with redirect_stdout(StringIO()) as printed:
        exec(PROGRAMS[number].replace("http://localhost:8000", server.url), names)
    if "client" in names:
        names["client"].close()
    assert printed.getvalue().strip()


def test_all_code_of_the_guide_is_run() -> None:
    assert len(APPS) == 1
    assert len(APPS) + len(PROGRAMS) == len(GUIDE)


def test_chat_answers_with_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=PERU, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "Lima" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 18
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = client.chat.completions.create(model=MODEL, messages=PERU, temperature=0)
    assert again.id != answer.id
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 16


def test_streamed_chat_equals_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=PERU, temperature=0, n=2)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=PERU, temperature=0, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[index].message.content
        assert [choice.delta.role for choice in choices] == ["assistant", *[None] * (len(choices) - 1)]
        assert [choice.finish_reason for choice in choices] == [*[None] * (len(choices) - 1), "stop"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (18, whole.usage.completion_tokens)


async def test_asynchronous_client_streams(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        stream = await client.chat.completions.create(model=MODEL, messages=PERU, temperature=0, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "Lima" in text


def test_stream_helper_of_the_client_reads_the_events(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=PERU, temperature=0) as stream:
        done = stream.get_final_completion()
    assert "Lima" in (done.choices[0].message.content or "")


def test_logprobs_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0, "logprobs": True, "top_logprobs": 2, "max_tokens": 5}
    choice = client.chat.completions.create(model=MODEL, messages=PERU, **options).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert bytes(entry.bytes or []).decode() == entry.token
        top_logprobs = [top.logprob for top in entry.top_logprobs]
        assert top_logprobs == sorted(top_logprobs, reverse=True)
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(model=MODEL, messages=PERU, stream=True, **options):
        logprobs = chunk.choices[0].logprobs
        streamed += logprobs.content or [] if logprobs else []
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def test_seed_repeats_and_stop_ends_an_answer(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> list[str]:
        options: dict[str, Any] = {"temperature": 2, "max_tokens": 12, "seed": 4}
        answer = client.completions.create(model=MODEL, prompt="Once upon a time", **options, **fields)
        return [choice.text for choice in answer.choices]

    texts = ask(n=3)
    assert texts == ask(n=3)
    assert texts[:1] == ask()
    assert len(set(texts)) > 1
    choice = client.chat.completions.create(model=MODEL, messages=PERU, temperature=0, stop=[" of"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("The capital", "stop")


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Lima", "Cusco"]}, "old": {"type": "boolean"}},
    "required": ["city", "old"],
    "additionalProperties": False,
}
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        r'\{\s?"city"\s?:\s?"(Lima|Cusco)"\s?,\s?"old"\s?:\s?(true|false)\s?\}',
    ),
    "regex": ({"extra_body": {"response_format": {"type": "regex", "pattern": "L[a-z]ma"}}}, "L[a-z]ma"),
    "grammar": ({"extra_body": {"response_format": {"type": "grammar", "grammar": 'root ::= "Li" "ma"'}}}, "Lima"),
    "our field": ({"extra_body": {"choice": ["Lima", "Cusco"]}}, "Lima|Cusco"),
    "structured outputs": ({"extra_body": {"structured_outputs": {"choice": ["Lima", "Cusco"]}}}, "Lima|Cusco"),
}


@pytest.mark.parametrize("case", FORMATS)
def test_answer_has_the_format(client: openai.OpenAI, case: str) -> None:
    options, pattern = FORMATS[case]
    choice = client.chat.completions.create(model=MODEL, messages=PERU, **options).choices[0]
    assert choice.finish_reason == "stop"
    assert re.fullmatch(pattern, choice.message.content or "")


def test_answer_may_be_any_json_object(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model=MODEL, messages=PERU, response_format={"type": "json_object"}, seed=1, max_tokens=60
    ).choices[0]
    text = choice.message.content or ""
    assert text.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_template_variables_and_sampling_parameters_are_additional_fields(client: openai.OpenAI) -> None:
    extra = {"chat_template_kwargs": {"add_generation_prompt": False}, "min_new_tokens": 3, "top_k": 1}
    answer = client.chat.completions.create(model=MODEL, messages=PERU, max_tokens=3, extra_body=extra)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (13, 3)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "find_city",
        "parameters": {
            "type": "object",
            "properties": {"country": {"enum": ["Peru", "Chile"]}, "size": {"enum": ["large", "small"]}},
            "required": ["country", "size"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find_city"}}])
def test_forced_tool_call_has_valid_arguments(server: Served, choice: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/tools/v1", api_key="any", max_retries=0) as client:
        other: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
        answer = client.chat.completions.create(
            model=MODEL,
            messages=PERU,
            tools=[TOOL] if choice == "required" else [other, TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=1,
        ).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "find_city"
    arguments = json.loads(call.function.arguments)
    assert arguments["country"] in ("Peru", "Chile")
    assert arguments["size"] in ("large", "small")


def test_tools_and_a_format_are_refused_together(server: Served) -> None:
    body = {"messages": PERU, "tools": [TOOL], "response_format": {"type": "json_object"}}
    response = server.post("/tools/v1/chat/completions", body)
    assert response.status_code == 400
    assert "cannot be combined" in response.json()["error"]["message"]
    assert server.post("/tools/v1/chat/completions", body | {"tool_choice": "none", "max_tokens": 3}).status_code == 200


def test_tool_choice_needs_a_parser(server: Served) -> None:
    response = server.post("/v1/chat/completions", {"messages": PERU, "tools": [TOOL], "tool_choice": "required"})
    assert response.status_code == 400
    assert "needs a tool parser" in response.json()["error"]["message"]


# ---------------------------------------------------------------- completions


def test_completion_has_16_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=FRANCE, temperature=0, extra_body={"ignore_eos": True})
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_prompts_are_texts_or_token_ids_or_lists_of_them(server: Served, client: openai.OpenAI) -> None:
    ids = server.engine.tokenizer.encode(FRANCE)

    def texts(prompt: Any, **fields: Any) -> list[str]:
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=2, **fields)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    (text,) = texts(FRANCE)
    assert texts(ids) == texts([FRANCE]) == texts([ids]) == [text]
    other = texts("Once upon a")[0]
    assert texts([FRANCE, "Once upon a"], n=2) == [text, text, other, other]
    assert texts([ids, ids]) == [text, text]
    assert texts(ids, echo=True) == [FRANCE + text]


def test_streamed_batch_equals_the_answers(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "n": 2, "echo": True, "logprobs": 1}
    prompts = [FRANCE, "Once upon a"]
    whole = client.completions.create(model=MODEL, prompt=prompts, **options)
    stream = client.completions.create(
        model=MODEL, prompt=prompts, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(stream)
    for expected in whole.choices:
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == expected.index]
        assert "".join(choice.text for choice in choices) == expected.text
        assert choices[-1].finish_reason == "length"
        assert expected.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [entry for choice in choices for entry in getattr(choice.logprobs, name)]
            assert len(joined) == len(getattr(expected.logprobs, name))
            if name in ("tokens", "text_offset"):
                assert joined == getattr(expected.logprobs, name)
    assert chunks[-1].usage == whole.usage


def test_logprobs_of_a_prompt_need_no_output(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=FRANCE, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == FRANCE
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == FRANCE
    assert (choice.logprobs.token_logprobs or [])[0] is None
    assert (choice.logprobs.text_offset or [])[:2] == [0, 3]
    tops = choice.logprobs.top_logprobs or []
    assert tops[0] is None
    assert [max(top, key=top.__getitem__) for top in tops[1:]] == [" capital", " of", " France", " is"]


# ---------------------------------------------------------------- embeddings, scores, tokens


def test_embeddings_are_floats_or_base64(server: Served, client: openai.OpenAI) -> None:
    ids = server.engine.tokenizer.encode(FRANCE)
    texts = client.embeddings.create(model=MODEL, input=[FRANCE, "Once"]).data  # the client asks for base64
    floats = client.embeddings.create(model=MODEL, input=ids, encoding_format="float")
    assert texts[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-6)
    assert (floats.usage.prompt_tokens, [entry.index for entry in texts]) == (len(ids), [0, 1])
    assert sum(number**2 for number in texts[1].embedding) == pytest.approx(1, abs=1e-4)
    short = client.embeddings.create(model=MODEL, input=FRANCE, dimensions=8).data[0].embedding
    assert len(short) == 8


def test_scores_are_the_probabilities_of_labels(server: Served) -> None:
    labels = [server.engine.tokenizer.encode(text)[0] for text in (" Paris", " London")]
    body = {"query": "The capital of France", "items": [" is", " is called"], "label_token_ids": labels}
    softmaxed = server.post("/v1/score", body | {"apply_softmax": True}).json()["scores"]
    assert [sum(scores) for scores in softmaxed] == pytest.approx([1, 1])
    assert softmaxed[0][0] > 0.9


def test_tokenize_and_detokenize_are_inverse(server: Served) -> None:
    tokenized = server.post("/tokenize", {"prompt": FRANCE}).json()
    assert tokenized == {"tokens": server.engine.tokenizer.encode(FRANCE), "count": 5, "max_model_len": 2048}
    assert server.post("/detokenize", {"tokens": tokenized["tokens"]}).json() == {"prompt": FRANCE}
    assert server.post("/tokenize", {"messages": PERU}).json()["count"] == 18
    assert server.post("/tokenize", {"messages": PERU, "prompt": "x"}).status_code == 400
