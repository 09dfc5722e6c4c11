"""First come, first served. Each level of priority counts as an arrival ten seconds earlier."""

from __future__ import annotations

from aioengine.scheduler.policies._base import Policy

PLUGIN = Policy
