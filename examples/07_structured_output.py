"""Extract dataclasses from text. Every answer is valid JSON for the schema, at any temperature."""

from dataclasses import dataclass

import msgspec

from aioengine import Engine


@dataclass
class Person:
    name: str
    age: int
    city: str


TEXTS = ["Ada, 36, works in London.", "Grace is 45 and has moved to New York.", "Kurt (28) left Brno for Vienna."]

if __name__ == "__main__":
    with Engine() as llm:
        params = {"json_schema": Person, "temperature": 0, "max_new_tokens": 120}
        answers = llm.generate([f"{text} The person as JSON: " for text in TEXTS], params)
        for text, answer in zip(TEXTS, answers, strict=True):
            print(text, "->", msgspec.json.decode(answer["text"], type=Person))

        tone = llm.generate("I like it very much. This is ", {"choice": ["positive", "negative"], "temperature": 0})
        print(tone["text"])
