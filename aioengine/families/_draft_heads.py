"""Configs of draft heads: one layer that proposes drafts from hidden states of the model. Torch-free.

EAGLE-3 (arXiv 2503.01840) and EAGLE (arXiv 2401.15077) heads have their own folders. The layers for multi-token
prediction (arXiv 2412.19437) are in the checkpoint of the model. All heads use the embeddings of the model, and if they
have no output head, the model's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from aioengine import plugins
from aioengine.families._block_config import BlockConfig, LinearShape, TensorNames
from aioengine.families._config import DecoderConfig, Task
from aioengine.families._fields import decode_config, not_implemented
from aioengine.families.llama import LlamaFamily
from aioengine.settings.config import EAGLE3, MTP


class DraftHeadConfig(DecoderConfig, frozen=True, kw_only=True):
    """A draft head: one block, and the layers around it.

    Attributes:
        fc: EAGLE-3: reduces the joined hidden states of three layers. Otherwise: reduces a joined embedding and hidden
            state.
        joined_norms: names of the norms of the embedding and of the hidden state before they are joined; () for none.
            In EAGLE-3 the second one may be a norm of the block.
        draft_vocab_size: outputs of its own output head; 0: it uses the head of the model.
        read_layers: the layers of the model whose inputs it reads; (): the default of EAGLE-3, or otherwise the hidden
            states after the last norm.
    """

    fc: LinearShape
    joined_norms: tuple[str, ...] = ()
    draft_vocab_size: int = 0
    read_layers: tuple[int, ...] = ()

    @property
    def reads_three_layers(self) -> bool:
        """Whether it is an EAGLE-3 head."""
        return self.attention.num_inputs == 2

    @property
    def has_token_map(self) -> bool:
        """Whether its own output head has only some of the tokens."""
        return self.draft_vocab_size not in (0, self.vocab_size)

    @property
    def head(self) -> LinearShape | None:
        """Its own output head; None if it uses the head of the model."""
        if not self.draft_vocab_size:
            return None
        return LinearShape(self.names.head, self.draft_vocab_size, self.hidden_size, False)


def read_draft_head(raw: Mapping[str, object], algorithm: str) -> DraftHeadConfig:
    """Read config.json of an EAGLE or EAGLE-3 head, or of a model with layers for multi-token prediction.

    Raises ValueError for a value that is not implemented, or if the model has no such layers.
    """
    if algorithm == MTP:
        return _mtp_head(raw)
    if (stored := raw.get("speculators_model_type")) not in (None, "eagle3") or (stored and algorithm != EAGLE3):
        not_implemented("speculators_model_type", stored, '"eagle3" with speculative_algorithm="EAGLE3"')
    if raw.get("model_type") != "llama":
        not_implemented("model_type", raw.get("model_type"), f'"llama" for speculative_algorithm={algorithm!r}')
    return decode_config(raw, _Eagle3Family if algorithm == EAGLE3 else _EagleFamily).draft_head()


class _EagleFamily(LlamaFamily, frozen=True, kw_only=True):
    """EAGLE: a Llama block without its first norm.

    Attributes:
        bias: ``fc`` has a bias.
    """

    tasks: ClassVar[Mapping[str, Task]] = {"": Task.GENERATE}  # the architecture may have any name
    block = BlockConfig(attention_norm="")

    num_hidden_layers: Literal[1]
    bias: bool = True

    def draft_head(self) -> DraftHeadConfig:
        """Return the head."""
        size = self.hidden_size
        return _head_of(
            self.decoder(),
            names=TensorNames(only_block="layers.0.", norm=""),
            fc=LinearShape("fc", size, 2 * size, self.bias),
            ignored=("embed_tokens.", "lm_head."),
        )


class _EagleConfig(Struct, frozen=True):
    """``eagle_config``: the layers of the model whose outputs the head reads."""

    eagle_aux_hidden_state_layer_ids: tuple[int, int, int] | None = None
    use_aux_hidden_state: Literal[True] = True


class _Eagle3Family(LlamaFamily, frozen=True, kw_only=True):
    """EAGLE-3: a Llama block whose attention reads embeddings and hidden states.

    Attributes:
        draft_vocab_size: None for the output head of the model.
        target_hidden_size: of the model.
        bias: ``fc`` has a bias.
        eagle_aux_hidden_state_layer_ids: the layers of the model whose inputs the head reads.
        norm_before_residual: the residual stream of the block begins after its norm.
        speculators_model_type: "": not in the ``speculators`` format.
    """

    tasks: ClassVar[Mapping[str, Task]] = {"": Task.GENERATE}
    limits: ClassVar[Mapping[str, tuple[int, int]]] = {"draft_vocab_size": (1, 2**27)}
    block = BlockConfig(attention_norm="hidden_norm")

    num_hidden_layers: Literal[1]
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    bias: bool = False
    eagle_config: _EagleConfig | None = None
    eagle_aux_hidden_state_layer_ids: tuple[int, int, int] | None = None
    norm_before_residual: bool = False
    norm_before_fc: Literal[False] | None = None
    fc_norm: Literal[False] | None = None
    norm_output: Literal[False] | None = None
    speculators_model_type: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_hidden_size not in (None, self.hidden_size):
            not_implemented("target_hidden_size", self.target_hidden_size, f"hidden_size ({self.hidden_size})")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            not_implemented("draft_vocab_size", self.draft_vocab_size, f"at most vocab_size ({self.vocab_size})")

    @property
    def layers(self) -> tuple[int, ...]:
        """See ``DraftHeadConfig.read_layers``."""
        outputs = None if self.eagle_config is None else self.eagle_config.eagle_aux_hidden_state_layer_ids
        if outputs is not None:
            return tuple(layer + 1 for layer in outputs)
        return self.eagle_aux_hidden_state_layer_ids or ()

    def draft_head(self) -> DraftHeadConfig:
        """Return the head."""
        decoder, size = self.decoder(), self.hidden_size
        block, norm = "layers.0." if self.speculators_model_type else "midlayer.", self.block.attention_norm
        joined = (f"{block}input_layernorm", f"{block}{norm}")
        return _head_of(
            decoder,
            names=TensorNames(only_block=block, norm="norm"),
            block=replace(decoder.block, attention_norm="") if self.norm_before_residual else decoder.block,
            attention=replace(decoder.attention, num_inputs=2),
            fc=LinearShape("fc", size, 3 * size, self.bias),
            joined_norms=joined if self.norm_before_residual else joined[:1],
            draft_vocab_size=self.draft_vocab_size or 0,
            read_layers=self.layers,
            ignored=("embed_tokens.", "lm_head.", "d2t", "t2d"),
        )


def _mtp_head(raw: Mapping[str, object]) -> DraftHeadConfig:
    """Return the first layer for multi-token prediction of a model."""
    decoder = plugins.load("families", plugins.file_name(str(raw.get("model_type")))).read(raw)
    refused = f"speculative_algorithm={MTP!r} does not work for model_type {raw.get('model_type')!r}"
    if not isinstance(decoder, DecoderConfig) or decoder.keeps_states:
        raise ValueError(f"{refused}: its recurrent states cannot be taken back when a draft is rejected")
    # the model itself ignores these layers, which follow its last one
    blocks = [name for name in decoder.ignored if name.startswith(f"{decoder.names.layers}.")]
    if not blocks:
        raise ValueError(f"{refused}: it has no layers for multi-token prediction")
    block, size, experts = blocks[0], decoder.hidden_size, decoder.experts
    return _head_of(
        decoder,
        names=TensorNames(only_block=block, norm=f"{block}shared_head.norm"),
        experts=None if experts is None else replace(experts, dense_layers=frozenset()),
        fc=LinearShape(f"{block}eh_proj", size, 2 * size, False),
        joined_norms=(f"{block}enorm", f"{block}hnorm"),
        ignored=("model.", "lm_head."),
    )


def _head_of(decoder: DecoderConfig, **values: Any) -> DraftHeadConfig:
    """Return a head with the block of a decoder."""
    fields = {name: getattr(decoder, name) for name in decoder.__struct_fields__}
    fields |= {"num_layers": 1, "prefix": "", "layer_ropes": (), "windows": ()}
    return DraftHeadConfig(**fields | values)
