"""Sessions whose turns have images: each turn equals a plain request with the complete history and all its images."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from aioengine import AsyncEngine, EngineOverloadedError
from aioengine.protocol.messages import Submit
from tests.kit.image_engine import FEATURES, LLAVA, blueprint, intake, picture, record_submits
from tests.kit.image_models import token_id, write_image_folder
from tests.kit.pictures import file_of
from tests.kit.waiting import until

SHORT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
PLACEHOLDER = token_id("<image>")
ONE, TWO, THREE = (file_of(picture(seed)) for seed in (1, 2, 3))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    folder = write_image_folder(tmp_path_factory.mktemp("llava"), LLAVA)
    async with AsyncEngine.from_blueprint(lambda: blueprint(folder)) as engine:
        yield engine


pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def submitted(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> list[Submit]:
    return record_submits(engine, monkeypatch)


def kept(engine: AsyncEngine) -> list[int]:
    return sorted(file.num_sessions for file in intake(engine).files.values() if file.num_sessions)


async def nothing_is_kept(engine: AsyncEngine) -> None:
    await until(lambda: not kept(engine) and not any(file.num_users for file in intake(engine).files.values()))
    assert intake(engine)._num_session_bytes == 0


def turn_of(engine: AsyncEngine, text: str, sid: str, rid: str | None, image: object = None, **more: object) -> Any:
    params = {"id": sid, "rid": rid, **more}
    return engine.async_generate(text, SHORT, image_data=image, session_params=params, return_prompt_token_ids=True)


async def check_plain(engine: AsyncEngine, submitted: list[Submit], answer: Any, images: list[bytes]) -> None:
    """Check that the last submitted turn equals a plain request with these images."""
    turn = submitted[-1]
    ids = answer["prompt_token_ids"]
    plain = await engine.async_generate(input_ids=ids, sampling_params=SHORT, image_data=images)
    assert submitted[-1].prompt_token_ids == turn.prompt_token_ids
    assert submitted[-1].media == turn.media
    assert answer["output_ids"] == plain["output_ids"]
    assert answer["meta_info"]["image_tokens"] == plain["meta_info"]["image_tokens"] == FEATURES * len(images)


async def test_turns_see_the_images_of_earlier_turns(engine: AsyncEngine, submitted: list[Submit]) -> None:
    sid = await engine.open_session()
    first = await turn_of(engine, "a <image> b", sid, None, ONE)
    await check_plain(engine, submitted, first, [ONE])
    begin = first["prompt_token_ids"] + first["output_ids"]
    text = await turn_of(engine, " and", sid, first["meta_info"]["id"])
    assert text["prompt_token_ids"][: len(begin)] == begin
    await check_plain(engine, submitted, text, [ONE])
    for image in (TWO, ONE):  # two branches
        more = await turn_of(engine, "<image>?", sid, text["meta_info"]["id"], image)
        assert more["meta_info"]["cached_tokens"] >= 16
        await check_plain(engine, submitted, more, [ONE, image])
    dropped = await turn_of(engine, "!", sid, more["meta_info"]["id"], drop_previous_output=True)
    await check_plain(engine, submitted, dropped, [ONE, ONE])
    cut = await turn_of(engine, "<image>!", sid, more["meta_info"]["id"], THREE, offset=2 + FEATURES)
    await check_plain(engine, submitted, cut, [ONE, THREE])
    none = await turn_of(engine, "!", sid, more["meta_info"]["id"], offset=2)
    assert "image_tokens" not in none["meta_info"]
    assert kept(engine) == [1, 1, 1]
    await engine.close_session(sid)
    await nothing_is_kept(engine)


async def test_chats_in_streaming_sessions_see_their_images(engine: AsyncEngine, submitted: list[Submit]) -> None:
    sid = await engine.open_session(streaming=True)
    images: list[bytes] = []
    for image in (ONE, None, TWO):
        parts: list[dict[str, Any]] = [{"type": "text", "text": "what?"}]
        if image is not None:
            parts.insert(0, {"type": "image", "image": image})
            images.append(image)
        chat = engine.async_chat(
            [{"role": "user", "content": parts}], SHORT, session_params={"id": sid}, return_prompt_token_ids=True
        )
        await check_plain(engine, submitted, await chat, images)
    failing = turn_of(engine, "<image>", sid, None, b"no picture")
    with pytest.raises(ValueError, match="it is not an image"):
        await failing
    left = engine.async_generate("<image>", SHORT, image_data=THREE, stream=True, session_params={"id": sid})
    async for _ in left:
        break
    await left.aclose()
    await until(lambda: kept(engine) == [1, 1])
    last = await turn_of(engine, "<image>", sid, None, THREE)
    await check_plain(engine, submitted, last, [*images, THREE])
    await engine.close_session(sid)
    await nothing_is_kept(engine)


async def test_unsupported_use_of_images_in_sessions_is_reported(engine: AsyncEngine) -> None:
    sid = await engine.open_session()
    first = await turn_of(engine, "a <image> <image>", sid, None, [ONE, TWO])
    rid = first["meta_info"]["id"]
    with pytest.raises(ValueError, match="offset=10 is inside the image at tokens 2 to 18"):
        await turn_of(engine, "x", sid, rid, offset=10)
    with pytest.raises(ValueError, match="history have 4 images; the limit is max"):
        await turn_of(engine, "<image> <image>", sid, rid, [ONE, TWO])
    with pytest.raises(ValueError, match="has 1 image but no placeholder"):
        await turn_of(engine, "x", sid, rid, ONE)
    with pytest.raises(ValueError, match=r"has 1 image placeholder .* for 0 images"):
        await turn_of(engine, "x <image>", sid, rid)
    assert (await turn_of(engine, "<image>", sid, rid, THREE))["meta_info"]["image_tokens"] == 3 * FEATURES
    await engine.close_session(sid)
    await nothing_is_kept(engine)


async def test_a_placeholder_that_the_model_wrote_is_text(engine: AsyncEngine, submitted: list[Submit]) -> None:
    forced = {**SHORT, "logit_bias": {str(PLACEHOLDER): 100.0}}
    sid = await engine.open_session()
    ids = [5, 6, 7]
    first = await engine.async_generate(input_ids=ids, sampling_params=forced, session_params={"id": sid})
    assert submitted[-1].media == []
    begin = [*ids, *first["output_ids"]]
    turn = await turn_of(engine, "<image>", sid, first["meta_info"]["id"], ONE)
    assert turn["prompt_token_ids"] == [*begin, *[PLACEHOLDER] * FEATURES]
    assert submitted[-1].media[0].start == len(begin)
    await engine.close_session(sid)


async def test_replaced_and_closed_turns_keep_no_images(engine: AsyncEngine) -> None:
    sid = await engine.open_session()
    first = await turn_of(engine, "<image>", sid, None, ONE)
    await turn_of(engine, "<image>", sid, first["meta_info"]["id"], TWO)
    assert kept(engine) == [1, 1]
    await turn_of(engine, "x", sid, first["meta_info"]["id"], replace=True)
    await until(lambda: kept(engine) == [1])
    await turn_of(engine, "<image>", sid, None, THREE, replace=True)
    await until(lambda: kept(engine) == [1])
    running = engine.async_generate(
        "<image>", {**SHORT, "max_new_tokens": 60}, image_data=ONE, stream=True, session_params={"id": sid}
    )
    async for _ in running:
        await engine.close_session(sid)
        assert kept(engine) == [1, 1]
        break
    await running.aclose()
    await nothing_is_kept(engine)


async def test_files_of_sessions_are_bounded(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sid, other = await engine.open_session(), await engine.open_session()
    first = await turn_of(engine, "<image>", sid, None, ONE)
    monkeypatch.setattr(intake(engine), "_max_kept_bytes", 0)
    monkeypatch.setattr("aioengine.media.intake.image_intake.MAX_SESSION_BYTES", intake(engine)._num_session_bytes + 10)
    with pytest.raises(EngineOverloadedError, match="the images of open sessions take .* close some of them"):
        await turn_of(engine, "<image>", sid, None, TWO)
    await turn_of(engine, "<image>", other, None, ONE)
    assert kept(engine) == [2]
    path = next(file.path for file in intake(engine).files.values() if file.num_sessions)
    await engine.close_session(sid)
    assert await asyncio.to_thread(os.path.exists, path)
    with pytest.raises(ValueError, match="does not exist"):
        await turn_of(engine, "x", sid, first["meta_info"]["id"])
    await engine.close_session(other)
    await until(lambda: not os.path.exists(path))
    await nothing_is_kept(engine)
