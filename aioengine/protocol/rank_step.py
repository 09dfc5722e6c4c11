"""The messages from rank 0, in the scheduler process, to the other ranks."""

from __future__ import annotations

from msgspec import Struct


class RankStep(Struct, tag="rank_step", array_like=True, gc=False):
    """A step of rank 0 that the other ranks compute too.

    num_collected: number of steps to collect before this one is launched. plan: the ``StepPlan`` in msgpack; empty
    to collect only.
    """

    num_collected: int
    plan: bytes


class RankAdapter(Struct, tag="rank_adapter", array_like=True, gc=False):
    """A LoRA adapter that all ranks copy into a slot.

    slot: counted from 1. number: of its copy in host memory. dropped: numbers of copies that are not used any more.
    adapter: the ``Adapter`` in msgpack.
    """

    slot: int
    number: int
    dropped: list[int]
    adapter: bytes
