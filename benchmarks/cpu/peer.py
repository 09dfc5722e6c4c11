"""Another engine in a Python of its own, because it needs other packages. ``benchmarks.cpu.workloads`` starts it:

    python -m benchmarks.cpu.peer llama_cpp MODEL.gguf

Each line of its input is a JSON list: prompts of token ids, and the number of greedy tokens for each. Each line of its
output has the seconds until each step that gave tokens; the last number is the end. OpenVINO reports the steps of a
single prompt only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np

Generate = Callable[[list[list[int]], int], list[float]]
MAX_BATCH, MAX_POSITIONS, MAX_STREAMS = 2048, 16384, 64


def llama_cpp(path: str) -> Generate:
    """Use llama.cpp through its C interface: the common beginning of all prompts is computed once."""
    import llama_cpp as llama

    num_threads = len(os.sched_getaffinity(0))
    llama.llama_backend_init()
    silent = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silent, None)
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = MAX_POSITIONS, MAX_BATCH, MAX_STREAMS
    params.n_threads = params.n_threads_batch = num_threads
    params.kv_unified = True
    context = llama.llama_init_from_model(model, params)
    memory = llama.llama_get_memory(context)
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(MAX_BATCH, 0, 1)

    def decode(tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, stream, whether to sample); return the most likely next tokens."""
        batch.n_tokens = len(tokens)
        for i, (token, position, stream, samples) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, samples
            batch.seq_id[i][0] = stream
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        rows = [i for i, token in enumerate(tokens) if token[3]]
        logits = (np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), shape=(vocab_size,)) for i in rows)
        return [int(row.argmax()) for row in logits]

    def generate(prompts: list[list[int]], num_new: int, _used: object = silent) -> list[float]:  # C holds no reference
        llama.llama_memory_clear(memory, False)
        started = time.perf_counter()
        num_shared = 0
        if len(prompts) > 1:
            columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
            num_shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
        if num_shared:
            decode([(token, i, 0, False) for i, token in enumerate(prompts[0][:num_shared])])
            for stream in range(1, len(prompts)):
                llama.llama_memory_seq_cp(memory, 0, stream, 0, num_shared)
        tokens = [
            (token, i, stream, i == len(prompt) - 1)
            for stream, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
            if i >= num_shared
        ]
        newest: list[int] = []
        for first in range(0, len(tokens), MAX_BATCH):
            newest += decode(tokens[first : first + MAX_BATCH])
        times = [time.perf_counter() - started]
        for step in range(num_new - 1):
            newest = decode([(token, len(prompts[i]) + step, i, True) for i, token in enumerate(newest)])
            times.append(time.perf_counter() - started)
        return times

    return generate


def openvino_genai(path: str) -> Generate:
    """OpenVINO GenAI with its prefix cache. The model is exported to ``path`` from the folder above, in the format
    that ``path`` ends with."""
    import openvino as ov
    import openvino_genai as genai

    if not os.path.exists(path):
        command = "from optimum.commands.optimum_cli import main; main()"
        folder, kind = os.path.split(path)
        options = ["--model", folder, "--task", "text-generation-with-past", "--weight-format", kind]
        subprocess.run([sys.executable, "-c", command, "export", "openvino", *options, path], check=True)
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 4  # GB
    pipeline = genai.LLMPipeline(path, "CPU", scheduler_config=scheduler)

    class Times(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.found: list[float] = []

        def write(self, token: Any) -> Any:
            self.found.append(time.perf_counter())
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def generate(prompts: list[list[int]], num_new: int) -> list[float]:
        width = max(map(len, prompts))
        ids, mask = np.zeros((2, len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        config = genai.GenerationConfig(max_new_tokens=num_new, ignore_eos=True, do_sample=False)
        times = Times()
        started = time.perf_counter()
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask))
        result = pipeline.generate(inputs, config, times if len(prompts) == 1 else None)
        ended = time.perf_counter()
        counts = {len(tokens) for tokens in result.tokens}
        if counts != {num_new}:
            raise RuntimeError(f"expected {num_new} tokens for each prompt, got {counts}")
        return [moment - started for moment in [*times.found, ended]]

    return generate


def vllm(path: str) -> Generate:
    """Use vLLM in this process, with an empty prefix cache. The dtype of its arithmetic is the end of ``path``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"  # GB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, os.sched_getaffinity(0)))
    from vllm import LLM, SamplingParams

    folder, dtype = os.path.split(path)
    model = LLM(folder, dtype=dtype, skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=MAX_STREAMS)
    engine = model.llm_engine

    def generate(prompts: list[list[int]], num_new: int) -> list[float]:
        model.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        started, times = time.perf_counter(), list[float]()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            if engine.step():
                times.append(time.perf_counter() - started)
        return times

    return generate


def main() -> None:
    name, path = sys.argv[1:]
    output = os.dup(1)
    os.dup2(2, 1)  # some engines print to the standard output
    generate = {"llama_cpp": llama_cpp, "openvino_genai": openvino_genai, "vllm": vllm}[name](path)
    with os.fdopen(output, "w") as lines:
        print("ready", file=lines, flush=True)
        for line in sys.stdin:
            print(json.dumps(generate(*json.loads(line))), file=lines, flush=True)


if __name__ == "__main__":
    main()
