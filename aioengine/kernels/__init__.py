"""Operations in torch. On a GPU they call the kernels in ``kernels.triton``; the torch code is their reference.

Letters of shapes. A file defines the others that it uses.

- T tokens: the rows of x. D hidden size, F inner size of an MLP.
- Linear layers: I inputs, O outputs, G groups of inputs that share a scale. O counts all rows of the weight. A gated
  layer computes silu(first half of the outputs) * (second half), [T, O / 2]: the gates come first.
- Attention: R rows, H query heads, K kv heads, E size of a head, N pages of the pool, S positions of a page.
- Experts: E experts, K experts per token, P = T * K pairs of token and expert.
- States: R rows, C channels, H heads, K and V sizes of keys and values, N slots of the pool.
"""
