"""A batch job: every line of standard input is a prompt, every line of standard output a JSON object.

seq 1 20 | sed 's/.*/& + & =/' | python examples/05_batch.py
"""

import json
import sys

from aioengine import Engine

prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()] or ["2 + 2 =", "3 + 4 ="]

with Engine(progress=True) as llm:
    outputs = llm.generate(prompts, {"temperature": 0, "max_new_tokens": 32}, return_exceptions=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        row = {"error": str(output)} if isinstance(output, Exception) else {"text": output["text"]}
        print(json.dumps({"prompt": prompt, **row}, ensure_ascii=False))

    infos = [output["meta_info"] for output in outputs if not isinstance(output, Exception)]
    num_prompt, num_output = (sum(info[key] for info in infos) for key in ("prompt_tokens", "completion_tokens"))
    print(f"{num_prompt} prompt tokens, {num_output} output tokens", file=sys.stderr)
