"""Downloads from the hub: files, target folder, progress bars and errors."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save

from aioengine.model_files import hub
from aioengine.model_files.model_folder import locate
from tests.kit.hub_double import COMMIT, HubDouble

if TYPE_CHECKING:
    from collections.abc import Iterator

bars = import_module("huggingface_hub.utils.tqdm")  # a class has the same name

FILES = {f"model-{number}.safetensors": bytes([number]) * 1000 for number in range(12)}
FILES |= {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "README.md": b"read me", "model.bin": b"0" * 9}
TOKENIZER_FILES = {"config.json", "tokenizer.json"}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubDouble]:
    monkeypatch.chdir(tmp_path)
    with HubDouble(FILES).serving() as serving:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", serving.url)
        template = f"{serving.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield serving


def test_files_are_downloaded_once_and_found_offline(double: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {name for name in FILES if name.endswith((".json", ".safetensors"))}
    folder = Path(locate("owner/name", download_dir="cache", argument="tokenizer_path"))
    assert {file.name for file in folder.iterdir()} == TOKENIZER_FILES
    for _ in range(2):
        assert Path(locate("owner/name", download_dir="cache")) == folder
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == {name: FILES[name] for name in wanted}
        assert sorted(double.fetched) == sorted(wanted)
    assert (folder.name, folder.parents[2].name) == (COMMIT, "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert Path(locate("owner/name", download_dir="cache")) == folder


def test_only_config_files_are_downloaded_for_a_plan(double: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        folder = Path(locate("owner/name", download_dir="cache", configs_only=True))
        assert [file.name for file in folder.iterdir()] == ["config.json"]
        assert double.fetched == ["config.json"]
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_weight_shapes_are_read_from_headers(double: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [{"a": np.zeros((2, 3), np.float32)}, {f"b.{size}": np.zeros(size, np.float16) for size in range(3000)}]
    files = {f"model-{number}.safetensors": save(named) for number, named in enumerate(tensors)}
    index = {"weight_map": {name: file for file, named in zip(files, tensors, strict=True) for name in named}}
    shapes = {name: tensor.shape for named in tensors for name, tensor in named.items()}
    with pytest.raises(ValueError, match=r"'owner/name' has no \*.safetensors files; other formats are not read"):
        hub.weight_shapes("owner/name", revision=None)
    double.files = files | {"model.safetensors.index.json": json.dumps(index).encode()}
    assert hub.weight_shapes("owner/name", revision=None) == shapes
    double.files = {"model.safetensors": save(tensors[0])}
    assert hub.weight_shapes("owner/name", revision="main") == {"a": (2, 3)}
    double.files = {"model.safetensors": b"\0" * 64}
    with pytest.raises(ValueError, match="'owner/name' cannot be read: "):
        hub.weight_shapes("owner/name", revision=None)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{filename}")
    with pytest.raises(
        ValueError, match="no such folder in .*, and the model's files could not be downloaded from http://127"
    ):
        hub.weight_shapes("owner/name", revision=None)


def test_failed_download_is_an_error(double: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, filename: str, **__: object) -> None:
        raise OSError(f"no space left for {filename}")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(ValueError, match=r"could not be downloaded from http://127.*: no space left for .*disk"):
        locate("owner/name", download_dir="cache")


def test_error_without_network_names_the_searched_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'owner/name': there is no such folder in .*HF_HUB_OFFLINE is set") as caught:
        locate("owner/name", download_dir=str(tmp_path), revision="main")
    assert caught.value.__cause__ is not None
    assert str(caught.value).endswith("; unset it, or give the path of a folder with the files")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ValueError, match=f"no such folder in .*, the cache '{tmp_path}' does not have all files of"
    ) as caught:
        locate("owner/name", download_dir=str(tmp_path))
    assert "could not be downloaded from http://127.0.0.1:9: ConnectError: " in str(caught.value)
    assert str(caught.value).endswith(
        "; check the network and the disk of this machine, or give the path of a folder with the files"
    )


@pytest.mark.parametrize("is_off", [False, True])
@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.usefixtures("double")
def test_progress_bars_follow_the_argument_and_the_program(
    is_off: bool, progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[bool] = set()
    fetch = huggingface_hub.hf_hub_download

    def seen_fetch(*arguments: str, **options: str | None) -> str:
        seen.add(bars.are_progress_bars_disabled())
        return fetch(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("huggingface_hub.hf_hub_download", seen_fetch)
    monkeypatch.setattr(bars, "progress_bar_states", {"_global": not is_off})
    hub.download("owner/name", revision=None, download_dir="cache", progress=progress)
    assert bars.are_progress_bars_disabled() is is_off
    assert seen == {is_off or not progress}
