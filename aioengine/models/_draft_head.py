"""Draft heads: one layer that proposes drafts from hidden states of the model. See ``DraftHeadConfig``.

Position p of a head reads the hidden state of the model at position p and the token at position p + 1. It predicts the
token at position p + 2. Its own hidden state replaces the hidden state of the model at positions that the model has not
computed. ``Features`` keeps the hidden states of the model.

Shape letters: T tokens, S output tokens, D hidden size, F size of all hidden states that a head reads, V vocabulary
size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from aioengine.attention._base import StepAttention
from aioengine.families._draft_heads import DraftHeadConfig
from aioengine.layers.layer import Target
from aioengine.layers.linear import Linear
from aioengine.layers.mixer import BlockStep
from aioengine.layers.norm import make_norm
from aioengine.models._base import InputSpec, Model, ModelInputs, ModelOptions
from aioengine.models._decoder import Block, attention_shape, rotary_embeddings
from aioengine.quantization.plain import plain

_EXCLUDED: Final = -1e4
"""The logit of a token that a head does not know. It is finite, so a mask with only such tokens is no error."""


class DraftHead(Model):
    """A draft head.

    Attributes:
        target: the model, whose embeddings and output head it uses. Set it before a step.
    """

    target: Model

    def __init__(self, config: DraftHeadConfig, options: ModelOptions) -> None:
        super().__init__(config, options)
        self._config = config
        self.input_spec = InputSpec()
        self.attention_shape = attention_shape(config, options)
        self._ropes = rotary_embeddings(config, options)
        self._fc = Linear.of([config.fc], replace(options, format_of=plain))
        norms = [make_norm(config.norm, config.hidden_size, config.epsilon, options) for _ in config.joined_norms]
        self._embedding_norm = norms[0] if norms else None
        self._state_norm = norms[1] if len(norms) > 1 else None
        self._block = Block(config, 0, self.attention_shape, options, rope=0, previous_norm=None)
        self._norm = None
        if config.names.norm:
            self._norm = make_norm(config.norm, config.hidden_size, config.epsilon, options)
        self._head = None if config.head is None else Linear.of([config.head], options)
        self._token_ids: Tensor | None = None  # [outputs of the head]: the ids of its tokens
        self._offsets: Tensor | None = None  # ``d2t``: the distances of these ids from their indices
        if config.has_token_map:
            self._offsets = torch.empty(config.draft_vocab_size, dtype=torch.int64, device=options.device)
        self.parts = (
            ("", self._fc),
            *((f"{name}.", norm) for name, norm in zip(config.joined_norms, norms, strict=True)),
            (config.names.block(0), self._block),
            (f"{config.names.norm}.", self._norm),
            ("", self._head),
        )

    def own_weights(self) -> dict[str, Target]:
        return {} if self._offsets is None else {"d2t": Target(self._offsets)}

    def finish_loading(self) -> None:
        super().finish_loading()
        if self._offsets is not None:
            self._token_ids = self._offsets + torch.arange(len(self._offsets), device=self._offsets.device)
            lowest, highest = int(self._token_ids.min()), int(self._token_ids.max())
            if lowest < 0 or highest >= self.vocab_size:
                raise ValueError(f"d2t has token ids from {lowest} to {highest}, and vocab_size is {self.vocab_size}")

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] ids -> [T, D]."""
        return self.target.embed(token_ids)

    def reduce(self, states: Tensor) -> Tensor:
        """Hidden states of the model [T, F] -> ``ModelInputs.features`` [T, D]."""
        return self._fc(states) if self._config.reads_three_layers else states

    def forward(self, inputs: ModelInputs, attention: StepAttention) -> Tensor:
        """Return hidden states before the last norm: [T, D], or [S, D] with ``inputs.outputs``.

        They are the features of the next positions, and the inputs of ``compute_logits``.
        """
        assert inputs.token_ids is not None, "inputs have no token ids"
        embeddings, features = self.embed(inputs.token_ids), inputs.features
        if features is None:  # while memory is measured
            features = torch.zeros_like(embeddings)
        if self._embedding_norm is not None:
            embeddings = self._embedding_norm(embeddings)
        if self._state_norm is not None:
            features = self._state_norm(features)
        step = BlockStep([rope.tables(inputs.positions) for rope in self._ropes], attention)
        if self._config.reads_three_layers:
            x, delta = self._block(features, None, step, outputs=inputs.outputs, beside=embeddings)
        else:
            x = self._fc(torch.cat((embeddings, features), dim=1))
            x, delta = self._block(x, None, step, outputs=inputs.outputs)
        return x.add_(delta)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, D] -> [S, V]. Tokens that its own output head does not have get very small logits."""
        normed = hidden if self._norm is None else self._norm(hidden)
        if self._head is None:
            return self.target.compute_logits(normed)
        logits = self._head(normed)
        if self._token_ids is None:
            return logits
        return logits.new_full((len(logits), self.vocab_size), _EXCLUDED).index_copy_(1, self._token_ids, logits)
