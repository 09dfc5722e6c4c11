"""Speculation of the complete engine: answers equal those of the plain engine, also after a kill.

The model is the demo model with a draft model (``save_demo_with_draft``), or with a random draft head.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import aioengine
from aioengine import AsyncEngine, Engine
from tests.compute.runner_world import save_model
from tests.kit.adapters import save_adapter
from tests.kit.draft_heads import head_config, random_tensors, save_head, save_with_mtp
from tests.kit.drafts import save_demo_with_draft
from tests.kit.waiting import until
from tests.processes.restart_kit import pid_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.process

TEXT = "the cat sat on the mat and the dog sat on the cat. "
FEW = [70, 75, 80, 90, 100, 110]
SCHEMA = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": {"enum": ["first", "second"]}, "minItems": 4, "maxItems": 9}},
    "required": ["rows"],
    "additionalProperties": False,
}
SHARED: dict[str, Any] = {"max_new_tokens": 48, "ignore_eos": True, "allowed_token_ids": FEW}
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "drawn": ({"temperature": 0.4, "seed": 1}, {}),
    "penalties": ({"seed": 2, "temperature": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.05}, {}),
    "logprobs": ({"temperature": 0}, {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}),
    "states": ({"temperature": 0.4, "seed": 3}, {"return_hidden_states": True}),
    "samples": ({"temperature": 0.4, "seed": 4, "n": 3}, {}),
    "adapter": ({"temperature": 0}, {"lora_path": "one"}),
    "deadline": ({"temperature": 0}, {"timeout": 600.0}),
    "grammar": ({"seed": 5, "json_schema": SCHEMA, "allowed_token_ids": None, "ignore_eos": False}, {}),
}


def shape_of(engine: Engine | AsyncEngine, answer: Any) -> list[object]:
    """Return all of an answer that must not depend on drafts, with arrays as bytes."""
    answers = list(answer) if isinstance(answer, list) else [answer]
    keys = ("finish_reason", "output_token_logprobs", "output_top_logprobs", "input_token_logprobs")
    return [
        (
            answer["text"],
            answer["output_ids"],
            [answer["meta_info"].get(key) for key in keys],
            [np.asarray(state).tobytes() for state in answer["meta_info"].get("hidden_states", [])],
        )
        for answer in answers
    ]


async def ask(engine: Engine | AsyncEngine, name: str) -> list[object]:
    params, options = REQUESTS[name]
    result = await engine.async_generate(3 * TEXT, {**SHARED, **params}, **options)
    return shape_of(engine, result)


async def ask_all(engine: Engine | AsyncEngine) -> dict[str, list[object]]:
    return dict(zip(REQUESTS, await asyncio.gather(*(ask(engine, name) for name in REQUESTS)), strict=True))


class Folders(NamedTuple):
    """The folders of a model, of its draft model, of its draft head and of an adapter."""

    model: Path
    draft: Path
    head: Path
    adapter: Path

    def arguments(self, algorithm: str | None) -> dict[str, Any]:
        """Return the arguments of an engine with this algorithm of speculation."""
        arguments: dict[str, Any] = {"model_path": self.model, "lora_paths": {"one": str(self.adapter)}}
        if algorithm in {"STANDALONE", "EAGLE3"}:
            arguments["speculative_draft_model_path"] = self.draft if algorithm == "STANDALONE" else self.head
        arguments |= {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096}
        return arguments | {"speculative_algorithm": algorithm}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("speculation")
    model_folder, draft = save_demo_with_draft(folder)
    model = AutoModelForCausalLM.from_pretrained(str(model_folder))
    config = demo_head_config(model)
    save_head(folder / "head", config, random_tensors(config, "EAGLE3"))
    return Folders(model_folder, draft, folder / "head", save_adapter(model, folder / "one", r=4))


def demo_head_config(model: Any) -> dict[str, Any]:
    """Return config.json of an EAGLE-3 head for the demo model, whose output head has all tokens."""
    sizes = {name: getattr(model.config, name) for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    return head_config(**sizes, draft_vocab_size=sizes["vocab_size"])


@pytest.fixture(scope="module")
def plain(folders: Folders) -> Iterator[Engine]:
    with Engine(**folders.arguments(None)) as engine:
        yield engine


@pytest.fixture(
    scope="module", params=[*(pytest.param(name, marks=pytest.mark.slow) for name in ("NGRAM", "STANDALONE")), "EAGLE3"]
)
def algorithm(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(algorithm: str, folders: Folders) -> Iterator[Engine]:
    with Engine(**folders.arguments(algorithm)) as engine:
        yield engine


async def test_answers_are_those_of_the_plain_engine(plain: Engine, engine: Engine) -> None:
    assert await ask_all(engine) == await ask_all(plain)
    assert engine.stats()["num_accepted_drafts"] > 5
    assert plain.stats()["num_proposed_drafts"] == 0


@pytest.mark.slow
async def test_answers_are_the_same_when_the_scheduler_is_killed(plain: Engine, engine: Engine) -> None:
    alone, before = await ask_all(plain), engine.stats()
    asked = asyncio.create_task(ask_all(engine))
    await until(lambda: engine.stats()["output_tokens"] > before["output_tokens"] + 60)
    os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
    assert await asked == alone
    assert engine.stats()["num_restarts"] == before["num_restarts"] + 1


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
async def test_tokens_of_two_ranks_are_those_of_one(plain: Engine, folders: Folders, algorithm: str) -> None:
    def tokens(answers: dict[str, list[Any]]) -> dict[str, list[object]]:
        return {name: [shape[:2] for shape in shapes] for name, shapes in answers.items()}

    with Engine(tp_size=2, **folders.arguments(algorithm)) as engine:
        assert tokens(await ask_all(engine)) == tokens(await ask_all(plain))
        assert engine.stats()["num_accepted_drafts"] > 5


@pytest.mark.parametrize("num_tokens", [5, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 13))])
async def test_stops_inside_a_draft_end_the_answer_at_the_same_token(
    plain: Engine, engine: Engine, num_tokens: int
) -> None:
    whole = await plain.async_generate(3 * TEXT, {**SHARED, "temperature": 0.4, "seed": 1})
    word, token_id = whole["text"][num_tokens : num_tokens + 3], whole["output_ids"][num_tokens]
    for stops in ({"stop": [word]}, {"stop_regex": word[:2] + "."}, {"stop_token_ids": [token_id]}):
        params = {**SHARED, "temperature": 0.4, "seed": 1, **stops, "ignore_eos": False}
        answers = [await either.async_generate(3 * TEXT, params) for either in (plain, engine)]
        assert shape_of(engine, answers[1]) == shape_of(plain, answers[0])
        info = answers[1]["meta_info"]
        assert info["spec_verify_ct"] + info["spec_num_correct_drafts"] == info["completion_tokens"]


async def test_finished_answers_count_their_drafts(plain: Engine, engine: Engine) -> None:
    answer = await engine.async_generate(3 * TEXT, {**SHARED, "temperature": 0, "logit_bias": {"70": 100}})
    info = answer["meta_info"]
    assert info["spec_num_correct_drafts"] > 20  # the same token again and again
    assert info["spec_verify_ct"] == 48 - info["spec_num_correct_drafts"]
    assert info["spec_accept_rate"] == info["spec_num_correct_drafts"] / info["spec_num_proposed_drafts"]
    assert info["spec_accept_length"] == 48 / info["spec_verify_ct"]
    chunks = [chunk async for chunk in engine.async_generate(3 * TEXT, {**SHARED, "temperature": 0}, stream=True)]
    assert [("spec_accept_rate" in chunk["meta_info"]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "spec_accept_rate" not in (await plain.async_generate("x", {"max_new_tokens": 1}))["meta_info"]


async def test_turns_of_a_session_equal_those_of_the_plain_engine(plain: Engine, engine: Engine) -> None:
    turns: list[list[object]] = []
    for either in (plain, engine):
        session, rid = either.open_session(), None
        turns.append([])
        for turn in range(3):
            params = {**SHARED, "max_new_tokens": 30, "temperature": 0.3, "seed": turn}
            answer = await either.async_generate(TEXT, params, session_params={"id": session, "rid": rid})
            rid = answer["meta_info"]["id"]
            turns[-1] += shape_of(either, answer)
        either.close_session(session)
    assert turns[0] == turns[1]


def sizes(memory: Mapping[str, Any]) -> tuple[int, int]:
    return memory["kv_pool_bytes"], memory["weights_bytes"]


def test_a_plan_has_the_sizes_of_the_engine(engine: Engine, algorithm: str, folders: Folders) -> None:
    """With the draft model, or the draft head and the hidden states that it reads."""
    plan = aioengine.plan(**folders.arguments(algorithm))
    assert (plan.kv_pool_bytes, plan.weights_bytes) == sizes(engine.get_server_info()["memory"])


@pytest.mark.slow
def test_a_plan_has_an_int8_pool_for_the_draft_model(folders: Folders) -> None:
    arguments = {**folders.arguments("STANDALONE"), "kv_cache_dtype": "int8"}
    plan = aioengine.plan(**arguments)
    with Engine(**arguments) as engine:
        assert (plan.kv_pool_bytes, plan.weights_bytes) == sizes(engine.get_server_info()["memory"])


def test_a_plan_counts_the_draft_model(folders: Folders) -> None:
    plain, with_model, with_head = (
        aioengine.plan(**folders.arguments(algorithm)) for algorithm in (None, "STANDALONE", "EAGLE3")
    )
    assert with_model.kv_bytes_per_token == plain.kv_bytes_per_token * 5 // 4  # four layers and one
    assert plain.weights_bytes < with_model.weights_bytes < 2 * plain.weights_bytes
    assert with_head.kv_bytes_per_token > plain.kv_bytes_per_token * 5 // 4


@pytest.mark.slow
def test_layers_for_multi_token_prediction_of_the_model_propose_drafts(tmp_path: Path) -> None:
    model: Any = save_model("deepseek_v3", tmp_path, num_hidden_layers=3)
    save_with_mtp(model, tmp_path)
    arguments: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    with Engine(tmp_path, speculative_algorithm="NEXTN", **arguments) as engine:
        actual = engine.generate(input_ids=[5, 6, 7], sampling_params=params)["output_ids"]
        assert engine.stats()["num_proposed_drafts"] > 0
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=40, do_sample=False)
    assert actual == expected[0, 3:].tolist()


def test_draft_heads_that_cannot_be_used_are_refused_by_the_constructor(folders: Folders, tmp_path: Path) -> None:
    config = demo_head_config(AutoModelForCausalLM.from_pretrained(str(folders.model)))
    changes: dict[str, tuple[dict[str, object], str]] = {
        "size": ({"hidden_size": 64}, "has hidden_size 64, and the model has .* for which it was trained"),
        "vocabulary": ({"vocab_size": 200, "draft_vocab_size": None}, "a vocabulary of 200 tokens, and the model has"),
        "layers": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads layers 1, 2, 9"),
        "outputs": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "reads layers 1, 2, 10"),
        "type": ({"model_type": "qwen3"}, "model_type 'qwen3' is not implemented"),
        "blocks": ({"num_hidden_layers": 2}, "allowed: 1"),
        "norm": ({"norm_before_fc": True}, "norm_before_fc"),
        "kind": ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' is not implemented"),
    }
    for name, (changed, message) in changes.items():
        own = {**config, **changed}
        save_head(tmp_path / name, own, random_tensors(own, "EAGLE3"))
        with pytest.raises(ValueError, match=message):
            Engine(**{**folders.arguments("EAGLE3"), "speculative_draft_model_path": tmp_path / name})
    arguments = folders.arguments("EAGLE3")
    with pytest.raises(ValueError, match=r"8 tensors missing: layers\.0\."):  # not an EAGLE head
        Engine(**{**arguments, "speculative_algorithm": "EAGLE"})
    with pytest.raises(ValueError, match="'MTP' does not work for .*no layers for multi-token prediction"):
        Engine(**{**arguments, "speculative_algorithm": "MTP", "speculative_draft_model_path": None})
    with pytest.raises(ValueError, match="has an effect only with speculative_algorithm='STANDALONE', 'EAGLE'"):
        Engine(**{**arguments, "speculative_algorithm": "NGRAM"})
    save_model("deepseek_v3", tmp_path / "without", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"tensors missing: model\.layers\.3\.eh_proj\.weight"):
        Engine(tmp_path / "without", speculative_algorithm="MTP", skip_tokenizer_init=True)


def test_draft_models_that_cannot_be_used_are_refused_by_the_constructor(folders: Folders, tmp_path: Path) -> None:
    small = tmp_path / "small"
    save_model("llama", small)
    cases = [
        (tmp_path / "none", "speculative_draft_model_path '.*none': there is no such folder"),
        (small, "has a vocabulary of 300 tokens, and the model has 3072"),
    ]
    for path, message in cases:
        with pytest.raises(ValueError, match=message):
            Engine(**{**folders.arguments("STANDALONE"), "speculative_draft_model_path": path})
    words = (folders.draft / "tokenizer.json").read_text(encoding="utf-8")
    other = tmp_path / "other"
    shutil.copytree(folders.draft, other)
    (other / "tokenizer.json").write_text(words.replace('"the"', '"teh"'), encoding="utf-8")
    with pytest.raises(ValueError, match="another vocabulary than the model: token .* is 'teh'"):
        Engine(**{**folders.arguments("STANDALONE"), "speculative_draft_model_path": other})
