"""Pictures that are decoded into a preallocated file equal others."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from aioengine.media.service import picture_files
from aioengine.media.service.picture_files import MAX_SPARES, PictureFile, SpareFiles
from aioengine.media.service.worker import MediaWorker, load_processor
from aioengine.media.tokens._base import find_image_model
from aioengine.protocol.media import JobEnd, MediaOrders, Prepared, PrepareJob, Refused
from tests.kit.image_models import FAMILIES, write_image_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name are Linux's")

SIZE = (90, 57)
TURNED = 6


def drawing(mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    width, height = size
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


class World:
    """A worker that leaves the resize to the device."""

    def __init__(self, folder: Path) -> None:
        images = find_image_model(write_image_folder(folder / "model", FAMILIES["qwen2_vl"]))
        assert images is not None
        self.orders = MediaOrders(
            parent_pid=0,
            socket_fd=-1,
            processor=images.processor,
            settings=images.settings,
            options={},
            max_bytes=1 << 24,
            max_pixels=1 << 24,
            timeout_s=5.0,
            allows_private=False,
            num_workers=1,
            leaves_resizing=True,
        )
        self.worker = MediaWorker(self.orders, *load_processor(self.orders))
        self.folder = folder
        self.num_jobs = 0

    def prepare(self, data: bytes) -> tuple[JobEnd, Path]:
        self.num_jobs += 1
        source, made = self.folder / "source", self.folder / f"made{self.num_jobs}"
        source.write_bytes(data)
        job = PrepareJob(self.num_jobs, str(source), str(made))
        self.worker.accept(job)
        end = self.worker.do(job, lambda _: None)
        self.worker.spares.make()
        return end, made

    @property
    def spares(self) -> list[PictureFile]:
        return list(self.worker.spares._files)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize(
    ("data", "is_made_before"),
    [
        pytest.param(saved(drawing(), quality=85), True, id="JPEG"),
        pytest.param(saved(drawing(), quality=97, subsampling=0, progressive=True), True, id="progressive JPEG"),
        pytest.param(saved(drawing(), "MPO"), True, id="MPO"),
        pytest.param(saved(drawing(), exif=oriented(1)), True, id="JPEG with EXIF data"),
        pytest.param(saved(drawing(), exif=oriented(TURNED)), False, id="JPEG that is turned"),
        pytest.param(saved(drawing("L")), False, id="gray JPEG"),
        pytest.param(saved(drawing("CMYK")), False, id="CMYK"),
        pytest.param(saved(drawing(), "PNG"), False, id="PNG"),
    ],
)
def test_preallocated_file_holds_same_bytes(world: World, data: bytes, is_made_before: bool) -> None:
    first, made = world.prepare(data)
    assert isinstance(first, Prepared)
    wanted = load_file(made)
    if not is_made_before:
        assert not world.spares, "none is made for a picture that does not suit"
    world.worker.spares.want(str(world.folder), 4 * SIZE[0] * SIZE[1])
    world.worker.spares.make()
    before = world.spares
    for _ in range(3):  # each in another file
        second, made = world.prepare(data)
        assert second == Prepared(world.num_jobs, first.shape, first.num_bytes)
        found = load_file(made)
        assert found.keys() == wanted.keys()
        colours = "picture" if "picture" in wanted else "pixels"
        assert np.array_equal(found[colours][..., :3], wanted[colours][..., :3])
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted.keys() - {colours})
        if is_made_before:
            assert np.array_equal(found["picture"][..., :3], np.asarray(Image.open(io.BytesIO(data))))
    assert (before[0] not in world.spares) == is_made_before


def test_resized_picture_is_decoded_into_preallocated_file(world: World) -> None:
    data = saved(drawing(size=(700, 520)))
    _, made = world.prepare(data)
    wanted = load_file(made)
    assert "pixels" in wanted
    assert not world.spares
    world.worker.spares.want(str(world.folder), 4 * 700 * 520)
    world.worker.spares.make()
    _, made = world.prepare(data)
    assert not world.spares
    found = load_file(made)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_smaller_picture_uses_part_of_a_file(world: World) -> None:
    world.prepare(saved(drawing()))
    small = saved(drawing(size=(64, 48)))
    [large] = world.spares
    _, made = world.prepare(small)
    assert large not in world.spares
    assert np.array_equal(load_file(made)["picture"][..., :3], np.asarray(Image.open(io.BytesIO(small))))
    assert made.stat().st_size < large.num_bytes + 8192
    world.prepare(saved(drawing()))
    assert [file.num_bytes for file in world.spares] == [4 * 64 * 48, 4 * SIZE[0] * SIZE[1]], "the small one is left"


def test_damaged_picture_leaves_no_file(world: World) -> None:
    data = saved(drawing())
    world.prepare(data)
    [spare] = world.spares
    end, made = world.prepare(data[: len(data) // 2])
    assert isinstance(end, Refused)
    assert "truncated" in end.reason
    assert not made.exists()
    assert spare not in world.spares, "it may hold a part of the picture"
    assert isinstance(world.prepare(data)[0], Prepared)


def test_file_is_written_without_proc(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("no /proc")

    data = saved(drawing())
    first, made = world.prepare(data)
    monkeypatch.setattr("os.link", refuse)
    second, again = world.prepare(data)
    assert isinstance(first, Prepared)
    assert isinstance(second, Prepared)
    assert second.num_bytes == first.num_bytes
    assert np.array_equal(load_file(again)["picture"][..., :3], load_file(made)["picture"][..., :3])


def test_no_preallocated_files_without_system_support(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert isinstance(world.prepare(saved(drawing()))[0], Prepared)
        assert not world.spares
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_number_of_spare_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spares = SpareFiles()

    def sizes(*wanted: int) -> list[int]:
        for size in wanted:
            spares.want(str(tmp_path), size)
        spares.make()
        return [file.num_bytes for file in spares._files]

    num_open = len(os.listdir("/proc/self/fd"))
    assert sizes(*range(1, MAX_SPARES + 3)) == list(range(3, MAX_SPARES + 3)), "the oldest ones go"
    assert len(os.listdir("/proc/self/fd")) <= num_open + 2 * MAX_SPARES
    taken = spares.take(4)
    assert taken is not None
    assert taken.num_bytes == 4
    assert spares.take(100) is None
    monkeypatch.setattr(picture_files, "MAX_SPARE_BYTES", 100)
    assert sizes(101, 60, 50) == [50]
    assert not os.listdir(tmp_path), "they have no names"
