"""All families match transformers, in fp32 with small random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from aioengine import models
from aioengine.attention.packed import PackedAttention
from aioengine.families._config import as_embedder
from aioengine.families._rope_config import RopeConfig
from aioengine.families.gpt2 import Phi3Family
from aioengine.layers.rope import RotaryEmbedding
from aioengine.model_files.model_folder import find_facts
from aioengine.models._decoder import DecoderModel
from aioengine.runner import weights
from aioengine.settings.config import ModelConfig
from tests.compute.stepping import Request, Stepper, make_batch, make_inputs, options
from tests.kit.decoders import CASES, ONE_OF_EACH, config_of, random_model

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from aioengine.models._base import Model

NUM_TOKENS = 60


def pair(config: PreTrainedConfig, *, max_positions: int = 64) -> tuple[PreTrainedModel, Model]:
    """Return a transformers model with large random weights, and ours with the same weights."""
    theirs = random_model(config)
    raw = {**config.to_dict(), "architectures": [type(theirs).__name__]}
    ours = models.build(raw, options(max_positions=max_positions))
    weights = ours.weights()
    for name, tensor in theirs.state_dict().items():
        if name in weights:
            weights.pop(name).tensor.copy_(tensor)
        else:
            assert ours.is_ignored(name), name
    assert not weights
    ours.finish_loading()
    return theirs, ours


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_match_transformers(case: str) -> None:
    theirs, ours = pair(config_of(case))
    token_ids = torch.randint(0, ours.vocab_size, (NUM_TOKENS,))
    expected = theirs(token_ids.unsqueeze(0)).logits[0]
    for page_size, chunks in ((16, [NUM_TOKENS]), (4, [7, 20, 1, 30])):
        logits = Stepper(ours, page_size=page_size).run(token_ids.tolist(), chunks)
        torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-5)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("model_type", ONE_OF_EACH)
def test_saved_transformers_folders_load_with_and_without_head(model_type: str, tmp_path: Path) -> None:
    theirs = random_model(config_of(ONE_OF_EACH[model_type]))
    token_ids = torch.randint(0, 96, (20,))
    for name, model in (("whole", theirs), ("headless", theirs.base_model)):
        folder = tmp_path / name
        model.save_pretrained(folder)
        raw = json.loads((folder / "config.json").read_text())
        facts = find_facts(ModelConfig(path=str(folder)))
        ours = models.build(as_embedder(raw) if facts.task == "embed" else raw, options(max_positions=64))
        weights.load(ours, folder, load_format="auto", seed=0, report=lambda *_: None)
        expected = model(token_ids.unsqueeze(0))
        expected = expected.logits if facts.task == "generate" else expected.last_hidden_state
        actual = Stepper(ours).run(token_ids.tolist(), [20])
        torch.testing.assert_close(actual, expected[0], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["llama", "qwen3", "falcon", "gptj"])
def test_noncausal_decoders_match_transformers(case: str) -> None:
    """Embedding models that are based on decoders have is_causal=false in config.json."""
    config = config_of(case, is_causal=False)
    theirs = random_model(config).base_model
    ours = models.build(as_embedder(config.to_dict()), options())
    for name, target in ours.weights().items():
        target.tensor.copy_(theirs.state_dict()[name.removeprefix(ours.prefix)])
    ours.finish_loading()
    texts = [torch.randint(0, ours.vocab_size, (length,)) for length in (30, 7)]
    expected = torch.cat([theirs(text.unsqueeze(0)).last_hidden_state[0] for text in texts])
    attention = PackedAttention(ours.attention_shape, torch.empty(0))
    rows = [(0, len(text)) for text in texts]
    attention.prepare(make_batch(rows, [[0, 1], [2]], 16))
    inputs = replace(make_inputs(ours, rows, torch.cat(texts)), outputs=None)
    torch.testing.assert_close(ours.forward(inputs, attention), expected, atol=3e-5, rtol=1e-5)


def test_dynamic_rope_beyond_trained_length_matches_generation() -> None:
    theirs, ours = pair(config_of("llama dynamic", max_position_embeddings=32), max_positions=512)
    prompt = torch.randint(0, ours.vocab_size, (1, 20))
    generated = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    logits = Stepper(ours).run(generated.sequences[0].tolist()[:-1], [20])
    torch.testing.assert_close(logits[19:], torch.cat(generated.logits), atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("max_positions", [64, 512])
def test_longrope_factors_depend_on_request_length(max_positions: int) -> None:
    """All tokens of requests beyond the original length of 64 use the long factors."""
    theirs, ours = pair(config_of("phi3 longrope"), max_positions=max_positions)
    token_ids = torch.randint(0, ours.vocab_size, (100,))
    chunks = {100: (5, 20, 75), 64: (60, 3, 1), 10: (4, 5, 1), 65: (1, 60, 4)}
    chosen = {length: parts for length, parts in chunks.items() if length <= max_positions}
    requests = [Request(token_ids[:length].tolist()) for length in chosen]
    together = Stepper(ours)
    for parts in zip(*chosen.values(), strict=True):
        together.step([(request, part) for request, part in zip(requests, parts, strict=True) if part])
    for request in requests:
        expected = theirs(torch.tensor([request.token_ids])).logits[0]
        torch.testing.assert_close(torch.stack(request.logits), expected, atol=3e-5, rtol=1e-5)
        assert torch.equal(Stepper(ours).run(request.token_ids, [len(request.token_ids)]), torch.stack(request.logits))


def test_longrope_without_table_has_same_bits() -> None:
    config = config_of("phi3 longrope")
    rope = Phi3Family.read(config.to_dict()).rope
    short, long = (
        RotaryEmbedding(
            rope,
            8,
            max_position_embeddings=512,
            num_positions=num_positions,
            device=torch.device("cpu"),
            short_length=64,
        )
        for num_positions in (512, 2**31 - 1)
    )
    positions = torch.arange(512 + 64)
    assert torch.equal(short.tables(positions).pairs, long.tables(positions).pairs)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope_are_read(name: str) -> None:
    config = config_of("phi3 longrope")
    raw = config.to_dict()
    scaling = {**raw.pop("rope_parameters"), "type": name}
    del scaling["rope_type"], scaling["original_max_position_embeddings"]
    older = Phi3Family.read({**raw, "rope_scaling": scaling, "rope_theta": scaling.pop("rope_theta")})
    assert older == Phi3Family.read(config.to_dict())


def test_rope_scaling_of_older_configs_is_read() -> None:
    newer = config_of("llama linear")
    _, ours = pair(newer)
    raw = newer.to_dict()
    parameters = raw.pop("rope_parameters")
    raw |= {"rope_theta": parameters["rope_theta"], "rope_scaling": {"type": "linear", "factor": 4.0}}
    older = models.build(raw, options())
    for name, target in older.weights().items():
        target.tensor.copy_(pair(newer)[0].state_dict()[name])
    older.finish_loading()
    token_ids = list(range(40))
    assert torch.equal(Stepper(older).run(token_ids, [40]), Stepper(ours).run(token_ids, [40]))


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic"])
def test_rope_without_table_has_same_bits(rope_type: str) -> None:
    config = RopeConfig(rope_type=rope_type, factor=4.0)  # pyright: ignore[reportArgumentType]
    short, long = (
        RotaryEmbedding(
            config, 16, max_position_embeddings=4000, num_positions=num_positions, device=torch.device("cpu")
        )
        for num_positions in (10_000, 2**31 - 1)
    )
    for num_tokens in (1, 2, 7, 1000):
        positions = torch.arange(num_tokens) * 9
        assert torch.equal(short.tables(positions).pairs, long.tables(positions).pairs)
    assert long.tables(torch.tensor([2**31 - 2])).pairs.isfinite().all()


@pytest.mark.parametrize(("case", "kinds"), [("qwen2", [0]), ("gemma2", [0, 1]), ("smollm3", [0, 3])])
def test_shortened_model_has_each_kind_of_block(case: str, kinds: list[int]) -> None:
    """The kinds have other windows, or no rotation."""
    model = models.build(config_of(case).to_dict(), options())
    assert isinstance(model, DecoderModel)
    shortened = model.shortened()
    assert isinstance(shortened, DecoderModel)
    assert shortened._blocks == [model._blocks[layer] for layer in kinds]
    assert len(model._blocks) > len(kinds)
