"""Plain decoding and speculation on a CPU, by turns, on a text that repeats itself and on one that does not.

    python -m benchmarks.cpu.speculation
    python -m benchmarks.cpu.speculation --models /tmp/bench-models --rows 1 8
    python -m benchmarks.cpu.speculation --models /tmp/bench-models --draft-model accepted

copied   a story twice, cut after a word of the second copy, greedy: drafts continue the copy as long as the model does
forced   one token again and again (``logit_bias``): every draft is accepted
new      temperature 1.5: hardly any tokens repeat, and no draft is accepted

The model is the demo model, or with ``--models`` Qwen2.5-0.5B with random weights (then ``copied`` accepts nothing).
Drafts are n-grams. With ``--draft-model``, only the first layer of the model has an effect, and a draft model of one
layer proposes drafts: the same layer (all are accepted), or one with other weights (hardly any is accepted).
Each line has the medians of seconds per token, the factor, and the share of the proposed drafts that were accepted.
``equal`` says whether both engines gave the same tokens.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from aioengine import Engine
from benchmarks.cpu.models import QWEN25_05B, write_model
from benchmarks.train_demo_model.documents import END_OF_TEXT
from benchmarks.train_demo_model.stories import story

FORCED_TOKEN = "100"


class Result(NamedTuple):
    """Seconds per token, the tokens of each row, and the numbers of proposed and of accepted drafts."""

    token_s: float
    token_ids: list[list[int]]
    num_proposed: int
    num_accepted: int


def write_models(folder: Path, kind: str) -> dict[str, Any]:
    """Write a model whose upper layers have no effect, and a draft model. kind: "accepted" or "rejected".

    Return their arguments.
    """
    names = folder / f"draft-{kind}" / "model", folder / f"draft-{kind}" / "draft"
    if not names[1].exists():
        model: Any = AutoModelForCausalLM.from_pretrained(write_model(folder, QWEN25_05B))
        with torch.no_grad():
            for layer in model.model.layers[1:]:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            for copied in names:
                shutil.copytree(folder, copied, ignore=lambda _, found: [name for name in found if "draft" in name])
            model.save_pretrained(names[0])
            if kind == "rejected":
                for weight in model.model.layers[0].parameters():
                    weight.copy_(torch.randn_like(weight) * 0.1)
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers, model.config.layer_types = 1, model.config.layer_types[:1]
        model.save_pretrained(names[1])
    arguments = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": names[1]}
    return {"model_path": names[0], **arguments}


def prompt_of(kind: str) -> str:
    """Return a story, and its first third again if the model shall continue the copy.

    Inside a word, the tokens of the copy would differ from those of the story, and the model would not continue it.
    """
    text = "".join(segment.text for segment in story(random.Random(0))).replace(END_OF_TEXT, "")
    return f"{text}\n\n{text[: len(text) // 3].rpartition(' ')[0]}" if kind == "copied" else text


def params_of(kind: str, num_new: int) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": num_new, "ignore_eos": True, "temperature": 0, "seed": 1}
    if kind == "new":
        params["temperature"] = 1.5
    if kind == "forced":
        params["logit_bias"] = {FORCED_TOKEN: 100}
    return params


def measure(engine: Engine, kind: str, num_rows: int, num_new: int) -> Result:
    """Time one call. The prefix cache has the prompt, so decode steps take most of the time."""
    prompt, params = prompt_of(kind), params_of(kind, num_new)
    engine.generate(prompt, {**params, "max_new_tokens": 1})
    before = engine.stats()
    started = time.perf_counter()
    answers: Any = engine.generate([prompt] * num_rows, [{**params, "seed": row} for row in range(num_rows)])
    seconds = time.perf_counter() - started
    token_ids = [answer["output_ids"] for answer in answers]
    while (after := engine.stats())["num_running"]:
        time.sleep(0.01)
    names = ("num_proposed_drafts", "num_accepted_drafts")
    num_proposed, num_accepted = (after[name] - before[name] for name in names)
    return Result(seconds / len(token_ids[0]), token_ids, num_proposed, num_accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder for a model with random weights; default: the demo model")
    parser.add_argument("--draft-model", choices=["accepted", "rejected"], help="needs --models; default: n-grams")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--num-new", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=None)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    shared: dict[str, Any] = {"device": "cpu"}
    drafts: dict[str, Any] = {"speculative_algorithm": "NGRAM"}
    if arguments.models is not None:
        shared |= {"model_path": write_model(arguments.models, QWEN25_05B), "max_total_tokens": 16384}
    if arguments.draft_model is not None and arguments.models is not None:
        drafts = write_models(arguments.models, arguments.draft_model)
        shared["model_path"] = drafts.pop("model_path")
    plain = Engine(**shared)
    drafting = Engine(**shared, **drafts, speculative_num_draft_tokens=arguments.num_draft_tokens)
    print(f"{'':8} rows  plain ms  draft ms  factor  accepted  equal")
    with plain, drafting:
        for kind in ("copied", "forced", "new"):
            for num_rows in arguments.rows:
                pairs = [
                    [measure(engine, kind, num_rows, arguments.num_new) for engine in (plain, drafting)]
                    for _ in range(arguments.repeat)
                ]
                plain_s, draft_s = (statistics.median(pair[side].token_s for pair in pairs) for side in (0, 1))
                num_proposed = sum(pair[1].num_proposed for pair in pairs)
                share = sum(pair[1].num_accepted for pair in pairs) / max(1, num_proposed)
                is_equal = all(pair[0].token_ids == pair[1].token_ids for pair in pairs)
                print(
                    f"{kind:8} {num_rows:4} {1000 * plain_s:9.2f} {1000 * draft_s:9.2f} {plain_s / draft_s:7.2f} "
                    f"{share:9.0%}  {is_equal}"
                )


if __name__ == "__main__":
    main()
