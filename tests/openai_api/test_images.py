"""Images in chats over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from aioengine import AsyncEngine
from tests.kit.image_engine import FEATURES, LLAVA, blueprint, picture
from tests.kit.image_models import write_image_folder
from tests.kit.pictures import file_of
from tests.openai_api.serving import Served, served

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_image_folder(tmp_path_factory.mktemp("llava"), LLAVA)
    with served(AsyncEngine.from_blueprint(lambda: blueprint(folder)), served_model_name="llava") as running:
        yield running


def test_image_parts_are_data_urls(server: Served) -> None:
    url = "data:image/png;base64," + base64.b64encode(file_of(picture(1))).decode()
    content: Any = [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        ask = client.chat.completions.create
        seeing = ask(model="llava", messages=[{"role": "user", "content": content}], max_tokens=4)
        blind = ask(model="llava", messages=[{"role": "user", "content": content[:1]}], max_tokens=4)
    assert seeing.usage is not None
    assert blind.usage is not None
    assert seeing.usage.prompt_tokens >= blind.usage.prompt_tokens + FEATURES


def test_private_addresses_are_refused(server: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": f"{server.url}/cat.png"}}
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert response.status_code in (400, 500)
    assert "allow_private_urls" in response.json()["error"]["message"]
