"""The tensors of a checkpoint and where they go in a model of transformers, by transformers' own mapping of names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from aioengine import checks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel


class _View(torch.Tensor):
    """A tensor [...] whose parts stay views of it: transformers would copy them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def by_stored_name(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], stored: Collection[str] | None
) -> dict[str, Tensor]:
    """Name in the checkpoint -> the tensor, or the view of one, that it is loaded into.

    Args:
        tensors: the model's own names -> tensors [...] to load.
        stored: the names in the checkpoint, which may be of an older form; None: as transformers writes them.

    Raises:
        ValueError: transformers converts the weights in a way that needs more than views.
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
    ours = tensors.keys() & set(stored)  # saved in the model's own form
    for name in ours:
        plain = {other: each for other, each in plain.items() if not _is_within(each, tensors[name])}
        plain[name] = tensors[name]
    _refuse_copies([name for name in copied if name in plain])
    prefix = f"{model.base_model_prefix}."
    for name in [name for name in plain if name not in stored]:  # saved with a head and read without, or the other way
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        if other in stored and other not in plain:
            plain[other] = plain.pop(name)
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    shapes = model.state_dict()
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for name in set(stored) - plain.keys():
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, {**shapes, **tensors})
        new = tied.get(new, new) if tied.get(new) not in stored else new
        if pattern is None and new in tensors and new in plain:
            plain[name] = plain.pop(new)
    return plain


def _refuse_copies(names: Collection[str]) -> None:
    """Raise ValueError if there are any."""
    if names:
        message = (
            f"transformers converts {checks.counted(len(names), 'tensor')} of this checkpoint in a way that is not "
            f"implemented here: {', '.join(sorted(names)[:5])}; save the model anew with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder, save_original_format=False)"
        )
        raise ValueError(message)


def _is_within(view: Tensor, tensor: Tensor) -> bool:
    """Whether ``view`` [...] is in the memory of ``tensor`` [...], which is contiguous."""
    return 0 <= view.data_ptr() - tensor.data_ptr() < tensor.nbytes
