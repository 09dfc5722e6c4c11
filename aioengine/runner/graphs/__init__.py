"""CUDA graphs: the host launches all kernels of a step at once.

A graph has a fixed number of rows or tokens (``ladder``), and reads and writes memory with fixed addresses. For each
step, the host chooses the smallest graph that is large enough, writes the inputs of the step and padding to this
memory, and replays the graph.

``decode_graphs``: steps in which each row has one token, or a few known tokens after its prompt.

- Captured: the whole step, from reading the last tokens on the device to storing the next ones.
- Inputs: ``token_rows`` makes each token a row of the graph, and chooses where the device reads and stores it.
  ``decode_inputs`` writes these rows. With many shared pages, ``shared_prefixes`` reorders them.
- Padding: rows that attend to one position on the padding page and store no token.
- Not used: if a row returns no token, or if there are too many rows (``DecodeGraphs.fits``).

``piece_graphs``: steps with prompts.

- Captured: all operations except attention, in pieces between the attention of two layers.
- Inputs: ``PaddedInputs``. Padding: tokens that belong to no row; their keys and values go to the padding page.
- Not used: if the step has more tokens than ``longest_graph``, too many outputs (``PieceGraphs.fits``), prompts given
  as embeddings, or images with features for several layers (``deepstack``, see ``ModelRunner._forward``).

``encoder_graphs``: short steps of encoders.

- Captured: the whole step.
- Inputs: ``EncoderStep``. Padding: tokens that belong to no row.
- Not used: for longer steps, and with adapters.

There are no graphs on a CPU, with ``disable_cuda_graph``, and if the attention backend (``attention._base``) or
transformers' code of the model cannot be captured (``runner.warmup``).
"""
