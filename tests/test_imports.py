"""``import aioengine`` is fast and does not change the program."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec

from tests.kit.source import ROOT, imports, modules
from tests.test_floors import FLOORS, floor_of

HEAVY = (
    "torch transformers numpy huggingface_hub pandas PIL fastapi aiohttp uvicorn multiprocessing "
    "prometheus_client opentelemetry ray"
).split()

WAITING = "jinja2 tqdm regex tokenizers importlib.metadata".split()

PACKAGE_NAMES = {
    "PIL": "pillow",
    "zmq": "pyzmq",
    "flashinfer": "flashinfer-python",
    "huggingface_hub": "huggingface-hub",
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
}
"""Module -> the name of its package, where the two differ."""

HOST_STATE = """
import asyncio, json, locale, logging, os, signal, sys, threading, warnings

def state():
    return {
        "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "handlers": [str(handler) for handler in logging.getLogger().handlers],
        "level": logging.getLogger().level,
        "warnings": [str(entry) for entry in warnings.filters],
        "environment": dict(os.environ),
        "locale": locale.setlocale(locale.LC_ALL),
        "threads": [thread.name for thread in threading.enumerate()],
        "hooks": [str(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
        "recursion": sys.getrecursionlimit(),
        "path": sys.path,
        "policy": str(type(asyncio.events._event_loop_policy)),
    }

before = state()
import aioengine
after = state()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""


def run(code: str) -> list[str]:
    """Run code in a new interpreter in the checkout, and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    names: list[str] = json.loads(done.stdout)
    return names


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = run("import json, sys, aioengine; print(json.dumps(list(sys.modules)))")
    assert [name for name in HEAVY if name in loaded] == []


def test_engine_import_is_small() -> None:
    loaded = run("import json, sys; from aioengine import AsyncEngine, Engine; print(json.dumps(list(sys.modules)))")
    assert [name for name in WAITING if name in loaded] == []


def test_child_processes_start_without_asyncio_and_numpy() -> None:
    """Each of them takes as long as all other imports of a detokenizer process."""
    names = "aioengine.processes.scheduler_process, aioengine.processes.detokenizer_process"
    loaded = run(f"import json, sys, {names}; print(json.dumps(list(sys.modules)))")
    assert [name for name in (*HEAVY, "asyncio") if name in loaded] == []


def test_no_module_outside_the_torch_floors_imports_torch() -> None:
    light = [of.name for of in modules() if "torch" not in FLOORS[floor_of(of.name) or "0"].packages]
    wanted = [name for name in light if floor_of(name) not in {"3", "5"} and not name.endswith("__main__")]
    assert len(wanted) > 20
    if find_spec("ray") is None:
        wanted = [name for name in wanted if "ray" not in re.split("[._]", name)]
    load = f"import importlib, json, sys\nfor name in {wanted}: importlib.import_module(name)\n"
    loaded = run(load + "print(json.dumps(list(sys.modules)))")
    assert [name for name in ("torch", "transformers", "flashinfer") if name in loaded] == []


def test_importing_the_package_changes_nothing_in_the_host() -> None:
    assert run(HOST_STATE) == []


def test_dependencies_equal_the_imported_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_features = [entry for name in ("cuda", "images", "metrics", "ray", "server") for entry in extras[name]]
    declared, optional = map(names_of, (project["dependencies"], of_features))
    tops = {entry.target.split(".")[0] for of in modules() for entry in imports(of)}
    imported = {PACKAGE_NAMES.get(name, name) for name in tops - sys.stdlib_module_names - {"aioengine"}}
    others = {"starlette", "triton", "typing_extensions"}  # these come with FastAPI, torch and type checkers
    assert imported - optional - others == declared


def test_distributions_contain_the_license_text() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (path,) = project["license-files"]
    text = (ROOT / path).read_text()
    assert project["license"] == "Apache-2.0"
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "APPENDIX: How to apply the Apache License to your work." in text


def names_of(requirements: list[str]) -> set[str]:
    return {match[0] for entry in requirements if (match := re.match(r"[\w-]+", entry))}
