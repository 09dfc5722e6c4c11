"""A program that mypy and pyright check in strict mode. It asserts the types of all calls.

Lines with ``type: ignore`` must be errors. mypy reports unused comments.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, assert_type

from numpy import float32
from numpy.typing import NDArray

from aioengine import (
    AdapterResult,
    Answer,
    AnswerIterator,
    AsyncAnswerIterator,
    AsyncEngine,
    BatchOutput,
    ChunkIterator,
    Embedding,
    Engine,
    EngineArguments,
    EngineOverloadedError,
    FinishReason,
    Generation,
    JobRow,
    Ranking,
    RequestTooLargeError,
    SamplingParams,
    ScoreResult,
    Stream,
    TokenDifference,
    async_stream_and_merge,
    plan,
    stream_and_merge,
)


async def with_asyncio(is_stream: bool) -> None:
    async with AsyncEngine(max_running_requests=8) as engine:
        answer = await engine.async_generate("Once upon a time", {"max_new_tokens": 64})
        assert_type(answer["text"], str)
        assert_type(answer["output_ids"], list[int])
        assert_type(answer["meta_info"]["completion_tokens"], int)
        reason = answer["meta_info"]["finish_reason"]
        assert_type(reason, FinishReason)
        assert_type(reason["type"], Literal["stop", "length", "abort", "deadline", "shutdown"])
        assert_type(reason["length"], int)
        assert_type(reason["message"], str)
        assert_type(reason["matched"], str | int | None)
        assert_type(answer["meta_info"]["timings"]["total_s"], float)

        answers = await engine.async_generate(["a", "b"], SamplingParams(temperature=0))
        assert_type(answers, BatchOutput)
        assert_type([entry["text"] for entry in answers], list[str])

        async for chunk in engine.async_generate("a", stream=True):
            assert_type(chunk["text"], str)
            assert_type(chunk["text_offset"], int)
            assert_type(chunk["meta_info"]["finish_reason"], FinishReason | None)

        stream = await engine.async_generate(input_ids=[1, 2, 3], stream=True)
        async with stream:
            async for chunk in stream:
                print(chunk["text"], end="", flush=True)

        session = await engine.open_session(1000, streaming=True, timeout=60.0)
        assert_type(session, str)
        turn = await engine.async_generate("a", session_params={"id": session, "rid": None}, cache_salt="mine")
        assert_type(turn, Answer)
        await engine.close_session(session)
        async with engine.open_session() as session:
            assert_type(session, str)
        scored = await engine.async_generate("a", return_logprob=True, top_logprobs_num=3, token_ids_logprob=[1, 2])
        assert_type(scored["meta_info"]["output_token_logprobs"], list[tuple[float, int, str | None]])
        rows = await engine.async_generate(["a", "b"], return_logprob=[True, False], token_ids_logprob=[[1], None])
        assert_type(rows, BatchOutput)

        either = engine.async_generate("a", stream=is_stream)
        assert_type(either, Generation[Answer] | Generation[BatchOutput] | Stream)
        conversation = [{"role": "user", "content": "Hi"}]
        assert_type(await engine.async_chat(conversation), Answer)
        assert_type(engine.tokenizer.apply_chat_template(conversation), str)
        assert_type(engine.tokenizer.apply_chat_template(conversation, tokenize=True), list[int])
        assert_type(await engine.async_chat([conversation]), BatchOutput)
        either = engine.async_chat(conversation, stream=is_stream)
        assert_type(either, Generation[Answer] | Generation[BatchOutput] | Stream)

        async for text in async_stream_and_merge(engine, "a", {"temperature": 0.5}):
            assert_type(text, str)
        assert_type(await engine.admit(), None)
        assert_type(engine.attach("mine", from_offset=3), Stream)
        async for row in engine.map(prompts_of_a_job(), {"temperature": 0}, checkpoint="rows.jsonl", priority=-1):
            assert_type(row, JobRow)
            assert_type(row["text"] if "error" not in row else row["error"]["message"], str)
        async with engine.map(["a", [1, 2], {"prompt": "b", "rid": "x"}], ordered=False, window=8) as rows_of_a_job:
            assert_type(rows_of_a_job, AsyncAnswerIterator)
        assert_type(await engine.selfcheck(num_requests=4), list[TokenDifference])
        assert_type(await engine.drain(timeout=5), bool)


async def prompts_of_a_job() -> AsyncIterator[str]:
    yield "a"


def without_asyncio(is_stream: bool) -> None:
    with Engine() as llm:
        assert_type(llm.generate("a")["text"], str)
        assert_type(llm.generate(["a", "b"]), BatchOutput)
        assert_type(llm.generate(input_ids=[[1], [2]]), BatchOutput)
        assert_type(llm.generate("a", stream=is_stream), Answer | BatchOutput | ChunkIterator)
        assert_type(llm.async_generate("a", stream=True), Stream)
        for chunk in llm.generate("a", stream=True):
            assert_type(chunk["text"], str)
        assert_type(stream_and_merge(llm, "a", SamplingParams()), str)
        reply = llm.chat([{"role": "user", "content": "Hi"}])
        assert_type(reply["text"], str)
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        assert_type(llm.chat(parts, stream=is_stream), Answer | BatchOutput | ChunkIterator)
        tools = [{"type": "function", "function": {"name": "add"}}]
        llm.chat(parts, tools=tools, enable_thinking=False, chat_template=Path("a"), chat_template_kwargs={"a": 1})
        try:
            llm.generate("a", timeout=5.0, refuse_late=True, priority=1, tenant="gold", rid="mine")
        except EngineOverloadedError as error:
            assert_type(error.retry_after, float)
        except RequestTooLargeError as error:
            print(error)
        assert_type(llm.map(["a"], return_exceptions=False), AnswerIterator)
        assert_type([row["index"] for row in llm.map(["a"])], list[int])
        assert_type([difference.position for difference in llm.selfcheck()], list[int])
        assert_type(llm.stats()["num_running"], int)
        assert_type([chunk["text"] for chunk in llm.attach("mine")], list[str])
        assert_type(llm.is_alive, bool)


async def vectors_and_scores(llm: Engine, engine: AsyncEngine) -> None:
    assert_type(llm.encode("a")["embedding"], NDArray[float32])
    assert_type(llm.encode(["a", "b"], dimensions=8, prompt_name="query"), BatchOutput[Embedding])
    assert_type(llm.encode(input_ids=[[1, 2]])["embedding"], list[NDArray[float32]])
    assert_type(await engine.async_encode("a", truncate=True), Embedding)
    assert_type([found["score"] for found in llm.rerank("a", ["b", "c"], top_n=1)], list[float])
    assert_type(await engine.async_rerank([["a", "b"]]), BatchOutput[Ranking])
    scores = llm.score("a", ["b", "c"], [1, 2], apply_softmax=True)
    assert_type(scores[0], list[float])
    assert_type((await engine.async_score("a", "b", [1])).prompt_tokens, int)
    llm.rerank("a")  # type: ignore[call-overload]
    llm.encode("a", dimension=8)  # type: ignore[call-overload]


async def exceptions_in_their_places(llm: Engine, engine: AsyncEngine, catches: bool, is_stream: bool) -> None:
    answers = llm.generate(["a", "b"], return_exceptions=True)
    assert_type(answers, BatchOutput[Answer | Exception])
    assert_type([answer["text"] for answer in answers if not isinstance(answer, Exception)], list[str])
    assert_type(llm.generate(["a"], return_exceptions=False), BatchOutput)
    assert_type(llm.generate(["a"], return_exceptions=catches), BatchOutput[Answer | Exception])
    assert_type(llm.generate("a", return_exceptions=True), Answer)
    assert_type(llm.generate(["a"], stream=True, return_exceptions=True), ChunkIterator)
    either = llm.generate(["a"], stream=is_stream, return_exceptions=True)
    assert_type(either, Answer | BatchOutput[Answer | Exception] | ChunkIterator)
    assert_type(await engine.async_generate(input_ids=[[1]], return_exceptions=True), BatchOutput[Answer | Exception])
    conversation = [{"role": "user", "content": "Hi"}]
    assert_type(await engine.async_chat([conversation], return_exceptions=True), BatchOutput[Answer | Exception])
    assert_type(llm.encode(["a"], return_exceptions=True), BatchOutput[Embedding | Exception])
    assert_type(await engine.async_encode(input_ids=[[1]], return_exceptions=True), BatchOutput[Embedding | Exception])
    assert_type(llm.rerank("a", ["b"], return_exceptions=True), BatchOutput[Ranking | Exception])
    assert_type(llm.score("a", ["b"], [1], return_exceptions=True), ScoreResult[list[float] | Exception])
    assert_type((await engine.async_score("a", ["b"], [1], return_exceptions=True))[0], list[float] | Exception)


def several_samples(llm: Engine) -> None:
    assert_type(llm.generate("a", {"n": 2}), Answer)  # it is a BatchOutput: no type depends on ``n``
    assert_type(llm.generate(["a"], {"n": 2}), BatchOutput)


def requests_that_ask_for_more(llm: Engine, embeds: NDArray[float32]) -> None:
    answer = llm.generate("a", {"bad_words": ["x"], "custom_params": {"a": 1}}, custom_logit_processor="a:B")
    states = llm.generate("a", return_hidden_states=True)["meta_info"]["hidden_states"]
    assert_type(states, list[NDArray[float32]])
    llm.generate(["a", "b"], return_hidden_states=["last", None], custom_logit_processor=["a:B", None])
    llm.generate("a", add_special_tokens=False, truncate_prompt_tokens=5)
    llm.generate("<image>", image_data=b"...")
    assert_type(llm.encode(["<image>", "b"], image_data=[b"...", None]), BatchOutput[Embedding])
    llm.generate(["<image>", "b"], image_data=[["a.png", Path("b.png")], None])
    llm.chat([{"role": "user", "content": [{"type": "image", "image": b"..."}]}])
    assert_type(answer["meta_info"].get("image_tokens"), int | None)
    assert_type(llm.generate(input_embeds=embeds), Answer)
    assert_type(llm.generate(input_embeds=[[0.5, 1.0], [1.5, 2.0]]), Answer)
    assert_type(llm.generate(input_embeds=[embeds, embeds]), BatchOutput)
    assert_type(llm.beam_search("a", beam_width=2, length_penalty=0.5), BatchOutput)
    Engine(logits_processors=["a.b:C"], max_hidden_state_bytes=1000)
    print(answer, llm.chat([{"role": "user", "content": "Hi"}], return_hidden_states="last"))


async def adapters(llm: Engine, engine: AsyncEngine) -> None:
    Engine(lora_paths=["/a", "b=/b"], max_loras_per_batch=4)
    Engine(lora_paths={"a": "/a", "b": Path("/b")}, max_lora_rank=16, lora_target_modules="all", max_loaded_loras=8)
    AsyncEngine(lora_paths=[{"lora_name": "a", "lora_path": "/a", "pinned": True}], enable_lora=True)
    assert_type(llm.load_lora_adapter("a", Path("/a"), pinned=True), AdapterResult)
    assert_type((await engine.unload_lora_adapter("a", timeout=5)).loaded_adapters, dict[str, str])
    assert_type(await engine.list_lora_adapters(), AdapterResult)
    assert_type(llm.generate(["a", "b"], lora_path=["a", None]), BatchOutput)
    assert_type(llm.encode("a", lora_path="a"), Embedding)
    print(llm.score("a", ["b"], [1], lora_path=["a"]), llm.chat([{"role": "user", "content": "a"}], lora_path="a"))
    llm.generate("a", lora_path=3)  # type: ignore[call-overload]


def prompts_of_either_kind(llm: Engine, prompt: str | list[str], token_ids: list[int] | list[list[int]]) -> None:
    assert_type(llm.generate(prompt), Answer | BatchOutput)
    assert_type(llm.async_generate(prompt), Generation[Answer] | Generation[BatchOutput])
    assert_type(llm.generate(input_ids=token_ids), Answer | BatchOutput)
    assert_type(llm.generate(("a", "b")), BatchOutput)
    # types do not depend on ``n`` in sampling_params: if n is above 1, this is a BatchOutput.
    assert_type(llm.generate("a", {"n": 2}), Answer)
    assert_type(llm.generate(["a"], {"n": 2}), BatchOutput)


def arguments_of_the_constructor() -> None:
    arguments: EngineArguments = {"dtype": "bfloat16", "max_running_requests": 8, "tenant_weights": {"gold": 3}}
    Engine("model", **arguments)
    AsyncEngine(model_path=Path("model"), chat_template=Path("chat.jinja"), stall_timeout=30, page_size=None)
    Engine(max_model_len=1024)  # another engine's name of context_length

    Engine(dtpye="bfloat16")  # type: ignore[call-arg]
    AsyncEngine(max_runing_requests=8)  # type: ignore[call-arg]
    Engine(page_size="16")  # type: ignore[arg-type]
    AsyncEngine(disable_radix_cache=1.5)  # type: ignore[arg-type]
    Engine("model", "tokenizer")  # type: ignore  # mypy finds one error in it, or two
    wrong: EngineArguments = {"dtpye": "bfloat16"}  # type: ignore[typeddict-unknown-key]
    print(wrong)


def plans() -> None:
    found = plan("owner/name", device_memory="80GiB", dtype="bfloat16")
    assert_type(found.weights_bytes, int)
    assert_type(found.fits, bool)
    plan("owner/name", device_memory=80.5)  # type: ignore[arg-type]
    plan("owner/name", dtpye="bfloat16")  # type: ignore[call-arg]


async def mistakes_in_calls(llm: Engine, engine: AsyncEngine) -> None:
    llm.generate("a", rdi="mine")  # type: ignore[call-overload]
    llm.generate("a", timeout="5")  # type: ignore[call-overload]
    llm.generate("a", tools=[])  # type: ignore[call-overload]
    llm.chat([{"role": "user", "content": "a"}], enable_thinking="yes")  # type: ignore[call-overload]
    llm.generate(3)  # type: ignore[call-overload]
    SamplingParams(temprature=1)  # type: ignore[call-arg]
    await engine.generate("a")  # type: ignore[attr-defined]
    print((await engine.async_generate("a"))["txt"])  # type: ignore[typeddict-item]
