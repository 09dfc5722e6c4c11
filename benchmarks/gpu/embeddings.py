"""Embeddings on a GPU: the shapes of bge-large, bge-base and, as an embedder, Qwen3-0.6B; random weights.

    python -m benchmarks.gpu.embeddings --models /tmp/bench-models
    python -m benchmarks.gpu.embeddings --models /tmp/bench-models --shapes bge-base --repeat 5

Sequences a second of 4,096 texts of 128 tokens, 1,024 of 512 and 2,048 of 16 to 512, each in one call; and the time of
one text of 128 tokens alone. Inputs are token ids, new ones each run; the times include the vectors as numpy arrays.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from aioengine import Engine

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",  # as these models are published; dtype="auto" computes in float16 on a GPU
}
QWEN = {
    "architectures": ["Qwen3Model"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
Config = dict[str, object]


def sized(base: Config, *, width: int, inner: int, layers: int, heads: int) -> Config:
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return {**base, **sizes}


SHAPES = {
    "bge-large": sized(BERT, width=1024, inner=4096, layers=24, heads=16),
    "bge-base": sized(BERT, width=768, inner=3072, layers=12, heads=12),
    "qwen3-0.6b": sized(QWEN, width=1024, inner=3072, layers=28, heads=16),
}
WORKLOADS = {"4096 x 128": (4096, 128, 128), "1024 x 512": (1024, 512, 512), "2048 x 16..512": (2048, 16, 512)}


def texts_of(seed: int, num: int, shortest: int, longest: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, 30000) for _ in range(draw.randint(shortest, longest))] for _ in range(num)]


def seconds(engine: Engine, texts: list[list[int]]) -> float:
    started = time.perf_counter()
    vectors = engine.encode(input_ids=texts)["embedding"]
    assert len(vectors) == len(texts)
    return time.perf_counter() - started


def write_folder(folder: Path, config: Config, pooling: str) -> None:
    """Write a folder of sentence-transformers without weights and tokenizer."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    modules = [
        {"path": path, "type": kind} for path, kind in (("", "Transformer"), ("1", "Pooling"), ("2", "Normalize"))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1" / "config.json").write_text(json.dumps({pooling: True}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the models' configs")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    for name in options.shapes:
        folder = options.models / name
        pooling = "pooling_mode_lasttoken" if name.startswith("qwen") else "pooling_mode_cls_token"
        write_folder(folder, SHAPES[name], pooling)
        with Engine(folder, load_format="dummy", skip_tokenizer_init=True, disable_radix_cache=True) as engine:
            seconds(engine, texts_of(0, 256, 16, 512))
            for workload, (num, shortest, longest) in WORKLOADS.items():
                found = [seconds(engine, texts_of(turn, num, shortest, longest)) for turn in range(options.repeat)]
                print(f"{name:11} {workload:15} {num / statistics.median(found):9.1f} sequences/s", flush=True)
            alone = [seconds(engine, texts_of(turn, 1, 128, 128)) for turn in range(50)]
            print(f"{name:11} one of 128      {1000 * statistics.median(alone):9.2f} ms", flush=True)


if __name__ == "__main__":
    main()
