"""Requests that have failed, and the cleaning of their pages. S rows that sample."""

from __future__ import annotations

from torch import Tensor

from aioengine.runner.kv_pool import KVPool
from aioengine.runner.rows import RowTable


class FailedRows:
    """The open requests that have failed. They fail in each step until they are closed.

    A row fails if the hidden state of its last token is not finite. Attention propagates NaNs of earlier tokens to the
    last token, with two exceptions. If all layers have short windows, a NaN may be too far away. If a NaN arises after
    the attention of the last layer, it stays in its token, and does not affect the answer. All tokens are checked only
    for prompt logprobs, because this slows down each prompt.

    If a NaN is missed, its pages are not cleaned. On a CPU, attention multiplies unwritten slots by zero, and NaN times
    zero is NaN. So the next owner of such a page may fail too.

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
        """Remove a request here and from the table, and clean its pages if needed. An unknown uid is ignored."""
        self.reasons.pop(uid, None)
        if uid in self._poisoned:
            self._poisoned.discard(uid)
            self._kv_pool.clean(self._table.pages(uid))
        self._table.close(uid)

    def clean_after_step(self, indices: dict[int, int], token_ids: Tensor, closed: list[int]) -> None:
        """Clean the pages of closed requests if they fail in the step in flight.

        The device decides after the step which pages it cleans. The host knows the failed rows too late: the pages may
        then belong to another request.

        Args:
            indices: uid -> index in ``token_ids``, of the rows of the step.
            token_ids: [S] the result of the step on the device; negative for a failed row.
            closed: uids of the closed requests.
        """
        pages = {indices[uid]: self._table.pages(uid) for uid in closed if uid in indices}
        if pages:
            self._kv_pool.clean_failed(pages, token_ids, self._table.upload)
