"""The engines that the GPU workloads run on, behind one small interface, each through its own public API.

The adapters of vLLM and SGLang were written from their documentation and have not been run: neither could be installed
beside this package where it was made. They are for vLLM 0.25 and SGLang 0.5.
"""

from __future__ import annotations

import asyncio
import itertools
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aioengine import AsyncEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

Ids = list[int]


class Output(NamedTuple):
    """How much a request generates, and how; the end of text is ignored.

    num_top: each output token comes with its logprob and those of so many likeliest tokens; of_prompt: each prompt
    token does instead. None: no logprobs.
    """

    num_tokens: int
    temperature: float = 0.6
    num_top: int | None = None
    of_prompt: bool = False


class Engine(Protocol):
    """Weights are dummies, everything else is the engine's default, unless ``arguments`` say otherwise."""

    package: str

    async def start(self, folder: Path, arguments: dict[str, Any]) -> None: ...

    async def generate(self, prompts: list[Ids], outputs: list[Output]) -> list[int]:
        """Generate all prompts together. Return the number of tokens of each."""
        ...

    def stream(self, prompt: Ids, output: Output) -> AsyncIterator[Any]:
        """Return the engine's own stream, so that nothing is added to the measurement."""
        ...

    def num_new(self, chunk: Any, num_before: int) -> int:
        """Return the tokens of a chunk. num_before: tokens before it."""
        ...

    async def empty_cache(self) -> bool:
        """Drop the prefix cache. Return False if this is not possible now."""
        ...

    async def close(self) -> None: ...


class AioEngine:
    package = "aioengine"

    engine: AsyncEngine

    async def start(self, folder: Path, arguments: dict[str, Any]) -> None:
        self.engine = AsyncEngine(str(folder), load_format="dummy", **arguments)
        await self.engine.start()

    async def generate(self, prompts: list[Ids], outputs: list[Output]) -> list[int]:
        samplings = [self._sampling(output) for output in outputs]
        answers = await self.engine.async_generate(
            input_ids=prompts, sampling_params=samplings, **self._logprobs(outputs[0])
        )
        return [answer["meta_info"]["completion_tokens"] for answer in answers]

    def stream(self, prompt: Ids, output: Output) -> AsyncIterator[Any]:
        return self.engine.async_generate(
            input_ids=prompt, sampling_params=self._sampling(output), stream=True, **self._logprobs(output)
        )

    def num_new(self, chunk: Any, num_before: int) -> int:
        total: int = chunk["meta_info"]["completion_tokens"]
        return total - num_before

    async def empty_cache(self) -> bool:
        return bool(await self.engine.flush_cache())

    async def close(self) -> None:
        await self.engine.shutdown()

    @staticmethod
    def _sampling(output: Output) -> dict[str, object]:
        return {"max_new_tokens": output.num_tokens, "temperature": output.temperature, "ignore_eos": True}

    @staticmethod
    def _logprobs(output: Output) -> dict[str, Any]:
        if output.num_top is None:
            return {}
        start = 0 if output.of_prompt else -1
        return {"return_logprob": True, "top_logprobs_num": output.num_top, "logprob_start_len": start}


class VLLM:
    """Untested, see the module."""

    package = "vllm"

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.engine: Any = None

    async def start(self, folder: Path, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), load_format="dummy", **arguments))

    async def generate(self, prompts: list[Ids], outputs: list[Output]) -> list[int]:
        async def whole(prompt: Ids, output: Output) -> int:
            return sum([self.num_new(final, 0) async for final in self._request(prompt, output, "FINAL_ONLY")])

        return await asyncio.gather(*map(whole, prompts, outputs))

    def stream(self, prompt: Ids, output: Output) -> AsyncIterator[Any]:
        return self._request(prompt, output, "DELTA")

    def num_new(self, chunk: Any, num_before: int) -> int:
        return len(chunk.outputs[0].token_ids)

    async def empty_cache(self) -> bool:
        await self.engine.reset_prefix_cache()
        return True

    async def close(self) -> None:
        self.engine.shutdown()

    def _request(self, prompt: Ids, output: Output, kind: str) -> AsyncIterator[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=output.num_tokens,
            temperature=output.temperature,
            ignore_eos=True,
            output_kind=RequestOutputKind[kind],
            **(
                {}
                if output.num_top is None
                else {"prompt_logprobs" if output.of_prompt else "logprobs": output.num_top}
            ),
        )
        return self.engine.generate({"prompt_token_ids": prompt}, params, str(next(self.numbers)))


class SGLang:
    """Untested, see the module."""

    package = "sglang"

    def __init__(self) -> None:
        self.engine: Any = None

    async def start(self, folder: Path, arguments: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(model_path=str(folder), load_format="dummy", **arguments)

    async def generate(self, prompts: list[Ids], outputs: list[Output]) -> list[int]:
        samplings = [AioEngine._sampling(output) for output in outputs]
        answers = await self.engine.async_generate(
            input_ids=prompts, sampling_params=samplings, **AioEngine._logprobs(outputs[0])
        )
        return [answer["meta_info"]["completion_tokens"] for answer in answers]

    async def stream(self, prompt: Ids, output: Output) -> AsyncIterator[Any]:
        sampling = AioEngine._sampling(output)
        async for chunk in await self.engine.async_generate(
            input_ids=prompt, sampling_params=sampling, stream=True, **AioEngine._logprobs(output)
        ):
            yield chunk

    def num_new(self, chunk: Any, num_before: int) -> int:
        total: int = chunk["meta_info"]["completion_tokens"]
        return total - num_before

    async def empty_cache(self) -> bool:
        return bool((await self.engine.tokenizer_manager.flush_cache()).success)

    async def close(self) -> None:
        self.engine.shutdown()


ENGINES: dict[str, type[Engine]] = {"aioengine": AioEngine, "vllm": VLLM, "sglang": SGLang}


def version(package: str) -> str | None:
    """Return the installed version of a package; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
