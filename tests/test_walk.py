"""``benchmarks.host.walk`` lists the functions that a plain request calls until its first chunk."""

from __future__ import annotations

from benchmarks.host import walk


async def test_walk_reaches_the_first_chunk() -> None:
    walked = await walk.measure()
    files = list(walked)
    assert (files[0], walked["api/engine.py"][0]) == ("api/engine.py", "BaseEngine.async_generate")
    way = "tokenization/tokenizer scheduler/core memory/prefix_cache text/detokenizer frontend/calls/call"
    assert {f"{file}.py" for file in way.split()} <= {*files}
    assert [file for file in files if file.startswith(walk.STAND_INS)] == []


async def test_walk_can_be_printed() -> None:
    printed = list(walk.lines({"a.py": ["A.f", "A.g", "A.f"], "b.py": ["h"]}, with_functions=True))
    assert [line.strip() for line in printed] == ["3  a.py", "A.f", "A.g", "1  b.py", "h", "4 calls in 2 files"]
