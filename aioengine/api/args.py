"""The constructor's public arguments: their names, aliases, ranges, and their places in ``EngineConfig``.

The names follow SGLang's engine. ``foreign_names`` has other names of them, arguments of missing features
(accepted if the value switches the feature off), and arguments without an effect (accepted with one warning).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final, cast, get_type_hints

from msgspec import Struct, to_builtins
from msgspec.structs import fields, replace

from aioengine.api import checks
from aioengine.api.checks import number_from, whole_from
from aioengine.api.foreign_names import ALIASES, IGNORED, MISSING_ARGUMENTS, by_own_names, our_way
from aioengine.api.parameter_table import ARGUMENTS_OF_CALLS
from aioengine.api.params import is_sampling_parameter
from aioengine.families._ranks import MAX_RANKS
from aioengine.logs import warn_caller
from aioengine.model_files.adapter_folder import MAX_RANK
from aioengine.model_files.online_quantization import GROUP_SIZES, METHODS
from aioengine.model_files.quantized_formats import FORMATS
from aioengine.settings import resolve
from aioengine.settings.config import (
    DEFAULT_GROUP_SIZE,
    DRAFT_HEADS,
    MAX_REPLICAS,
    MTP,
    NGRAM,
    ROUTINGS,
    STANDALONE,
    EngineConfig,
    GivenAdapter,
)
from aioengine.tokenization.chat_template import MAX_TEMPLATE_BYTES


class Argument(Struct, frozen=True):
    """One public argument.

    unset: text for the default, if EngineConfig has None, "auto" or an empty value. place: "section.field" or "field"
    of EngineConfig, which has its default and its type. It may be left out if the field has the name of the argument.
    """

    check: checks.Check
    help: str
    unset: str = ""
    place: str = ""

    @property
    def read(self) -> type:
        """The type of the value of its flag: bool (a switch), int, float or str."""
        section, _, field = self.place.rpartition(".")
        hint = get_type_hints(type(_SECTIONS[section]) if section else EngineConfig)[field]
        return next((kind for kind in (bool, int, float) if hint in (kind, kind | None)), str)

    @property
    def default(self) -> object:
        """The value if the argument is left out; None: it is determined at the start."""
        value = self.value_in(EngineConfig())
        return value or None if self.unset else value

    def value_in(self, config: EngineConfig) -> object:
        """Return the value of the argument in a config, as plain data."""
        section, _, field = self.place.rpartition(".")
        value: object = getattr(getattr(config, section) if section else config, field)
        return not value if self.check is _negated else to_builtins(value)

    @property
    def default_text(self) -> str:
        """The default as text for the documentation."""
        if self.unset:
            return self.unset
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def description(self) -> str:
        """One line for ``--help``."""
        return f"{self.help} (default: {self.default_text})"


def _text(name: str, value: object, *, max_bytes: int = 4096, if_empty: str = "") -> str:
    """Check a string or a path. See ``checks.text``."""
    return checks.text(
        name, str(value) if isinstance(value, PurePath) else value, max_bytes=max_bytes, if_empty=if_empty
    )


def _path(name: str, value: object) -> str:
    """Check a hub id or a path. Paths may contain bytes that are not UTF-8."""
    path = str(value) if isinstance(value, PurePath) else value
    try:
        readable = path.encode(errors="surrogateescape").decode(errors="replace") if isinstance(path, str) else path
    except UnicodeEncodeError:
        readable = path
    if "\0" in checks.text(name, readable, max_bytes=4096):
        raise checks.wrong_value(name, "a hub id or a path, which has no null character", readable)
    return str(path)


def _folder(name: str, value: object) -> str:
    """Check that a folder exists, and return its absolute path."""
    path = _path(name, value)
    if not os.path.isdir(path):
        raise checks.wrong_value(name, "a folder that exists", value)
    return os.path.abspath(path)


def _template(name: str, value: object) -> str:
    """Check the text or the path of a template. The file is read at the start."""
    advice = "give the text of a template, or the path of a file with one"
    return _text(name, value, max_bytes=MAX_TEMPLATE_BYTES, if_empty=advice)


def _chunk_size(name: str, value: object) -> int:
    size = checks.whole(name, value, -1)
    if size == 0:
        raise checks.wrong_value(name, "-1 (prompts are never split) or an integer of at least 1", value)
    return size


def _group_size(name: str, value: object) -> int:
    size = checks.whole(name, value, min(GROUP_SIZES))
    if size not in GROUP_SIZES:
        raise checks.wrong_value(name, "32, 64, 128 or 256", value)
    return size


def _words(*words: str, **meanings: str) -> checks.Check:
    choices = {word: word for word in words} | meanings
    return lambda name, value: checks.choice(name, value, choices)


_algorithm_words = _words(NGRAM, STANDALONE, *DRAFT_HEADS, NEXTN=MTP)


def _algorithm(name: str, value: object) -> object:
    """Return the algorithm of speculation in upper case."""
    return _algorithm_words(name, value.upper() if isinstance(value, str) else value)


def _negated(name: str, value: object) -> bool:
    return not checks.switch(name, value)


def _weights(name: str, value: object) -> dict[str, float]:
    """Check weights by tenant. The form on the command line is "gold=3,free=1"."""
    allowed = 'a dict of tenant to number, or "tenant=number,..."'
    if isinstance(value, str):
        entries = [entry.rpartition("=") for entry in value.split(",") if entry]
        if not all(tenant and weight.replace(".", "", 1).isdecimal() for tenant, _, weight in entries):
            raise checks.wrong_value(name, allowed, value)
        value = {tenant: float(weight) for tenant, _, weight in entries}
    weights: dict[str, float] = {}
    for key, weight in checks.mapping(name, value, allowed=allowed).items():
        tenant = checks.text(f"{name} keys", key, max_bytes=checks.MAX_TENANT_BYTES)
        weights[tenant] = checks.number(f"{name}[{tenant!r}]", weight, 0, MAX_WEIGHT, above=True)
    return weights


def _names(name: str, value: object, max_items: int, *, allowed: str) -> list[str]:
    """Check a list of names. The command line has commas between them."""
    entries = checks.items(name, _split(value), max_items, allowed=allowed)
    return [checks.text(f"{name} entries", entry, max_bytes=MAX_NAME_BYTES) for entry in entries]


def _classes(name: str, value: object) -> tuple[str, ...]:
    """Check names of classes. The form on the command line is "a:A,b:B"."""
    entries = _names(name, value, MAX_PROCESSORS, allowed='a list of names such as "package.module:Class"')
    for entry in entries:
        module, _, class_name = entry.partition(":")
        if not (class_name.isidentifier() and all(map(str.isidentifier, module.split(".")))):
            raise checks.wrong_value(f"{name} entries", 'names such as "package.module:Class"', entry)
        if module == "__main__":
            raise ValueError(f"{name} has {entry!r}: other processes cannot import __main__; put it into a module")
    return tuple(entries)


def _adapters(name: str, value: object) -> tuple[GivenAdapter, ...]:
    """Check a list of paths, "name=path" or dicts, or a dict from name to path. Commas separate them in a flag."""
    if isinstance(value, Mapping):
        paths = cast("Mapping[object, object]", value)
        entries: list[object] = [{"lora_name": key, "lora_path": path} for key, path in paths.items()]
    else:
        entries = checks.items(name, _split(value), MAX_ADAPTERS, allowed=ADAPTERS)
    adapters: dict[str, GivenAdapter] = {}
    for i, entry in enumerate(entries):
        adapter = _adapter(f"{name}[{i}]", entry)
        if adapter.name in adapters:
            raise ValueError(f"{name} has two adapters named {checks.shown(adapter.name)}; give each its own")
        adapters[adapter.name] = adapter
    return tuple(adapters.values())


def _split(value: object) -> object:
    """Split the text of a flag at commas. Other values stay as they are."""
    return [word for word in value.split(",") if word] if isinstance(value, str) else value


def _adapter(name: str, entry: object) -> GivenAdapter:
    if not isinstance(entry, Mapping):
        text = checks.text(name, _path(name, entry))
        given_name, separator, path = text.partition("=")
        if isinstance(entry, str) and separator and given_name and path:
            return GivenAdapter(given_name, str(PurePath(path)))
        return GivenAdapter(text, text, alias=PurePath(text).name)
    fields = dict(cast("Mapping[object, object]", entry))
    allowed = "a dict with lora_name, lora_path and, if wanted, pinned"
    if not {"lora_name", "lora_path"} <= fields.keys() <= {"lora_name", "lora_path", "pinned"}:
        raise checks.wrong_value(name, allowed, fields)
    advice = "give the name by which requests name the adapter"
    given_name = checks.text(f"{name}: lora_name", fields["lora_name"], max_bytes=MAX_NAME_BYTES, if_empty=advice)
    is_pinned = checks.switch(f"{name}: pinned", fields.get("pinned") or False)
    path = checks.text(f"{name}: lora_path", _path(f"{name}: lora_path", fields["lora_path"]))
    return GivenAdapter(given_name, path, is_pinned=is_pinned)


def _modules(name: str, value: object) -> tuple[str, ...]:
    """Check names of modules; (): all. The command line has commas between."""
    allowed = 'a list of names such as "q_proj", or "all"'
    names = _names(name, value, MAX_MODULES, allowed=allowed)
    if not names:
        raise checks.wrong_value(name, allowed, value)
    return () if ALL_MODULES.intersection(names) else tuple(dict.fromkeys(names))


_dtype_words = _words(
    "auto",
    "bfloat16",
    "float16",
    "float32",
    half="float16",
    float="float32",
    bf16="bfloat16",
    fp16="float16",
    fp32="float32",
)


def _dtype(name: str, value: object) -> object:
    """Check a word or a dtype of torch. It is recognized by its text, because torch is not imported here."""
    word = str(value) if type(value).__name__ == "dtype" else value
    return _dtype_words(name, word.removeprefix("torch.") if isinstance(word, str) else value)


_A_DAY: Final = 86400.0
_seconds = number_from(0, _A_DAY, above=True)
MAX_WEIGHT: Final = 1e6
MAX_HIDDEN_STATE_BYTES: Final = 192 * 1024 * 1024
"""They must fit into a frame together with the other results of a step."""
MAX_PROCESSORS: Final = 64
MAX_DRAFT_TOKENS: Final = 16
MAX_NAME_BYTES: Final = 512
MAX_ADAPTERS: Final = 100_000
MAX_MODULES: Final = 1024
ADAPTERS: Final = "a list of paths, of 'name=path' or of dicts with lora_name, lora_path and pinned; or a dict of them"
ALL_MODULES: Final = frozenset(("all", "all-linear"))

_method = _words(*METHODS, *FORMATS["quant_method"], "gguf")

_ROWS: Final = {
    "model_path": Argument(_path, "folder, hub id or GGUF file of the model", "the demo model", place="model.path"),
    "tokenizer_path": Argument(_path, "folder or hub id of the tokenizer", "the model's folder"),
    "revision": Argument(_text, "branch, tag or commit on the hub", "the main branch"),
    "download_dir": Argument(_path, "folder for downloads", "the hub's cache"),
    "load_format": Argument(
        _words("auto", "safetensors", "gguf", "dummy"), "auto, safetensors, gguf or dummy (random weights)"
    ),
    "quantization": Argument(
        _method,
        "fp8, int8 or int4: quantize while loading; other methods only check config.json",
        "the method in config.json",
    ),
    "quantization_group_size": Argument(
        _group_size, "inputs that share a scale with quantization='int4': 32, 64, 128 or 256", str(DEFAULT_GROUP_SIZE)
    ),
    "dtype": Argument(_dtype, "auto, bfloat16, float16 or float32"),
    "context_length": Argument(whole_from(1), "maximum tokens of prompt and output", "the model's"),
    "model_impl": Argument(
        _words("auto", "aioengine", "transformers"),
        "code that computes the model: auto (ours if it has the model_type, otherwise transformers'), aioengine or "
        "transformers",
        place="model.implementation",
    ),
    "trust_remote_code": Argument(
        checks.switch, "run code in the model's folder, if transformers' code computes the model"
    ),
    "skip_tokenizer_init": Argument(_negated, "accept and return token ids only, no text", place="model.tokenizer"),
    "chat_template": Argument(
        _template, "text or file of a chat template that replaces the model's own", "the model's"
    ),
    "allow_request_templates": Argument(
        checks.switch, "requests may contain the text or file of a chat template, which runs in this process"
    ),
    "is_embedding": Argument(
        checks.switch, "give only vectors, even if the model can generate", "True for folders of sentence-transformers"
    ),
    "sampling_defaults": Argument(
        _words("model", "engine", openai="engine"),
        "source of sampling parameters that a request leaves out: model (its generation_config.json) or engine (openai "
        "is another name for engine)",
    ),
    "device": Argument(_words("auto", "cpu", "cuda", gpu="cuda"), "auto, cpu or cuda", place="device.name"),
    "attention_backend": Argument(
        _words("auto", "flashinfer", "triton", "fused", "torch", torch_native="torch"),
        "auto; flashinfer or triton on a GPU, fused on a CPU, torch on both",
    ),
    "enable_deterministic_inference": Argument(
        checks.switch, "the same bits in any batch on a GPU, too (always on a CPU)", place="device.batch_invariant"
    ),
    "tp_size": Argument(
        whole_from(1, MAX_RANKS), "ranks (processes, each with a GPU) that share the weights", place="device.tp_size"
    ),
    "dp_size": Argument(
        whole_from(1, MAX_REPLICAS),
        "replicas: copies of the model, each with its own processes and tp_size GPUs",
        place="supervision.num_replicas",
    ),
    "executor": Argument(
        _words("process", "ray"),
        "process (all replicas on this machine) or ray (replicas on the nodes of a Ray cluster)",
        place="supervision.executor",
    ),
    "load_balance_method": Argument(
        _words(*ROUTINGS),
        "how a request gets its replica: auto (cached prefix and open tokens), round_robin or shortest_queue",
        place="supervision.routing",
    ),
    "base_gpu_id": Argument(whole_from(0, MAX_RANKS), "the first GPU to use", place="device.base_gpu_id"),
    "disable_cuda_graph": Argument(_negated, "no CUDA graphs", place="device.cuda_graphs"),
    "cuda_graph_max_bs": Argument(
        whole_from(1, 65536),
        "maximum rows of a CUDA graph",
        f"max_running_requests, times 1 + drafts with speculation; at most {resolve.GPU_GRAPH_ROWS}",
        place="device.cuda_graph_max_rows",
    ),
    "logits_processors": Argument(
        _classes, "classes of logits processors that requests may name: a list of package.module:Class", "none"
    ),
    "enable_lora": Argument(checks.switch, "serve LoRA adapters", "True if lora_paths is set", place="lora.enabled"),
    "lora_paths": Argument(
        _adapters,
        "adapters to load at the start: a list of paths, name=path or dicts, or a dict of name to path",
        "none",
        place="lora.adapters",
    ),
    "max_loras_per_batch": Argument(
        whole_from(1, 1024), "maximum adapters on the device at once", place="lora.num_slots"
    ),
    "max_lora_rank": Argument(
        whole_from(1, MAX_RANK), "maximum rank of an adapter", "the highest of lora_paths", place="lora.max_rank"
    ),
    "lora_target_modules": Argument(
        _modules,
        "modules that adapters may change: a list of names, or all",
        "the modules of lora_paths",
        place="lora.modules",
    ),
    "max_loaded_loras": Argument(
        whole_from(1),
        "maximum adapters in host memory, at least max_loras_per_batch",
        "as many as fit into 4 GiB",
        place="lora.max_loaded",
    ),
    "allowed_local_media_path": Argument(_folder, "folder that must contain image files", "any folder"),
    "allow_private_urls": Argument(checks.switch, "allow image URLs with addresses that are not public"),
    "max_image_bytes": Argument(whole_from(1, 1 << 32), "maximum bytes of an image file"),
    "max_image_pixels": Argument(whole_from(1, 1 << 32), "maximum width times height of an image"),
    "max_images_per_prompt": Argument(whole_from(0, 1 << 16), "maximum images per prompt"),
    "media_timeout": Argument(
        _seconds, "seconds for the download of an image, and again for its preparation", place="media.timeout_s"
    ),
    "page_size": Argument(whole_from(1, 1024), "tokens per page of KV memory"),
    "kv_cache_dtype": Argument(
        _words("auto", "bfloat16", "fp8_e4m3", "int8", fp8="fp8_e4m3"),
        "numbers of keys and values: auto (the dtype), bfloat16, fp8_e4m3 (GPU) or int8 (CPU)",
    ),
    "max_total_tokens": Argument(whole_from(1), "size of the KV pool in tokens", "as much as fits into memory"),
    "mem_fraction_static": Argument(
        number_from(0, 1, above=True),
        "share of the memory for weights, steps and KV pool; on a CPU, share of the memory that is free after the "
        "weights are loaded, for the KV pool",
        f"{resolve.GPU_MEMORY_FRACTION} on a GPU, {resolve.CPU_MEMORY_FRACTION} on a CPU",
    ),
    "disable_radix_cache": Argument(_negated, "no prefix cache", place="memory.prefix_cache"),
    "max_running_requests": Argument(
        whole_from(1, 65536),
        "maximum requests computed at once",
        f"{resolve.GPU_LIMITS[1]} on a GPU, {resolve.CPU_LIMITS[1]} on a CPU",
        place="scheduler.max_running",
    ),
    "chunked_prefill_size": Argument(
        _chunk_size,
        "maximum tokens per step; -1: prompts are never split",
        f"{resolve.GPU_LIMITS[0]} on a GPU (up to {resolve.MAX_EMBEDDER_TOKENS} for embedders and classifiers), "
        f"{resolve.CPU_LIMITS[0]} on a CPU",
        place="scheduler.chunk_tokens",
    ),
    "schedule_policy": Argument(
        _words("fcfs", "priority", "longest_prefix", lpm="longest_prefix"),
        "fcfs, longest_prefix (lpm) or priority",
        place="scheduler.policy",
    ),
    "tenant_weights": Argument(_weights, "shares of the engine: a dict, or tenant=weight,...", "1 each"),
    "disable_overlap_schedule": Argument(
        _negated, "collect each step before the next is launched (always on a CPU)", place="scheduler.overlap"
    ),
    "speculative_algorithm": Argument(
        _algorithm,
        "compute several tokens of a row per step; NGRAM: propose the tokens that followed the same tokens before; "
        "STANDALONE: propose the tokens of a draft model; EAGLE, EAGLE3: of a draft head; MTP or NEXTN: of the model's "
        "own layers for multi-token prediction",
        "no speculation",
        place="speculation.algorithm",
    ),
    "speculative_num_draft_tokens": Argument(
        whole_from(2, MAX_DRAFT_TOKENS),
        "maximum tokens of a row per step",
        str(resolve.DRAFT_TOKENS),
        place="speculation.num_draft_tokens",
    ),
    "speculative_num_steps": Argument(
        whole_from(1, MAX_DRAFT_TOKENS - 1),
        "maximum drafts of a row per step",
        "speculative_num_draft_tokens - 1",
        place="speculation.num_steps",
    ),
    "speculative_draft_model_path": Argument(
        _path,
        "folder or hub id of the draft model or head, for STANDALONE, EAGLE and EAGLE3; a GGUF file for STANDALONE",
        "none",
        place="speculation.draft_model_path",
    ),
    "speculative_draft_model_revision": Argument(
        _text,
        "branch, tag or commit of the draft model on the hub",
        "the main branch",
        place="speculation.draft_revision",
    ),
    "speculative_draft_model_quantization": Argument(
        _method,
        "quantization of the draft model",
        "the method in its config.json",
        place="speculation.draft_quantization",
    ),
    "max_queued_requests": Argument(whole_from(0), "maximum waiting requests", place="queue.max_requests"),
    "max_queued_tokens": Argument(whole_from(0), "maximum prompt tokens of waiting requests", place="queue.max_tokens"),
    "max_queued_bytes": Argument(whole_from(0), "maximum bytes of the prompts of open calls", place="queue.max_bytes"),
    "max_logprob_bytes": Argument(whole_from(0, 1 << 48), "maximum bytes of all logprobs that wait to be read"),
    "slow_reader": Argument(
        _words("coalesce", "pause", "abort"),
        "if a reader stops reading: coalesce (merge unread chunks), pause or abort the request",
    ),
    "slow_reader_timeout": Argument(
        _seconds, "seconds after which slow_reader applies", place="delivery.slow_reader_timeout_s"
    ),
    "max_hidden_state_bytes": Argument(
        whole_from(0, MAX_HIDDEN_STATE_BYTES), "maximum bytes of hidden states of a request, up to 192 MiB"
    ),
    "max_restarts": Argument(whole_from(0), "replacements of lost processes before the engine gives up; 0: none"),
    "restart_window": Argument(_seconds, "seconds in which max_restarts counts", place="supervision.restart_window_s"),
    "stall_timeout": Argument(
        number_from(2, _A_DAY),  # processes give signs of life once a second
        "seconds (at least 2) without progress before the engine counts as stalled",
        place="supervision.stall_timeout_s",
    ),
    "startup_timeout": Argument(_seconds, "maximum seconds for the start", place="supervision.startup_timeout_s"),
    "enable_memory_saver": Argument(
        checks.switch, "release_memory_occupation can free memory for a while", place="memory.can_release"
    ),
    "enable_weights_cpu_backup": Argument(
        checks.switch,
        "keep weights that are given as tensors in host memory, for replaced processes",
        place="supervision.keeps_tensors",
    ),
    "stream_interval": Argument(whole_from(1), "output tokens between two chunks of a stream"),
    "logprobs_mode": Argument(
        _words("raw", "processed"),
        "raw: the model's own distribution; processed: after temperature, penalties and biases",
    ),
    "random_seed": Argument(whole_from(0, 2**63 - 1), "seed for drawing the seeds of requests", "random"),
    "log_level": Argument(
        _words("debug", "info", "warning", "error", "critical"), "debug, info, warning, error or critical"
    ),
    "progress": Argument(checks.switch, "progress bars", "True if stderr is a terminal or a notebook"),
}

_SECTIONS: Final = {field.name: field.default for field in fields(EngineConfig) if isinstance(field.default, Struct)}
_PLACES: Final = {field.name: field.name for field in fields(EngineConfig)} | {
    field.name: f"{name}.{field.name}" for name, section in _SECTIONS.items() for field in fields(section)
}
ARGUMENTS: Final = {name: replace(row, place=row.place or _PLACES[name]) for name, row in _ROWS.items()}
"""Every argument that works, in the order of the documentation."""


def engine_config(model_path: str | PurePath | None, arguments: Mapping[str, object]) -> EngineConfig:
    """Convert the public arguments to a config. None is the default of every argument.

    Raises:
        TypeError: an argument does not exist, or a value has the wrong type.
        ValueError: a value is outside its range, a feature is not available yet, or an argument is given twice.

    Warns:
        UserWarning: once, with the names of all arguments that have no effect.
    """
    own, others = by_own_names("argument", arguments, ALIASES, ARGUMENTS, MISSING_ARGUMENTS)
    for key in others:
        if key not in IGNORED:
            raise TypeError(f"unknown argument {key!r}{our_way(key) or _hint(key)}")
    if others:
        warn_caller(f"these arguments have no effect in aioengine: {', '.join(sorted(others))}", stacklevel=3)
    if model_path is not None:
        if own.get("model_path") is not None:
            raise ValueError(f"model_path is given twice: {model_path!r} and {own['model_path']!r}")
        own["model_path"] = model_path
    written = {ALIASES[key]: f"{ALIASES[key]} (given as {key})" for key in arguments if key in ALIASES}
    values: dict[str, dict[str, object]] = {"": {}}
    for name, value in own.items():
        if value is not None:
            section, _, field = ARGUMENTS[name].place.rpartition(".")
            values.setdefault(section, {})[field] = ARGUMENTS[name].check(written.get(name, name), value)
    top = values.pop("")
    sections = {name: replace(_SECTIONS[name], **changes) for name, changes in values.items()}
    return EngineConfig(**sections, **top)  # type: ignore[arg-type]  # every value has passed its check


def _hint(key: str) -> str:
    """Suggest an argument that works. For a misspelled argument of a missing feature, name the feature."""
    if is_sampling_parameter(key):
        return f"; it is a sampling parameter of each call, as sampling_params={{{key!r}: ...}}"
    if key in ARGUMENTS_OF_CALLS:
        return "; it is an argument of each call"
    meant = checks.nearest(key, (*ARGUMENTS, *ALIASES, *MISSING_ARGUMENTS, *IGNORED))
    if meant in ARGUMENTS or meant in ALIASES:
        return f" (did you mean {meant!r}?)"
    if meant in MISSING_ARGUMENTS and checks.nearest(key, (meant,), cutoff=0.85):
        return f" ({meant!r} belongs to a feature that is not available yet: {MISSING_ARGUMENTS[meant][1]})"
    return ""
