"""Train the small model that ships with aioengine: `python -m benchmarks.train_demo_model --out aioengine/demo`.

Writes its own corpus, learns a tokenizer from it, trains a Qwen3 of about 4 million parameters, saves a folder as
`transformers` reads it, and examines what it saved. Takes minutes on one GPU.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from benchmarks.train_demo_model.corpus import write_corpus
from benchmarks.train_demo_model.examination import examine
from benchmarks.train_demo_model.training import (
    CONTEXT_LENGTH,
    BatchSource,
    TrainingOptions,
    build_model,
    tokenize,
    train,
)
from benchmarks.train_demo_model.vocabulary import save_tokenizer, train_tokenizer

# the vocabulary is learned from the first documents: they hold every word, and more would only take longer
_NUM_VOCABULARY_DOCUMENTS = 60_000


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model of aioengine.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=10_000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=500_000, help="size of the corpus (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=32_768, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=3072, help="most tokens to learn (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--seed", type=int, default=0, help="of corpus, weights and batches (default: %(default)s)")
    parser.add_argument("--no-examination", action="store_true", help="do not test the result")
    return parser.parse_args()


def main() -> None:
    """Corpus, tokenizer, training, folder, examination."""
    arguments = _arguments()
    torch.manual_seed(arguments.seed)
    documents = write_corpus(arguments.documents, arguments.seed)
    tokenizer = train_tokenizer(documents[:_NUM_VOCABULARY_DOCUMENTS], arguments.vocabulary)
    corpus = tokenize(documents, tokenizer)
    model = build_model(tokenizer)
    print(
        f"{len(documents):,} documents, {len(corpus.token_ids):,} tokens, "
        f"{tokenizer.get_vocab_size():,} kinds of token, {model.num_parameters():,} parameters"
    )
    options = TrainingOptions(
        num_steps=arguments.steps,
        device=arguments.device,
        seed=arguments.seed,
        batch_tokens=arguments.batch_tokens,
    )
    source = BatchSource(corpus, options)
    begin = time.perf_counter()
    loss = train(model, source, options)
    print(f"trained for {time.perf_counter() - begin:.0f} s, loss {loss:.4f}")

    arguments.out.mkdir(parents=True, exist_ok=True)
    model.to("cpu", torch.bfloat16).save_pretrained(arguments.out)
    save_tokenizer(tokenizer, arguments.out, CONTEXT_LENGTH)
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")
    if not arguments.no_examination:
        print(examine(arguments.out, arguments.device))


if __name__ == "__main__":
    main()
