"""Files of sentence-transformers: pooling, prompts, and refused values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from aioengine import plugins
from aioengine.model_files.embedder_files import is_embedder, read_pooling
from aioengine.settings.config import PoolingSettings

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 130,
}


def modules(*names: str) -> list[dict[str, object]]:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    return [
        {"idx": i, "name": str(i), "path": paths.get(name, name), "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]


def write(folder: Path, **files: object) -> Path:
    """Write JSON files. Names have __ for a slash and no ".json"."""
    for name, value in files.items():
        file = folder / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(value))
    return folder


def pooling_of(folder: Path, family: str = "bert", **raw: object) -> PoolingSettings:
    config = {**SIZES, "num_key_value_heads": 2, "architectures": ["Model"], **raw}
    return read_pooling(folder, plugins.load("families", family).read(config), config)


@pytest.mark.parametrize(
    ("switches", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
@pytest.mark.parametrize("is_normalized", [True, False])
def test_pooling_is_read_from_modules(
    switches: dict[str, object], kind: str, is_normalized: bool, tmp_path: Path
) -> None:
    assert not is_embedder(tmp_path)
    names = ("Transformer", "Pooling", "Normalize")[: 3 if is_normalized else 2]
    write(tmp_path, modules=modules(*names), **{"1_Pooling__config": switches})
    assert is_embedder(tmp_path)
    pooling = pooling_of(tmp_path)
    assert (pooling.kind, pooling.is_normalized) == (kind, is_normalized)


def test_prompts_and_text_limits_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        sentence_bert_config={"max_seq_length": 64, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"},
    )
    pooling = pooling_of(tmp_path)
    assert (pooling.max_tokens, pooling.lowers_text) == (64, True)
    assert (pooling.prompts, pooling.default_prompt) == ({"query": "q: ", "document": ""}, "query")


def test_default_pooling_is_mean_for_encoders_and_last_token_for_decoders(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == PoolingSettings(kind="mean", is_normalized=False)
    assert pooling_of(tmp_path, "qwen3") == PoolingSettings(kind="last", is_normalized=True)
    assert pooling_of(tmp_path, "qwen3", architectures=["Qwen3ForCausalLM"]) == PoolingSettings()


@pytest.mark.parametrize(
    ("raw", "has_sigmoid", "num_labels"),
    [
        ({"id2label": {"0": "a"}}, True, 1),
        ({}, False, 2),
        (
            {"id2label": {"0": "a"}, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            False,
            1,
        ),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True, 2),
    ],
)
def test_activation_of_a_cross_encoder_is_read(
    raw: dict[str, object], has_sigmoid: bool, num_labels: int, tmp_path: Path
) -> None:
    pooling = pooling_of(tmp_path, architectures=["BertForSequenceClassification"], **raw)
    assert (pooling.kind, pooling.is_normalized) == ("cls", False)
    assert (pooling.has_sigmoid, pooling.num_labels) == (has_sigmoid, num_labels)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": modules("Transformer", "Pooling", "Dense")}, "modules.json .*Dense.* allowed: Transformer"),
        ({"modules": modules("Transformer", "Pooling")}, "the pooling .* allowed: one of"),
        (
            {"modules": modules("Transformer", "Pooling"), "1_Pooling__config": {"pooling_mode_max_tokens": True}},
            "pooling_mode_max_tokens",
        ),
        (
            {
                "modules": modules("Transformer", "Pooling"),
                "1_Pooling__config": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            },
            "the pooling",
        ),
        (
            {"modules": modules("Transformer", "Pooling"), "1_Pooling__config": {"include_prompt": False}},
            "include_prompt",
        ),
        ({"config_sentence_transformers": {"default_prompt_name": "x"}}, "default_prompt_name 'x'"),
        ({"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length 0"),
        ({"modules": {}}, "modules.json"),
    ],
)
def test_unsupported_values_are_named(files: dict[str, object], message: str, tmp_path: Path) -> None:
    write(tmp_path, **files)
    with pytest.raises(ValueError, match=message):
        pooling_of(tmp_path)


def test_unsupported_activation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"activation_fn 'torch.Tanh' is not implemented"):
        pooling_of(
            tmp_path,
            architectures=["BertForSequenceClassification"],
            sentence_transformers={"activation_fn": "torch.Tanh"},
        )
