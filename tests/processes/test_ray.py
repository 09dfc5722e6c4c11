"""Replicas on the nodes of a Ray cluster: two nodes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

if find_spec("ray") is None:
    pytest.skip("needs the extra ray: pip install 'aioengine[ray]'", allow_module_level=True)

import ray

from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineStartupError
from aioengine.protocol.codec import UnencodableError
from aioengine.protocol.messages import Limits, Media, Sampling, Submit, TextRules
from aioengine.settings.config import SupervisionConfig
from aioengine.supervision.fleet import Fleet
from aioengine.supervision.launchers import _ray_launcher
from aioengine.supervision.launchers._ray_launcher import RayLauncher, with_images
from aioengine.supervision.launchers._ray_places import RayPlaces
from aioengine.supervision.supervisor import Supervisor
from aioengine.testing.fake_engine import FakeSetup
from tests.kit.waiting import until
from tests.processes.ray_kit import add_node
from tests.processes.restart_kit import ANSWERS, ROLES, ask_all, undisturbed, until_idle, until_restarted

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.api.signatures import EngineArguments
    from aioengine.frontend.engine_parts import Blueprint
    from aioengine.supervision.supervisor import Events

pytestmark = [pytest.mark.process]

SETUP = FakeSetup(answers=ANSWERS, step_time_s=0.003)


@pytest.fixture
def second_node(cluster: Any) -> Iterator[Any]:
    second = add_node(cluster, 1)
    yield second
    if second in cluster.worker_nodes:
        cluster.remove_node(second)


def ray_engine(num_replicas: int, max_restarts: int = 3) -> AsyncEngine:
    """Return an engine whose replicas are on the nodes of the cluster."""
    limits = SupervisionConfig(max_restarts=max_restarts, stall_timeout_s=60.0, startup_timeout_s=60.0)

    def blueprint() -> Blueprint:
        places = RayPlaces(num_replicas, timeout_s=60.0)

        def make_replica(number: int, events: Events) -> Supervisor:
            launcher, leave = partial(RayLauncher, places, number), partial(places.leave, number)
            return Supervisor(SETUP.settings(), limits, launcher=launcher, events=events, on_end=leave)

        makers = [partial(make_replica, number) for number in range(num_replicas)]
        return msgspec.structs.replace(SETUP.blueprint(), make_processes=lambda events: Fleet(makers, events))

    return AsyncEngine.from_blueprint(blueprint)


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0)


@pytest.mark.parametrize("role", ROLES)
async def test_killed_process_is_replaced_on_its_node(cluster: Any, role: str) -> None:
    async with ray_engine(1) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 50)
        pids = {process["role"]: process["pid"] for process in engine.health()["processes"]}
        os.kill(pids[role], signal.SIGKILL)
        assert await asking == await undisturbed(has_answers=True)
        await until_restarted(engine, 1)
        await until_idle(engine)
    await until(lambda: free_cpus() == 2)


async def test_streams_of_a_killed_node_continue_in_the_other_replica(cluster: Any, second_node: Any) -> None:
    async with ray_engine(2) as engine:
        assert [process["role"] for process in engine.health()["processes"]] == ROLES * 2
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 50)
        await asyncio.to_thread(cluster.remove_node, second_node, allow_graceful=False)
        assert await asking == await undisturbed(has_answers=True)
        await until(lambda: len(engine.health()["processes"]) == 2)
        assert await ask_all(engine, stream=False) == await undisturbed(has_answers=True)
        await until_idle(engine)


async def test_replicas_of_a_model_answer_and_keep_deadlines(cluster: Any) -> None:
    arguments: EngineArguments = {"device": "cpu", "max_total_tokens": 4096, "load_balance_method": "round_robin"}
    async with AsyncEngine(**arguments, dp_size=2, executor="ray") as engine:
        prompts = ["The capital of France is"] * 2
        answers = await engine.async_generate(prompts, {"temperature": 0, "max_new_tokens": 2}, timeout=60)
        assert answers["text"] == [" Paris."] * 2
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
        timings = answers[0]["meta_info"]["timings"]
        assert 0 <= timings["queue_s"] <= timings["total_s"] < 60
        late = await engine.async_generate(prompts[0], {"ignore_eos": True, "max_new_tokens": 1000}, timeout=0.2)
        assert late["meta_info"]["finish_reason"]["type"] == "deadline"


def test_cluster_without_enough_resources_is_named(cluster: Any) -> None:
    with pytest.raises(
        EngineStartupError, match=r"no place for 99 x \(1 CPU, 0 GPU\) within 0.1 seconds .* it has \d+ CPU"
    ):
        RayPlaces(99, timeout_s=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"max_total_tokens": 8}, "max_total_tokens must be at least one page"), ({"chat_template": "/no"}, "'/no'")],
)
async def test_refused_settings_free_their_places(cluster: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await AsyncEngine(executor="ray", device="cpu", **changes).start()
    await until(lambda: free_cpus() == 2)


def test_settings_of_one_machine_are_refused() -> None:
    with pytest.raises(ValueError, match="base_gpu_id=1 has no effect with executor='ray'"):
        AsyncEngine(executor="ray", base_gpu_id=1)
    with pytest.raises(ValueError, match="enable_weights_cpu_backup=True does not work with executor='ray'"):
        AsyncEngine(executor="ray", enable_weights_cpu_backup=True)


def test_images_are_sent_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "image"
    file.write_bytes(b"arrays")
    submit = Submit(1, [5], Sampling(seed=1), Limits(7), TextRules(), media=[Media(0, 1, 1, b"", str(file))])
    sent = with_images(submit)
    assert isinstance(sent, Submit)
    assert [media.data for media in sent.media] == [b"arrays"]
    assert submit.media[0].data == b""
    monkeypatch.setattr(_ray_launcher, "_MAX_IMAGE_BYTES", 5)
    with pytest.raises(UnencodableError, match="its prepared images take 6 bytes, and 5 can be sent"):
        with_images(submit)
    file.unlink()
    assert with_images(submit) is submit  # its request has ended
