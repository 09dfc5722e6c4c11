"""The training script: two steps on the CPU, and the corpus that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from aioengine.model_files.model_folder import DEMO_MODEL
from benchmarks.train_demo_model import corpus
from tests.kit.source import ROOT

NUM_DOCUMENTS = 400


@pytest.mark.slow
def test_two_steps_write_a_folder_that_transformers_reads(tmp_path: Path) -> None:
    sizes = ["--documents", str(NUM_DOCUMENTS), "--batch-tokens", "512", "--vocabulary", "512"]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.train_demo_model", "--out", str(tmp_path)),
            *("--steps", "2", "--device", "cpu", "--no-examination", *sizes),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert f"{NUM_DOCUMENTS} documents" in run.stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == 512
    assert model.generation_config.eos_token_id == [0, 2]
    text = "Paris, 東京 🗼 é"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(DEMO_MODEL).chat_template


def test_corpus_depends_only_on_its_seed() -> None:
    documents = corpus.write_corpus(NUM_DOCUMENTS, 3)
    assert documents == corpus.write_corpus(NUM_DOCUMENTS, 3)
    assert documents != corpus.write_corpus(NUM_DOCUMENTS, 4)
    assert all(document[-1].text == "<|endoftext|>" and document[-1].learned for document in documents)


def test_chats_of_the_corpus_follow_the_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    texts = ["".join(segment.text for segment in document) for document in corpus.write_corpus(NUM_DOCUMENTS, 5)]
    chats = [text for text in texts if text.startswith("<|im_start|>")]
    assert len(chats) > NUM_DOCUMENTS / 4
    for text in chats:
        turns = [turn.partition("\n") for turn in text.removesuffix("<|im_end|><|endoftext|>").split("<|im_end|>\n")]
        messages = [{"role": role.removeprefix("<|im_start|>"), "content": said} for role, _, said in turns]
        assert f"{tokenizer.apply_chat_template(messages, tokenize=False).rstrip()}<|endoftext|>" == text


def test_requested_json_is_json() -> None:
    documents = corpus.write_corpus(NUM_DOCUMENTS, 6)
    learned = ["".join(segment.text for segment in document[1:-1]) for document in documents]
    objects = [text.removesuffix("<|im_end|>").strip() for text in learned if text.strip().startswith("{")]
    assert len(objects) > 10
    assert all(isinstance(json.loads(text), dict) for text in objects)
