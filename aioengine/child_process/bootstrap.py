"""The script that a child runs: ``python -P .../bootstrap.py aioengine::ROLE``.

It imports the ``aioengine`` package from its own folder, so the child has the same version as its parent. All other
modules are imported from the parent's import path. The standard library stays first on the path, so that a ``queue.py``
in a user's project does not replace the real one. The user's ``__main__`` is never imported.
"""

import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path

PREFIX = "aioengine::"


def load_package(folder: Path) -> None:
    """Import the package ``aioengine`` from ``folder``.

    Raises:
        ImportError: ``folder`` does not contain the package.
    """
    spec = importlib.util.spec_from_file_location(
        "aioengine", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} does not contain the aioengine package")
    package = importlib.util.module_from_spec(spec)
    sys.modules["aioengine"] = package
    spec.loader.exec_module(package)


def read_import_path() -> list[str]:
    """Read the parent's import path from standard input: a line with its length in bytes, then its entries.

    The format is not JSON, because JSON cannot hold every path. The rest of the input is left unread.
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
    """Return the standard library, then the parent's entries in order, then other entries of this interpreter."""
    library = os.path.dirname(os.__file__)
    standard = [entry for entry in own if entry in {library, os.path.join(library, "lib-dynload")}]
    return list(dict.fromkeys([*standard, *parents, *own]))


def main() -> None:
    gc.set_threshold(100_000)  # the import of torch creates many objects and little garbage
    name, _, _rank = sys.argv[1].removeprefix(PREFIX).partition("-")
    sys.path[:] = merged(sys.path, read_import_path())
    load_package(Path(__file__).resolve().parents[1])
    importlib.import_module(f"aioengine.processes.{name}_process").main()


if __name__ == "__main__":
    main()
