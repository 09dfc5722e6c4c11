"""The first file that a child runs, by its path: ``python -P .../bootstrap.py aioengine::ROLE``.

It takes the ``aioengine`` package from its own folder, whatever else of that name could be imported, and puts nothing
in front of the standard library and the installed packages. So a ``queue.py`` in somebody's working directory cannot
be taken for the real one, and the child is of the version of its parent. The user's ``__main__`` is never imported.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

PREFIX = "aioengine::"


def load_package(folder: Path) -> None:
    """Import the package ``aioengine`` that lies in ``folder``."""
    spec = importlib.util.spec_from_file_location(
        "aioengine", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} does not hold the aioengine package")
    package = importlib.util.module_from_spec(spec)
    sys.modules["aioengine"] = package
    spec.loader.exec_module(package)


def main() -> None:
    role = sys.argv[1].removeprefix(PREFIX)
    load_package(Path(__file__).resolve().parents[1])
    importlib.import_module(f"aioengine.processes.{role}_process").main()


if __name__ == "__main__":
    main()
