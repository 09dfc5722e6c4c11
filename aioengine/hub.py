"""Downloads from the Hugging Face hub. The hub's token, cache and ``HF_HUB_OFFLINE`` come from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TOKENIZER_FILES: Final = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
_WANTED_FILES: Final = {"model_path": (*_TOKENIZER_FILES, "*.safetensors"), "tokenizer_path": _TOKENIZER_FILES}
"""By the constructor's argument that names the download."""


def may_be_hub_id(name: str) -> bool:
    """Whether this reads "owner/name" (or an old plain "name"), and not as a path."""
    parts = name.split("/")
    if name.startswith((".", "~", "/")) or len(parts) > 2:
        return False
    return all(part and part.translate({ord(mark): None for mark in "-_."}).isalnum() for part in parts)


def download(
    name: str, *, revision: str | None, download_dir: str | None, progress: bool, argument: str = "model_path"
) -> str:
    """Fetch the files of a model, or of a tokenizer, that are not in the cache yet, and give the local folder.

    Raises:
        ValueError: the hub has no such model for this user, or it could not be reached.
    """
    # Imported here alone: it takes a third of a second, and most programs read a local folder.
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    is_switched = not progress and not are_progress_bars_disabled()  # what the program has switched off stays off
    if is_switched:
        disable_progress_bars()
    try:
        return huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]  # an untyped dict
            name, revision=revision, cache_dir=download_dir, allow_patterns=list(_WANTED_FILES[argument])
        )
    except (errors.HFValidationError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ValueError(_not_found(argument, name, revision)) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise ValueError(_not_reached(argument, name, error)) from error
    finally:
        if is_switched:
            enable_progress_bars()


def _not_here(argument: str, name: str) -> str:
    try:
        here = repr(str(Path.cwd()))
    except OSError:
        here = "the working directory, which was removed"
    return f"{argument} {name!r}: there is no such folder in {here}"


def _not_found(argument: str, name: str, revision: str | None) -> str:
    what = f"revision {revision!r} of this model" if revision else "model of this name"
    return (
        f"{_not_here(argument, name)}, and the hub has no {what} that you may read; check the spelling, "
        "and for a private or gated model log in with `hf auth login` or set HF_TOKEN"
    )


def _not_reached(argument: str, name: str, error: Exception) -> str:
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return (
        f"{_not_here(argument, name)}, and the hub's model of this name is not in the cache and could not be fetched"
        f"{' (HF_HUB_OFFLINE is set)' if is_offline else ''}: {reason}"
    )
