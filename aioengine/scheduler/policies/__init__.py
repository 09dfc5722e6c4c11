"""Policies order the waiting requests. See ``Policy`` in ``_base``."""

from typing import Final

ALIASES: Final = {
    "fcfs": "_base:Policy",
    "longest_prefix": "_base:LongestPrefixPolicy",
    "priority": "_base:PriorityPolicy",
}
"""Policy -> "file:class"."""
