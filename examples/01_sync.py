"""Several prompts at once, without asyncio. The script needs no ``if __name__ == "__main__"``."""

from aioengine import Engine

PROMPTS = ["The capital of France is", "The capital of Japan is", "Hello, my name is"]

with Engine() as llm:  # the small model of the package; Engine("folder or hub id") for another
    outputs = llm.generate(PROMPTS, {"temperature": 0, "max_new_tokens": 24})
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"{prompt}{output['text']}   [{output['meta_info']['finish_reason']}]")
