"""The complete engine with a model whose windowed layers free pages."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from aioengine import Engine
from tests.compute.runner_world import save_model
from tests.processes.cached_answers import PARAMS, ask, check_killed_schedulers, cold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioengine import Answer

pytestmark = pytest.mark.process

PROMPT = random.Random(0).choices(range(1, 250), k=150)
PAGE = 4
POOL = 2 * 512


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with three page tables: one for a layer without a window, and two for layers with windows."""
    folder = tmp_path_factory.mktemp("windowed")
    sizes = {"sliding_window": 12, "num_hidden_layers": 3, "max_position_embeddings": 512}
    save_model("gemma3_text", folder, dtype=torch.float32, **sizes)
    arguments: dict[str, Any] = {"dtype": "float32", "device": "cpu", "context_length": 512, "page_size": PAGE}
    with Engine(
        str(folder), skip_tokenizer_init=True, max_total_tokens=POOL, chunked_prefill_size=64, **arguments
    ) as engine:
        yield engine


def test_turns_and_samples_find_pages(engine: Engine) -> None:
    assert engine.flush_cache()
    answer = cold(engine, PROMPT)
    assert ask(engine, PROMPT) == (answer, 0)
    assert ask(engine, PROMPT) == (answer, 148)
    longer = [*PROMPT, *answer, *PROMPT[:60]]
    assert ask(engine, longer) == (cold(engine, longer), 188)
    drawn = {"temperature": 1.0, "seed": 3, "max_new_tokens": 20, "n": 4, "ignore_eos": True}
    answers = cast("list[Answer]", engine.generate(input_ids=PROMPT[::-1], sampling_params=drawn))
    assert sorted(out["meta_info"]["cached_tokens"] for out in answers) == [0, 148, 148, 148]
    again = cast("list[Answer]", engine.generate(input_ids=PROMPT[::-1], sampling_params=drawn))
    assert [out["output_ids"] for out in answers] == [out["output_ids"] for out in again]


def test_sessions_keep_the_window_of_their_next_turn(engine: Engine) -> None:
    assert engine.flush_cache()
    sid = engine.open_session(512)
    history, turn, cached = list[int](), {"id": sid}, list[int]()
    for part in (PROMPT[:100], PROMPT[:50], PROMPT[:50]):
        history += part
        out = engine.generate(input_ids=part, sampling_params=PARAMS, session_params=turn)
        assert out["output_ids"] == cold(engine, history)
        history += out["output_ids"]
        turn = {"id": sid, "rid": out["meta_info"]["id"]}
        cached.append(out["meta_info"]["cached_tokens"])
        for _ in range(2):  # other requests use the pool
            cold(engine, random.Random(len(cached)).choices(range(1, 250), k=400))
    engine.close_session(sid)
    assert cached == [0, 136, 228]
    assert engine.flush_cache()


@pytest.mark.slow
def test_recovered_engine_has_a_pool_of_the_same_size(engine: Engine) -> None:
    check_killed_schedulers(engine, PROMPT)
    assert engine.get_server_info()["max_total_num_tokens"] == POOL
