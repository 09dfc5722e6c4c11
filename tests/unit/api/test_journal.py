"""The files of a job contain each row exactly once, even if the program is killed at any time."""

from __future__ import annotations

import errno
import os
from dataclasses import make_dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.api.journal import SUFFIX, Journal, as_json, openai_id

PARAMETERS: dict[str, object] = {"model": "a", "sampling_params": {"temperature": 0.5}}


def add(journal: Journal, index: int, text: str = "") -> None:
    """Write the row of an item like a job."""
    journal.record_item(index, b"item %d" % index)
    journal.append(index, {"index": index, "text": text or f"text {index}"})


def rows(path: Path) -> list[int]:
    return [msgspec.json.decode(line)["index"] for line in path.read_bytes().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def write(path: Path, *indices: int, num_items: int = 0) -> None:
    journal = Journal(path, PARAMETERS)
    for index in range(num_items):
        journal.record_item(index, b"item %d" % index)
    for index in indices:
        add(journal, index)
    journal.close()


@given(
    order=st.permutations(range(6)),
    num_written=st.integers(0, 6),
    cut=st.integers(0, 200),
    lost_digests=st.integers(0, 60),
)
def test_after_any_loss_at_the_ends_of_the_files_each_row_is_written_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], num_written: int, cut: int, lost_digests: int
) -> None:
    path = tmp_path_factory.mktemp("job") / "rows.jsonl"
    write(path, *order[:num_written])
    complete = path.read_bytes()
    kept = complete[: max(0, len(complete) - cut)]
    path.write_bytes(kept)
    header = (path.parent / (path.name + SUFFIX)).read_bytes()
    if kept:  # otherwise a journal without its first line begins a new job
        start = header.index(b"\n") + 1
        (path.parent / (path.name + SUFFIX)).write_bytes(header[: max(start, len(header) - lost_digests)])
    journal = Journal(path, PARAMETERS)
    known = rows(path)
    assert known == order[: kept.count(b"\n")]
    for index in range(6):
        journal.record_item(index, b"item %d" % index)
        if journal.is_done(index):
            assert journal.read(index)["text"] == f"text {index}"
        else:
            add(journal, index)
    journal.check_end(6)
    journal.close()
    assert sorted(rows(path)) == list(range(6))


def test_rows_that_end_in_another_order_are_read_in_order(path: Path) -> None:
    write(path, 2, 0, 3, 1)
    journal = Journal(path, PARAMETERS)
    assert [journal.read(index)["text"] for index in range(4)] == [f"text {index}" for index in range(4)]
    journal.close()


def test_rows_in_the_form_of_openai_have_their_index_in_the_id(path: Path) -> None:
    journal = Journal(path, PARAMETERS)
    journal.append(3, {"id": openai_id(3), "custom_id": "mine", "response": None})
    journal.close()
    again = Journal(path, PARAMETERS)
    assert [again.is_done(index) for index in range(5)] == [False, False, False, True, False]
    again.close()


def test_other_parameters_are_refused_and_named(path: Path) -> None:
    write(path, 0)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r'sampling_params was \{"temperature":0\.5\} and is \{"temperature":1\}'):
        Journal(path, {**PARAMETERS, "sampling_params": {"temperature": 1}})
    with pytest.raises(ValueError, match="options was null and is"):
        Journal(path, {**PARAMETERS, "options": {}})
    assert path.read_bytes() == before
    Journal(path, PARAMETERS).close()


def test_parameters_are_compared_as_json(path: Path) -> None:
    Journal(path, {"temperature": 1}).close()
    with pytest.raises(ValueError, match=r"temperature was 1 and is 1\.0"):
        Journal(path, {"temperature": 1.0})


def test_another_item_is_refused_even_if_it_has_no_row_yet(path: Path) -> None:
    write(path, 1, num_items=3)
    journal = Journal(path, PARAMETERS)
    for index in (0, 1, 2):
        with pytest.raises(ValueError, match=f"item {index} is not the item"):
            journal.record_item(index, b"another item")
        journal.record_item(index, b"item %d" % index)
    journal.record_item(3, b"any")
    journal.close()


def test_an_input_that_ends_too_early_is_refused(path: Path) -> None:
    write(path, 0, 4)
    journal = Journal(path, PARAMETERS)
    journal.check_end(5)
    with pytest.raises(ValueError, match="has 4 items, and .* has the row 4"):
        journal.check_end(4)
    journal.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"index": 0}\n{"text": "a"}\n{"index": 1}\n', "line 2 of .* is not a row"),
        (b'not JSON\n{"index": 1}\n', "line 1 of .* is not a row"),
        (b'{"index": 1}\n{"index": 1}\n', "line 2 of .* repeats the row 1"),
    ],
)
def test_a_changed_file_is_refused_and_kept(path: Path, content: bytes, message: str) -> None:
    write(path, 0)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Journal(path, PARAMETERS)
    assert path.read_bytes() == content


def test_incomplete_row_is_removed(path: Path) -> None:
    write(path, 0, 1)
    complete = path.read_bytes()
    for rest in (b'{"index": 2, "te', b'{"index": 2}', b"\0" * 40, b'{"index": 2, "text"\n'):
        path.write_bytes(complete + rest)
        Journal(path, PARAMETERS).close()
        assert path.read_bytes() == complete


def test_file_of_another_program_is_refused(path: Path) -> None:
    path.write_text('{"index": 0}\n')
    with pytest.raises(ValueError, match=r"exists, but not its journal .*rows\.jsonl\.journal"):
        Journal(path, PARAMETERS)
    assert not Path(f"{path}{SUFFIX}").exists()


@pytest.mark.parametrize("content", [b"", b'{"model'])
def test_job_killed_at_its_start_starts_again(path: Path, content: bytes) -> None:
    Path(f"{path}{SUFFIX}").write_bytes(content)
    write(path, 0)
    assert rows(path) == [0]


def test_a_row_that_does_not_fit_on_the_disk_leaves_no_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, write_all, is_full = Journal(path, PARAMETERS), os.write, True

    def write_some(file: int, data: memoryview) -> int:
        nonlocal is_full
        if not is_full:
            return write_all(file, data)
        if len(data) < 15:
            is_full = False
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_all(file, data[:10])

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(OSError, match="No space left"):
        journal.append(0, {"index": 0, "text": "a" * 10})
    assert not is_full
    journal.append(1, {"index": 1})
    journal.close()
    assert path.read_bytes() == b'{"index":1}\n'


def test_two_writers_are_refused(path: Path) -> None:
    journal = Journal(path, PARAMETERS)
    with pytest.raises(BlockingIOError, match="another process is writing"):
        Journal(path, PARAMETERS)
    journal.close()
    Journal(path, PARAMETERS).close()


def test_equal_items_have_equal_json_and_other_values_are_refused() -> None:
    assert as_json({"b": 1, "a": Path("x")}, "item 0") == as_json({"a": "x", "b": 1}, "item 0")
    assert as_json(np.array([1, 2]), "item 0") == b"[1,2]"
    one, two = (make_dataclass("Person", [("name", kind)]) for kind in (str, int))
    assert as_json(one, "item 0") != as_json(two, "item 0"), "a class with other fields is another schema"
    with pytest.raises(TypeError, match="item 7 of a job .* must consist of JSON values: object is not a JSON type"):
        as_json({"image_data": object()}, "item 7")
