"""How close quantized models are to the plain model. On a CPU, or with ``--device cuda`` on a GPU.

    python -m benchmarks.cpu.quality  # a table of all formats that work on the device
    python -m benchmarks.cpu.quality --formats awq 'quantization="int8"' --device cuda

bits        per parameter of the demo model, as ``aioengine.plan`` counts them
perplexity  of the demo model on documents that it was not trained on, of the tokens that it learns to write
answers     share of these documents whose second half it continues with the same 32 greedy tokens as the plain model
KL          mean of the divergence from the plain model, of the next token after 16 prompts. The model has the shape of
            Qwen2.5-0.5B with ``--layers`` layers, and random weights
logprob     the largest difference of a logprob there
product     relative error of a layer's product, compared with its dequantized weight in fp64. "-": not a checkpoint

Weights are rounded to the nearest code, in groups of 32 or as the format says, without calibration. The row of the
plain model in float32 shows how much the rounding of activations changes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Qwen2Config

import aioengine
from aioengine import Engine
from aioengine.model_files.model_folder import DEMO_MODEL
from aioengine.model_files.quantization import read_quantization
from aioengine.model_files.quantized_formats import FORMATS
from aioengine.quantization._base import LinearSpec
from aioengine.quantization.stored import formats
from benchmarks.cpu.models import QWEN25_05B, write_model
from benchmarks.train_demo_model.corpus import write_corpus
from benchmarks.train_demo_model.training import tokenize
from tests.compute.quantized import METHODS, quantize_checkpoint
from tests.kit.gguf_files import byte_tokenizer
from tests.kit.gguf_files import write_model as write_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from benchmarks.train_demo_model.documents import Document
    from tests.compute.quantized import Method

NUM_TRAINED = 500_000
"""Documents of the demo model's training, with seed 0."""
NUM_NEW = 32
STOP_IDS = [0, 2]
"""The end of a text and of a turn. GGUF files have only one."""
NUM_PROMPTS = 16


class Variant(NamedTuple):
    """A quantized model: arguments of the engine, and how the checkpoint is written; the plain one by default."""

    arguments: dict[str, Any]
    method: Method | None = None
    gguf_type: str = ""


class Text(NamedTuple):
    """A document. ``is_learned``: the demo model learns to write this token."""

    ids: list[int]
    is_learned: list[bool]


class Demo(NamedTuple):
    perplexity: float
    answers: list[list[int]]


def variants(device: str) -> dict[str, Variant]:
    """Return the formats that work on a device: checkpoints as the tests write them, and arguments."""
    found = {name: Variant({}, method) for name, method in METHODS.items()}
    found |= {f"gguf {name}": Variant({}, gguf_type=name) for name in ("Q8_0", "Q4_0")}
    for source in ("quantization", "kv_cache_dtype"):
        names = [name for name, devices in FORMATS[source].items() if device in devices and name != "bfloat16"]
        found |= {f'{source}="{name}"': Variant({source: name}) for name in names}
    return found


def unseen_texts(num: int) -> list[Text]:
    """Return documents of the demo model's corpus that are not among those of its training."""

    def whole(document: Document) -> str:
        return "".join(segment.text for segment in document)

    trained = set(map(whole, write_corpus(NUM_TRAINED, 0)))
    new = {whole(document): document for document in write_corpus(20 * num, 1)}
    documents = [document for text, document in new.items() if text not in trained][:num]
    corpus = tokenize(documents, Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))
    bounds = zip(corpus.starts.tolist(), corpus.starts[1:].tolist(), strict=False)
    labels = (corpus.labels >= 0).tolist()
    return [Text(corpus.token_ids[start:end].tolist(), labels[start:end]) for start, end in bounds]


def saved(plain: Path, variant: Variant, folder: Path) -> Path:
    """Write the checkpoint of a variant into the folder. Return its path."""
    config, tensors = json.loads((plain / "config.json").read_text()), load_file(plain / "model.safetensors")
    if variant.gguf_type:
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        tokenizer = byte_tokenizer([], ["<|end|>"], config["vocab_size"])
        tokenizer["tokenizer.ggml.eos_token_id"] = config["eos_token_id"]
        write_gguf(folder / "model.gguf", config, tensors, variant.gguf_type, tokenizer)
        return folder / "model.gguf"
    if variant.method is None:
        return plain
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    save_file(quantize_checkpoint(tensors, variant.method)[0], folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": variant.method.config}))
    return folder


def run_demo(folder: Path, texts: list[Text], arguments: dict[str, Any]) -> Demo:
    prompts = [text.ids for text in texts]
    with Engine(folder, **arguments) as engine:
        scored = engine.generate(
            input_ids=prompts, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
        )
        answers = engine.generate(
            input_ids=[prompt[: (len(prompt) + 1) // 2] for prompt in prompts],
            sampling_params={"temperature": 0, "max_new_tokens": NUM_NEW, "stop_token_ids": STOP_IDS},
        )
    logprobs = [
        logprob
        for answer, text in zip(scored, texts, strict=True)
        for (logprob, _, _), is_learned in zip(
            answer["meta_info"]["input_token_logprobs"], text.is_learned, strict=True
        )
        if is_learned and logprob is not None
    ]
    return Demo(math.exp(-sum(logprobs) / len(logprobs)), [answer["output_ids"] for answer in answers])


def distributions(folder: Path, arguments: dict[str, Any]) -> Tensor:
    """Return the logprobs [X, V] of all next tokens after random prompts."""
    generator, vocab_size = random.Random(0), QWEN25_05B.vocab_size
    rows: list[Tensor] = []
    with Engine(folder, **arguments) as engine:
        for _ in range(NUM_PROMPTS):
            answer = engine.generate(
                input_ids=[generator.randrange(vocab_size) for _ in range(generator.randint(16, 128))],
                sampling_params={"max_new_tokens": 0},
                return_logprob=True,
                top_logprobs_num=vocab_size,
            )
            [top] = answer["meta_info"]["output_top_logprobs"]
            entries = torch.tensor([(logprob, token_id) for logprob, token_id, _ in top], dtype=torch.float64)
            row = torch.empty(vocab_size, dtype=torch.float64)
            rows.append(row.index_copy_(0, entries[:, 1].long(), entries[:, 0]))
    return torch.stack(rows)


def product_error(method: Method, dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative error of a product of a layer with its dequantized weight."""
    torch.manual_seed(0)
    weight = torch.randn(QWEN25_05B.intermediate_size, QWEN25_05B.hidden_size) / 32
    quantized = method.quantize(weight)
    layer = LinearSpec(weight.shape[1], (weight.shape[0],), False, dtype, device)
    layer_format = formats(read_quantization(method.config))("model.layers.0.mlp.up_proj")
    tensors = layer_format.empty(layer)
    for name, tensor in tensors.items():
        stored = quantized.tensors[name].flatten()  # a text is followed by zeros
        tensor.zero_().view(-1)[: len(stored)] = stored
    prepared = layer_format.prepare(layer, tensors)
    errors: list[float] = []
    for num_rows in (1, 32, 512):
        x = torch.randn(num_rows, weight.shape[1]).to(dtype)
        expected = x.double() @ quantized.weight.double().T
        result = prepared.matmul(x.to(device)).cpu().double()
        errors.append(float((result - expected).norm() / expected.norm()))
    return max(errors)


def table_rows(options: argparse.Namespace, random_model: Path) -> Iterator[tuple[str, ...]]:
    """Return the rows of the table, as they are measured."""
    known = variants(options.device)
    wanted = {"plain": Variant({}), 'dtype="float32"': Variant({"dtype": "float32"})}
    wanted |= {name: known[name] for name in options.formats or known}
    texts = unseen_texts(options.documents)
    plain: tuple[Demo, Tensor] | None = None
    for name, variant in wanted.items():
        arguments = {"device": options.device, "dtype": options.dtype, **variant.arguments}
        with tempfile.TemporaryDirectory() as demo_folder, tempfile.TemporaryDirectory() as random_folder:
            path = saved(DEMO_MODEL, variant, Path(demo_folder))
            plan = aioengine.plan(path, **arguments)
            demo = run_demo(path, texts, arguments)
            logprobs = distributions(saved(random_model, variant, Path(random_folder)), arguments)
        plain = plain or (demo, logprobs)
        same = sum(a == b for a, b in zip(demo.answers, plain[0].answers, strict=True)) / len(texts)
        divergence = (plain[1].exp() * (plain[1] - logprobs)).sum(1).mean()
        error = "-"
        if variant.method is not None:
            device = torch.device(options.device)
            error = f"{product_error(variant.method, getattr(torch, options.dtype), device):.1e}"
        yield (
            f"`{name}`",
            f"{plan.weights_bytes * 8 / plan.num_parameters:.1f}",
            f"{demo.perplexity:.4f}",
            f"{same:.3f}",
            f"{divergence:.1e}",
            f"{(plain[1] - logprobs).abs().max():.3f}",
            error,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--formats", nargs="+", help="names in the first column; all by default")
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--layers", type=int, default=4, help="of the model with random weights")
    options = parser.parse_args()
    heads = ("format", "bits", "perplexity", "answers", "KL", "logprob", "product")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    layers = {"num_hidden_layers": options.layers, "layer_types": None}
    config = Qwen2Config.from_dict(QWEN25_05B.to_dict() | layers)
    with tempfile.TemporaryDirectory() as folder:
        for row in table_rows(options, write_model(Path(folder), config)):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
