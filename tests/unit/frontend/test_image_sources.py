"""Where images come from, as messages show it and as they are read."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from aioengine.config import MediaConfig
from aioengine.frontend.image_sources import ImageSource, image_source, read_source


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://example.com/cat.png", "'https://example.com/cat.png'"),
        ("https://ann:secret@example.com/cat.png", "'https://...@example.com/cat.png'"),
        ("https://ann:p@ss@example.com/a@b.png", "'https://...@example.com/a@b.png'"),
    ],
)
def test_the_name_and_password_of_a_url_are_not_shown(url: str, shown: str) -> None:
    assert ImageSource("web", url).shown == shown


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.png").write_bytes(b"picture")
    for given in ("~/a.png", Path("~/a.png")):
        assert read_source(image_source("image_data", given), MediaConfig()).data == b"picture"


def test_text_is_read_where_the_working_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    text = base64.b64encode(b"the bytes of a picture").decode()
    assert read_source(image_source("image_data", text), MediaConfig()).data == b"the bytes of a picture"
    with pytest.raises(ValueError, match="neither a file that exists"):
        read_source(image_source("image_data", "a.png"), MediaConfig())
