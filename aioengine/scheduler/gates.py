"""Gates: the reasons for which a request must wait.

``Request.gates`` is the set of closed gates. While a gate is closed, no new step computes the request. When all gates
are open, it continues. Aborts and deadlines always work.

    gate       closed when                                           pages of a running request
    PREFIX     another request is computing the request's prefix     (it has none yet)
    SUSPENDED  the reader does not read (``slow_reader="pause"``)    released
    GRAMMAR    the grammar is being compiled                         kept
    ADAPTER    the adapter is read, copied, or waits for a slot      (it has none yet)

PREFIX and ADAPTER belong to admission. PREFIX opens by itself when the other request has computed the pages or has
ended. ADAPTER is opened by ``Requests.requeue``. The other gates are closed and opened by ``Requests.close_gate`` and
``open_gate``.

While a gate is closed, the request stays

    waiting   in the queue for PREFIX. For any other gate it leaves the queue, and returns to its old position later.
    running   with its pages and its rank, but without rows. If it is preempted, or if the gate is SUSPENDED, it loses
              its pages and waits outside the queue.
"""

from __future__ import annotations

from enum import Enum


class Gate(Enum):
    """A reason to wait. See the module docstring."""

    PREFIX = 0
    SUSPENDED = 1
    GRAMMAR = 2
    ADAPTER = 3

    @property
    def keeps_pages(self) -> bool:
        """Whether a running request keeps its pages while this gate is closed."""
        return self is not Gate.SUSPENDED
