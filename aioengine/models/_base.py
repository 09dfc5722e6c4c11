"""The interface of models.

Shape letters: T packed tokens of a step, S output tokens, D hidden size, V vocabulary size, N image tokens, K DeepStack
layers.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from aioengine.attention._base import AttentionShape, StepAttention
from aioengine.families._config import TransformerConfig
from aioengine.families._tensors import is_ignored
from aioengine.layers.adapters import AdapterRows
from aioengine.layers.layer import Layer, Placement
from aioengine.layers.linear import Linear, adaptable_linears
from aioengine.layers.mixer import StateShape, StepStates
from aioengine.models._features import Features
from aioengine.quantization._base import LinearFormat
from aioengine.quantization.plain import plain
from aioengine.settings.memory_model import active_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Placement):
    """How to build a model: the placement of its layers, and the size of its rotary tables.

    Attributes:
        max_positions: tokens of the longest request.
        has_kv_scales: the KV cache is in fp8, and the checkpoint may have scales of keys and values.
    """

    max_positions: int
    has_kv_scales: bool = False
    format_of: Callable[[str], LinearFormat] = plain


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The fields of ``ModelInputs`` that a model reads.

    Attributes:
        embeddings: it reads embeddings from ``Model.embed`` instead of token ids.
        position_axes: 1 for positions [T], 3 for [3, T].
        rows: it reads the row of each token.
        token_types: it reads token types, which tell the two texts of a pair apart.
        states: it reads the recurrent states, see ``Model.state_shape``.
        short_length: with LongRoPE, positions of long requests (``NewRow.is_long``) start at this number; else 0.
    """

    embeddings: bool = False
    position_axes: int = 1
    rows: bool = False
    token_types: bool = False
    states: bool = False
    short_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """The inputs of one step: T packed tokens. The tokens of a row are contiguous.

    Attributes:
        positions: [T] int64, position of each token in its request, from 0 or ``InputSpec.short_length``. [3, T] for
            models with three-axis positions.
        token_ids: [T] int64; None for a model that reads embeddings.
        embeddings: [T, D] in the model's dtype, instead of token ids.
        rows: [T] int64, row of each token; None for a model that does not read it.
        token_types: [T] int64, 1 in the second text of a pair, else 0; None if all are 0.
        outputs: [S] int64, indices of the output tokens, in this order; None for all T tokens.
        deepstack: indices [N] int64 of image tokens, and features [N, K, D] that are added to them after each of the
            first K blocks; None if there are none.
        adapters: the rows by adapter; None if no row has an adapter.
        states: the recurrent states; None for other models, and if the results of the step are dropped.
        slots: [T] the KV slot of each token, where ``Model.features`` keeps its hidden states; None if there are none.
        features: [T, D] hidden states that a draft head reads; None for other models.
    """

    positions: Tensor
    token_ids: Tensor | None = None
    embeddings: Tensor | None = None
    rows: Tensor | None = None
    token_types: Tensor | None = None
    outputs: Tensor | None = None
    deepstack: tuple[Tensor, Tensor] | None = None
    adapters: AdapterRows | None = None
    states: StepStates | None = None
    slots: Tensor | None = None
    features: Tensor | None = None


class Model(Layer, metaclass=ABCMeta):
    """A decoder or encoder. After ``models.build``, load its weights and call ``finish_loading``.

    All targets of ``weights()`` must be loaded before the first ``finish_loading``. After ``open_for_loading``, some or
    all weights can be replaced. The model cannot run until ``finish_loading`` is called again. Existing entries of the
    KV cache were computed with the old weights.

    Attributes:
        num_active: parameters that one token uses, including embeddings: only the selected experts.
        prefix: of the tensor names that a checkpoint without a head may omit.
        renamed: see ``TransformerConfig``.
        state_shape: recurrent states per request, in addition to keys and values or instead of them; None if there are
            none. A state includes all tokens computed so far, so each step of a request must start where the previous
            one ended.
        features: keeps hidden states for a draft head; None: there is none.
        knows_kinds: whether ``shortened`` has all kinds of blocks.
    """

    input_spec: InputSpec
    attention_shape: AttentionShape
    prefix: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    state_shape: StateShape | None = None
    features: Features | None = None
    knows_kinds: bool = True

    def __init__(self, config: TransformerConfig, options: ModelOptions) -> None:
        self._config = config
        self.task = config.task
        self.dtype = options.dtype
        self.device = options.device
        self.num_active = active_parameters(config)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.prefix = config.prefix
        self.renamed = config.renamed

    def is_ignored(self, name: str) -> bool:
        """Return whether a checkpoint tensor that is not in ``weights()`` may be skipped: a buffer, or a tied head."""
        return is_ignored(self._config, name)

    def linears(self) -> list[tuple[str, Linear]]:
        """Return the linear layers that adapters may change, in order, each with the prefix of its tensor names."""
        return adaptable_linears(self)

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] ids -> [T, D] embeddings."""

    @abstractmethod
    def forward(self, inputs: ModelInputs, attention: StepAttention) -> Tensor:
        """Return hidden states after the last norm: [T, D], or [S, D] with ``inputs.outputs``.

        ``attention`` is prepared for the step.
        """

    def shortened(self) -> Model:
        """Return this model with only the first block of each kind, which loads all kernels for the size of a step."""
        return self

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, D] -> logits [S, V] in the model's dtype.

        A classifier maps pooled hidden states to one score per class. A model without a head returns its input.
        """

    def compute_own_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, D] -> logits [S, W] of the tokens of this rank."""
        return self.compute_logits(hidden)

    def gather_logits(self, own: Tensor) -> Tensor:
        """Logits [S, W] of each rank -> logits [S, V]."""
        return own


@runtime_checkable
class VisionModel(Protocol):
    """A model that reads images. Their features replace the embeddings of tokens with ``image_token_id``.

    ``input_spec.embeddings`` is set. ``num_deepstack`` is K.
    """

    image_token_id: int
    num_deepstack: int

    def encode_image(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Arrays of one image from the image processor of transformers -> features [N, (1 + K) * D].

        The first D entries replace the token embedding. The others are added after the first K layers.

        Instead of ``pixel_values``, there may be ``pixels`` [..., C, height, width] in bytes, not cut into patches,
        with a ``table`` [C, 256] of their values. Instead of ``pixels``, there may be a ``picture`` that is not
        resized yet, see ``models._image_decoder.resized``.

        Raises ValueError if an array is missing or has a wrong shape.
        """
        ...

    def largest_image(self, max_tokens: int) -> dict[str, Tensor]:
        """Return arrays [...] with the shapes of the largest image of up to ``max_tokens`` tokens."""
        ...
