"""The places of the replicas of an engine in a Ray cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from msgspec.structs import replace
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aioengine.errors import EngineStartupError
from aioengine.settings import machine
from aioengine.settings.config import EngineConfig, ModelConfig
from aioengine.settings.machine import DeviceFacts
from aioengine.supervision.launchers._ray_host import ReplicaHost

_DEVICE_FACTS_S: Final = 60.0
_CPUS: Final = 1.0
"""CPUs that Ray counts for a replica, so that several replicas may be on one node."""


class RayPlaces:
    """A placement group with one bundle per replica, on as many nodes as possible.

    Attributes:
        address: of this machine, for the other nodes.
        models: the model, and the draft model if there is one; empty: the replicas need no files.
        num_replicas: number of places. timeout_s: of the start of a replica.
    """

    def __init__(
        self, num_replicas: int, *, num_gpus: int = 0, models: Sequence[ModelConfig] = (), timeout_s: float = 600.0
    ) -> None:
        """Reserve the places. Blocks. num_gpus: of each replica.

        Raises:
            EngineStartupError: the cluster has no place for a replica.
        """
        self.models = models
        self.num_replicas = num_replicas
        self.timeout_s = timeout_s
        self.address = get_node_ip_address()
        self._num_gpus = num_gpus
        self._left: set[int] = set()
        bundle = {"CPU": _CPUS, "GPU": float(num_gpus)} if num_gpus else {"CPU": _CPUS}
        self._group = placement_group([bundle] * num_replicas, strategy="SPREAD")
        if not self._group.wait(timeout_s):
            self.remove()
            raise EngineStartupError(
                f"the Ray cluster has no place for {num_replicas} x ({_described(bundle)}) within {timeout_s:g} "
                f"seconds (startup_timeout); it has {_described(ray.cluster_resources())}, of which "
                f"{_described(ray.available_resources())} are free"
            )
        nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        self._nodes = [nodes[number] for number in range(num_replicas)]

    @classmethod
    def reserve(cls, config: EngineConfig) -> RayPlaces:
        """Connect to the Ray cluster, or start one on this machine, and reserve places for the replicas. Blocks.

        Raises:
            EngineStartupError: the cluster cannot be reached, or has no place for a replica.
        """
        if not ray.is_initialized():
            try:
                ray.init(log_to_driver=False, logging_level="error")
            except (OSError, RuntimeError) as error:
                raise EngineStartupError(f"the Ray cluster cannot be reached: {error}") from error
        device = config.device
        is_on_gpu = device.name == "cuda" or (device.name == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        return cls(
            config.supervision.num_replicas,
            num_gpus=device.tp_size if is_on_gpu else 0,
            models=[model for model in (config.model, config.draft_model) if model is not None],
            timeout_s=config.supervision.startup_timeout_s,
        )

    def device_facts(self) -> DeviceFacts:
        """Return the facts about the machine of the first replica, as the replica sees them. Blocks."""
        facts = ray.remote(machine.device_facts).options(**self._options(0)).remote()
        found: DeviceFacts = ray.get(facts, timeout=_DEVICE_FACTS_S)
        return found

    def config_of_a_node(self, config: EngineConfig) -> EngineConfig:
        """Return the config of a node: its replicas are those that share cores or visible GPUs."""
        num_replicas = 1 if self._num_gpus else max(Counter(self._nodes).values())
        return replace(config, supervision=replace(config.supervision, num_replicas=num_replicas))

    def index_on_node(self, number: int) -> int:
        """Return the index of a replica among the replicas that share its cores or its visible GPUs."""
        return 0 if self._num_gpus else self._nodes[:number].count(self._nodes[number])

    def make_host(self, number: int) -> Any:
        """Start an actor at the place of a replica, without waiting for it. Return its handle."""
        return ray.remote(ReplicaHost).options(**self._options(number)).remote()

    def remove(self) -> None:
        """Give up all places."""
        if ray.is_initialized():  # at the exit of the program, Ray may have ended before the engine
            remove_placement_group(self._group)

    def leave(self, number: int) -> None:
        """Record that a replica has ended. After the last one, the group is removed. May be repeated."""
        self._left.add(number)
        if len(self._left) == self.num_replicas:
            self.remove()

    def _options(self, number: int) -> dict[str, Any]:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        return {"num_cpus": _CPUS, "num_gpus": self._num_gpus, "scheduling_strategy": place}


def _described(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"
