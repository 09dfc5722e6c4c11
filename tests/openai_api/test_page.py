"""The page at / in a real browser: chat, settings, images, load, keyboard, narrow windows, dark mode, labels."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from aioengine.openai.page import FILE
from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.chromium import Page, chromium
from tests.openai_api.serving import Served, served

pytestmark = pytest.mark.process

ANSWERS = {
    "France": "Paris.",
    "Show me code": "Here:\n```python\nprint('<b>')\n```\nDone.",
    "Write a page": "<img src=x onerror=alert(1)>",
    "A long text": "word " * 200,
}
COLORS = """
[...document.querySelectorAll('article .text, article footer, h3, dt, .hint, #send, #state, label')].map((element) => {
  let back = element;
  while (getComputedStyle(back).backgroundColor === 'rgba(0, 0, 0, 0)') back = back.parentElement;
  return [getComputedStyle(element).color, getComputedStyle(back).backgroundColor];
})"""
"""The color of each text, and the color behind it."""

COMPLETE = "!running && document.querySelector('.again')"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Each step takes 5 ms, so that a long answer can be stopped."""
    engine = fake_async_engine(ANSWERS, step_time_s=0.005)
    with served(engine, served_model_name="fake", api_key="secret") as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, server: Served) -> Page:
    """The page with the API key, and without earlier settings."""
    browser.show(1200, 800)
    browser.open(server.url)
    browser.value("localStorage.clear(), sessionStorage.setItem('aioengine-key', 'secret')")
    browser.open(server.url)
    browser.events.clear()
    browser.wait("document.querySelector('#model').options.length")
    return browser


def say(page: Page, text: str) -> None:
    page.type(text)
    page.press("Enter")
    page.wait(COMPLETE)


def bodies(page: Page) -> list[dict[str, Any]]:
    """Return the bodies of the requests for answers."""
    requests = [event["request"] for event in page.of_event("Network.requestWillBeSent")]
    return [json.loads(request["postData"]) for request in requests if "postData" in request]


def articles(page: Page) -> list[str]:
    messages: list[str] = page.value("[...document.querySelectorAll('article')].map((each) => each.innerText)")
    return messages


def test_a_conversation_is_sent_and_its_answers_are_shown(page: Page) -> None:
    say(page, "What is the capital of France?")
    say(page, "Show me code")
    texts = articles(page)
    assert [text.splitlines()[0] for text in texts] == ["You", "fake", "You", "fake"]
    assert "Paris." in texts[1]
    assert page.value("document.querySelector('article pre').innerText") == "print('<b>')\n"
    first, second = bodies(page)
    assert first["messages"] == [{"role": "user", "content": "What is the capital of France?"}]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "Paris."
    assert first.keys() == {"model", "messages", "stream", "stream_options"}
    facts = re.search(r"(\d+) tokens, ([\d.]+) tokens/s, first after [\d.]+ s, (\d+) tokens of prompt", texts[1])
    assert facts is not None
    assert int(facts[1]) == len("Paris.") + 1  # one token per byte, and the end token
    assert float(facts[2]) > 0


def test_answers_are_never_read_as_html(page: Page) -> None:
    say(page, "Write a page")
    assert ANSWERS["Write a page"] in articles(page)[1]
    assert page.value("document.querySelectorAll('article img').length") == 0


def test_settings_are_sent_and_kept(page: Page, server: Served) -> None:
    values = {
        "system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "5", "min_p": "0.1", "seed": "7",
        "max_tokens": "3", "presence_penalty": "0.5", "frequency_penalty": "-0.5", "repetition_penalty": "1.1",
        "stop": "zzz",
    }  # fmt: skip
    for name, value in values.items():
        page.value(f"document.querySelector('[name={name}]').focus()")
        page.type(value)
    page.value("document.querySelector('#text').focus()")
    page.open(server.url)
    page.wait("document.querySelector('#model').options.length")
    say(page, "What about France?")
    (body,) = bodies(page)
    assert body.pop("messages")[0] == {"role": "system", "content": values.pop("system")}
    stop = values.pop("stop")
    assert {name: body[name] for name in [*values, "stop"]} == {
        **{name: float(value) for name, value in values.items()},
        "stop": stop,
    }
    assert "cut at the maximum length" in articles(page)[1]


def test_answer_can_be_stopped_and_repeated(page: Page, server: Served) -> None:
    page.type("A long text")
    page.press("Enter")
    page.wait("document.querySelector('article.assistant > .text').innerText.length > 20")
    assert page.value("document.activeElement.id") == "text"
    page.press("Escape")
    page.wait(COMPLETE)
    assert "stopped" in articles(page)[1]
    server.wait_until_idle()
    page.value("document.querySelector('.again').click()")
    page.wait("running")
    page.press("n", "KeyN", alt=True)
    page.wait("!document.querySelector('article')")
    server.wait_until_idle()
    assert page.value("messages.length") == 0
    assert len(bodies(page)[1]["messages"]) == 1


def test_the_load_of_the_engine_is_shown(page: Page, server: Served) -> None:
    assert httpx.get(f"{server.url}/load").status_code == 401
    page.wait("document.querySelector('#state').textContent === 'running'")
    body = {"prompt": "A long text", "max_tokens": 1500, "stream": True}
    headers = {"Authorization": "Bearer secret"}
    with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()  # closed with its last reference
        next(lines)
        page.wait("document.querySelector('#running').textContent === '1'")
        page.wait("Number(document.querySelector('#speed').textContent) > 0")
    page.wait("document.querySelector('#running').textContent === '0'")
    assert page.value("document.querySelector('#history polyline').getAttribute('points').length") > 0


def test_error_is_shown_and_the_conversation_continues(page: Page) -> None:
    page.value("document.querySelector('[name=key]').value = 'wrong'")
    say(page, "France")
    assert "the API key is missing or wrong" in articles(page)[1]
    page.value("document.querySelector('[name=key]').value = 'secret'")
    page.value("document.querySelector('.again').click()")
    page.wait("document.body.innerText.includes('Paris.')")
    assert len(articles(page)) == 2


def test_images_are_added_removed_and_sent(page: Page, tmp_path: Path) -> None:
    paths = [tmp_path / "red.png", tmp_path / "blue.png"]
    for path, color in zip(paths, ("red", "blue"), strict=True):
        Image.new("RGB", (8, 8), color).save(path)
    node = page.send("Runtime.evaluate", expression="document.querySelector('#file')")["result"]["objectId"]
    page.send("DOM.setFileInputFiles", files=list(map(str, paths)), objectId=node)
    page.wait("document.querySelectorAll('#images button').length === 2")
    page.value("document.querySelector('[aria-label=\"Remove image 1\"]').click()")
    say(page, "What is this?")
    (body,) = bodies(page)
    image, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert Image.open(BytesIO(data)).getpixel((0, 0)) == (0, 0, 255)
    assert page.value("document.querySelector('article.user img').naturalWidth") == 8
    assert "accepts only text" in articles(page)[1]  # the fake model cannot see
    assert page.value("images.length") == 0


def test_every_control_has_a_name_and_can_be_reached_by_the_keyboard(page: Page) -> None:
    say(page, "France")
    controls = {"button", "textbox", "spinbutton", "combobox", "log", "form", "complementary"}
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    named = [
        (node["role"]["value"], node["name"]["value"])
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in controls
    ]
    assert len(named) > 15
    assert [role for role, name in named if not name.strip()] == []
    assert len({name for _, name in named}) > 15
    visible = page.value(
        "[...document.querySelectorAll('button, input, select, textarea')].filter((e) => e.offsetParent).length"
    )
    reached: set[str] = set()
    page.value("[...document.querySelectorAll('button, input, select, textarea')].forEach((e, i) => e.dataset.i = i)")
    for _ in range(visible + 10):
        page.press("Tab")
        reached.add(page.value("document.activeElement.dataset.i || ''"))
    assert len(reached - {""}) == visible


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast(page: Page, dark: bool) -> None:
    page.show(1200, 800, dark=dark)
    say(page, "France")
    pairs = page.value(COLORS)
    assert len(pairs) > 10
    for front, back in pairs:
        assert contrast(front, back) >= 4.5, (front, back)
    assert (luminance(page.value("getComputedStyle(document.body).backgroundColor")) < 0.1) is dark


def luminance(color: str) -> float:
    """Return the relative luminance of "rgb(r, g, b)" as defined by WCAG."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_page_fits_the_width_of_a_phone(page: Page, server: Served) -> None:
    page.show(360, 640)
    page.open(server.url)
    page.wait("document.querySelector('#model').options.length")
    assert page.value("document.querySelector('#settings').hidden")
    say(page, "Show me code")
    assert page.value("document.documentElement.scrollWidth") == 360
    overlapping = page.value(
        "document.querySelector('header').getBoundingClientRect().bottom"
        " > document.querySelector('#log').getBoundingClientRect().top + 1"
    )
    assert not overlapping
    assert page.value("document.querySelector('#send').getBoundingClientRect().bottom") <= 640
    page.value("document.querySelector('#settings-button').click()")
    assert page.value("document.querySelector('#settings').offsetWidth") == 360
    assert page.value("document.querySelector('#settings-button').getAttribute('aria-expanded')") == "true"
    assert page.value("document.documentElement.scrollWidth") == 360


def test_page_requests_no_other_host_and_has_no_errors(page: Page, server: Served) -> None:
    page.open(server.url)
    page.wait("document.querySelector('#model').options.length")
    say(page, "France")
    urls = {event["request"]["url"] for event in page.of_event("Network.requestWillBeSent")}
    assert {url for url in urls if not url.startswith((f"{server.url}/", "data:"))} == set()
    assert page.of_event("Runtime.exceptionThrown") == []
    entries = [event["entry"] for event in page.of_event("Log.entryAdded")]
    assert [entry["text"] for entry in entries if entry["level"] in ("error", "warning")] == []


def test_page_has_no_external_addresses(server: Served) -> None:
    response = httpx.get(server.url)
    assert response.status_code == 200
    assert response.text == FILE.read_text(encoding="utf-8")
    assert re.findall(r"(?:src|href)=\"(?!data:)|https?://|@import|url\(", response.text) == []
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert len(response.content) < 30_000
