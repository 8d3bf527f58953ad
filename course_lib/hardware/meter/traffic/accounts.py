"""Counting: every access is booked to its tensor, and what reaches outside is found and refused.

An access by a pointer with a number belongs to that argument. Pointers without one (built from integers in memory) are
looked up by address among all tensors known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from .contention import end_launch
from .places import kernel_line
from .tensors import ADDRESS_MASK, MAX_TAG, TAG_SHIFT, Argument, Row, View

MAX_RECORDS = 64  # distinct (kernel, line, tensor) places kept; further ones are only counted


# A launch's number, a program of it, and an access's number in that program: sorted by these, what was seen does not
# depend on the order in which programs ran.
Moment = tuple[int, tuple[int, int, int], int]


@dataclass
class Wild:
    """Accesses outside a tensor at one place of the source, added up. ``row`` is None for memory of no tensor."""

    kind: str
    row: Row | None
    parameter: str | None
    kernel: str
    file: str
    line: int
    moment: Moment
    length: int
    programs: set[tuple[int, int, int]] = field(default_factory=set)
    lanes: int = 0
    low: int | None = None
    high: int | None = None

    @property
    def program(self) -> tuple[int, int, int]:
        """The first that did it, where programs run in ascending order."""
        return self.moment[1]


# Of one access, the lanes of one argument (None: of no argument): the element each reaches, counted from the tensor's
# first one (an address where there is no argument), and whether it lies inside.
Reached = tuple["Argument | None", np.ndarray, np.ndarray]


class Listener(Protocol):
    """Is told everything in order, where sums are not enough. What it raises ends the launch."""

    def begun(self, kernel: str, arguments: list[Argument]) -> None:
        """A launch has its arguments."""

    def launched(self, kernel: str, grid: tuple[int, int, int]) -> None:
        """And now its grid."""

    def accessed(
        self, kind: str, program: tuple[int, int, int], item_bytes: int, reached: list[Reached], file: str, line: int
    ) -> None:
        """A load, a store or an atomic, of no lane at all where everything is masked off."""

    def multiplied(self, left: tuple[int, ...], right: tuple[int, ...], bits: tuple[int, int]) -> None:
        """A `tl.dot` of tiles of these shapes, and the bits of an element of each."""


class Accounts:
    """The rows of all tensors, and the arguments of the kernel that runs.

    Args:
        count_sectors: whether loads are also counted in sectors.
        other_views: gives (name, view) of the tensors that the meter was told of, and of those allocated since.
        program: gives the program that runs.
        listener: is told of every launch and every access.
    """

    def __init__(
        self,
        count_sectors: bool,
        other_views: Callable[[], tuple[Iterable[tuple[str, View]], Iterable[tuple[str, View]]]],
        program: Callable[[], tuple[int, int, int]],
        listener: Listener | None = None,
    ):
        self._listener = listener
        self._count_sectors, self._other_views, self._program = count_sectors, other_views, program
        self.rows: list[Row] = []
        self.wild: dict[tuple, Wild] = {}
        self.wild_unlisted = 0
        self._contended_bytes = 0
        self.kernel = ""
        self._launch, self._running, self._access = 0, (0, 0, 0), 0
        self.forget_arguments()

    def listen(self, listener: Listener | None) -> None:
        self._listener = listener

    def multiplied(self, left: tuple[int, ...], right: tuple[int, ...], bits: tuple[int, int]) -> None:
        if self._listener is not None:
            self._listener.multiplied(left, right, bits)

    def contended_bytes(self) -> int:
        """Bytes for which the programs of a launch contended, those of all launches so far added up."""
        self._contended_bytes += end_launch(self.rows)
        return self._contended_bytes

    # ---- a launch begins

    def forget_arguments(self) -> None:
        self._arguments: list[Argument | None] = [None]  # by tag, of the running launch; tag 0 is "unknown"
        self._host_arguments: dict[int, Argument] = {}  # by id of the interpreter's host tensor

    def begin(self, kernel: str, given: dict[str, object], host: dict[str, object]) -> None:
        """A launch's arguments by parameter, as passed and as the interpreter's copies on the host."""
        self.contended_bytes()  # the launch before has ended
        self.kernel = kernel
        self._launch, self._access = self._launch + 1, 0
        self.forget_arguments()
        for parameter, value in given.items():
            self._register(parameter, value, host[parameter])
        if self._listener is not None:
            self._listener.begun(kernel, [argument for argument in self._arguments if argument is not None])

    def _register(self, parameter: str, value, host) -> None:
        if isinstance(value, tuple):
            for index, (item, host_item) in enumerate(zip(value, host)):
                self._register(f"{parameter}[{index}]", item, host_item)
            return
        if not hasattr(value, "data_ptr") and hasattr(value, "block_shape"):  # a TensorDescriptor made by the launcher
            value, host = value.base, host.base
        tensor = value if isinstance(value, torch.Tensor) else getattr(value, "base", None)  # TensorWrapper has a base
        if not isinstance(tensor, torch.Tensor) or not hasattr(host, "data_ptr"):
            return
        tag, address = len(self._arguments), host.data_ptr()
        if tag > MAX_TAG or address >> TAG_SHIFT:
            return  # no room for a number: such a pointer is looked up by its address
        view = View(tensor)
        row = self._row_for(view, parameter, f"{self.kernel}.{parameter}")
        argument = Argument(tag, parameter, view, address, row)
        self._arguments.append(argument)
        self._host_arguments[id(host)] = argument

    def tagged_address(self, host_argument: object) -> int | None:
        """The address of a tensor on the host with its argument's number, None for what has none."""
        argument = self._host_arguments.get(id(host_argument))
        return None if argument is None else argument.low

    def _row_for(self, view: View, name: str, parameter: str | None) -> Row:
        """One row per tensor: the same view under any name, or the same storage under the same parameter."""
        for row in self.rows:
            if row.view.storage_address != view.storage_address or row.view.tensor.device != view.tensor.device:
                continue
            same_view = (row.view.start, row.view.end) == (view.start, view.end)
            if same_view or (parameter is not None and parameter in row.parameters):
                if parameter:
                    row.parameters[parameter] = None
                return row
        self.rows.append(Row(view, name, parameter, self._count_sectors))
        return self.rows[-1]

    # ---- an access

    def moment(self) -> Moment:
        """When, in ascending order, the access now under way would be."""
        program = self._program()
        if program != self._running:
            self._running, self._access = program, 0
        return self._launch, program, self._access

    def book(
        self, kind: str, pointers: np.ndarray, mask: np.ndarray, item_bytes: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Counts one access. Returns the plain addresses, and None or the lanes (bool, like mask) that must not run."""
        _, program, _ = self.moment()
        self._access += 1
        active = pointers.ravel() if mask.all() else pointers[mask]
        allowed = self._booked(kind, active, item_bytes) if active.size else None
        if self._listener is not None:
            reached = self._reached(active, allowed) if active.size else []
            self._listener.accessed(kind, program, item_bytes, reached, *kernel_line())
        if allowed is None:
            return pointers & ADDRESS_MASK, None
        wild = np.zeros(mask.shape, dtype=bool)
        wild[mask] = ~allowed
        return pointers & ADDRESS_MASK, wild

    def _booked(self, kind: str, active: np.ndarray, item_bytes: int) -> np.ndarray | None:
        """Which lanes are inside; None where all are."""
        low, high = int(active.min()), int(active.max())
        tag = low >> TAG_SHIFT
        argument = self._arguments[tag] if tag < len(self._arguments) else None
        if argument is not None and argument.low <= low and high + item_bytes <= argument.high:
            argument.row.add(kind, active - argument.origin, item_bytes)
            return None
        allowed = self._book_lane_by_lane(kind, active, item_bytes)
        return None if allowed.all() else allowed

    def _reached(self, active: np.ndarray, allowed: np.ndarray | None) -> list[Reached]:
        """The lanes of an access by argument, in the order of the arguments."""
        inside = np.ones(active.size, dtype=bool) if allowed is None else allowed
        tags = active >> np.uint64(TAG_SHIFT)
        reached: list[Reached] = []
        for tag in np.unique(tags).tolist():
            lanes = tags == tag
            argument = self._arguments[tag] if tag < len(self._arguments) else None
            if argument is None:
                reached.append((None, active[lanes].astype(np.int64), inside[lanes]))
            else:
                elements = (active[lanes].astype(np.int64) - argument.low) // argument.view.item_bytes
                reached.append((argument, elements, inside[lanes]))
        return reached

    def _book_lane_by_lane(self, kind: str, active: np.ndarray, item_bytes: int) -> np.ndarray:
        """For accesses that leave their tensor or mix several; returns which lanes are inside."""
        allowed = np.zeros(active.size, dtype=bool)
        tags = active >> np.uint64(TAG_SHIFT)
        size = np.uint64(item_bytes)
        for tag in np.unique(tags).tolist():
            lanes = np.flatnonzero(tags == tag)
            argument = self._arguments[tag] if tag < len(self._arguments) else None
            if argument is None:
                allowed[lanes] = self._book_by_address(kind, active[lanes], item_bytes)
                continue
            values = active[lanes]
            inside = (values >= np.uint64(argument.low)) & (values + size <= np.uint64(argument.high))
            allowed[lanes] = inside
            if inside.any():
                argument.row.add(kind, values[inside] - argument.origin, item_bytes)
            if not inside.all():
                elements = (values[~inside].astype(np.int64) - argument.low) // argument.view.item_bytes
                self._record(kind, argument.row, argument.parameter, argument.view, elements)
        return allowed

    def _book_by_address(self, kind: str, values: np.ndarray, item_bytes: int) -> np.ndarray:
        allowed = np.zeros(values.size, dtype=bool)
        for name, view in self._known_views():
            start, end = view.address, view.address + view.end - view.start
            inside = (values >= np.uint64(start)) & (values + np.uint64(item_bytes) <= np.uint64(end)) & ~allowed
            if inside.any():
                row = self._row_for(view, name, None)
                row.add(kind, values[inside] - np.uint64(view.address - view.start), item_bytes)
                allowed |= inside
        if not allowed.all():
            self._record(kind, None, None, None, values[~allowed].astype(np.int64))
        return allowed

    def _known_views(self) -> Iterator[tuple[str, View]]:
        """Tensors on the host that a pointer without a number may belong to."""
        passed = [(row.name, row.view) for row in self.rows]
        named, allocated = self._other_views()
        yield from ((name, view) for name, view in (*named, *passed, *allocated) if view.tensor.device.type == "cpu")

    def _record(
        self, kind: str, row: Row | None, parameter: str | None, view: View | None, elements: np.ndarray
    ) -> None:
        file, line = kernel_line()
        moment = self.moment()
        key = (kind, id(row), parameter, self.kernel, file, line)
        record = self.wild.get(key)
        if record is None:
            if len(self.wild) >= MAX_RECORDS:
                self.wild_unlisted += elements.size
                return
            length = 0 if view is None else (view.end - view.start) // view.item_bytes
            record = self.wild[key] = Wild(kind, row, parameter, self.kernel, file, line, moment, length)
        record.moment = min(record.moment, moment)
        record.programs.add(moment[1])
        record.lanes += elements.size
        if view is not None:
            low, high = int(elements.min()), int(elements.max())
            record.low = low if record.low is None else min(low, record.low)
            record.high = high if record.high is None else max(high, record.high)
