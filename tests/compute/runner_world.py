"""Tiny checkpoints, and a real Scheduler around a real ModelRunner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec.structs import replace
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    YoutuConfig,
)

from aioengine.processes.leading_runner import LeadingRunner
from aioengine.processes.scheduler_process import page_windows
from aioengine.protocol.columns import Extra
from aioengine.protocol.messages import End, Limits, Media, RequestKind, Sampling, Submit, TextRules
from aioengine.runner.build import build
from aioengine.runner.model_runner import ModelRunner
from aioengine.runner.ticket import Ticket
from aioengine.scheduler.core import SchedulerCore
from aioengine.settings.config import DraftSettings, ModelSettings
from tests.kit.checked_scheduler import CheckedScheduler
from tests.kit.integrity import check_scheduler
from tests.kit.settings import small_settings
from tests.kit.tiny_sizes import CONTEXT_LENGTH, SIZES, VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aioengine.protocol.messages import Control
    from aioengine.protocol.packed_logprobs import LogprobRules
    from aioengine.protocol.rank_step import RankAdapter, RankStep
    from aioengine.scheduler.runner import Runner
    from aioengine.settings.config import Settings

FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "gemma3_text": Gemma3TextConfig,
    "gpt_oss": GptOssConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "youtu": YoutuConfig,
    "deepseek_v3": DeepseekV3Config,
}
LATENT_SIZES = {
    "num_key_value_heads": SIZES["num_attention_heads"],
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
EXPERT_SIZES = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
EXTRA_SIZES: dict[str, dict[str, object]] = {
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window_pattern": 3},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "youtu": {**LATENT_SIZES},
    "deepseek_v3": {**LATENT_SIZES, **EXPERT_SIZES},
}


def save_model(family: str, folder: Path, *, dtype: torch.dtype = torch.float32, **changes: object) -> torch.nn.Module:
    """Save a random model of this family to the folder. Return the model of transformers."""
    torch.manual_seed(7)
    config = FAMILIES[family](**{**SIZES, **EXTRA_SIZES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def make_settings(
    path: Path | str,
    *,
    dtype: str = "float32",
    load_format: str = "auto",
    page_size: int = 4,
    num_pages: int | None = 256,
    chunk_tokens: int = 512,
    depth: int = 0,
) -> Settings:
    return small_settings(
        path=str(path),
        dtype=dtype,
        load_format=load_format,
        context_length=CONTEXT_LENGTH,
        vocab_size=VOCAB_SIZE,
        page_size=page_size,
        num_pages=num_pages,
        max_running=32,
        chunk_tokens=chunk_tokens,
        depth=depth,
    )


def with_draft(
    settings: Settings,
    folder: Path,
    *,
    max_drafts: int = 4,
    max_length: int = CONTEXT_LENGTH,
    head: str = "",
    read_layers: tuple[int, ...] = (),
) -> Settings:
    """Add a draft model, which proposes drafts for requests of up to ``max_length`` tokens.

    head: the algorithm of a draft head, which reads the inputs of ``read_layers``.
    """
    model = ModelSettings(
        path=str(folder),
        dtype="float32",
        load_format="auto",
        context_length=max_length,
        vocab_size=VOCAB_SIZE,
        draft_head=head,
    )
    draft = DraftSettings(model=model, attention_backend="torch", read_layers=read_layers)
    return replace(
        settings,
        scheduler=replace(settings.scheduler, max_drafts=max_drafts, has_ngrams=False),
        runner=replace(settings.runner, draft=draft),
    )


@dataclass
class World:
    """An engine without processes and text: submit, run to the end, read the tokens.

    ``send_to_ranks``: sends a message to the other ranks; None: there is one rank.
    """

    settings: Settings
    send_to_ranks: Callable[[RankStep | RankAdapter | Control], None] | None = None
    outputs: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    extras: dict[int, list[Extra]] = field(default_factory=dict[int, list[Extra]])
    ended: dict[int, End] = field(default_factory=dict[int, End])
    num_cached: dict[int, int] = field(default_factory=dict[int, int])
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.runner: ModelRunner = build(self.settings, lambda _: None)
        num_pages, page_size = self.runner.facts["num_pages"], self.settings.memory.page_size
        assert isinstance(num_pages, int)
        scheduler = CheckedScheduler(
            self.settings.scheduler,
            num_pages=num_pages,
            page_size=page_size,
            num_snapshots=int(self.runner.facts.get("num_snapshots", 0)),
            windows=page_windows(self.runner.facts),
        )
        self.leading: Runner[Ticket] = self.runner  # the messages of all ranks
        if self.send_to_ranks is not None:
            self.leading = LeadingRunner(self.runner, self.send_to_ranks)
        self.core: SchedulerCore[Ticket] = SchedulerCore(scheduler, self.leading, self.settings.scheduler.depth)
        self._next_uid = 0

    def submit(
        self,
        prompt: list[int],
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = 12,
        logprobs: LogprobRules | None = None,
        embeds: bytes = b"",
        media: list[Media] | None = None,
    ) -> int:
        """Submit a request. With ``max_new_tokens`` 0 it returns only logprobs. ``embeds`` replace the ids."""
        uid = self._next_uid
        self._next_uid += 1
        sampling = sampling or Sampling(uid, temperature=0.0)
        self.outputs[uid] = []
        self.extras[uid] = []
        kind = RequestKind.GENERATE if max_new_tokens else RequestKind.SCORE
        limits = Limits(max_new_tokens)
        submit = Submit(uid, prompt, sampling, limits, TextRules(), kind=kind, logprobs=logprobs, embeds=embeds)
        submit.media = media or []
        self.core.requests.submit(msgspec.structs.replace(submit, cache_salt=str(uid) if embeds else ""))
        return uid

    def step(self) -> None:
        output = self.core.step(0.0)
        if output is None:
            return
        for uid, token_id in zip(output.tokens.uid_of_each(), output.tokens.token_ids, strict=True):
            self.outputs[uid].append(token_id)
        for extra in output.tokens.extras:
            self.extras[extra.uid].append(extra)
        self.num_cached |= {opened.first_token.uid: opened.first_token.num_cached for opened in output.opened}
        self.num_preemptions += len(output.preempted)
        self.ended |= {ended.uid: ended for ended in output.ended}

    def run(self) -> None:
        while self.core.has_work:
            self.step()
        check_scheduler(self.core.scheduler)

    def answers(
        self, prompts: list[list[int]], samplings: list[Sampling] | None = None, *, max_new_tokens: int = 12
    ) -> list[list[int]]:
        """Return the outputs of all prompts, which run together."""
        picked = samplings or [Sampling(0, temperature=0.0)] * len(prompts)
        uids = [
            self.submit(prompt, sampling, max_new_tokens=max_new_tokens)
            for prompt, sampling in zip(prompts, picked, strict=True)
        ]
        self.run()
        return [self.outputs[uid] for uid in uids]


def check_greedy(world: World, theirs: Any, prompts: list[list[int]], *, num_new: int) -> None:
    """Check that greedy tokens of the prompts in one batch have the highest logits, except for rounding.

    ``theirs``: the model of transformers. The runner is closed.
    """
    answers = world.answers(prompts, max_new_tokens=num_new)
    world.runner.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == num_new
        logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        given = logits.gather(1, torch.tensor(answer).unsqueeze(1))[:, 0]
        assert (logits.amax(1) - given).max() < 1e-2
