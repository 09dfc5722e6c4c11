"""The output of the commands ``info`` and ``bench``."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final, cast

import msgspec

from aioengine.api.args import ARGUMENTS, engine_config
from aioengine.frontend.info import __version__
from aioengine.frontend.startup import find_draft, read_adapters
from aioengine.model_files import model_folder
from aioengine.settings import machine
from aioengine.settings.config import Settings
from aioengine.settings.resolve import resolve

Facts = dict[str, dict[str, object]]

_PACKAGES: Final = ("torch", "transformers", "tokenizers", "pyzmq", "msgspec", "uvloop")


def facts(model_path: str | None, engine_arguments: Mapping[str, object]) -> Facts:
    """Return versions, facts about machine and model, and the settings of an engine with these arguments.

    Starts nothing. Raises TypeError or ValueError as the constructor of an engine.
    """
    config = engine_config(model_path, engine_arguments)
    model, device = model_folder.find_facts(config.model), machine.device_facts()
    settings = resolve(config, model, device, read_adapters(config), find_draft(config))
    return {
        "versions": {
            "aioengine": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "machine": {"platform": platform.platform(), **_plain(device, "drawn_seed")},
        "model": {"model_path": model.path, **_plain(model, "path", "weights", "linear_layers")},
        "settings": {name: argument.value_in(config) for name, argument in ARGUMENTS.items()} | _resolved(settings),
    }


def _resolved(settings: Settings) -> dict[str, object]:
    """Return the values of the constructor's arguments that depend on the model or on the machine."""
    model, memory, scheduler, runner = settings.model, settings.memory, settings.scheduler, settings.runner
    values: dict[str, object] = {
        "model_path": model.path,
        "tokenizer_path": settings.text.tokenizer_path,
        "load_format": model.load_format,
        "dtype": model.dtype,
        "context_length": model.context_length,
        "model_impl": model.implementation,
        "is_embedding": model.task != "generate",
        "device": runner.device,
        "attention_backend": runner.attention_backend,
        "cuda_graph_max_bs": runner.cuda_graph_max_rows,
        "enable_lora": runner.lora is not None,
        "mem_fraction_static": memory.mem_fraction_static,
        "kv_cache_dtype": memory.kv_dtype or model.dtype,
        "disable_radix_cache": not scheduler.prefix_cache,
        "max_running_requests": scheduler.max_running,
        "chunked_prefill_size": scheduler.chunk_tokens,
        "disable_overlap_schedule": scheduler.depth == 0,
    }
    if runner.lora is not None:
        values |= {"max_lora_rank": runner.lora.max_rank, "lora_target_modules": list(runner.lora.modules) or "all"}
    return values


def _plain(struct: msgspec.Struct, *without: str) -> dict[str, object]:
    values = cast("dict[str, object]", msgspec.to_builtins(struct))
    return {name: value for name, value in values.items() if name not in without}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def outline(sections: Facts) -> str:
    """Return the text of ``info``: sections with one line for each fact."""
    width = max(len(name) for section in sections.values() for name in section)
    lines: list[str] = []
    settings = sections["settings"]
    unset = {name: ARGUMENTS[name].default_text for name, value in settings.items() if value in (None, (), {})}
    for title, section in (sections | {"settings": settings | unset}).items():
        lines += [title, *(f"  {name:<{width}}  {_word(value)}" for name, value in section.items()), ""]
    return "\n".join(lines).rstrip()


def _word(value: object) -> str:
    return ", ".join(map(str, cast("list[object]", value))) if isinstance(value, list | tuple) else str(value)


def table(figures: Mapping[str, float | int]) -> str:
    """Return the text of ``bench``: one line per figure, then one line per latency with its percentiles."""
    lines = [f"{name:<22}{value:>12,}" for name, value in figures.items() if "_ms_p" not in name]
    names = dict.fromkeys(name.rpartition("_p")[0] for name in figures if "_ms_p" in name)
    percents = dict.fromkeys(name.rpartition("_p")[2] for name in figures if "_ms_p" in name)
    lines += ["", f"{'milliseconds':<22}" + "".join(f"{'p' + percent:>12}" for percent in percents)]
    for name in names:
        cells = "".join(f"{figures[f'{name}_p{percent}']:>12,}" for percent in percents)
        lines.append(f"{name.removesuffix('_ms'):<22}{cells}")
    return "\n".join(lines)
