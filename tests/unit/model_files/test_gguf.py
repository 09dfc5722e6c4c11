"""GGUF files: header, config and tokenizer, and errors for damaged and malicious files."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from aioengine.api.args import engine_config
from aioengine.frontend.startup import blueprint_of
from aioengine.model_files import checkpoint, folder_files, gguf_header, gguf_tokenizer
from aioengine.model_files.model_folder import family_config, find_facts, locate
from aioengine.tokenization.tokenizer import Tokenizer
from tests.kit.gguf_files import Stored, byte_tokenizer, model_metadata, stored, word_tokenizer, write_gguf

SIZES: dict[str, object] = {
    "model_type": "llama",
    "max_position_embeddings": 256,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
}
MERGES = ["t h", "th e", "Ġ the", "e r", "Ġ a", "i n", "in g"]
TEXTS = [
    "the other thing",
    "  two  spaces\n\nand 12345 numbers, isn't it? the the",
    "größe 你好 🙂 <|im_start|>the<|im_end|>",
    "",
    " a",
    "x<s> <unk> </s>x",
]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


def shapes(num_tokens: int = 300) -> dict[str, tuple[int, ...]]:
    block = {
        "attn_norm": (32,),
        "ffn_norm": (32,),
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "attn_output": (32, 32),
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
    }
    return {
        "token_embd.weight": (num_tokens, 32),
        "output_norm.weight": (32,),
        **{f"blk.0.{name}.weight": shape for name, shape in block.items()},
    }


def write(path: Path, kind: str = "Q8_0", tokenizer: dict[str, object] | None = None, **changes: object) -> Path:
    """Write a model with changed metadata. None removes a key."""
    tensors = {
        name: stored(torch.full(shape, 0.5), kind if len(shape) > 1 else "F32")[0] for name, shape in shapes().items()
    }
    words = byte_tokenizer(MERGES, ["<|im_end|>", "<|im_start|>"], 300) if tokenizer is None else tokenizer
    given = {**model_metadata(SIZES), **words, **{key.replace("__", "."): value for key, value in changes.items()}}
    return write_gguf(path, {key: value for key, value in given.items() if value is not None}, tensors)


def read_all(path: Path) -> None:
    find_facts(engine_config(str(path), {}).model)
    Tokenizer(path)


def test_argument_quantization_may_be_gguf(tmp_path: Path) -> None:
    path = str(write(tmp_path / "model.gguf"))
    find_facts(engine_config(path, {"quantization": "gguf"}).model)
    with pytest.raises(ValueError, match="quantization='awq', but .* has 'gguf'; leave it out"):
        find_facts(engine_config(path, {"quantization": "awq"}).model)


def test_model_is_a_file_or_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", tokenizer__chat_template=TEMPLATE)
    for given in (path, tmp_path):
        blueprint = blueprint_of(engine_config(str(given), {"device": "cpu"}))
        model = blueprint.settings.model
        assert (model.path, model.load_format, model.vocab_size, model.context_length) == (str(path), "gguf", 300, 256)
        assert blueprint.eos_token_ids == (263,)
    facts = find_facts(engine_config(str(path), {}).model)
    assert (facts.model_type, facts.dtype, facts.num_layers) == ("llama", "bfloat16", 1)
    assert family_config(engine_config(str(path), {}).model).head_size == 8
    assert len(checkpoint.read_headers(path, "model.")) == 11
    tokenizer = Tokenizer(path)
    assert tokenizer.eos_token_ids == (263,)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the"}])
    assert tokenizer.encode(text) == [264, 257]
    with pytest.raises(ValueError, match=r"load_format='safetensors', but .*model\.gguf' is a GGUF file"):
        blueprint_of(engine_config(str(path), {"load_format": "safetensors"}))
    assert blueprint_of(engine_config(str(path), {"load_format": "gguf"})).settings.model.load_format == "gguf"
    path.rename(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf")
    with pytest.raises(ValueError, match=r"has 2 GGUF files; give the path of one of them: a\.gguf, b\.gguf"):
        locate(str(tmp_path))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_dtype_is_the_dtype_of_the_matrices(tmp_path: Path, kind: str, dtype: str) -> None:
    assert find_facts(engine_config(str(write(tmp_path / "m.gguf", kind)), {}).model).dtype == dtype


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "tekken", "gpt-2"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_byte_tokenizer_is_converted(tmp_path: Path, pre: str, adds_bos: bool) -> None:
    keys = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": adds_bos, "tokenizer.ggml.bos_token_id": 264}
    words = byte_tokenizer(MERGES, ["<|im_end|>", "<|im_start|>", "<|endoftext|>"], 300)
    path = write(tmp_path / "m.gguf", tokenizer={**words, **keys})
    tokenizer = Tokenizer(path)
    assert tokenizer.encode("the<|im_end|>")[-2:] == [257, 263]
    assert (tokenizer.encode("the")[0] == 264) is adds_bos
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
    check_against_transformers(path, tokenizer)


def test_llama_3_tokenizer_keeps_pieces_that_are_tokens(tmp_path: Path) -> None:
    words = byte_tokenizer([*MERGES, "x the"], ["<|end_of_text|>"], 300)
    merges = words["tokenizer.ggml.merges"]
    assert isinstance(merges, list)
    words["tokenizer.ggml.merges"] = merges[:-1]  # no merges lead to "xthe"
    for pre, num_tokens in (("llama-bpe", 1), ("qwen2", 2)):
        path = write(tmp_path / "m.gguf", tokenizer={**words, "tokenizer.ggml.pre": pre})
        assert len(Tokenizer(path).encode("xthe")) == num_tokens
    path = write(
        tmp_path / "m.gguf", tokenizer={**words, "tokenizer.ggml.pre": "tekken", "tokenizer.ggml.bos_token_id": 9}
    )
    assert Tokenizer(path).encode("the")[0] == 9


@pytest.mark.parametrize("adds_bos", [None, False])
def test_character_tokenizer_is_converted(tmp_path: Path, adds_bos: bool | None) -> None:
    words = word_tokenizer(["▁the", "▁other", "▁thing", "th", "▁th", "▁o", "the", "ing", "er", "in", "▁a"])
    keys = {} if adds_bos is None else {"tokenizer.ggml.add_bos_token": adds_bos}
    path = write(tmp_path / "m.gguf", tokenizer={**words, **keys})
    tokenizer = Tokenizer(path)
    ids = tokenizer.encode("the other thing")
    assert (ids[0] == 1) is (adds_bos is None)
    assert tokenizer.decode(ids) == "the other thing"
    words = ["▁the", "▁o", "the", "r", "▁thing"]  # no merge leads to "▁other"
    assert [tokenizer.decode([token]) for token in ids if token != 1] == [word.replace("▁", "") for word in words]
    check_against_transformers(path, tokenizer)


def check_against_transformers(path: Path, ours: Tokenizer) -> None:
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False), text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "general.architecture is 'mamba'.*llama, qwen2, qwen3"),
        ({"general__type": "adapter"}, "general.type is 'adapter'"),
        ({"general__quantization_version": 1}, "general.quantization_version is 1; allowed: 2"),
        ({"split__count": 3}, "one of 3 parts.*llama-gguf-split"),
        ({"llama__expert_count": 8}, "llama.expert_count' 8 is not implemented; allowed: 0"),
        ({"llama__attention__sliding_window": 64}, "llama.attention.sliding_window' 64 is not implemented"),
        ({"llama__rope__scaling__type": "longrope"}, "rope.scaling.type 'longrope' is not implemented"),
        ({"llama__rope__scaling__type": "linear"}, "rope_parameters.factor is missing"),
        ({"llama__rope__dimension_count": 4}, "rope.dimension_count 4 is not implemented"),
        ({"llama__attention__value_length": 4}, "attention.value_length 4 is not implemented"),
        ({"llama__attention__head_count_kv": [1, 2]}, "head_count_kv' has 2 values"),
        ({"llama__block_count": None}, "it has no llama.block_count"),
        ({"llama__block_count": 10**9}, "the config in '.*m.gguf': .*layers 1000000000 is not implemented"),
        ({"llama__embedding_length": "many"}, "hidden_size"),
        ({"llama__attention__head_count": 0}, "num_attention_heads 0 is not implemented"),
        ({"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base' is nan; allowed: a finite number"),
        ({"general__alignment": 0}, "general.alignment is 0"),
        ({"tokenizer__ggml__model": "t5"}, "tokenizer.ggml.model 't5' is not implemented; allowed: gpt2, llama"),
        ({"tokenizer__ggml__pre": "new"}, "tokenizer.ggml.pre 'new' is not implemented; allowed: .*qwen2"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of strings"),
        ({"tokenizer__ggml__merges": ["ab"]}, "tokenizer.ggml.merges has 'ab'"),
        ({"tokenizer__ggml__merges": None}, "it has no array tokenizer.ggml.merges"),
        ({"tokenizer__ggml__token_type": [1]}, "tokenizer.ggml.token_type must be an array of 300 numbers"),
        ({"tokenizer__ggml__eos_token_id": 300}, "eos_token_id is 300; there are 300 tokens"),
        ({"tokenizer__chat_template": 7}, "tokenizer.chat_template' must be a string"),
        ({"tokenizer__ggml__tokens": ["a"] * 300}, "the tokenizer in '.*m.gguf' cannot be read by .*out of vocabulary"),
        ({"tokenizer__ggml__model": "no_vocab"}, "m.gguf' contains no tokenizer; pass tokenizer_path= a folder"),
    ],
)
def test_unsupported_metadata_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = write(tmp_path / "m.gguf", **changes)
    with pytest.raises(ValueError, match=message) as caught:
        read_all(path)
    assert "m.gguf" in str(caught.value)


def raw(*parts: bytes | int, num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    return head + b"".join(part if isinstance(part, bytes) else struct.pack("<Q", part) for part in parts)


def described(name: bytes, dimensions: list[int], kind: int, begin: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dimensions))
    return head + struct.pack(f"<{len(dimensions)}Q", *dimensions) + struct.pack("<IQ", kind, begin)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"GGML" + bytes(60), "does not begin with 'GGUF'"),
        (raw(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (raw(num_tensors=2**60), "names 1152921504606846976 tensors"),
        (raw(num_keys=2**60), "keys of metadata"),
        (raw(2**62, num_keys=1), "name of 4611686018427387904 bytes"),
        (raw(1, b"k", struct.pack("<I", 99), num_keys=1), "unknown type 99"),
        (raw(1, b"k", struct.pack("<I", 8), 2**40, num_keys=1), "bytes"),
        (raw(1, b"k", struct.pack("<II", 9, 8), 2**50, num_keys=1), "'k' has 1125899906842624 items"),
        (raw(1, b"k", struct.pack("<II", 9, 4), 2**21, num_keys=1), "truncated"),
        (raw(1, b"k", struct.pack("<II", 9, 8), 2**21, num_keys=1), "truncated"),
        (raw(1, b"k", struct.pack("<II", 9, 9), 1, num_keys=1), "array of type 9"),
        (raw(*(1, b"k", struct.pack("<I?", 7, True)) * 2, num_keys=2), "'k' twice"),
        (raw(described(b"t", [1] * 9, 0, 0), num_tensors=1), "9 dimensions"),
        (raw(described(b"t", [2**40, 2**40], 0, 0), num_tensors=1), "has shape"),
        (raw(described(b"t", [0], 0, 0), num_tensors=1), "has shape"),
        (raw(described(b"t", [33], 8, 0), num_tensors=1), "with blocks of 32"),
        (raw(described(b"t", [256], 11, 0), num_tensors=1), "is of type Q3_K, which is not supported.*Q4_K"),
        (raw(described(b"t", [256], 77, 0), num_tensors=1), "is of type number 77"),
        (raw(described(b"t", [8], 0, 2**50), num_tensors=1), "truncated"),
        (raw(described(b"t", [8], 0, 8), bytes(99), num_tensors=1), "begins at 8"),
        (raw(described(b"t", [8], 0, 0), described(b"u", [8], 0, 0), bytes(99), num_tensors=2), "in another tensor"),
        (raw(described(b"t", [8], 0, 0), described(b"t", [8], 0, 32), bytes(99), num_tensors=2), "'t' twice"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        folder_files.read_gguf(path)
    assert "m.gguf" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("tokenizer", [None, word_tokenizer(["the", "th"])])
def test_random_damage_causes_a_clear_error_or_none(tmp_path: Path, tokenizer: dict[str, object] | None) -> None:
    path = write(tmp_path / "m.gguf", tokenizer=tokenizer, tokenizer__chat_template=TEMPLATE)
    content = path.read_bytes()
    end = content.index(b"ffn_down") + 80
    draw = random.Random(0)
    for number in range(150):
        damaged = bytearray(content)
        place = draw.randrange(end)
        if number % 3:
            damaged[place : place + draw.choice((1, 4, 8))] = draw.randbytes(draw.choice((1, 4, 8)))
        else:
            del damaged[place:]
        path.write_bytes(damaged)
        try:
            read_all(path)
        except ValueError as error:
            assert len(str(error)) < 2000  # noqa: PT017  # most are, some damage is harmless


def test_quantization_while_loading_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="quantization='int8', but the model has 'gguf'; leave it out"):
        find_facts(engine_config(str(path), {"quantization": "int8"}).model)


def test_vocabulary_with_too_many_merges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = word_tokenizer(["the"])
    tokens = words["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    path = write(tmp_path / "m.gguf", tokenizer={**words, "tokenizer.ggml.tokens": [*tokens[:-1], "x" * 100_000]})
    with pytest.raises(ValueError, match="a token of 100000 characters; the limit is 256"):
        Tokenizer(path)
    monkeypatch.setattr(gguf_tokenizer, "_MAX_MERGES", 1000)
    longest = random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=40)
    parts = {"".join(longest[begin : begin + size]) for begin in range(len(longest)) for size in range(1, 26)}
    path = write(tmp_path / "m.gguf", tokenizer=word_tokenizer(sorted(parts)))
    with pytest.raises(ValueError, match="tokens has more merges than the limit of 1000"):
        Tokenizer(path)


def test_pipes_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        locate(str(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").mkdir()
    assert folder_files.read_object(tmp_path / "m.gguf" / "config.json") == {}
    assert not folder_files.is_gguf(tmp_path / "m.gguf")


def test_reading_stops_at_the_end_of_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Stored(0, (1 << 20,), bytes(4 << 20))
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {"t": tensor})
    monkeypatch.setattr(gguf_header, "_FIRST_READ", 64)
    header, file = folder_files.read_gguf(path)
    with file:
        assert file.tell() < 4096
    assert [(info.name, info.shape) for info in header.tensors] == [("t", (1 << 20,))]


def test_headers_of_the_gguf_package_are_read(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {"a.text": "é", "a.flag": True, "a.texts": ["a", "", "é"], "a.numbers": [1, 2], "a.float": 0.5}
    for key, value in values.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    tensor = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("first", tensor)
    writer.add_tensor("second", gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with (tmp_path / "m.gguf").open("rb") as file:
        header = gguf_header.read_header(file)
        first, second = header.tensors
        file.seek(first.begin)
        assert file.read(first.num_bytes) == tensor.tobytes()
    results = {key: item for key, item in header.metadata.items() if key in values}
    texts, numbers = results["a.texts"], results["a.numbers"]
    assert isinstance(texts, gguf_header.GgufArray)
    assert isinstance(numbers, gguf_header.GgufArray)
    assert {**results, "a.texts": texts.texts(), "a.numbers": list(numbers.numbers())} == values
    assert (first.name, first.shape, first.kind) == ("first", (3, 4), "F32")
    assert (second.name, second.shape, second.kind, second.num_bytes) == ("second", (2, 64), "Q8_0", 136)


def test_tensor_types_match_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for kind, sizes in gguf_header.BLOCKS.items():
        member = gguf.GGMLQuantizationType[kind]
        assert gguf_header._TYPES[member.value] == kind
        assert tuple(gguf.GGML_QUANT_SIZES[member]) == sizes
