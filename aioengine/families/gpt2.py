"""GPT-2 and other families with LayerNorm: GPT-NeoX, OPT, Phi, Falcon, StableLM and StarCoder2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta, field
from msgspec.structs import fields, replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, MlpConfig, NormConfig, TensorNames
from aioengine.families._config import DecoderConfig, DecoderFamily, Task
from aioengine.families._fields import not_implemented
from aioengine.families._rope_config import RopeConfig

UNREAD: Final = "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters"
"""transformers ignores these fields: each head has its own keys and values, and positions are learned."""

_SIZES: Final = "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"


class Gpt2Family(DecoderFamily, frozen=True, kw_only=True):
    """GPT-2: learned positions; the checkpoint stores weights transposed."""

    unread = UNREAD
    tasks: ClassVar[Mapping[str, Task]] = {
        "LMHeadModel": Task.GENERATE,
        "ForSequenceClassification": Task.CLASSIFY,
        "Model": Task.EMBED,
    }
    names = TensorNames(
        embedding="transformer.wte", positions="transformer.wpe", layers="transformer.h", norm="transformer.ln_f"
    )
    prefix = "transformer."
    norm = NormConfig(kind="layer", has_bias=True)
    block = BlockConfig(attention="attn.", attention_norm="ln_1", mlp_norm="ln_2")
    attention_bias = True
    mlp = MlpConfig(first=("c_fc",), second="c_proj", is_gated=False)
    mlp_bias = True
    is_transposed = True
    buffers = (".attn.bias", ".attn.masked_bias")

    vocab_size: int = 50_257
    hidden_size: int = field(default=768, name="n_embd")
    intermediate_size: int = field(name="n_inner")
    num_hidden_layers: int = field(default=12, name="n_layer")
    num_attention_heads: int = field(default=12, name="n_head")
    max_position_embeddings: int = field(default=1024, name="n_positions")
    hidden_act: str = field(default="gelu_new", name="activation_function")
    rms_norm_eps: float = field(default=1e-5, name="layer_norm_epsilon")
    tie_word_embeddings: bool = True
    is_scaled: bool = field(default=True, name="scale_attn_weights")
    is_scaled_by_layer: Literal[False] = field(default=False, name="scale_attn_by_inverse_layer_idx")
    add_cross_attention: Literal[False] = False

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json, which may use the usual names of sizes. The default of ``n_inner`` is 4 * ``n_embd``."""
        sizes = {field.name: field for field in fields(cls) if field.name in _SIZES}
        usual = {field.encode_name: config[name] for name, field in sizes.items() if name in config}
        values = {**usual, **config}
        size = values.get("n_embd", sizes["hidden_size"].default)
        if values.get("n_inner") is None:
            values["n_inner"] = 4 * size if isinstance(size, int) else None
        return super().read(values)

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(qkv=("c_attn",), output="c_proj", scale=None if self.is_scaled else 1.0)

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        return (None,) * self.num_hidden_layers if self.names.positions else ()


class GptBigCodeFamily(Gpt2Family, frozen=True, kw_only=True):
    """GPT-BigCode (StarCoder, SantaCoder): GPT-2 with multi-query attention."""

    tasks = DecoderFamily.tasks
    is_transposed = False

    hidden_act: str = field(default="gelu_pytorch_tanh", name="activation_function")
    multi_query: bool = True

    @property
    def num_kv_heads(self) -> int:
        return 1 if self.multi_query else self.num_attention_heads

    @property
    def attention(self) -> AttentionConfig:
        return replace(super().attention, is_grouped=self.num_kv_heads > 1)


class GptJFamily(Gpt2Family, frozen=True, kw_only=True):
    """GPT-J: parallel attention and MLP, interleaved rotary embedding on a part of each head."""

    tasks = DecoderFamily.tasks
    names = replace(Gpt2Family.names, positions="")
    block = BlockConfig(attention="attn.", attention_norm="ln_1", mlp_norm="", is_parallel=True)
    attention_bias = False
    is_transposed = False
    head_bias = True
    mlp = replace(Gpt2Family.mlp, first=("fc_in",), second="fc_out")

    vocab_size: int = 50_400
    hidden_size: int = field(default=4096, name="n_embd")
    num_hidden_layers: int = field(default=28, name="n_layer")
    num_attention_heads: int = field(default=16, name="n_head")
    max_position_embeddings: int = field(default=2048, name="n_positions")
    tie_word_embeddings: bool = False
    rotary_dim: Annotated[int, Meta(ge=1)] | None = 64

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(output="out_proj", is_interleaved=True)

    @property
    def rope(self) -> RopeConfig:
        return RopeConfig(partial_rotary_factor=1.0 if self.rotary_dim is None else self.rotary_dim / self.head_size)


class GptNeoxFamily(DecoderFamily, frozen=True, kw_only=True):
    """GPT-NeoX and Pythia: parallel attention and MLP with separate norms, partial rotary embedding."""

    default_partial = 0.25
    unread = ("num_key_value_heads",)
    names = TensorNames(embedding="gpt_neox.embed_in", layers="gpt_neox.layers", norm="gpt_neox.final_layer_norm")
    prefix = "gpt_neox."
    renamed = (
        ("embed_out.", "lm_head."),
        # models without a head
        ("embed_in.", "gpt_neox.embed_in."),
        ("layers.", "gpt_neox.layers."),
        ("final_layer_norm.", "gpt_neox.final_layer_norm."),
    )
    buffers = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
    norm = NormConfig(kind="layer", has_bias=True)
    attention = AttentionConfig(qkv=("query_key_value",), is_grouped=True, output="dense")
    mlp = MlpConfig(first=("dense_h_to_4h",), second="dense_4h_to_h", is_gated=False)
    mlp_bias = True

    hidden_act: str = "gelu"
    rms_norm_eps: float = field(default=1e-5, name="layer_norm_eps")
    partial_rotary_factor: float | None = field(default=None, name="rotary_pct")
    rope_theta: float | None = field(default=None, name="rotary_emb_base")
    use_parallel_residual: bool = True
    attention_bias: bool = True

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(attention="attention.", is_parallel=self.use_parallel_residual)


class OptFamily(DecoderFamily, frozen=True, kw_only=True):
    """OPT: learned positions, pre-norm, ReLU."""

    mlp_bias = None
    unread = UNREAD
    names = TensorNames(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        first_position=2,
        layers="model.decoder.layers",
        norm="model.decoder.final_layer_norm",
    )
    block = BlockConfig(mlp="", attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm")
    attention = AttentionConfig(output="out_proj")
    mlp = MlpConfig(first=("fc1",), second="fc2", is_gated=False)

    intermediate_size: int = field(name="ffn_dim")
    hidden_act: str = field(default="relu", name="activation_function")
    tie_word_embeddings: bool = True
    do_layer_norm_before: bool = True
    word_embed_proj_dim: int | None = None
    attention_bias: bool = field(default=True, name="enable_bias")
    has_norm_weights: bool = field(default=True, name="layer_norm_elementwise_affine")
    without_last_norm: Literal[False] = field(default=False, name="_remove_final_layer_norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.do_layer_norm_before:
            not_implemented("do_layer_norm_before", self.do_layer_norm_before, "true (all models except OPT-350M)")
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            not_implemented("word_embed_proj_dim", self.word_embed_proj_dim, f"hidden_size ({self.hidden_size})")

    @property
    def norm(self) -> NormConfig:
        return NormConfig(kind="layer", has_weight=self.has_norm_weights, has_bias=self.has_norm_weights)

    def decoder(self) -> DecoderConfig:
        return replace(super().decoder(), epsilon=1e-5, layer_ropes=(None,) * self.num_hidden_layers)


class PhiFamily(DecoderFamily, frozen=True, kw_only=True):
    """Phi-1, Phi-1.5 and Phi-2: parallel attention and MLP, biases, partial rotary embedding."""

    default_partial = 0.5
    names = TensorNames(norm="model.final_layernorm")
    norm = NormConfig(kind="layer", has_bias=True)
    block = BlockConfig(is_parallel=True, mlp_norm="")
    attention_bias = True
    mlp = MlpConfig(first=("fc1",), second="fc2", is_gated=False)
    mlp_bias = True
    head_bias = True

    hidden_act: str = "gelu_new"
    rms_norm_eps: float = field(default=1e-5, name="layer_norm_eps")
    qk_layernorm: bool = False

    @property
    def attention(self) -> AttentionConfig:
        head_norm = HeadNorm(names=("q_layernorm", "k_layernorm"), norm=self.norm) if self.qk_layernorm else None
        return AttentionConfig(output="dense", head_norm=head_norm)


class Phi3Family(DecoderFamily, frozen=True, kw_only=True):
    """Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, and LongRoPE for long contexts."""

    default_partial = 1.0
    has_one_window = True
    attention = AttentionConfig(qkv=("qkv_proj",))
    mlp = MlpConfig(first=("gate_up_proj",))

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    original_max_position_embeddings: Annotated[int, Meta(ge=1)] = 4096
    sliding_window: int | None = None

    @property
    def rotation(self) -> Mapping[str, object]:
        """``rope_parameters`` with the current name of LongRoPE, and with the original context length."""
        parameters = super().rotation
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type == "default":
            return parameters
        if rope_type not in ("longrope", "su", "yarn"):
            name = "rope_scaling" if self.rope_scaling else "rope_parameters"
            not_implemented(f"{name}.rope_type", rope_type, "longrope")
        original = self.original_max_position_embeddings
        return {**parameters, "rope_type": "longrope", "original_max_position_embeddings": original}


class FalconFamily(DecoderFamily, frozen=True, kw_only=True):
    """Falcon 7B, 40B, 180B and Falcon 2: parallel attention and MLP, rotary positions (no ALiBi)."""

    mlp_bias = None
    names = TensorNames(embedding="transformer.word_embeddings", layers="transformer.h", norm="transformer.ln_f")
    prefix = "transformer."
    norm = NormConfig(kind="layer", has_bias=True)
    attention = AttentionConfig(qkv=("query_key_value",), is_grouped=True, output="dense")
    mlp = MlpConfig(first=("dense_h_to_4h",), second="dense_4h_to_h", is_gated=False)

    hidden_act: str = field(default="gelu", name="activation")
    rms_norm_eps: float = field(default=1e-5, name="layer_norm_epsilon")
    num_key_value_heads: int | None = field(default=None, name="num_kv_heads")
    intermediate_size: int = field(name="ffn_hidden_size")
    tie_word_embeddings: bool = True
    alibi: Literal[False] | None = False
    attention_bias: bool | None = field(default=False, name="bias")
    multi_query: bool | None = True
    is_parallel: bool | None = field(default=True, name="parallel_attn")
    new_decoder_architecture: bool | None = False
    num_norms: Literal[1, 2] | None = field(default=None, name="num_ln_in_parallel_attn")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_decoder_architecture and not self.is_parallel:
            not_implemented("parallel_attn", self.is_parallel, "true with new_decoder_architecture")

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json, with defaults that depend on other fields."""
        size, inner = config.get("n_embed", config.get("hidden_size")), config.get("ffn_hidden_size")
        if inner is None and isinstance(size, int):
            inner = 4 * size
        return super().read({**config, "hidden_size": size, "ffn_hidden_size": inner})

    @property
    def num_kv_heads(self) -> int:
        if self.new_decoder_architecture:
            return self.num_key_value_heads or self.num_attention_heads
        return 1 if self.multi_query else self.num_attention_heads

    @property
    def block(self) -> BlockConfig:
        """One or two norms in a parallel block, otherwise one each before attention and MLP."""
        if not self.is_parallel:
            return BlockConfig(attention="self_attention.")
        if self.new_decoder_architecture and self.num_norms != 1:
            return BlockConfig(
                attention="self_attention.", attention_norm="ln_attn", mlp_norm="ln_mlp", is_parallel=True
            )
        return BlockConfig(attention="self_attention.", mlp_norm="", is_parallel=True)


class StableLmFamily(DecoderFamily, frozen=True, kw_only=True):
    """StableLM: LayerNorm and partial rotary embedding."""

    default_partial = 0.25
    norm = NormConfig(kind="layer", has_bias=True)

    num_key_value_heads: int | None = 32
    rms_norm_eps: float = field(default=1e-5, name="layer_norm_eps")
    max_position_embeddings: int = 4096
    qkv_bias: bool = field(default=False, name="use_qkv_bias")
    qk_layernorm: bool = False
    use_parallel_residual: bool = False

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(is_parallel=True, mlp_norm="") if self.use_parallel_residual else BlockConfig()

    @property
    def attention(self) -> AttentionConfig:
        head_norm = HeadNorm(names=("q_layernorm", "k_layernorm"), norm=NormConfig(kind="layer"), extent="list")
        return AttentionConfig(head_norm=head_norm if self.qk_layernorm else None)


class Starcoder2Family(DecoderFamily, frozen=True, kw_only=True):
    """StarCoder2: LayerNorm, biases, and an ungated MLP."""

    mlp_bias = None
    has_one_window = True
    norm = NormConfig(kind="layer", has_bias=True)
    mlp = MlpConfig(first=("c_fc",), second="c_proj", is_gated=False)

    num_key_value_heads: int | None = 2
    hidden_act: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = field(default=1e-5, name="norm_epsilon")
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    attention_bias: bool = field(default=True, name="use_bias")
    sliding_window: int | None = None


PLUGIN = Gpt2Family
