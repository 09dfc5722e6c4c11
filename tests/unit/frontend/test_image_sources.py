"""Where images come from, as messages show it."""

from __future__ import annotations

import pytest

from aioengine.frontend.image_sources import ImageSource


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
