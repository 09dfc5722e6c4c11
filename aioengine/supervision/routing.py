"""Routing: chooses the replica of each request. Pure: no clock, no process."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from aioengine.protocol.messages import Submit

_BLOCK_TOKENS: Final = 64


class Routes:
    """The replica of each open request. Replicas are numbered from 0.

    A request that names a replica goes there, unless that replica has failed. For other requests, the method decides:

    - "auto": the replica with the fewest tokens to compute for all its open requests and the new one. These are the
      prompt tokens that are not in its cache, and ``max_new_tokens``. So turns of a session and requests with the same
      prefix or adapter go to one replica, until its queue costs more than the prefix saves.
    - "round_robin": one replica after the other.
    - "shortest_queue": the replica with the fewest open requests.

    On a tie, the lowest number wins. The request stays in its replica until ``forget``.

    Attributes:
        cache_tokens: tokens in the prefix cache of a replica. The last prompts up to this size count as cached.
    """

    def __init__(self, num_replicas: int, method: str = "auto", cache_tokens: int = 1 << 20) -> None:
        replicas = range(num_replicas)
        self.cache_tokens = cache_tokens
        self._method = method
        self._num_chosen = 0
        self._num_open = dict.fromkeys(replicas, 0)  # replica -> requests
        self._num_tokens = dict.fromkeys(replicas, 0)  # replica -> tokens to compute: the sum of the costs
        self._routes: dict[int, int] = {}  # uid -> replica
        self._costs: dict[int, tuple[int, int]] = {}  # uid -> tokens to compute of its prompt and of its output
        self._seen: dict[int, dict[int, None]] = {number: {} for number in replicas}  # replica -> blocks, oldest first

    @property
    def replicas(self) -> Collection[int]:
        """The replicas that accept requests."""
        return self._num_open.keys()

    def choose(self, submit: Submit) -> int:
        """Choose and record the replica of a new request. Return the recorded replica if there is one."""
        uid = submit.uid
        if uid not in self._routes:
            blocks = list(_blocks(submit)) if self._method == "auto" else []
            replica = self._best(submit, blocks)
            num_prompt = max(0, len(submit.prompt_token_ids) - self._num_seen(replica, blocks))
            self._costs[uid] = num_prompt, submit.limits.max_new_tokens
            self._routes[uid] = replica
            self._num_open[replica] += 1
            self._num_tokens[replica] += sum(self._costs[uid])
            self._remember(replica, blocks)
        return self._routes[uid]

    def _best(self, submit: Submit, blocks: list[int]) -> int:
        if submit.replica in self._num_open:
            return submit.replica
        if self._method == "round_robin":
            self._num_chosen += 1
            return list(self._num_open)[(self._num_chosen - 1) % len(self._num_open)]
        if self._method == "shortest_queue":
            return min(self._num_open, key=self._num_open.__getitem__)
        return min(self._num_open, key=lambda replica: self._num_tokens[replica] - self._num_seen(replica, blocks))

    def _num_seen(self, replica: int, blocks: list[int]) -> int:
        """Return the number of tokens in the first blocks that this replica has seen."""
        seen = self._seen[replica]
        return _BLOCK_TOKENS * next((count for count, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, replica: int, blocks: list[int]) -> None:
        seen = self._seen[replica]
        for block in reversed(blocks):  # the first ones are forgotten last
            seen.pop(block, None)
            seen[block] = None
        while len(seen) > self.cache_tokens // _BLOCK_TOKENS:
            del seen[next(iter(seen))]

    def find(self, uid: int) -> int | None:
        """Return the replica of this request, or None if the request has ended."""
        return self._routes.get(uid)

    def prompt_computed(self, uid: int) -> None:
        """Record that a request has its first token, so its prompt costs nothing any more."""
        num_prompt, num_output = self._costs.get(uid, (0, 0))
        if num_prompt:
            self._num_tokens[self._routes[uid]] -= num_prompt
            self._costs[uid] = 0, num_output

    def forget(self, uid: int) -> None:
        """Remove a request that has ended."""
        if (replica := self._routes.pop(uid, None)) is not None:
            self._num_open[replica] -= 1
            self._num_tokens[replica] -= sum(self._costs.pop(uid))

    def remove(self, replica: int) -> None:
        """Remove a replica and all its requests."""
        for uid in [uid for uid, route in self._routes.items() if route == replica]:
            self.forget(uid)
        for numbers in (self._num_open, self._num_tokens, self._seen):
            del numbers[replica]


def _blocks(submit: Submit) -> Iterator[int]:
    """Return a hash of each whole block of a prompt. It depends on all tokens up to the end of the block.

    A request with an adapter has one more block, so that it prefers a replica that has the adapter.
    """
    ids = submit.prompt_token_ids
    block = hash((None if submit.adapter is None else submit.adapter.id, submit.cache_salt))
    if submit.adapter is not None:
        yield block
    for start in range(0, len(ids) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
        block = hash((block, *ids[start : start + _BLOCK_TOKENS]))
        yield block
