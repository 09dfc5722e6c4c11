"""Find a model folder (on disk, in the wheel, or on the Hugging Face hub) and read the facts about the model.

``locate`` and ``find_facts`` may block for as long as a download takes: call them on a thread without an event loop.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, cast

import msgspec

from aioengine import plugins
from aioengine.api import checks
from aioengine.api.params import FROM_MODEL, PARAMETERS
from aioengine.families._block_config import AttentionConfig, LinearShape
from aioengine.families._config import DecoderConfig, Task, TransformerConfig, as_embedder
from aioengine.families._draft_heads import DraftHeadConfig, read_draft_head
from aioengine.families._encoders import EncoderConfig
from aioengine.families._fallback_config import linear_layers as fallback_layers
from aioengine.families._fallback_config import read_fallback_config
from aioengine.families._fields import MAX_SIZES, not_implemented
from aioengine.families._ranks import describe_sizes, part_of, rank_counts, why_whole
from aioengine.families._tensors import adaptable_layers, linear_layers
from aioengine.families._vision import VisionConfig
from aioengine.model_files import checkpoint, folder_files
from aioengine.model_files.embedder_files import is_embedder, read_pooling
from aioengine.model_files.hub import download, weight_shapes
from aioengine.model_files.online_quantization import METHODS
from aioengine.model_files.quantization import (
    CODES_UNIT,
    Axis,
    Quantization,
    Scheme,
    quantization_method,
    read_config,
    split_config,
)
from aioengine.settings.config import OWN, TRANSFORMERS, ModelConfig, PoolingSettings

ReadConfig = Callable[[Mapping[str, object]], TransformerConfig]

DEMO_MODEL: Final = Path(__file__).parents[1] / "demo"

_DTYPES: Final = ("bfloat16", "float16", "float32")
_WIDER: Final = ("float64", "double", "float", "auto")
_MAX_HUB_ID: Final = 200
_FALLBACK_IS_WHOLE: Final = "models in transformers' code are not divided"


class StoredWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The files that a model is loaded from.

    Attributes:
        missing: why the folder has no readable weights; None if it has some.
        files: digests of config.json and the weight files, see ``checkpoint.file_states``.
        tokenizer_files: digests of tokenizer.json and the files beside it.
        num_parameters: elements of the tensors in the files that transformers' code reads: of the whole model or of
            its vision tower. 0 without files. The tower is only counted for a plan.
    """

    missing: str | None = None
    files: dict[str, str] = {}
    tokenizer_files: dict[str, str] = {}
    num_parameters: int = 0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a model in its JSON files.

    Attributes:
        context_length: trained context length, with RoPE scaling.
        dtype: of the checkpoint: "bfloat16", "float16" or "float32".
        eos_token_ids: from generation_config.json and config.json.
        tokenizer_path: the folder with tokenizer.json; None if there is no such file.
        task: "generate", "embed" or "classify".
        is_causal, keeps_states, short_length, windows: see ``TransformerConfig``.
        is_encoder: an encoder such as BERT, not a decoder.
        is_latent: latent attention (DeepSeek).
        is_quantized: the weights are quantized in the files.
        has_soft_cap: attention with soft caps. False for transformers' code, where it is unknown.
        whole_image_tokens: see ``VisionConfig``.
        linear_layers: name in the checkpoint -> (outputs, inputs) of the layers that adapters may change.
        implementation: the code that computes the model: "aioengine" or "transformers".
        rank_counts: the values of tp_size that work. rank_sizes: the sizes that limit them, or why there is only 1.
        read_layers: of a draft head, see ``DraftHeadConfig``.
        sampling_defaults: values in generation_config.json of the parameters in ``params.FROM_MODEL``.
        warning: which values of generation_config.json have no effect, and why; "" if all have.
    """

    path: str
    architecture: str
    model_type: str
    context_length: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_path: str | None = None
    weights: StoredWeights = StoredWeights()
    task: str = "generate"
    is_causal: bool = True
    is_encoder: bool = False
    is_latent: bool = False
    is_quantized: bool = False
    has_soft_cap: bool = False
    keeps_states: bool = False
    whole_image_tokens: int = 0
    short_length: int = 0
    windows: tuple[int | None, ...] = ()
    pooling: PoolingSettings = PoolingSettings()
    linear_layers: dict[str, tuple[int, int]] = {}
    implementation: str = OWN
    rank_counts: tuple[int, ...] = (1,)
    rank_sizes: str = ""
    read_layers: tuple[int, ...] = ()
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
    """Return the local folder or GGUF file of a model. A hub id is downloaded.

    Args:
        model_path: a folder, a GGUF file, a folder with one GGUF file, or a hub id; None for the demo model.
        argument: the constructor's argument, for messages, such as "tokenizer_path".
        configs_only: do not download weights.

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
            return str(folder.absolute())  # not resolved: in the hub's cache, the target of the link has another name
        raise ValueError(f"{argument} {shown} is a file; give its folder, or a GGUF file")
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
    """Return the GGUF file of a folder without config.json and tokenizer.json; None if there is none.

    Raises ValueError if there are several.
    """
    if any(folder_files.is_file(folder / name) for name in (folder_files.CONFIG, folder_files.TOKENIZER)):
        return None
    paths = sorted(path for path in folder.absolute().glob(f"*{folder_files.GGUF}") if folder_files.is_gguf(path))
    if len(paths) > 1:
        names = ", ".join(checks.name(path.name) for path in paths[:10])
        raise ValueError(f"{str(folder)!r} has {len(paths)} GGUF files; give the path of one of them: {names}")
    return paths[0] if paths else None


def needs_download(path: str | None) -> bool:
    """Return whether ``locate`` would ask the hub."""
    return path is not None and may_be_hub_id(path) and not os.path.exists(path)


def may_be_hub_id(name: str) -> bool:
    """Return whether a name looks like "owner/name" or "name", not like a path."""
    parts = name.split("/")
    if name.startswith((".", "~", "/")) or len(parts) > 2 or len(name) > _MAX_HUB_ID:
        return False
    return all(part and part.translate({ord(mark): None for mark in "-_."}).isalnum() for part in parts)


def _expanded(path: str, argument: str) -> Path:
    """Expand "~". Raises ValueError if the system cannot look up the path."""
    try:
        expanded = Path(path).expanduser()
        os.fsencode(expanded)
        expanded.exists()
    except (OSError, RuntimeError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ValueError(f"{argument} {checks.shown(path)} cannot be looked up: {reason}") from error
    return expanded


def _nearest_parent(folder: Path) -> str:
    parent = next((parent for parent in folder.parents if parent.is_dir()), Path())
    if not os.access(parent, os.R_OK | os.X_OK):
        return f"{str(parent)!r} may not be read"
    folders = sorted(name for name in os.listdir(parent) if os.path.isdir(parent / name))
    names = [checks.name(name) for name in folders[:10]]
    return f"{str(parent)!r} has {'the folders ' + ', '.join(names) if names else 'no folders'}"


# ---------------------------------------------------------------- reading the facts


class _TextFacts(msgspec.Struct, frozen=True):
    """The fields of ``text_config`` that no family reads."""

    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None


class _ConfigFacts(_TextFacts, frozen=True):
    """The fields of config.json that no family reads."""

    architectures: list[str] | None = None
    model_type: str | None = None
    text_config: _TextFacts = _TextFacts()


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def find_facts(
    wanted: ModelConfig, *, progress: bool = False, configs_only: bool = False, argument: str = "model_path"
) -> ModelFacts:
    """Locate a model and its tokenizer, and read the facts about them.

    Args:
        argument: the constructor's argument with the path, for messages.
        configs_only: read no weights. For a model or vision tower in transformers' code, the headers of the weight
            files are read, or downloaded, because only they contain its size.

    Raises:
        ValueError: the model or tokenizer is not found, or the model is not supported.
    """
    path = locate(
        wanted.path,
        revision=wanted.revision,
        download_dir=wanted.download_dir,
        progress=progress,
        argument=argument,
        configs_only=configs_only,
    )
    tokenizer = folder = Path(path)
    if wanted.tokenizer_path is not None:
        tokenizer = Path(
            locate(
                wanted.tokenizer_path, download_dir=wanted.download_dir, progress=progress, argument="tokenizer_path"
            )
        )
    config, model, pooling, implementation, quantization = _read_config(folder, wanted)
    generation_file = folder / "generation_config.json"
    generation = folder_files.read_json(generation_file, _GenerationConfig) or _GenerationConfig()
    missing = None if configs_only else checkpoint.missing_weights(folder)
    is_loaded = not configs_only and not missing and (implementation != OWN or wanted.load_format != "dummy")
    files = checkpoint.file_states(checkpoint.model_files(folder, with_weights=is_loaded))
    num_parameters = 0
    if implementation == OWN:
        layers = adaptable_layers(model) if isinstance(model, DecoderConfig) else {}
        if is_loaded:
            checkpoint.check_folder(folder, model, quantization)
        if configs_only and isinstance(model, VisionConfig):
            shapes = _stored_shapes(folder, wanted, configs_only=True)
            num_parameters = sum(math.prod(shape) for name, shape in shapes.items() if model.is_in_tower(name))
    else:  # transformers checks the tensors when it loads them
        shapes = _stored_shapes(folder, wanted, configs_only=configs_only)
        num_parameters = sum(
            math.prod(shape) * (1 if quantization is None else quantization.per_element(name))
            for name, shape in shapes.items()
        )
        layers = fallback_layers(shapes, model.vocab_size)
        if is_loaded:
            checkpoint.check_num_layers(shapes, model.num_layers, folder)
    weights = StoredWeights(
        missing=missing,
        files=files,
        tokenizer_files=_tokenizer_files(tokenizer) if wanted.tokenizer and not configs_only else {},
        num_parameters=num_parameters,
    )
    defaults: dict[str, float] = {}
    left_out = ""
    if wanted.sampling_defaults == "model" and model.task is Task.GENERATE:
        defaults, left_out = _sampling_defaults(folder_files.read_object(generation_file))
    counts, sizes = _ranks(model, quantization) if implementation == OWN else ((1,), _FALLBACK_IS_WHOLE)
    attention = model.attention if isinstance(model, DecoderConfig) else AttentionConfig()
    ends = generation.eos_token_id, config.eos_token_id, config.text_config.eos_token_id
    eos = dict.fromkeys(token_id for ids in ends for token_id in (ids if isinstance(ids, list) else [ids]))
    return ModelFacts(
        path=path,
        architecture=(config.architectures or [""])[0],
        model_type=config.model_type or "",
        context_length=_context_length(model, folder),
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        dtype=_dtype(config),
        weights=weights,
        eos_token_ids=tuple(token_id for token_id in eos if token_id is not None and 0 <= token_id < model.vocab_size),
        tokenizer_path=str(tokenizer) if folder_files.is_file(tokenizer / folder_files.TOKENIZER) else None,
        task=model.task.value,
        is_causal=model.is_causal,
        is_encoder=isinstance(model, EncoderConfig),
        is_latent=attention.latent is not None,
        is_quantized=quantization is not None or folder_files.is_gguf(folder),
        has_soft_cap=attention.soft_cap is not None,
        keeps_states=model.keeps_states,
        short_length=model.short_length,
        windows=model.windows,
        whole_image_tokens=model.whole_image_tokens if isinstance(model, VisionConfig) else 0,
        pooling=pooling,
        linear_layers=layers,
        implementation=implementation,
        rank_counts=counts,
        rank_sizes=sizes,
        read_layers=model.read_layers if isinstance(model, DraftHeadConfig) else (),
        sampling_defaults=defaults,
        warning=left_out and f"values in generation_config.json of {str(folder)!r} have no effect: {left_out}",
    )


def _ranks(model: TransformerConfig, quantization: Quantization | None) -> tuple[tuple[int, ...], str]:
    """Return ``ModelFacts.rank_counts`` and ``rank_sizes``."""
    counts, sizes = rank_counts(model), why_whole(model) or describe_sizes(model)
    if quantization is None or len(counts) == 1:
        return tuple(counts), sizes
    layers = [(linear, quantization.scheme_of(linear.name)) for linear in linear_layers(model)]
    reasons = {count: _why_whole(layers, linear_layers(part_of(model, count))) for count in counts}
    first = next(filter(None, reasons.values()), "")
    return tuple(count for count in counts if not reasons[count]), f"{sizes}; {first}" if first else sizes


def _why_whole(layers: list[tuple[LinearShape, Scheme | None]], parts: list[LinearShape]) -> str:
    """Return why quantized layers cannot be divided into the parts of a rank; "" if they can."""
    for (linear, scheme), own in zip(layers, parts, strict=True):
        if scheme is None or linear == own:
            continue
        axis: Axis = "outputs" if linear.inputs == own.inputs else "inputs"
        size = own.outputs if axis == "outputs" else own.inputs
        try:
            for name in scheme.tensors(linear.inputs):
                scheme.part(name, axis, ((0, size),), (linear.outputs, linear.inputs))
        except ValueError as error:
            return f"{linear.name}: {error}"
        if scheme.bits == 4 and own.inputs % CODES_UNIT:
            return f"{linear.name}: {own.inputs} inputs on a rank; multiples of {CODES_UNIT} work with 4 bits"
    return ""


def _sampling_defaults(generation: Mapping[str, object]) -> tuple[dict[str, float], str]:
    """Return the valid values of sampling parameters in generation_config.json, and why others are left out."""
    defaults: dict[str, float] = {}
    reasons: list[str] = []
    for name in FROM_MODEL:
        if generation.get(name) is not None:
            try:
                defaults[name] = cast("float", PARAMETERS[name].check(name, generation[name]))
            except (TypeError, ValueError) as error:
                reasons.append(str(error))
    return defaults, "; ".join(reasons)


def _tokenizer_files(folder: Path) -> dict[str, str]:
    """Return the digests of the files that determine the token ids of a text."""
    if folder_files.is_gguf(folder):
        return checkpoint.file_states([folder])
    paths = [
        folder / name for name in (folder_files.TOKENIZER, folder_files.TOKENIZER_CONFIG, folder_files.SPECIAL_TOKENS)
    ]
    return checkpoint.file_states(path for path in paths if folder_files.is_file(path))


def _stored_shapes(folder: Path, wanted: ModelConfig, *, configs_only: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the weight files; {} if there are no files.

    Raises ValueError if the files are damaged or a GGUF file, or the hub cannot be reached.
    """
    if folder_files.is_gguf(folder):
        raise ValueError(f"{str(folder)!r} is a GGUF file, which model_impl='transformers' does not read")
    if checkpoint.missing_weights(folder) is None:
        return {entry.name: entry.shape for entry in checkpoint.read_headers(folder, "")}
    if configs_only and wanted.path is not None and needs_download(wanted.path):
        return weight_shapes(wanted.path, revision=wanted.revision)
    return {}


def family_config(wanted: ModelConfig) -> TransformerConfig:
    """Return the config of a model in a local folder. Raises ValueError if a value is missing or not implemented."""
    return _read_config(Path(wanted.path or DEMO_MODEL), wanted)[1]


def _read_config(
    folder: Path, wanted: ModelConfig
) -> tuple[_ConfigFacts, TransformerConfig, PoolingSettings, str, Quantization | None]:
    """Read config.json and the pooling. Also return the implementation and the quantization.

    Raises ValueError, which names the field, if a value is missing or not implemented.
    """
    file, is_embedding = folder / "config.json", wanted.is_embedding
    whole = read_config(folder)
    if whole is None:
        raise ValueError(f"{str(folder)!r} is no model folder: {_reason_without_config(folder)}")
    try:
        method = "gguf" if folder_files.is_gguf(folder) else quantization_method(whole)
        raw, quantization = split_config(whole)
        config = msgspec.convert({name: value for name, value in raw.items() if value is not None}, _ConfigFacts)
        implementation = _implementation(config, wanted.implementation)
        read: ReadConfig = read_fallback_config
        if wanted.draft_head:
            if method == "gguf":
                raise ValueError(f"speculative_algorithm={wanted.draft_head!r} does not read GGUF files")
            read = partial(read_draft_head, algorithm=wanted.draft_head)
        elif implementation == OWN:
            read = plugins.load("families", plugins.file_name(config.model_type or "")).read
        model = read(raw)
        if model.task is Task.GENERATE and (is_embedder(folder) if is_embedding is None else is_embedding):
            model = read(as_embedder(raw))
        if is_embedding is False and model.task is not Task.GENERATE:
            raise ValueError(f"is_embedding=False, but its architecture ({config.architectures}) does not generate")
        if model.task is Task.GENERATE and not model.is_causal:
            not_implemented("is_causal", False, "true, or is_embedding=True: its tokens attend to the whole text")
        if wanted.quantization not in (None, method):
            _check_online(wanted.quantization, method, model, implementation)
        if quantization is not None:
            _check_quantization(quantization, model)
        return config, model, read_pooling(folder, model, raw), implementation, quantization
    except ValueError as error:
        raise ValueError(f"{folder_files.shown_path(file)}: {error}") from error


def _check_online(wanted: str, stored: object, model: TransformerConfig, implementation: str) -> None:
    """Raise ValueError if the weights cannot be quantized while they are loaded.

    stored: the method of the model; None: its weights are not quantized.
    """
    if stored is not None:
        raise ValueError(f"quantization={wanted!r}, but the model has {stored!r}; leave it out")
    if wanted not in METHODS:
        raise ValueError(
            f"quantization={wanted!r} is a format of checkpoints, but the model has no quantization_config; leave it "
            f"out, or quantize while loading with {', '.join(map(repr, METHODS))}"
        )
    if implementation == TRANSFORMERS:
        raise ValueError(f"quantization={wanted!r} does not work with models in transformers' code; leave it out")
    if isinstance(model, DecoderConfig) and model.experts and model.experts.stored not in {"separate", "packed"}:
        raise ValueError(f"quantization={wanted!r} does not work with the transposed experts of gpt-oss; leave it out")


def _check_quantization(quantization: Quantization, model: TransformerConfig) -> None:
    """Raise ValueError if the model has parts for which quantized weights are not implemented."""
    if not isinstance(model, DecoderConfig) or model.experts is None:
        return
    layer = next((layer for layer in range(model.num_layers) if model.experts_of(layer)), 0)
    is_separate, name = model.experts.stored == "separate", model.experts.names[0]
    name = f"experts.0.{name}" if is_separate else name
    scheme = quantization.scheme_of(f"{model.names.block(layer)}{model.block.mlp}{name}")
    if scheme is not None and not is_separate:
        not_implemented("quantization_config.quant_method", quantization.method, "null for experts in joined tensors")
    if scheme is not None and scheme.has_order:
        not_implemented("quantization_config.desc_act", True, "false for experts (actorder null or weight)")


def _reason_without_config(folder: Path) -> str:
    if (folder / "params.json").is_file():
        return "it has the original release; give the folder in Hugging Face format (config.json, *.safetensors)"
    inner = sorted(str(file.parent) for file in folder.glob("*/config.json"))
    return f"config.json is missing{f'; did you mean {inner[0]!r}?' if inner else ''}"


def _implementation(config: _ConfigFacts, wanted: str) -> str:
    """Return the code that computes the model. ``wanted``: "auto", or one of the two.

    Raises ValueError if neither can compute it.
    """
    known = plugins.names("families")
    is_known = plugins.file_name(config.model_type or "") in known
    for name, example in (("model_type", '"llama"'), ("architectures", '["LlamaForCausalLM"]')):
        if not getattr(config, name):
            raise ValueError(f'{name} is missing; it names the kind of model, for example "{name}": {example}')
    if wanted == OWN and not is_known:
        raise ValueError(
            f"model_type {checks.shown(config.model_type)} is not implemented; with model_impl='auto', transformers' "
            f"own code may compute it; allowed: {', '.join(known)}"
        )
    return (OWN if is_known else TRANSFORMERS) if wanted == "auto" else wanted


def _context_length(model: TransformerConfig, folder: Path) -> int:
    """Return the context length with RoPE scaling. With llama3, max_position_embeddings includes the scaling."""
    trained, rope = model.max_position_embeddings, model.rope
    length: float = trained
    if rope.factor and rope.rope_type in {"linear", "dynamic"}:
        length = trained * rope.factor
    elif rope.factor and rope.rope_type == "yarn":
        length = max(trained, (rope.original_max_position_embeddings or trained) * rope.factor)
    if not 1 <= length <= MAX_SIZES["max_position_embeddings"]:
        raise ValueError(
            f"config.json of {str(folder)!r}: rope_scaling extends {trained} positions to {length:g}; the limit is "
            f"{MAX_SIZES['max_position_embeddings']}"
        )
    return int(length)


def _dtype(config: _ConfigFacts) -> str:
    """Return the dtype of the weights. The default is float32, which also replaces wider dtypes."""
    text = config.text_config
    named = config.dtype or config.torch_dtype or text.dtype or text.torch_dtype
    name = (named or "float32").removeprefix("torch.")
    if name not in _DTYPES and name not in _WIDER:
        not_implemented("dtype", named, ", ".join(_DTYPES))
    return name if name in _DTYPES else "float32"
