"""Stream text in a plain loop. Leaving the loop early aborts the request."""

from aioengine import Engine, SamplingParams

with Engine() as llm:
    params = SamplingParams(temperature=0.7, max_new_tokens=64, sampling_seed=1)
    for chunk in llm.generate("Once upon a time", params, stream=True):
        print(chunk["text"], end="", flush=True)
    print()

    for chunk in llm.generate("Once upon a time", params, stream=True):
        print(chunk["text"], end="", flush=True)
        if chunk["meta_info"]["completion_tokens"] >= 10:
            break
    print(" ...")
