"""What a runner on a GPU does before its first request: graphs are captured, and steps that nobody asked for are run,
so that no request waits for a compiler.

Triton compiles a kernel anew for every form of its arguments: a number that is one, or a multiple of sixteen, the next
power of two of few rows. The sizes here meet all of these; each is run as prompts, as decode steps and as both at once,
with rows that are drawn plainly, from the largest logits alone, and after every logits processor. At last there is a
step full of prompts, as many as may run: matmuls of many rows have forms of their own, and whatever smaller steps need
lies in the memory that it took.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING, NamedTuple

import torch

from aioengine.attention._base import CapturableAttention, PiecewiseAttention
from aioengine.protocol.messages import Progress, Sampling
from aioengine.runner.device_memory import NoAttention
from aioengine.runner.graphs.ladder import MAX_SEEN_TOKENS, longest_piece
from aioengine.runner.graphs.piece_graphs import PieceGraphs
from aioengine.scheduler.plan import NOTHING, TOKENS, NewRow, Plan, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from aioengine.config import Settings
    from aioengine.models._base import Model
    from aioengine.runner.model_runner import DeviceParts, ModelRunner
    from aioengine.runner.timing import StartTimes

TOKENS_APART = 31
"""Which kernel computes a matmul changes with the number of tiles, and may with what the number is a multiple of: so
these are not all of a kind.
"""

SIZES = (1, 2, 16, 17, 32, 33, 64, 65, 80)
NUM_TOKENS = 5
"""Of a row among many, with what it generates."""

_TOKEN = 0
_PLAIN = (Sampling(1),)
_MIXED = (
    Sampling(2, top_k=5, top_p=0.9, min_p=0.01),
    Sampling(3, temperature=0.0),
    Sampling(4, frequency_penalty=0.1, presence_penalty=0.1, repetition_penalty=1.1, top_p=0.9),
    Sampling(5, bias_token_ids=(_TOKEN,), logit_bias=(1.0,), min_new_tokens=9, suppressed_token_ids=(_TOKEN,)),
)


def longest_graph(settings: Settings, weights_bytes: int, dtype: torch.dtype) -> int:
    """Up to how many tokens steps with prompts are CUDA graphs."""
    if not settings.runner.cuda_graph_max_rows:
        return 0
    return longest_piece(weights_bytes // dtype.itemsize, settings.scheduler.max_step_tokens)


def token_counts(largest: int, longest_graph: int) -> range:
    """Of steps of up to ``largest`` tokens, those that have no graph, at some distance."""
    return range(min(largest, MAX_SEEN_TOKENS), longest_graph, -TOKENS_APART)


@torch.inference_mode()
def see_token_counts(model: Model, counts: Iterable[int]) -> None:
    """Steps without graphs of about so many tokens find kernels that are loaded: to load one, CUDA waits for all that
    is queued. All blocks have the same matmuls, so one of them does.
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
    longest = longest_graph(settings, _weights_bytes(runner), parts.model.dtype) if runner.piece_graphs else 0
    see_token_counts(parts.model, token_counts(limits.max_step_tokens, longest))
    pages = parts.kv_pool.num_pages
    rehearse(runner, Limits(limits.max_running, limits.chunk_tokens, parts.context_length, pages), report)
    times.end("rehearsal")


@torch.inference_mode()
def _capture(runner: ModelRunner, parts: DeviceParts, settings: Settings, report: Callable[[Progress], None]) -> None:
    max_rows = settings.runner.cuda_graph_max_rows
    runner.capture_graphs(max_rows, lambda done, total: report(Progress("capturing CUDA graphs", done, total)))
    if isinstance(parts.attention, PiecewiseAttention):
        pieces = PieceGraphs(parts.model, parts.attention, parts.kv_pool.tensor, max_rows=parts.max_rows)
        longest = longest_graph(settings, _weights_bytes(runner), parts.model.dtype)
        pieces.capture(longest, lambda done, total: report(Progress("capturing CUDA graphs of prompts", done, total)))
        runner.piece_graphs = pieces


def _weights_bytes(runner: ModelRunner) -> int:
    weights_bytes = runner.facts["weights_bytes"]
    assert isinstance(weights_bytes, int)
    return weights_bytes


class Limits(NamedTuple):
    """What a step and a request may have: rows and tokens of a step, positions of a request, pages in all."""

    max_rows: int
    max_tokens: int
    context_length: int
    num_pages: int


def rehearse(runner: ModelRunner, limits: Limits, report: Callable[[Progress], None]) -> None:
    """Compute steps of all forms that are within the limits, over pages that nobody has yet, and forget them."""
    page_size = int(runner.facts["page_size"])
    if limits.context_length < NUM_TOKENS:
        return
    most = min(limits.max_rows, limits.max_tokens, limits.num_pages // -(-NUM_TOKENS // page_size))
    sizes = [size for size in SIZES if size <= most]
    total = len(sizes) + 1
    report(Progress("rehearsing steps", 0, total))
    for num_done, size in enumerate(sizes, 1):
        plans = [*_many_rows(size, page_size)]
        if size < limits.context_length and -(-(size + 1) // page_size) <= limits.num_pages:
            plans += _one_prompt(size, page_size)
        for plan in plans:
            if plan.num_tokens <= limits.max_tokens:
                runner.collect(runner.launch(plan))
        report(Progress("rehearsing steps", num_done, total))
    for plan in _full_step(limits, page_size):
        runner.collect(runner.launch(plan))
    report(Progress("rehearsing steps", total, total))


def _many_rows(size: int, page_size: int) -> Iterator[Plan]:
    """Prompts of one token, a decode step, decoding rows beside longer prompts and beside chunks that give no token."""
    uids = list(range(size))
    num_pages = -(-NUM_TOKENS // page_size)
    pages = [list(range(uid * num_pages, (uid + 1) * num_pages)) for uid in uids]
    for samplings in (_PLAIN, _MIXED):
        picked = list(islice(cycle(samplings), size))
        opened = [NewRow(uid, picked[uid], 1, [_TOKEN], pages[uid]) for uid in uids]
        yield Plan([Row(uid, 0, 1, TOKENS, [_TOKEN]) for uid in uids], opened)
        yield Plan([Row(uid, 1, 1, TOKENS) for uid in uids])
        late = uids[size // 2 :]  # these begin anew, with three tokens
        opened = [NewRow(uid, picked[uid], 3, [_TOKEN] * 3, pages[uid]) for uid in late]
        decoding = uids[: size // 2]
        prompts = [Row(uid, 0, 3, TOKENS, [_TOKEN] * 3) for uid in late]
        yield Plan([*(Row(uid, 2, 1, TOKENS) for uid in decoding), *prompts], opened, closed=late)
        chunks = [Row(uid, 3, 2, NOTHING, [_TOKEN] * 2) for uid in late]
        yield Plan([*(Row(uid, 3, 1, TOKENS) for uid in decoding), *chunks])
        yield Plan([], closed=uids)


def _one_prompt(size: int, page_size: int) -> Iterator[Plan]:
    ids = [_TOKEN] * size
    yield Plan([Row(0, 0, size, TOKENS, ids)], [NewRow(0, _PLAIN[0], size, ids, [*range(-(-(size + 1) // page_size))])])
    yield Plan([], closed=[0])


def _full_step(limits: Limits, page_size: int) -> Iterator[Plan]:
    """As many rows, and with them as many tokens, as a step can have, or nearly."""
    num_rows = min(limits.max_rows, limits.max_tokens // 2, limits.num_pages)
    if not num_rows:
        return
    size = min(limits.max_tokens // num_rows, limits.context_length - 1, limits.num_pages // num_rows * page_size)
    ids, num_pages = [_TOKEN] * size, -(-size // page_size)
    pages = [list(range(uid * num_pages, (uid + 1) * num_pages)) for uid in range(num_rows)]
    opened = [NewRow(uid, _PLAIN[0], size, ids, pages[uid]) for uid in range(num_rows)]
    yield Plan([Row(uid, 0, size, TOKENS, ids) for uid in range(num_rows)], opened)
    yield Plan([], closed=list(range(num_rows)))
