"""The interface of a model plug-in. T packed tokens, S tokens that give an output, D model size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aioengine.layers.placement import Placement
from aioengine.quantization.plain import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, StepAttention
    from aioengine.families._config import Task
    from aioengine.layers.adapters import AdapterRows
    from aioengine.layers.linear import Linear
    from aioengine.layers.placement import Target
    from aioengine.layers.states import StateShape, StepStates
    from aioengine.quantization._base import LinearFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How to build a model. ``max_positions``: the longest request that will run (rotary tables are made for it).
    ``batch_invariant``: on a GPU, the numbers of a token must not depend on how many others there are.
    ``linear_format``: how linear layers store and multiply their weights.
    """

    dtype: torch.dtype
    device: torch.device
    max_positions: int
    batch_invariant: bool = False
    linear_format: LinearFormat = PLAIN

    @property
    def placement(self) -> Placement:
        """Of the layers, on one rank."""
        return Placement(
            dtype=self.dtype,
            device=self.device,
            linear_format=self.linear_format,
            batch_invariant=self.batch_invariant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """Which of ``ModelInputs`` a model reads.

    Attributes:
        embeddings: embeddings, which ``Model.embed`` makes of token ids; otherwise token ids.
        position_axes: 1 for positions [T], 3 for [3, T].
        rows: the row of each token.
        token_types: whether a token belongs to the first or to the second text of a pair.
        states: the states of the rows; the model is a ``StatefulModel``.
        short_length: positions of requests with more tokens (``NewRow.is_long``) are counted from this number on, for
            they have other rotations; 0: positions are counted from 0.
    """

    embeddings: bool = False
    position_axes: int = 1
    rows: bool = False
    token_types: bool = False
    states: bool = False
    short_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What a model reads of one step: T packed tokens, those of a row together.

    Attributes:
        positions: [T] int64, the place of each token in its request, from 0 (or ``InputSpec.short_length``); [3, T] for
            models with three axes.
        token_ids: [T] int64; None for a model that reads embeddings.
        embeddings: [T, D] in the model's dtype, in place of the token ids.
        rows: [T] int64, the row of the step that each token belongs to; None for a model that does not read it.
        token_types: [T] int64, 1 in the second text of a pair, else 0; None: 0 for all.
        outputs: [S] int64, indices into T of the tokens whose hidden states are returned, in this order; None: all T.
        deepstack: of tokens with features of images, their indices into T [N] int64, and what is added to them behind
            each of the first K blocks, [N, K, D]; None: there are none.
        adapters: the rows of the step by adapter; None: no row has one.
        states: of the rows; None for a model that keeps none, and in steps whose results are dropped.
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


class Model(Protocol):
    """A decoder or encoder, made by ``models.build``; its weights are filled in, then ``finish_loading`` is called."""

    task: Task
    input_spec: InputSpec
    attention_shape: AttentionShape
    dtype: torch.dtype
    num_active: int
    """Parameters that a token goes through, embeddings included: of experts, those that are chosen for it."""
    vocab_size: int
    hidden_size: int
    prefix: str
    """Of the names of the tensors that a checkpoint without a head has too."""
    renamed: tuple[tuple[str, str], ...]
    """As in ``TransformerConfig``."""

    def weights(self) -> dict[str, Target]:
        """Name in the checkpoint -> where it goes: a tensor, often a part of a fused one.

        Every name must be filled before the first ``finish_loading``.
        """
        ...

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint tensor that is not in ``weights()`` may be skipped (buffers, a tied head)."""
        ...

    def finish_loading(self) -> None:
        """Prepare the weights for the kernels; ``weights()`` is not valid after it."""
        ...

    def open_for_loading(self) -> None:
        """After ``finish_loading``: make ``weights()`` valid again, with the present values, to replace some or all.

        Nothing is computed until ``finish_loading`` is called again. The KV of positions computed before is that of the
        old weights.
        """
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] ids -> [T, D] embeddings."""
        ...

    def forward(self, inputs: ModelInputs, attention: StepAttention) -> Tensor:
        """Hidden states after the last norm: [T, D], or [S, D] of ``inputs.outputs``; ``attention`` is prepared."""
        ...

    def forward_block(self, num_tokens: int, attention: StepAttention) -> None:
        """Compute one block for ``num_tokens`` tokens and drop the result: loads the kernels for that number of tokens.

        All blocks of a model are alike.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, D] hidden states -> [S, V] logits in the model's dtype.

        A classifier takes pooled hidden states and returns a score for each class; a model without a head returns what
        it is given.
        """
        ...


@runtime_checkable
class StatefulModel(Protocol):
    """A model that keeps states of fixed size for each request, beside the pages of keys and values, or instead.

    Its ``input_spec`` has states. A state is that behind all tokens computed so far, so every step of a request begins
    where the last one ended.
    """

    state_shape: StateShape


@runtime_checkable
class VisionModel(Protocol):
    """A model whose prompts may hold images, in the place of tokens with the id ``image_token_id``.

    Its ``input_spec`` has embeddings. N: the tokens of an image that get features. K: layers behind which some are
    added.
    """

    image_token_id: int
    num_deepstack: int

    def encode_image(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """What the image processor of transformers gives for one image -> its features [N, (1 + K) * D].

        In place of ``pixel_values`` there may be ``pixels`` [..., C, height, width], which are bytes, not cut into
        patches, with the ``table`` [C, 256] of their values; and in place of these a ``picture`` that is not resized
        yet, as ``models._image_pixels.resized`` takes it.

        The first D numbers stand for the embedding of the token, the others are for the first K layers.

        Raises:
            ValueError: an array is missing, or its shape is not that of an image.
        """
        ...

    def largest_image(self, max_tokens: int) -> dict[str, Tensor]:
        """Arrays [...] of zeros, as for the largest image of up to ``max_tokens`` tokens."""
        ...


@runtime_checkable
class AdaptableModel(Protocol):
    """A model whose rows may use LoRA adapters: it passes ``ModelInputs.adapters`` on to its linear layers."""

    def linears(self) -> list[tuple[str, Linear]]:
        """The linear layers, in order, each with the prefix of the names of its parts in the checkpoint."""
        ...


class ModelClass(Protocol):
    """``PLUGIN`` of a model with a file of its own in ``aioengine.models``."""

    def __call__(self, config: Mapping[str, object], options: ModelOptions) -> Model:
        """Raises ValueError, naming the field, for a config value that the code does not implement."""
        ...
