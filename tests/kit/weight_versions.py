"""Checkpoints of a tiny model with different weights, and a reference for answers from several versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.kit.tiny_sizes import SIZES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from aioengine.api.answers import Answer

ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_total_tokens": 4096,
    "sampling_defaults": "engine",
}
"""Arguments of an engine for these checkpoints."""

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def save_version(folder: Path, seed: int, **changes: object) -> dict[str, Tensor]:
    """Save a random model, and return its tensors. changes: of the config."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Reference:
    """Computes every token of an answer again, with the version of the weights that the answer names."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """folders: version -> folder of its checkpoint."""
        self._models = {name: AutoModelForCausalLM.from_pretrained(folder).eval() for name, folder in folders.items()}

    @torch.inference_mode()
    def check(self, prompt: list[int], answer: Answer) -> list[str]:
        """Check the tokens and the logprobs of a greedy answer. Return the versions of its spans."""
        ids, info = answer["output_ids"], answer["meta_info"]
        spans = info["weight_versions"]
        assert [start for _, start, _ in spans] == [0, *(stop for _, _, stop in spans[:-1])]
        assert spans[-1][2] == len(ids)
        assert info["weight_version"] == spans[-1][0]
        for version, start, stop in spans:
            logits = self._models[version](torch.tensor([prompt + ids[:stop]])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist()[start:stop] == ids[start:stop], (version, start, stop)
            if "output_token_logprobs" in info:
                expected = logits.log_softmax(-1).amax(-1)[start:stop]
                actual = torch.tensor([entry[0] for entry in info["output_token_logprobs"][start:stop]])
                torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        return [version for version, _, _ in spans]
