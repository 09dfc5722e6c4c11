"""A batch job: every line of standard input is a prompt, every line of standard output a JSON object.

seq 1 20 | sed 's/.*/& + & =/' | python examples/05_batch.py
"""

import json
import sys

from aioengine import Engine

prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()] or ["2 + 2 =", "3 + 4 ="]
num_prompt = num_output = 0

with Engine(progress=True) as llm:
    for row in llm.map(prompts, {"temperature": 0, "max_new_tokens": 32}):
        text = {"error": row["error"]["message"]} if "error" in row else {"text": row["text"]}
        print(json.dumps({"prompt": prompts[row["index"]], **text}, ensure_ascii=False))
        if "error" not in row:
            num_prompt += row["meta_info"]["prompt_tokens"]
            num_output += row["meta_info"]["completion_tokens"]

print(f"{num_prompt} prompt tokens, {num_output} output tokens", file=sys.stderr)
