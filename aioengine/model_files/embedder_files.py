"""Reads the files of sentence-transformers in a model folder: pooling, and prompts before texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct, convert, field

from aioengine.api import checks
from aioengine.families._config import Task, TransformerConfig
from aioengine.families._encoders import EncoderConfig
from aioengine.families._fields import not_implemented
from aioengine.model_files import folder_files
from aioengine.settings.config import PoolingSettings

MODULES: Final = "modules.json"

_KINDS: Final = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
"""Names of pooling, in ``pooling_mode`` or after ``pooling_mode_``, -> our kind. Others are not implemented."""


class _Module(Struct):
    """An entry of modules.json."""

    type: str
    path: str = ""

    @property
    def name(self) -> str:
        """ "Transformer", "Pooling", "Normalize" ..."""
        return self.type.rpartition(".")[2]


class _TextLimits(Struct):
    """sentence_bert_config.json."""

    max_tokens: int | None = field(default=None, name="max_seq_length")
    do_lower_case: bool = False


class _Prompts(Struct):
    """config_sentence_transformers.json."""

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None


class _Activation(Struct, frozen=True):
    activation_fn: str | None = None


class _CrossEncoder(Struct):
    """The fields of sentence-transformers in config.json."""

    sentence_transformers: _Activation = _Activation()
    older: str | None = field(default=None, name="sbert_ce_default_activation_function")


def is_embedder(folder: Path) -> bool:
    """Return whether the folder was written by sentence-transformers."""
    return folder_files.is_file(folder / MODULES)


def read_pooling(folder: Path, config: TransformerConfig, raw: Mapping[str, object]) -> PoolingSettings:
    """Read the pooling of the model in a folder. ``raw``: config.json.

    Raises ValueError if a file cannot be read, or has a value that is not implemented.
    """
    if config.task is Task.GENERATE:
        return PoolingSettings()
    if config.task is Task.CLASSIFY:
        return PoolingSettings(
            kind=config.classifier_pooling if isinstance(config, EncoderConfig) else "last",
            is_normalized=False,
            num_labels=config.num_labels,
            has_sigmoid=_has_sigmoid(raw, config.num_labels),
        )
    text = folder_files.read_json(folder / "sentence_bert_config.json", _TextLimits) or _TextLimits()
    prompts = folder_files.read_json(folder / "config_sentence_transformers.json", _Prompts) or _Prompts()
    default = prompts.default_prompt_name or ""
    if default and default not in prompts.prompts:
        raise ValueError(f"{str(folder)!r}: default_prompt_name {default!r} is not in {', '.join(prompts.prompts)}")
    if text.max_tokens is not None and text.max_tokens < 1:
        not_implemented("max_seq_length", text.max_tokens, "at least 1")
    kind, is_normalized = _modules(folder, config)
    return PoolingSettings(
        kind=kind,
        is_normalized=is_normalized,
        max_tokens=text.max_tokens,
        lowers_text=text.do_lower_case,
        prompts=prompts.prompts,
        default_prompt=default,
    )


def _modules(folder: Path, config: TransformerConfig) -> tuple[str, bool]:
    """Return the kind of pooling, and whether vectors are normalized.

    Without modules.json, a decoder uses the normalized last token, and an encoder the mean, as in
    sentence-transformers.
    """
    modules = folder_files.read_json(folder / MODULES, list[_Module])
    if modules is None:
        return ("last", True) if config.is_causal else ("mean", False)
    names = [module.name for module in modules]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        not_implemented("modules.json", ", ".join(names), "Transformer, Pooling, and Normalize or none")
    file = folder / modules[1].path / "config.json"
    return _kind(folder_files.read_json(file, dict[str, object]) or {}), len(modules) == 3


def _kind(pooling: Mapping[str, object]) -> str:
    """Return the kind in the config.json of the pooling, which has one name or a switch per kind."""
    if pooling.get("include_prompt") is False:
        not_implemented("include_prompt", False, "True")
    modes = {name: value for name, value in pooling.items() if name.startswith("pooling_mode") and value}
    names = (
        [str(modes["pooling_mode"])] if "pooling_mode" in modes else [name[len("pooling_mode_") :] for name in modes]
    )
    if len(names) != 1 or names[0] not in _KINDS:
        not_implemented("the pooling", checks.shown(modes), "one of cls_token, mean_tokens and lasttoken")
    return _KINDS[names[0]]


def _has_sigmoid(raw: Mapping[str, object], num_labels: int) -> bool:
    """Return whether a cross-encoder returns sigmoid(score). The default is True for models with one score.

    Raises ValueError for other activations.
    """
    fields = convert(raw, _CrossEncoder)
    path = fields.sentence_transformers.activation_fn or fields.older
    if path is None:
        return num_labels == 1
    name = path.rpartition(".")[2]
    if name not in {"Sigmoid", "Identity"}:
        not_implemented("activation_fn", path, "Sigmoid and Identity")
    return name == "Sigmoid"
