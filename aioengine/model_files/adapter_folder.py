"""Reads the config and the tensor header of a LoRA adapter folder written by peft. Torch-free; no tensor is read.

An adapter adds ``scale * B (A x)`` to the output of a linear layer. Other features of peft are refused.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from aioengine.api.checks import shown
from aioengine.families._block_config import FLOAT_BYTES
from aioengine.model_files import checkpoint, folder_files
from aioengine.model_files.checkpoint import Entry
from aioengine.model_files.config_patterns import ConfigPatterns
from aioengine.model_files.folder_files import Json

Layers = Mapping[str, tuple[int, int]]
"""Name in the checkpoint -> (outputs, inputs) of a linear layer of the base model."""

CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
_STEM: Final = "base_model.model."
"""Prefix of all tensor names. The name of the layer in the base model follows."""
_TEXT_PARTS: Final = "language_model.", "text_model."
"""Names of the text part of a model with images, in names of layers."""
_ENDS: Final = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_CONVERT: Final = (
    'python -c "import torch, safetensors.torch as s; '
    f"s.save_file(torch.load('adapter_model.bin', weights_only=True), '{TENSORS}')\""
)
_HEADS: Final = "lm_head", "score", "classifier"
FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused layers of some checkpoints -> the layers that they consist of, in order."""
MAX_RANK: Final = 4096
_SUPPORTED_INITS: Final = True, False, None, "true", "false", "gaussian", "eva", "orthogonal"
"""Values of ``init_lora_weights`` that do not change the base model."""

_REFUSED: Final = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters",
    "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
    "monteclora_config",
)  # fmt: skip
"""Fields that must not be set."""
_MERGE: Final = "merge the adapter into the base model (peft: merge_and_unload), or train it again without"


class AdapterConfig(Struct, frozen=True):
    """The supported fields of adapter_config.json."""

    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


class AdapterPart(Struct, frozen=True):
    """The part of an adapter that changes one linear layer: it adds ``scale * B (A x)``.

    Attributes:
        layer: name of the layer in the checkpoint of the base model. In ``AdapterFolder.stored_parts``, its name in the
            adapter.
        a: A [rank, inputs].
        b: the tensor that contains B [outputs, rank] from ``first_row`` on.
    """

    layer: str
    rank: int
    scale: float
    a: Entry
    b: Entry
    first_row: int = 0

    @property
    def module(self) -> str:
        """The last word of the layer's name, such as "q_proj"."""
        return self.layer.rpartition(".")[2]


class AdapterFolder(Struct, frozen=True):
    """A folder with matching config and tensors.

    Attributes:
        fingerprint: the result of the function ``fingerprint`` when the folder was read.
        stored_parts: the parts with the names of layers that the adapter uses. ``parts`` returns the names of a base
            model.
    """

    path: Path
    fingerprint: str
    stored_parts: tuple[AdapterPart, ...]

    def parts(
        self, layers: Layers, *, max_rank: int | None = None, allowed: Collection[str] | None = None
    ) -> list[AdapterPart]:
        """Return the parts for the layers of a base model.

        Args:
            layers: the linear layers of the base model.
            max_rank: maximum rank of a layer; None: no limit.
            allowed: the modules that may be changed; None: all.

        Raises ValueError, which names the layer, if the adapter is for another base model, lacks tensors, or exceeds
        the limits.
        """
        parts: list[AdapterPart] = []
        for stored in self.stored_parts:
            matching = _parts_of(stored, layers)
            if not matching:
                raise self._error(_why_unknown(stored.layer, layers))
            parts += matching
        layer, count = Counter(part.layer for part in parts).most_common(1)[0]
        if count > 1:
            raise self._error(f"it changes {layer} {count} times, by tensors with different names")
        for part in parts:
            if max_rank is not None and part.rank > max_rank:
                raise self._error(f"{part.layer} has rank {part.rank}, and max_lora_rank is {max_rank}")
            if allowed is not None and part.module not in allowed:
                names = ", ".join(sorted(allowed))
                raise self._error(f"it changes {part.layer}; lora_target_modules has only {names}")
        self._check_shapes(parts, layers)
        return parts

    def _check_shapes(self, parts: list[AdapterPart], layers: Layers) -> None:
        rows_of: dict[str, int] = {}
        for part in parts:
            outputs, inputs = layers[part.layer]
            if part.a.shape != (part.rank, inputs):
                raise self._wrong_shape(part.a, (part.rank, inputs), part.layer)
            rows_of[part.b.name] = max(rows_of.get(part.b.name, 0), part.first_row + outputs)
        for part in parts:
            wanted = rows_of[part.b.name], part.rank
            if part.b.shape != wanted:
                raise self._wrong_shape(part.b, wanted, part.layer)

    def _wrong_shape(self, entry: Entry, wanted: tuple[int, int], layer: str) -> ValueError:
        shape = list(entry.shape)
        return self._error(f"{entry.name} has shape {shape}, but {layer} of the base model needs {list(wanted)}")

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"the adapter in {self.path} cannot be used: {reason}")


def read_folder(folder: Path, config_text: str = "") -> AdapterFolder:
    """Read the config of an adapter and the header of its tensors.

    config_text: the content of the config, if ``folder`` is not a folder, but the file with the tensors.

    Raises ValueError, which names the file and the field or tensor, if a file is missing, damaged or not supported.
    """
    if config_text:
        return _adapter(msgspec.json.decode(config_text, type=dict[str, Any]), folder, folder)
    raw = folder_files.read_json(folder / CONFIG, dict[str, Any])
    if raw is None and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is no folder; an adapter is a folder written by peft's save_pretrained")
    if raw is None:
        raise ValueError(f"{str(folder)!r} has no {CONFIG}: it is not the folder of a peft adapter")
    path = folder / TENSORS
    if not folder_files.is_file(path):
        _check_kind(raw, folder)
        convert = f"it has adapter_model.bin, which is not read; convert it: {_CONVERT}"
        reason = convert if (folder / "adapter_model.bin").exists() else "peft's save_pretrained writes it"
        raise ValueError(f"{str(folder)!r} has no {TENSORS}: {reason}")
    return _adapter(raw, folder, path)


def _adapter(raw: Json, folder: Path, path: Path) -> AdapterFolder:
    """Return the adapter with this config, and the tensors in the file ``path``."""
    _check_kind(raw, folder)
    try:
        config = msgspec.convert(raw, AdapterConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    return AdapterFolder(folder, fingerprint(folder), _stored_parts(checkpoint.entries_of_file(path), config, folder))


def fingerprint(folder: Path) -> str:
    """Return a digest of the states and the ctimes of the two files, or of one if ``folder`` is the file with tensors.

    It differs after a file is changed or replaced, because programs cannot set the ctime of a file. Raises ValueError
    if a file cannot be read.
    """
    states: list[str] = []
    paths = [folder] if folder.is_file() else [folder / CONFIG, folder / TENSORS]
    for path in paths:
        with folder_files.open_existing(path, f"{path.name} in {str(folder)!r} was removed") as file:
            states.append(f"{checkpoint.file_state(file)} {os.fstat(file.fileno()).st_ctime_ns}")
    return hashlib.sha256(" ".join(states).encode()).hexdigest()


def _check_kind(raw: Json, folder: Path) -> None:
    """Raise ValueError if the config needs more than ``scale * B (A x)``."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{folder / CONFIG}: peft_type is {shown(kind)}; allowed: 'LORA'")
    field = next((field for field in _REFUSED if raw.get(field)), None)
    if raw.get("bias", "none") != "none":
        field = "bias"
    if field is not None:
        raise ValueError(f"{folder / CONFIG}: {field}={shown(raw[field])} is not supported, only plain LoRA; {_MERGE}")
    init = raw.get("init_lora_weights")
    if not any(init is known or (isinstance(init, str) and init.lower() == known) for known in _SUPPORTED_INITS):
        raise ValueError(
            f"{folder / CONFIG}: init_lora_weights={shown(init)} is not applied: it also changes the base model; save "
            "the adapter with peft's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )


def _stored_parts(entries: list[Entry], config: AdapterConfig, folder: Path) -> tuple[AdapterPart, ...]:
    """Return ``AdapterFolder.stored_parts``. Raises ValueError if a layer lacks one of its two tensors."""
    pairs: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        end = next((end for end in _ENDS if entry.name.endswith(end)), None)
        if end is None or not entry.name.startswith(_STEM):
            raise ValueError(f"{entry.path} has the tensor {shown(entry.name)}, {_why_unused(entry.name)}")
        if len(entry.shape) != 2:
            raise ValueError(f"{entry.path}: {entry.name} has shape {list(entry.shape)}, but must be a matrix")
        if entry.dtype not in FLOAT_BYTES:
            allowed = ", ".join(FLOAT_BYTES)
            raise ValueError(f"{entry.path}: {entry.name} is of type {entry.dtype}; allowed: {allowed}")
        pairs.setdefault(entry.name[len(_STEM) :].removesuffix(end), {})[_ENDS[end]] = entry
    if not pairs:
        raise ValueError(f"{folder / TENSORS} has no tensors")
    patterns = ConfigPatterns(str(folder / CONFIG))
    ranks, alphas = (
        [(patterns.compiled(field, rf"\A(.*\.)?({end})$"), value) for end, value in (values or {}).items()]
        for field, values in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern))
    )
    parts: list[AdapterPart] = []
    for name, pair in sorted(pairs.items()):
        if len(pair) < 2:
            missing = "B" if "A" in pair else "A"
            raise ValueError(f"{folder / TENSORS} lacks {_STEM}{name}.lora_{missing}.weight")
        rank, alpha = (
            next((value for pattern, value in values if patterns.matches(pattern, name)), default)
            for values, default in ((ranks, config.r), (alphas, config.lora_alpha))
        )
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(f"{folder / CONFIG}: {name} has rank {rank}; allowed: 1 to {MAX_RANK}")
        if pair["A"].shape[0] != rank:
            shape = list(pair["A"].shape)
            raise ValueError(f"{folder / TENSORS}: {pair['A'].name} has shape {shape}, but the layer has rank {rank}")
        scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
        parts.append(AdapterPart(name, int(rank), scale, pair["A"], pair["B"]))
    return tuple(parts)


def _why_unused(name: str) -> str:
    """Return why a tensor of this name is refused."""
    if any(f".{head}." in name for head in _HEADS):
        return f"of the head: adapters cannot change it; {_MERGE}"
    return f"which is no LoRA of a linear layer; allowed: {_STEM}(layer){' and '.join(_ENDS)}; {_MERGE}"


def _parts_of(stored: AdapterPart, layers: Layers) -> list[AdapterPart]:
    """Return the parts for layers of the base model: several if the layer ``stored.layer`` is fused in the adapter.

    Return [] if the base model has no such layer.
    """
    name = _in_base(stored.layer, layers)
    if name in layers:
        return [replace(stored, layer=name)]
    block, _, last = name.rpartition(".")
    parts: list[AdapterPart] = []
    first_row = 0
    for fused in FUSED.get(last, ()):
        layer = f"{block}.{fused}"
        if layer not in layers:
            return []
        parts.append(replace(stored, layer=layer, first_row=first_row))
        first_row += layers[layer][0]
    return parts


def _in_base(name: str, layers: Layers) -> str:
    """Return the name of a layer in the checkpoint of the base model.

    Names of a model with images contain the name of the text part. Names of a model without a head lack "model.".
    """
    for part in _TEXT_PARTS:
        name = name.replace(part, "", 1)
    return name if name.startswith("model.") or name in layers else f"model.{name}"


def _why_unknown(name: str, layers: Layers) -> str:
    if name.rpartition(".")[2] in _HEADS:
        return f"it changes {name}: adapters cannot change it; {_MERGE}"
    known = sorted({layer.rpartition(".")[2] for layer in layers})
    return f"it changes {name}, but the base model has no such layer for adapters; it has layers {', '.join(known)}"
