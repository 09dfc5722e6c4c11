"""The tables of models in the guide: one for each kind of model, with a row for each family.

    python -m tests.kit.models_table  # adds rows of new families to the page, and removes rows without a family

Models and notes of a row are written by hand in the page. The row of a new family starts with the first line of its
file.
"""

from __future__ import annotations

import ast
import importlib
import re

from aioengine import plugins
from aioengine.families._config import FamilyConfig, Task
from aioengine.families._encoders import EncoderFamily
from aioengine.families._vision import TASKS, VisionFamily
from tests.kit.source import ROOT

PAGE = ROOT / "examples" / "guides" / "models.md"
HEAD = "| `model_type` | models | notes |"
SECTIONS = {
    "Decoders": {Task.GENERATE, Task.EMBED, Task.CLASSIFY},
    "Vision-language models": {Task.GENERATE, Task.EMBED},
    "Encoders": {Task.EMBED, Task.CLASSIFY},
}
"""The heading above a table -> the tasks of its models, which the page states once."""


def families() -> list[str]:
    """Every ``model_type`` that has a file."""
    return [name.replace("xlm_roberta", "xlm-roberta") for name in plugins.names("families")]


def section(model_type: str) -> str:
    """The heading above the table for this family."""
    module = importlib.import_module(plugins.load("families", plugins.file_name(model_type)).__module__)
    tasks: set[Task] = set().union(*(_tasks(value) for value in vars(module).values() if isinstance(value, type)))
    return next(heading for heading, expected in SECTIONS.items() if tasks == expected)


def _tasks(cls: type) -> set[Task]:
    """The tasks of a class that reads config.json; empty for other classes."""
    if issubclass(cls, VisionFamily):
        return set(TASKS.values())
    return set(cls.tasks.values()) if issubclass(cls, FamilyConfig | EncoderFamily) else set()


def rows(page: str) -> dict[str, list[str]]:
    """``model_type`` -> the cells of its row in the page."""
    lines = [line for line in page.splitlines() if line.startswith("| `") and line != HEAD]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): [first, *others] for first, *others in cells}


def words_of_file(model_type: str) -> list[str]:
    """The models and the notes of a family, from the first line of its file."""
    file = ROOT / "aioengine" / "families" / f"{plugins.file_name(model_type)}.py"
    first = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
    models, _, notes = first.rstrip(".").partition(": ")
    return [models, notes]


def table(page: str, heading: str) -> str:
    """The table below ``heading`` as it should be: families in the order of the page, then new ones."""
    written = rows(page)
    known = [name for name in families() if section(name) == heading]
    lines = [HEAD, "|---|---|---|"]
    for model_type in sorted(known, key=lambda name: [*written, name].index(name)):
        cells = written.get(model_type) or [f"`{model_type}`", *words_of_file(model_type)]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with the tables as they should be."""
    for heading in SECTIONS:
        before, title, after = page.partition(f"\n## {heading}\n")
        intro, rest = re.split(r"^\| `model_type` .*\n(?:\|.*\n)*", after, maxsplit=1, flags=re.MULTILINE)
        page = before + title + intro + table(page, heading) + rest
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
