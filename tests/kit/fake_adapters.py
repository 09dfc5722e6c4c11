"""Write folders of small adapters without torch and peft."""

from __future__ import annotations

import json
import math
import random
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FAKE_LAYERS = {"model.layers.0.self_attn.q_proj": (8, 8)}
"""Of the model of ``aioengine.testing.fake_engine``."""


def write_adapter(
    folder: Path,
    seed: int = 0,
    *,
    rank: int = 2,
    layers: Mapping[str, tuple[int, int]] = FAKE_LAYERS,
    config: Mapping[str, object] | None = None,
    value: float | None = None,
) -> Path:
    """Write a random fp32 adapter for these layers. ``config`` changes fields of its configuration.

    value: the first number of its tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    fields["target_modules"] = sorted({name.rpartition(".")[2] for name in layers})
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **(config or {})}))
    numbers = random.Random(seed)
    header: dict[str, object] = {}
    data = array("f")
    for name, (outputs, inputs) in layers.items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            start = 4 * len(data)
            data.extend(numbers.gauss(0, 0.1) for _ in range(math.prod(shape)))
            entry = {"dtype": "F32", "shape": shape, "data_offsets": [start, 4 * len(data)]}
            header[f"base_model.model.{name}.lora_{part}.weight"] = entry
    if value is not None:
        data[0] = value
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data.tobytes())
    return folder
