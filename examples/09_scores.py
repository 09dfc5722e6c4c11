"""Classify each line of standard input with the probabilities of labels; nothing is generated.

printf 'Egypt\nJapan\n' | python 09_scores.py
"""

import sys

from aioengine import Engine

QUESTION = "On which continent is {0}? The capital of {0} lies in"
LABELS = ["Africa", "Asia", "Europe", "North America", "South America"]


def main() -> None:
    countries = [line.strip() for line in sys.stdin if line.strip()]
    if not countries:
        sys.exit("write names of countries on standard input, one a line")
    with Engine() as llm:
        # A label counts as its first token, so these must differ.
        first_tokens = [llm.tokenizer.encode(f" {label}", add_special_tokens=False)[0] for label in LABELS]
        prompts = [QUESTION.format(country) for country in countries]
        scores_of_countries = llm.score(None, prompts, first_tokens, apply_softmax=True)

    for country, scores in zip(countries, scores_of_countries, strict=True):
        best = max(scores)
        print(f"{country}: {LABELS[scores.index(best)]} ({best:.2f})")


if __name__ == "__main__":
    main()
