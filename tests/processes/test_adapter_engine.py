"""The complete engine with LoRA adapters of the demo model in fp32, compared with weights merged by peft."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from aioengine import AsyncEngine, Engine
from aioengine.errors import EngineStartupError, RequestError
from aioengine.model_files.model_folder import DEMO_MODEL
from tests.kit.adapters import TENSORS, change_tensors, merged, save_adapter
from tests.kit.waiting import until
from tests.processes.restart_kit import pid_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

pytestmark = pytest.mark.process

PROMPTS = ["The capital of France is", "Once upon a time there was a small dragon who", "1, 2, 3,"]
PARAMS: dict[str, object] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
ARGUMENTS: dict[str, object] = {"dtype": "float32", "device": "cpu", "max_total_tokens": 4096, "page_size": 4}
KINDS: dict[str, dict[str, object]] = {
    "some": {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 12, "use_rslora": True},
    "all": {"r": 4},
    "ranks": {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"o_proj": 3.0}},
}


class Case(NamedTuple):
    """Folders of adapters, and greedy ids of transformers for each prompt by adapter name; "": the base model."""

    folders: dict[str, Path]
    expected: dict[str, list[list[int]]]
    states: dict[str, np.ndarray]


def demo_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(str(DEMO_MODEL), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, engine_ids: list[list[int]]) -> Case:
    folder, base = tmp_path_factory.mktemp("adapters"), demo_model()
    folders = {
        name: save_adapter(base, folder / name, seed=seed, **kind) for seed, (name, kind) in enumerate(KINDS.items())
    }
    expected: dict[str, list[list[int]]] = {}
    states: dict[str, np.ndarray] = {}
    with torch.inference_mode():
        for name in ("", *KINDS):
            model = merged(demo_model(), folders[name]) if name else base
            expected[name] = [greedy(model, ids) for ids in engine_ids]
            last = model.model(torch.tensor([engine_ids[0]])).last_hidden_state[0, -1]
            states[name] = (last / last.norm()).numpy()
    return Case(folders, expected, states)


def greedy(model: PreTrainedModel, ids: list[int]) -> list[int]:
    extended = list(ids)
    for _ in range(12):
        extended.append(int(model(torch.tensor([extended])).logits[0, -1].argmax()))
    return extended[len(ids) :]


@pytest.fixture(scope="module")
def engine_ids() -> list[list[int]]:
    from aioengine.tokenization.tokenizer import Tokenizer

    tokenizer = Tokenizer(DEMO_MODEL)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def engine(case: Case, request: pytest.FixtureRequest) -> Iterator[Engine]:
    lora = {"max_loras_per_batch": 2, "max_lora_rank": 16, "lora_target_modules": "all"}
    with Engine(lora_paths=case.folders, tp_size=request.param, **lora, **ARGUMENTS) as engine:  # type: ignore[arg-type]
        yield engine


def ids_of(engine: Engine, prompts: list[str], lora_path: object) -> list[list[int]]:
    return [out["output_ids"] for out in engine.generate(prompts, PARAMS, lora_path=lora_path)]  # type: ignore[arg-type]


def test_rows_of_several_adapters_equal_merged_weights(engine: Engine, case: Case) -> None:
    names = [name for name in ("some", None, "all", "ranks") for _ in PROMPTS]
    for _ in range(2):
        actual = ids_of(engine, PROMPTS * 4, names)
        expected = [ids for name in ("some", "", "all", "ranks") for ids in case.expected[name]]
        assert actual == expected
    assert len({str(case.expected[name]) for name in case.expected}) == 4
    [state] = engine.get_server_info()["internal_states"]  # type: ignore[misc]
    figures = state["adapters"]
    assert (figures["num_placed"], figures["num_in_memory"], figures["num_waiting"]) == (2, 3, 0)
    assert figures["bytes_in_memory"] > 0


def test_single_rows_streams_and_samples_are_equal(engine: Engine, case: Case) -> None:
    for name in KINDS:
        assert ids_of(engine, PROMPTS[:1], name) == case.expected[name][:1]
    chunks = list(engine.generate(PROMPTS[1], PARAMS, stream=True, lora_path="all"))
    assert [token_id for chunk in chunks for token_id in chunk["output_ids"]] == case.expected["all"][1]
    sampled = {"temperature": 1.0, "seed": 5, "max_new_tokens": 12}
    three = engine.generate(PROMPTS[0], {**sampled, "n": 3}, lora_path="ranks")
    assert (
        three[1]["output_ids"] == engine.generate(PROMPTS[0], {**sampled, "seed": 6}, lora_path="ranks")["output_ids"]
    )  # type: ignore[call-overload]


def test_prefixes_are_reused_only_for_the_same_adapter(engine: Engine) -> None:
    assert engine.flush_cache()
    prompt = PROMPTS[1] * 3
    cached: list[tuple[str | None, bool]] = []
    for name in (None, "some", "all", None, "some", "all"):
        out = engine.generate(prompt, PARAMS, lora_path=name)
        cached.append((name, out["meta_info"]["cached_tokens"] > 0))
    assert [is_hit for _, is_hit in cached] == [False] * 3 + [True] * 3


def test_vectors_and_scores_use_the_adapter(engine: Engine, case: Case) -> None:
    for name in ("", "all"):
        vector = engine.encode(PROMPTS[0], lora_path=name or None)["embedding"]
        assert np.allclose(vector, case.states[name], atol=1e-4)
    scores = engine.score("The capital of", [" France", " France"], [1, 2], lora_path=[None, "all"])
    alone = engine.score("The capital of", [" France"], [1, 2], lora_path="all")
    assert np.allclose(scores[1], alone[0], atol=1e-6)
    assert scores[0] != scores[1]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_slot_and_few_pages_do_not_change_tokens(case: Case, num_ranks: int, tmp_path: Path) -> None:
    folder = save_adapter(demo_model(), tmp_path / "short-lived")
    few = {**ARGUMENTS, "max_total_tokens": 160, "chunked_prefill_size": 16, "max_running_requests": 4}
    paths = [str(path) for path in (*case.folders.values(), folder)]
    limits = {"max_loras_per_batch": 1, "max_loaded_loras": 1, "tp_size": num_ranks}
    with Engine(lora_paths=paths, **limits, **few) as engine:  # type: ignore[arg-type]
        result = ids_of(engine, PROMPTS * 3, [name for name in KINDS for _ in PROMPTS])
        assert result == [ids for name in KINDS for ids in case.expected[name]]
        assert ids_of(engine, PROMPTS[:1], str(case.folders["all"])) == case.expected["all"][:1]
        for file in folder.iterdir():
            file.unlink()
        with pytest.raises(
            RequestError, match=r"'adapter': adapter '.*short-lived': adapter_config.json in .* was removed"
        ):
            ids_of(engine, PROMPTS[:1], "short-lived")
        assert ids_of(engine, PROMPTS[:1], "some") == case.expected["some"][:1]


def invalid_folders(folder: Path) -> dict[str, Path]:
    """Return error of an adapter -> its folder."""
    folders: dict[str, Path] = {}
    base = demo_model()

    def made(words: str, **config: object) -> Path:
        folders[words] = save_adapter(base, folder / str(len(folders)), **config)
        return folders[words]

    change_tensors(made("finite"), {"q_proj.lora_A.weight": torch.full((4, 256), torch.nan)})
    change_tensors(made("shape"), {"q_proj.lora_B.weight": torch.zeros(7, 4)})
    change_tensors(made("lacks"), {"q_proj.lora_B.weight": None})
    change_tensors(made("tensor"), {"base_model.model.something.weight": torch.zeros(2)})
    made("rank 32", r=32)
    path = made("truncated: it has") / "adapter_model.safetensors"
    entry = {"dtype": "F32", "shape": [50_000, 50_000], "data_offsets": [0, 10_000_000_000]}
    header = json.dumps({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    path = made("a header of 10000000000") / "adapter_model.safetensors"
    path.write_bytes((10_000_000_000).to_bytes(8, "little") + b"{}")
    (made("no adapter_model.safetensors") / "adapter_model.safetensors").unlink()
    return folders


def test_invalid_folders_are_refused_and_do_not_affect_other_requests(
    engine: Engine, case: Case, tmp_path: Path
) -> None:
    for words, folder in invalid_folders(tmp_path).items():
        result = engine.load_lora_adapter("wrong", folder)
        assert not result, words
        assert words in result.error_message
    assert engine.list_lora_adapters().loaded_adapters.keys() == KINDS.keys()
    assert ids_of(engine, PROMPTS[:1], "all") == case.expected["all"][:1]


def parts_of(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return tensors and config of an adapter."""
    return load_file(folder / TENSORS), json.loads((folder / "adapter_config.json").read_text())


def test_tensors_become_an_adapter(engine: Engine, case: Case) -> None:
    for pinned in (False, True):
        tensors, config = parts_of(case.folders["ranks"])
        config["target_modules"] = set(config["target_modules"])  # like in peft
        loaded = engine.load_lora_adapter_from_tensors("sent", tensors, config, pinned=pinned)
        assert loaded, loaded.error_message
        assert loaded.loaded_adapters["sent"] == "tensors"
        for tensor in tensors.values():
            tensor.zero_()  # the engine has a copy
        assert ids_of(engine, PROMPTS * 2, ["sent"] * 3 + ["all"] * 3) == case.expected["ranks"] + case.expected["all"]
        assert ids_of(engine, PROMPTS, "some") == case.expected["some"]
        assert ids_of(engine, PROMPTS, "sent") == case.expected["ranks"]
        assert engine.unload_lora_adapter("sent")
    assert engine.list_lora_adapters().loaded_adapters.keys() == KINDS.keys()


def test_wrong_tensors_of_an_adapter_are_refused(engine: Engine, case: Case) -> None:
    tensors, config = parts_of(case.folders["all"])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    wrong = {
        f"tensors: {name} has numbers that are not finite": (tensors | {name: tensors[name] / 0}, config),
        f"the adapter cannot be used: {name} has shape [4, 3]": (tensors | {name: torch.ones(4, 3)}, config),
        "config_dict: peft_type is 'LOHA'": (tensors, config | {"peft_type": "LOHA"}),
        "tensors lacks base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (
            {other: tensor for other, tensor in tensors.items() if other != name},
            config,
        ),
        "an adapter 'all' is loaded already": (tensors, config),
    }
    for message, (given, given_config) in wrong.items():
        result = engine.load_lora_adapter_from_tensors("all" if "loaded" in message else "sent", given, given_config)
        assert not result
        assert message in result.error_message
    with pytest.raises(TypeError, match="config_dict must be a dict"):
        engine.load_lora_adapter_from_tensors("sent", tensors, "r=4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="load_format must be"):
        engine.load_lora_adapter_from_tensors("sent", tensors, config, "flattened_bucket")
    assert engine.list_lora_adapters().loaded_adapters.keys() == KINDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dp_size": 2, "load_balance_method": "round_robin"}])
async def test_adapter_by_tensor_survives_a_lost_scheduler(case: Case, options: dict[str, Any]) -> None:
    limits = {"max_lora_rank": 16, "lora_target_modules": "all", "enable_lora": True}
    async with AsyncEngine(**limits, **ARGUMENTS, **options) as engine:  # type: ignore[arg-type]
        for name, pinned in (("ranks", False), ("all", True)):
            assert await engine.load_lora_adapter_from_tensors(name, *parts_of(case.folders[name]), pinned=pinned)
        assert await ask(engine, PROMPTS[0], "ranks") == case.expected["ranks"][0]
        os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
        await until(lambda: engine.stats()["num_restarts"] == 1)
        for name in ("ranks", "all", "ranks", "all"):
            assert await ask(engine, PROMPTS[0], name) == case.expected[name][0]


def test_a_bad_adapter_fails_the_constructor_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adapter_config.json"):
        Engine(lora_paths=[str(tmp_path)], **ARGUMENTS)  # type: ignore[arg-type]
    folder = save_adapter(demo_model(), tmp_path / "nan")
    change_tensors(folder, {"q_proj.lora_A.weight": torch.full((4, 256), torch.inf)})
    with pytest.raises(EngineStartupError, match="lora_paths: .*finite"):
        Engine(lora_paths=[str(folder)], **ARGUMENTS)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_many_adapter_names_survive_a_lost_scheduler(case: Case) -> None:
    """12 names through 2 slots, with two copies in memory, and a SIGKILL in the middle."""
    names = [f"tenant-{number}" for number in range(12)]
    kinds = dict(zip(names, [*KINDS] * 4, strict=True))
    paths = {name: case.folders[kind] for name, kind in kinds.items()}
    pinned = {"lora_name": "pinned", "lora_path": case.folders["all"], "pinned": True}
    given = [{"lora_name": name, "lora_path": path} for name, path in paths.items()] + [pinned]
    async with AsyncEngine(lora_paths=given, max_loras_per_batch=2, max_loaded_loras=2, **ARGUMENTS) as engine:  # type: ignore[arg-type]
        questions = [ask(engine, PROMPTS[place % 3], name) for place, name in enumerate([*names, "pinned"])]
        calls = [asyncio.create_task(question) for question in questions[:6]]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        scheduler = pid_of(engine, "scheduler")
        os.kill(scheduler, signal.SIGSTOP)  # so that at least the other calls are unfinished when the scheduler dies
        calls += [asyncio.create_task(question) for question in questions[6:]]
        await until(lambda: engine.stats()["num_streams"] >= 7)
        os.kill(scheduler, signal.SIGKILL)
        result = await asyncio.gather(*calls)
        for place, name in enumerate(names):
            assert result[place] == case.expected[kinds[name]][place % 3]
        assert engine.stats()["num_restarts"] == 1
        assert len((await engine.list_lora_adapters()).loaded_adapters) == 13


async def ask(engine: AsyncEngine, prompt: str, name: str) -> list[int]:
    return (await engine.async_generate(prompt, PARAMS, lora_path=name))["output_ids"]  # type: ignore[arg-type]
