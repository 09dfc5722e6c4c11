"""The stage for Ray Data: rows in, rows out, and no row is lost with a node."""

from __future__ import annotations

from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest

if find_spec("ray") is None:
    pytest.skip("needs the extra ray: pip install 'aioengine[ray]'", allow_module_level=True)

import ray
import ray.data

from aioengine.ray import build_processor
from tests.kit.pages import GUIDES, blocks
from tests.processes.ray_kit import add_node

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray warns of its own settings
]

ARGUMENTS = {"device": "cpu", "max_total_tokens": 4096}
FRANCE = "The capital of France is"
START_S = 120


@pytest.fixture(autouse=True)
def context(cluster: Cluster) -> ray.data.DataContext:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.wait_for_min_actors_s = START_S  # all engines start before the first row
    return context


def test_rows_get_answers_or_errors() -> None:
    rows: list[dict[str, Any]] = [
        {"id": 0, "prompt": FRANCE},
        {"id": 1, "prompt": "word " * 10_000},
        {"id": 2, "prompt": FRANCE, "sampling_params": {"max_new_tokens": 1, "temperature": 0}},
        {"id": 3, "messages": [{"role": "user", "content": "Hello!"}]},
        {"id": 4},
    ]
    process = build_processor(ARGUMENTS, {"temperature": 0, "max_new_tokens": 2})
    answers = {row["id"]: row for row in process(ray.data.from_items(rows)).take_all()}
    assert [answers[number]["text"] for number in (0, 2)] == [" Paris.", " Paris"]
    assert [answers[number]["error"] for number in (0, 2, 3)] == [None] * 3
    assert answers[0]["prompt"] == FRANCE
    assert len(answers[0]["output_ids"]) == 2
    assert answers[3]["finish_reason"] in {"stop", "length"}
    assert answers[1]["text"] is answers[1]["output_ids"] is answers[1]["finish_reason"] is None
    assert answers[1]["error"].startswith("RequestTooLargeError: ")
    assert "ValueError: " in answers[4]["error"]


def test_wrong_arguments_of_the_engine_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="unknown argument 'tp_sizes'"):
        build_processor({"tp_sizes": 2})


def test_code_of_the_guide_runs() -> None:
    (block,) = (block for block in blocks((GUIDES / "ray.md").read_text()) if block.language == "python")
    with redirect_stdout(StringIO()) as printed:
        exec(block.code, {})
    assert printed.getvalue() == block.output


@pytest.mark.slow
def test_killed_node_costs_no_row(cluster: Cluster) -> None:
    blocker = ray.remote(num_cpus=1)(Blocker).remote()  # the first node has resources for one engine
    ray.get(blocker.wait.remote())
    second = add_node(cluster, 1)
    rows = [{"id": number, "prompt": FRANCE} for number in range(60)]
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    process = build_processor(ARGUMENTS, params, concurrency=2, batch_size=2)
    dataset = process(ray.data.from_items(rows, override_num_blocks=30))
    answers: list[dict[str, Any]] = []
    for answer in dataset.iter_rows():
        answers.append(answer)
        if len(answers) == 10:
            cluster.remove_node(second, allow_graceful=False)
    assert sorted(answer["id"] for answer in answers) == list(range(60))
    assert len({answer["text"] for answer in answers}) == 1
    assert {answer["error"] for answer in answers} == {None}
    ray.kill(blocker)


class Blocker:
    """Occupies a CPU of the cluster."""

    def wait(self) -> None:
        """Return when it is placed."""
