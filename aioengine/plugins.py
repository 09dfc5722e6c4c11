"""Plug-ins: one file per implementation. The file name is the public name, and ``PLUGIN`` is the class or function.

A folder is named by its path in the package, for example "scheduler/policies". Only the requested file is imported, so
a broken plug-in or a missing package does not affect others. Files with a leading underscore are shared code, not
plug-ins. ``ALIASES`` in the folder's ``__init__`` maps names without their own file to "file:attribute".
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from aioengine.api import checks


def names(folder: str) -> list[str]:
    """Return the plug-ins of ``folder``, sorted. Imports only the folder's ``__init__``."""
    package = importlib.import_module(_module(folder))
    files = {file.name for file in pkgutil.iter_modules(package.__path__) if not file.name.startswith("_")}
    return sorted(files | _aliases(folder).keys())


def file_name(name: str) -> str:
    """Return the plug-in name of a public name with dashes, as in some model types."""
    return name.replace("-", "_")


def load(folder: str, name: str) -> Any:
    """Import the plug-in ``name`` of ``folder``, and return its ``PLUGIN``.

    Raises ValueError, which lists the known names, for an unknown name. Passes on other errors of the import.
    """
    aliases = _aliases(folder)
    file, _, attribute = aliases.get(name, f"{name}:PLUGIN").partition(":")
    module = f"{_module(folder)}.{file}"
    try:  # without a look at ``names``, which is empty if no file descriptor is free
        if name in aliases or (name.isidentifier() and not name.startswith("_")):
            return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    known = names(folder)
    hint = checks.did_you_mean(name, known)
    raise ValueError(f"{folder} has no plug-in {name!r}{hint}; allowed: {', '.join(known)}")


def _aliases(folder: str) -> dict[str, str]:
    return getattr(importlib.import_module(_module(folder)), "ALIASES", {})


def _module(folder: str) -> str:
    return "aioengine." + folder.strip("/").replace("/", ".")
