"""Embeddings on a CPU, bge-small shape (12 layers of 384), beside plain transformers with sentence-transformers' rules.

    python -m benchmarks.cpu.embeddings --models /tmp/bench-models
    python -m benchmarks.cpu.embeddings --models /tmp/bench-models --dtype bfloat16 --num 128 --repeat 5

The texts are random token ids, of 16 to 256 tokens, new ones each turn; vectors are the first token's, normalised.
transformers computes in fp32 with its own attention (sdpa), in batches of 32 sorted by length, as sentence-transformers
does. ``ratio``: transformers' CPU time over the engine's, which says more than the rate where the machine has other
work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, BertConfig

from aioengine import Engine
from benchmarks.cpu.request_options import cpu_s

SHAPE = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
BATCH = 32
LENGTHS = 16, 256


def write_model(folder: Path) -> None:
    """Write the model as sentence-transformers saves it, without a tokenizer."""
    torch.manual_seed(0)
    AutoModel.from_config(BertConfig(**SHAPE), dtype=torch.float32).save_pretrained(folder)
    modules = [
        {"path": path, "type": kind} for path, kind in (("", "Transformer"), ("1", "Pooling"), ("2", "Normalize"))
    ]
    (folder / "1").mkdir(exist_ok=True)
    (folder / "1" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (folder / "modules.json").write_text(json.dumps(modules))


@torch.inference_mode()
def encode(model: torch.nn.Module, texts: list[list[int]]) -> np.ndarray:
    """Return the vectors [N, D] of transformers."""
    found = np.empty((len(texts), SHAPE["hidden_size"]), dtype=np.float32)
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        longest = len(texts[places[0]])
        ids = torch.tensor([texts[place] + [0] * (longest - len(texts[place])) for place in places])
        mask = torch.tensor([[1] * len(texts[place]) + [0] * (longest - len(texts[place])) for place in places])
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        found[places] = torch.nn.functional.normalize(hidden, dim=-1).numpy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the model, written when missing")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"], help="of the engine")
    parser.add_argument("--num", type=int, default=256, help="texts of a turn")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    folder = options.models / "bge-small"
    if not (folder / "modules.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with Engine(folder, dtype=options.dtype, skip_tokenizer_init=True) as engine:
        info = engine.get_server_info()
        torch.set_num_threads(int(str(info["num_threads"])))
        ratios: list[float] = []
        for turn in range(-1, options.repeat):
            draw = random.Random(turn)
            texts = [[draw.randrange(1, 30000) for _ in range(draw.randint(*LENGTHS))] for _ in range(options.num)]
            used_s, started = cpu_s(engine), time.perf_counter()
            ours = np.stack(engine.encode(input_ids=texts)["embedding"])
            our_s, our_cpu_s = time.perf_counter() - started, cpu_s(engine) - used_s
            used_s, started = time.process_time(), time.perf_counter()
            theirs = encode(model, texts)
            their_s, their_cpu_s = time.perf_counter() - started, time.process_time() - used_s
            if turn < 0:  # the warm-up
                continue
            ratios.append(their_cpu_s / our_cpu_s)
            print(
                f"engine {len(texts) / our_s:7.1f} texts/s, CPU {our_cpu_s:6.2f} s   "
                f"transformers {len(texts) / their_s:7.1f} texts/s, CPU {their_cpu_s:6.2f} s   "
                f"ratio {ratios[-1]:.3f}   largest difference {np.abs(ours - theirs).max():.1e}",
                flush=True,
            )
        print(f"median ratio {statistics.median(ratios):.3f} on {info['num_threads']} threads, {options.dtype}")


if __name__ == "__main__":
    main()
