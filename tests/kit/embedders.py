"""Tiny model folders of embedders and cross-encoders, with random weights and a WordPiece tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, BertConfig

if TYPE_CHECKING:
    from torch import Tensor

WORDS = "the a cat dog sat ran on mat road sun moon is was very hot cold query : what where ? .".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
VOCABULARY = [
    *SPECIAL,
    *LETTERS,
    *(f"##{letter}" for letter in LETTERS),
    *(word for word in WORDS if len(word) > 1),
    *"?:.",
]
MAX_TOKENS = 32
PROMPTS = {"query": "query: ", "document": ""}
SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    cls, sep = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk", "mask")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizerFast", **names}))


def _save(model: torch.nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_embedder(folder: Path) -> Path:
    """Write a BERT with mean pooling and normalization in the format of sentence-transformers."""
    _save(AutoModel.from_config(BertConfig(**SIZES), dtype=torch.float32), folder)
    parts = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"x.{name}"} for i, (name, path) in enumerate(parts)]
    (folder / "1_Pooling").mkdir()
    for name, value in {
        "modules": modules,
        "1_Pooling/config": {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True},
        "sentence_bert_config": {"max_seq_length": MAX_TOKENS, "do_lower_case": False},
        "config_sentence_transformers": {"prompts": PROMPTS, "default_prompt_name": None},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def write_cross_encoder(folder: Path) -> Path:
    """Write a BERT that returns one score per pair of texts."""
    config = BertConfig(**SIZES, num_labels=1)
    _save(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32), folder)
    return folder


class Reference:
    """Results of transformers for such a folder, with the rules of sentence-transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        is_embedder = (folder / "modules.json").exists()
        auto = AutoModel if is_embedder else AutoModelForSequenceClassification
        self.model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def vector(self, text: str, *, max_tokens: int = MAX_TOKENS) -> Tensor:
        """Return the mean of the hidden states without normalization."""
        inputs = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=max_tokens)
        return self.model(**inputs).last_hidden_state[0].mean(0)

    @torch.inference_mode()
    def score(self, query: str, document: str, *, max_tokens: int = SIZES["max_position_embeddings"]) -> float:
        inputs = self.tokenizer(query, document, return_tensors="pt", truncation=True, max_length=max_tokens)
        return float(torch.sigmoid(self.model(**inputs).logits[0, 0]))
