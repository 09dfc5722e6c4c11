"""NumPy arrays of integers on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]
