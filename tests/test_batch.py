"""``aioengine batch`` answers each row of a file exactly once, even if the program is killed at any time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine.cli import batch, main
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.testing.fake_runner import HIDDEN_SIZE
from tests.kit.source import ROOT

ANSWERS = {"": "one two three"}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the program in this process, in an empty folder, with a fake engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batch, "AsyncEngine", type("", (), {"from_config": lambda _: fake_async_engine(ANSWERS)}))

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        status = main(["batch", *argv])
        return subprocess.CompletedProcess(argv, status, *capsys.readouterr())

    return run


def rows(path: str | Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a file. They must be complete and different."""
    parsed = [json.loads(line) for line in Path(path).read_bytes().splitlines()]
    indices = [row["index"] for row in parsed]
    assert len(set(indices)) == len(indices)
    return dict(zip(indices, parsed, strict=True))


def write(path: str, *items: object) -> None:
    lines = [item if isinstance(item, str) and item.startswith("!") else json.dumps(item) for item in items]
    Path(path).write_text("".join(line.removeprefix("!") + "\n" for line in lines))


def test_each_row_has_the_answer_or_the_error_of_its_line(run: Run) -> None:
    write(
        "in",
        "a",
        {"prompt": "b", "sampling_params": {"max_new_tokens": 3}, "custom_id": "mine"},
        {"messages": [{"role": "user", "content": "c"}]},
        "!",
        [97, 98],
        "!not JSON",
        "!7",
        {"prompt": "d", "sampling_params": {"temperature": 9}, "custom_id": 5},
        {"prompt": "x" * 5000},
    )
    done = run("in", "out", "--max-new-tokens", "7")
    assert done.returncode == 0
    assert done.stderr == "aioengine: rows with an error instead of an answer: 4\n"
    out = rows("out")
    assert sorted(out) == list(range(8))
    texts = {index: row["text"] for index, row in out.items() if "text" in row}
    assert texts == {0: "one two", 1: "one", 2: "one two", 3: "one two"}
    assert out[1]["custom_id"] == "mine"
    assert out[6]["custom_id"] == 5
    assert out[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 7}
    messages = {index: row["error"]["message"] for index, row in out.items() if "error" in row}
    assert sorted(messages) == [4, 5, 6, 7]
    assert "the line must be a JSON text" in messages[4]
    assert "temperature must be" in messages[6]
    assert out[7]["error"]["type"] == "RequestTooLargeError"


def test_resuming_a_finished_job_changes_nothing(run: Run) -> None:
    write("in", *"abcde")
    assert run("in", "out").returncode == 0
    before = Path("out").read_bytes(), Path("out.journal").read_bytes()
    assert run("in", "out", "--resume").returncode == 0
    assert (Path("out").read_bytes(), Path("out.journal").read_bytes()) == before


@pytest.mark.parametrize("name", ["out", "out.journal"])
def test_existing_files_are_refused_without_resume(run: Run, name: str) -> None:
    write("in", "a")
    Path(name).write_text("precious")
    done = run("in", "out")
    assert done.returncode == 2
    assert done.stderr == f"aioengine: {name} exists; continue its job with --resume, or choose another file\n"
    assert Path(name).read_text() == "precious"


def test_resuming_with_changed_input_or_parameters_is_refused(run: Run) -> None:
    write("in", "a", "b")
    write("other", "a", "c")
    write("shorter", "a")
    assert run("in", "out").returncode == 0
    before = Path("out").read_bytes()
    for argv, message in (
        (("other", "out"), "item 1 is not the item that"),
        (("shorter", "out"), "the input has 1 items"),
        (("in", "out", "--temperature", "1"), 'sampling_params was {"temperature":0.0} and is {"temperature":1.0}'),
    ):
        done = run(*argv, "--resume")
        assert done.returncode == 1
        assert message in done.stderr
    assert Path("out").read_bytes() == before


def test_job_continues_if_rows_were_appended_to_its_input(run: Run) -> None:
    write("in", "a", "b")
    assert run("in", "out").returncode == 0
    before = Path("out").read_bytes()
    write("in", "a", "b", "c")
    assert run("in", "out", "--resume").returncode == 0
    assert Path("out").read_bytes().startswith(before)
    assert sorted(rows("out")) == [0, 1, 2]


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (("missing", "out"), 1, "No such file"),
        (("in", "missing/out"), 1, "No such file"),
        (("in", "in"), 2, "their own input"),
        (("in", "-", "--resume"), 2, "--resume needs a file"),
        (("in", "out", "--window", "0"), 2, "--window must be"),
        (("in", "out", "--temperature", "9"), 2, "temperature must be"),
    ],
)
def test_wrong_command_lines_are_refused(run: Run, argv: tuple[str, ...], status: int, message: str) -> None:
    write("in", "a")
    done = run(*argv)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert not Path("out").exists()


def test_rows_go_to_standard_output(run: Run) -> None:
    write("in", "a", "b")
    done = run("in", "-")
    assert sorted(json.loads(line)["index"] for line in done.stdout.splitlines()) == [0, 1]
    assert sorted(path.name for path in Path().iterdir()) == ["in"]


@pytest.mark.parametrize("is_file", [True, False])
def test_rows_come_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch, is_file: bool) -> None:
    write("in", *"abcdef")
    reading, writing = os.pipe()
    os.write(writing, Path("in").read_bytes())
    os.close(writing)
    with Path("in").open() if is_file else os.fdopen(reading) as source:
        monkeypatch.setattr(sys, "stdin", source)
        assert run("-", "out", "--window", "2").returncode == 0
    if is_file:
        os.close(reading)
    assert sorted(rows("out")) == list(range(6))


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}


def test_openai_rows_have_the_answers_of_the_server(run: Run) -> None:
    def row(body: object, url: str = "/v1/chat/completions", **more: object) -> dict[str, object]:
        return {"custom_id": f"id of {url}", "method": "POST", "url": url, "body": body, **more}

    write(
        "in",
        row({**CHAT, "model": "mine"}),
        row({"model": "mine", "prompt": "a", "n": 2, "max_tokens": 3}, "/v1/completions"),
        row({**CHAT, "temperature": 9}),
        row({**CHAT, "model": "another"}),
        row({**CHAT, "stream": True}),
        row(CHAT, method="GET"),
        row(CHAT, "http://elsewhere/v1"),
        row(CHAT, "/v1/\x00"),
        row(CHAT, "/v1/nowhere"),
        row("a"),
        row({"prompt": "\ud800"}, "/v1/completions"),
        "in our own form",
        row({"input": "a"}, "/v1/embeddings"),
    )
    done = run("in", "out", "--served-model-name", "mine")
    assert done.stderr == "aioengine: rows with an error instead of an answer: 9\n"
    lines = [json.loads(line) for line in Path("out").read_bytes().splitlines()]
    entries = {entry.get("id", "own"): entry for entry in lines}
    assert entries["own"]["index"] == 11
    first = entries["batch_req_0"]
    assert (first["custom_id"], first["error"]) == ("id of /v1/chat/completions", None)
    assert first["response"]["status_code"] == 200
    assert first["response"]["request_id"]
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "one t"
    texts = [choice["text"] for choice in entries["batch_req_1"]["response"]["body"]["choices"]]
    assert texts == ["one", "one"]
    statuses = {number: entries[f"batch_req_{number}"]["response"]["status_code"] for number in (2, 3, 8)}
    assert statuses == {2: 400, 3: 404, 8: 404}
    assert len(entries["batch_req_12"]["response"]["body"]["data"][0]["embedding"]) == HIDDEN_SIZE
    refused = {number: entries[f"batch_req_{number}"]["error"]["message"] for number in (4, 5, 6, 7, 9)}
    assert "leave out stream" in refused[4]
    assert "method must be POST" in refused[5]
    assert "url must be a path" in refused[6]
    assert "body must be an object" in refused[9]
    before = Path("out").read_bytes()
    assert run("in", "out", "--served-model-name", "mine", "--resume").returncode == 0
    assert Path("out").read_bytes() == before


def test_openai_rows_wait_while_the_engine_is_overloaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = type("", (), {"from_config": lambda _: fake_async_engine(ANSWERS, max_running=1, max_queued=1)})
    monkeypatch.setattr(batch, "AsyncEngine", narrow)
    write("in", *[{"url": "/v1/chat/completions", "body": CHAT}] * 5)
    assert run("in", "out").stderr == ""
    assert len(Path("out").read_bytes().splitlines()) == 5


def test_row_that_an_endpoint_cannot_handle_has_status_500(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: object) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("aioengine.openai.router.chat_completions", broken)
    write("in", {"url": "/v1/chat/completions", "body": CHAT}, {"url": "/v1/completions", "body": {"prompt": "a"}})
    assert run("in", "out").stderr == "aioengine: rows with an error instead of an answer: 1\n"
    responses = {entry["id"]: entry["response"] for entry in map(json.loads, Path("out").read_bytes().splitlines())}
    assert [responses[f"batch_req_{number}"]["status_code"] for number in (0, 1)] == [500, 200]
    assert responses["batch_req_0"]["body"] == {"error": {"message": "Internal Server Error"}}


def test_missing_packages_end_a_job_with_openai_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    # other tests may have imported them
    for name in ("aioengine.cli.openai_rows", "aioengine.openai", "aioengine.openai.router"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    write("in", {"url": "/v1/chat/completions", "body": CHAT})
    done = run("in", "out")
    assert done.returncode == 1
    assert "need the package fastapi: pip install 'aioengine[server]'" in done.stderr


def test_progress_bar_counts_the_rows_of_the_file(run: Run) -> None:
    write("in", "a", "!", "b")
    shown = run("in", "out", "--progress").stderr
    assert "2/2" in shown
    assert "tokens/s" in shown


# ---------------------------------------------------------------- killed programs

NUM_ROWS, WINDOW = 60, 8


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    argv = ["batch", str(folder / "in"), str(folder / "out"), "--window", str(WINDOW), "--max-new-tokens", "12", *more]
    command = [sys.executable, "-m", "tests.kit.fake_batch", str(folder / "log"), *argv]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_and_resume(folder: Path, num_kills: int, seed: int) -> None:
    draw = random.Random(seed)
    (folder / "in").write_text("".join(f'"row {index}"\n' for index in range(NUM_ROWS)))
    num_bytes_of_row, num_killed = 400, 0
    for number in range(num_kills):
        # The program is killed at a random size of the file, so this also works on slow machines. The size may be 0.
        num_bytes = size(folder / "out") + draw.randrange(num_bytes_of_row * NUM_ROWS // max(4, num_kills))
        is_early = draw.random() < 0.1
        program = start(folder, *(["--resume"] if number else []))
        while program.poll() is None and size(folder / "out") < num_bytes:
            if is_early and size(folder / "out.journal"):
                break
            time.sleep(0.001)
        if program.poll() is None:
            time.sleep(draw.random() / 500)
            program.send_signal(signal.SIGKILL)
            num_killed += 1
        program.communicate(timeout=60)
    program = start(folder, "--resume")
    _, errors = program.communicate(timeout=120)
    assert (program.returncode, errors) == (0, b"")
    assert sorted(rows(folder / "out")) == list(range(NUM_ROWS))
    assert num_killed >= num_kills // 2
    log = (folder / "log").read_text().splitlines()
    assert NUM_ROWS <= len(log) <= NUM_ROWS + num_killed * WINDOW


@pytest.mark.process
def test_killed_job_continues_and_writes_each_row_once(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, 3, seed=1)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("seed", range(5))
def test_jobs_killed_fifty_times_write_each_row_once(tmp_path: Path, seed: int) -> None:
    kill_and_resume(tmp_path, 10, seed=seed + 10)


@pytest.mark.process
def test_ctrl_c_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("".join(f'"row {index}"\n' for index in range(NUM_ROWS)))
    program = start(tmp_path)
    while size(tmp_path / "out") < 400 and program.poll() is None:
        time.sleep(0.001)
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert (program.returncode, errors) == (130, b"")
    assert 0 < len(rows(tmp_path / "out")) < NUM_ROWS
