"""Downloads from the Hugging Face hub. Its token, its cache and ``HF_HUB_OFFLINE`` come from the environment."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

Given = TypeVar("Given")

_TOKENIZER_FILES: Final = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
_WANTED_FILES: Final = {"model_path": (*_TOKENIZER_FILES, "*.safetensors"), "tokenizer_path": _TOKENIZER_FILES}
"""Files to download, by the constructor's argument that names the model."""
_CONFIGS: Final = ("*config*.json", "modules.json")
"""Of a model that is looked at and not loaded."""

_NUM_THREADS: Final = 8


def download(
    name: str,
    *,
    revision: str | None,
    download_dir: str | None,
    progress: bool,
    argument: str = "model_path",
    configs_only: bool = False,
) -> str:
    """Fetch the files of a model or a tokenizer that are not in the hub's cache yet; returns the local folder.

    ``configs_only``: neither weights nor tokenizer.

    Raises:
        ValueError: the hub has no such model for this user, or it could not be reached.
    """
    # Imported here alone: it takes a third of a second, and most programs read a local folder.
    import huggingface_hub
    from huggingface_hub import errors

    # Its own threads would keep the program from exiting until all files are there, minutes after a Ctrl-C: it finds
    # out which are missing, and at the end which folder has them.
    find: Callable[..., Any] = partial(
        huggingface_hub.snapshot_download,  # pyright: ignore[reportUnknownMemberType]  # an untyped dict
        name,
        revision=revision,
        cache_dir=download_dir,
        allow_patterns=list(_CONFIGS if configs_only else _WANTED_FILES[argument]),
    )

    def fetch(file: huggingface_hub.DryRunFileInfo) -> None:
        huggingface_hub.hf_hub_download(  # pyright: ignore[reportUnknownMemberType]  # an untyped dict
            name, file.filename, revision=file.commit_hash, cache_dir=download_dir
        )

    with _errors_named(argument, name, revision, cache=download_dir or huggingface_hub.constants.HF_HUB_CACHE):
        with suppress(errors.DryRunError):  # the hub cannot be reached, and all may be in the cache
            with _bars(are_shown=False):
                found: list[huggingface_hub.DryRunFileInfo] = find(dry_run=True)
            with _bars(are_shown=progress):
                _call_with_each(fetch, [file for file in found if file.will_download])
        with _bars(are_shown=False):
            folder: str = find()
            return folder


def weight_shapes(name: str, *, revision: str | None) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a model's tensors, of whose files the headers alone are fetched.

    Raises:
        ValueError: as ``download``; or the model has no safetensors files, or damaged ones.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        with _errors_named("model_path", name, revision, cache=None), _bars(are_shown=False):
            found = huggingface_hub.HfApi().get_safetensors_metadata(name, revision=revision)
    except errors.NotASafetensorsRepoError as error:
        raise ValueError(f"the hub's model {name!r} has no *.safetensors files; other forms are not read") from error
    except errors.SafetensorsParsingError as error:
        raise ValueError(f"the *.safetensors files of the hub's model {name!r} cannot be read: {error}") from error
    files = found.files_metadata.values()
    return {tensor: tuple(info.shape) for file in files for tensor, info in file.tensors.items()}


@contextmanager
def _errors_named(argument: str, name: str, revision: str | None, *, cache: str | None) -> Generator[None]:
    """Errors of the hub as ValueErrors that say what was tried and what to do.

    ``cache``: the folder of downloads where the model was looked for; None: its files are read from the hub alone.
    """
    from huggingface_hub import constants, errors

    http: type[Exception] = vars(errors)["HTTPError"]  # of the library that this version of it uses
    try:
        yield
    except (errors.HFValidationError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        wanted = f"revision {revision!r} of this model" if revision else "model of this name"
        raise ValueError(
            f"{_not_here(argument, name)}, and the hub has no {wanted} that you may read; check the spelling, "
            "and for a private or gated model log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, http, OSError) as error:
        tried = _not_here(argument, name)
        if cache is not None:
            tried += f", the cache {cache!r} lacks files of the hub's model of this name"
        if constants.HF_HUB_OFFLINE:
            raise ValueError(
                f"{tried}, and HF_HUB_OFFLINE is set, so the hub was not asked for the model's files; unset it, or "
                "give the path of a folder that has them"
            ) from error
        reason = (str(error).strip().splitlines() or [""])[0].removeprefix("Got: ")[:200] or type(error).__name__
        raise ValueError(
            f"{tried}, and the model's files could not be fetched from {constants.ENDPOINT}: {reason}; check the "
            "network and the disk of this machine, or give the path of a folder that has them"
        ) from error


def _not_here(argument: str, name: str) -> str:
    try:
        here = repr(str(Path.cwd()))
    except OSError:
        here = "the working directory, which was removed"
    return f"{argument} {name!r}: there is no such folder in {here}"


@contextmanager
def _bars(*, are_shown: bool) -> Generator[None]:
    """Show no progress bars of the hub, or leave it to the program whether they are shown."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    is_switched = not are_shown and not are_progress_bars_disabled()
    if is_switched:
        disable_progress_bars()
    try:
        yield
    finally:
        if is_switched:
            enable_progress_bars()


def _call_with_each(call: Callable[[Given], object], values: Sequence[Given]) -> None:
    """``call`` with each value, on several threads that end with the program. Raises what the first failure raised."""
    waiting = SimpleQueue[Given]()
    for value in values:
        waiting.put(value)
    failures: list[BaseException] = []

    def work() -> None:
        while not failures:
            try:
                call(waiting.get_nowait())
            except Empty:
                return
            except BaseException as error:  # raised by the caller's thread
                failures.append(error)

    threads = [threading.Thread(target=work, name="aioengine-download", daemon=True) for _ in values[:_NUM_THREADS]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
