"""The methods of both engines that load and unload LoRA adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioengine.api import signatures
from aioengine.frontend.loaded_adapters import UNLOAD_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import PurePath

    from aioengine.frontend.frontend import Frontend
    from aioengine.frontend.loaded_adapters import AdapterResult


@signatures.own_arguments
async def load_lora_adapter(
    self: Any, lora_name: str, lora_path: str | PurePath, pinned: bool = False
) -> AdapterResult:
    """Load a LoRA adapter from a folder written by peft. Requests then use it with ``lora_path=lora_name``.

    pinned: keep the adapter in its slot on the device. If the adapter cannot be used or the name is in use, the
    result is false and has the reason in ``error_message``. ``loaded_adapters`` has all loaded adapters.

    Raises:
        TypeError, ValueError: an argument has the wrong type. EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    return await frontend.adapters.load(lora_name, lora_path, pinned)


@signatures.own_arguments
async def load_lora_adapter_from_tensors(
    self: Any,
    lora_name: str,
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    config_dict: Mapping[str, Any],
    load_format: str | None = None,
    *,
    pinned: bool = False,
) -> AdapterResult:
    """Load a LoRA adapter from torch tensors, as ``load_lora_adapter`` does from a folder.

    The engine keeps a copy of the tensors in host memory until ``unload_lora_adapter``, also for processes that are
    replaced later. The tensors may change again after this call.

    tensors: with the names in adapter_model.safetensors, such as ``peft.get_peft_model_state_dict(model)``.
    config_dict: the content of adapter_config.json, such as ``peft_config.to_dict()``. load_format: None or "auto".

    Raises:
        TypeError, ValueError: an argument has the wrong type. EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    return await frontend.adapters.load_tensors(lora_name, tensors, config_dict, load_format, pinned)


@signatures.own_arguments
async def unload_lora_adapter(self: Any, lora_name: str, timeout: float = UNLOAD_TIMEOUT_S) -> AdapterResult:
    """Unload a LoRA adapter: refuse new requests for it immediately, and wait for its running requests.

    If some still run after ``timeout`` seconds, or if this call is cancelled, the adapter stays loaded. It has the
    results and errors of ``load_lora_adapter``; an unknown name gives a false result.
    """
    frontend: Frontend = self._frontend_here()
    return await frontend.adapters.unload(lora_name, timeout)


async def list_lora_adapters(self: Any) -> AdapterResult:
    """Return the loaded adapters in ``loaded_adapters``: name -> folder, or "tensors" (see ``AdapterResult``)."""
    frontend: Frontend = self._frontend_here()
    return frontend.adapters.list()
