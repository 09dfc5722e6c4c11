"""Semantic search: which of these sentences is nearest in meaning to each line of standard input?

    echo "Which animals are there?" | python 08_search.py
    echo "Which animals are there?" | python 08_search.py BAAI/bge-small-en-v1.5

Without an argument, the demo model computes the vectors. It was not trained for this.
"""

import sys

import numpy as np

from aioengine import Engine

SENTENCES = [
    "The capital of France is Paris.",
    "The capital of Norway is Oslo.",
    "Cairo is the capital of Egypt.",
    "The cat sleeps on the sofa.",
    "2 + 3 = 5",
    "7 + 8 = 15",
]


def main() -> None:
    queries = [line.strip() for line in sys.stdin if line.strip()]
    if not queries:
        sys.exit("write a question on standard input")
    with Engine(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        documents = np.stack(llm.encode(SENTENCES)["embedding"])
        vectors = np.stack(llm.encode(queries)["embedding"])

    similarity = vectors @ documents.T  # the vectors have the length 1, so these are cosines
    for query, row in zip(queries, similarity, strict=True):
        best = int(row.argmax())
        print(f"{query}: {SENTENCES[best]} ({row[best]:.2f})")


if __name__ == "__main__":
    main()
