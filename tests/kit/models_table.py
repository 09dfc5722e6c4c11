"""Updates the tables of models in the guide. Each kind of model has a table, and each family a row.

    python -m tests.kit.models_table  # adds rows of new families, removes rows without a family, updates `tp_size`

Models and notes are edited in the page. A new row starts with the docstring of the family.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from aioengine import plugins
from aioengine.families._config import Task
from aioengine.families._latent import LatentFamily
from tests.kit.source import ROOT

PAGE = ROOT / "examples" / "guides" / "models.md"
HEAD = "| `model_type` | models | `tp_size` | notes |"
SECTIONS = {
    "Decoders": {Task.GENERATE, Task.EMBED, Task.CLASSIFY},
    "Vision-language models": {Task.GENERATE, Task.EMBED},
    "Encoders": {Task.EMBED, Task.CLASSIFY},
}
"""The heading above a table -> the tasks of its models, which the page states once."""


def families() -> list[str]:
    """Return every ``model_type`` with a family."""
    return [name.replace("xlm_roberta", "xlm-roberta") for name in plugins.names("families")]


def family(model_type: str) -> Any:
    """Return the family of a model type."""
    return plugins.load("families", plugins.file_name(model_type))


def section(model_type: str) -> str:
    """Return the heading above the table for this family."""
    tasks = set(family(model_type).tasks.values())
    return next(heading for heading, expected in SECTIONS.items() if tasks == expected)


def rows(page: str) -> dict[str, list[str]]:
    """Return ``model_type`` -> the cells of its row in the page."""
    lines = [line for line in page.splitlines() if line.startswith("| `") and line != HEAD]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): [first, *others] for first, *others in cells}


def described(model_type: str) -> list[str]:
    """Return models, ``can_be_divided`` and notes, from the docstring of the family or of its file: its first line."""
    family_type = family(model_type)
    first = (family_type.__doc__ or sys.modules[family_type.__module__].__doc__ or "").partition("\n")[0]
    models, _, notes = first.rstrip(".").partition(": ")
    return [models, can_be_divided(model_type), notes]


def can_be_divided(model_type: str) -> str:
    """Return whether ``tp_size`` may be above 1; "partly": each rank has whole layers of some kinds."""
    if section(model_type) != "Decoders":
        return "no"
    family_type = family(model_type)
    has_states = any(getattr(family_type, name, None) for name in ("delta_net", "short_conv", "mamba"))
    return "partly" if has_states or issubclass(family_type, LatentFamily) else "yes"


def table(page: str, heading: str) -> str:
    """Return the updated table below ``heading``: families of the page in its order, then new families."""
    written = rows(page)
    known = [name for name in families() if section(name) == heading]
    lines = [HEAD, "|---|---|---|---|"]
    for model_type in sorted(known, key=lambda name: [*written, name].index(name)):
        name, models, _, notes = written.get(model_type) or [f"`{model_type}`", *described(model_type)]
        cells = [name, models, can_be_divided(model_type), notes]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """Return the page with updated tables."""
    for heading in SECTIONS:
        before, title, after = page.partition(f"\n## {heading}\n")
        intro, rest = re.split(r"^\| `model_type` .*\n(?:\|.*\n)*", after, maxsplit=1, flags=re.MULTILINE)
        page = before + title + intro + table(page, heading) + rest
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
