"""The program ``aioengine batch`` with a fake engine: python -m tests.kit.fake_batch LOG batch IN OUT ...

Each row that is computed adds a line to LOG.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from aioengine.cli import batch, main
from aioengine.testing.fake_engine import fake_async_engine


def run(log: str, *argv: str) -> int:
    log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    answer = batch.ItemAnswers.answer

    async def logged(self: batch.ItemAnswers, item: Any) -> Any:
        os.write(log_file, f"{item}\n".encode())
        return await answer(self, item)

    batch.ItemAnswers.answer = logged  # type: ignore[method-assign]
    engine = fake_async_engine(step_time_s=0.002, processes=False)
    batch.AsyncEngine = type("", (), {"from_config": lambda _: engine})  # type: ignore[misc, assignment]
    return main(argv)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
