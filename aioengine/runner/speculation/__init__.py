"""Drafts: tokens that are proposed for a row, and accepted or rejected in the same step.

Who decides:

- how many drafts a row may have: the scheduler (``scheduler.drafting``).
- which tokens they are: ``scheduler.ngrams`` when the step is planned, or ``DraftModel`` before it is launched.
- whether the step waits for the step in flight, and which rows get their drafts if not all fit into a graph:
  ``Proposer``.
- how the tokens are computed: ``ModelRunner._compute_drafts``, in a graph or without one.
- which drafts are accepted: ``Verifier``. It compares each draft with the token that is sampled at its position.

``StepDrafts`` has the drafts of a step, from its plan to its result. ``ModelRunner`` calls, in this order:

    launch    Proposer.propose        plan -> proposed drafts, on the host or only on the device
              Proposer.read           only if the drafts are on the device, and no graph can verify them there
              (forward of the rows, with drafts as their last tokens)
              Verifier.accept_on_device, or Verifier.verify         -> accepted drafts, now or when the step is read
              Proposer.launched       the draft model computes the prompts of the step
    collect   Proposer.collected      reads the tokens, unless ``propose`` of a later step has read them
                                      -> rejected drafts, for the scheduler

The tensors of a step with R rows, S of which sample, T tokens, and K drafts among them (D model size, V vocabulary):

- token ids [T]: the known tokens of each row, then its drafts. The token before the drafts may be only on the device.
- drafts of a draft model [K], until the host reads them. ``RowTable.last_tokens`` has them, too.
- in a graph, each token is a row: hidden states [T, D], logits [T, V], sampled tokens [T]. The host reads the sampled
  tokens, and the drafts that are only on the device.
- without a graph: hidden states [S, D] after the drafts, and [K, D] before each draft, and the logits of these S + K
  positions in groups of rows. The host reads the last token of each row.

A step may be launched before the host knows the tokens and the accepted drafts of the step in flight. ``proposer``
describes how. These fields mark values that the host or the scheduler does not know:

- ``RowTable.is_unread``, ``RowTable.is_upper_bound``: rows of the step that is being launched. ``Proposer.propose``
  sets them, and the graphs read them when the inputs of the step are written. ``RowTable.has_upper_bounds``: whether
  this may happen at all.
- ``StepDrafts.on_device``: the host does not know the drafts. ``StepDrafts.accepts_on_device``: the device accepts
  them, so the host does not know how many are accepted until it reads the step.
- ``RowTable.rejected``: how many drafts of each row the device rejected, in the last step in which it accepted drafts.
- ``Proposer._unread``: the launched steps whose tokens and accepted drafts were not read. ``Proposer._in_flight``:
  the launched steps that the scheduler has not collected.
- ``DraftedRequest.num_rejected``: the host knows the rejected drafts of a row, but the scheduler does not yet, so the
  positions in its plans are too high by this number.
"""
