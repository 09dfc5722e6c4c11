"""Adapters, grammars, logprobs and embeddings of models that run with the code of transformers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    NemotronConfig,
    Phi3Config,
)

from aioengine.constraints.grammars import Grammars
from aioengine.protocol.messages import Sampling
from aioengine.protocol.packed_logprobs import LogprobRules
from aioengine.runner.build import build
from aioengine.runner.warmup import why_it_waits
from tests.compute.runner.test_adapters import PROMPTS, adapter, continued, generate, opened, with_adapters
from tests.compute.runner.test_logprobs import Saved, check_position, lists_of
from tests.compute.runner.test_pooling import PoolWorld, settings_for
from tests.compute.runner_world import World, make_settings
from tests.kit.adapters import merged, save_adapter
from tests.kit.grammar_walks import FOLDER, grammar_of, text_of
from tests.kit.tiny_sizes import SIZES, VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from aioengine.settings.config import Settings

SMALL: Any = SIZES
CONFIGS: dict[str, PreTrainedConfig] = {
    "gated MLPs": LlamaConfig(**SMALL),
    "MLPs of two layers": NemotronConfig(**SMALL),
    "fused layers": Phi3Config(**SMALL),
}


def save(config: PreTrainedConfig, folder: Path) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def by_transformers(settings: Settings) -> Settings:
    return replace(settings, model=replace(settings.model, implementation="transformers"))


@pytest.mark.parametrize("kind", CONFIGS)
@torch.inference_mode()
def test_adapters_match_merged_weights(kind: str, tmp_path: Path) -> None:
    base = save(CONFIGS[kind], tmp_path / "model")
    folders = [
        save_adapter(base, tmp_path / name, seed=seed, target_modules="all-linear", r=rank)
        for seed, (name, rank) in enumerate((("one", 4), ("two", 9)))
    ]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    models = [plain, *(merged(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), path) for path in folders)]
    expected = [continued(model, num_tokens=3) for model in models]
    runner = build(with_adapters(by_transformers(make_settings(tmp_path / "model"))), lambda _: None)
    for slot, path in enumerate(folders, 1):
        runner.adapters.place(slot, runner.adapters.read(adapter(path, slot))).result(timeout=60)
    seen: list[torch.Tensor] = []
    compute_logits = runner._model.compute_logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute_logits(hidden))
        return seen[-1]

    runner._model.compute_logits = watched  # type: ignore[method-assign]
    slots = [uid % 3 for uid in range(len(PROMPTS))]
    rows = [opened(uid, slot, PROMPTS[uid]) for uid, slot in enumerate(slots)]
    assert generate(runner, rows, num_tokens=3) == [expected[slot][0][uid] for uid, slot in enumerate(slots)]
    logits = torch.stack([expected[slot][1][uid] for uid, slot in enumerate(slots)])
    torch.testing.assert_close(seen[0], logits, atol=1e-4, rtol=1e-4)
    assert generate(runner, rows, chunk=4, num_tokens=3) == [expected[slot][0][uid] for uid, slot in enumerate(slots)]


def test_adapter_of_nonlinear_layers_is_refused(tmp_path: Path) -> None:
    base = save(CONFIGS["MLPs of two layers"], tmp_path / "model")
    other = save(CONFIGS["gated MLPs"], tmp_path / "other")
    path = save_adapter(other, tmp_path / "adapter", target_modules=["gate_proj"])
    runner = build(with_adapters(by_transformers(make_settings(tmp_path / "model"))), lambda _: None)
    with pytest.raises(
        ValueError,
        match=r"gate_proj, but the base model has no such layer for adapters; it has layers down_proj, k_proj",
    ):
        runner.adapters.read(adapter(path))
    assert base.config.model_type == "nemotron"


def test_grammars_and_logprobs_work(tmp_path: Path) -> None:
    saved = Saved(tmp_path, save(CONFIGS["MLPs of two layers"], tmp_path))
    world = World(by_transformers(make_settings(tmp_path, chunk_tokens=7)))
    world.runner.use_grammars(Grammars(str(FOLDER), VOCAB_SIZE))
    pattern = "[a-d]{3,12}!"
    drawn = world.submit([5, 6, 7], Sampling(3, temperature=1.0, grammar=grammar_of(regex=pattern)), max_new_tokens=20)
    prompt, rules = [(7 * place) % 90 + 1 for place in range(23)], LogprobRules(start=0, num_top=3)
    uid = world.submit(prompt, max_new_tokens=4, logprobs=rules)
    world.run()
    assert re.fullmatch(pattern, text_of(world.outputs[drawn]))
    lists, expected = lists_of(world, uid, rules, len(prompt)), saved.expected([*prompt, *world.outputs[uid]])
    for place in range(1, len(prompt)):
        check_position(lists, "input", place, prompt[place], expected[place - 1])
    for place, token_id in enumerate(world.outputs[uid]):
        check_position(lists, "output", place, token_id, expected[len(prompt) + place - 1])


@torch.inference_mode()
def test_embeddings_and_scores_match_in_chunks(tmp_path: Path) -> None:
    theirs = save(CONFIGS["MLPs of two layers"], tmp_path / "embeds")
    settings = settings_for(tmp_path / "embeds", "embed", "last", chunk_tokens=5, splits=True)
    for prompt, vector in zip(PROMPTS, PoolWorld(by_transformers(settings)).vectors_of(PROMPTS), strict=True):
        last = theirs.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close(vector, last, atol=1e-5, rtol=1e-4)
    config = NemotronConfig(**{**SMALL, "num_labels": 3})
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    classifier.save_pretrained(tmp_path / "scores")
    settings = settings_for(tmp_path / "scores", "classify", "last", chunk_tokens=5, splits=True)
    for prompt, scores in zip(PROMPTS, PoolWorld(by_transformers(settings)).vectors_of(PROMPTS), strict=True):
        torch.testing.assert_close(scores, classifier(torch.tensor([prompt])).logits[0], atol=1e-5, rtol=1e-4)


def test_device_synchronization_is_detected_before_graph_capture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(CONFIGS["gated MLPs"], tmp_path)
    model = build(by_transformers(make_settings(tmp_path)), lambda _: None)._model
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert why_it_waits(model, torch.device("cpu")) == ""
    compute = model.forward

    def waits(*args: Any) -> torch.Tensor:
        """[T, D]."""
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation\nand more")
        return compute(*args)

    changed = SimpleNamespace(
        forward=waits,
        compute_logits=model.compute_logits,
        input_spec=model.input_spec,
        attention_shape=model.attention_shape,
    )
    assert why_it_waits(changed, torch.device("cpu")) == "called a synchronizing CUDA operation"  # type: ignore[arg-type]
    assert modes[-1] == "default"
