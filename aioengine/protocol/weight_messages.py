"""The control calls for new weights."""

from __future__ import annotations

from typing import Final

CHECK_WEIGHTS: Final = "check_weights"
"""Read and check new weights in a thread, while steps run. Changes nothing. Argument: the ``path`` of a checkpoint."""

LOAD_WEIGHTS: Final = "load_weights"
"""Replace the weights between two steps. Arguments: ``path``, and ``weights``, the ``LoadedWeights`` as JSON."""
