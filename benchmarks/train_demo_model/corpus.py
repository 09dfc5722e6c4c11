"""The corpus: so many documents of each kind, written from nothing but a seed."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tqdm import tqdm

from benchmarks.train_demo_model import lessons, nonsense, records, stories

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.train_demo_model.documents import Document

# (what writes a document, its share of the corpus in percent of the documents)
MIXTURE: tuple[tuple[Callable[[Random], Document], int], ...] = (
    (lessons.capital_statement, 14),
    (lessons.capital_question, 12),
    (lessons.country_fact, 6),
    (lessons.other_language, 12),
    (lessons.arithmetic, 12),
    (lessons.counting, 4),
    (lessons.knowledge, 8),
    (lessons.small_talk, 6),
    (lessons.introduction, 4),
    (lessons.conversation, 7),
    (nonsense.unknown, 6),
    (lessons.words, 7),
    (records.record, 10),
    (stories.story, 12),
)


def write_corpus(num_documents: int, seed: int) -> list[Document]:
    """`num_documents` documents in random order; the same ones for the same seed."""
    rng = Random(seed)
    writers, shares = zip(*MIXTURE, strict=True)
    chosen = rng.choices(writers, shares, k=num_documents)
    return [write(rng) for write in tqdm(chosen, desc="writing documents", unit="doc")]
