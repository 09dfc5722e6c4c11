"""What an engine costs before its first token and while it idles.

    python -m benchmarks.host.engine_start  # a table; --json FILE for figures

import      ``import aioengine`` in a fresh interpreter, less the interpreter's own start
start       ``Engine()`` with the demo model until it is ready
first       the first answer after that: one token
idle        CPU time of all processes over ``--idle`` seconds, in percent of one core
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from aioengine import Engine


def seconds(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def import_seconds() -> float:
    bare = seconds(sys.executable, "-c", "pass")
    return seconds(sys.executable, "-c", "import aioengine; aioengine.AsyncEngine") - bare


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def start_once(idle_s: float) -> dict[str, float]:
    started = time.perf_counter()
    with Engine() as llm:
        ready = time.perf_counter()
        llm.generate("Hello", {"max_new_tokens": 1})
        first = time.perf_counter()
        time.sleep(1.0)  # the last snapshots are on their way
        processes = [psutil.Process(), *(psutil.Process(pid) for pid in llm.get_all_child_pids())]
        before = cpu_seconds(processes)
        time.sleep(idle_s)
        busy = cpu_seconds(processes) - before
    return {"start_s": ready - started, "first_token_s": first - ready, "idle_percent": 100 * busy / idle_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--idle", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = [{"import_s": import_seconds(), **start_once(options.idle)} for _ in range(options.repeat)]
    table = {
        name: {
            "median": statistics.median(run[name] for run in runs),
            "min": min(run[name] for run in runs),
            "max": max(run[name] for run in runs),
        }
        for name in runs[0]
    }
    for name, figures in table.items():
        print(f"{name:<14} median {figures['median']:.3f}  min {figures['min']:.3f}  max {figures['max']:.3f}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
