"""Lanes that a load leaves undefined: masked off, with no ``other=``. The interpreter gives 0 there; a GPU need not."""

from __future__ import annotations

import numpy as np

from .accounts import Accounts, Moment
from .places import kernel_line

# Triton's name of a float type: ours, and NumPy's types of its bits and of its values in the interpreter.
_FLOATS: dict[str, tuple[str, type, type]] = {
    "fp16": ("float16", np.uint16, np.float16),
    "bf16": ("bfloat16", np.uint16, np.uint16),
    "fp32": ("float32", np.uint32, np.float32),
    "fp64": ("float64", np.uint64, np.float64),
}


class UndefinedLanes:
    """Fills such lanes with a number of the asker's: ``bits.float32`` and its like, each as an integer."""

    def __init__(self, bits: object, accounts: Accounts):
        self._bits, self._accounts = bits, accounts
        self._seen: dict[tuple[str, str, int], Moment] = {}

    @property
    def seen(self) -> list[tuple[str, str, int]]:
        """Kernel, file and line of each such load, in order."""
        return sorted(self._seen, key=self._seen.__getitem__)

    def filling(self, type_name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """What a load of this type gives in place of a missing ``other=``; None where nothing was asked for."""
        if type_name not in _FLOATS:
            return None
        ours, integer, value = _FLOATS[type_name]
        bits = getattr(self._bits, ours, None)
        if bits is None:
            return None
        file, line = kernel_line()
        load, moment = (self._accounts.kernel, file, line), self._accounts.moment()
        self._seen[load] = min(self._seen.get(load, moment), moment)
        return np.full(shape, bits, dtype=integer).view(value)
