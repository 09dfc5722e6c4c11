"""The sampling values of generation_config.json are the defaults of requests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from aioengine import Engine, SamplingParams
from aioengine.model_files.model_folder import DEMO_MODEL

pytestmark = pytest.mark.process

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]


def demo_with(folder: Path, **generation: object) -> Path:
    shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.slow
def test_generate_and_chat_take_the_defaults_of_the_model(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"top_p must be .*, got 7") as caught:
        llm = Engine(demo_with(tmp_path, temperature=0, top_k=5, top_p=7), device="cpu")
    assert len(caught) == 1
    with llm:
        defaults = llm.get_model_info()["sampling_defaults"]
        assert defaults == {"temperature": 0, "top_p": 1.0, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0}
        greedy = {"temperature": 0, "max_new_tokens": 16}
        for params in ({"max_new_tokens": 16}, SamplingParams(max_new_tokens=16)):
            assert llm.generate(PROMPT, params)["text"] == llm.generate(PROMPT, greedy)["text"]
            assert llm.chat(MESSAGES, params)["text"] == llm.chat(MESSAGES, greedy)["text"]
        sampled = llm.generate([PROMPT] * 4, {"temperature": 2, "max_new_tokens": 16})
        assert len(set(sampled["text"])) > 1
