"""The table of models in the guide: one row per model type. Some columns are generated from the code.

    python -m tests.kit.models_table  # updates the generated columns, and adds rows for new families

The columns "models" and "notes" are edited in the page. A new row starts with the docstring of the family.
"""

from __future__ import annotations

import sys
from typing import Any

from aioengine import plugins
from aioengine.families._config import Task
from aioengine.model_files import gguf_model
from tests.kit.source import ROOT

PAGE = ROOT / "examples" / "guides" / "models.md"
HEAD = ("`model_type`", "models", "gives", "takes", "adapters", "GGUF", "notes")
OUTPUTS = {Task.GENERATE: "text", Task.EMBED: "vectors", Task.CLASSIFY: "scores"}


def families() -> list[str]:
    """Return every ``model_type`` with a family."""
    return [name.replace("xlm_roberta", "xlm-roberta") for name in plugins.names("families")]


def family(model_type: str) -> Any:
    """Return the family of a model type."""
    return plugins.load("families", plugins.file_name(model_type))


def facts(model_type: str) -> tuple[str, ...]:
    """Return the generated cells: outputs, inputs, and support for adapters and GGUF files."""
    name = plugins.file_name(model_type)
    tasks = set(family(model_type).tasks.values())
    outputs = ", ".join(words for task, words in OUTPUTS.items() if task in tasks)
    takes = "text, images" if name in plugins.names("media") else "text"
    is_decoder = Task.GENERATE in tasks
    return outputs, takes, "yes" if is_decoder else "", "yes" if model_type in gguf_model.ARCHITECTURES else ""


def rows(page: str) -> dict[str, list[str]]:
    """Return ``model_type`` -> the cells of its row in the page."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0].strip("`"): cells for cells in found if cells[0] != HEAD[0]}


def described(model_type: str) -> tuple[str, str]:
    """Return the models and the notes, from the first line of the docstring of the family or of its file."""
    family_type = family(model_type)
    first = (family_type.__doc__ or sys.modules[family_type.__module__].__doc__ or "").partition("\n")[0]
    models, _, notes = first.rstrip(".").partition(": ")
    return models, notes


def table(page: str) -> list[str]:
    """Return the lines of the table in the order of the page, with new families at the end."""
    written = rows(page)
    known = families()
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for model_type in [*(name for name in written if name in known), *(name for name in known if name not in written)]:
        cells = written.get(model_type)
        models, notes = described(model_type) if cells is None else (cells[1], cells[-1])
        own = (f"`{model_type}`", models, *facts(model_type), notes)
        lines.append("| " + " | ".join(own).replace("|  |", "| |").replace("|  |", "| |").rstrip() + " |")
    return lines


def updated(page: str) -> str:
    """Return the page with an updated table."""
    lines = page.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {HEAD[0]}"))
    end = next(number for number in range(begin, len(lines)) if not lines[number].startswith("|"))
    return "\n".join([*lines[:begin], *table(page), *lines[end:]]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
