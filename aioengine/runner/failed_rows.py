"""Failed requests: their errors, and the cleaning of their pages. S rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from aioengine.runner.kv_pool import KVPool
    from aioengine.runner.rows import RowTable


class FailedRows:
    """The open requests that have failed. They fail in each step until they are closed.

    NaNs are detected in the hidden state of the last token, to which attention propagates them. A NaN earlier in the
    prompt is missed if it cannot reach the last token: because of short windows in all layers, or because it arises
    after the attention of the last layer (then it does not affect the answer). Checking all tokens would slow down each
    prompt; with prompt logprobs they are checked. If a NaN is missed, its pages are not cleaned. On a CPU, where
    attention multiplies unwritten slots by zero, the next owner of such a page may fail too.

    Attributes:
        reasons: uid -> error.
    """

    def __init__(self, table: RowTable, kv_pool: KVPool) -> None:
        self.reasons: dict[int, str] = {}
        self._table = table
        self._kv_pool = kv_pool
        self._poisoned: set[int] = set()  # uids whose pages may contain non-finite numbers

    def add(self, uid: int, reason: str, *, is_poisoned: bool = False) -> None:
        """Add a failed request. is_poisoned: its pages may contain non-finite numbers."""
        self.reasons.setdefault(uid, reason)
        if is_poisoned:
            self._poisoned.add(uid)

    def close(self, uid: int) -> None:
        """Close a request here and in the table, and clean its pages if needed. An unknown uid is ignored."""
        self.reasons.pop(uid, None)
        if uid in self._poisoned:
            self._poisoned.discard(uid)
            self._kv_pool.clean(self._table.pages(uid))
        self._table.close(uid)

    def clean_after_step(self, uids: Iterable[int], token_ids: Tensor, closed: list[int]) -> None:
        """Queue the cleaning of pages of closed requests that fail in the step in flight.

        The host learns of the failure after the step, when the pages may already belong to another request.

        Args:
            uids: the rows of the step.
            token_ids: [S] its result on the device, negative for a failed row.
            closed: uids of the closed requests.
        """
        indices = {uid: index for index, uid in enumerate(uids)}
        pages = {indices[uid]: self._table.pages(uid) for uid in closed if uid in indices}
        if pages:
            self._kv_pool.clean_failed(pages, token_ids, self._table.upload)
