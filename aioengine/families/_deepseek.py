"""DeepSeek-V2, DeepSeek-V3 and the like: latent attention, and experts in all layers but the first ones. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import field
from msgspec.structs import replace

from aioengine.families._config import check_experts, not_implemented
from aioengine.families._experts import ExpertsConfig, SharedConfig
from aioengine.families._latent import LatentFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig
    from aioengine.families._experts import RouterConfig


class DeepseekFamily(LatentFamily, frozen=True, kw_only=True):
    """``num_shared_experts``: experts that all tokens go through, which are one MLP that is as large as all of them.

    ``num_nextn_predict_layers``, or ``num_mtp_layers``: layers behind the last one that predict further tokens, which
    checkpoints may have and which are not used.
    """

    first_k_dense_replace: int = 0
    num_experts: int = field(default=64, name="n_routed_experts")
    num_shared_experts: int | None = field(default=2, name="n_shared_experts")
    moe_intermediate_size: int = 1407
    experts_per_token: int = field(name="num_experts_per_tok")
    num_groups: int | None = field(default=None, name="n_group")
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    moe_layer_freq: Literal[1] = 1
    num_nextn_predict_layers: int | None = None
    num_mtp_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.experts_per_token, name="n_routed_experts")
        num_groups, top_groups = self.groups
        if self.num_experts % num_groups:
            not_implemented("n_group", num_groups, f"a divisor of {self.num_experts}, the number of experts")
        fewest = -(-self.experts_per_token * num_groups // self.num_experts)
        if not fewest <= top_groups <= num_groups:
            not_implemented("topk_group", top_groups, f"{fewest} to {num_groups}, of the groups of experts")

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of experts, and how many of them the experts of a token are chosen from."""
        num_groups = self.num_groups or 1
        return num_groups, num_groups if self.topk_group is None else self.topk_group

    @property
    def dense_layers(self) -> frozenset[int]:
        """The layers that have an MLP and no experts."""
        return frozenset(range(min(self.first_k_dense_replace, self.num_hidden_layers)))

    def expert_decoder(self, config: Mapping[str, object], router: RouterConfig) -> DecoderConfig:
        """The decoder of ``config``, whose fields these are, with this router."""
        shared: SharedConfig | None = None
        if self.num_shared_experts:
            shared = SharedConfig(
                inner_size=self.moe_intermediate_size * self.num_shared_experts, name="shared_experts"
            )
        experts = ExpertsConfig(
            num_experts=self.num_experts,
            top_k=self.experts_per_token,
            inner_size=self.moe_intermediate_size,
            router=router,
            shared=shared,
            dense_layers=self.dense_layers,
        )
        num_more = self.num_mtp_layers if self.num_nextn_predict_layers is None else self.num_nextn_predict_layers
        return replace(
            self.latent_decoder(self.rope(config)),
            experts=experts,
            ignored=tuple(f"model.layers.{self.num_hidden_layers + layer}." for layer in range(num_more)),
        )
