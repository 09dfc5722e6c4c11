"""Gates: the reasons for which a request has to wait.

A request has a set of closed gates, ``Request.gates``. While one is closed, no new step computes the request; once all
are open it goes on where it was. Aborts and deadlines act at all times.

    gate       closed when                                           pages of a running request
    PREFIX     another request is computing the request's prefix     (it has none yet)
    SUSPENDED  the reader of the stream is away                      given back
    GRAMMAR    the grammar is being compiled                         kept
    ADAPTER    the adapter is read, copied, or waits for a slot      (it has none yet)

PREFIX and ADAPTER belong to admission. PREFIX opens without a call when the pages are computed or given up, ADAPTER by
``Requests.release``. The others are closed and opened by ``Requests.close_gate`` and ``open_gate``.

Where a request stays while a gate is closed:

    waiting   PREFIX: in the queue, and is passed over. Any other: beside the queue, and returns to its old place in it.
    running   It keeps its pages and its rank, and gets no rows. It may be preempted; then it waits beside the queue.
"""

from __future__ import annotations

from enum import Enum


class Gate(Enum):
    """A reason to wait; see the table above."""

    PREFIX = 0
    SUSPENDED = 1
    GRAMMAR = 2
    ADAPTER = 3

    @property
    def keeps_pages(self) -> bool:
        """Whether a running request keeps its pages while this gate is closed."""
        return self is not Gate.SUSPENDED


ALL_OPEN: frozenset[Gate] = frozenset()
OF_ADMISSION = frozenset((Gate.PREFIX, Gate.ADAPTER))
