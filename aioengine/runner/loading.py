"""The model of the settings on its device, with its weights, and the attention that works for it there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from aioengine import models
from aioengine.families._config import Task
from aioengine.kernels.triton.launcher import is_installed
from aioengine.models._base import ModelOptions
from aioengine.protocol.messages import Progress
from aioengine.runner import weights
from aioengine.runner.attention_choice import choose_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.config import Settings
    from aioengine.models._base import Model
    from aioengine.runner.attention_choice import AttentionChoice
    from aioengine.runner.device_memory import DeviceMemory
    from aioengine.runner.start_times import StartTimes


def load_model(
    settings: Settings,
    dtype: torch.dtype,
    memory: DeviceMemory,
    *,
    kv_dtype: torch.dtype,
    vocab_size: int,
    report: Callable[[Progress], None],
    times: StartTimes,
) -> tuple[Model, AttentionChoice, int]:
    """The model with its weights, the attention that works for it, and the bytes of the parameters. Token ids below
    ``vocab_size`` will be sampled.
    """
    advice = "End what else has memory of the GPU, or take a smaller model or a larger GPU"
    if dtype == torch.float32:
        advice += "; dtype='bfloat16' takes half"
    outline = _model(settings, dtype, torch.device("meta"))
    if outline.task is not Task.GENERATE:
        message = f"the task of this model is '{outline.task}', which is not implemented; what works: '{Task.GENERATE}'"
        raise ValueError(message)
    need = sum(target.tensor.nbytes for target in outline.weights().values())
    with memory.take("the weights", advice=advice, need=need), torch.no_grad():
        model = _model(settings, dtype, memory.device)
        if memory.device.type == "cuda" and is_installed():
            _ask_for_sampling(model, vocab_size, memory.device)
        times.end("device")
        shape, device = model.attention_shape, memory.device
        choice = choose_attention(settings.runner, shape, dtype, device, kv_dtype=kv_dtype, report=report)
        times.end("attention")
        weights_bytes = weights.load(
            model,
            Path(settings.model.path),
            load_format=settings.model.load_format,
            seed=settings.random_seed,
            report=lambda done, total: report(Progress("loading weights", done, total, "B")),
        )
    times.end("weights")
    return model, choice, weights_bytes


def _ask_for_sampling(model: Model, vocab_size: int, device: torch.device) -> None:
    """These kernels take the longest to compile; meanwhile FlashInfer is imported and the weights are read."""
    module = importlib.import_module("aioengine.runner.sampling.device_sampler")
    width = model.vocab_size
    module.ask_for_kernels(vocab_size=min(vocab_size, width), num_embeddings=width, dtype=model.dtype, device=device)


def _model(settings: Settings, dtype: torch.dtype, device: torch.device) -> Model:
    options = ModelOptions(
        dtype=dtype,
        device=device,
        max_positions=settings.model.context_length,
        batch_invariant=settings.runner.batch_invariant,
    )
    return models.build(_read_config(Path(settings.model.path)), options)


def _read_config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}; a model folder of transformers has a config.json"
        raise ValueError(message) from error
    except ValueError as error:
        message = f"{path} is not JSON: {error}"
        raise ValueError(message) from error
    if not isinstance(config, dict):
        message = f"{path} must hold a JSON object, it holds a {type(config).__name__}"
        raise ValueError(message)
    return cast("dict[str, object]", config)
