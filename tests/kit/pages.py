"""Reads the documentation: blocks of code, links, headings and tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.kit.source import ROOT

README = ROOT / "README.md"
GUIDES = ROOT / "examples" / "guides"


class Block(NamedTuple):
    """A block of code. ``output``: the block of text directly after it, which is its expected output."""

    language: str
    code: str
    line: int
    output: str | None


def pages() -> list[Path]:
    """Return all pages of the project."""
    folders = [ROOT / name for name in ("aioengine", "benchmarks", "examples", "tests")]
    return [README, *sorted(file for folder in folders for file in folder.rglob("*.md"))]


def place(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    code_blocks: list[Block] = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL):
        language, code, output = match.groups()
        code_blocks.append(Block(language, code, text.count("\n", 0, match.start()) + 1, output))
    return code_blocks


def headings(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(text: str) -> list[str]:
    """Return the targets of links, except those to other sites."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", plain) if not target.startswith("http")]


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to missing files or headings."""
    broken: list[str] = []
    for target in links(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in headings(file.read_text(encoding="utf-8"))):
            broken.append(f"{place(page)}: {target}")
    return broken


def table(text: str, first_column: str) -> dict[str, list[str]]:
    """Return the table with this title of the first column: first cell, without backquotes -> other cells."""
    _, _, rest = text.partition(f"\n| {first_column} |")
    rows: dict[str, list[str]] = {}
    for line in rest.splitlines()[2:]:
        if not line.startswith("| "):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split(" | "))
        rows[first.strip("`")] = others
    return rows
