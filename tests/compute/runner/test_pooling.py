"""Pooled vectors equal transformers, also in a batch with requests that generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    ModernBertConfig,
    Qwen3Config,
    XLMRobertaConfig,
)

from aioengine.protocol.messages import FinishCode, Limits, RequestKind, Sampling, Submit, TextRules
from aioengine.scheduler.plan import StepPlan
from aioengine.settings.config import PoolingSettings
from tests.compute.models.test_encoders import ENCODER, SPECIAL
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.tiny_sizes import SIZES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from aioengine.settings.config import Settings

SMALL = {**ENCODER, "max_position_embeddings": 256}
PROMPTS = [[5, 9, 20, 31, 7, 8, 15], [3] * 40, [77], [25, 11, 12], list(range(3, 90)), [6] * 40]


class PoolWorld(World):
    """A world whose requests return vectors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vectors: dict[int, np.ndarray] = {}
        self.failed: dict[int, str] = {}

    def pool(self, prompt: list[int], *, second_text: int = 0) -> int:
        uid = self._next_uid
        self._next_uid += 1
        submit = Submit(
            uid, prompt, Sampling(0), Limits(0), TextRules(), kind=RequestKind.POOL, second_text=second_text
        )
        self.core.requests.submit(submit)
        return uid

    def step(self) -> None:
        output = self.core.step(0.0)
        if output is None:
            return
        self.vectors |= {extra.uid: np.frombuffer(extra.data, np.float32) for extra in output.tokens.extras}
        for uid, token_id in zip(output.tokens.uid_of_each(), output.tokens.token_ids, strict=True):
            self.outputs[uid].append(token_id)
        self.ended |= {ended.uid: ended for ended in output.ended}

    def vectors_of(self, prompts: list[list[int]]) -> list[Tensor]:
        uids = [self.pool(prompt) for prompt in prompts]
        self.run()
        assert {self.ended[uid].code for uid in uids} == {FinishCode.STOP}
        return [torch.tensor(self.vectors[uid]) for uid in uids]


def settings_for(folder: Path, task: str, kind: str, *, chunk_tokens: int = 64, splits: bool = False) -> Settings:
    settings = make_settings(folder, chunk_tokens=chunk_tokens)
    scheduler = replace(settings.scheduler, splits_prompts=splits, prefix_cache=splits)
    model = replace(settings.model, task=task, pooling=PoolingSettings(kind=kind))
    return replace(settings, scheduler=scheduler, model=model)


def saved(config: object, folder: Path, auto: type[AutoModel] = AutoModel) -> torch.nn.Module:
    torch.manual_seed(7)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


CASES = {
    "bert cls": (BertConfig(**SMALL), "cls"),
    "bert mean": (BertConfig(**SMALL), "mean"),
    "xlm-roberta mean": (XLMRobertaConfig(**SMALL, **SPECIAL, type_vocab_size=1), "mean"),
    "modernbert mean": (ModernBertConfig(**SMALL, **SPECIAL, local_attention=12), "mean"),
    "modernbert cls": (ModernBertConfig(**SMALL, **SPECIAL, local_attention=12), "cls"),
}


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_vectors_equal_transformers_alone_and_in_a_batch(case: str, tmp_path: Path) -> None:
    config, kind = CASES[case]
    theirs = saved(config, tmp_path)
    world = PoolWorld(settings_for(tmp_path, "embed", kind))
    assert (world.runner.facts["attention_backend"], world.runner.facts["kv_pool_bytes"]) == ("packed", 0)
    together = world.vectors_of(PROMPTS)
    for prompt, vector in zip(PROMPTS, together, strict=True):
        hidden = theirs(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(vector, hidden[0] if kind == "cls" else hidden.mean(0), atol=1e-5, rtol=1e-5)
        assert torch.equal(world.vectors_of([prompt])[0], vector)


def test_rows_are_never_split(tmp_path: Path) -> None:
    saved(BertConfig(**SMALL), tmp_path)
    world = PoolWorld(settings_for(tmp_path, "embed", "cls", chunk_tokens=48))
    counts: list[list[int]] = []
    launch = world.runner.launch

    def recorded(plan: StepPlan) -> object:
        counts.append([row.count for row in plan.rows])
        return launch(plan)

    world.runner.launch = recorded  # type: ignore[method-assign]
    world.vectors_of([*PROMPTS, [4] * 30, [4] * 18])
    assert counts == [[7, 40, 1], [3], [87], [40], [30, 18]]


@torch.inference_mode()
def test_scores_of_pairs_have_token_types(tmp_path: Path) -> None:
    theirs = saved(BertConfig(**SMALL, num_labels=1), tmp_path, AutoModelForSequenceClassification)
    world = PoolWorld(settings_for(tmp_path, "classify", "cls"))
    rows = [(list(range(3, 20)), 9), (list(range(30, 60)), 0), (list(range(3, 9)), 2)]
    uids = [world.pool(prompt, second_text=second) for prompt, second in rows]
    world.run()
    for (prompt, second), uid in zip(rows, uids, strict=True):
        types = [int(0 < second <= place) for place in range(len(prompt))]
        expected = theirs(torch.tensor([prompt]), token_type_ids=torch.tensor([types])).logits[0]
        torch.testing.assert_close(torch.tensor(world.vectors[uid]), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_decoder_pools_its_last_token_with_chunks_and_prefix_hits(tmp_path: Path) -> None:
    theirs = save_model("qwen3", tmp_path)
    settings = make_settings(tmp_path, chunk_tokens=16)
    alone = World(settings).answers([PROMPTS[0]])
    world = PoolWorld(settings)
    generating = world.submit(PROMPTS[0])
    for actual, prompt in zip(world.vectors_of([*PROMPTS, PROMPTS[4]]), [*PROMPTS, PROMPTS[4]], strict=True):
        expected = theirs.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    assert world.outputs[generating] == alone[0]


@torch.inference_mode()
def test_decoder_without_head_and_name_prefix_embeds_and_classifies(tmp_path: Path) -> None:
    sizes = {**SIZES, "head_dim": 16}
    theirs = saved(Qwen3Config(**sizes, tie_word_embeddings=False), tmp_path / "embedder")
    world = PoolWorld(settings_for(tmp_path / "embedder", "embed", "last", splits=True))
    for actual, prompt in zip(world.vectors_of(PROMPTS), PROMPTS, strict=True):
        expected = theirs(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    scoring = saved(Qwen3Config(**sizes, num_labels=3), tmp_path / "classifier", AutoModelForSequenceClassification)
    world = PoolWorld(settings_for(tmp_path / "classifier", "classify", "last", splits=True))
    for actual, prompt in zip(world.vectors_of(PROMPTS), PROMPTS, strict=True):
        expected = scoring(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


def test_nan_vector_fails_only_its_request(tmp_path: Path) -> None:
    saved(BertConfig(**SMALL), tmp_path)
    world = PoolWorld(settings_for(tmp_path, "embed", "mean"))
    world.runner._model._tokens.weight[90] = float("nan")  # pyright: ignore
    bad, good = world.pool([5, 90, 6]), world.pool([5, 6])
    world.run()
    assert (world.ended[bad].code, world.ended[good].code) == (FinishCode.FAILED, FinishCode.STOP)
    assert "non-finite" in world.ended[bad].message
    assert np.isfinite(world.vectors[good]).all()
    assert bad not in world.vectors
