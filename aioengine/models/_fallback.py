"""Models that run with the code of transformers, for model types without a family.

The modules run on the packed tokens of a step as one sequence with explicit positions. Attention uses our paged KV
cache.

Shape letters: T packed tokens, S output tokens, D hidden size, V vocabulary size.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.generic import ModelOutput

from aioengine.api import checks
from aioengine.attention._base import StepAttention
from aioengine.families._config import Task
from aioengine.layers.layer import Target
from aioengine.layers.linear import Linear, adaptable_linears
from aioengine.model_files import checkpoint, folder_files
from aioengine.models import _fallback_attention as layers
from aioengine.models._base import InputSpec, Model, ModelInputs, ModelOptions
from aioengine.models._fallback_attention import NUM_TRIED, PAGED, TRYING, PackedStep, StopError, refuse
from aioengine.models._fallback_swaps import Swaps, recorded_inputs

logger = logging.getLogger(__name__)

_FIRST_TRIED: Final = 10
"""Smallest token id of a trial run. Smaller ids may be padding."""
_NUM_COMPARED: Final = 3
"""Number of tokens that are compared next to different neighbours."""
_MIXED: Final = 0.05
"""Maximum relative change of a hidden state with different neighbours, caused by rounding in sums of experts."""

_IMPLEMENTATION: Final = "_attn_implementation"
"""Attribute of a transformers config with the name of the attention function."""

_NO_INTERFACE: Final = "its attention does not go through transformers' attention interface"

_CLASSES = {
    Task.GENERATE: AutoModelForCausalLM,
    Task.EMBED: AutoModel,
    Task.CLASSIFY: AutoModelForSequenceClassification,
}


class TransformersModel(Model):
    """A model in transformers' code."""

    knows_kinds = False

    def __init__(self, model: PreTrainedModel, task: Task, options: ModelOptions, folder: Path | None = None) -> None:
        """Wrap a model of ``build_module``.

        Args:
            folder: of the checkpoint; None if tensors have the names of transformers.
        """
        self._model = model
        self._folder = folder
        self.task = task
        self.input_spec = InputSpec()
        self.dtype = options.dtype
        self.num_active = sum(parameter.numel() for parameter in model.parameters())
        config = model.config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self._body = model if task is Task.EMBED else _body_of(model)
        self._embedding: nn.Module = model.get_input_embeddings()
        self.device = options.device
        self._step = PackedStep(config.model_type, options.max_positions)
        self._last_layer: int | None = None
        _check_model(model, self._body)
        _fix_rope(self._body, self._step)
        layers.share_step(model, self._step)
        self._scores = getattr(model, "score", None)
        self._body_output = _BodyOutput()
        self._head: nn.Module = model
        self._tables: list[tuple[int, int]] = []
        self._swaps = self._swap(options)
        self.parts = (("", self._swaps),)
        setattr(config, _IMPLEMENTATION, PAGED)
        self.attention_shape = layers.use_layers(self._step, config.num_hidden_layers)
        if task is Task.CLASSIFY and not isinstance(self._scores, nn.Linear):
            refuse(config.model_type, "its classifier is more than one linear layer, score")

    def _swap(self, options: ModelOptions) -> Swaps:
        """Try the model, replace its layers with ours, and try it again. Some code reads attributes of its layers."""
        self._try(gives_positions=False)
        own_positions = self._tables
        with recorded_inputs(self._model) as inputs:
            self._try()
        if self._tables != own_positions:
            refuse(self._step.model_type, "it looks up position 0 at another place of its table than at the first")
        swaps = Swaps(self._model, inputs, self._step, options)
        try:
            self._try()
        except ValueError as error:
            logger.info("using the layers of transformers, which are slower: with ours, %s", error)
            swaps.undo()
            self._try()
        swaps.take_weights()
        return swaps

    @torch.inference_mode()
    def _try(self, *, gives_positions: bool = True) -> None:
        """Run a few tokens to find out how the layers attend, which position tables they read, and the output sizes."""
        positions = torch.arange(NUM_TRIED, device=self.device)[None]
        ids = positions.flip(1) + _FIRST_TRIED
        optional = {"position_ids": positions} if gives_positions else {}
        tables, kind = _PositionTables(), self._step.model_type
        self._step.layers = []
        try:
            with tables:
                output = self._body(input_ids=ids, use_cache=False, **optional)
            if output.last_hidden_state.shape[:-1] != (1, NUM_TRIED):
                refuse(kind, f"of {NUM_TRIED} tokens it gives states {list(output.last_hidden_state.shape)}")
            for first, size in tables.tables:
                if first + self._step.max_positions > size:
                    longest = size - first
                    refuse(kind, f"it has a table of {longest} positions; context_length={longest} works")
            self._tables = tables.tables
            self._body_output.output_type = type(output)
            self._head = _with_body(self._model, self._body, self._body_output)
            if self.task is Task.GENERATE:
                self.vocab_size = self.compute_logits(output.last_hidden_state[0]).shape[1]
        except ValueError:
            raise
        except Exception as error:
            refuse(kind, f"it fails with packed tokens: {_described(error)}")

    def weights(self, prefix: str = "") -> dict[str, Target]:
        saved = self._model.state_dict().keys()
        tensors = {
            **{name: parameter.data for name, parameter in self._model.named_parameters()},
            **{name: target.tensor for name, target in self._swaps.weights().items()},
            **{name: buffer for name, buffer in self._model.named_buffers() if name in saved},
        }
        stored = None
        if self._folder is not None:
            stored = [entry.name for entry in checkpoint.read_headers(self._folder, "")]
        return {
            f"{prefix}{name}": Target(tensor) for name, tensor in by_stored_name(self._model, tensors, stored).items()
        }

    def is_ignored(self, name: str) -> bool:
        model = self._model
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        patterns = model._keys_to_ignore_on_load_unexpected or ()
        is_head = self.task is not Task.GENERATE and name.startswith("lm_head.")
        return (
            is_head
            or name in tied
            or name.endswith(".inv_freq")
            or any(re.search(pattern, name) for pattern in patterns)
        )

    def linears(self) -> list[tuple[str, Linear]]:
        stem = f"{self._model.base_model_prefix}." if self._body is self._model else ""
        return adaptable_linears(self._swaps, stem)

    def finish_loading(self) -> None:
        super().finish_loading()
        self._check_independence()

    @torch.inference_mode()
    def _check_independence(self) -> None:
        """Raise ValueError if tokens depend on each other outside attention, which would mix the requests of a step."""
        positions, attention = torch.arange(NUM_TRIED, device=self.device), layers.DiagonalAttention()
        for first in range(
            _FIRST_TRIED, _FIRST_TRIED + _NUM_COMPARED
        ):  # several, since with experts one may be near a tie
            neighbours = ((first + 1, first + 2), (first + 3, first + 4))
            sequences = [torch.tensor([left, first, right], device=self.device) for left, right in neighbours]
            inputs = [ModelInputs(positions=positions, token_ids=ids % self.vocab_size) for ids in sequences]
            state, other = (self.forward(step_inputs, attention)[1].float() for step_inputs in inputs)
            if not (state - other).norm() > _MIXED * state.norm():
                return
        refuse(self._step.model_type, "its tokens depend on each other outside attention, as with convolutions")

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] ids -> [T, D]."""
        return self._embedding(token_ids)

    def forward(self, inputs: ModelInputs, attention: StepAttention) -> Tensor:
        """Return [T, D], or [S, D] with ``inputs.outputs``. See ``Model.forward``."""
        step, outputs = self._step, inputs.outputs
        step.attention, step.adapters, step.last_layer = attention, inputs.adapters, self._last_layer
        try:
            hidden = self._run(inputs.token_ids, inputs.embeddings, inputs.positions)
        except StopError:
            hidden = torch.zeros(len(inputs.positions), self.hidden_size, dtype=self.dtype, device=self.device)
        finally:
            step.attention = step.adapters = step.last_layer = None
        return hidden if outputs is None else hidden.index_select(0, outputs)

    def _run(self, token_ids: Tensor | None, embeddings: Tensor | None, positions: Tensor) -> Tensor:
        """token_ids [T] or embeddings [T, D], and positions [T] -> hidden states [T, D]."""
        inputs = {
            "input_ids": None if token_ids is None else token_ids[None],
            "inputs_embeds": None if embeddings is None else embeddings[None],
        }
        return self._body(**inputs, position_ids=positions[None], use_cache=False).last_hidden_state[0]

    def shortened(self) -> Model:
        model = copy.copy(self)
        model._last_layer = 0
        return model

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, D] -> logits [S, V], or scores of a classifier. Without a head, return ``hidden``."""
        if self.task is Task.EMBED:
            return hidden
        if self.task is Task.CLASSIFY:
            assert self._scores is not None, "checked in __init__"
            return self._scores(hidden)
        self._body_output.hidden = hidden[None]
        logits = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        self._body_output.hidden = None
        return logits.to(self.dtype)


def _body_of(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head, which may be a part of the base model."""
    body = model.base_model
    if body is model:
        refuse(model.config.model_type, "transformers has no model of it without a head")
    decoder = getattr(body, "decoder", None)
    return decoder if isinstance(decoder, PreTrainedModel) else body


def _with_body(model: nn.Module, body: nn.Module, replacement: nn.Module) -> nn.Module:
    """Return a shallow copy of the model with another body."""
    if model is body:
        return replacement
    changed = copy.copy(model)
    changed._modules = {
        name: _with_body(part, body, replacement)
        if part is not None and any(module is body for module in part.modules())
        else part
        for name, part in model._modules.items()
    }
    return changed


class _BodyOutput(nn.Module):
    """Replaces the body of a model to compute only the head: returns the hidden states that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.output_type: type[ModelOutput] | None = None
        self.hidden: Tensor | None = None

    def forward(self, *_: object, **__: object) -> ModelOutput:
        """Return the hidden states [1, S, D]."""
        assert self.output_type is not None, "the model was not tried"
        return self.output_type(last_hidden_state=self.hidden)


def check_config(config: PreTrainedConfig) -> None:
    """Raise ValueError for models of several parts."""
    if config.is_encoder_decoder:
        refuse(config.model_type, "it has an encoder and a decoder")
    if config.get_text_config() is not config:
        refuse(config.model_type, "it has several models, and only one is for text")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if not isinstance(getattr(config, name, None), int):
            refuse(config.model_type, f"its config has no {name}")


def _check_model(model: PreTrainedModel, body: nn.Module) -> None:
    """Raise ValueError for models that need more than transformers' attention interface."""
    kind = model.config.model_type
    if model._is_stateful:
        refuse(kind, "its layers keep states in addition to keys and values")
    if not model._supports_attention_backend:
        refuse(kind, _NO_INTERFACE)
    if "position_ids" not in inspect.signature(body.forward).parameters:
        refuse(kind, "its code takes no position_ids")
    if any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in body.modules()):
        refuse(kind, "it has convolutions")
    for name, weight in model.named_parameters():
        if not weight.numel():
            refuse(kind, f"{name} would be empty, {list(weight.shape)}: a size in config.json is 0")


def _fix_rope(body: nn.Module, step: PackedStep) -> None:
    """Use the frequencies of short sequences for rotary embeddings that depend on the longest sequence of a call.

    Raises ValueError if a request may be longer.
    """
    for module in body.modules():
        rope = getattr(module, "rope_type", None)
        if rope is None:
            continue
        kinds: dict[str | None, str] = rope if isinstance(rope, dict) else {None: rope}
        for layer_type, kind in kinds.items():
            if kind != "longrope" and "dynamic" not in kind:
                continue
            config = cast("PreTrainedConfig", module.config)
            parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
            longest = config.max_position_embeddings
            if kind == "longrope":
                longest = parameters.get("original_max_position_embeddings", longest)
            if step.max_positions > longest:
                limit = f"context_length={longest} works"
                refuse(step.model_type, f"rope_type {kind!r} would rotate all requests like the longest one; {limit}")
        cast("Any", module).rope_type = dict.fromkeys(rope, "default") if isinstance(rope, dict) else "default"


class _PositionTables(TorchFunctionMode):
    """Finds the tables of learned positions during a trial run.

    Attributes:
        tables: (first index, number of rows) of each table.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[int, int]] = []

    def __torch_function__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.embedding:
            indices = args[0].flatten().tolist()
            if len(indices) == NUM_TRIED and indices == [indices[0] + offset for offset in range(NUM_TRIED)]:
                self.tables.append((indices[0], args[1].shape[0]))
        return cast("Callable[..., Any]", func)(*args, **(kwargs or {}))


class TransformersFolder:
    """A model folder that runs with the code of transformers."""

    def __init__(self, folder: Path, task: Task, *, trust_remote_code: bool, has_weights: bool) -> None:
        """Read config.json with transformers.

        Args:
            trust_remote_code: allow code from the folder to run.
            has_weights: the folder contains the weights.

        Raises ValueError if transformers has no code for the model, or the code is in the folder and not trusted.
        """
        self._task = task
        self._folder = folder
        self._trusts = trust_remote_code
        self._has_weights = has_weights
        raw = folder_files.read_json(folder / "config.json", dict[str, object]) or {}
        if raw.get("auto_map") and not trust_remote_code and raw.get("model_type") not in CONFIG_MAPPING:
            allowed = "trust_remote_code=True runs it, with all rights of this program"
            raise ValueError(f"model_type {raw.get('model_type')!r} needs code from its folder {folder}; {allowed}")
        try:
            self._config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise ValueError(f"transformers does not read {folder / 'config.json'}: {_described(error)}") from error

    def num_bytes(self, options: ModelOptions) -> int:
        """Return the bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self._build(options).parameters())

    def load(self, options: ModelOptions) -> TransformersModel:
        """Build the model, see ``models.build``."""
        logger.info("running model_type %r with the code of transformers", self._config.model_type)
        folder = self._folder if self._has_weights else None
        return TransformersModel(self._build(options), self._task, options, folder)

    def _build(self, options: ModelOptions) -> PreTrainedModel:
        return build_module(self._config, self._task, options, trust_remote_code=self._trusts)


def build_module(
    config: PreTrainedConfig, task: Task, options: ModelOptions, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the transformers model. The weights are uninitialized.

    Raises ValueError if transformers has no such model, or refuses its config.
    """
    check_config(config)
    layers.register()
    config.use_cache = config.output_attentions = config.output_hidden_states = False
    config.return_dict = True
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    try:
        with no_init_weights(), options.device:
            model = _CLASSES[task].from_config(
                config, dtype=options.dtype, attn_implementation=TRYING, trust_remote_code=trust_remote_code
            )
            model.tie_weights()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (TRYING,):  # it looks up attention in its own table
            refuse(config.model_type, _NO_INTERFACE)
        message = f"transformers does not build a model_type {config.model_type!r}: {_described(error)}"
        raise ValueError(message) from error
    patterns = [name.replace("*", ".*") for name in model._get_dtype_plan(options.dtype)]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(re.search(pattern, name) for pattern in patterns):
            tensor.data = tensor.data.float()  # from_config converts all tensors
    return model.requires_grad_(False).eval()


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {checks.cut(str(error))}"


class _View(torch.Tensor):
    """A tensor [...] whose ``contiguous`` returns a view. Without it, transformers would copy parts of tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def by_stored_name(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], stored: Collection[str] | None
) -> dict[str, Tensor]:
    """Return name in the checkpoint -> tensor, or view of a tensor, to load into.

    Args:
        tensors: the model's names -> tensors [...] to load.
        stored: the names in the checkpoint, possibly of an older format; None for the names that transformers writes.

    Raises ValueError if transformers converts the weights in a way that views cannot express.
    """
    reverted: dict[str, Tensor] = revert_weight_conversion(
        model, {name: tensor.as_subclass(_View) for name, tensor in tensors.items()}
    )
    owned = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    copied = [name for name, tensor in reverted.items() if tensor.untyped_storage().data_ptr() not in owned]
    plain = {name: tensor.as_subclass(torch.Tensor) for name, tensor in reverted.items()}
    if stored is None or plain.keys() == set(stored):
        _refuse_copies(copied)
        return plain
    ours = tensors.keys() & set(stored)  # saved with the names of the model
    for name in ours:
        begin, end = tensors[name].data_ptr(), tensors[name].data_ptr() + tensors[name].nbytes
        plain = {other: view for other, view in plain.items() if not begin <= view.data_ptr() < end}
        plain[name] = tensors[name]
    _refuse_copies([name for name in copied if name in plain])
    prefix = f"{model.base_model_prefix}."
    for name in [name for name in plain if name not in stored]:  # saved with a head and loaded without, or vice versa
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        if other in stored and other not in plain:
            plain[other] = plain.pop(name)
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    shapes = model.state_dict()
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for name in set(stored) - plain.keys():
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, {**shapes, **tensors})
        new = tied.get(new, new) if tied.get(new) not in stored else new
        if pattern is None and new in tensors and new in plain:
            plain[name] = plain.pop(new)
    return plain


def _refuse_copies(names: Collection[str]) -> None:
    """Raise ValueError if there are tensors that transformers would copy."""
    if names:
        raise ValueError(
            f"transformers converts {checks.counted(len(names), 'tensor')} of this checkpoint in a way that is not "
            f"supported: {', '.join(sorted(names)[:5])}; save the model again with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder, save_original_format=False)"
        )
