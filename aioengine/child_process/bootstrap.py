"""The first file that a child runs, by its path: ``python -P .../bootstrap.py aioengine::ROLE``.

It takes the ``aioengine`` package from its own folder, so that the child is of the version of its parent, and looks for
all other modules where the parent finds them. Only the standard library is imported before that, and it stays first:
a ``queue.py`` in a user's project cannot be taken for the real one. The user's ``__main__`` is never imported.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

PREFIX = "aioengine::"


def load_package(folder: Path) -> None:
    """Import the package ``aioengine`` that lies in ``folder``.

    Raises:
        ImportError: it is not there.
    """
    spec = importlib.util.spec_from_file_location(
        "aioengine", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} does not hold the aioengine package")
    package = importlib.util.module_from_spec(spec)
    sys.modules["aioengine"] = package
    spec.loader.exec_module(package)


def read_import_path() -> list[str]:
    """The parent's import path, which comes first on standard input: its length in bytes on a line, then its entries.

    It is no JSON, which cannot hold every path. What follows it is left unread.
    """
    length = b""
    while not length.endswith(b"\n"):
        length += _read(1)
    payload = b""
    while len(payload) < int(length):
        payload += _read(int(length) - len(payload))
    return [os.fsdecode(entry) for entry in payload.split(b"\0") if entry]


def _read(num_bytes: int) -> bytes:
    part = os.read(0, num_bytes)
    if not part:
        os._exit(1)  # the parent died first
    return part


def merged(own: list[str], parents: list[str]) -> list[str]:
    """The standard library, then the parent's entries in its order, then what this interpreter alone has."""
    library = os.path.dirname(os.__file__)
    standard = [entry for entry in own if entry in {library, os.path.join(library, "lib-dynload")}]
    return list(dict.fromkeys([*standard, *parents, *own]))


def main() -> None:
    name, _, _rank = sys.argv[1].removeprefix(PREFIX).partition("-")
    sys.path[:] = merged(sys.path, read_import_path())
    load_package(Path(__file__).resolve().parents[1])
    importlib.import_module(f"aioengine.processes.{name}_process").main()


if __name__ == "__main__":
    main()
