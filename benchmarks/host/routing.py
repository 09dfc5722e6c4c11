"""What the routing of requests among replicas gains: a simulation of replicas, without a model or a clock.

    python -m benchmarks.host.routing [--replicas 2 8 64] [--requests 400] [--load 0.8] [--json]

The trace has requests with shared prefixes: system prompts of 512 to 4,096 tokens, of which a few are popular (Zipf),
and 64 to 512 tokens of each request's own. There are 8 prefixes per replica, and `--requests` requests per replica,
which arrive at random. A replica computes in steps, as an 8B model on an H200: 6 ms, and 24 us for each token of a
prompt. Its prefix cache holds 16,384 tokens, so it cannot keep all prefixes. `--load` is the share of the time in which
the replicas would be busy without a prefix cache.

Every method of `load_balance_method` gets the same trace. The figures: the part of the prompt tokens found in the
cache, and the time to the first token (median and 99th percentile).
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections import deque
from dataclasses import dataclass, field

from aioengine.protocol.messages import Limits, Sampling, Submit, TextRules
from aioengine.settings.config import ROUTINGS
from aioengine.supervision.routing import Routes

STEP_S = 0.006
PROMPT_TOKEN_S = 24e-6
STEP_TOKENS = 8192
CACHE_TOKENS = 16_384


@dataclass
class Replica:
    """A replica with a queue of prompts, running requests, and an LRU cache of whole prefixes."""

    waiting: deque[tuple[float, int, int, int]] = field(default_factory=deque)  # arrival, uid, prefix, own tokens
    running: dict[int, int] = field(default_factory=dict)  # uid -> tokens left
    cache: dict[int, int] = field(default_factory=dict)  # prefix -> tokens, oldest first
    is_busy: bool = False

    def step(self, sizes: list[int], outputs: list[int]) -> tuple[float, list[tuple[float, int]], int, list[int]]:
        """Return the seconds of a step, the (arrival, uid) of new first tokens, cached tokens, and ended uids."""
        budget, cached, first = STEP_TOKENS, 0, []
        while self.waiting and budget > 0:
            arrived_at, uid, prefix, own = self.waiting.popleft()
            hit = self.cache.pop(prefix, 0)
            self.cache[prefix] = sizes[prefix]
            while sum(self.cache.values()) > CACHE_TOKENS:
                del self.cache[next(iter(self.cache))]
            cached += hit
            budget -= sizes[prefix] - hit + own
            self.running[uid] = outputs[uid]
            first.append((arrived_at, uid))
        seconds = STEP_S + PROMPT_TOKEN_S * (STEP_TOKENS - budget)
        self.running = {uid: left - 1 for uid, left in self.running.items()}
        ended = [uid for uid, left in self.running.items() if left <= 0]
        for uid in ended:
            del self.running[uid]
        return seconds, first, cached, ended


def simulate(num_replicas: int, method: str, num_requests: int, load: float, seed: int = 0) -> dict[str, float]:
    """Return the figures of one method."""
    draw = random.Random(seed)
    num_prefixes, num_requests = 8 * num_replicas, num_requests * num_replicas
    sizes = [draw.randrange(512, 4097, 64) for _ in range(num_prefixes)]
    popularity = [1 / (rank + 1) for rank in range(num_prefixes)]
    prefixes = draw.choices(range(num_prefixes), popularity, k=num_requests)
    owns = [draw.randrange(64, 513) for _ in prefixes]
    outputs = [draw.randrange(16, 257) for _ in prefixes]
    work_s = PROMPT_TOKEN_S * sum(sizes[prefix] + own for prefix, own in zip(prefixes, owns, strict=True))
    arrivals, now = [], 0.0
    for _ in prefixes:
        now += draw.expovariate(load * num_requests * num_replicas / work_s)
        arrivals.append(now)
    routes, replicas = Routes(num_replicas, method, CACHE_TOKENS), [Replica() for _ in range(num_replicas)]
    # (time, order, what): a request arrives (uid), or a replica ends a step (-1 - number)
    events = [(time, uid, uid) for uid, time in enumerate(arrivals)]
    heapq.heapify(events)
    first_tokens: list[float] = []
    num_cached, order = 0, num_requests
    results: dict[int, tuple[list[tuple[float, int]], list[int]]] = {}
    while events:
        now, _, what = heapq.heappop(events)
        if what >= 0:
            prefix, own = prefixes[what], owns[what]
            ids = [prefix + 1] * sizes[prefix] + [-what] * own
            number = routes.choose(Submit(what, ids, Sampling(seed=0), Limits(outputs[what]), TextRules()))
            replicas[number].waiting.append((now, what, prefix, own))
        else:
            number = -1 - what
            first, ended = results.pop(number)
            first_tokens += [now - arrived_at for arrived_at, _ in first]
            for _, uid in first:
                routes.prompt_computed(uid)
            for uid in ended:
                routes.forget(uid)
            replicas[number].is_busy = False
        replica = replicas[number]
        if not replica.is_busy and (replica.waiting or replica.running):
            seconds, first, cached, ended = replica.step(sizes, outputs)
            results[number], replica.is_busy = (first, ended), True
            num_cached += cached
            order += 1
            heapq.heappush(events, (now + seconds, order, -1 - number))
    num_prompt = sum(sizes[prefix] + own for prefix, own in zip(prefixes, owns, strict=True))
    return {
        "cached": num_cached / num_prompt,
        "first_token_ms": 1e3 * statistics.median(first_tokens),
        "first_token_p99_ms": 1e3 * statistics.quantiles(first_tokens, n=100)[98],
        "duration_s": now,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--requests", type=int, default=400, help="requests per replica (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.8, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [
        {"replicas": number, "method": method, **simulate(number, method, given.requests, given.load)}
        for number in given.replicas
        for method in ROUTINGS
    ]
    if given.json:
        print(json.dumps(rows))
        return
    print(f"{'replicas':>8} {'method':<16}{'cached':>8}{'first token ms':>16}{'p99':>10}")
    for row in rows:
        print(
            f"{row['replicas']:>8} {row['method']:<16}{row['cached']:>8.0%}{row['first_token_ms']:>16,.0f}"
            f"{row['first_token_p99_ms']:>10,.0f}"
        )


if __name__ == "__main__":
    main()
