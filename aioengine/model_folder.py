"""Model folders: find one (on disk, in the wheel, or on the Hugging Face hub) and read the facts about it.

``locate`` and ``find_facts`` may block for as long as a download takes: call it from a thread where an event loop runs.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from aioengine import checkpoint, checks, folder_files, hub, plugins
from aioengine.families._config import MAX_SIZES
from aioengine.families._tensors import is_ignored, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.config import ModelConfig
    from aioengine.families._config import DecoderConfig

    ReadConfig = Callable[[Mapping[str, object]], DecoderConfig]

PACKAGE: Final = Path(__file__).parent
DEMO_MODEL: Final = PACKAGE / "demo"

_DTYPES: Final = ("bfloat16", "float16", "float32")
_UNREADABLE_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.gguf")


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What the JSON files of a model folder say.

    dtype: of the checkpoint: "bfloat16", "float16" or "float32". context_length: positions that the model was made
    for, with its rope scaling. eos_token_ids: from generation_config.json, config.json and tokenizer_config.json.
    tokenizer_path: the folder with tokenizer.json, or None where there is none. missing_weights: what is wrong where
    the folder has no safetensors. sliding_window: the positions that a token attends to; None: all.
    """

    path: str
    architecture: str
    model_type: str
    context_length: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tokenizer_path: str | None = None
    missing_weights: str | None = None
    sliding_window: int | None = None


# ---------------------------------------------------------------- where it is


def locate(
    model_path: str | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: bool = False,
    argument: str = "model_path",
) -> str:
    """The local folder of a model: the folder itself, the demo model for None, or a download of a hub id.

    ``argument`` "tokenizer_path": of a tokenizer.

    Raises:
        ValueError: there is no such folder, and no such model on the hub; or the hub cannot be reached.
    """
    if model_path is None:
        return str(DEMO_MODEL)
    if not model_path:
        raise ValueError(f"{argument} is empty; give a folder or hub id, or leave it out")
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if folder.is_file():
        raise ValueError(f"{argument} {model_path!r} is a file; give the folder that holds it")
    if not hub.may_be_hub_id(model_path):
        raise ValueError(f"{argument} {model_path!r}: there is no such folder; {_nearest_parent(folder)}")
    return hub.download(model_path, revision=revision, download_dir=download_dir, progress=progress, argument=argument)


def needs_download(path: str | None) -> bool:
    """Whether ``locate`` would ask the hub."""
    return path is not None and not Path(path).expanduser().exists() and hub.may_be_hub_id(path)


def _nearest_parent(folder: Path) -> str:
    parent = next((parent for parent in folder.parents if parent.is_dir()), Path())
    if not os.access(parent, os.R_OK | os.X_OK):
        return f"{str(parent)!r} may not be read"
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())[:10]
    return f"{str(parent)!r} holds {'the folders ' + ', '.join(names) if names else 'no folders'}"


# ---------------------------------------------------------------- what it holds


class _Quantization(Struct):
    quant_method: str = "of an unknown kind"


class _Rope(Struct):
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None


class _ConfigFile(Struct):
    """The parts of config.json that are facts here; the runner decodes it again into what a family needs."""

    architectures: list[str] | None = None
    model_type: str | None = None
    max_position_embeddings: int = 0
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | list[int] | None = None
    quantization_config: _Quantization | None = None


class _GenerationFile(Struct):
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | list[int] | None = None


class _Token(Struct):
    content: str


class _TokenizerConfigFile(Struct):
    eos_token: str | _Token | None = None
    added_tokens_decoder: dict[int, _Token] = {}


class _AddedToken(Struct):
    id: int
    content: str


class _TokenizerFile(Struct):
    """The one part of tokenizer.json that is read here; the decoder skips the rest."""

    added_tokens: list[_AddedToken] = []


def find_facts(wishes: ModelConfig, *, progress: bool = False) -> ModelFacts:
    """Locate the model that is asked for, and its tokenizer where that is elsewhere, and read what they are.

    Raises:
        ValueError: one of them cannot be found, or the model cannot be served.
    """
    path = locate(wishes.path, revision=wishes.revision, download_dir=wishes.download_dir, progress=progress)
    words = wishes.tokenizer_path
    if words is not None:
        words = locate(words, download_dir=wishes.download_dir, progress=progress, argument="tokenizer_path")
    facts = read_facts(path, words)
    decoder = _read_family(Path(path), facts.model_type)
    if wishes.load_format != "dummy" and not facts.missing_weights:
        checkpoint.check_folder(
            Path(path),
            partial(tensor_shapes, decoder),
            num_layers=decoder.num_layers,
            is_ignored=partial(is_ignored, decoder),
        )
    if facts.tokenizer_path:
        folder_files.check_is_whole(Path(facts.tokenizer_path) / "tokenizer.json")
    return msgspec.structs.replace(facts, sliding_window=decoder.sliding_window)


def _read_family(folder: Path, model_type: str) -> DecoderConfig:
    """What config.json comes to. Raises ValueError, naming it, for a value that is missing or not implemented."""
    file = folder / "config.json"
    try:
        read: ReadConfig = plugins.load("families", model_type)
        return read(folder_files.read_json(file, dict[str, object]) or {})
    except ValueError as error:
        raise ValueError(f"{str(file)!r}: {error}") from error


def read_facts(path: str, tokenizer_path: str | None = None) -> ModelFacts:
    """Read config.json, generation_config.json and what the tokenizer's files say about the end of text.

    Raises:
        ValueError: the folder cannot be served; the message tells what could be.
    """
    folder = Path(path)
    config = folder_files.read_json(folder / "config.json", _ConfigFile)
    if config is None:
        raise ValueError(f"{path!r} is no model folder: {_what_instead(folder)}")
    _check_supported(config, path)
    words = Path(tokenizer_path) if tokenizer_path else folder
    generation = folder_files.read_json(folder / "generation_config.json", _GenerationFile) or _GenerationFile()
    eos = (*_ids(generation.eos_token_id), *_ids(config.eos_token_id), *_ids(_tokenizer_eos(words)))
    return ModelFacts(
        path=path,
        architecture=(config.architectures or [""])[0],
        model_type=config.model_type or "",
        context_length=_context_length(config, path),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        dtype=_dtype(config),
        missing_weights=_missing_weights(folder),
        eos_token_ids=tuple(token_id for token_id in dict.fromkeys(eos) if 0 <= token_id < config.vocab_size),
        bos_token_id=next(iter((*_ids(generation.bos_token_id), *_ids(config.bos_token_id))), None),
        tokenizer_path=str(words) if (words / "tokenizer.json").exists() else None,
    )


def supported_model_types() -> tuple[str, ...]:
    """The families that have a file in ``models/``; the name of the file is the ``model_type``."""
    return tuple(sorted(file.stem for file in (PACKAGE / "models").glob("[a-z]*.py")))


def _what_instead(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return "it holds GGUF files, which are not read; give the folder of the original model (*.safetensors)"
    if (folder / "params.json").is_file():
        return "it holds the original release; give the folder in Hugging Face form (config.json, *.safetensors)"
    inner = sorted(str(file.parent) for file in folder.glob("*/config.json"))
    return f"config.json is missing{f'; did you mean {inner[0]!r}?' if inner else ''}"


def _missing_weights(folder: Path) -> str | None:
    if any(folder.glob("*.safetensors")):
        return None
    others = sorted(file.name for pattern in _UNREADABLE_WEIGHTS for file in folder.glob(pattern))
    if not others:
        return f"{str(folder)!r} holds no weights (*.safetensors); load_format='dummy' makes some up"
    return (
        f"{str(folder)!r} holds its weights as {others[0]}, which is not read; convert them to safetensors with "
        "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )


def _check_supported(config: _ConfigFile, path: str) -> None:
    architecture = (config.architectures or ["no architecture"])[0]
    supported = supported_model_types()
    if config.model_type not in supported or not config.architectures:
        raise ValueError(
            f"{path!r} holds a model of type {config.model_type!r} ({architecture}), which is not supported; "
            f"what works are causal language models of the types {', '.join(supported)}"
        )
    if config.quantization_config is not None:
        method = config.quantization_config.quant_method
        raise ValueError(f"{path!r} holds quantized weights ({method}), which are not read; give the original model")
    for name, most in MAX_SIZES.items():
        value = getattr(config, name, None)
        if value is not None and value < 1:
            raise ValueError(f"config.json of {path!r} has no {name}, or one below 1")
        if value is not None and value > most:
            raise ValueError(f"config.json of {path!r} has {name} {checks.shown(value)}; at most {most} works")


def _context_length(config: _ConfigFile, path: str) -> int:
    length = _stretched_length(config)
    if not 1 <= length <= MAX_SIZES["max_position_embeddings"]:
        raise ValueError(
            f"config.json of {path!r}: rope_scaling makes {length:g} positions of {config.max_position_embeddings}"
        )
    return int(length)


def _stretched_length(config: _ConfigFile) -> float:
    """Positions with rope scaling: llama3 has stretched max_position_embeddings itself, the others name a factor."""
    length, rope = config.max_position_embeddings, config.rope_scaling or config.rope_parameters
    if rope is None or not rope.factor:
        return length
    kind = rope.rope_type or rope.type
    if kind in {"linear", "dynamic"}:
        return length * rope.factor
    if kind == "yarn":
        return max(length, (rope.original_max_position_embeddings or length) * rope.factor)
    return length


def _dtype(config: _ConfigFile) -> str:
    word = (config.dtype or config.torch_dtype or "float32").removeprefix("torch.")
    return word if word in _DTYPES else "float32"


def _ids(value: int | list[int] | None) -> list[int]:
    """Token ids as the files write them: one, several or none."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of the end-of-text token that tokenizer_config.json names by its text."""
    config = folder_files.read_json(folder / "tokenizer_config.json", _TokenizerConfigFile)
    if config is None or config.eos_token is None:
        return None
    text = config.eos_token if isinstance(config.eos_token, str) else config.eos_token.content
    known = {token.content: token_id for token_id, token in config.added_tokens_decoder.items()}
    if text not in known:
        tokenizer = folder_files.read_json(folder / "tokenizer.json", _TokenizerFile) or _TokenizerFile()
        known = {token.content: token.id for token in tokenizer.added_tokens}
    return known.get(text)
