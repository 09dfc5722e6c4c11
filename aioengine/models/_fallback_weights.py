"""Maps checkpoint tensors to the parameters of a transformers model, with transformers' own mapping of names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from aioengine.api import checks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel


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
