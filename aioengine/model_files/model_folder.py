"""Find a model folder (on disk, in the wheel, or on the Hugging Face hub) and read the facts about the model.

``locate`` and ``find_facts`` may block for as long as a download takes: call them on a thread without an event loop.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from aioengine import logs, plugins
from aioengine.api import checks
from aioengine.api.params import FROM_MODEL, PARAMETERS
from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import DecoderConfig, Task, as_embedder
from aioengine.families._encoders import EncoderConfig
from aioengine.families._fallback_config import linear_layers as fallback_layers
from aioengine.families._fallback_config import read_fallback_config
from aioengine.families._fields import MAX_SIZES, not_implemented
from aioengine.families._tensors import adaptable_layers
from aioengine.families._towers import num_tower_parameters
from aioengine.families._vision import VisionConfig
from aioengine.model_files import checkpoint, folder_files
from aioengine.model_files.embedder_files import is_embedder, read_pooling
from aioengine.model_files.hub import download, weight_shapes
from aioengine.settings.config import OWN, TRANSFORMERS, PoolingSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.families._config import TransformerConfig
    from aioengine.settings.config import ModelConfig

    ReadConfig = Callable[[Mapping[str, object]], TransformerConfig]

DEMO_MODEL: Final = Path(__file__).parents[1] / "demo"

_DTYPES: Final = ("bfloat16", "float16", "float32")
_WIDER: Final = ("float64", "double", "float", "auto")
_logger = logging.getLogger(__name__)
_READ_QUANTIZED: Final = {("gpt_oss", "mxfp4")}
"""Model types, and methods of quantization that are read."""
_MAX_HUB_ID: Final = 200


class StoredWeights(Struct, frozen=True, kw_only=True):
    """The files that a model is loaded from.

    Attributes:
        missing: why the folder has no weights to load; None: it has.
        files: path -> state of config.json and of the files of the weights, as ``checkpoint.file_states`` has it.
        tokenizer_files: the same of tokenizer.json and the files beside it.
        num_numbers: in the files of a model that transformers' code computes; 0: there are none.
    """

    missing: str | None = None
    files: dict[str, str] = {}
    tokenizer_files: dict[str, str] = {}
    num_numbers: int = 0


class Heads(Struct, frozen=True, kw_only=True):
    """Of the attention of a model; ``head_dim``: numbers of a key."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class ModelFacts(Struct, frozen=True, kw_only=True):
    """The facts about a model that its JSON files give.

    Attributes:
        context_length: positions that the model was made for, with its rope scaling.
        dtype: of the checkpoint: "bfloat16", "float16" or "float32".
        eos_token_ids: from generation_config.json and config.json.
        tokenizer_path: the folder with tokenizer.json; None: there is no such file.
        keeps_states: as in ``TransformerConfig``. whole_image_tokens: as in ``VisionConfig``.
        short_length: as in ``TransformerConfig``.
        task: "generate", "embed" or "classify". is_causal: a token attends to no later position.
        is_encoder: an encoder as BERT, not a decoder, whatever its task.
        is_latent: latent attention (DeepSeek). has_soft_cap: attention with soft caps. Unknown for transformers' code.
        linear_layers: those that an adapter may change: name in the checkpoint -> (outputs, inputs).
        implementation: whose code computes it: "aioengine" or "transformers".
        sampling_defaults: of generation_config.json, for the parameters in ``params.FROM_MODEL``.
        warning: which values of generation_config.json have no effect, and why; empty: none.
    """

    path: str
    architecture: str
    model_type: str
    context_length: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: Heads
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_path: str | None = None
    weights: StoredWeights = StoredWeights()
    task: str = "generate"
    is_causal: bool = True
    is_encoder: bool = False
    is_latent: bool = False
    has_soft_cap: bool = False
    keeps_states: bool = False
    whole_image_tokens: int = 0
    short_length: int = 0
    pooling: PoolingSettings = PoolingSettings()
    linear_layers: dict[str, tuple[int, int]] = {}
    implementation: str = OWN
    sampling_defaults: dict[str, float] = {}
    warning: str = ""


# ---------------------------------------------------------------- finding the folder


def locate(
    model_path: str | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: bool = False,
    argument: str = "model_path",
    configs_only: bool = False,
) -> str:
    """The local folder of a model: the folder itself, the demo model for None, or a download of a hub id; or a GGUF
    file, given by its path or by a folder that has no other one.

    ``argument``: the constructor's argument that is looked up, "model_path" or "tokenizer_path". ``configs_only``: of a
    hub id, no weights.

    Raises:
        ValueError: there is no such folder, and no such model on the hub; or the hub cannot be reached.
    """
    if model_path is None:
        return str(DEMO_MODEL)
    if not model_path:
        raise ValueError(f"{argument} is empty; give a folder or hub id, or leave it out")
    folder, shown = _expanded(model_path, argument), checks.shown(model_path)
    if folder.is_dir():
        return str(_gguf_in(folder) or folder.resolve())
    if folder.is_file():
        if folder_files.is_gguf(folder):
            return str(folder.absolute())  # not resolved: the hub's cache has other names
        raise ValueError(f"{argument} {shown} is a file; give the folder that holds it, or a GGUF file")
    if not may_be_hub_id(model_path):
        kind = "file" if folder.suffix == folder_files.GGUF else "folder"
        raise ValueError(f"{argument} {shown}: there is no such {kind}; {_nearest_parent(folder)}")
    if download_dir is not None:
        download_dir = str(_expanded(download_dir, "download_dir"))
    return download(
        model_path,
        revision=revision,
        download_dir=download_dir,
        progress=progress,
        argument=argument,
        configs_only=configs_only,
    )


def _gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder that has nothing else to read; None: it has, or it has none.

    Raises:
        ValueError: it has several, or may not be read.
    """
    if any(folder_files.is_file(folder / name) for name in (folder_files.CONFIG, folder_files.TOKENIZER)):
        return None
    found = sorted(path for path in folder.absolute().glob(f"*{folder_files.GGUF}") if folder_files.is_gguf(path))
    if len(found) > 1:
        names = ", ".join(checks.name(path.name) for path in found[:10])
        raise ValueError(f"{str(folder)!r} holds {len(found)} GGUF files; give the path of one of them: {names}")
    return found[0] if found else None


def needs_download(path: str | None) -> bool:
    """Whether ``locate`` would ask the hub."""
    return path is not None and may_be_hub_id(path) and not os.path.exists(path)


def may_be_hub_id(name: str) -> bool:
    """Whether this reads "owner/name" (or an old plain "name"), and not as a path."""
    parts = name.split("/")
    if name.startswith((".", "~", "/")) or len(parts) > 2 or len(name) > _MAX_HUB_ID:
        return False
    return all(part and part.translate({ord(mark): None for mark in "-_."}).isalnum() for part in parts)


def _expanded(path: str, argument: str) -> Path:
    """The path with the user's folder for "~"; the system can look it up."""
    try:
        found = Path(path).expanduser()
        os.fsencode(found)
        found.exists()  # pathlib itself takes a name with a null character for one that does not exist
    except (OSError, RuntimeError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ValueError(f"{argument} {checks.shown(path)} cannot be looked up: {reason}") from error
    return found


def _nearest_parent(folder: Path) -> str:
    parent = next((parent for parent in folder.parents if parent.is_dir()), Path())
    if not os.access(parent, os.R_OK | os.X_OK):
        return f"{str(parent)!r} may not be read"
    folders = sorted(name for name in os.listdir(parent) if os.path.isdir(parent / name))
    names = [checks.name(name) for name in folders[:10]]
    return f"{str(parent)!r} holds {'the folders ' + ', '.join(names) if names else 'no folders'}"


# ---------------------------------------------------------------- reading the facts


class _Quantization(Struct):
    quant_method: str = "of an unknown kind"


class _TextConfig(Struct):
    """The facts that a model which reads images has in the part of its text model."""

    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None


class _Config(Struct):
    """The facts in config.json that no family reads."""

    architectures: list[str] | None = None
    model_type: str | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: _Quantization | None = None
    text_config: _TextConfig | None = None


class _GenerationConfig(Struct):
    eos_token_id: int | list[int] | None = None
    temperature: object = None
    top_p: object = None
    top_k: object = None
    min_p: object = None
    repetition_penalty: object = None


def find_facts(wanted: ModelConfig, *, progress: bool = False, configs_only: bool = False) -> ModelFacts:
    """Locate the model that is asked for, and its tokenizer if that is elsewhere, and read what they are.

    ``configs_only``: no weights are fetched or looked at, but the headers of their files where transformers' code
    computes the model: its size is known from these alone.

    Raises:
        ValueError: one of them cannot be found, or the model cannot be served; the message says what could be.
    """
    path = locate(
        wanted.path,
        revision=wanted.revision,
        download_dir=wanted.download_dir,
        progress=progress,
        configs_only=configs_only,
    )
    tokenizer = folder = Path(path)
    if wanted.tokenizer_path is not None:
        tokenizer = Path(
            locate(
                wanted.tokenizer_path, download_dir=wanted.download_dir, progress=progress, argument="tokenizer_path"
            )
        )
    config, model, pooling, implementation = _read_config(folder, wanted)
    generation = folder_files.read_json(folder / "generation_config.json", _GenerationConfig) or _GenerationConfig()
    is_looked_at = not configs_only
    if implementation == OWN:
        weights = _stored_weights(folder, model, is_looked_at=is_looked_at, load_format=wanted.load_format)
        layers = adaptable_layers(model) if isinstance(model, DecoderConfig) else {}
    else:
        shapes = _fallback_shapes(folder, wanted, configs_only=configs_only)
        weights = _fallback_weights(folder, model, shapes, is_looked_at=is_looked_at)
        layers = fallback_layers(shapes, model.vocab_size)
    if wanted.tokenizer and is_looked_at:
        weights = replace(weights, tokenizer_files=_tokenizer_files(tokenizer))
    defaults: dict[str, float] = {}
    left_out = ""
    if wanted.sampling_defaults == "model" and model.task is Task.GENERATE:
        defaults, left_out = _sampling_defaults(generation)
    text = config.text_config or _TextConfig()
    attention = model.attention if isinstance(model, DecoderConfig) else AttentionConfig()
    eos = dict.fromkeys((*_ids(generation.eos_token_id), *_ids(config.eos_token_id), *_ids(text.eos_token_id)))
    return ModelFacts(
        path=path,
        architecture=(config.architectures or [""])[0],
        model_type=config.model_type or "",
        context_length=_context_length(model, folder),
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        heads=Heads(num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, head_dim=model.head_size),
        dtype=_dtype(config),
        weights=weights,
        eos_token_ids=tuple(token_id for token_id in eos if 0 <= token_id < model.vocab_size),
        tokenizer_path=str(tokenizer) if folder_files.is_file(tokenizer / folder_files.TOKENIZER) else None,
        task=model.task.value,
        is_causal=model.is_causal,
        is_encoder=isinstance(model, EncoderConfig),
        is_latent=attention.latent is not None,
        has_soft_cap=attention.soft_cap is not None,
        keeps_states=model.keeps_states,
        short_length=model.short_length,
        whole_image_tokens=model.whole_image_tokens if isinstance(model, VisionConfig) else 0,
        pooling=pooling,
        linear_layers=layers,
        implementation=implementation,
        sampling_defaults=defaults,
        warning=left_out and f"values in generation_config.json of {str(folder)!r} have no effect: {left_out}",
    )


def _sampling_defaults(generation: _GenerationConfig) -> tuple[dict[str, float], str]:
    """Return the model's values of sampling parameters, and why others are left out."""
    defaults: dict[str, float] = {}
    reasons: list[str] = []
    for name in FROM_MODEL:
        value = getattr(generation, name)
        if value is None:
            continue
        try:
            defaults[name] = cast("float", PARAMETERS[name].check(name, value))
        except (TypeError, ValueError) as error:
            reasons.append(str(error))
    return defaults, "; ".join(reasons)


def _tokenizer_files(folder: Path) -> dict[str, str]:
    """The states of the files that say which ids a text has, as ``checkpoint.file_states`` has them."""
    if folder_files.is_gguf(folder):
        return checkpoint.file_states([folder])
    paths = [
        folder / name for name in (folder_files.TOKENIZER, folder_files.TOKENIZER_CONFIG, folder_files.SPECIAL_TOKENS)
    ]
    return checkpoint.file_states(path for path in paths if folder_files.is_file(path))


def _stored_weights(folder: Path, model: TransformerConfig, *, is_looked_at: bool, load_format: str) -> StoredWeights:
    """The files of the weights, which are checked unless they are made up. Raises ValueError as ``check_folder``."""
    missing = checkpoint.missing_weights(folder) if is_looked_at else None
    is_loaded = is_looked_at and load_format != "dummy" and not missing
    files = checkpoint.file_states(checkpoint.model_files(folder, with_weights=is_loaded))
    if is_loaded:
        checkpoint.check_folder(folder, model)
        if isinstance(model, DecoderConfig) and model.experts is not None and model.experts.stored == "mxfp4":
            text = "the experts in %s have 4 bits (MXFP4); they are converted to the model's dtype when they are loaded"
            logs.log(_logger, logging.INFO, text, folder)
    return StoredWeights(missing=missing, files=files)


def _fallback_shapes(folder: Path, wanted: ModelConfig, *, configs_only: bool) -> dict[str, tuple[int, ...]]:
    """The tensors in the files of a model that transformers computes; none where there are no files.

    Raises ValueError for a GGUF file, for files that are missing or damaged, and where the hub cannot be asked.
    """
    if folder_files.is_gguf(folder):
        raise ValueError(f"{str(folder)!r} is a GGUF file, which model_impl='transformers' does not read")
    if checkpoint.missing_weights(folder) is None:
        return {entry.name: entry.shape for entry in checkpoint.read_headers(folder, "")}
    if configs_only and wanted.path is not None and needs_download(wanted.path):
        return weight_shapes(wanted.path, revision=wanted.revision)
    return {}


def _fallback_weights(
    folder: Path, model: TransformerConfig, shapes: Mapping[str, tuple[int, ...]], *, is_looked_at: bool
) -> StoredWeights:
    """The files of the weights of a model that transformers computes. Which tensors it needs is known to transformers
    alone, and checked when they are loaded.

    Raises ValueError for other numbers of layers than config.json names.
    """
    missing = checkpoint.missing_weights(folder) if is_looked_at else None
    is_loaded = is_looked_at and not missing
    if is_loaded:
        checkpoint.check_num_layers(shapes, model.num_layers, folder)
    files = checkpoint.file_states(checkpoint.model_files(folder, with_weights=is_loaded))
    return StoredWeights(missing=missing, files=files, num_numbers=sum(map(math.prod, shapes.values())))


def family_config(wanted: ModelConfig) -> TransformerConfig:
    """The sizes of a model whose path is a folder. Raises ValueError for a value that is missing or not implemented."""
    return _read_config(Path(wanted.path or DEMO_MODEL), wanted)[1]


def supported_model_types() -> list[str]:
    """The ``model_type`` of every family."""
    return plugins.names("families")


def _read_config(folder: Path, wanted: ModelConfig) -> tuple[_Config, TransformerConfig, PoolingSettings, str]:
    """The facts of config.json, how the model pools, and whose code computes it.

    Raises ValueError for a value that is missing or not implemented; it is named.
    """
    file, is_embedding = folder / "config.json", wanted.is_embedding
    raw = folder_files.read_json(file, dict[str, object])
    if raw is None:
        raise ValueError(f"{str(folder)!r} is no model folder: {_what_instead(folder)}")
    try:
        config = msgspec.convert(raw, _Config)
        implementation = _implementation(config, wanted.implementation)
        read: ReadConfig = read_fallback_config
        if implementation == OWN:
            read = plugins.load("families", plugins.file_name(config.model_type or "")).read
        found = read(raw)
        if found.task is Task.GENERATE and (is_embedder(folder) if is_embedding is None else is_embedding):
            found = read(as_embedder(raw))
        if is_embedding is False and found.task is not Task.GENERATE:
            raise ValueError(f"is_embedding=False, but its architecture ({config.architectures}) does not generate")
        if isinstance(found, VisionConfig):
            num_tower_parameters(raw, found.hidden_size)
        if found.task is Task.GENERATE and not found.is_causal:
            not_implemented("is_causal", False, "true, or is_embedding=True: its tokens attend to all of their text")
        return config, found, read_pooling(folder, found, raw), implementation
    except ValueError as error:
        raise ValueError(f"{folder_files.shown_path(file)}: {error}") from error


def _what_instead(folder: Path) -> str:
    if (folder / "params.json").is_file():
        return "it holds the original release; give the folder in Hugging Face form (config.json, *.safetensors)"
    inner = sorted(str(file.parent) for file in folder.glob("*/config.json"))
    return f"config.json is missing{f'; did you mean {inner[0]!r}?' if inner else ''}"


def _implementation(config: _Config, wanted: str) -> str:
    """Whose code computes the model. ``wanted``: "auto", or one of the two.

    Raises ValueError for a model that cannot be computed.
    """
    known = supported_model_types()
    is_known = plugins.file_name(config.model_type or "") in known
    for name, example in (("model_type", '"llama"'), ("architectures", '["LlamaForCausalLM"]')):
        if not getattr(config, name):
            raise ValueError(f'{name} is missing; it says what the model is, as in "{name}": {example}')
    if wanted == OWN and not is_known:
        raise ValueError(
            f"model_type {checks.shown(config.model_type)} has no code here; with model_impl='auto', transformers' own "
            f"code may compute it; what works are models of the types {', '.join(known)}"
        )
    implementation = (OWN if is_known else TRANSFORMERS) if wanted == "auto" else wanted
    if config.quantization_config is not None:
        method = config.quantization_config.quant_method
        if implementation == TRANSFORMERS or (config.model_type, method) not in _READ_QUANTIZED:
            raise ValueError(f"quantized weights ({method:.80}), which are not read; give the original model")
    return implementation


def _context_length(model: TransformerConfig, folder: Path) -> int:
    """Positions with rope scaling: llama3 has stretched max_position_embeddings itself, the others name a factor."""
    given, rope = model.max_position_embeddings, model.rope
    length: float = given
    if rope.factor and rope.rope_type in {"linear", "dynamic"}:
        length = given * rope.factor
    elif rope.factor and rope.rope_type == "yarn":
        length = max(given, (rope.original_max_position_embeddings or given) * rope.factor)
    if not 1 <= length <= MAX_SIZES["max_position_embeddings"]:
        raise ValueError(f"config.json of {str(folder)!r}: rope_scaling makes {length:g} positions of {given}")
    return int(length)


def _dtype(config: _Config) -> str:
    """The type of the weights, where config.json names one; float32 otherwise, and for larger ones."""
    text = config.text_config or _TextConfig()
    named = config.dtype or config.torch_dtype or text.dtype or text.torch_dtype
    name = (named or "float32").removeprefix("torch.")
    if name not in _DTYPES and name not in _WIDER:
        not_implemented("dtype", named, ", ".join(_DTYPES))
    return name if name in _DTYPES else "float32"


def _ids(value: int | list[int] | None) -> list[int]:
    """Token ids as the files write them: one, several or none."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
