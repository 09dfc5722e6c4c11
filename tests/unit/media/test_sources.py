"""Sources of images: how messages show them, and how they are read."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from aioengine.media.intake.sources import ImageSource, image_source, read_source
from aioengine.settings.config import MediaConfig


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


def test_long_url_is_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match="image_data is a URL of 9019 characters; at most 8192 are allowed"):
        image_source("image_data", "http://example.com/" + "x" * 9000)


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.png").write_bytes(b"picture")
    for given in ("~/a.png", Path("~/a.png")):
        assert read_source(image_source("image_data", given), MediaConfig()).data == b"picture"


def test_sources_work_in_a_removed_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    text = base64.b64encode(b"the bytes of a picture").decode()
    assert read_source(image_source("image_data", text), MediaConfig()).data == b"the bytes of a picture"
    with pytest.raises(ValueError, match="neither a file that exists"):
        read_source(image_source("image_data", "a.png"), MediaConfig())


@pytest.mark.parametrize("stays", [True, False])
def test_folder_replaced_by_a_link_is_not_followed(
    stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``stays``: it is still a link when the opened file is checked."""

    def open_elsewhere(path: str, flags: int) -> int:
        inner.rename(tmp_path / "old")
        inner.symlink_to(tmp_path / "outside")
        descriptor = open_file(path, flags)
        if not stays:
            inner.unlink()
            (tmp_path / "old").rename(inner)
        return descriptor

    inner, open_file = tmp_path / "allowed" / "inner", os.open
    for folder in (inner, tmp_path / "outside"):
        folder.mkdir(parents=True)
        (folder / "a.png").write_text(folder.name)
    limits = MediaConfig(allowed_local_media_path=str(tmp_path / "allowed"))
    assert read_source(image_source("image_data", inner / "a.png"), limits).data == b"inner"
    monkeypatch.setattr(os, "open", open_elsewhere)
    with pytest.raises(ValueError, match="is not in allowed_local_media_path" if stays else "replaced while it was"):
        read_source(image_source("image_data", inner / "a.png"), limits)
