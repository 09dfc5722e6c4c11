"""The files of sentence-transformers in a model folder: how texts are pooled, and which prompts stand before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, convert, field

from aioengine.api import checks
from aioengine.families._config import Task
from aioengine.families._encoders import EncoderConfig
from aioengine.families._fields import not_implemented
from aioengine.model_files import folder_files
from aioengine.settings.config import PoolingSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from aioengine.families._config import TransformerConfig

MODULES: Final = "modules.json"

_KINDS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_OTHER_KINDS: Final = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
_WORDS: Final = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


class _Module(Struct):
    """An entry of modules.json."""

    type: str
    path: str = ""

    @property
    def name(self) -> str:
        """ "Transformer", "Pooling", "Normalize" ..."""
        return self.type.rpartition(".")[2]


class _Text(Struct):
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
    """What sentence-transformers writes into config.json."""

    sentence_transformers: _Activation = _Activation()
    older: str | None = field(default=None, name="sbert_ce_default_activation_function")


def is_embedder(folder: Path) -> bool:
    """Whether the folder is one of sentence-transformers."""
    return folder_files.is_file(folder / MODULES)


def read_pooling(folder: Path, config: TransformerConfig, raw: Mapping[str, object]) -> PoolingSettings:
    """How the model in a folder pools. ``raw``: config.json.

    Raises:
        ValueError: a file cannot be read, or names something that is not implemented.
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
    text = folder_files.read_json(folder / "sentence_bert_config.json", _Text) or _Text()
    prompts = folder_files.read_json(folder / "config_sentence_transformers.json", _Prompts) or _Prompts()
    default = prompts.default_prompt_name or ""
    if default and default not in prompts.prompts:
        raise ValueError(f"{str(folder)!r}: default_prompt_name {default!r} is none of its prompts")
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
    """How the folder's modules pool, and whether they normalize.

    Without any: a decoder's last token, normalized; the mean of an encoder, as sentence-transformers does.
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
    """From the config.json of the pooling: one word, or a switch for each kind."""
    if pooling.get("include_prompt") is False:
        not_implemented("include_prompt", False, "True")
    word = pooling.get("pooling_mode")
    if word is not None:
        found = [_WORDS.get(str(word), "")]
    else:
        found = [kind for switch, kind in _KINDS.items() if pooling.get(switch)]
        found += ["" for switch in _OTHER_KINDS if pooling.get(switch)]
    if len(found) != 1 or not found[0]:
        modes = {name: value for name, value in pooling.items() if name.startswith("pooling_mode") and value}
        not_implemented("the pooling", checks.shown(modes), "one of cls_token, mean_tokens and lasttoken")
    return found[0]


def _has_sigmoid(raw: Mapping[str, object], num_labels: int) -> bool:
    """Whether a cross-encoder gives sigmoid(score): as config.json says, else where it has one score.

    Raises:
        ValueError: another activation.
    """
    found = convert(raw, _CrossEncoder)
    named = found.sentence_transformers.activation_fn or found.older
    if named is None:
        return num_labels == 1
    word = named.rpartition(".")[2]
    if word not in {"Sigmoid", "Identity"}:
        not_implemented("activation_fn", named, "Sigmoid and Identity")
    return word == "Sigmoid"
