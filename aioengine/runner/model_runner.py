"""ModelRunner: computes plans with a model, and samples token ids.

R rows of a step, S rows that sample, K drafts of the step, N positions, D model size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from aioengine.attention._base import AttentionBackend, CapturableAttention
from aioengine.kernels.arrays import Ints64
from aioengine.layers.ranks import RankGroup
from aioengine.models._base import Model
from aioengine.protocol.columns import Extra, TokenColumns
from aioengine.protocol.messages import Control, Fact, Reply
from aioengine.runner import logits as logits_processors
from aioengine.runner.constrained_rows import ConstrainedRows
from aioengine.runner.custom_processors import CustomProcessors
from aioengine.runner.failed_rows import FailedRows
from aioengine.runner.graphs.encoder_graphs import EncoderGraphs
from aioengine.runner.graphs.piece_graphs import PieceGraphs
from aioengine.runner.hidden_states import HiddenStates
from aioengine.runner.images import images_of
from aioengine.runner.inputs import InputBuilder, StepRows
from aioengine.runner.kv_pool import KVPool
from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.logprobs import Logprobs
from aioengine.runner.lora.pool import AdapterPool
from aioengine.runner.page_tables import PageTables
from aioengine.runner.pooler import PooledRows, Pooler
from aioengine.runner.request_row import GrammarSource, SampledRows, needs_only_temperature, why_no_token
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.sampler import FAILED, RankSampler, Sampler
from aioengine.runner.speculation.draft_model import DraftModel, DraftParts
from aioengine.runner.speculation.proposer import Proposer, ReceivedDrafts
from aioengine.runner.speculation.step_drafts import NO_DRAFTS, StepDrafts
from aioengine.runner.speculation.verifier import SampledTokens, Verifier, must_sample_one_by_one
from aioengine.runner.state_pool import StatePool
from aioengine.runner.ticket import Ticket
from aioengine.runner.timing import profiled
from aioengine.runner.transfer import Readback
from aioengine.scheduler.plan import Row, StepPlan, StepResult
from aioengine.settings.config import Settings
from aioengine.settings.memory_model import SAMPLED_ROWS

if TYPE_CHECKING:
    from aioengine.runner.graphs.decode_graphs import DecodeGraphs
    from aioengine.runner.sampling.device_sampler import DeviceSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """The settings, and the parts of a runner after the weights are loaded.

    Attributes:
        adapters: None if LoRA is not enabled.
        states: None if the model has no states.
        ranks: None if there is one rank.
        draft: None if there is no draft model.
        workspace: memory of the attention backend whose address CUDA graphs contain; None: there is none.
    """

    settings: Settings
    model: Model
    attention: AttentionBackend
    kv_pool: KVPool
    vocab_size: int
    device: torch.device
    adapters: AdapterPool | None
    states: StatePool | None
    ranks: RankGroup | None = None
    draft: DraftParts | None = None
    workspace: Tensor | None = None


class ModelRunner:
    """Computes plans: synchronously on a CPU, queued on a GPU.

    A step is computed by the CUDA graph of a decode step if one fits (``_decode_graphs``). Otherwise ``_run_model``
    computes it in one of three ways.

    A row that cannot be computed or sampled fails alone: its uid is in ``StepResult.failed`` of each plan with this row
    until the request is closed.

    Attributes:
        facts, adapters, controls: see ``scheduler.runner.Runner``.
    """

    def __init__(self, parts: DeviceParts, facts: dict[str, Fact]) -> None:
        self.facts = facts
        self.adapters = parts.adapters
        self.controls: dict[str, Callable[[Control], Reply]] = {}
        self._model = parts.model
        self._attention = parts.attention
        settings, pool = parts.settings, parts.kv_pool
        self._pools = [pool, *(() if parts.draft is None else parts.draft.pools)]
        if parts.states is not None and parts.device.type == "cpu":  # on a GPU, graphs need its addresses
            self._pools.append(parts.states)
        self._workspace = parts.workspace
        max_rows = settings.scheduler.max_running
        num_embeddings = parts.model.vocab_size
        vocab_size = self._vocab_size = min(parts.vocab_size, num_embeddings)
        self._custom = CustomProcessors(settings.runner.logits_processors, vocab_size=vocab_size)
        processors = logits_processors.in_order([self._custom])
        # Pages of the longest request. Steps in flight never compute positions after the context length. With page
        # groups, a request frees pages, so over time it may have more pages than the pool.
        num_pages = -(-settings.model.context_length // pool.page_size)
        if pool.groups is None:
            num_pages = min(num_pages, pool.num_pages)
        self._table = RowTable(
            page_tables=PageTables(max_rows=max_rows, max_row_pages=num_pages, groups=pool.groups),
            num_embeddings=num_embeddings,
            device=parts.device,
            processors=processors,
            max_rows=max_rows,
            images=images_of(parts.model, max_rows=max_rows, device=parts.device),
            group_by_adapter=None if parts.adapters is None else parts.adapters.group,
            max_drafts=settings.scheduler.max_drafts,
        )
        self._inputs = InputBuilder(self._table, parts.states, page_size=pool.page_size, num_embeddings=num_embeddings)
        sampler = _build_sampler(vocab_size, self._table, parts)
        self._ranks = parts.ranks
        self._sampler = sampler if parts.ranks is None else RankSampler(sampler, parts.ranks)
        self._send_plan: Callable[[StepPlan, Collection[int]], None] | None = None
        processor = sampler if settings.runner.logprobs_mode == "processed" else None
        self._logprobs = Logprobs(parts.model.compute_logits, self._table.upload, processor)
        self._hidden_states = HiddenStates(self._table.upload)
        self._pooler = Pooler(parts.model, settings.model.pooling.kind, self._table.upload)
        self._graphs: DecodeGraphs | None = None
        self.prompt_graphs: PieceGraphs | EncoderGraphs | None = None
        self._failed = FailedRows(self._table, parts.kv_pool)
        self._newest: Ticket | None = None  # until it is collected
        masks = next(processor for processor in processors if isinstance(processor, GrammarMask))
        # a GPU has no graph for rows of several tokens of a model with states
        may_force = parts.states is None or parts.device.type == "cpu"
        self._constrained = ConstrainedRows(masks, parts.device, may_force=may_force)
        self._proposer: Proposer | None = None
        self._verifier: Verifier | None = None
        if settings.scheduler.max_drafts:
            models = [parts.model] if parts.draft is None else [parts.model, parts.draft.model]
            has_windows = any(any(model.attention_shape.windows) for model in models)
            self._table.has_upper_bounds = parts.ranks is None and not has_windows  # the draft model copies this
            draft_model = None if parts.draft is None else DraftModel(parts.draft, self._table, sampler)
            kind = ReceivedDrafts if parts.ranks is not None and parts.ranks.rank else Proposer
            self._proposer = kind(self._table, draft_model, with_grammars=settings.scheduler.depth == 0)
            self._verifier = Verifier(
                table=self._table,
                sampler=sampler,
                kv_pool=pool,
                ranks=parts.ranks,
                compute_logits=self._compute_logits,
                logprobs=self._logprobs,
                hidden_states=self._hidden_states,
                errors=self._custom.errors,
            )

    @torch.inference_mode()
    def capture_graphs(self, max_rows: int, report: Callable[[int, int], None]) -> None:
        """Capture decode steps of up to ``max_rows`` rows as CUDA graphs.

        report: called with the numbers of captured and of all graphs.
        """
        from aioengine.runner.graphs.decode_graphs import DecodeGraphs  # imports Triton

        assert isinstance(self._attention, CapturableAttention)
        graphs = DecodeGraphs(
            self._model,
            self._attention,
            self._inputs,
            vocab_size=self._vocab_size,
            max_rows=max_rows,
            ranks=self._ranks,
        )
        graphs.capture(report)
        self._graphs = graphs
        self._constrained.max_tokens = graphs.max_rows
        if self._proposer is not None:
            self._proposer.capture_graphs(self._vocab_size, max_rows, report)
        self.facts["cuda_graph_sizes"] = " ".join(map(str, graphs.sizes))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Launch the step. On a CPU it is done when this returns.

        Opens and closes requests, proposes drafts, sends the plan to the other ranks, and computes the rows. Then it
        samples the next token of each row, and with drafts also the tokens at their positions.
        """
        if plan.closed or plan.new_rows:  # constraints must not be opened while masks are computed
            self._constrained.sample_deferred()
        with profiled("prepare"):
            self._open_and_close(plan)
            rows, drafts = self._propose(plan.rows)
        needs_logits = plan.needs_logits
        if self._send_plan is not None:
            needs_logits = not self._may_sample_together(rows)
            sent_rows = plan.rows if drafts is NO_DRAFTS else drafts.rows
            self._send_plan(replace(plan, rows=sent_rows, needs_logits=needs_logits), self._failed.reasons)
        with_outputs = [row.uid for row in plan.rows if row.outputs]
        reasons = self._failed.reasons
        failed = {row.uid: reasons[row.uid] for row in plan.rows if row.uid in reasons} if reasons else {}
        if not rows.requests:
            return Ticket(with_outputs, [], [], Readback(torch.empty(0, dtype=torch.int64)), failed, drafts=NO_DRAFTS)
        sampled, without_token = self._sampled_rows(rows, drafts)
        pooled = self._pooler.rows(plan, rows.requests) if without_token and self._table.num_pooled else None
        if drafts.proposed:
            values = self._compute_drafts(rows, sampled, drafts, pooled)
        else:
            values = Readback(self._compute(rows, sampled, pooled, needs_logits=needs_logits))
        logprobs = self._logprobs.take() if self._table.num_with_logprobs else None
        hidden_states = self._hidden_states.take() if self._table.num_with_hidden_states else None
        self._inputs.take_snapshots(plan.snapshots, rows)
        uids = [request.uid for request in sampled.requests]
        ticket = self._newest = Ticket(
            with_outputs, uids, without_token, values, failed, logprobs, hidden_states, pooled, drafts=drafts
        )
        if self._proposer is not None:
            self._proposer.launched(ticket)
        if self._table.num_with_grammar:
            self._constrained.note(ticket, drafts.after_accepted(sampled), drafts.followed)
        return ticket

    def use_grammars(self, grammars: GrammarSource) -> None:
        """Set the grammars that open the constraints of requests."""
        self._constrained.grammars = grammars

    def use_ranks(self, send_plan: Callable[[StepPlan, Collection[int]], None]) -> None:
        """Pass each plan to ``send_plan``, with the uids of failed requests, whose rows are not computed."""
        self._send_plan = send_plan

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the step and return its result."""
        if ticket is self._newest:
            self._newest = None
            self._constrained.sample_deferred()
        try:
            values = ticket.values.wait()
        except Exception:
            if self._proposer is not None:
                self._proposer.forget(ticket)
            raise
        extras, invalid = ([], set[int]()) if ticket.logprobs is None else ticket.logprobs.extras()
        for results in (ticket.hidden_states, ticket.pooled):
            if results is not None:
                extras += results.extras()
        if ticket.constrained:
            self._constrained.follow(ticket)
            self._constrained.begin_masks()
        if self._proposer is not None:
            self._proposer.collected(ticket, values)
        is_plain = not (ticket.failed or ticket.forced or ticket.repeated or invalid or ticket.drafts.planned)
        if is_plain and len(ticket.with_outputs) == len(ticket.sampled) and FAILED not in values:
            tokens = TokenColumns(ticket.with_outputs, values[: len(ticket.sampled)], None, extras)
            return StepResult(tokens, complete=ticket.complete)
        return self._result(ticket, values, invalid, extras)

    def _result(self, ticket: Ticket, values: list[int], invalid: set[int], extras: list[Extra]) -> StepResult:
        """Return the result of a step in which rows failed, or have no token or several tokens.

        values: ``Ticket.values``. invalid: uids of rows whose logprobs are not finite.
        """
        drafts = ticket.drafts
        value_of = dict(zip([*ticket.sampled, *ticket.without_token], values, strict=True))
        value_of |= dict.fromkeys(invalid, FAILED)
        failing = [uid for uid, value in value_of.items() if value == FAILED]
        requests = self._table.requests
        empty = [uid for uid in failing if uid in requests and self._constrained.allow_no_token(requests[uid])]
        errors = {
            uid: self._custom.errors.pop(uid, "") or why_no_token(requests.get(uid), is_empty=uid in empty)
            for uid in failing
        }
        for uid in requests.keys() & failing:  # the other requests were closed while the step was in flight
            self._failed.add(uid, errors[uid], is_poisoned=True)
        failed = {**ticket.failed, **errors}
        without_tokens = ticket.repeated.union(ticket.without_token).difference(failing)
        tokens = TokenColumns(extras=extras)
        for uid in ticket.with_outputs:
            new = (*drafts.accepted.get(uid, ()), value_of.get(uid, FAILED), *ticket.forced.get(uid, ()))
            tokens.add(uid, () if uid in without_tokens else new)
        num_proposed = {uid: len(ids) for uid, ids in drafts.proposed.items()}
        return StepResult(tokens, failed, ticket.complete, drafts.rejected, num_proposed, empty)

    def release_pools(self) -> None:
        """Free the memory of keys, values and states, until ``resume_pools``."""
        for pool in self._pools:
            pool.release()

    def resume_pools(self) -> None:
        for pool in self._pools:
            pool.resume()

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None or self.prompt_graphs is not None

    def drop_graphs(self) -> None:
        """Free the CUDA graphs and the workspace. Call ``resume_workspace`` and ``warmup.capture_graphs`` later."""
        self._graphs = self.prompt_graphs = None
        if self._workspace is not None:
            self._workspace.untyped_storage().resize_(0)

    def resume_workspace(self) -> None:
        """Allocate the workspace again. It is initialized with zeros."""
        if self._workspace is not None:
            self._workspace.untyped_storage().resize_(self._workspace.nbytes)
            self._workspace.zero_()

    def forget_features(self) -> None:
        """Compute the features of images again, because the weights have changed."""
        if self._table.images is not None:
            self._table.images.forget_features()

    def close(self) -> None:
        """Free the memory of the pool. May be called twice. No step can be launched after it."""
        if self.adapters is not None:
            self.adapters.close()
        self.release_pools()
        if self._inputs.states is not None:  # also on a GPU, because no graph will run
            self._inputs.states.release()

    def _open_and_close(self, plan: StepPlan) -> None:
        """Close and open requests, compute the features of images, and add new pages. A request with an error fails."""
        if plan.closed and self._newest is not None:
            uids, values = [*self._newest.sampled, *self._newest.without_token], self._newest.values
            indices = values.last_indices if isinstance(values, SampledTokens) else range(len(uids))
            self._failed.clean_after_step(dict(zip(uids, indices, strict=True)), values.source, plan.closed)
        for uid in plan.closed:
            self._failed.close(uid)
            if self._proposer is not None:
                self._proposer.close(uid)
        for opened in plan.new_rows:
            self._failed.close(opened.uid)
            try:
                self._inputs.open(opened)
                request = self._table.requests[opened.uid]
                if self._proposer is not None:
                    self._proposer.open(opened, request)
                if opened.sampling.grammar is not None:
                    self._constrained.open(opened, request)
            except (ValueError, TypeError, OverflowError) as error:
                self._failed.add(opened.uid, f"cannot open the request: {error}")
        if self._table.images is not None:
            for uid, error in self._table.images.encode(plan.rows).items():
                self._failed.add(uid, error)
        for row in plan.rows:
            request = self._table.requests.get(row.uid) if row.new_pages else None
            if request is not None:
                self._table.page_tables.add(request.row_index, row.new_pages)

    def _computable_rows(self, rows: list[Row]) -> StepRows:
        """Return the rows that can be computed. The requests of the other rows fail."""
        failed = self._failed.reasons
        columns = self._inputs.columns_of([row for row in rows if row.uid not in failed] if failed else rows)
        errors = self._inputs.find_wrong_ids(columns)
        if not errors:
            return columns
        for uid, error in errors.items():
            self._failed.add(uid, error)
        return self._inputs.columns_of([row for row in rows if row.uid not in failed])

    def _propose(self, planned: list[Row]) -> tuple[StepRows, StepDrafts]:
        """Return the computable rows with their proposed drafts, and the drafts."""
        proposer = self._proposer
        if proposer is None or proposer.is_plain_step(planned):
            return self._computable_rows(planned), NO_DRAFTS
        if any(row.num_drafts for row in planned):
            self._constrained.sample_deferred()
        planned = [row for row in planned if row.uid not in self._failed.reasons]
        may_overlap = self._graphs is not None and self._graphs.may_overlap(planned)
        drafts = proposer.propose(planned, may_overlap=may_overlap)
        rows = self._computable_rows(drafts.rows)
        if drafts.on_device is not None and not self._verifies_in_graph(rows):
            proposer.read(drafts, planned)
            rows = self._computable_rows(drafts.rows)
        return rows, drafts

    def _sampled_rows(self, rows: StepRows, drafts: StepDrafts) -> tuple[SampledRows, list[int]]:
        """Return the rows that sample, at the positions of their first sampled tokens, and the uids of the others."""
        requests, row_indices, positions = rows.requests, rows.row_indices, rows.starts + rows.counts
        without_token: list[int] = []
        if not rows.samples.all():
            without_token = [requests[i].uid for i in np.flatnonzero(~rows.samples).tolist()]
            requests = [requests[i] for i in np.flatnonzero(rows.samples).tolist()]
            row_indices, positions = row_indices[rows.samples], positions[rows.samples]
        if drafts.proposed:
            positions -= drafts.counts(requests)
        return self._table.sampled(requests, row_indices, positions), without_token

    def _decode_graphs(self, rows: StepRows, *, has_drafts: bool = False) -> DecodeGraphs | None:
        """Return the graphs of decode steps if one of them can compute these rows."""
        graphs = self._graphs
        return graphs if graphs is not None and graphs.fits(rows, has_drafts=has_drafts) else None

    def _compute(
        self, rows: StepRows, sampled: SampledRows, pooled: PooledRows | None, *, needs_logits: bool
    ) -> Tensor | None:
        """Run forward and sampling of at least one row. Return ``Ticket.values`` [R]; None: sampled later."""
        if (graphs := self._decode_graphs(rows)) is not None:
            return self._replay(graphs, rows, sampled, needs_logits=needs_logits)
        self._constrained.sample_deferred()
        hidden, _ = self._forward(rows)
        if pooled is not None:
            self._pooler.pool(hidden, pooled)
        if len(sampled.requests) == len(rows.requests):
            return self._sample_or_defer(hidden, sampled)
        if not sampled.requests:
            return self._values_without_token(hidden)
        sampled_indices = self._table.upload(np.flatnonzero(rows.samples))
        token_ids = self._sample_or_defer(hidden[sampled_indices], sampled, is_urgent=True)
        assert token_ids is not None
        return torch.cat([token_ids, self._values_without_token(hidden, rows)])

    def _values_without_token(self, hidden: Tensor, rows: StepRows | None = None) -> Tensor:
        """Return ``Ticket.values`` [R - S] of the rows without a token, from hidden states [R, D].

        rows: None if no row samples.

        If any position of a row is not finite, attention makes its last position non-finite too. ``FailedRows`` lists
        the exceptions.
        """
        if rows is not None:
            hidden = hidden[self._table.upload(np.flatnonzero(~rows.samples))]
        return torch.where(hidden.isfinite().all(-1), 0, FAILED)

    def _verifies_in_graph(self, rows: StepRows) -> bool:
        """Return whether all drafts of these rows can be verified at once in a CUDA graph."""
        if self._decode_graphs(rows, has_drafts=True) is None:
            return False
        return not any(must_sample_one_by_one(rows.requests, self._table.sampling[rows.row_indices]))

    def _compute_drafts(
        self, rows: StepRows, sampled: SampledRows, drafts: StepDrafts, pooled: PooledRows | None
    ) -> Readback:
        """Run forward, and sample at the positions of the drafts. Return ``Ticket.values`` [R]."""
        assert self._verifier is not None
        self._constrained.sample_deferred()
        self._constrained.follow()
        if (graphs := self._decode_graphs(rows, has_drafts=True)) is not None:
            num_drafts = None if drafts.on_device is None else drafts.counts(sampled.requests)
            step = graphs.replay_with_drafts(rows, sampled, num_drafts)
            if not any(must_sample_one_by_one(sampled.requests, sampled.records)):
                return self._verifier.accept_on_device(graphs, step, rows, sampled, drafts)
            before_drafts = step.hidden[self._table.upload(drafts.token_indices(rows))]
            hidden = step.hidden[self._table.upload(rows.token_ends - 1)]
        else:
            hidden, before_drafts = self._forward(rows, drafts)
        if pooled is not None:  # these rows have no graph
            self._pooler.pool(hidden, pooled)
        sampled_indices = self._table.upload(np.flatnonzero(rows.samples))
        values = self._verifier.verify(hidden[sampled_indices], before_drafts, sampled, drafts)
        token_ids = self._table.upload(np.array(values, dtype=np.int64))
        if len(values) < len(rows.requests):
            token_ids = torch.cat([token_ids, self._values_without_token(hidden, rows)])
        return Readback(token_ids)

    def _forward(self, rows: StepRows, drafts: StepDrafts | None = None) -> tuple[Tensor, Tensor]:
        """Run forward without a decode graph. Return the hidden states [R, D] from which rows are sampled or pooled,
        and [K, D] before each draft. Collect the requested hidden states and logprobs of prompts.
        """
        prompts = self._logprobs.find_prompts(rows) if self._table.num_with_logprobs else None
        hidden_states = self._hidden_states.find_prompts(rows) if self._table.num_with_hidden_states else None
        extra_outputs = [extra.token_indices for extra in (hidden_states, prompts) if extra is not None]
        if drafts is not None:
            extra_outputs.append(drafts.token_indices(rows))
        num_outputs = self._num_padded(len(rows.requests))
        hidden = self._run_model(rows, num_outputs, np.concatenate(extra_outputs) if extra_outputs else None)
        # the extra outputs follow the rows and their padding
        first_prompt = num_outputs + (0 if hidden_states is None else len(hidden_states.token_indices))
        first_draft = first_prompt + (0 if prompts is None else len(prompts.token_indices))
        if hidden_states is not None:
            self._hidden_states.add_prompts(hidden[num_outputs:first_prompt], hidden_states)
        if prompts is not None:
            self._logprobs.add_prompts(hidden[first_prompt:first_draft], prompts)
        return self._pooler.states(hidden, rows), hidden[first_draft:]

    def _run_model(self, rows: StepRows, num_outputs: int, extra_outputs: Ints64 | None) -> Tensor:
        """Run forward in the first of these ways that supports the step:

        - one CUDA graph: short steps of an encoder,
        - CUDA graphs, with attention launched between them (in pieces): steps with prompts,
        - kernel by kernel.

        Return the hidden states [N, D] of the token that the pooler selects in each row, and from index ``num_outputs``
        on, of the tokens ``extra_outputs`` [N - num_outputs]. If the pooler needs all tokens, return their states.
        """
        graphs, encoder_step = self.prompt_graphs, None
        if isinstance(graphs, EncoderGraphs) and self._table.adapters.slots(rows.row_indices) is None:
            encoder_step = graphs.find(len(rows.requests), int(rows.token_ends[-1]))
        with profiled("prepare"):
            inputs, batch = self._inputs.build(
                self._model,
                rows,
                self._pooler.outputs(rows),
                num_outputs=num_outputs,
                extra_outputs=extra_outputs,
                on_host=encoder_step is not None,
            )
        if encoder_step is not None:
            return encoder_step.replay(inputs, batch)
        is_embedded_by_user = inputs.token_ids is None and not self._model.input_spec.embeddings
        has_graph_inputs = inputs.outputs is not None and inputs.deepstack is None and not is_embedded_by_user
        if graphs is not None and not isinstance(graphs, EncoderGraphs) and has_graph_inputs:
            num_needed = len(rows.requests) if extra_outputs is None else num_outputs + len(extra_outputs)
            if graphs.fits(batch, num_needed):
                return graphs.replay(inputs, batch, num_needed)
        with profiled("prepare"):
            self._attention.prepare(batch)
        return self._model.forward(inputs, self._attention)

    def _may_sample_together(self, rows: StepRows) -> bool:
        """Return whether the ranks can sample the tokens of a step without gathering the logits."""
        if self._ranks is None or self._ranks.sampling is None or self._table.num_with_logprobs:
            return False
        return needs_only_temperature(self._table.sampling[rows.row_indices])

    def _num_padded(self, num_rows: int) -> int:
        """Return the row count of the next larger captured decode step. For a matmul with a new row count, CUDA may
        load a kernel, which waits for all queued work.
        """
        return num_rows if self._graphs is None else self._graphs.padded(num_rows)

    def _replay(
        self, graphs: DecodeGraphs, rows: StepRows, sampled: SampledRows, *, needs_logits: bool
    ) -> Tensor | None:
        """Run a decode step that has a graph. Return token ids [R]; None: they are sampled later."""
        step = graphs.replay(rows, sampled, when_ready=self._constrained.sample_deferred)
        if step.masked is not None:
            return self._constrained.sample_masked(graphs, step, sampled)
        if step.token_ids is None or needs_logits:
            return self._sample_or_defer(step.hidden, sampled, graphs.logits(step) if step.order is None else None)
        if self._table.num_with_logprobs:
            self._logprobs.add_sampled(graphs.logits(step), sampled, step.token_ids, step.order)
        if self._table.num_with_hidden_states:
            self._hidden_states.add_sampled(step.hidden, sampled)
        return step.token_ids

    def _sample_or_defer(
        self, hidden: Tensor, rows: SampledRows, logits: Tensor | None = None, *, is_urgent: bool = False
    ) -> Tensor | None:
        """Return the token ids [S] from ``_sample``; None: they are sampled later, because masks depend on tokens that
        are not known yet.

        is_urgent: wait for these tokens instead.
        """
        sample = partial(self._sample, hidden, rows, logits)
        has_extras = self._table.num_with_logprobs or self._table.num_with_hidden_states
        is_urgent = is_urgent or bool(has_extras)
        return self._constrained.sample_or_defer(rows, sample, max_rows=SAMPLED_ROWS, is_urgent=is_urgent)

    def _sample(self, hidden: Tensor, rows: SampledRows, logits: Tensor | None = None) -> Tensor:
        """Sample token ids [S] from hidden states [S, D], and store them. logits: [>= S, V] if already computed."""
        num_rows = len(hidden)
        if self._table.num_with_hidden_states:
            self._hidden_states.add_sampled(hidden, rows)
        logits = self._compute_logits(hidden) if logits is None else logits[:num_rows]
        with profiled("sample"):
            token_ids = self._sampler.sample(logits, rows)
            if self._table.num_with_logprobs:
                self._logprobs.add_sampled(logits, rows, token_ids)
            self._table.write_tokens(rows, token_ids)
        return token_ids

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [N, V] from hidden states [N, D]."""
        num_rows = len(hidden)
        num_missing = self._num_padded(num_rows) - num_rows
        padded = functional.pad(hidden, (0, 0, 0, num_missing)) if num_missing else hidden
        return self._model.compute_logits(padded)[:num_rows]


def _build_sampler(vocab_size: int, table: RowTable, parts: DeviceParts) -> Sampler | DeviceSampler:
    if parts.device.type == "cpu":
        return Sampler(vocab_size, table)
    from aioengine.runner.sampling.device_sampler import DeviceSampler

    return DeviceSampler(vocab_size, table, 1 if parts.ranks is None else parts.ranks.size)
