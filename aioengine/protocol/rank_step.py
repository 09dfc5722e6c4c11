"""The message from rank 0, in the scheduler process, to the other ranks."""

from __future__ import annotations

from msgspec import Struct


class RankStep(Struct, tag="rank_step", array_like=True, gc=False):
    """A step of rank 0 that the other ranks compute too.

    num_collected: number of steps to collect before this one is launched. plan: the ``StepPlan`` in msgpack.
    """

    num_collected: int
    plan: bytes
