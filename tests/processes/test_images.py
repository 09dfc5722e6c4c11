"""Images in requests, from the call to the scheduler, with a real media process and a fake runner."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
from PIL import Image
from safetensors.numpy import load_file

from aioengine import AsyncEngine, EngineError, RequestError
from aioengine.frontend.engine_parts import Blueprint
from aioengine.frontend.intake import image_prompts
from aioengine.media.intake.image_intake import ImageIntake, ImagesOfPrompt, folder_base
from aioengine.media.intake.sources import ImageSource
from aioengine.media.tokens._base import find_image_model
from aioengine.processes.media_process import PixelLimit
from aioengine.protocol.media import JobWaiting, encode_line
from aioengine.protocol.messages import Submit
from aioengine.settings.config import MediaConfig
from aioengine.testing.fake_engine import FakeSetup
from aioengine.tokenization.tokenizer import Tokenizer
from aioengine.transport.addresses import PrivateDirectory
from tests.kit.image_engine import (
    FEATURES,
    LIMITS,
    LLAVA,
    blueprint,
    intake,
    media_folder,
    picture,
    record_submits,
)
from tests.kit.image_models import FAMILIES, token_id, write_image_folder
from tests.kit.pictures import file_of
from tests.kit.source import ROOT
from tests.kit.waiting import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("llava"), LLAVA)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.from_blueprint(lambda: blueprint(folder)) as engine:
        yield engine


pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def submitted(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> list[Submit]:
    return record_submits(engine, monkeypatch)


SHORT = {"max_new_tokens": 4, "temperature": 0}


async def test_every_form_of_an_image_gives_the_same_request(
    engine: AsyncEngine, submitted: list[Submit], tmp_path: Path
) -> None:
    image = picture(1)
    data = file_of(image)
    file = tmp_path / "a picture.png"
    file.write_bytes(data)
    text = base64.b64encode(data).decode()
    odd_text = text[:30] + "\r\n " + text[30:].replace("+", "-").replace("/", "_").rstrip("=")
    forms: list[Any] = [
        data, bytearray(data), memoryview(data), str(file), file, file.as_uri(), text, f"data:image/png;base64,{text}",
        odd_text, f"data:;base64,%{ord(text[0]):02x}{text[1:]}",
        [data], [image], image,
    ]  # fmt: skip
    outs = [await engine.async_generate("USER: <image>\nWhat? ", SHORT, image_data=form) for form in forms]
    expected = [token_id("<image>")] * FEATURES
    for submit, out in zip(submitted, outs, strict=True):
        [media] = submit.media
        assert submit.prompt_token_ids[media.start : media.start + media.num_tokens] == expected
        assert submit.prompt_token_ids.count(token_id("<image>")) == media.num_features == FEATURES
        assert out["meta_info"]["image_tokens"] == FEATURES
        assert out["meta_info"]["prompt_tokens"] == len(submit.prompt_token_ids) == FEATURES + len("USER: \nWhat? ")
        assert out["text"] == outs[0]["text"]
    assert len({submit.media[0].content for submit in submitted[:-2]}) == 1, "the same bytes are prepared once"
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    wanted = CLIPImageProcessorPil.from_dict(dict(LLAVA.processor))(image, return_tensors="np")["pixel_values"]
    for submit in (submitted[0], submitted[-1]):
        arrays = load_file(submit.media[0].path)
        channels = zip(arrays["table"], arrays["pixels"][0], strict=True)
        assert np.array_equal(np.stack([table.take(pixels) for table, pixels in channels]), wanted[0])


async def test_chats_put_their_images_into_the_prompt(engine: AsyncEngine, submitted: list[Submit]) -> None:
    data = file_of(picture(2))
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": data},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image"},
    ]
    messages = [{"role": "user", "content": parts}]
    out = await engine.async_chat(messages, SHORT, image_data=picture(3))
    [submit] = submitted
    first, second, third = submit.media
    assert first.content == second.content
    assert third.content != first.content
    assert [media.start for media in submit.media] == [6, 6 + FEATURES + 3, 6 + 2 * FEATURES + 3]
    assert out["meta_info"]["image_tokens"] == 3 * FEATURES
    assert "image" not in (await engine.async_chat([{"role": "user", "content": "hi"}], SHORT))["meta_info"]


async def test_a_batch_takes_images_for_each_prompt(engine: AsyncEngine, submitted: list[Submit]) -> None:
    one, two = file_of(picture(4)), file_of(picture(5))
    prompts = ["a <image>", "b", "c <image><image>", "d <image>"]
    outs = await engine.async_generate(prompts, {**SHORT, "n": 2}, image_data=[one, None, [two, one], [one]])
    assert [len(submit.media) for submit in submitted] == [1, 1, 0, 0, 2, 2, 1, 1]
    assert [out["meta_info"].get("image_tokens", 0) // FEATURES for out in outs] == [1, 1, 0, 0, 2, 2, 1, 1]
    contents = [[media.content for media in submit.media] for submit in submitted]
    assert contents[0] == contents[1] == contents[6]
    assert contents[4][1] == contents[0][0] != contents[4][0]
    submitted.clear()
    await engine.async_generate(["a <image>", "b <image>"], SHORT, image_data=one)
    assert [submit.media[0].content for submit in submitted] == contents[0] * 2


async def test_ids_may_have_placeholders_or_all_tokens(engine: AsyncEngine, submitted: list[Submit]) -> None:
    placeholder = token_id("<image>")
    for ids in ([5, placeholder, 6], [5, *[placeholder] * FEATURES, 6]):
        await engine.async_generate(input_ids=ids, sampling_params=SHORT, image_data=file_of(picture(6)))
    assert submitted[0].prompt_token_ids == submitted[1].prompt_token_ids == [5, *[placeholder] * FEATURES, 6]
    assert submitted[0].media == submitted[1].media


async def test_streams_and_constraints_work_as_without_images(engine: AsyncEngine) -> None:
    chunks = [chunk async for chunk in engine.async_generate("<image> a", SHORT, image_data=picture(7), stream=True)]
    assert all(chunk["meta_info"]["image_tokens"] == FEATURES for chunk in chunks)
    whole = await engine.async_generate("<image> a", SHORT, image_data=picture(7))
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]


@pytest.fixture(scope="module")
def images_by_word() -> dict[bytes, bytes]:
    """Words in parameters -> the bytes of images, which are too long for test ids."""
    return {
        b"PICTURE": file_of(picture(8)),
        b"LARGE": file_of(Image.new("RGB", (2000, 2000))),
        b"CUT": file_of(picture(9))[:-200],
    }


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ("no placeholder", b"x", r"1 image but no placeholder; write <image> once for each image"),
        ("<image> <image>", None, "has 2 image placeholders .* for 0 images"),
        ("<image> <image>", [b"PICTURE"], r"has 2 image placeholders .* for 1 image; .*\(or 16, "),
        ("<image>", [b"x"] * 4, "image_data has 4 images; the limit is max_images_per_prompt=3"),
        ("<image>", ["x"] * 10_000, "image_data has 10000 images"),
        ("<image><image>", [b"PICTURE", b"junk"], r"image 1 \(4 bytes\): it is not an image"),
        ("<image>", "missing.png", r"image 0 \('missing.png'\): it is neither a file that exists, nor a URL .*, nor"),
        ("<image>", "/home/me/picture", r"image 0 \('/home/me/picture'\): it is neither a file that exists"),
        ("<image>", "data:image/png;base64,****", "is not base64"),
        ("<image>", "file://elsewhere/x.png", "names the host 'elsewhere'"),
        ("<image>", "/dev/zero", "it is not a regular file"),
        ("<image>", "/tmp", "its file cannot be read: Is a directory"),
        ("<image>", "http://127.0.0.1:1/x.png", "address 127.0.0.1, which is not public"),
        ("<image>", "", "image_data is empty"),
        ("<image>" * 2, ["a", " "], r"image_data\[1\] is empty"),
        ("<image>", b"LARGE", "pixels, and max_image_pixels=1000000 are allowed"),
        ("<image>", b"CUT", "it cannot be decoded: OSError"),
    ],
)
async def test_invalid_image_is_reported(
    engine: AsyncEngine, images_by_word: dict[bytes, bytes], prompt: str, images: object, words: str
) -> None:
    if isinstance(images, list):
        images = [images_by_word.get(entry, entry) for entry in images]
    elif isinstance(images, bytes):
        images = images_by_word.get(images, images)
    with pytest.raises(ValueError, match=words):
        await engine.async_generate(prompt, SHORT, image_data=images)


async def test_wrong_types_are_refused_at_the_call(engine: AsyncEngine) -> None:
    with pytest.raises(TypeError, match="image_data must be a path, a URL, base64 text, bytes or a PIL image"):
        engine.async_generate("<image>", image_data=5)
    with pytest.raises(ValueError, match="image_data has 1 entry for 2 prompts"):
        engine.async_generate(["a", "b"], image_data=[b"x"])
    with pytest.raises(ValueError, match="image_data must be text that UTF-8 can encode"):
        engine.async_generate("<image>", image_data="http://\ud800/x.png")
    chat = [{"role": "user", "content": [{"type": "image", "image": b"x"}]}]
    for call in (
        lambda: engine.async_generate("<image>", image_data=b"x", truncate_prompt_tokens=5),
        lambda: engine.async_chat(chat, truncate_prompt_tokens=5),
    ):
        with pytest.raises(ValueError, match="truncate_prompt_tokens is for prompts without images"):
            call()
    with pytest.raises(ValueError, match="image_data is for prompts that have token ids"):
        engine.async_generate(input_embeds=[[0.5]], image_data=b"x")
    for part, words in (
        ({"type": "image", "image": b"x", "url": "y"}, "has both image and url"),
        ({"type": "image", "source": {"data": "eA=="}}, "has source; give an image as one of image, url, path"),
        ({"type": "image_url", "image_url": {}}, "image_url of part 0"),
        ({"type": "video"}, "is of type 'video'; allowed: text, image, image_url"),
        ({"type": "image"}, "without an image of their own in the messages: 1; images in image_data: 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            engine.async_chat([{"role": "user", "content": [part]}])


async def test_invalid_row_of_a_batch_fails_alone(engine: AsyncEngine) -> None:
    good, bad = file_of(picture(10)), b"junk"
    prompts = ["<image>", "<image>", "x", "<image>"]
    outs = await engine.async_generate(prompts, SHORT, image_data=[good, bad, None, 5], return_exceptions=True)
    assert [type(out).__name__ for out in outs] == ["dict", "ValueError", "dict", "TypeError"]
    assert "image 0 of prompt 1 (4 bytes)" in str(outs[1])
    with pytest.raises(ValueError, match="image 0 of prompt 1"):
        await engine.async_generate(prompts[:3], SHORT, image_data=[good, bad, None])


async def test_unloaded_picture_is_loaded_by_one_thread(
    engine: AsyncEngine, submitted: list[Submit], tmp_path: Path
) -> None:
    picture(11, 900, 900).save(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        await engine.async_generate(["<image>"] * 8, SHORT, image_data=image)
    assert len({submit.media[0].content for submit in submitted}) == 1
    assert np.array_equal(np.asarray(image), np.asarray(picture(11, 900, 900)))


async def test_cancelled_request_leaves_no_files(engine: AsyncEngine) -> None:
    for turns in range(0, 40, 3):
        task = asyncio.ensure_future(
            engine.async_generate("<image> a", SHORT, image_data=file_of(picture(100 + turns)))
        )
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await settled(engine)


async def settled(engine: AsyncEngine) -> None:
    """Wait until no image is prepared or used, and each cached image has its file."""

    def is_settled() -> bool:
        images = intake(engine)
        is_idle = not any(images._active.values()) and not images._waiting
        on_disk = {str(path) for path in media_folder(engine).glob("*.media")}
        is_unused = not any(file.num_users for file in images.files.values())
        return is_idle and is_unused and {file.path for file in images.files.values()} == on_disk

    await until(is_settled)
    assert engine._run.frontend.images._held == {}


async def test_least_recently_used_files_are_removed_beyond_the_limit(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, submitted: list[Submit]
) -> None:
    monkeypatch.setattr(intake(engine), "_max_kept_bytes", 30_000)
    for seed in range(200, 206):
        await engine.async_generate("<image> a", SHORT, image_data=file_of(picture(seed)))
    await settled(engine)
    assert sum(file.num_bytes for file in intake(engine).files.values()) <= 30_000
    [last] = submitted[-1].media
    assert last.content in intake(engine).files
    assert submitted[0].media[0].content not in intake(engine).files
    monkeypatch.setattr("aioengine.media.intake.image_intake.MAX_KEPT_FILES", 2)
    for seed in (204, 206):  # the first file exists, and is older than the last one
        await engine.async_generate("<image> a", SHORT, image_data=file_of(picture(seed)))
    await settled(engine)
    assert list(intake(engine).files) == [submit.media[0].content for submit in submitted[-2:]]


async def test_files_leave_space_on_a_small_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes, image = Path.write_bytes, file_of(picture(220))

    def write_some(path: Path, data: bytes) -> int:
        write_bytes(path, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = SimpleNamespace(f_bavail=100, f_frsize=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with AsyncEngine.from_blueprint(lambda: blueprint(folder)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", write_some)
            with pytest.raises(RequestError, match="No space left on device"):
                await engine.async_generate("<image>", SHORT, image_data=image)
        assert [file.name for file in media_folder(engine).iterdir()] == ["media.log"]
        for seed in range(221, 231):
            await engine.async_generate("<image>", SHORT, image_data=file_of(picture(seed)))
        await settled(engine)
        assert 0 < sum(file.num_bytes for file in intake(engine).files.values()) <= 25_000


async def test_image_is_prepared_again_if_its_file_was_removed(folder: Path) -> None:
    """Some systems empty shared memory when a user logs out."""
    image = file_of(picture(210))
    async with AsyncEngine.from_blueprint(lambda: blueprint(folder)) as engine:

        async def ask() -> Path:
            """Send three requests at once. Return the file of the image."""
            several = [engine.async_generate("<image> a", SHORT, image_data=image) for _ in range(3)]
            assert [out["meta_info"]["image_tokens"] for out in await asyncio.gather(*several)] == [FEATURES] * 3
            await settled(engine)
            [file] = intake(engine).files.values()
            return Path(file.path)

        first, place = await ask(), media_folder(engine)
        first.unlink()
        second = await ask()
        assert (second != first, second.exists(), media_folder(engine)) == (True, True, place)
        shutil.rmtree(place)
        assert (await ask()).exists()
        assert media_folder(engine) != place


async def test_crash_of_the_media_process_fails_only_its_images(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = intake(engine).process
    image = file_of(picture(300))
    await engine.async_generate("<image> a", SHORT, image_data=file_of(picture(301)))
    os.kill(process.child.pid, signal.SIGSTOP)
    first = asyncio.ensure_future(engine.async_generate("<image> a", SHORT, image_data=image))
    text = await engine.async_generate("no image", SHORT)
    await until(lambda: process._running)
    os.kill(process.child.pid, signal.SIGKILL)
    with pytest.raises(RequestError, match="image 0 .*the media process was killed by signal 9") as raised:
        await first
    assert raised.value.stage == "image"
    assert "PyTorch" not in str(raised.value)
    assert text["text"]
    assert process.child is None
    out = await engine.async_generate("<image> a", SHORT, image_data=image)
    assert out["meta_info"]["image_tokens"] == FEATURES
    assert process.child is not None
    await settled(engine)


async def test_hanging_image_fails_after_its_timeout(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    process = intake(engine).process
    await engine.async_generate("<image> a", SHORT, image_data=file_of(picture(400)))
    orders = msgspec.structs.replace(process._orders, limits=MediaConfig(timeout_s=-0.7))
    monkeypatch.setattr(process, "_orders", orders)
    os.kill(process.child.pid, signal.SIGSTOP)
    with pytest.raises(RequestError, match="took longer than media_timeout"):
        await engine.async_generate("<image> a", SHORT, image_data=file_of(picture(401)))
    monkeypatch.undo()
    await engine.async_generate("<image> a", SHORT, image_data=file_of(picture(401)))


async def test_image_of_a_cancelled_request_is_prepared_for_the_next_one(engine: AsyncEngine) -> None:
    process = intake(engine).process
    await engine.async_generate("<image> a", SHORT, image_data=file_of(picture(405)))
    os.kill(process.child.pid, signal.SIGSTOP)
    try:
        first = asyncio.ensure_future(engine.async_generate("<image> a", SHORT, image_data=file_of(picture(406))))
        await until(lambda: process._running)
        first.cancel()
        await until(lambda: not intake(engine)._jobs)
        second = asyncio.ensure_future(engine.async_generate("<image> a", SHORT, image_data=file_of(picture(406))))
        await until(lambda: any(len(file.waiters) > 1 for file in intake(engine).files.values()))
    finally:
        os.kill(process.child.pid, signal.SIGCONT)
    assert (await second)["meta_info"]["image_tokens"] == FEATURES
    await settled(engine)


async def test_each_file_holds_its_own_picture_for_a_gpu(tmp_path: Path) -> None:
    """Pictures are prepared one after the other, and several at a time."""
    images = find_image_model(write_image_folder(tmp_path, FAMILIES["qwen2_vl"]))
    assert images is not None
    intake = ImageIntake(images, 2, is_for_gpu=True)

    async def check(seed: int) -> None:
        file = io.BytesIO()
        picture(seed).save(file, "JPEG", quality=90)
        prompt, is_over = ImagesOfPrompt([ImageSource("bytes", file.getvalue())], ""), asyncio.Event()
        intake.begin(prompt)
        prompt.when_done(is_over.set)
        await is_over.wait()
        assert prompt.error is None
        [prepared] = prompt.prepared
        assert np.array_equal(load_file(prepared.path)["picture"], np.asarray(Image.open(file)))
        intake.release(prompt)

    try:
        for seed in range(4):
            await check(seed)
        await asyncio.gather(*map(check, range(4, 12)))
        assert intake._folder is not None
        await until(lambda: len(list(Path(intake._folder.path).glob("*.media"))) == 12)
    finally:
        intake.close()


async def test_waiting_time_does_not_count_for_the_timeout(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = intake(engine).process
    await engine.async_generate("<image> a", SHORT, image_data=file_of(picture(410)))
    os.kill(process.child.pid, signal.SIGSTOP)
    waiting = asyncio.ensure_future(engine.async_generate("<image> a", SHORT, image_data=file_of(picture(411))))
    await until(lambda: process._running)
    [number] = process._running
    ours, theirs = socket.socketpair()
    with ours, theirs, monkeypatch.context() as patch:
        patch.setattr(process, "_channel", ours)
        for is_over in (False, True):
            theirs.sendall(encode_line([JobWaiting(number, is_over)]))
            process._read()
            assert (process._running[number].timer is None) != is_over
    os.kill(process.child.pid, signal.SIGCONT)
    await waiting


async def test_waiting_pictures_are_decoded_in_order() -> None:
    limit, ended, reports = PixelLimit(10), list[int](), list[tuple[int, bool]]()

    def decode(num_pixels: int) -> None:
        with limit.holding(num_pixels, lambda is_over: reports.append((num_pixels, is_over))):
            ended.append(num_pixels)

    threads = [threading.Thread(target=decode, args=(num_pixels,)) for num_pixels in (10, 1)]
    with limit.holding(8, lambda _: pytest.fail("the picture fits")):
        for number, thread in enumerate(threads):
            thread.start()
            await until(lambda number=number: len(reports) > number)
        assert not ended, "the small one waits behind the large one"
    for thread in threads:
        thread.join()
    assert ended == [10, 1]
    assert set(reports) == {(10, False), (1, False), (10, True), (1, True)}


async def test_deadlines_and_aborts_end_requests_that_wait_for_images(engine: AsyncEngine) -> None:
    process = intake(engine).process
    await engine.async_generate("<image> a", SHORT, image_data=file_of(picture(500)))
    os.kill(process.child.pid, signal.SIGSTOP)
    try:
        out = await engine.async_generate("<image> a", SHORT, image_data=file_of(picture(501)), timeout=0.05)
        assert out["meta_info"]["finish_reason"] == "deadline"
        waiting = engine.async_generate("<image> a", SHORT, image_data=file_of(picture(502)), rid="mine")
        await asyncio.sleep(0.02)
        engine.abort_request("mine")
        assert (await waiting)["meta_info"]["finish_reason"] == "abort"
    finally:
        os.kill(process.child.pid, signal.SIGCONT)
    await settled(engine)


async def test_image_is_downloaded_from_its_url(folder: Path) -> None:
    data = file_of(picture(610))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
        await writer.drain()
        writer.close()

    limits = msgspec.structs.replace(LIMITS, allow_private_urls=True)
    async with (
        await asyncio.start_server(answer, "127.0.0.1") as server,
        AsyncEngine.from_blueprint(lambda: blueprint(folder, limits)) as engine,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/cat.png"
        out = await engine.async_generate("<image> a", SHORT, image_data=url)
        assert out["meta_info"]["image_tokens"] == FEATURES
        [downloaded] = intake(engine).files
        await engine.async_generate("<image> a", SHORT, image_data=data)
        assert list(intake(engine).files) == [downloaded], "the same bytes are prepared once"


async def test_paths_must_lie_in_the_allowed_folder(folder: Path, tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside.png"
    allowed.mkdir()
    outside.write_bytes(file_of(picture(600)))
    (allowed / "in.png").write_bytes(file_of(picture(600)))
    (allowed / "link.png").symlink_to(outside)
    (allowed / "inner.png").symlink_to(allowed / "in.png")
    (allowed / "folder").symlink_to(tmp_path)
    limits = msgspec.structs.replace(LIMITS, allowed_local_media_path=str(allowed), max_image_bytes=20_000)
    async with AsyncEngine.from_blueprint(lambda: blueprint(folder, limits)) as engine:
        for good in (allowed / "in.png", str(allowed / "inner.png"), (allowed / "in.png").as_uri()):
            await engine.async_generate("<image>", SHORT, image_data=good)
        missing = (
            tmp_path / "no.png",
            allowed / "folder/no.png",
        )  # the error does not reveal that these files are missing
        there = outside, allowed / "link.png", allowed / "folder/outside.png", allowed / "../outside.png"
        for bad in (*there, *missing):
            for form, words in ((bad, "not"), (f"file://{bad}", "not"), (str(bad), "neither a file")):
                with pytest.raises(ValueError, match=f"{words} in allowed_local_media_path"):
                    await engine.async_generate("<image>", SHORT, image_data=form)
        with pytest.raises(ValueError, match="No such file"):
            await engine.async_generate("<image>", SHORT, image_data=allowed / "missing.png")
        for large in (bytes(20_001), base64.b64encode(bytes(40_000)).decode()):
            with pytest.raises(ValueError, match="max_image_bytes=20000"):
                await engine.async_generate("<image>", SHORT, image_data=large)
        place, pid = media_folder(engine), intake(engine).process.child.pid
        assert pid in engine.get_all_child_pids()
    assert not place.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_prompts_of_gemma_get_line_breaks_around_their_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_image_folder(tmp_path, FAMILIES["gemma3"])
    async with AsyncEngine.from_blueprint(lambda: blueprint(folder)) as engine:
        submits = record_submits(engine, monkeypatch)
        for prompt in ("a\n<start_of_image>b", "a\n\n\n<start_of_image><image_soft_token><end_of_image>\n\nb"):
            out = await engine.async_generate(prompt, SHORT, image_data=file_of(picture(900)))
            assert out["meta_info"]["image_tokens"] == 4
    names = "<start_of_image>", *["<image_soft_token>"] * 4, "<end_of_image>"
    byte_ids = Tokenizer(folder).encode("a\n\n\n"), Tokenizer(folder).encode("\n\nb")
    for submit in submits:
        assert submit.prompt_token_ids == [*byte_ids[0], *map(token_id, names), *byte_ids[1]]
        assert (submit.media[0].start, submit.media[0].num_tokens) == (5, 4)


async def test_missing_pillow_is_named(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_prompts, "_has_pillow", lambda: False)
    with pytest.raises(EngineError, match=r"pip install 'aioengine\[images\]'"):
        engine.async_generate("<image>", image_data=b"x")
    assert (await engine.async_generate("text", SHORT, image_data=[]))["text"]


async def test_text_model_refuses_images() -> None:
    async with AsyncEngine.from_blueprint(FakeSetup(processes=False).blueprint) as engine:
        for none in ([], (), [None]):
            assert (await engine.async_generate("x", SHORT, image_data=none))["text"]
        for none in ([], (), [None, None], ([], None)):
            assert all(
                (await engine.async_generate(["x", "y"], SHORT, image_data=none, truncate_prompt_tokens=1))["text"]
            )
            assert len(await engine.async_encode(["x", "y"], image_data=none)) == 2
        with pytest.raises(ValueError, match="image_data has 1 entry for 2 prompts"):
            engine.async_generate(["x", "y"], image_data=[None])
        with pytest.raises(ValueError, match="image_data is given, and this model accepts only text"):
            engine.async_generate(["x", "y"], image_data=[None, b"x"])
        with pytest.raises(ValueError, match="image_data is given, and this model accepts only text"):
            engine.async_generate("x", image_data=b"x")
        with pytest.raises(ValueError, match="the messages have images, and this model accepts only text"):
            engine.async_chat([{"role": "user", "content": [{"type": "image", "image": b"x"}]}])


async def test_a_shutdown_ends_requests_that_wait_for_images(folder: Path) -> None:
    engine = AsyncEngine.from_blueprint(lambda: blueprint(folder))
    await engine.start()
    waiting = [
        asyncio.ensure_future(engine.async_generate("<image>", SHORT, image_data=file_of(picture(700 + seed))))
        for seed in range(6)
    ]
    await until(lambda: intake(engine).process.child)
    place, process = media_folder(engine), intake(engine).process
    pid = process.child.pid
    await engine.shutdown()
    assert {type(end).__name__ for end in await asyncio.gather(*waiting, return_exceptions=True)} == {
        "EngineClosedError"
    }
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not await asyncio.to_thread(place.exists)


@pytest.mark.parametrize("how", ["dies", "is no processor"])
async def test_failed_start_of_the_media_process_is_explained(folder: Path, how: str) -> None:
    def broken() -> Blueprint:
        changed = blueprint(folder)
        assert changed.images is not None
        processor = "os:abort" if how == "dies" else "os:NoSuchThing"
        return msgspec.structs.replace(changed, images=changed.images._replace(processor=processor))

    async with AsyncEngine.from_blueprint(broken) as engine:
        with pytest.raises(RequestError, match="image 0 .*the media process (has ended|exited|was killed)"):
            await engine.async_generate("<image>", SHORT, image_data=file_of(picture(800)))
        assert (await engine.async_generate("text", SHORT))["text"]


PROGRAM = """
import asyncio, sys
from pathlib import Path
from aioengine import AsyncEngine
from tests.kit.pictures import file_of
from tests.processes.test_images import blueprint, intake, picture

async def main():
    async with AsyncEngine.from_blueprint(lambda: blueprint(Path(sys.argv[1]))) as engine:
        await engine.async_generate("<image>", {"max_new_tokens": 1}, image_data=file_of(picture(1)))
        print(intake(engine).process.child.pid, intake(engine)._folder.path, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_the_media_process_dies_with_its_program(folder: Path) -> None:
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(folder), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert program.stdout is not None
    pid, place = (await program.stdout.readline()).decode().split()
    program.kill()
    await program.wait()
    await until(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    PrivateDirectory(str(Path(place).parent)).remove()  # like the lock file of the next engine
    assert not await asyncio.to_thread(Path(place).exists)


async def test_images_of_a_dead_engine_are_removed_from_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = PrivateDirectory(str(tmp_path))
    await asyncio.to_thread(Path(left.path, "1.media").write_bytes, bytes(1000))
    os.close(left._lock)  # the end of its program closes the lock, too
    monkeypatch.setattr("aioengine.media.intake.image_intake.SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr("aioengine.media.intake.image_intake.MIN_SHARED_BYTES", 1 << 60)
    assert folder_base() == tempfile.gettempdir()
    assert not await asyncio.to_thread(Path(left.path).exists)
