"""Constructors raise the errors of a model folder before they start anything."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aioengine import AsyncEngine, Engine
from aioengine.families._tensors import checkpoint_tensors
from aioengine.families.llama import MistralFamily
from aioengine.model_files.model_folder import DEMO_MODEL
from tests.kit.source import ROOT
from tests.kit.waiting import wait_until

CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "torch_dtype": "float32",
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
Shapes = dict[str, tuple[int, ...]]
Break = Callable[[Path], object]


def shapes(**changes: object) -> Shapes:
    specs = checkpoint_tensors(MistralFamily.read(CONFIG | changes))
    return {name: spec.shape for name, spec in specs.items()}


def save_weights(path: Path, tensors: Shapes, *, dtype: str = "F32") -> None:
    """Write a safetensors file of zeros."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a valid model folder."""
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    write_config(tmp_path)
    save_weights(tmp_path / WEIGHTS, shapes())
    return tmp_path


def write_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def shard(folder: Path) -> None:
    """Write two shards and their index."""
    tensors = shapes()
    parts = {
        "model-1.safetensors": dict(list(tensors.items())[:5]),
        "model-2.safetensors": dict(list(tensors.items())[5:]),
    }
    for name, part in parts.items():
        save_weights(folder / name, part)
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


def without_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-2.safetensors").unlink()


def with_index(text: str) -> Break:
    def write(folder: Path) -> None:
        shard(folder)
        (folder / INDEX).write_text(text)

    return write


def cut_to(size: int) -> Break:
    return lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size + size if size < 0 else size)


def with_bytes(content: bytes) -> Break:
    return lambda folder: (folder / WEIGHTS).write_bytes(content)


def with_pointer(name: str) -> Break:
    return lambda folder: (folder / name).write_text(POINTER)


def with_tensors(*, without: str = "", dtype: str = "F32", **others: tuple[int, ...]) -> Break:
    tensors = {name: shape for name, shape in shapes().items() if name != without}
    named = {name.replace("__", "."): shape for name, shape in others.items()}
    return lambda folder: save_weights(folder / WEIGHTS, tensors | named, dtype=dtype)


def with_config(**changes: object) -> Break:
    return lambda folder: write_config(folder, **changes)


def with_text(name: str, text: str | bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def with_header(header: dict[str, object] | str, size: int = 0) -> Break:
    """Write a file with this header. ``size``: of the tensors, in bytes."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return with_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


def tensor(begin: int, end: int, *shape: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}


def write_sparse(path: Path, size: int) -> None:
    """Write a sparse file whose header has the size of the file."""
    path.write_bytes((size - 8).to_bytes(8, "little"))
    os.truncate(path, size)


def with_link(name: str, to: str) -> Break:
    def link(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return link


def with_pipe(name: str) -> Break:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def with_folder(name: str) -> Break:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


BREAKS: dict[str, tuple[Break, str]] = {
    "missing shard": (
        without_shard,
        "model-2.safetensors: model.safetensors.index.json names it; fetch the whole model",
    ),
    "broken index": (with_index("[]"), "model.safetensors.index.json' cannot be read: Expected `object`"),
    "pointer for the index": (
        with_index(POINTER),
        "index.json' is a Git LFS pointer, not the file: run `git lfs pull`",
    ),
    "truncated": (cut_to(-100), "model.safetensors: it is truncated: it has [0-9]* bytes of [0-9]*; fetch it again"),
    "truncated header": (cut_to(20), "model.safetensors: it is truncated or no safetensors file"),
    "immense header": (
        with_bytes((2**62).to_bytes(8, "little") + bytes(100)),
        "model.safetensors: it is truncated or no safetensors file",
    ),
    "damaged header": (
        with_bytes((4).to_bytes(8, "little") + b"\xff{}x"),
        "model.safetensors: its header is damaged",
    ),
    "pointer for weights": (
        with_pointer(WEIGHTS),
        "model.safetensors' is a Git LFS pointer, not the file: run `git lfs",
    ),
    "pointer for config": (with_pointer("config.json"), "config.json' is a Git LFS pointer"),
    "pointer for tokenizer": (with_pointer("tokenizer.json"), "tokenizer.json' is a Git LFS pointer"),
    "wrong shape": (
        with_tensors(model__norm__weight=(15,)),
        r"model.norm.weight has shape \[15\], and the model expects \[16\]",
    ),
    "missing tensor": (with_tensors(without="model.norm.weight"), "1 tensor missing: model.norm.weight"),
    "unexpected tensor": (with_tensors(model__extra=(16,)), "not expected by this model: model.extra"),
    "wrong type": (with_tensors(dtype="I32"), "is of type I32; allowed: F64"),
    "weights in another form": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin, which is not read because it may run code. Convert .*save_pretrained",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no weights"),
    "index without a map": (with_index("{}"), "index.json' cannot be read: .* missing required field `weight_map`"),
    "map of numbers": (with_index('{"weight_map": {"a": 5}}'), "index.json' cannot be read: Expected `str`, got `int`"),
    "absolute name": (with_index('{"weight_map": {"a": "/x.safetensors"}}'), "names '/x.safetensors', which is not in"),
    "name above": (with_index('{"weight_map": {"a": "../x.safetensors"}}'), "names '../x.saf.*', which is not in"),
    "odd name": (with_index('{"weight_map": {"a": "x\\u0000"}}'), "which is not in the model folder"),
    "deep index": (with_index('{"weight_map": ' + "[" * 10**5), "index.json' cannot be read"),
    "overlapping tensors": (
        with_header({"a": tensor(0, 8, 2), "b": tensor(4, 12, 2)}, 12),
        "its header is damaged: 'b' has the bytes 4 to 12, and the previous tensor ends at 8",
    ),
    "a gap": (with_header({"a": tensor(0, 8, 2), "b": tensor(12, 20, 2)}, 20), "'b' has the bytes 12 to 20, and the"),
    "a gap at the start": (
        with_header({"a": tensor(8, 16, 2)}, 16),
        "'a' has the bytes 8 to 16, and the previous tensor",
    ),
    "a name that occurs twice": (
        with_header(f'{{"a": {json.dumps(tensor(0, 8, 2))}, "a": {json.dumps(tensor(8, 16, 2))}}}', 16),
        "'a' has the bytes 8 to 16, and the previous tensor ends at 0",
    ),
    "tensors beyond the file": (with_header({"a": tensor(0, 2**50, 2**48)}, 8), "it is truncated: it has .* bytes of"),
    "bytes that belong to no tensor": (with_header({"a": tensor(0, 8, 2)}, 9), "it is damaged: it has .* bytes of"),
    "a size of another type": (
        with_header({"a": tensor(0, 8, 2, dtype="F64")}, 8),
        r"'a' has shape \[2\] of F64 in 8 bytes",
    ),
    "a tensor that ends before it begins": (with_header({"a": tensor(0, 0, 0), "b": tensor(0, -8, 2)}), "`int` >= 0"),
    "a negative size": (with_header({"a": tensor(0, 8, -2)}, 8), "its header is damaged: Expected `int` >= 0"),
    "an immense size": (with_header({"a": tensor(0, 8, 2**62)}, 8), "its header is damaged: Expected `int` <= "),
    "many dimensions": (with_header({"a": tensor(0, 8, *[1] * 99)}, 8), "Expected `array` of length <= 16"),
    "a size that is no number": (with_header({"a": tensor(0, 8, "two")}, 8), "Expected `int`, got `str`"),
    "a header of gigabytes": (lambda folder: write_sparse(folder / WEIGHTS, 2**34), "no safetensors file"),
    "pipe for the index": (with_pipe(INDEX), "index.json' is a pipe, socket or device, not a file"),
    "large config": (lambda folder: write_sparse(folder / "config.json", 2**40), "config.json' cannot be read: it has"),
    "odd metadata": (with_header({"__metadata__": {"format": 5}}), "its header is damaged: Expected `str`, got `int`"),
    "pipe for weights": (with_pipe(WEIGHTS), "model.safetensors' is a pipe, socket or device, not a file"),
    "pipe for config": (with_pipe("config.json"), "config.json' is a pipe, socket or device, not a file"),
    "pipe for tokenizer": (with_pipe("tokenizer.json"), "tokenizer.json' is a pipe, socket or device, not a file"),
    "pipe for tokenizer config": (with_pipe("tokenizer_config.json"), "tokenizer_config.json' is a pipe, socket"),
    "device for config": (with_link("config.json", "/dev/zero"), "config.json' is a pipe, socket or device"),
    "folder for config": (with_folder("config.json"), "config.json' is a folder, not a file"),
    "loop for config": (with_link("config.json", "config.json"), "config.json' cannot be read: Too many levels"),
    "deep config": (with_text("config.json", '{"x": ' + "[" * 10**5), "config.json' cannot be read"),
    **{
        f"{why} {name}": (with_text(name, text), f"{name}' {message}")
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json")
        for why, text, message in (
            ("empty", "", "cannot be read: Input data was truncated"),
            ("broken", "{", "cannot be read: "),
            ("list for", "[]", "(must hold a JSON object, not a list|cannot be read: Expected `object`)"),
            ("null for", "null", "(must hold a JSON object, not null|cannot be read: Expected `object`)"),
            ("Latin", b'{"a": "caf\xe9"}', "cannot be read: .*(utf-8|UTF-8)"),
            ("pointer for", POINTER, "is a Git LFS pointer"),
            ("deep", '{"x": ' + "[" * 10**5, "cannot be read: "),
        )
    },
    **{
        f"{why} tokenizer.json": (with_text("tokenizer.json", text), f"tokenizer.json' {message}")
        for why, text, message in (
            ("empty", "", "cannot be read: Input data was truncated"),
            ("broken", "{", "cannot be read: "),
            ("list for", "[]", "cannot be read: Expected `object`"),
            ("deep", '{"x": ' + "[" * 10**5, "cannot be read: it is nested too deeply"),
            ("no model in", '{"added_tokens": []}', "cannot be read: Object missing required field `model`"),
        )
    },
    "Latin template": (with_text("chat_template.jinja", b"caf\xe9"), "chat_template.jinja' cannot be read: 'utf-8'"),
    "pointer for template": (with_pointer("chat_template.jinja"), "chat_template.jinja' is a Git LFS pointer"),
    "template without text": (
        with_text("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}'),
        "chat_template in '.*tokenizer_config.json' must be a text.* missing required field `template`",
    ),
    "number for template": (with_text("chat_template.json", '{"chat_template": 5}'), "chat_template.json' must be a"),
    "odd added tokens": (
        with_text("tokenizer_config.json", '{"added_tokens_decoder": {"5": {}}}'),
        "tokenizer_config.json' cannot be read: .* missing required field `content`|added_tokens_decoder in",
    ),
    "a flag for the text of a token": (
        with_text("tokenizer_config.json", '{"added_tokens_decoder": {"5": {"content": true}}}'),
        "added_tokens_decoder in '.*tokenizer_config.json': Expected `str`, got `bool`",
    ),
    "a token without a number": (
        with_text("tokenizer_config.json", '{"added_tokens_decoder": {"five": {"content": "x"}}}'),
        "added_tokens_decoder in '.*tokenizer_config.json': Expected `int`",
    ),
    "missing key": (with_config(intermediate_size=None), "config.json': .*intermediate_size"),
    "another task": (
        with_config(architectures=["MistralForVision"]),
        r"config.json': .*architectures \['MistralForVision'\] is not implemented; allowed: ...ForCausalLM",
    ),
    "many layers": (
        with_config(num_hidden_layers=10_000),
        "they have only 21 tensors, for num_hidden_layers=10000",
    ),
    "a million layers": (
        with_config(num_hidden_layers=10**6),
        "num_hidden_layers 1000000 is not implemented; allowed: 1 to 16384",
    ),
    "a negative number of heads": (
        with_config(num_key_value_heads=-2),
        "num_key_value_heads -2 is not implemented; allowed: 1 to",
    ),
    **{
        f"{name} of {value:.0e}": (with_config(**{name: value}), f"{name}.* (1 to|Integer value out of range)")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
        for value in (10**12, 10**30, -5)
    },
    **{
        f"{name} of {value}": (
            with_config(**{name: value}),
            f"config.json.*{name}.* (is not implemented; allowed)",
        )
        for name, value in (
            ("rope_theta", 0),
            ("rope_theta", -1e4),
            ("rms_norm_eps", -1e-6),
            ("rms_norm_eps", 0),
            ("head_dim", -4),
            ("sliding_window", 0),
            ("layer_types", ["full_attention"]),
        )
    },
    **{
        f"rope of {changes}": (
            with_config(rope_scaling={"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | changes),
            f"{list(changes)[-1]} .* is not implemented; allowed|config.json.*: rope_scaling makes",
        )
        for changes in (
            {"rope_type": "yarn", "factor": 0.5},
            {"rope_type": "linear", "factor": -2.0},
            {"rope_type": "linear", "factor": 1e300},
            {"rope_type": "linear", "factor": 0},
            {"rope_type": "yarn", "rope_theta": 1},
            {"rope_type": "yarn", "beta_fast": 0},
            {"rope_type": "yarn", "original_max_position_embeddings": -4},
            {"rope_type": "yarn", "mscale_all_dim": -10.0},
            {"rope_type": "llama3", "high_freq_factor": 1.0},
        )
    },
    **{
        f"{name} of {value!r}": (with_config(**{name: value}), f"config.json': .*{name}")
        for name in ("max_position_embeddings", "vocab_size", "num_key_value_heads")
        for value in (
            1e30,
            2.5,
            True,
            "512",
            [512],
            {"a": 1},
            2**31 if name == "max_position_embeddings" else 3 * 10**8,
        )
    },
    "NaN": (
        lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": float("nan")})),
        'config.json\' cannot be read: "vocab_size": NaN is no finite number',
    ),
    "heads that do not divide": (
        with_config(num_attention_heads=3),
        "num_key_value_heads 2 is not implemented; allowed: a divisor of num_attention_heads \\(3\\)",
    ),
    "nested lists": (with_config(architectures=[["MistralForCausalLM"]]), "config.json': .*architectures"),
    "wrong value": (with_config(hidden_act="swiglu"), "config.json': .*hidden_act"),
    "missing number of the rope": (
        with_config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "config.json': .*low_freq_factor is missing",
    ),
    "a sliding window in some layers of mistral": (
        with_config(sliding_window=128, layer_types=["sliding_attention", "full_attention"]),
        "layer_types .* is not implemented; allowed: only sliding_attention if",
    ),
}


@pytest.mark.parametrize(
    ("engine_type", "error"), [*((AsyncEngine, error) for error in BREAKS), (Engine, next(iter(BREAKS)))]
)
def test_constructors_raise_the_errors_of_a_folder(
    folder: Path, engine_type: type[AsyncEngine] | type[Engine], error: str
) -> None:
    break_folder, message = BREAKS[error]
    break_folder(folder)
    before = threading.active_count()
    with pytest.raises(ValueError, match=message) as caught:
        engine_type(str(folder), device="cpu")
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert wait_until(lambda: threading.active_count() <= before)


def test_valid_folders_are_accepted(folder: Path) -> None:
    AsyncEngine(str(folder), device="cpu")
    shard(folder)
    AsyncEngine(str(folder), device="cpu")
    write_config(folder, sliding_window=128)
    AsyncEngine(str(folder), device="cpu")


def test_dummy_weights_need_no_files(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    AsyncEngine(str(folder), device="cpu", load_format="dummy")


def test_inconsistent_arguments_are_refused_by_the_constructor() -> None:
    with pytest.raises(ValueError, match="page_size must be a power of two"):
        AsyncEngine(device="cpu", page_size=3)
    with pytest.raises(ValueError, match="context_length must be at most"):
        AsyncEngine(context_length=10**6)


def test_hub_models_are_checked_when_the_engine_starts(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("aioengine.model_files.model_folder.download", lambda *_, **__: str(folder))
    monkeypatch.setattr("aioengine.supervision.supervisor.Supervisor.start", pytest.fail)
    BREAKS["truncated"][0](folder)
    engine = AsyncEngine("owner/model", device="cpu")
    with pytest.raises(ValueError, match="truncated"):
        asyncio.run(engine.start())


def test_relative_path_is_resolved_in_the_constructor(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    engine = AsyncEngine(f"./{folder.name}", tokenizer_path=f"./{folder.name}", device="cpu")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    settings = engine._prepare().settings
    assert (settings.model.path, settings.text.tokenizer_path) == (str(folder), str(folder))


def test_checks_do_not_import_torch(folder: Path) -> None:
    BREAKS["truncated"][0](folder)
    script = (
        "import sys; from aioengine import AsyncEngine\n"
        "try: AsyncEngine(sys.argv[1])\n"
        "except ValueError: assert not {'torch', 'safetensors', 'numpy'} & {*sys.modules}\n"
        "else: raise SystemExit('no error')"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, cwd=ROOT)
