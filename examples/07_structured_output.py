"""Extract dataclasses from text. Every answer is valid JSON for the schema, at any temperature."""

from dataclasses import dataclass

import msgspec

from aioengine import Engine


@dataclass
class Person:
    name: str
    age: int
    city: str


TEXTS = ["Ada is 36 years old and lives in London.", "Marco is 52 years old and lives in Rome."]

if __name__ == "__main__":
    with Engine() as llm:
        params = {"json_schema": Person, "temperature": 0, "max_new_tokens": 120}
        answers = llm.generate([f"{text} As JSON: " for text in TEXTS], params)
        for text, answer in zip(TEXTS, answers, strict=True):
            print(text, "->", msgspec.json.decode(answer["text"], type=Person))

        capital = llm.generate("The capital of Peru is ", {"choice": ["Lima", "Oslo", "Rome"], "temperature": 0})
        print(capital["text"])
