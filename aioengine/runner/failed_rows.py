"""Requests that cannot be computed any more: why, and the cleaning of their pages. S rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from aioengine.runner.kv_pool import KVPool
    from aioengine.runner.rows import RowTable


class FailedRows:
    """The open requests whose rows fail in each step until they are closed; closes requests of the table.

    A row with non-finite numbers fails by its last token, which attention brings them to. Without prompt logprobs those
    in the middle of a prompt are not noticed if all layers have windows too short for that, or if they arise behind the
    attention of the last layer, where the answer does not depend on them: reading all tokens takes each prompt time.
    Their pages are not cleaned then, so on a CPU, whose attention multiplies unwritten slots by zero, the next owner of
    such a page may fail, too.

    Attributes:
        reasons: by uid, why.
    """

    def __init__(self, table: RowTable, kv_pool: KVPool) -> None:
        self.reasons: dict[int, str] = {}
        self._table = table
        self._kv_pool = kv_pool
        self._poisoned: set[int] = set()  # uids whose pages may hold non-finite numbers

    def add(self, uid: int, reason: str, *, is_poisoned: bool = False) -> None:
        """``is_poisoned``: its pages may hold non-finite numbers."""
        self.reasons.setdefault(uid, reason)
        if is_poisoned:
            self._poisoned.add(uid)

    def close(self, uid: int) -> None:
        """Close a request, in the table too, and clean its pages where that is needed; an unknown one is ignored."""
        self.reasons.pop(uid, None)
        if uid in self._poisoned:
            self._poisoned.discard(uid)
            self._kv_pool.clean(self._table.pages(uid))
        self._table.close(uid)

    def clean_behind(self, uids: Iterable[int], marks: Tensor, closed: list[int]) -> None:
        """Queue the cleaning of pages of closed requests, if the step in flight marks them as failed.

        The host learns of the failure after the step. The pages may belong to another request by then.

        Args:
            uids: of the rows of that step. marks: [S] on the device, negative for a failed row.
        """
        places = {uid: place for place, uid in enumerate(uids)}
        pages = {places[uid]: self._table.pages(uid) for uid in closed if uid in places}
        if pages:
            self._kv_pool.clean_marked(pages, marks, self._table.upload)
