"""Questions about images on a GPU: the shape of Qwen2.5-VL-7B, random weights, bf16, images of 1024 x 1024.

    python -m benchmarks.gpu.images --models /tmp/bench-models

The first token of a question about a new image, and images a second of 64 requests that come at once, each beside the
time that the vision tower and a prompt of text of as many tokens take alone; and the first token of a second question
about an image, beside a prompt of text whose beginning is cached. Times of the engine include decoding and preparing.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image

from aioengine import Engine, models
from aioengine.media.intake.image_intake import folder_base
from aioengine.media.intake.sources import ImageSource, read_source
from aioengine.media.service.processors import load_processor
from aioengine.media.service.resizing import taps
from aioengine.media.tokens._base import find_image_model
from aioengine.models._base import ModelOptions, VisionModel
from aioengine.processes.media_process import MediaWorker
from aioengine.protocol.media import MediaOrders, PrepareJob
from aioengine.runner import weights
from aioengine.runner.weight_reading import read_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG: dict[str, object] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 151_655,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "vision_token_id": 151_654,
    "video_token_id": 151_656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "max_position_embeddings": 128_000,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152_064,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "temporal_patch_size": 2,
    },
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
START, PLACEHOLDER, END = 151_652, 151_655, 151_653
SIDE, GRID, NUM_TOKENS = 1024, 74, 37 * 37
"""1024 pixels become 1036, which are 74 patches of 14; 2 x 2 patches are a token."""

NUM_REQUESTS = 64
QUESTION = 20
"""Tokens of a question, which stands behind its image."""


def write_vision_folder(models: Path) -> Path:
    folder = models / "qwen2.5-vl-7b"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def image_of(seed: int) -> bytes:
    """A JPEG of some 300 KB, as large as that of a photograph."""
    draw = np.random.default_rng(seed)
    smooth = Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize((SIDE, SIDE))
    noise = draw.integers(-12, 13, (SIDE, SIDE, 3))
    pixels = np.clip(np.asarray(smooth, dtype=np.int16) + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()


def words(seed: int, number: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 150_000) for _ in range(number)]


def about_image(seed: int) -> list[int]:
    return [START, PLACEHOLDER, END, *words(seed, QUESTION)]


def text_of(seed: int, question: int) -> list[int]:
    """As many tokens as an image with a question has."""
    return [*words(seed, NUM_TOKENS + 2), *words(question, QUESTION)]


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def tower_ms(folder: Path, repeat: int) -> float:
    """The vision tower alone, with the copy of the image to the device, and its last preparation there."""
    options = ModelOptions(dtype=torch.bfloat16, device=torch.device("cuda"), max_positions=4096)
    model = models.build({**CONFIG, "num_hidden_layers": 1, "vocab_size": 152_064}, options)
    weights.load(model, folder, load_format="dummy", seed=0, report=lambda *_: None)
    assert isinstance(model, VisionModel)
    starts, products = map(torch.tensor, taps(SIDE, GRID * 14))
    arrays = {
        "picture": torch.randint(0, 256, (SIDE, SIDE, 3), dtype=torch.uint8),
        "table": torch.randn(3, 256),
        "image_grid_thw": torch.tensor([[1, GRID, GRID]]),
        "rows_first": torch.tensor([False]),
        **{f"{name}_starts": starts for name in ("row", "column")},
        **{f"{name}_weights": products for name in ("row", "column")},
    }

    def once() -> None:
        model.encode_image(arrays)
        torch.cuda.synchronize()

    once()
    return statistics.median(milliseconds(once) for _ in range(repeat))


def decode_ms(repeat: int) -> float:
    """Pillow's decoder alone, whatever else there is around it."""
    pictures = [Image.open(io.BytesIO(image_of(seed))) for seed in range(repeat)]
    return statistics.median(milliseconds(picture.load) for picture in pictures)


def prepare_ms(folder: Path, repeat: int) -> tuple[float, float, float]:
    """Each alone: taking in the bytes of a new image; decoding and preparing it, as the media process does it, files
    included; and reading its file, as the runner does it.
    """
    images = find_image_model(folder)
    assert images is not None
    orders = MediaOrders(
        parent_pid=0,
        socket_fd=-1,
        processor=images.processor,
        settings=images.settings,
        options=dict(images.family.options),
        limits=images.limits,
        num_workers=1,
        resizes_on_device=True,
    )
    worker = MediaWorker(orders, *load_processor(orders))
    times: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(dir=folder_base()) as files:
        source, made = Path(files, "source.jpg"), Path(files, "image.safetensors")
        for seed in range(1 + repeat):
            image = ImageSource("bytes", image_of(seed))
            job = PrepareJob(seed, str(source), str(made))
            taken_in = milliseconds(lambda image=image: source.write_bytes(read_source(image, images.limits).data))
            prepared = milliseconds(lambda job=job: asyncio.run(worker.do(job, print)))
            times.append((taken_in, prepared, milliseconds(lambda: read_arrays(str(made), is_pinned=True))))
            made.unlink()
    taken_in, prepared, was_read = map(statistics.median, zip(*times[1:], strict=True))
    return taken_in, prepared, was_read


def first_token_ms(engine: Engine, input_ids: list[int], image: bytes | None = None) -> float:
    one = {"max_new_tokens": 1, "temperature": 0.0}
    return milliseconds(lambda: engine.generate(input_ids=input_ids, image_data=image, sampling_params=one))


def together_ms(engine: Engine, prompts: list[list[int]], images: list[bytes] | None = None) -> float:
    one = {"max_new_tokens": 1, "temperature": 0.0}
    return milliseconds(lambda: engine.generate(input_ids=prompts, image_data=images, sampling_params=one))


class Parts(NamedTuple):
    """Milliseconds of an image alone."""

    tower: float
    decode: float
    take_in: float
    prepare: float
    read: float


def measure(engine: Engine, parts: Parts, repeat: int) -> None:
    first_token_ms(engine, about_image(1), image_of(1))
    first_token_ms(engine, text_of(1, 1))
    seeds = range(10, 10 + repeat)
    pictures = {seed: image_of(seed) for seed in seeds}  # before: it drives everything else out of the caches
    texts = [first_token_ms(engine, text_of(seed, seed)) for seed in seeds]
    images = [first_token_ms(engine, about_image(seed), pictures[seed]) for seed in seeds]
    tower, text, image = parts.tower, statistics.median(texts), statistics.median(images)
    print(f"tower alone                     {tower:9.1f} ms")
    print(f"prompt of text alone            {text:9.1f} ms")
    print(f"taking in its bytes alone       {parts.take_in:9.1f} ms")
    print(f"decoding alone                  {parts.decode:9.1f} ms")
    print(f"decoding and preparing alone    {parts.prepare:9.1f} ms")
    print(f"reading its file alone          {parts.read:9.1f} ms")
    print(f"first token, new image          {image:9.1f} ms   {image / (tower + text):.2f} x", flush=True)
    print(f"on top of tower and prompt      {image - tower - text:9.1f} ms", flush=True)
    again = statistics.median(first_token_ms(engine, about_image(100 + seed), pictures[seed]) for seed in seeds)
    cached = statistics.median(first_token_ms(engine, text_of(seed, 100 + seed)) for seed in seeds)
    print(f"first token, cached text        {cached:9.1f} ms")
    print(f"first token, second question    {again:9.1f} ms   {again - cached:+.1f} ms", flush=True)
    many = range(1000, 1000 + NUM_REQUESTS)
    with ThreadPoolExecutor() as pool:
        new = list(pool.map(image_of, many))
    all_texts = together_ms(engine, [text_of(seed, seed) for seed in many])
    all_images = together_ms(engine, [about_image(seed) for seed in many], new)
    alone = NUM_REQUESTS * tower + all_texts
    print(f"{NUM_REQUESTS} texts                        {all_texts:9.1f} ms")
    print(f"{NUM_REQUESTS} images                       {all_images:9.1f} ms   {all_images / alone:.2f} x")
    print(f"images a second                 {1000 * NUM_REQUESTS / all_images:9.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the model's config")
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    folder = write_vision_folder(options.models)
    tower = tower_ms(folder, options.repeat)
    torch.cuda.empty_cache()
    parts = Parts(tower, decode_ms(options.repeat), *prepare_ms(folder, options.repeat))
    with Engine(folder, load_format="dummy", skip_tokenizer_init=True, context_length=16_384) as engine:
        measure(engine, parts, options.repeat)


if __name__ == "__main__":
    main()
