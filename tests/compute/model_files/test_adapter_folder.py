"""Adapter folders written by peft: their layers, and refused features."""

from __future__ import annotations

import json
import math
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from aioengine.families._tensors import adaptable_layers
from aioengine.families.llama import LlamaFamily
from aioengine.model_files import config_patterns
from aioengine.model_files.adapter_folder import CONFIG, read_folder
from tests.kit.adapters import PROJECTIONS, TENSORS, change_tensors, save_adapter
from tests.kit.tiny_sizes import SIZES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from aioengine.model_files.adapter_folder import AdapterPart

Q0 = "model.layers.0.self_attn.q_proj"
STEM = "base_model.model."


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))


def layers() -> dict[str, tuple[int, int]]:
    return adaptable_layers(LlamaFamily.read(LlamaConfig(**SIZES).to_dict()))


def by_layer(parts: list[AdapterPart]) -> dict[str, AdapterPart]:
    return {part.layer: part for part in parts}


def set_fields(folder: Path, **fields: object) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_all_projections_of_all_layers_are_read(base: PreTrainedModel, tmp_path: Path) -> None:
    result = read_folder(save_adapter(base, tmp_path)).parts(layers())
    assert {part.layer for part in result} == layers().keys()
    assert {(part.rank, part.scale, part.first_row) for part in result} == {(4, 2.0, 0)}
    assert by_layer(result)[Q0].module == "q_proj"


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        ("all-linear", set(PROJECTIONS)),
        (r".*layers\.\d+\.(self_attn\.k|mlp\.up)_proj", {"k_proj", "up_proj"}),
    ],
)
def test_target_modules_match_like_peft(
    base: PreTrainedModel, tmp_path: Path, targets: list[str] | str, expected: set[str]
) -> None:
    parts = read_folder(save_adapter(base, tmp_path, target_modules=targets)).parts(layers())
    assert {part.module for part in parts} == expected


def test_layers_may_have_separate_ranks_and_alphas(base: PreTrainedModel, tmp_path: Path) -> None:
    ranks, alphas = {"q_proj": 2, r"layers\.1\.mlp.*": 6}, {"layers.0.self_attn.q_proj": 3.0}
    result = by_layer(
        read_folder(save_adapter(base, tmp_path, rank_pattern=ranks, alpha_pattern=alphas)).parts(layers())
    )
    assert (result[Q0].rank, result[Q0].scale) == (2, 1.5)
    assert (result["model.layers.1.self_attn.q_proj"].rank, result["model.layers.1.self_attn.q_proj"].scale) == (2, 4.0)
    assert result["model.layers.1.mlp.up_proj"].rank == 6
    assert result["model.layers.0.mlp.up_proj"].rank == 4


def test_rank_stabilized_scale(base: PreTrainedModel, tmp_path: Path) -> None:
    result = read_folder(save_adapter(base, tmp_path, use_rslora=True)).parts(layers())
    assert result[0].scale == 8 / math.sqrt(4)


def test_layers_to_transform_limits_the_layers(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path, target_modules=["q_proj", "up_proj"], layers_to_transform=[1])
    parts = read_folder(folder).parts(layers())
    assert {part.layer for part in parts} == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}


def test_full_names_are_targets_in_any_layer(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path, target_modules=[Q0, "up_proj"], layers_to_transform=[1])
    assert {part.layer for part in read_folder(folder).parts(layers())} == {Q0, "model.layers.1.mlp.up_proj"}


def test_adapter_of_a_model_without_head_is_read(base: PreTrainedModel, tmp_path: Path) -> None:
    headless: PreTrainedModel = base.model
    parts = read_folder(save_adapter(headless, tmp_path, target_modules=["q_proj"])).parts(layers())
    assert {part.layer for part in parts} == {Q0, Q0.replace("0", "1")}


def test_fused_projections_are_split(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path, target_modules=["q_proj"], layers_to_transform=[0])
    name = f"{STEM}model.layers.0.self_attn.qkv_proj"
    save_file(
        {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(128, 4)}, folder / TENSORS
    )
    parts = by_layer(read_folder(folder).parts(layers()))
    assert [(part.module, part.first_row) for part in parts.values()] == [("q_proj", 0), ("k_proj", 64), ("v_proj", 96)]
    change_tensors(folder, {"lora_B.weight": torch.ones(192, 4)})
    with pytest.raises(ValueError, match=r"lora_B.weight has shape \[192, 4\], .* needs \[128, 4\]"):
        read_folder(folder).parts(layers())


def test_rank_and_module_limits_are_enforced(base: PreTrainedModel, tmp_path: Path) -> None:
    result = read_folder(save_adapter(base, tmp_path, r=6))
    with pytest.raises(
        ValueError, match=f"{re.escape('model.layers.0.mlp.down_proj')} has rank 6, and max_lora_rank is 5"
    ):
        result.parts(layers(), max_rank=5)
    with pytest.raises(ValueError, match="lora_target_modules has only q_proj"):
        result.parts(layers(), allowed=["q_proj"])
    assert result.parts(layers(), max_rank=6, allowed=PROJECTIONS)


REFUSED: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True, "init_lora_weights": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "layer_replication": {"layer_replication": [(0, 2), (1, 2)]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "embed_tokens": {"target_modules": ["embed_tokens"]},
}


@pytest.mark.parametrize("named", REFUSED)
def test_unsupported_fields_are_refused_by_name(tmp_path: Path, named: str) -> None:
    own = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    folder = save_adapter(own, tmp_path, **REFUSED[named])
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder))}.*{named}"):
        read_folder(folder)


def test_other_adapters_and_files_are_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path, target_modules=["q_proj"])
    set_fields(folder, peft_type="IA3")
    with pytest.raises(ValueError, match="peft_type is 'IA3'"):
        read_folder(folder)
    set_fields(folder, peft_type="LORA", r="many")
    with pytest.raises(ValueError, match=r"adapter_config.json: .*\$\.r"):
        read_folder(folder)
    set_fields(folder, r=4, rank_pattern={"(": 2})
    with pytest.raises(ValueError, match="rank_pattern has .*invalid or too large pattern"):
        read_folder(folder)
    set_fields(folder, rank_pattern={"((a+)+)+!": 2})
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model.bin, .* convert it: python -c"):
        read_folder(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(ValueError, match="has no adapter_config.json"):
        read_folder(folder)
    with pytest.raises(ValueError, match="missing' is no folder"):
        read_folder(tmp_path / "missing")


CHANGED: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "missing half": ({f"{Q0}.lora_B.weight": None}, f"lacks {STEM}{Q0}.lora_B.weight"),
    "other inputs": ({f"{Q0}.lora_A.weight": torch.ones(4, 65)}, r"q_proj.lora_A.weight has shape [4, 65]"),
    "other outputs": ({f"{Q0}.lora_B.weight": torch.ones(63, 4)}, r"q_proj.lora_B.weight has shape [63, 4]"),
    "other rank": ({f"{Q0}.lora_A.weight": torch.ones(3, 64)}, "has shape [3, 64], but the layer has rank 4"),
    "vector": ({f"{Q0}.lora_A.weight": torch.ones(4)}, "has shape [4], but must be a matrix"),
    "integers": ({f"{Q0}.lora_A.weight": torch.ones(4, 64, dtype=torch.int64)}, "of type I64"),
    "whole layer": ({f"{STEM}lm_head.weight": torch.ones(300, 64)}, "of the head"),
    "a layer twice": (
        {
            f"{STEM}{Q0.removeprefix('model.')}.lora_{half}.weight": torch.ones(size)
            for half, size in (("A", (4, 64)), ("B", (64, 4)))
        },
        f"changes {Q0} 2 times",
    ),
    "layer of another base": (
        {
            f"{STEM}model.layers.7.self_attn.q_proj.lora_{half}.weight": torch.ones(size)
            for half, size in (("A", (4, 64)), ("B", (64, 4)))
        },
        "model.layers.7.self_attn.q_proj, but the base model has no such layer",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_mismatched_tensors_are_refused(base: PreTrainedModel, tmp_path: Path, case: str) -> None:
    folder = save_adapter(base, tmp_path, target_modules=["q_proj"])
    changes, message = CHANGED[case]
    change_tensors(folder, changes)
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ValueError, match=pattern) as result:
        read_folder(folder).parts(layers())
    assert str(folder) in str(result.value)


def test_adapters_of_the_head_are_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="of the head: adapters cannot change it"):
        read_folder(folder)
    change_tensors(folder, {f"{STEM}lm_head.base_layer.weight": None})
    with pytest.raises(ValueError, match="changes lm_head: adapters cannot change it"):
        read_folder(folder).parts(layers())


def test_fingerprint_depends_on_both_files(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path, target_modules=["q_proj"])
    first = read_folder(folder).fingerprint
    assert read_folder(folder).fingerprint == first
    set_fields(folder, lora_alpha=9)
    second = read_folder(folder).fingerprint
    change_tensors(folder, {f"{Q0}.lora_A.weight": torch.zeros(4, 64)})
    third = read_folder(folder).fingerprint
    before, content = (folder / TENSORS).stat(), bytearray((folder / TENSORS).read_bytes())
    content[-1] ^= 1
    (folder / TENSORS).unlink()
    (folder / TENSORS).write_bytes(content)
    os.utime(folder / TENSORS, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / TENSORS).stat().st_size == before.st_size
    assert len({first, second, third, read_folder(folder).fingerprint}) == 4


@pytest.mark.parametrize("alpha", [math.inf, -math.inf, math.nan])
def test_alpha_that_is_not_finite_is_refused(base: PreTrainedModel, tmp_path: Path, alpha: float) -> None:
    folder = save_adapter(base, tmp_path, target_modules=["q_proj"])
    set_fields(folder, lora_alpha=alpha)
    with pytest.raises(ValueError, match=f'{folder / CONFIG}.*"lora_alpha": {json.dumps(alpha)} is no finite number'):
        read_folder(folder)


def test_damaged_file_is_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path, target_modules=["q_proj"])
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content[:-10])
    with pytest.raises(ValueError, match="truncated"):
        read_folder(folder)


def test_patterns_have_a_common_time_limit(
    base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_adapter(base, tmp_path)
    set_fields(folder, rank_pattern={f"layer{number}": 4 for number in range(2000)})
    read_folder(folder)
    monkeypatch.setattr(config_patterns, "PATTERNS_TIMEOUT_S", 0.001)
    with pytest.raises(ValueError, match=r"adapter_config.json: its patterns take more than 0.001 seconds"):
        read_folder(folder)


def test_slow_pattern_is_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path, target_modules=["q_proj"])
    set_fields(folder, rank_pattern={r"([a-z._0-9]|[a-z._0-9]{2})+[!?]": 2})
    with pytest.raises(ValueError, match="too long to match"):
        read_folder(folder)
