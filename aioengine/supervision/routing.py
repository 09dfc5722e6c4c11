"""Routing: chooses the replica of each request. Pure: no clock, no process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from aioengine.protocol.messages import Submit


class Routes:
    """The replica of each open request. Replicas are numbered from 0.

    A new request goes to the replica with the fewest open tokens (prompt tokens plus ``max_new_tokens``). On a tie, it
    goes to the replica with the lowest number. The request stays in its replica until ``forget``.
    """

    def __init__(self, num_replicas: int) -> None:
        self._loads = dict.fromkeys(range(num_replicas), 0)  # replica -> tokens
        self._routes: dict[int, tuple[int, int]] = {}  # uid -> (replica, tokens)

    @property
    def replicas(self) -> Collection[int]:
        """The replicas that accept requests."""
        return self._loads.keys()

    def choose(self, submit: Submit) -> int:
        """Choose and record the replica of a new request. Return the recorded replica if there is one."""
        if submit.uid not in self._routes:
            num_tokens = len(submit.prompt_token_ids) + submit.limits.max_new_tokens
            replica = min(self._loads, key=self._loads.__getitem__)
            self._loads[replica] += num_tokens
            self._routes[submit.uid] = replica, num_tokens
        return self._routes[submit.uid][0]

    def find(self, uid: int) -> int | None:
        """Return the replica of this request, or None if the request has ended."""
        route = self._routes.get(uid)
        return None if route is None else route[0]

    def forget(self, uid: int) -> None:
        """Remove a request that has ended."""
        replica, num_tokens = self._routes.pop(uid, (-1, 0))
        if replica in self._loads:
            self._loads[replica] -= num_tokens

    def remove(self, replica: int) -> None:
        """Remove a replica and all its requests."""
        del self._loads[replica]
        self._routes = {uid: route for uid, route in self._routes.items() if route[0] != replica}
