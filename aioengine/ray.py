"""A stage for Ray Data (extra ``ray``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import ray
import ray.data

from aioengine.api.args import engine_config
from aioengine.api.sync import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow
    from ray.data import Dataset

__all__ = ["build_processor"]

_ITEM_COLUMNS: Final = ("prompt", "input_ids", "messages", "sampling_params", "image_data", "lora_path")


def build_processor(
    engine_arguments: Mapping[str, Any],
    sampling_params: Mapping[str, Any] | None = None,
    *,
    concurrency: int = 1,
    batch_size: int = 256,
) -> Callable[[Dataset], Dataset]:
    """Return a function that adds an answer to each row of a dataset.

    Each row has a column ``prompt``, ``input_ids`` or ``messages``, and may have ``sampling_params``, ``image_data``
    and ``lora_path``: arguments of ``generate`` or ``chat``. The result has all columns of the input, and these:

        text           the answer; null if the row failed
        output_ids     its token ids; null if the row failed
        finish_reason  "stop" or "length", for example; null if the row failed
        error          why the row has no answer; null if it has one

    If an engine is lost with its node, Ray starts another one, which computes the batches in progress again.

    Args:
        engine_arguments: of ``Engine``, also ``model_path``. If the cluster has GPUs, Ray reserves ``tp_size`` times
            ``dp_size`` of them for each engine, except with ``device="cpu"``.
        sampling_params: of rows without their own.
        concurrency: number of engines.
        batch_size: number of rows that an engine gets at once.

    Raises:
        TypeError, ValueError: an argument of the engine is wrong.
    """
    config = engine_config(None, engine_arguments)
    num_gpus = 0 if config.device.name == "cpu" else config.device.tp_size * config.supervision.num_replicas

    def process(dataset: Dataset) -> Dataset:
        return dataset.map_batches(
            _Answers,
            fn_constructor_args=(dict(engine_arguments), sampling_params),
            batch_size=batch_size,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=concurrency),
            num_gpus=num_gpus if ray.cluster_resources().get("GPU") else 0,
        )

    return process


class _Answers:
    """An engine in an actor of Ray Data."""

    def __init__(self, engine_arguments: Mapping[str, Any], sampling_params: Mapping[str, Any] | None) -> None:
        self._engine = Engine(**engine_arguments)
        self._sampling_params = sampling_params

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Add the columns of the answers to a batch."""
        items = [_item(row) for row in table.to_pylist()]
        answers = list(self._engine.map(items, self._sampling_params, progress=False))
        columns: dict[str, list[Any]] = {
            "text": [answer.get("text") for answer in answers],
            "output_ids": [answer.get("output_ids") for answer in answers],
            "finish_reason": [_finish_reason(answer) for answer in answers],
            "error": [_error(answer) for answer in answers],
        }
        for name, values in columns.items():
            table = table.append_column(name, [values])
        return table


def _item(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call. In a dataset, keys that only other rows have are null."""
    item = {name: row[name] for name in _ITEM_COLUMNS if row.get(name) is not None}
    if "sampling_params" in item:
        item["sampling_params"] = {name: value for name, value in item["sampling_params"].items() if value is not None}
    return item


def _finish_reason(answer: Mapping[str, Any]) -> str | None:
    return None if "error" in answer else answer["meta_info"]["finish_reason"]["type"]


def _error(answer: Mapping[str, Any]) -> str | None:
    return f"{answer['error']['type']}: {answer['error']['message']}" if "error" in answer else None
