"""Tiny EAGLE and EAGLE-3 heads, and their drafts, computed by plain torch without a KV cache.

T tokens, D hidden size, H query heads, K KV heads, E head size, V vocabulary.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.kit.tiny_sizes import SIZES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


FILE = "model.safetensors"


def head_config(**changes: object) -> dict[str, Any]:
    """Return config.json of a head for a model with the sizes of the tests."""
    sizes = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 2}
    fixed = {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "bias": False}
    return {**fixed, **sizes, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, **changes}


def random_tensors(config: dict[str, Any], algorithm: str, *, seed: int = 1, scale: float = 0.3) -> dict[str, Tensor]:
    """Return random tensors of a head with their published names."""
    generator = torch.Generator().manual_seed(seed)
    size, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    is_third = algorithm == "EAGLE3"
    block, inputs = ("midlayer.", 2 * size) if is_third else ("layers.0.", size)
    kv = config["num_key_value_heads"] * (size // heads)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, (3 if is_third else 2) * size),
        f"{block}self_attn.q_proj.weight": (size, inputs),
        f"{block}self_attn.k_proj.weight": (kv, inputs),
        f"{block}self_attn.v_proj.weight": (kv, inputs),
        f"{block}self_attn.o_proj.weight": (size, size),
        f"{block}mlp.gate_proj.weight": (inner, size),
        f"{block}mlp.up_proj.weight": (inner, size),
        f"{block}mlp.down_proj.weight": (size, inner),
    }
    norms = [f"{block}post_attention_layernorm.weight"]
    if is_third:
        norms += ["midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight"]
    outputs = config.get("draft_vocab_size")
    if outputs is not None:
        shapes["lm_head.weight"] = (outputs, size)
    if config["bias"]:
        shapes["fc.bias"] = (size,)
    tensors = {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}
    tensors |= {name: 1 + 0.1 * torch.randn(size, generator=generator) for name in norms}
    if outputs is not None and outputs < config["vocab_size"]:
        ids = torch.randperm(config["vocab_size"], generator=generator)[:outputs].sort().values
        tensors["d2t"] = ids - torch.arange(outputs)
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, value=True)
    return tensors


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Save a head as it is published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)


def save_speculators_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Save an EAGLE-3 head in the ``speculators`` format."""
    own = {"draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids", "architectures"}
    nested = {
        **{name: config[name] for name in own & config.keys()},
        "model_type": "speculator_model",
        "speculators_config": {"algorithm": "eagle3"},
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": {name: value for name, value in config.items() if name not in own},
    }
    save_head(folder, nested, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()})


def save_repeating(model: Any, folder: Path, head_folder: Path, algorithm: str, **changes: object) -> None:
    """Change ``model`` of transformers so that it repeats its last token. Save it, and a head that repeats the token of
    the hidden state that it reads. So greedy drafts are accepted if it reads the right one.

    changes: of config.json of the head.
    """
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table.copy_(functional.normalize(table, dim=1))
        model.lm_head.weight.copy_(table)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    size, vocab_size = model.config.hidden_size, model.config.vocab_size
    config = head_config(**{"draft_vocab_size": vocab_size if algorithm == "EAGLE3" else None, **changes})
    tensors = random_tensors(config, algorithm)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            tensor.zero_()
    tensors["fc.weight"][:, size : 2 * size] = torch.eye(size)  # after the embedding, or of the second layer
    if algorithm == "EAGLE3":
        tensors |= {"norm.weight": torch.ones(size), "lm_head.weight": table.data.clone()}
    save_head(head_folder, config, {name: tensor.to(table.dtype) for name, tensor in tensors.items()})


def save_with_mtp(model: Any, folder: Path, *, seed: int = 1) -> PlainMtp:
    """Save a DeepSeek-V3 model of transformers so that its last layer is the one for multi-token prediction."""
    generator, size = torch.Generator().manual_seed(seed), model.config.hidden_size
    number = len(model.model.layers) - 1
    eh_proj = 0.3 * torch.randn(size, 2 * size, generator=generator)
    enorm, hnorm, norm = (1 + 0.1 * torch.randn(3, size, generator=generator)).unbind()
    own = {"eh_proj": eh_proj, "enorm": enorm, "hnorm": hnorm, "shared_head.norm": norm}
    copies = {"embed_tokens": model.model.embed_tokens.weight.data, "shared_head.head": model.lm_head.weight.data}
    model.save_pretrained(folder)
    stored = load_file(folder / FILE)
    stored |= {f"model.layers.{number}.{name}.weight": tensor.clone() for name, tensor in (own | copies).items()}
    save_file(stored, folder / FILE)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": number, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    layer = model.model.layers.pop(-1)
    model.config.num_hidden_layers = number
    return PlainMtp(model, layer, own)


class PlainHead:
    """A head in plain torch, which computes all positions in each call."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], model: Any, algorithm: str) -> None:
        """model: of transformers, whose embedding and head are used."""
        self._config, self._tensors, self._model, self._algorithm = config, tensors, model, algorithm
        self._block = "midlayer." if algorithm == "EAGLE3" else "layers.0."

    def logits(self, token_ids: list[int], drafts: list[int]) -> Tensor:
        """Return the logits [drafts, V] of each of these drafts after these tokens."""
        ids = torch.tensor(token_ids)
        features = self._features(ids)[:-1]
        rows: list[Tensor] = []
        for draft in drafts:
            hidden = self._forward(self._model.get_input_embeddings()(ids[1:]), features)
            rows.append(self._logits(hidden[-1]))
            ids = torch.cat((ids, torch.tensor([draft])))
            features = torch.cat((features, hidden[-1:]))
        return torch.stack(rows)

    def _features(self, ids: Tensor) -> Tensor:
        """[T] ids -> features [T, D] from the hidden states of the model."""
        states = self._model(ids[None], output_hidden_states=True).hidden_states
        if self._algorithm != "EAGLE3":
            return states[-1][0]
        num_layers = len(states) - 1
        layers = self._config.get("eagle_aux_hidden_state_layer_ids") or (2, num_layers // 2, num_layers - 3)
        return self._linear("fc", torch.cat([states[layer][0] for layer in layers], dim=1))

    def _forward(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """[T, D] each -> hidden states [T, D]."""
        block = self._block
        if self._algorithm == "EAGLE3":
            normed = self._norm("midlayer.hidden_norm", features)
            x = normed if self._config.get("norm_before_residual") else features
            normed = torch.cat((self._norm("midlayer.input_layernorm", embeddings), normed), dim=1)
        else:
            x = normed = self._linear("fc", torch.cat((embeddings, features), dim=1))
        x = x + self._attention(normed)
        normed = self._norm(f"{block}post_attention_layernorm", x)
        gates = functional.silu(self._linear(f"{block}mlp.gate_proj", normed))
        return x + self._linear(f"{block}mlp.down_proj", gates * self._linear(f"{block}mlp.up_proj", normed))

    def _attention(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, D]."""
        length, size = len(x), self._config["hidden_size"] // self._config["num_attention_heads"]
        q, k, v = (
            self._linear(f"{self._block}self_attn.{name}_proj", x).view(length, -1, size).transpose(0, 1)
            for name in "qkv"
        )
        angles = torch.arange(length)[:, None] / self._config["rope_theta"] ** (torch.arange(0, size, 2) / size)
        cos, sin = angles.cos(), angles.sin()
        q, k = (
            torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
            for a, b in (part.chunk(2, dim=-1) for part in (q, k))
        )
        attended = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        return self._linear(f"{self._block}self_attn.o_proj", attended[0].transpose(0, 1).reshape(length, -1))

    def _logits(self, hidden: Tensor) -> Tensor:
        """[D] -> [V]."""
        normed = self._norm("norm", hidden) if self._algorithm == "EAGLE3" else hidden
        if "lm_head.weight" not in self._tensors:
            return self._model.get_output_embeddings()(normed)
        logits = self._linear("lm_head", normed)
        if "d2t" not in self._tensors:
            return logits
        whole = torch.full((self._config["vocab_size"],), -torch.inf)
        whole[self._tensors["d2t"] + torch.arange(len(logits))] = logits
        return whole

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return functional.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return functional.rms_norm(x, x.shape[-1:], self._tensors[f"{name}.weight"], self._config["rms_norm_eps"])


class PlainMtp(PlainHead):
    """A layer for multi-token prediction, with the block of transformers."""

    def __init__(self, model: Any, layer: Any, tensors: dict[str, Tensor]) -> None:
        config = {"rms_norm_eps": model.config.rms_norm_eps}
        super().__init__(config, {f"{name}.weight": tensor for name, tensor in tensors.items()}, model, "MTP")
        self._layer = layer

    def _forward(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """[T, D] each -> hidden states [T, D]."""
        joined = torch.cat((self._norm("enorm", embeddings), self._norm("hnorm", features)), dim=1)
        x = self._linear("eh_proj", joined)[None]
        positions = torch.arange(len(embeddings))[None]
        return self._layer(
            x,
            attention_mask=torch.full((1, 1, len(positions[0]), len(positions[0])), -torch.inf).triu(1),
            position_ids=positions,
            position_embeddings=self._model.model.rotary_emb(x, positions),
        )[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[D] -> [V]."""
        return self._model.lm_head(self._norm("shared_head.norm", hidden))
