"""The scheduler core without a device: microseconds of one CPU core for each token, by number of decode rows.

    python -m benchmarks.host.scheduler [--rows 1 64 256 1024] [--output 512] [--depth 1] [--json] [--profile]

A null runner answers at once, so what is measured is planning, applying and emitting. Prompts are short and all run
from the first step on; the steps that compute prompts are left out of the figure.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import Limits, Sampling, Submit, TextRules
from aioengine.scheduler.core import SchedulerCore
from aioengine.scheduler.plan import TOKENS, StepPlan, StepResult
from aioengine.scheduler.scheduler import Scheduler
from aioengine.settings.config import SchedulerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.protocol.messages import Control, Reply

PROMPT_TOKENS = 48
PAGE_SIZE = 16


class NullRunner:
    """Returns a different token for each row that samples, at the cost of a list."""

    adapters = use_grammars = None

    @property
    def controls(self) -> Mapping[str, Callable[[Control], Reply]]:
        return {}

    @property
    def facts(self) -> Mapping[str, str | int | float | bool]:
        return {}

    def launch(self, plan: StepPlan) -> StepResult:
        uids = [row.uid for row in plan.rows if row.outputs == TOKENS]
        return StepResult(TokenColumns(uids, [1 + uid % 1000 for uid in uids]))

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def close(self) -> None:
        return


@dataclass
class Figure:
    """One line of the answer. ``runner_us`` is the null runner's own part, which is taken off ``token_us``."""

    rows: int
    depth: int
    token_us: float
    step_us: float
    runner_us: float


def core_with(rows: int, *, output: int, depth: int) -> SchedulerCore[StepResult]:
    """Return a core with ``rows`` requests, whose prompts are computed."""
    pages = rows * (PROMPT_TOKENS + output + 2 * PAGE_SIZE) // PAGE_SIZE + rows
    settings = SchedulerSettings(
        max_running=rows, chunk_tokens=2048, context_length=65536, policy="fcfs", prefix_cache=True, depth=depth
    )
    core = SchedulerCore(Scheduler(settings, num_pages=pages, page_size=PAGE_SIZE), NullRunner(), depth)
    for uid in range(rows):
        prompt = [uid % 50_000, uid // 50_000, *range(PROMPT_TOKENS - 2)]
        limits = Limits(max_new_tokens=output, stop_token_ids=(0,))
        core.requests.submit(Submit(uid, prompt, Sampling(seed=uid), limits, TextRules()))
    while core.scheduler.stats(0.0).output_tokens < rows or core.scheduler.stats(0.0).num_waiting:
        core.step(0.0)
    return core


def measure(rows: int, *, output: int, depth: int) -> Figure:
    """Step until the first request ends, all rows decoding."""
    core = core_with(rows, output=output, depth=depth)
    before = core.scheduler.stats(0.0)
    started = time.process_time()
    while core.scheduler.stats(0.0).num_finished == 0:
        core.step(0.0)
    spent = time.process_time() - started
    after = core.scheduler.stats(0.0)
    num_tokens = after.output_tokens - before.output_tokens
    num_steps = after.num_steps - before.num_steps
    runner_us = null_runner_us(rows)
    step_us = spent / num_steps * 1e6 - runner_us
    return Figure(rows, depth, round(step_us * num_steps / num_tokens, 3), round(step_us, 1), round(runner_us, 1))


def null_runner_us(rows: int) -> float:
    """Return the microseconds of the null runner for a step of decode rows."""
    core = core_with(rows, output=64, depth=0)
    plan = core.scheduler.schedule(0.0)
    assert plan is not None
    runner = NullRunner()
    repeats = 200
    started = time.process_time()
    for _ in range(repeats):
        runner.collect(runner.launch(plan))
    return (time.process_time() - started) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--output", type=int, default=512, help="tokens for each request")
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--profile", action="store_true", help="where the time goes, for the last number of rows")
    arguments = parser.parse_args()
    figures = [measure(rows, output=arguments.output, depth=arguments.depth) for rows in arguments.rows]
    if arguments.json:
        print(json.dumps({"figures": [asdict(figure) for figure in figures]}))
    else:
        print("   rows   us/token    us/step")
        for figure in figures:
            print(f"{figure.rows:7d} {figure.token_us:10.2f} {figure.step_us:10.1f}")
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, arguments.rows[-1], output=arguments.output, depth=arguments.depth)
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
