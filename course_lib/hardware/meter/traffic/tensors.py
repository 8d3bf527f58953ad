"""What the meter knows of a tensor: where it lies, what was done to it, and which addresses an argument may touch.

How a byte finds its tensor. When a kernel starts, every pointer argument gets a number in the sixteen address bits that
no machine uses. Pointer arithmetic carries the number along, so a load knows which *parameter* it came from, even when
the address has wandered into a neighbouring tensor. The number is taken off again before memory is touched.
"""

from __future__ import annotations

import numpy as np
import torch

TAG_SHIFT = 48  # user addresses end below bit 48 on x86-64 and AArch64; the bits above carry the argument's number
ADDRESS_MASK = np.uint64((1 << TAG_SHIFT) - 1)
MAX_TAG = 0x7FFF  # leaves the sign bit alone, for kernels that turn a pointer into an int64 and back
MOST_SLOTS = 1 << 30  # of a storage's map, a byte each; the few accesses to a larger one are kept one by one
SECTOR_BYTES = 32  # the smallest piece a GPU's L2 hands out


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a view's first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


class View:
    """Where a tensor lies: its storage (kept alive, so that no address is given out twice), start and length."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()
        storage = tensor.untyped_storage()
        self.storage, self.storage_address, self.storage_bytes = storage, storage.data_ptr(), storage.nbytes()
        self.start = tensor.storage_offset() * tensor.element_size()  # bytes from the storage's start
        self.end = self.start + span_bytes(tensor)
        self.address = tensor.data_ptr()
        self.item_bytes = tensor.element_size()

    def contains(self, other: View) -> bool:
        same = self.storage_address == other.storage_address and self.tensor.device == other.tensor.device
        return same and self.start <= other.start and other.end <= self.end


class Footprint:
    """Which slots of a storage were loaded and which were stored, and how many bytes that moved in all."""

    def __init__(self, slots: int, slot_bytes: int):
        self.slot_bytes = slot_bytes
        self.bytes = {"load": 0, "store": 0, "atomic": 0}
        self.far = slots > MOST_SLOTS
        self.touched = {kind: np.zeros(0 if self.far else slots, dtype=bool) for kind in ("load", "store")}
        self._far_slots: dict[str, set[int]] = {"load": set(), "store": set()}  # where a map would fill the memory

    def add(self, kind: str, slots: np.ndarray, item_bytes: int) -> None:
        self.bytes[kind] += slots.size * item_bytes
        for past in range(0, item_bytes, self.slot_bytes):  # once, unless a pointer was cast to a wider type
            for touched in ("load", "store") if kind == "atomic" else (kind,):
                self._touch(touched, slots + past // self.slot_bytes)

    def _touch(self, kind: str, slots: np.ndarray) -> None:
        if self.far:
            self._far_slots[kind].update(slots.tolist())
        else:
            self.touched[kind][slots] = True

    def byte_map(self, kind: str) -> np.ndarray:
        return np.repeat(self.touched[kind], self.slot_bytes)

    def far_bytes(self, kind: str) -> set[int]:
        """Of a storage too large for a map, the bytes that were touched."""
        return {slot * self.slot_bytes + byte for slot in self._far_slots[kind] for byte in range(self.slot_bytes)}


class Row:
    """Counters of one tensor. Offsets are bytes from the storage's start.

    Attributes:
        whole: what all launches touched.
        in_launch: what the launch under way did; None where it has touched nothing yet.
    """

    def __init__(self, view: View, name: str, parameter: str | None, count_sectors: bool):
        self.view, self.name, self.count_sectors = view, name, count_sectors
        self.parameters = {parameter: None} if parameter else {}  # an ordered set
        self.calls = {"load": 0, "store": 0, "atomic": 0}
        self.atomic_lanes = 0
        self.sector_bytes = 0
        self.whole = self._footprint()
        self.in_launch: Footprint | None = None

    def _footprint(self) -> Footprint:
        slot_bytes = self.view.item_bytes  # the resolution of the maps
        return Footprint(-(-self.view.storage_bytes // slot_bytes), slot_bytes)

    def add(self, kind: str, offsets: np.ndarray, item_bytes: int) -> None:
        self.calls[kind] += 1
        if kind == "atomic":
            self.atomic_lanes += offsets.size
        if self.in_launch is None:
            self.in_launch = self._footprint()
        slots = offsets.view(np.int64) // self.whole.slot_bytes
        for footprint in (self.whole, self.in_launch):
            footprint.add(kind, slots, item_bytes)
        if self.count_sectors and kind == "load":
            self.sector_bytes += SECTOR_BYTES * np.unique(offsets // np.uint64(SECTOR_BYTES)).size


class Argument:
    """One pointer argument of the running kernel: the addresses it may touch, its number included."""

    def __init__(self, tag: int, parameter: str, view: View, address: int, row: Row):
        self.parameter, self.view, self.row = parameter, view, row
        self.low = (tag << TAG_SHIFT) + address
        self.high = self.low + (view.end - view.start)
        self.origin = np.uint64(self.low - view.start)  # where the storage starts; never below the tag, as low >= start
