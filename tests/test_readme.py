"""The documentation agrees with the code, its links work, and README is short."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import aioengine
from aioengine import plugins
from aioengine.api import foreign_names
from aioengine.api.args import ARGUMENTS
from aioengine.api.params import ALIASES, PARAMETERS
from aioengine.frontend.info import Health
from aioengine.model_files import gguf_model
from aioengine.model_files.quantized_formats import FORMATS
from aioengine.testing.fake_engine import fake_engine
from tests.kit import models_table
from tests.kit.pages import GUIDES, README, blocks, broken_links, headings, links, pages, place, table
from tests.kit.source import PACKAGE, ROOT

README_LINES = 200


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def guide(name: str) -> str:
    return text_of(GUIDES / f"{name}.md")


def test_readme_is_short() -> None:
    assert text_of(README).count("\n") <= README_LINES


def test_the_first_two_shell_lines_install_and_run_and_test() -> None:
    lines = [line for block in blocks(text_of(README)) if block.language == "bash" for line in block.code.splitlines()]
    assert re.fullmatch(r'pip install \. && aioengine generate "[^"]+"', lines[0])
    assert lines[1] == "pip install '.[test]' && pytest -n 2 --dist loadfile"


@pytest.mark.parametrize("page", pages(), ids=place)
def test_links_are_not_broken(page: Path) -> None:
    assert broken_links(page) == []


def test_every_guide_is_listed_and_every_feature_has_a_guide() -> None:
    listed = [link for link in links(guide("README")) if "/" not in link]
    assert {link.partition("#")[0] for link in listed} == {file.name for file in GUIDES.glob("*.md")} - {"README.md"}
    features = table(text_of(README), "feature")
    assert len(features) > 15
    assert [row for row in features if not links(row)] == []


def test_table_of_settings_equals_the_arguments() -> None:
    expected = {name: [argument.help, argument.default_text] for name, argument in ARGUMENTS.items()}
    assert table(guide("settings"), "argument") == expected


def test_table_of_sampling_parameters_equals_the_code() -> None:
    expected = {name: [str(row.default), row.doc] for name, row in PARAMETERS.items()}
    assert table(guide("sampling"), "parameter") == expected


def test_table_of_sampling_parameter_aliases_equals_the_code() -> None:
    rows = table(guide("sampling"), "name").items()
    assert {name: cells[0].strip("`") for row, cells in rows for name in names_in(row)} == ALIASES


def names_in(cell: str) -> list[str]:
    return re.findall(r"\w+", cell)


def test_table_of_setting_aliases_equals_the_code() -> None:
    rows = table(guide("coming_from"), "argument of the constructor")
    assert {name: cells[0].strip("`") for name, cells in rows.items()} == foreign_names.ALIASES


def test_table_of_errors_equals_the_code() -> None:
    public = {name: value for name in aioengine.__all__ if inspect.isclass(value := getattr(aioengine, name))}
    errors = {name: value for name, value in public.items() if issubclass(value, Exception)}
    expected = {
        name: ([base.__name__ for base in error.__bases__], error.status_code) for name, error in errors.items()
    }
    rows = table(guide("errors"), "error").items()
    assert {name: (names_in(cells[0]), int(cells[-1][:3])) for name, cells in rows} == expected


def test_every_counter_and_every_state_is_explained() -> None:
    with fake_engine() as engine:
        counters = engine.stats()
    explained = {name for row in table(guide("watching"), "key") for name in names_in(row)}
    assert explained == counters.keys()
    assert set(table(guide("watching"), "state")) == set(re.findall(r'"(\w+)"', Health.__doc__ or ""))


def test_the_files_of_a_request_exist() -> None:
    steps = table(text_of(PACKAGE / "README.md"), "no.")
    assert len(steps) == 13
    assert [cells[0] for cells in steps.values() if not (PACKAGE / links(cells[0])[0]).is_file()] == []


def test_every_folder_of_the_package_is_explained() -> None:
    results = {file.parent.relative_to(PACKAGE).parts[0] for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE}
    rooms = {name for row in table(text_of(PACKAGE / "README.md"), "folder") for name in re.findall(r"\[(\w+)/\]", row)}
    assert results <= rooms


def test_every_top_level_file_is_explained() -> None:
    names = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    rows = text_of(PACKAGE / "README.md")
    named = {name for row in table(rows, "files") for name in names_in(row)}
    assert names == named


def test_page_helpers_find_mistakes(tmp_path: Path) -> None:
    assert headings("# A page\n## What's `new`?\n```\n# none\n```\n") == {"a-page", "whats-new"}
    assert [block[:2] for block in blocks("```python\na\n```\n\n```text\nb\n```\n")] == [("python", "a\n")]
    assert blocks("x\n\n```python\na\n```\n\n```text\nb\n```\n")[0][2:] == (3, "b\n")
    assert table("\n| a | b |\n|---|---|\n| `x` | 1 |\n| y, z | 2 |\n\n| c |\n", "a") == {"x": ["1"], "y, z": ["2"]}
    page = ROOT / "examples" / "guides" / "README.md"
    assert broken_links(page) == []
    assert links("[a](b.md#c) [d](https://x) ![e](f)\n```\n[g](h)\n```\n") == ["b.md#c", "f"]


def test_tests_readme_names_tests_for_every_module() -> None:
    tests = ROOT / "tests"
    rows = table(text_of(tests / "README.md"), "part of the package")
    parts = {part for row in rows for part in re.findall(r"[\w./]+\w(?:\.py|/)", row)}
    named = {name for cells in rows.values() for name in re.findall(r"`([^`]+)`", cells[0])}
    assert [name for name in sorted(named) if not (tests / name).exists()] == []
    assert [part for part in sorted(parts) if not (PACKAGE / part).exists()] == []
    of_its_name = {file.stem.removeprefix("test_") for file in tests.rglob("test_*.py")}
    places = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("[!_]*.py")]
    without = [
        place.as_posix()
        for place in places
        if place.stem not in of_its_name
        and not parts & {place.as_posix(), f"{place.parent.as_posix()}/", f"{place.parts[0]}/"}
    ]
    assert without == []


def test_tables_of_models_have_all_families() -> None:
    page = models_table.PAGE.read_text()
    assert page == models_table.updated(page), "run python -m tests.kit.models_table, and see what it wrote"
    assert len(models_table.rows(page)) == len(plugins.names("families"))


def test_new_family_gets_a_row_with_its_docstring() -> None:
    page = models_table.PAGE.read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| `qwen2` |")]
    rows = models_table.rows(models_table.updated(page.replace(row + "\n", "")))
    assert models_table.described("qwen2")[0] == "Qwen2"
    assert rows["qwen2"][1:] == models_table.described("qwen2")
    names = list(rows)
    assert names.index("qwen2") == names.index("qwen3_5") - 1, "the last row of the first table"


def test_guide_marks_the_vision_models_that_do_not_read_images() -> None:
    page = models_table.PAGE.read_text()
    notes = {name: cells[-1] for name, cells in models_table.rows(page).items()}
    vision = [name for name in models_table.families() if models_table.section(name) == "Vision-language models"]
    assert [name for name in vision if not notes[name].startswith("text only")] == sorted(plugins.names("media/tokens"))


def test_gguf_architectures_equal_the_code() -> None:
    named = re.findall(r"`(\w+)`", table(guide("gguf"), "part of the file")["architecture"][0])
    assert set(named) == set(gguf_model.ARCHITECTURES)


def test_table_of_quantized_formats_equals_the_code() -> None:
    named: dict[tuple[str, str], tuple[str, ...]] = {}
    for name, (_, gpu, cpu) in table(guide("quantization"), "format").items():
        source, _, quoted = name.rpartition("=")
        devices = [device for device, kept in (("cpu", cpu), ("cuda", gpu)) if kept != "refused"]
        named[source or "quant_method", quoted.strip('"')] = tuple(devices)
    del named["load_format", "gguf"]
    assert named == {(source, name): row for source, rows in FORMATS.items() for name, row in rows.items()}
