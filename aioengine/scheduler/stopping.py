"""When a request ends by a token: stop tokens and lengths. (Stop strings are found in the detokenizer.)"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aioengine.protocol.messages import FinishCode, RequestKind

if TYPE_CHECKING:
    from aioengine.protocol.messages import Submit
    from aioengine.scheduler.request import Request


class Finish(NamedTuple):
    """Why a request ends, as in ``Ended``."""

    code: FinishCode
    matched: int | str | None = None
    stage: str = ""
    message: str = ""


def finish_of(request: Request) -> Finish | None:
    """Whether the newest token ends the request. A stop token beats the length on the same token.

    A stop token acts when at least ``min_new_tokens`` output tokens stand before it.
    """
    token_id = request.token_ids[-1]
    if token_id in request.stop_ids and request.num_output > request.submit.limits.min_new_tokens:
        return Finish(FinishCode.STOP, token_id)
    if len(request.token_ids) >= request.max_tokens:
        return Finish(FinishCode.LENGTH)
    return None


def num_wanted(submit: Submit) -> int:
    """The most tokens that a request asks for, prompt and output together."""
    num_output = 0 if submit.kind is RequestKind.POOL else submit.limits.max_new_tokens
    return len(submit.prompt_token_ids) + num_output


def refusal_of(submit: Submit, *, context_length: int, pool_tokens: int) -> Finish | None:
    """Whether a request ends before it begins: it cannot fit, asks for nothing, or has nothing to go on."""
    num_prompt = len(submit.prompt_token_ids)
    if num_prompt == 0:
        return Finish(FinishCode.FAILED, stage="schedule", message="the prompt has no tokens; give at least one")
    is_pooled = submit.kind is RequestKind.POOL
    if submit.limits.max_new_tokens <= 0 and not is_pooled:
        return Finish(FinishCode.LENGTH)
    least = num_prompt if is_pooled else num_prompt + 1
    if least > context_length:
        return Finish(
            FinishCode.TOO_LARGE,
            message=f"the prompt has {num_prompt} tokens, the context holds {context_length} with the output; "
            "shorten it",
        )
    if least > pool_tokens:
        return Finish(
            FinishCode.TOO_LARGE,
            message=f"the prompt has {num_prompt} tokens, the KV pool holds {pool_tokens} with the output; "
            "shorten it or raise max_total_tokens",
        )
    return None
