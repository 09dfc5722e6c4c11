"""What a runner on a GPU does before its first request: graphs are captured, and steps rehearsed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.attention._base import CapturableAttention
from aioengine.protocol.messages import Progress
from aioengine.runner.device_memory import NoAttention
from aioengine.runner.graphs.ladder import MAX_SEEN_TOKENS, longest_prefill_graph
from aioengine.runner.graphs.prompt_graphs import capture_prompt_graphs
from aioengine.runner.rehearsal import Limits, rehearse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aioengine.config import Settings
    from aioengine.models._base import Model
    from aioengine.runner.model_runner import DeviceParts, ModelRunner
    from aioengine.runner.start_times import StartTimes

TOKENS_APART = 31
"""Which kernel computes a product changes with the number of tiles, and may with what the number is a multiple of: so
these are not all of a kind.
"""


def longest_graph(settings: Settings, weights_bytes: int, dtype: torch.dtype) -> int:
    """Up to how many tokens steps with prompts are CUDA graphs."""
    if not settings.runner.cuda_graph_max_rows:
        return 0
    return longest_prefill_graph(weights_bytes // dtype.itemsize, settings.scheduler.max_step_tokens)


def token_counts(largest: int, longest_graph: int) -> range:
    """Of steps of up to ``largest`` tokens, those that have no graph, at some distance."""
    return range(min(largest, MAX_SEEN_TOKENS), longest_graph, -TOKENS_APART)


@torch.inference_mode()
def see_token_counts(model: Model, counts: Iterable[int]) -> None:
    """Steps without graphs of about so many tokens find kernels that are loaded: to load one, CUDA waits for all that
    is queued. All blocks have the same products, so one of them does.
    """
    for num_tokens in counts:
        model.forward_block(num_tokens, NoAttention())


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
    longest = longest_graph(settings, _weights_bytes(runner), parts.model.dtype) if runner.prompt_graphs else 0
    see_token_counts(parts.model, token_counts(limits.max_step_tokens, longest))
    pages = parts.kv_pool.num_pages
    rehearse(runner, Limits(limits.max_running, limits.chunk_tokens, parts.context_length, pages), report)
    times.end("rehearsal")


def _capture(runner: ModelRunner, parts: DeviceParts, settings: Settings, report: Callable[[Progress], None]) -> None:
    max_rows = settings.runner.cuda_graph_max_rows
    runner.capture_graphs(max_rows, lambda done, total: report(Progress("capturing CUDA graphs", done, total)))
    longest = longest_graph(settings, _weights_bytes(runner), parts.model.dtype)
    runner.prompt_graphs = capture_prompt_graphs(parts, longest, report)


def _weights_bytes(runner: ModelRunner) -> int:
    weights_bytes = runner.facts["weights_bytes"]
    assert isinstance(weights_bytes, int)
    return weights_bytes
