"""Plug-ins: one file, one implementation; the file's name is its public name, ``PLUGIN`` in it the class or function.

A folder is named by its path inside the package, for example "scheduler/policies". Only the chosen file is imported,
so a plug-in whose package is missing, or which is broken, affects no other. A leading underscore in a file's name
means "shared by this folder" and is no plug-in. ``ALIASES`` in the folder's ``__init__`` names plug-ins without a file
of their own: name -> "file:class".
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from aioengine import checks


def names(folder: str) -> list[str]:
    """The plug-ins of ``folder``, sorted. Imports nothing of the folder but its ``__init__``."""
    package = importlib.import_module(_module(folder))
    files = {file.name for file in pkgutil.iter_modules(package.__path__) if not file.name.startswith("_")}
    return sorted(files | _aliases(folder).keys())


def file_name(name: str) -> str:
    """The name of the file for a public name that has dashes, as some types of models do."""
    return name.replace("-", "_")


def load(folder: str, name: str) -> Any:
    """Import the plug-in ``name`` of ``folder`` and return its ``PLUGIN``.

    Raises ValueError for a name that does not exist, with the names that do; an ImportError of the chosen file itself
    is passed on.
    """
    known = names(folder)
    if name not in known:
        hint = checks.did_you_mean(name, known)
        raise ValueError(f"{folder} has no plug-in {name!r}{hint}; there are {', '.join(known)}")
    file, _, attribute = _aliases(folder).get(name, f"{name}:PLUGIN").partition(":")
    return getattr(importlib.import_module(f"{_module(folder)}.{file}"), attribute)


def _aliases(folder: str) -> dict[str, str]:
    return getattr(importlib.import_module(_module(folder)), "ALIASES", {})


def _module(folder: str) -> str:
    return "aioengine." + folder.strip("/").replace("/", ".")
