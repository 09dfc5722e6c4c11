"""Rows that share an object of sampling parameters share the slow results of its conversion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine import SamplingParams
from aioengine.testing.fake_engine import fake_async_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest


async def test_alternating_parameters_are_converted_once_per_object(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_async_engine() as engine:
        encoder = engine._frontend_here()._encoder
        assert encoder is not None
        tokenize, words = encoder.tokenize, list[str]()

        def counted(texts: Sequence[str]) -> list[list[int]]:
            words.extend(texts)
            return tokenize(texts)

        monkeypatch.setattr(encoder, "tokenize", counted)
        params = [SamplingParams(bad_words=[word], max_new_tokens=2) for word in ("one", "two")]
        outs = await engine.async_generate(["a prompt"] * 40, params * 20)
        assert outs["meta_info"]["completion_tokens"] == [2] * 40
        assert words == ["one", " one", "two", " two"]
