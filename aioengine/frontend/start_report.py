"""What a started engine runs on, as lines of the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aioengine.logs import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.config import Settings

logger = logging.getLogger(__name__)


def log_start(settings: Settings, facts: Mapping[str, object], took_s: float) -> None:
    """Log model, device, dtype, KV pool and CUDA graphs, as far as the runner names them, and the time of the start."""
    for line in (*_lines(settings, facts), f"ready after {took_s:.1f} s"):
        log(logger, logging.INFO, "%s", line)


def _lines(settings: Settings, facts: Mapping[str, object]) -> list[str]:
    size, pages = facts.get("weights_bytes"), facts.get("num_pages", "unknown number of")
    threads = f", {facts['num_threads']} threads" if "num_threads" in facts and facts.get("device") == "cpu" else ""
    return [
        f"model: {settings.model.path}" + (f", {_megabytes(size)} of weights" if size is not None else ""),
        f"device: {facts.get('device_name', settings.runner.device)}{threads}",
        f"dtype: {facts.get('dtype', settings.model.dtype)}, attention: "
        f"{facts.get('attention_backend', settings.runner.attention_backend)}",
        f"KV pool: {facts.get('max_total_tokens')} tokens in {pages} pages"
        + (f", {_megabytes(facts['kv_pool_bytes'])}" if "kv_pool_bytes" in facts else ""),
        f"CUDA graphs: {facts.get('cuda_graph_sizes') or 'none'}",
    ]


def _megabytes(num_bytes: object) -> str:
    return f"{num_bytes / 1e6:,.0f} MB" if isinstance(num_bytes, int) else f"{num_bytes} bytes"
