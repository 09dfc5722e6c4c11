"""Priority first: each level counts as an arrival ten minutes earlier."""

from __future__ import annotations

from aioengine.scheduler.policies._base import Policy


class PriorityPolicy(Policy):
    """The order of ``Policy``, in which a level of priority counts more than with ``fcfs``."""

    head_start_s = 600.0


PLUGIN = PriorityPolicy
