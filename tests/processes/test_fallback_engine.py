"""An engine whose model runs with the code of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, NemotronConfig

import aioengine
from aioengine import Engine, EngineStartupError
from tests.kit.adapters import merged, save_adapter
from tests.kit.tiny_sizes import SIZES

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_model_type_without_a_family_runs_with_adapters(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(NemotronConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    path = save_adapter(model, tmp_path / "adapter", target_modules=["q_proj", "up_proj"])
    prompt = list(range(3, 20))
    adapted = merged(AutoModelForCausalLM.from_pretrained(tmp_path), path)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        result, changed = (
            model.generate(ids, max_new_tokens=10, do_sample=False)[0, len(prompt) :].tolist()  # type: ignore[operator]
            for model in (AutoModelForCausalLM.from_pretrained(tmp_path), adapted)
        )
    assert result != changed
    greedy = {"max_new_tokens": 10, "temperature": 0}
    options: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "max_restarts": 0}
    with Engine(tmp_path, lora_paths={"one": str(path)}, **options) as engine:
        assert engine.get_model_info()["implementation"] == "transformers"
        out = engine.generate(input_ids=prompt, sampling_params=greedy, return_logprob=True)
        assert out["output_ids"] == result
        chunks = list(engine.generate(input_ids=prompt, sampling_params=greedy, stream=True))
        assert [token for chunk in chunks for token in chunk["output_ids"]] == result
        assert chunks[-1]["meta_info"]["cached_tokens"] == 16
        outs = engine.generate(input_ids=[prompt, prompt], sampling_params=greedy, lora_path=[None, "one"])
        assert [out["output_ids"] for out in outs] == [result, changed]
    plan = aioengine.plan(tmp_path, skip_tokenizer_init=True, device_memory="80GiB")
    assert (plan.implementation, plan.reason) == (
        "transformers",
        "there is no file for model_type 'nemotron'; it may refuse when it starts",
    )
    assert plan.dtype == "bfloat16"
    assert plan.weights_bytes == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert plan.kv_bytes_per_token == 2 * 2 * SIZES["num_hidden_layers"] * SIZES["hidden_size"] // 2  # type: ignore[operator]


@pytest.mark.slow
def test_unsupported_models_are_errors_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 90, "hidden_size": 32, '
        '"num_hidden_layers": 2}'
    )
    with pytest.raises(EngineStartupError, match="'mamba' cannot run.*keep states in addition to keys and values"):
        Engine(tmp_path, skip_tokenizer_init=True, device="cpu", load_format="dummy", max_restarts=0)
