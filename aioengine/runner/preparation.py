"""What a runner on a GPU does before its first request: graphs are captured, and steps rehearsed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.attention._base import CapturableAttention
from aioengine.protocol.messages import Progress
from aioengine.runner.ladder import longest_prefill_graph
from aioengine.runner.prompt_graphs import capture_prompt_graphs
from aioengine.runner.rehearsal import Limits, rehearse

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from aioengine.config import Settings
    from aioengine.runner.model_runner import DeviceParts, ModelRunner
    from aioengine.runner.start_times import StartTimes


def longest_graph(settings: Settings, weights_bytes: int, dtype: torch.dtype) -> int:
    """Up to how many tokens steps with prompts are CUDA graphs."""
    if not settings.runner.cuda_graph_max_rows:
        return 0
    return longest_prefill_graph(weights_bytes // dtype.itemsize, settings.scheduler.max_step_tokens)


def prepare_device(
    runner: ModelRunner,
    parts: DeviceParts,
    settings: Settings,
    *,
    report: Callable[[Progress], None],
    times: StartTimes,
) -> None:
    """Capture the graphs where attention can stand in them, and rehearse all kinds of steps."""
    if isinstance(parts.attention, CapturableAttention):
        parts.attention.warm_up()
        if settings.runner.cuda_graph_max_rows:
            _capture(runner, parts, settings, report)
    times.end("graphs")
    limits = settings.scheduler
    pages = parts.kv_pool.num_pages
    rehearse(runner, Limits(limits.max_running, limits.chunk_tokens, parts.context_length, pages), report)
    times.end("rehearsal")


def _capture(runner: ModelRunner, parts: DeviceParts, settings: Settings, report: Callable[[Progress], None]) -> None:
    max_rows = settings.runner.cuda_graph_max_rows
    runner.capture_graphs(max_rows, lambda done, total: report(Progress("capturing CUDA graphs", done, total)))
    weights_bytes = runner.facts["weights_bytes"]
    assert isinstance(weights_bytes, int)
    longest = longest_graph(settings, weights_bytes, parts.model.dtype)
    runner.prompt_graphs = capture_prompt_graphs(parts, longest, report)
