"""What stands between Triton's interpreter and memory, and lets no access outside a tensor through."""

from __future__ import annotations

import numpy as np

from .accounts import Accounts


class MemoryShim:
    """Stands in for the compiled module through which Triton's interpreter touches memory.

    Its four functions take plain NumPy arrays and have not changed from Triton 3.6 to 3.9, and every load, store and
    atomic, by pointer or by descriptor, ends in one of them.
    """

    def __init__(self, memory, accounts: Accounts):
        self._memory, self._accounts = memory, accounts
        self._scratch = np.zeros(16, dtype=np.uint8)  # where a wild compare-and-swap is sent instead

    def __getattr__(self, name):  # enumerations and arithmetic pass through
        return getattr(self._memory, name)

    def load(self, pointers, mask, other, dtype):
        mask = _fitted(mask, pointers)
        addresses, wild = self._accounts.book("load", pointers, mask, np.dtype(dtype).itemsize)
        if wild is not None:
            mask = mask & ~wild
            if np.dtype(dtype).kind == "f":  # a value nobody may mistake for data; integers keep what masking gives
                other = np.where(wild, np.array(np.nan, dtype=dtype), other)
        return self._memory.load(addresses, mask, other, dtype)

    def store(self, pointers, value, mask):
        mask = _fitted(mask, pointers)
        addresses, wild = self._accounts.book("store", pointers, mask, value.itemsize)
        return self._memory.store(addresses, value, mask if wild is None else mask & ~wild)

    def atomic_rmw(self, operation, pointers, value, mask, semantic):
        mask = _fitted(mask, pointers)
        addresses, wild = self._accounts.book("atomic", pointers, mask, value.itemsize)
        return self._memory.atomic_rmw(operation, addresses, value, mask if wild is None else mask & ~wild, semantic)

    def atomic_cas(self, pointers, expected, value, semantic):
        everyone = np.ones(np.shape(pointers), dtype=bool)
        addresses, wild = self._accounts.book("atomic", pointers, everyone, value.itemsize)
        if wild is not None:  # compare-and-swap has no mask, so a wild lane works on a scratch word
            addresses = np.where(wild, np.uint64(self._scratch.ctypes.data), addresses)
        return self._memory.atomic_cas(addresses, expected, value, semantic)


def _fitted(mask: np.ndarray, pointers: np.ndarray) -> np.ndarray:
    mask = np.asarray(mask, dtype=bool)
    return mask if mask.shape == np.shape(pointers) else np.broadcast_to(mask, np.shape(pointers))
