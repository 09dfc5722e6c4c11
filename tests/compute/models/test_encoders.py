"""Hidden states and scores of all encoder families match transformers, in fp32 with small random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    LlamaModel,
    ModernBertConfig,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from aioengine import models
from aioengine.attention.packed import PackedAttention
from aioengine.families._encoders import ModernBertFamily
from aioengine.models._base import ModelInputs
from tests.compute.stepping import make_batch, options
from tests.kit.tiny_sizes import SIZES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from aioengine.models._base import Model

LENGTHS = [7, 7, 33, 1, 120, 16]
ENCODER = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 130,
}
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
CASES: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, object]]] = {
    "bert": (BertConfig, {}),
    "bert tanh": (BertConfig, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "roberta": (RobertaConfig, {**SPECIAL, "type_vocab_size": 1}),
    "xlm-roberta": (XLMRobertaConfig, {**SPECIAL, "type_vocab_size": 1}),
    "modernbert": (ModernBertConfig, {**SPECIAL, "local_attention": 12, "num_hidden_layers": 5}),
    "modernbert biases": (
        ModernBertConfig,
        {
            **SPECIAL,
            "local_attention": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
        },
    ),
}


def attention_over(model: Model, lengths: list[int]) -> PackedAttention:
    attention = PackedAttention(model.attention_shape, torch.empty(0))
    attention.prepare(make_batch([(0, length) for length in lengths], [[0] * length for length in lengths], 1))
    return attention


def hidden_of(model: Model, rows: list[Tensor], token_types: Tensor | None = None) -> list[Tensor]:
    """Compute the hidden states [tokens, D] of each row of token ids in one step."""
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])
    inputs = ModelInputs(positions=positions, token_ids=torch.cat(rows), token_types=token_types)
    return list(model.forward(inputs, attention_over(model, lengths)).split(lengths))


def pair(config: PreTrainedConfig, theirs_class: type[AutoModel] = AutoModel) -> tuple[PreTrainedModel, Model]:
    """Return a transformers model with large random weights, and ours with the same weights."""
    torch.manual_seed(1)
    theirs = theirs_class.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    ours = models.build({**config.to_dict(), "architectures": [type(theirs).__name__]}, options())
    weights = ours.weights()
    prefix = "" if hasattr(theirs, theirs.base_model_prefix) else f"{theirs.base_model_prefix}."
    for name, tensor in theirs.state_dict().items():
        if prefix + name in weights:
            weights.pop(prefix + name).tensor.copy_(tensor)
        else:
            assert ours.is_ignored(prefix + name), name
    assert not weights
    ours.finish_loading()
    return theirs, ours


def random_rows() -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randint(3, ENCODER["vocab_size"], (length,)) for length in LENGTHS]


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_match_transformers_in_any_batch(case: str) -> None:
    config_type, differences = CASES[case]
    theirs, ours = pair(config_type(**{**ENCODER, **differences}))
    assert (ours.task, ours.attention_shape.is_causal) == ("embed", False)
    rows = random_rows()
    together = hidden_of(ours, rows)
    for row, actual in zip(rows, together, strict=True):
        expected = theirs(row.unsqueeze(0)).last_hidden_state[0]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(hidden_of(ours, [row])[0], actual)


@pytest.mark.parametrize("case", CASES)
def test_scores_match_transformers(case: str) -> None:
    config_type, differences = CASES[case]
    config = config_type(**{**ENCODER, **differences}, num_labels=3)
    theirs, ours = pair(config, AutoModelForSequenceClassification)
    assert ours.task == "classify"
    pooling = differences.get("classifier_pooling", "cls")
    for row, hidden in zip(rows := random_rows(), hidden_of(ours, rows), strict=True):
        pooled = hidden.mean(0) if pooling == "mean" else hidden[0]
        result = ours.compute_logits(pooled.unsqueeze(0))
        torch.testing.assert_close(result, theirs(row.unsqueeze(0)).logits, atol=1e-5, rtol=1e-5)


def test_second_text_of_a_pair_has_its_own_token_type() -> None:
    theirs, ours = pair(BertConfig(**ENCODER))
    row, types = torch.arange(3, 20), torch.tensor([0] * 8 + [1] * 9)
    expected = theirs(row.unsqueeze(0), token_type_ids=types.unsqueeze(0)).last_hidden_state[0]
    assert ours.input_spec.token_types
    torch.testing.assert_close(hidden_of(ours, [row], types)[0], expected, atol=1e-5, rtol=1e-5)


def test_modernbert_reads_older_names_of_rope_theta_and_layer_types() -> None:
    config = ModernBertConfig(**{**ENCODER, **SPECIAL, "local_attention": 8})
    raw = config.to_dict()
    for name in ("rope_parameters", "layer_types"):
        del raw[name]
    older = {**raw, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "global_attn_every_n_layers": 3}
    newer, old = (models.build({**raw, "architectures": ["Model"]}, options()) for raw in (config.to_dict(), older))
    assert newer.attention_shape == old.attention_shape
    assert newer.attention_shape.windows == (None, 4, 4)


def test_modernbert_applies_older_rope_scaling_to_all_layers() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = ModernBertConfig(**{**ENCODER, **SPECIAL, "rope_scaling": {**scaling}})
    older = {**config.to_dict(), "rope_parameters": None, "rope_scaling": scaling}
    assert ModernBertFamily.read(older) == ModernBertFamily.read(config.to_dict())
    assert [rope.factor for rope in ModernBertFamily.read(older).ropes] == [2.0, 2.0]


def test_last_mlp_computes_only_pooled_tokens() -> None:
    _, ours = pair(BertConfig(**ENCODER))
    rows = random_rows()
    firsts = torch.tensor([0, *LENGTHS]).cumsum(0)[:-1]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    inputs = ModelInputs(positions=positions, token_ids=torch.cat(rows), outputs=firsts)
    actual = ours.forward(inputs, attention_over(ours, LENGTHS))
    expected = torch.stack([hidden[0] for hidden in hidden_of(ours, rows)])
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_headless_decoder_returns_hidden_states_and_classifier_returns_scores() -> None:
    sizes = {**ENCODER, "num_key_value_heads": 2, "head_dim": 8}
    _, embedder = pair(Qwen3Config(**sizes))
    assert (embedder.task, embedder.attention_shape.is_causal) == ("embed", True)
    hidden = torch.randn(2, 48)
    assert embedder.compute_logits(hidden) is hidden
    theirs, classifier = pair(Qwen3Config(**sizes, num_labels=2, pad_token_id=0), AutoModelForSequenceClassification)
    torch.testing.assert_close(classifier.compute_logits(hidden), theirs.score(hidden), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[1, 7, 33], [300], [700, 1, 20]])
def test_bidirectional_decoders_match_transformers(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "__path__", [*models.__path__, "tests/compute/models/model_plugins"])
    torch.manual_seed(3)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 1024, "attn_implementation": "eager"})
    theirs = LlamaModel(config).eval()
    ours = models.build({**config.to_dict(), "model_type": "bidirectional_llama"}, options(max_positions=1024))
    for name, target in ours.weights().items():
        target.tensor.copy_(theirs.state_dict()[name])
    ours.finish_loading()
    rows = [torch.randint(1, 290, (length,)) for length in lengths]
    for row, actual in zip(rows, hidden_of(ours, rows), strict=True):
        sees_all = torch.zeros(1, 1, len(row), len(row))
        expected = theirs(row.unsqueeze(0), attention_mask=sees_all).last_hidden_state[0]
        torch.testing.assert_close(actual, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config_type", "changes", "message"),
    [
        (BertConfig, {"hidden_act": "relu"}, "relu"),
        (BertConfig, {"position_embedding_type": "relative_key"}, "relative_key"),
        (BertConfig, {"is_decoder": True}, "is_decoder"),
        (BertConfig, {"architectures": ["BertForTokenClassification"]}, "architectures .*BertForTokenClassification"),
        (BertConfig, {"num_attention_heads": 5}, "num_attention_heads 5 "),
        (RobertaConfig, {"max_position_embeddings": 2}, "max_position_embeddings 2 "),
        (ModernBertConfig, {"layer_types": ["full_attention"]}, "layer_types .*of length 1"),
        (ModernBertConfig, {"hidden_activation": "silu"}, "silu"),
        (ModernBertConfig, {"sliding_window": 6}, "sliding_window 6"),
    ],
)
def test_unsupported_encoder_values_are_refused_by_name(
    config_type: Callable[..., PreTrainedConfig], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        models.build({**config_type(**ENCODER).to_dict(), **changes}, options())
