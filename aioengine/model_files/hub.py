"""Downloads models from the Hugging Face hub. Token, cache and ``HF_HUB_OFFLINE`` come from the environment."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

_TOKENIZER_FILES: Final = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
_WANTED_FILES: Final = {"model_path": (*_TOKENIZER_FILES, "*.safetensors"), "tokenizer_path": _TOKENIZER_FILES}
"""Argument of the constructor -> files to download."""
_CONFIGS: Final = ("*config*.json", "modules.json")
"""Files to download for a plan."""


def download(
    name: str,
    *,
    revision: str | None,
    download_dir: str | None,
    progress: bool,
    argument: str = "model_path",
    configs_only: bool = False,
) -> str:
    """Download the files of a model or tokenizer that are not in the local cache. Return the local folder.

    Args:
        argument: the constructor's argument that names the model.
        configs_only: download neither weights nor tokenizer.

    Raises ValueError if the hub cannot be reached, or has no such model that the user may read.
    """
    # Imported here, because it takes a third of a second, and most programs read a local folder.
    import huggingface_hub
    from huggingface_hub import errors

    # The files are downloaded in this thread: the threads of ``snapshot_download`` keep the program from exiting after
    # Ctrl-C until all files are complete. It only lists the missing files, and returns the folder.
    snapshot: Callable[..., Any] = partial(
        huggingface_hub.snapshot_download,  # pyright: ignore[reportUnknownMemberType]  # an untyped dict
        name,
        revision=revision,
        cache_dir=download_dir,
        allow_patterns=list(_CONFIGS if configs_only else _WANTED_FILES[argument]),
    )

    with _as_value_errors(argument, name, revision, cache=download_dir or huggingface_hub.constants.HF_HUB_CACHE):
        with suppress(errors.DryRunError):  # the hub cannot be reached, but the cache may have all files
            with _bars(are_shown=False):
                files: list[huggingface_hub.DryRunFileInfo] = snapshot(dry_run=True)
            with _bars(are_shown=progress):
                for file in files:
                    if file.will_download:
                        huggingface_hub.hf_hub_download(  # pyright: ignore[reportUnknownMemberType]  # an untyped dict
                            name, file.filename, revision=file.commit_hash, cache_dir=download_dir
                        )
        with _bars(are_shown=False):
            folder: str = snapshot()
            return folder


def weight_shapes(name: str, *, revision: str | None) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a model's tensors. Only the headers of the files are downloaded.

    Raises ValueError as ``download``, or if the model has no safetensors files, or damaged ones.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        with _as_value_errors("model_path", name, revision, cache=None), _bars(are_shown=False):
            metadata = huggingface_hub.HfApi().get_safetensors_metadata(name, revision=revision)
    except errors.NotASafetensorsRepoError as error:
        raise ValueError(f"the hub's model {name!r} has no *.safetensors files; other formats are not read") from error
    except errors.SafetensorsParsingError as error:
        raise ValueError(f"the *.safetensors files of the hub's model {name!r} cannot be read: {error}") from error
    files = metadata.files_metadata.values()
    return {tensor: tuple(info.shape) for file in files for tensor, info in file.tensors.items()}


@contextmanager
def _as_value_errors(argument: str, name: str, revision: str | None, *, cache: str | None) -> Generator[None]:
    """Convert errors of the hub to ValueErrors with a remedy.

    ``cache``: the folder of downloads in which the model was searched; None if only the hub was asked.
    """
    from huggingface_hub import constants, errors

    http: type[Exception] = vars(errors)["HTTPError"]  # the HTTP library differs between versions
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
            tried += f", the cache {cache!r} does not have all files of the hub's model of this name"
        if constants.HF_HUB_OFFLINE:
            raise ValueError(
                f"{tried}, and HF_HUB_OFFLINE is set, so the hub was not asked for the model's files; unset it, or "
                "give the path of a folder with the files"
            ) from error
        reason = (str(error).strip().splitlines() or [""])[0].removeprefix("Got: ")[:200] or type(error).__name__
        raise ValueError(
            f"{tried}, and the model's files could not be downloaded from {constants.ENDPOINT}: {reason}; check the "
            "network and the disk of this machine, or give the path of a folder with the files"
        ) from error


def _not_here(argument: str, name: str) -> str:
    try:
        here = repr(str(Path.cwd()))
    except OSError:
        here = "the working directory, which was removed"
    return f"{argument} {name!r}: there is no such folder in {here}"


@contextmanager
def _bars(*, are_shown: bool) -> Generator[None]:
    """Hide the progress bars of the hub, or leave them as the program has set them."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    is_switched = not are_shown and not are_progress_bars_disabled()
    if is_switched:
        disable_progress_bars()
    try:
        yield
    finally:
        if is_switched:
            enable_progress_bars()
