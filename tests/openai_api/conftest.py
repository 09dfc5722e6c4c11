from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import openai

    from tests.openai_api.serving import Served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    """A client of the module's server."""
    import openai  # takes long, and not all files of this folder need it

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
