"""Finding a model folder, and the facts in its JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioengine.frontend.startup import blueprint_of
from aioengine.model_files import model_folder
from aioengine.model_files.model_folder import ModelFacts, family_config, find_facts, locate
from aioengine.settings.config import EngineConfig, ModelConfig

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 1024,
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 5,
    "bos_token_id": 4,
    "torch_dtype": "bfloat16",
}


def folder(path: Path, files: dict[str, object] | None = None, **changes: object) -> str:
    everything = {"config.json": CONFIG | changes, "model.safetensors": "", "tokenizer.json": {}, **(files or {})}
    for name, content in everything.items():
        if content is not None:
            (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def read_facts(path: str, tokenizer_path: str | None = None) -> ModelFacts:
    return find_facts(ModelConfig(path=path, tokenizer_path=tokenizer_path, load_format="dummy"))


def test_facts_of_a_model_folder(tmp_path: Path) -> None:
    facts = read_facts(folder(tmp_path))
    assert (facts.architecture, facts.model_type, facts.dtype) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert (facts.context_length, facts.vocab_size, facts.num_layers) == (1024, 300, 2)
    assert facts.hidden_size == 64
    assert facts.eos_token_ids == (5,)
    assert (facts.tokenizer_path, facts.weights.missing) == (str(tmp_path), None)


def test_facts_of_a_model_in_transformers_code(tmp_path: Path) -> None:
    """The names of the sizes are those of its config.json."""
    config = {"model_type": "gpt9", "architectures": ["GPT9ForCausalLM"], "vocab_size": 90, "n_embd": 48, "n_layer": 3}
    given: dict[str, Any] = {**dict.fromkeys(CONFIG), **config, "n_head": 6, "n_positions": 70}
    facts = read_facts(folder(tmp_path, {"model.safetensors": None}, **given))
    assert (facts.implementation, facts.context_length, facts.vocab_size) == ("transformers", 70, 90)
    assert (facts.hidden_size, facts.num_layers) == (48, 3)
    config = family_config(ModelConfig(path=facts.path))
    assert (config.num_heads, config.head_size) == (6, 8)
    with pytest.raises(ValueError, match="type 'gpt9' is not implemented.*model_impl='auto'.*llama, .*qwen3"):
        find_facts(ModelConfig(path=str(tmp_path), load_format="dummy", implementation="aioengine"))
    with pytest.raises(ValueError, match=r"'gpt9', as model_impl='transformers' reads it: .*missing .*hidden_size"):
        read_facts(folder(tmp_path, {"model.safetensors": None}, **{**given, "n_embd": None}))
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    path = folder(tmp_path, {"model.safetensors": None}, **{**given, "n_layer": 16_384})
    with pytest.raises(ValueError, match="they have only 0 tensors, for num_hidden_layers=16384"):
        find_facts(ModelConfig(path=path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": {"__float__": "NaN"}}, r"rms_norm_eps .*__float__.* is not implemented"),
        ({"layer_norm_epsilon": -1e-5}, r"layer_norm_epsilon -1e-05 is not implemented.*more than 0"),
        ({"norm_eps": {"__float__": "Infinity"}}, "norm_eps .*more than 0"),
        ({"parts": [[{"logit_scale": {"__float__": "NaN"}}]]}, "logit_scale .* is not implemented; .* a number"),
    ],
)
def test_invalid_numbers_for_transformers_code_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, **changes, time_step_limit=[0.0, {"__float__": "Infinity"}])
    with pytest.raises(ValueError, match=message):
        find_facts(ModelConfig(path=path, load_format="dummy", implementation="transformers"))


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 1024),
        ({"rope_type": "default", "rope_theta": 1e4}, 1024),
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"type": "dynamic", "factor": 2}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 1024),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            1024,
        ),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_context_length_includes_rope_scaling(tmp_path: Path, key: str, rope: object, expected: int) -> None:
    assert read_facts(folder(tmp_path, **{key: rope})).context_length == expected


QUANTIZED: dict[str, dict[str, object]] = {
    "awq": {},
    "bitsandbytes": {"load_in_4bit": True},
    "compressed-tensors": {},
    "fbgemm_fp8": {},
    "fp8": {},
    "gptq": {"bits": 4},
    "modelopt": {"quant_algo": "FP8"},
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_argument_quantization_is_the_method_of_the_model(name: str, tmp_path: Path) -> None:
    path = folder(tmp_path, quantization_config={"quant_method": name, **QUANTIZED[name]})
    find_facts(ModelConfig(path=path, load_format="dummy", quantization=name))
    for other in {*QUANTIZED, "gguf", "mxfp4", "int8"} - {name}:
        with pytest.raises(ValueError, match=f"quantization={other!r}, but .* has {name!r}; leave it out"):
            find_facts(ModelConfig(path=path, load_format="dummy", quantization=other))


def test_end_of_text_ids_come_from_two_files(tmp_path: Path) -> None:
    path = folder(tmp_path, {"generation_config.json": {"eos_token_id": [7, 5, 300, -1]}})
    assert read_facts(path).eos_token_ids == (7, 5)


@pytest.mark.parametrize(("key", "word"), [("dtype", "float16"), ("torch_dtype", "torch.float16")])
def test_both_spellings_of_the_dtype_are_read(tmp_path: Path, key: str, word: str) -> None:
    assert read_facts(folder(tmp_path, **({"torch_dtype": None} | {key: word}))).dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, 'model_type is missing.*"model_type": "llama"'),
        ({"architectures": None}, "architectures is missing"),
        ({"quantization_config": {"quant_method": "quark"}}, "quant_method 'quark' is not implemented"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size 0 is not implemented"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not implemented"),
    ],
)
def test_unsupported_models_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_facts(folder(tmp_path, **changes))


@pytest.mark.parametrize(
    ("model_type", "tower", "message"),
    [
        ("qwen2_vl", {"depth": -1}, "depth"),
        ("qwen3_vl", {"depth": 2**20}, "depth"),
        ("smolvlm", {"num_hidden_layers": 2**20}, "num_hidden_layers"),
    ],
)
def test_impossible_vision_towers_are_refused(
    model_type: str, tower: dict[str, object], message: str, tmp_path: Path
) -> None:
    text = {"head_dim": 16, **{name: size for name, size in CONFIG.items() if isinstance(size, int)}}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3]} if "qwen" in model_type else None
    images = {"architectures": ["AnyForConditionalGeneration"], "text_config": text, "image_token_id": 7}
    images |= {"image_token_index": 7, "vision_config": tower}
    with pytest.raises(ValueError, match=rf"config\.json.*vision_config.*{message}"):
        read_facts(folder(tmp_path, **{**images, "model_type": model_type}))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "config.json is missing"),
        ({"model.gguf": ""}, r"model\.gguf' cannot be read: it is truncated"),
        ({"a.gguf": "", "b.gguf": ""}, "2 GGUF files"),
        ({"params.json": "{}"}, "Hugging Face form"),
        ({"config.json": "{"}, "cannot be read"),
        ({"config.json": "[]"}, "cannot be read"),
    ],
)
def test_other_folders_are_refused_with_a_hint(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_facts(str(tmp_path))


def test_error_names_the_inner_model_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    with pytest.raises(ValueError, match="did you mean '.*/inner'"):
        read_facts(str(Path(folder(tmp_path / "inner")).parent))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no weights.*dummy"),
        ({"pytorch_model.bin": ""}, "pytorch_model.bin.*safetensors"),
        ({"model.pth": ""}, "model.pth"),
    ],
)
def test_facts_have_the_reason_for_missing_weights(tmp_path: Path, files: dict[str, str], message: str) -> None:
    facts = read_facts(folder(tmp_path, {"model.safetensors": None, **files}))
    assert facts.weights.missing is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(facts.weights.missing)


def test_sampling_defaults_come_from_generation_config(tmp_path: Path) -> None:
    written = {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 5}
    path = folder(tmp_path, {"generation_config.json": written})
    facts = read_facts(path)
    assert (facts.sampling_defaults, facts.warning) == ({"temperature": 0.6, "top_k": 20}, "")
    for wanted in (
        ModelConfig(path=path, load_format="dummy", sampling_defaults="engine"),
        ModelConfig(path=path, load_format="dummy", is_embedding=True),
    ):
        assert find_facts(wanted).sampling_defaults == {}


def test_sampling_defaults_out_of_range_are_left_out(tmp_path: Path) -> None:
    written = {"temperature": 2.5, "top_k": "many", "top_p": 0.9, "repetition_penalty": 3}
    facts = read_facts(folder(tmp_path, {"generation_config.json": written}))
    assert facts.sampling_defaults == {"top_p": 0.9}
    for words in ("temperature must be a number from 0 to 2, got 2.5", "top_k", "repetition_penalty"):
        assert words in facts.warning


def test_tokenizer_may_be_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    path = folder(tmp_path, {"tokenizer.json": None})
    assert read_facts(path).tokenizer_path is None
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    assert read_facts(path, str(tmp_path / "words")).tokenizer_path == str(tmp_path / "words")


def test_folders_are_located_or_refused_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("")
    assert locate(None) == str(model_folder.DEMO_MODEL)
    assert locate("model") == locate(str(tmp_path / "model")) == str(tmp_path / "model")
    with pytest.raises(ValueError, match="'./modell': there is no such folder; '.' has the folders model"):
        locate("./modell")
    with pytest.raises(ValueError, match="is a file; give its folder"):
        locate("file")
    (tmp_path / "\x1b[31m").mkdir()
    with pytest.raises(ValueError, match=r"'\.' has the folders '\\x1b\[31m', model"):
        locate("./modell")
    with pytest.raises(ValueError, match="tokenizer_path './words': there is no such folder"):
        locate("./words", argument="tokenizer_path")
    with pytest.raises(ValueError, match="model_path is empty; give a folder or hub id, or leave it out"):
        locate("")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_that_cannot_be_looked_up_are_named(tmp_path: Path, name: str) -> None:
    """The lookup fails as in a folder without search permission. Here it fails for all users, also root."""
    (tmp_path / "other.safetensors").touch()
    path = folder(tmp_path, {"config.json": CONFIG, "tokenizer.json": None, "model.safetensors": None, name: None})
    (tmp_path / name).symlink_to("x" * 1000)
    with pytest.raises(ValueError, match=rf"{name}' cannot be read: File name too long"):
        find_facts(ModelConfig(path=path))


def test_hint_leaves_out_unreadable_entries(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("x" * 1000)
    with pytest.raises(ValueError, match="has the folders model$"):
        locate(str(tmp_path / "modell"))


def test_tokenizer_is_downloaded_without_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, object, object]] = []

    def download(name: str, **options: object) -> str:
        asked.append((name, options["download_dir"], options["argument"]))
        return str(model_folder.DEMO_MODEL)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_folder, "download", download)
    path = folder(tmp_path)
    model = ModelConfig(path=path, tokenizer_path="owner/words", download_dir="cache", load_format="dummy")
    assert model_folder.find_facts(model).tokenizer_path == str(model_folder.DEMO_MODEL)
    assert asked == [("owner/words", str(Path("cache")), "tokenizer_path")]


@pytest.mark.parametrize("name", ["owner/name", "gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "a_b/c-d.e"])
def test_hub_ids(name: str) -> None:
    assert model_folder.may_be_hub_id(name)


@pytest.mark.parametrize("name", ["/a/b", "./a", "../a", "~/a", "a/b/c", "a//b", "", "a b", "a/", "C:\\x"])
def test_paths_are_not_hub_ids(name: str) -> None:
    assert not model_folder.may_be_hub_id(name)


@pytest.mark.parametrize(
    ("wish", "is_terminal", "expected"),
    [(None, True, True), (None, False, False), (False, True, False), (True, False, True)],
)
def test_downloads_show_a_progress_bar_on_a_terminal_or_on_request(
    wish: bool | None, is_terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    def download(_: str, **options: object) -> str:
        told.append(options["progress"])
        raise ValueError("no network in a test")

    monkeypatch.setattr(model_folder, "download", download)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with pytest.raises(ValueError, match="no network"):
        blueprint_of(EngineConfig(model=ModelConfig(path="owner/name"), progress=wish))
    assert told == [expected]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt9"}, "'int8' does not work with models in transformers' code"),
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
            "'int8' does not work with the transposed experts of gpt-oss",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization='int8', but the model has 'fp8'"),
    ],
)
def test_models_that_cannot_be_quantized_while_loading_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = folder(tmp_path, {"model.safetensors": None}, **changes)
    assert read_facts(path).is_quantized == ("quantization_config" in changes)
    with pytest.raises(ValueError, match=message):
        find_facts(ModelConfig(path=path, load_format="dummy", quantization="int8"))
