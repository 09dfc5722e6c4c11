"""Tokenizers of model folders: ids, special tokens, chats, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from aioengine.text.token_table import TokenTable, read_token_table
from aioengine.tokenization.chat_template import MAX_COMPILED, ChatText, compiled
from aioengine.tokenization.tokenizer import Tokenizer
from tests.unit.text.sample_tokenizers import ALL_SAMPLES, LLAMA, TEXTS, Sample, byte_fallback

if TYPE_CHECKING:
    from pathlib import Path

ADDS_BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": "<unk>"}
BOS, EOS = 1, 2


def write_folder(folder: Path, sample: Sample, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write a model folder. ``files``: name, with ``__`` for the dot -> JSON content. None removes a file."""
    contents = {"tokenizer__json": sample.file, "tokenizer_config__json": config, **files}
    for name, content in contents.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def llama() -> Sample:
    sample = byte_fallback("llama", LLAMA, prepends=True)
    return Sample(sample.name, {**sample.file, "post_processor": ADDS_BOS}, sample.tokenizer, sample.has_bytes)


@pytest.mark.parametrize("sample", ALL_SAMPLES, ids=lambda sample: sample.name)
def test_ids_and_text_equal_the_tokenizers_library(sample: Sample, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, sample))
    assert tokenizer.encode_batch(TEXTS) == [sample.encode(text) for text in TEXTS]
    assert [tokenizer.encode(text) for text in TEXTS] == [sample.encode(text) for text in TEXTS]
    for text in TEXTS:
        ids = sample.encode(text)
        assert tokenizer.decode(ids) == sample.decode(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == sample.decode(ids, skip_special_tokens=False)
    assert tokenizer.vocab_size == sample.num_ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (None, None, ())


@pytest.mark.parametrize("sample", ALL_SAMPLES, ids=lambda sample: sample.name)
def test_tokenizer_that_only_decodes_returns_the_same_text(sample: Sample, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sample, CONFIG | {"additional_special_tokens": ["<new>"]})
    whole, part = Tokenizer(folder), Tokenizer(folder, only_decodes=True)
    assert part.decoding_facts() == whole.decoding_facts()
    assert part.vocab_size == whole.vocab_size > sample.num_ids
    for ids in map(sample.encode, TEXTS):
        for skip in (True, False):
            assert part.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("sample", ALL_SAMPLES, ids=lambda sample: sample.name)
@pytest.mark.parametrize("skip", [True, False])
def test_decoding_facts_make_the_same_table_as_the_file(sample: Sample, skip: bool, tmp_path: Path) -> None:
    facts: Any = Tokenizer(write_folder(tmp_path, sample)).decoding_facts()
    table = read_token_table(facts, skip_special_tokens=skip)
    expected = read_token_table(sample.file, skip_special_tokens=skip)
    assert type(table) is type(expected)
    if isinstance(table, TokenTable) and isinstance(expected, TokenTable):
        assert [table[i] for i in range(sample.num_ids)] == [expected[i] for i in range(sample.num_ids)]
        assert [table.first(i) for i in range(sample.num_ids)] == [expected.first(i) for i in range(sample.num_ids)]


# ---------------------------------------------------------------- special tokens


def test_a_bos_is_added_once(llama: Sample, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, llama, CONFIG))
    plain = llama.encode("the")
    assert tokenizer.encode("the") == [BOS, *plain]
    assert tokenizer.encode("the", add_special_tokens=False) == plain
    assert tokenizer.encode("<s>the").count(BOS) == 1
    assert tokenizer.encode("<s>the")[0] == BOS
    assert tokenizer.encode("<s>the", add_special_tokens=False) == tokenizer.encode("<s>the")
    assert tokenizer.encode("") == [BOS]
    assert tokenizer.encode("<s>") == [BOS]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)


def test_encoding_the_text_of_a_chat_adds_no_special_tokens(llama: Sample, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, llama, CONFIG))
    plain = llama.encode("the")
    assert tokenizer.encode(ChatText("the")) == plain
    assert tokenizer.encode_batch(["the", ChatText("the"), "<s>the"])[:2] == [[BOS, *plain], plain]
    assert tokenizer.encode_batch([ChatText("the"), ChatText("the")]) == [plain, plain]
    assert tokenizer.encode_batch([]) == []


def test_special_tokens_are_added_as_tokenizer_json_says(llama: Sample, tmp_path: Path) -> None:
    for flags in ({"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}):
        tokenizer = Tokenizer(write_folder(tmp_path, llama, CONFIG | flags))
        assert tokenizer.encode("the") == [BOS, *llama.encode("the")]


def test_end_of_text_ids_are_read_from_all_files(llama: Sample, tmp_path: Path) -> None:
    generation, model = {"eos_token_id": [7, 8]}, {"eos_token_id": 8}
    tokenizer = Tokenizer(write_folder(tmp_path, llama, CONFIG, generation_config__json=generation, config__json=model))
    assert tokenizer.eos_token_ids == (7, 8, EOS)
    assert tokenizer.eos_token_id == EOS
    nameless = Tokenizer(write_folder(tmp_path, llama, {"eos_token": None}))
    assert (nameless.eos_token_ids, nameless.eos_token_id) == ((7, 8), 7)


def test_tokens_that_only_the_config_has_are_added(llama: Sample, tmp_path: Path) -> None:
    new = llama.num_ids
    described = {
        str(new): {"content": "<|new|>", "special": True},
        str(new + 1): {"content": "<|two|>", "special": False},
    }
    config = {
        **CONFIG,
        "added_tokens_decoder": described,
        "additional_special_tokens": ["<|extra|>"],
        "pad_token": "<|pad|>",
    }
    tokenizer = Tokenizer(write_folder(tmp_path, llama, config))
    ids = tokenizer.encode("the<|new|><|two|><|pad|></s>", add_special_tokens=False)
    assert ids == [*llama.encode("the"), new, new + 1, new + 2, EOS]
    assert tokenizer.decode(ids).split() == ["the", "<|two|>"]
    assert tokenizer.decode([tokenizer.encode("<|extra|>")[-1]]) == ""
    assert tokenizer.vocab_size == new + 4


@pytest.mark.parametrize("wrong", [-1, 2**70])
def test_numbers_outside_the_range_of_ids_are_refused(tmp_path: Path, llama: Sample, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"ids must be integers from 0 to 4294967295, got .*{wrong}"):
        Tokenizer(write_folder(tmp_path, llama)).decode([1, wrong])


def test_truncation_and_padding_of_the_file_are_off(llama: Sample, tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<unk>",
    }  # fmt: skip
    file = {**llama.file, "truncation": truncation, "padding": padding}
    tokenizer = Tokenizer(write_folder(tmp_path, Sample("cut", file, llama.tokenizer, True)))
    short, long = tokenizer.encode_batch(["a", "a long text"])
    assert long == [BOS, *llama.encode("a long text")]
    assert short == [BOS, *llama.encode("a")]


# ---------------------------------------------------------------- chats

MESSAGES = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Hello"}]
TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'system' %}
        {{ raise_exception('no system message') }}
    {% endif %}
[{{ message.role }}] {{ message.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}[assistant] {% endif %}"""
WRITTEN = "<s>[user] Hi <b></s>\n[assistant] Hello</s>\n"


def chatty(folder: Path, sample: Sample, template: Any = TEMPLATE, **files: Any) -> Tokenizer:
    return Tokenizer(write_folder(folder, sample, {**CONFIG, "chat_template": template}, **files))


def test_the_template_renders_a_chat(llama: Sample, tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, llama)
    text = tokenizer.apply_chat_template(MESSAGES)
    assert text == WRITTEN + "[assistant] "
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == WRITTEN
    ids = tokenizer.apply_chat_template(MESSAGES, tokenize=True)
    assert ids == tokenizer.encode(WRITTEN + "[assistant] ", add_special_tokens=False)
    assert isinstance(text, ChatText)
    assert tokenizer.encode(text) == ids
    assert tokenizer.template_names == ("default",)


PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "<b>"}]}, MESSAGES[1]]
KNOWS_PARTS = """{% for message in messages %}[{{ message.role }}] {% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}{% if loop.index > 1 %}+{% endif %}
{{- part.text }}{% endfor %}{% endif %};{% endfor %}"""
FAILS = "{% for message in messages %}[{{ message.role }}] {{ message.content + '' }};{% endfor %}"


def test_text_parts_are_joined_unless_the_template_knows_them(llama: Sample, tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, llama)
    assert tokenizer.apply_chat_template(PARTS, add_generation_prompt=False) == WRITTEN
    for template, written in ((KNOWS_PARTS, "[user] Hi +<b>;"), (FAILS, "[user] Hi <b>;")):
        text = tokenizer.apply_chat_template(PARTS, chat_template=template)
        assert text == written + "[assistant] Hello;"
        assert text == tokenizer.apply_chat_template(PARTS, chat_template=template)
    text = tokenizer.apply_chat_template(PARTS[:1], continue_final_message=True)
    assert text == "<s>[user] Hi <b>"
    with pytest.raises(ValueError, match=r"accepts only text; messages\[0\] has other parts"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])


def test_templates_have_the_functions_of_transformers(llama: Sample, tmp_path: Path) -> None:
    template = (
        "{{ strftime_now('%Y') }}|{{ tools | tojson }}|{{ tools | tojson(indent=2) | length }}|{{ mood }}|"
        "{{ documents }}|"
        "{% for n in range(9) %}{% if n == 1 %}{% continue %}{% endif %}{% if n == 3 %}{% break %}{% endif %}{{ n }}"
        "{% endfor %}|{% set box = namespace(x=1) %}{% set box.x = 2 %}{{ box.x }}|"
        "{% generation %}{% set inner = 1 %}said{% endgeneration %}|{{ inner is defined }}"
    )
    tools = [{"name": "é<&>", "parameters": {}}]
    text = chatty(tmp_path, llama, template).apply_chat_template(MESSAGES, tools=tools, mood="calm")
    year, *rest = text.split("|") if isinstance(text, str) else []
    assert abs(int(year) - datetime.now().astimezone().year) <= 1
    json_length = len(json.dumps(tools, indent=2, ensure_ascii=False))
    assert rest == [
        '[{"name": "é<&>", "parameters": {}}]',
        str(json_length),
        "calm",
        "None",
        "02",
        "2",
        "said",
        "False",
    ]


def test_templates_can_be_chosen_by_name_file_or_text(llama: Sample, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = chatty(tmp_path, llama, named)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"name": "f"}]) == "tools"
    assert tokenizer.apply_chat_template([], chat_template="tool_use") == "tools"
    assert tokenizer.apply_chat_template([], chat_template="{{ 1 + 1 }}") == "2"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("with documents")
    assert chatty(tmp_path, llama, named).apply_chat_template([], chat_template="rag") == "with documents"
    assert chatty(tmp_path, llama, named, chat_template__jinja="a file").apply_chat_template([]) == "a file"
    several = [{"name": "one", "template": "1"}, {"name": "two", "template": "2"}]
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"pass chat_template= one of \['one', 'rag', 'two'\]"):
        chatty(tmp_path, llama, several).apply_chat_template([])


def test_template_may_be_a_file(llama: Sample, tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, llama)
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}é", encoding="utf-8")
    assert tokenizer.apply_chat_template(MESSAGES, chat_template=file) == "Hi <b>é"
    file.write_bytes(b"\xff{{ 1 }}")
    for wrong in (file, tmp_path / "missing.jinja", tmp_path):
        shown = str(wrong)[:40]  # long paths are cut
        with pytest.raises(ValueError, match=f"chat_template(=|: )'{shown}.* (cannot be read|is a folder, not a file)"):
            tokenizer.apply_chat_template(MESSAGES, chat_template=wrong)
    with pytest.raises(ValueError, match=r"neither the text of a template .*\(default\); a file is given as a pathlib"):
        tokenizer.apply_chat_template(MESSAGES, chat_template=str(file))


def test_the_repr_has_the_type_and_the_size(llama: Sample, tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, llama)
    assert repr(tokenizer) == f"<Tokenizer BPE, vocab_size={tokenizer.vocab_size}, {str(tmp_path)!r}>"


def test_the_number_of_compiled_templates_is_limited(llama: Sample, tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, llama)
    for number in range(3 * MAX_COMPILED):
        template = f"{{{{ messages[0].content[0].text }}}}{number}"
        assert tokenizer.apply_chat_template(PARTS, chat_template=template) == f"Hi <b>{number}"
    assert compiled.cache_info().currsize == MAX_COMPILED


class Secret:
    def read(self) -> str:
        return "a file"


def test_templates_get_plain_data(llama: Sample, tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, llama)
    secret: Any = Secret()
    for place, options in [
        ("messages", {"messages": [{"role": "user", "content": "a", "more": [secret]}]}),
        ("tools", {"messages": MESSAGES, "tools": [{"name": secret}]}),
        ("the chat template variable .mood.", {"messages": MESSAGES, "mood": {"a": secret}}),
    ]:
        with pytest.raises(TypeError, match=f"{place} must be made of dicts, lists, text, numbers"):
            tokenizer.apply_chat_template(**options)  # type: ignore[arg-type]
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="'mood' is nested too deeply, or contains itself"):
        tokenizer.apply_chat_template(MESSAGES, mood=endless)


def test_wrong_template_variables_are_refused(llama: Sample, tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, llama)
    wrong: Any
    for wrong, error, message in [
        ([1], TypeError, "chat_template_kwargs must be a dict"),
        ({1: 2}, TypeError, "chat_template_kwargs keys must be a string"),
        ({"messages": []}, ValueError, "chat_template_kwargs has 'messages'"),
        ({"mood": 1}, ValueError, "mood is given twice"),
        ({"add_generation_prompt": 1}, TypeError, "add_generation_prompt must be True or False"),
    ]:
        with pytest.raises(error, match=message):
            tokenizer.apply_chat_template(MESSAGES, chat_template_kwargs=wrong, mood="calm")
    text = tokenizer.apply_chat_template(MESSAGES, chat_template_kwargs={"continue_final_message": True})
    assert text == WRITTEN.removesuffix("</s>\n")


def test_model_continues_the_last_message(llama: Sample, tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, llama)
    text = tokenizer.apply_chat_template(MESSAGES, continue_final_message=True)
    assert text == WRITTEN.removesuffix("</s>\n")
    with pytest.raises(ValueError, match="needs a last message whose content is text"):
        tokenizer.apply_chat_template([], continue_final_message=True)
    with pytest.raises(ValueError, match="does not write the last message"):
        tokenizer.apply_chat_template(MESSAGES, continue_final_message=True, chat_template="{# nothing #}")


def test_invalid_chats_are_refused(llama: Sample, tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, llama)
    with pytest.raises(ValueError, match="the chat template refused the messages: no system message"):
        tokenizer.apply_chat_template([{"role": "system", "content": ""}])
    with pytest.raises(ValueError, match=r"the chat template is not valid \(line 1\)"):
        tokenizer.apply_chat_template(MESSAGES, chat_template="{% if %}")
    with pytest.raises(ValueError, match="refused the messages: access to attribute '__class__'"):
        tokenizer.apply_chat_template(MESSAGES, chat_template="{{ ''.__class__.mro() }}")
    with pytest.raises(ValueError, match="has no chat template"):
        Tokenizer(write_folder(tmp_path, llama, CONFIG)).apply_chat_template(MESSAGES)
    wrong: Any
    for wrong, message in [
        ("hello", "messages must be a list of dicts with role and content, not str"),
        (["hello"], r"messages\[0\] must be a dict with role and content, not str"),
        ([MESSAGES], r"messages\[0\] must be a dict with role and content, not list"),
    ]:
        with pytest.raises(TypeError, match=message):
            tokenizer.apply_chat_template(wrong)
    wrong = [print]
    with pytest.raises(TypeError, match="a tool must be a dict with its JSON schema, not builtin_function_or_method"):
        tokenizer.apply_chat_template(MESSAGES, tools=wrong)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("text", ["ab\ud800c", "ab\udfff"])
def test_texts_with_half_of_a_surrogate_pair_are_refused(text: str, llama: Sample, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, llama))
    with pytest.raises(ValueError, match="position 2 is a lone surrogate"):
        tokenizer.encode(text)


def test_values_that_are_not_text_are_refused(llama: Sample, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, llama))
    wrong: Any = [b"bytes"]
    with pytest.raises(TypeError, match="a text must be a string, got b'bytes'"):
        tokenizer.encode_batch(wrong)


def test_a_folder_without_tokenizer_is_refused(llama: Sample, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json; write one with transformers"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"\(it has tokenizer\.model\); write one with transformers"):
        Tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"there is no such folder"):
        Tokenizer(tmp_path / "nothing")


def test_unreadable_files_are_refused_by_name(llama: Sample, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json' cannot be read by this version of tokenizers: "):
        Tokenizer(write_folder(tmp_path, llama, tokenizer__json='{"model": {}}'))
    with pytest.raises(ValueError, match=r"tokenizer\.json' cannot be read: Object missing required field `model`"):
        Tokenizer(write_folder(tmp_path, llama, tokenizer__json="{}"))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json' cannot be read"):
        Tokenizer(write_folder(tmp_path, llama, tokenizer_config__json="{"))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json' cannot be read: Expected `object`"):
        Tokenizer(write_folder(tmp_path, llama, tokenizer_config__json="[]"))


def test_neither_torch_nor_transformers_is_imported() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'asyncio'}"
    code = f"import sys, aioengine.tokenization.tokenizer; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_text_without_tokens_is_refused(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "other"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RuntimeError, match=r"the tokenizer failed: .*Missing \[UNK\] token"):
        tokenizer.encode("b")
