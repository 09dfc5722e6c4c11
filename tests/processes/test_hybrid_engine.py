"""The complete engine with a recurrent model: prefixes are reused, and results equal those without the cache."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from aioengine import Engine
from tests.compute.models.test_hybrids import make_newer
from tests.kit.adapters import save_adapter
from tests.kit.hybrid_models import save_hybrid
from tests.processes.cached_answers import PARAMS, SALTS, ask, check_killed_schedulers, cold

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aioengine import Answer

pytestmark = pytest.mark.process

ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_total_tokens": 4096,
    "skip_tokenizer_init": True,
    "context_length": 512,
    "lora_target_modules": ["q_proj", "v_proj"],
    "max_lora_rank": 4,
    "enable_lora": True,
}
PROMPT = random.Random(0).choices(range(1, 96), k=150)
SPAN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(make_newer(max_position_embeddings=512), tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return save_adapter(model, folder / "adapter", target_modules=["q_proj", "v_proj"])


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(model_path=str(folder), **ARGUMENTS) as engine:
        yield engine


def test_turns_samples_and_salts_find_snapshots(engine: Engine) -> None:
    assert engine.flush_cache()
    answer = cold(engine, PROMPT)
    assert ask(engine, PROMPT) == (answer, 0)
    assert ask(engine, PROMPT) == (answer, 2 * SPAN)
    longer = [*PROMPT, *answer, *PROMPT[:60]]
    expected = cold(engine, longer)
    assert ask(engine, longer) == (expected, 2 * SPAN)
    last = [*longer, *expected, 1]
    assert ask(engine, last) == (cold(engine, last), 4 * SPAN)
    drawn = {"temperature": 1.0, "seed": 3, "max_new_tokens": 20, "n": 4, "ignore_eos": True}
    actual = cast("list[Answer]", engine.generate(input_ids=PROMPT[::-1], sampling_params=drawn))
    assert sorted(out["meta_info"]["cached_tokens"] for out in actual) == [0, *[2 * SPAN] * 3]
    again = cast("list[Answer]", engine.generate(input_ids=PROMPT[::-1], sampling_params=drawn))
    assert [out["output_ids"] for out in actual] == [out["output_ids"] for out in again]


def test_sessions_continue_from_their_snapshots(engine: Engine) -> None:
    assert engine.flush_cache()
    sid = engine.open_session(512)
    history, turn = PROMPT[:100], {"id": sid}
    parts, cached = [history, PROMPT[:50], PROMPT[:50]], list[int]()
    for number, part in enumerate(parts):
        history = history + part if number else part
        out = engine.generate(input_ids=part, sampling_params=PARAMS, session_params=turn)
        assert out["output_ids"] == cold(engine, history)
        history = [*history, *out["output_ids"]]
        turn = {"id": sid, "rid": out["meta_info"]["id"]}
        cached.append(out["meta_info"]["cached_tokens"])
    engine.close_session(sid)
    assert cached == [0, 2 * SPAN, 3 * SPAN]


@pytest.mark.slow
def test_prefix_hits_change_no_adapters_vectors_or_logprobs(engine: Engine, adapter: Path) -> None:
    engine.load_lora_adapter("one", str(adapter))
    assert engine.flush_cache()
    base, adapted = cold(engine, PROMPT), cold(engine, PROMPT, lora_path="one")
    assert base != adapted
    for path, answer in ((None, base), ("one", adapted)):
        assert ask(engine, PROMPT, lora_path=path) == (answer, 0)
        assert ask(engine, PROMPT, lora_path=path) == (answer, 2 * SPAN)
    vectors = [engine.encode(input_ids=PROMPT, cache_salt=salt)["embedding"] for salt in (None, next(SALTS))]
    assert np.array_equal(vectors[0], vectors[1])
    options: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 140, "top_logprobs_num": 2}
    hit, other = (
        engine.generate(input_ids=PROMPT, sampling_params=PARAMS, cache_salt=salt, **options)["meta_info"]
        for salt in (None, next(SALTS))
    )
    assert hit["input_token_logprobs"] == other["input_token_logprobs"]
    assert hit["output_top_logprobs"] == other["output_top_logprobs"]
    assert (hit["cached_tokens"], other["cached_tokens"]) == (2 * SPAN, 0)


@pytest.mark.slow
def test_request_continues_after_its_scheduler_is_killed(engine: Engine) -> None:
    check_killed_schedulers(engine, PROMPT)
