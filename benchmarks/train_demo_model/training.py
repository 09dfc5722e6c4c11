"""From documents to weights: packing, the model, and the training loop.

Shapes: R rows of a batch, L tokens of a row, N tokens of the corpus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from benchmarks.train_demo_model.documents import END_OF_TEXT, TURN_END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer
    from torch import Tensor

    from benchmarks.train_demo_model.documents import Document

CONTEXT_LENGTH = 2048
_NOT_LEARNED = -100
_WARM_UP_STEPS = 200


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How long and how fast to learn; token counts are per optimizer step."""

    num_steps: int
    device: str
    seed: int
    batch_tokens: int = 32768
    row_length: int = 512
    learning_rate: float = 2e-3
    # every so many steps one batch of long rows, in which documents follow each other
    long_row_interval: int = 10


@dataclass(frozen=True, slots=True)
class Batch:
    """Equal rows of tokens, all [R, L]; `document` numbers the document that a token belongs to."""

    token_ids: Tensor
    labels: Tensor
    positions: Tensor
    document: Tensor


@dataclass(frozen=True, slots=True)
class TokenizedCorpus:
    """All documents behind each other, [N] each, and where each of them starts, [documents + 1]."""

    token_ids: Tensor
    labels: Tensor
    starts: Tensor


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer) -> TokenizedCorpus:
    """Token ids of every segment on its own, as at inference, where the prompt is tokenized without its answer."""
    texts = sorted({segment.text for document in documents for segment in document})
    encodings = tokenizer.encode_batch(texts)
    ids_of = {text: encoding.ids for text, encoding in zip(texts, encodings, strict=True)}
    token_ids: list[int] = []
    labels: list[int] = []
    starts = [0]
    for document in tqdm(documents, desc="tokenizing", unit="doc"):
        for segment in document:
            ids = ids_of[segment.text]
            token_ids += ids
            labels += ids if segment.learned else [_NOT_LEARNED] * len(ids)
        starts.append(len(token_ids))
    return TokenizedCorpus(torch.tensor(token_ids), torch.tensor(labels), torch.tensor(starts))


def _row_starts(lengths: Sequence[int], row_length: int) -> list[int]:
    """Where each document begins in the rows laid behind each other, when none may cross the end of a row."""
    starts: list[int] = []
    used = 0
    for length in lengths:
        if used % row_length + length > row_length:
            used += row_length - used % row_length
        starts.append(used)
        used += length
    return starts


def pack(corpus: TokenizedCorpus, row_length: int) -> Batch:
    """Fill rows of `row_length` tokens with whole documents; positions begin at 0 in each document.

    A document that is longer than a row is cut. What is left of a row counts as a document of which nothing is learned.
    """
    full_lengths = corpus.starts.diff()
    places = _row_starts(full_lengths.clamp(max=row_length).tolist(), row_length)
    num_rows = places[-1] // row_length + 1
    number = torch.arange(len(places)).repeat_interleave(full_lengths)  # [N], as are the next three
    position = torch.arange(len(number)) - corpus.starts[number]
    is_kept = position < row_length
    place = torch.tensor(places)[number] + position
    # no document is predicted from the one before it
    labels = corpus.labels.where(position > 0, _NOT_LEARNED)

    def rows(values: Tensor, filler: int) -> Tensor:
        flat = torch.full((num_rows * row_length,), filler, dtype=torch.long)
        flat[place[is_kept]] = values[is_kept]
        return flat.view(num_rows, row_length)

    return Batch(rows(corpus.token_ids, 0), rows(labels, _NOT_LEARNED), rows(position, 0), rows(number, -1))


def build_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """A Qwen3 of four layers with grouped-query attention and tied embeddings, about 4 million parameters."""
    end_of_text, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
    config = Qwen3Config(
        vocab_size=math.ceil(tokenizer.get_vocab_size() / 64) * 64,
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end_of_text, turn_end], pad_token_id=end_of_text)
    return model


def _learning_rate(step: int, options: TrainingOptions) -> float:
    """Linear warm-up, then half a cosine down to nothing."""
    warm_up = min(_WARM_UP_STEPS, options.num_steps // 10 + 1)
    if step < warm_up:
        return options.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, options.num_steps - warm_up)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def _loss(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """Mean cross entropy of the next token; a token sees the earlier tokens of its own document only."""
    length = batch.token_ids.shape[1]
    same_document = batch.document[:, :, None] == batch.document[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.token_ids.device).tril()
    output = model(
        input_ids=batch.token_ids,
        attention_mask=(same_document & causal)[:, None],
        position_ids=batch.positions,
        use_cache=False,
    )
    return functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten(), ignore_index=_NOT_LEARNED
    )


def _on_device(batch: Batch, device: str) -> Batch:
    return Batch(
        batch.token_ids.to(device), batch.labels.to(device), batch.positions.to(device), batch.document.to(device)
    )


class BatchSource:
    """Random batches: mostly packed rows, now and then long rows in which documents simply follow each other.

    The long rows teach the far positions of the context, and what to write when a text goes on after its end.
    """

    def __init__(self, corpus: TokenizedCorpus, options: TrainingOptions) -> None:
        self._options = options
        self._packed = _on_device(pack(corpus, options.row_length), options.device)
        self._long_length = min(CONTEXT_LENGTH, len(corpus.token_ids))
        self._long_starts = corpus.starts[corpus.starts <= len(corpus.token_ids) - self._long_length].to(options.device)
        self._token_ids = corpus.token_ids.to(options.device)
        self._labels = corpus.labels.to(options.device)
        self._generator = torch.Generator().manual_seed(options.seed)

    def batch(self, step: int) -> Batch:
        """The batch of one step, on the training device."""
        is_long = step % self._options.long_row_interval == self._options.long_row_interval - 1
        return self._long_rows() if is_long else self._packed_rows()

    def _choose(self, num_choices: int, row_length: int) -> Tensor:
        count = max(1, self._options.batch_tokens // row_length)
        return torch.randint(num_choices, (count,), generator=self._generator).to(self._options.device)

    def _packed_rows(self) -> Batch:
        packed = self._packed
        rows = self._choose(len(packed.token_ids), self._options.row_length)
        return Batch(packed.token_ids[rows], packed.labels[rows], packed.positions[rows], packed.document[rows])

    def _long_rows(self) -> Batch:
        begin = self._long_starts[self._choose(len(self._long_starts), self._long_length)]
        columns = torch.arange(self._long_length, device=self._options.device)
        index = begin[:, None] + columns
        return Batch(self._token_ids[index], self._labels[index], columns.expand_as(index), torch.zeros_like(index))


def train(model: Qwen3ForCausalLM, source: BatchSource, options: TrainingOptions) -> float:
    """Train in place and return the mean loss of the last steps. On a GPU the arithmetic is bf16, the weights fp32."""
    model.to(options.device).train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    mean_loss = torch.zeros((), device=options.device)
    progress = tqdm(range(options.num_steps), desc="training", unit="step", mininterval=2.0)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, options)
        batch = source.batch(step)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = _loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean_loss = loss.detach() if step == 0 else mean_loss.lerp(loss.detach(), 0.02)
        if step % 100 == 0:
            progress.set_postfix(loss=f"{mean_loss.item():.4f}")
    return mean_loss.item()
