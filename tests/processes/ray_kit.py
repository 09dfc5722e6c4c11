"""A Ray cluster on this machine. Import it only in tests that need the extra ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import ray
from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024
NUM_TRIES: Final = 4
"""Ray's agents must start within 15 seconds. This limit is fixed, and a busy machine may exceed it."""


def add_node(cluster: Cluster, num_cpus: int) -> Any:
    """Start a node and return it."""
    add = partial(cluster.add_node, num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)
    for _ in range(NUM_TRIES - 1):
        with suppress(Exception):  # Ray raises no narrower class
            return add()
    return add()


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a cluster with one node of two CPUs, and connect this process to it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster()
    add_node(cluster, 2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()
