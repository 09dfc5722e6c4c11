"""Requests with adapters wait outside the queue, share no prefixes, and lose their slots with their pages."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import asdict, replace

from aioengine.model_files import adapter_folder
from aioengine.processes.adapter_loading import AdapterCopies, AdapterLoader
from aioengine.protocol.messages import LOAD_ADAPTER, UNLOAD_ADAPTER, Adapter, Control, FinishCode, Limits, Reply
from aioengine.scheduler.core import SchedulerCore
from aioengine.scheduler.request import Gate
from aioengine.scheduler.scheduler import Scheduler
from aioengine.testing.fake_runner import FakeAdapter, FakeRunner, read_fake_adapter
from tests.core.core_world import NO_EOS, WatchedRunner, World, random_requests, settings_of, submit_of
from tests.kit.fake_adapters import write_adapter
from tests.kit.fake_reference import reference_output

if TYPE_CHECKING:
    from aioengine.protocol.messages import StepOutput, Submit

NAMES = ("a", "b", "c", "d", "e")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: loaded(write_adapter(folder / name, seed), name, number)
        for number, (seed, name) in enumerate(enumerate(NAMES), 1)
    }


def loaded(folder: Path, name: str, number: int, *, is_pinned: bool = False) -> Adapter:
    return Adapter(number, name, str(folder), adapter_folder.fingerprint(folder), is_pinned)


@dataclass
class AdapterWorld(World):
    """A world whose runner applies adapters."""

    num_slots: int = 2
    copies: AdapterCopies = field(default_factory=lambda: AdapterCopies(None, 1 << 30))
    replies: dict[int, Reply] = field(default_factory=dict[int, Reply])

    def __post_init__(self) -> None:
        self.fake = FakeRunner(
            self.model, num_pages=self.num_pages, page_size=self.page_size, num_adapter_slots=self.num_slots
        )
        self.runner = WatchedRunner(self.fake, gives_one=True)
        self.scheduler = Scheduler(
            self.settings, num_pages=self.num_pages, page_size=self.page_size, num_adapter_slots=self.num_slots
        )
        self.core = SchedulerCore(self.scheduler, self.runner, self.settings.depth)
        self.adapters = AdapterLoader(self.fake.adapters, self.core.requests, self.copies)

    def step(self) -> StepOutput | None:
        self.adapters.wait(0.05)
        self.adapters.step()
        return super().step()

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work and not self.adapters.is_busy:
                return
            self.step()
        raise AssertionError("still at work")

    def control(self, name: str, adapter: Adapter) -> int:
        call_id = len(self.replies) + 100
        control = Control(call_id, name, asdict(adapter))
        self.adapters.control(control, lambda reply: self.replies.update({reply.call_id: reply}))
        return call_id

    def reference(self, uid: int) -> list[int]:
        submit = self.submitted[uid]
        adapter = 0 if submit.adapter is None else read_fake_adapter(submit.adapter.path).number
        return reference_output(submit.prompt_token_ids, submit.sampling, submit.limits, self.model, adapter=adapter)


def world_of(num_slots: int = 2, *, num_pages: int = 400, **changes: int) -> AdapterWorld:
    settings = settings_of(**{"chunk_tokens": 32, "max_running": 8, **changes})
    return AdapterWorld(settings, num_pages=num_pages, page_size=4, model=NO_EOS, num_slots=num_slots)


def with_adapter(submit: Submit, adapter: Adapter | None) -> Submit:
    return replace(submit, adapter=adapter)


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_of_several_adapters_and_of_the_base_are_computed_together(
    adapters: dict[str, Adapter], depth: int
) -> None:
    world = world_of(depth=depth)
    for uid, name in enumerate(("a", "", "b", "a", "")):
        world.submit(with_adapter(submit_of(uid, [1, 2, 3]), adapters.get(name)))
    world.run()
    world.check_all_over()
    assert len({tuple(output) for output in world.outputs.values()}) == 3
    assert max(len(plan.rows) for plan in world.runner.plans) == 5


def test_the_base_never_waits_for_a_slot(adapters: dict[str, Adapter]) -> None:
    world = world_of(1)
    world.submit(with_adapter(submit_of(0, [1], limits=Limits(max_new_tokens=50)), adapters["a"]))
    world.step()
    world.step()
    world.submit(with_adapter(submit_of(1, [1]), adapters["b"]), submit_of(2, [1]))
    while 2 not in world.ended:
        world.step()
    assert Gate.ADAPTER in world.core.requests.gated[1].gates
    assert 0 not in world.ended
    world.run()
    world.check_all_over()


def test_no_prefix_is_shared_between_adapters_loads_and_salts(adapters: dict[str, Adapter]) -> None:
    world = world_of(4)
    again = replace(adapters["a"], id=99)
    prompt = list(range(20))
    for uid, (adapter, salt) in enumerate(
        [(None, ""), (adapters["a"], ""), (adapters["b"], ""), (again, ""), (adapters["a"], "s"), (None, "s")]
    ):
        world.submit(replace(submit_of(uid, prompt), adapter=adapter, cache_salt=salt))
        world.run()
        assert world.opened[uid].first_token.num_cached == 0
    world.submit(with_adapter(submit_of(9, prompt), adapters["a"]))
    world.run()
    assert world.opened[9].first_token.num_cached == 16
    world.check_all_over()


def test_preempted_request_releases_its_slot_and_continues(adapters: dict[str, Adapter]) -> None:
    world = world_of(2, num_pages=24)
    limits = Limits(max_new_tokens=40)
    for uid in range(6):
        adapter = adapters[NAMES[uid % 5]]
        world.submit(with_adapter(submit_of(uid, [uid] * 9, limits=limits), adapter))
    world.run()
    assert world.preempted
    world.check_all_over()


def test_a_suspended_request_uses_no_slot(adapters: dict[str, Adapter]) -> None:
    world = world_of(1)
    world.submit(with_adapter(submit_of(0, [1], limits=Limits(max_new_tokens=30)), adapters["a"]))
    for _ in range(4):
        world.step()
    world.close_gate([0], Gate.SUSPENDED)
    world.submit(with_adapter(submit_of(1, [1]), adapters["b"]))
    while 1 not in world.ended:
        world.step()
    world.submit(with_adapter(submit_of(2, [1], limits=Limits(max_new_tokens=30)), adapters["c"]))
    world.step()
    world.close_gate([2], Gate.SUSPENDED)  # waiting, or just released
    world.open_gate([0], Gate.SUSPENDED)
    while 0 not in world.ended:
        world.step()
    world.open_gate([2], Gate.SUSPENDED)
    world.run()
    world.check_all_over()


def test_requests_that_end_while_they_wait_leave_the_queue(adapters: dict[str, Adapter]) -> None:
    world = world_of(1)
    for uid, name in enumerate("abc"):
        world.submit(with_adapter(submit_of(uid, [1]), adapters[name]))
    world.step()
    world.abort([1])
    world.submit(
        with_adapter(submit_of(3, [1], limits=Limits(max_new_tokens=9, deadlines={"total": 1.0})), adapters["d"])
    )
    world.run()
    assert world.ended[1].code is FinishCode.ABORT
    assert world.ended[3].code is FinishCode.DEADLINE
    world.check_all_over()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_over_many_adapters_lose_nothing(adapters: dict[str, Adapter], depth: int, seed: int) -> None:
    rng = random.Random(seed)
    world = world_of(1 + seed % 3, num_pages=80, depth=depth, max_running=6)
    for submit in random_requests(rng, count=60, max_prompt=20, max_output=12):
        name = rng.choice(("", *NAMES))
        world.submit(with_adapter(replace(submit, tenant=rng.choice(("", "x"))), adapters.get(name)))
        if rng.random() < 0.5:
            world.step()
        if rng.random() < 0.1:
            world.abort([rng.randrange(60)])
        if rng.random() < 0.1:
            uid = rng.randrange(60)
            world.close_gate([uid], Gate.SUSPENDED)
    world.open_gate(range(60), Gate.SUSPENDED)
    world.run()
    world.check_all_over()


def test_few_adapters_are_kept_in_memory_and_all_are_served(adapters: dict[str, Adapter]) -> None:
    world = world_of(1)
    world.copies._max_number = 1
    for uid in range(20):
        world.submit(with_adapter(submit_of(uid, [1], limits=Limits(max_new_tokens=2)), adapters[NAMES[uid % 5]]))
    while len(world.ended) < 20:
        world.step()
        assert len(world.copies) <= 1
    world.run()
    world.check_all_over()


def test_the_bytes_of_copies_are_bounded_once_they_are_placed(adapters: dict[str, Adapter]) -> None:
    world = world_of(2)
    world.copies._max_bytes = 1
    for uid, name in enumerate(("a", "b")):
        world.submit(with_adapter(submit_of(uid, [1]), adapters[name]))
    world.run()
    world.check_all_over()
    assert len(world.copies) == 1


def test_copies_are_kept_within_a_number_and_bytes() -> None:
    copies = AdapterCopies(None, 100)
    for number in range(4):
        copies.add((str(number),), FakeAdapter(number, 40))
        copies.make_space(0, ())
    assert [(str(number),) in copies for number in range(4)] == [False, False, True, True]
    assert copies.make_space(1, {("2",), ("3",)})
    copies.add(("4",), FakeAdapter(4, 40))
    assert not copies.make_space(1, {("2",), ("3",), ("4",)})
    copies.get(("2",))
    assert copies.make_space(1, {("3",)})
    assert ("2",) in copies
    assert ("4",) not in copies
    few = AdapterCopies(1, 10)
    few.add(("0",), FakeAdapter(0, 40))
    assert few.make_space(0, ())
    assert len(few) == 1, "one is kept, whatever its size"
    assert few.make_space(1, ())
    assert len(few) == 0


def test_an_unreadable_adapter_fails_only_its_requests(adapters: dict[str, Adapter], tmp_path: Path) -> None:
    world = world_of()
    wrong = loaded(write_adapter(tmp_path / "nan", value=float("nan")), "nan", 50)
    gone = loaded(write_adapter(tmp_path / "gone"), "gone", 51)
    changed = loaded(write_adapter(tmp_path / "changed"), "changed", 52)
    shutil.rmtree(tmp_path / "gone")
    write_adapter(tmp_path / "changed", 7, rank=4)
    for uid, adapter in enumerate((wrong, gone, changed, adapters["a"], wrong)):
        world.submit(with_adapter(submit_of(uid, [1]), adapter))
    world.run()
    for uid, words in ((0, "not finite"), (1, "was removed"), (2, "have changed"), (4, "finite")):
        assert world.ended[uid].code is FinishCode.FAILED
        assert world.ended[uid].stage == "adapter"
        assert words in world.ended[uid].message
    assert world.ended[3].code is FinishCode.LENGTH
    write_adapter(tmp_path / "gone")
    world.submit(with_adapter(submit_of(5, [1]), loaded(tmp_path / "gone", "gone", 51)))
    world.run()
    assert world.ended[5].code is FinishCode.LENGTH


def test_failed_copy_ends_the_waiting_requests(adapters: dict[str, Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    def place(slot: int, host: object) -> None:
        raise RuntimeError("out of memory")

    world = world_of()
    monkeypatch.setattr(world.fake.adapters, "place", place)
    world.submit(with_adapter(submit_of(0, [1]), adapters["a"]), submit_of(1, [1]))
    world.run()
    assert "out of memory" in world.ended[0].message
    monkeypatch.undo()
    world.submit(with_adapter(submit_of(2, [1]), adapters["a"]))
    world.run()
    world.check_all_over()


def test_loads_are_answered_after_the_read_and_pinned_loads_after_the_copy(
    adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    world = world_of()
    wrong = loaded(write_adapter(tmp_path / "nan", value=float("inf")), "nan", 50)
    pinned = replace(adapters["b"], is_pinned=True)
    calls = [world.control(LOAD_ADAPTER, adapter) for adapter in (adapters["a"],)]
    world.run()
    calls += [world.control(LOAD_ADAPTER, wrong)]
    world.run()
    calls += [world.control(LOAD_ADAPTER, pinned)]
    world.run()
    assert [world.replies[call].success for call in calls] == [True, False, True]
    assert "not finite" in world.replies[calls[1]].message
    slots = world.core.requests.adapters
    assert [slots.has((adapter.path, adapter.fingerprint)) for adapter in (adapters["a"], pinned)] == [False, True]
    for uid in range(3):
        world.submit(with_adapter(submit_of(uid, [1]), adapters["cde"[uid]]))
    world.run()
    assert slots.has((pinned.path, pinned.fingerprint))
    world.control(UNLOAD_ADAPTER, pinned)
    world.run()
    assert not slots.has((pinned.path, pinned.fingerprint))
    world.check_all_over()


def test_a_pinned_adapter_that_cannot_be_read_is_not_waited_for(adapters: dict[str, Adapter], tmp_path: Path) -> None:
    world = world_of()
    wrong = loaded(write_adapter(tmp_path / "nan", value=float("nan")), "nan", 50, is_pinned=True)
    call = world.control(LOAD_ADAPTER, wrong)
    world.run()
    assert not world.replies[call].success
    assert not world.core.requests.adapters.claims()


def test_a_pinned_adapter_that_can_be_read_again_is_pinned_again(adapters: dict[str, Adapter], tmp_path: Path) -> None:
    world = world_of()
    folder = write_adapter(tmp_path / "here", 7)
    pinned = loaded(folder, "pinned", 50, is_pinned=True)
    folder.rename(tmp_path / "away")
    call = world.control(LOAD_ADAPTER, pinned)
    world.run()
    assert not world.replies[call].success
    (tmp_path / "away").rename(folder)
    world.submit(with_adapter(submit_of(0, [1]), pinned))
    world.run()
    for uid in range(1, 6):
        world.submit(with_adapter(submit_of(uid, [1]), adapters["abcde"[uid - 1]]))
    world.run()
    slots = world.core.requests.adapters
    assert slots.has((pinned.path, pinned.fingerprint))
    world.control(UNLOAD_ADAPTER, pinned)
    world.run()
    assert not slots.has((pinned.path, pinned.fingerprint))
    world.check_all_over()
