"""The worker of the media process: jobs for pictures that the device resizes."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from safetensors.numpy import load_file

from aioengine.media.service.processors import load_processor
from aioengine.media.tokens._base import find_image_model
from aioengine.processes.media_process import MediaWorker
from aioengine.protocol.media import Cancelled, FetchJob, JobEnd, MediaOrders, PreparedImage, PrepareJob, Refused
from aioengine.settings.config import MediaConfig
from tests.kit.image_models import FAMILIES, write_image_folder
from tests.kit.pictures import file_of

SIZE = (90, 57)
TURNED = 6


def drawing(mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    width, height = size
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> MediaWorker:
    """A worker with one thread that leaves the resize to the device."""
    images = find_image_model(write_image_folder(tmp_path_factory.mktemp("model"), FAMILIES["qwen2_vl"]))
    assert images is not None
    orders = MediaOrders(
        parent_pid=0,
        socket_fd=-1,
        processor=images.processor,
        settings=images.settings,
        options={},
        limits=MediaConfig(max_image_pixels=1 << 24),
        num_workers=1,
        resizes_on_device=True,
    )
    return MediaWorker(orders, *load_processor(orders))


async def prepare(worker: MediaWorker, folder: Path, data: bytes) -> tuple[JobEnd, Path]:
    source, target = folder / "source", folder / "made"
    source.write_bytes(data)
    return await worker.do(PrepareJob(1, str(source), str(target)), lambda _: None), target


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(file_of(drawing(), "JPEG", quality=85), id="JPEG"),
        pytest.param(file_of(drawing(), "JPEG", quality=97, subsampling=0, progressive=True), id="progressive JPEG"),
        pytest.param(file_of(drawing(), "MPO"), id="MPO"),
        pytest.param(file_of(drawing(), "JPEG", exif=oriented(1)), id="JPEG with EXIF data"),
        pytest.param(file_of(drawing(), "JPEG", exif=oriented(TURNED)), id="JPEG that is turned"),
        pytest.param(file_of(drawing("L"), "JPEG"), id="gray JPEG"),
        pytest.param(file_of(drawing("CMYK"), "JPEG"), id="CMYK"),
        pytest.param(file_of(drawing(), "PNG"), id="PNG"),
    ],
)
async def test_prepared_file_holds_the_decoded_picture(worker: MediaWorker, tmp_path: Path, data: bytes) -> None:
    end, target = await prepare(worker, tmp_path, data)
    assert isinstance(end, PreparedImage)
    arrays = load_file(target)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(arrays["picture"], np.asarray(expected))
    assert end.num_bytes == sum(array.nbytes for array in arrays.values())
    assert (len(arrays["row_starts"]), len(arrays["column_starts"])) == (end.shape.height, end.shape.width)


async def test_picture_that_shrinks_much_is_resized_by_the_processor(worker: MediaWorker, tmp_path: Path) -> None:
    end, target = await prepare(worker, tmp_path, file_of(drawing(size=(700, 520)), "JPEG"))
    assert isinstance(end, PreparedImage)
    assert load_file(target)["pixels"].shape[-2:] == (end.shape.height, end.shape.width)


async def test_damaged_picture_leaves_no_file(worker: MediaWorker, tmp_path: Path) -> None:
    data = file_of(drawing(), "JPEG")
    end, target = await prepare(worker, tmp_path, data[: len(data) // 2])
    assert isinstance(end, Refused)
    assert "truncated" in end.reason
    assert not target.exists()


async def test_cancelled_job_does_nothing(worker: MediaWorker, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(file_of(drawing(), "JPEG"))
    is_free = threading.Event()
    worker._threads.submit(is_free.wait)  # its only thread
    jobs = PrepareJob(1, str(tmp_path / "source"), str(tmp_path / "made")), FetchJob(2, "http://127.0.0.1:1/x.png", "")
    try:
        tasks = [asyncio.ensure_future(worker.do(job, lambda _: None)) for job in jobs]
        await asyncio.sleep(0)
        for job in jobs:
            worker.cancel(job.id)
    finally:
        is_free.set()
    assert await asyncio.gather(*tasks) == [Cancelled(1), Cancelled(2)]
    assert not (tmp_path / "made").exists()
    worker.cancel(1)
