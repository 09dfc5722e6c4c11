"""The control calls for new weights (``WeightCall``).

Arguments:

    path       of a whole checkpoint: a folder or a GGUF file. With ``is_part``, of a safetensors file with any part of
               it. "": the source is ``handles``
    handles    ``CudaTensor``s as JSON, any part of a checkpoint
    received   the source is what RECEIVE has received
    tensors    name, dtype and shape of the tensors to receive, as JSON
    keeps      also write them to a file in memory, whose path is the data of the reply
    update     the number of the open update; 0: none is open
    weights    the ``LoadedWeights`` after the call, as JSON; "" while an update is open
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from aioengine.protocol.messages import Argument
from aioengine.settings.config import LoadedWeights


class WeightCall:
    """The names of the control calls.

    Attributes:
        CHECK: read and check the source of new weights; changes nothing, and runs in a thread while steps run.
        LOAD: replace weights, between two steps.
        BEGIN: compute no step until END; the weights arrive in several LOAD.
        END: end this update; CHECK with ``ends`` checks first that all tensors have arrived.
        CANCEL: end the process if an update is open, because another replica has lost this update.
        GET: return the first rows of a tensor.
        JOIN_GROUP: join the process group of a training program (``TrainerGroup``). LEAVE_GROUP: leave it.
        RECEIVE: receive tensors in the group, and check them; a LOAD with ``received`` follows.
        RELEASE_MEMORY: free memory until RESUME_MEMORY, and compute no step until then; ``tags``: of ``MEMORY_TAGS``.
    """

    CHECK: Final = "check_weights"
    LOAD: Final = "load_weights"
    BEGIN: Final = "begin_weights"
    END: Final = "end_weights"
    CANCEL: Final = "cancel_weights"
    GET: Final = "get_weights"
    JOIN_GROUP: Final = "join_group"
    LEAVE_GROUP: Final = "leave_group"
    RECEIVE: Final = "receive_weights"
    RELEASE_MEMORY: Final = "release_memory"
    RESUME_MEMORY: Final = "resume_memory"


MEMORY_TAGS: Final = ("weights", "kv_cache", "cuda_graph")

NOT_OPEN: Final = '"not open"'
"""The data of a reply if the process has no open update with this number, because it was replaced."""

DTYPE_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Name of a dtype in torch -> name in safetensors files."""


class RefusedError(Exception):
    """A control call changes nothing, for this reason. data: of its reply."""

    def __init__(self, reason: str, data: str = "") -> None:
        super().__init__(reason)
        self.data = data


class CudaTensor(msgspec.Struct, array_like=True):
    """A tensor in the GPU memory of another process, as ``torch.UntypedStorage._share_cuda_`` describes it.

    Attributes:
        dtype: as in safetensors files.
        offset: of the first element in the storage.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    handle: bytes
    num_bytes: int
    storage_offset: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    must_wait: bool


def loaded_by(arguments: Mapping[str, Argument]) -> LoadedWeights | None:
    """Return the weights after a control call; None: it leaves them unchanged, or incomplete."""
    text = arguments.get("weights")
    return msgspec.json.decode(str(text), type=LoadedWeights) if text else None
