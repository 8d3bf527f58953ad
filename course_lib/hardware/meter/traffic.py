"""The traffic meter: every byte that a Triton kernel loads and stores, counted per tensor.

    with TrafficMeter() as meter:
        total = row_sum(x)
    print(meter.report())

The meter works where Triton *interprets* kernels (``TRITON_INTERPRET=1``): there each load and store is a call into one
small module, and this file stands in front of that module. Nothing here runs on a GPU, except :func:`record_launches`.

The interpreter also runs what no GPU can: :func:`record_variants` notes what a compiler would be given at each launch,
and :func:`refusal`, in a process that does not interpret, gives it to the compiler's front end.

How a byte finds its tensor. When a kernel starts, every pointer argument gets a number in the sixteen address bits that
no machine uses. Pointer arithmetic carries the number along, so a load knows which *parameter* it came from, even when
the address has wandered into a neighbouring tensor. The number is taken off again before memory is touched. Pointers
without a number (built from integers in memory) are looked up by address among all tensors known.

An access outside its tensor is recorded with kernel, line and program, and then *masked out*: the load gives NaN (0 for
integers), the store is dropped, and the process lives.

This is the only file of the course that knows Triton's inside, and it proves itself once per process with a tiny kernel
whose counts are known. If that fails, :class:`MeterUnavailable` says so: a meter that guesses is worse than none.
It imports nothing of the course, so that it can be loaded by its path alone.
"""

import contextlib
import functools
import html
import inspect
import itertools
import linecache
import os
import re
import sys
import types
import weakref
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "Allocation",
    "Launch",
    "MeterUnavailable",
    "OutOfBounds",
    "TensorTraffic",
    "TrafficMeter",
    "TrafficReport",
    "front_end_is_known",
    "record_launches",
    "record_variants",
    "refusal",
    "repair_interpreter",
]

TAG_SHIFT = 48  # user addresses end below bit 48 on x86-64 and AArch64; the bits above carry the argument's number
ADDRESS_MASK = np.uint64((1 << TAG_SHIFT) - 1)
MAX_TAG = 0x7FFF  # leaves the sign bit alone, for kernels that turn a pointer into an int64 and back
MAX_RECORDS = 64  # distinct (kernel, line, tensor) places kept; further ones are only counted
MAX_ALLOCATIONS = 256
SECTOR_BYTES = 32  # the smallest piece a GPU's L2 hands out
# Triton's name of a float type: ours, and NumPy's types of its bits and of its values in the interpreter.
_FLOATS = {
    "fp16": ("float16", np.uint16, np.float16),
    "bf16": ("bfloat16", np.uint16, np.uint16),
    "fp32": ("float32", np.uint32, np.float32),
    "fp64": ("float64", np.uint64, np.float64),
}


class MeterUnavailable(RuntimeError):
    """The meter cannot count here; the message says why and what to do."""


# ---------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class TensorTraffic:
    """What all kernels did to one tensor. Bytes are *requested* bytes: active lanes times item size."""

    name: str  # the name given to the meter, else the kernel parameter's
    parameters: tuple[str, ...]  # "kernel.parameter", each way this tensor was passed
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    loaded_bytes: int
    stored_bytes: int
    atomic_bytes: int
    atomic_operations: int  # lanes, each one read-modify-write
    loads: int  # tl.load calls with at least one active lane, summed over programs
    stores: int
    distinct_loaded_bytes: int
    distinct_stored_bytes: int
    loaded_sector_bytes: int | None  # 32 bytes for each sector that a load touches; None unless asked for

    @property
    def times_read(self) -> float:
        """How often each touched byte was read, on average: 1.0 is a single pass."""
        return self.loaded_bytes / self.distinct_loaded_bytes if self.distinct_loaded_bytes else 0.0


@dataclass(frozen=True)
class Launch:
    """One kernel launch. ``grid`` always has three entries."""

    kernel: str
    grid: tuple[int, int, int]
    file: str
    line: int


@dataclass(frozen=True)
class OutOfBounds:
    """One place in the source that reached outside a tensor, with all its occurrences added up.

    ``first_element`` and ``last_element`` are the extreme wild positions, counted in elements from the tensor's first
    one; valid are 0 to ``length - 1``. They are None when the pointer belonged to no known tensor.
    """

    kind: str  # "load", "store" or "atomic"
    tensor: str
    parameter: str | None
    kernel: str
    file: str
    line: int
    source: str
    program: tuple[int, int, int]  # the first program that did it
    programs: int  # how many did
    lanes: int
    first_element: int | None
    last_element: int | None
    length: int

    def __str__(self) -> str:
        verb = {"load": "reads", "store": "writes", "atomic": "updates"}[self.kind]
        if self.first_element is None:
            where = "memory that belongs to no tensor"
        elif self.last_element < 0:
            where = f"{self.tensor} before its start (element {self.first_element})"
        else:
            span = (
                f"element {self.last_element}"
                if self.first_element == self.last_element
                else f"elements {self.first_element} to {self.last_element}"
            )
            where = f"{self.tensor} outside its {self.length} elements ({span}; 0 to {self.length - 1} exist)"
        others = f" and {self.programs - 1} more" if self.programs > 1 else ""
        return (
            f"{self.kernel}, line {self.line}: {verb} {where}, {self.lanes} lane(s), "
            f"program {self.program}{others}: {self.source}"
        )


@dataclass(frozen=True)
class Allocation:
    """A tensor that PyTorch gave new memory while the meter ran."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class TrafficReport:
    """Everything the meter saw. ``report["x_ptr"]`` gives one tensor's row."""

    tensors: tuple[TensorTraffic, ...]
    launches: tuple[Launch, ...]
    out_of_bounds: tuple[OutOfBounds, ...]
    out_of_bounds_unlisted: int  # wild accesses at places beyond the first MAX_RECORDS
    allocations: tuple[Allocation, ...] = field(repr=False, default=())
    undefined_loads: tuple[str, ...] = ()  # loads with lanes masked off and no other=; seen with undefined_lanes alone

    def __getitem__(self, name: str) -> TensorTraffic:
        for row in self.tensors:
            if row.name == name:
                return row
        raise KeyError(f"no kernel touched a tensor named {name!r}; seen: {[row.name for row in self.tensors]}")

    @property
    def loaded_bytes(self) -> int:
        return sum(row.loaded_bytes for row in self.tensors)

    @property
    def stored_bytes(self) -> int:
        return sum(row.stored_bytes for row in self.tensors)

    @property
    def atomic_bytes(self) -> int:
        return sum(row.atomic_bytes for row in self.tensors)

    @property
    def total_bytes(self) -> int:
        """Loaded plus stored, and each atomic twice: it reads and writes."""
        return self.loaded_bytes + self.stored_bytes + 2 * self.atomic_bytes

    def as_dict(self) -> dict:
        """Plain lists, strings and numbers, ready for ``json.dumps``."""
        totals = {key: getattr(self, key) for key in ("loaded_bytes", "stored_bytes", "atomic_bytes", "total_bytes")}
        plain = {
            key: [_plain(asdict(item)) for item in getattr(self, key)]
            for key in ("tensors", "launches", "out_of_bounds", "allocations")
        }
        for row, traffic in zip(plain["tensors"], self.tensors):
            row["times_read"] = traffic.times_read
        return {**totals, **plain, "out_of_bounds_unlisted": self.out_of_bounds_unlisted}

    def _table(self) -> list[tuple[str, ...]]:
        rows = [("tensor", "shape", "loaded", "times read", "stored", "atomic")]
        for row in self.tensors:
            rows.append(
                (
                    row.name,
                    "×".join(map(str, row.shape)) + " " + row.dtype,
                    readable_bytes(row.loaded_bytes),
                    f"{row.times_read:.2f}" if row.loaded_bytes else "–",
                    readable_bytes(row.stored_bytes),
                    readable_bytes(row.atomic_bytes),
                )
            )
        rows.append(
            (
                "total",
                "",
                readable_bytes(self.loaded_bytes),
                "",
                readable_bytes(self.stored_bytes),
                readable_bytes(self.atomic_bytes),
            )
        )
        return rows

    def _notes(self) -> list[str]:
        grids: dict[str, int] = {}
        for launch in self.launches:
            label = f"{launch.kernel}[{', '.join(map(str, launch.grid))}]"
            grids[label] = grids.get(label, 0) + 1
        launched = ", ".join(label + (f" × {count}" if count > 1 else "") for label, count in grids.items())
        notes = [f"launched: {launched or 'no kernel'}"]
        notes += [f"out of bounds: {record}" for record in self.out_of_bounds]
        if self.out_of_bounds_unlisted:
            notes.append(f"out of bounds: {self.out_of_bounds_unlisted} more accesses at other places")
        return notes

    def __str__(self) -> str:
        rows = self._table()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in rows
        ]
        return "\n".join(lines + self._notes())

    def _repr_html_(self) -> str:
        head, *body = self._table()
        cells = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
        cells += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self._notes())
        return f"<table>{''.join(cells)}</table><ul>{notes}</ul>"


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def readable_bytes(count: int) -> str:
    """1536 → '1.54 kB': decimal units, as bandwidth is quoted in."""
    if count < 1000:
        return f"{count} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 1000 or unit == "TB":
            return f"{count:.3g} {unit}"


# ----------------------------------------------------------------------------------------- what is known of a tensor


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a view's first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


class _View:
    """Where a tensor lies: its storage (kept alive, so that no address is given out twice), start and length."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()
        storage = tensor.untyped_storage()
        self.storage, self.storage_address, self.storage_bytes = storage, storage.data_ptr(), storage.nbytes()
        self.start = tensor.storage_offset() * tensor.element_size()  # bytes from the storage's start
        self.end = self.start + _span_bytes(tensor)
        self.address = tensor.data_ptr()
        self.item_bytes = tensor.element_size()

    def contains(self, other: "_View") -> bool:
        same = self.storage_address == other.storage_address and self.tensor.device == other.tensor.device
        return same and self.start <= other.start and other.end <= self.end


class _Row:
    """Counters of one tensor. Offsets are bytes from the storage's start."""

    def __init__(self, view: _View, name: str, parameter: str | None, count_sectors: bool):
        self.view, self.name, self.count_sectors = view, name, count_sectors
        self.parameters = {parameter: None} if parameter else {}  # an ordered set
        self.bytes = {"load": 0, "store": 0, "atomic": 0}
        self.calls = {"load": 0, "store": 0, "atomic": 0}
        self.atomic_lanes = 0
        self.sector_bytes = 0
        self.slot_bytes = view.item_bytes  # resolution of the maps below
        slots = -(-view.storage_bytes // self.slot_bytes)
        self.touched = {"load": np.zeros(slots, dtype=bool), "store": np.zeros(slots, dtype=bool)}

    def add(self, kind: str, offsets: np.ndarray, item_bytes: int) -> None:
        self.bytes[kind] += offsets.size * item_bytes
        self.calls[kind] += 1
        slots = offsets.view(np.int64) // self.slot_bytes
        if kind == "atomic":
            self.atomic_lanes += offsets.size
        for past in range(0, item_bytes, self.slot_bytes):  # once, unless a pointer was cast to a wider type
            for touched in ("load", "store") if kind == "atomic" else (kind,):
                self.touched[touched][slots + past // self.slot_bytes] = True
        if self.count_sectors and kind == "load":
            self.sector_bytes += SECTOR_BYTES * np.unique(offsets // np.uint64(SECTOR_BYTES)).size

    def byte_map(self, kind: str) -> np.ndarray:
        return np.repeat(self.touched[kind], self.slot_bytes)


class _Argument:
    """One pointer argument of the running kernel: the addresses it may touch, its number included."""

    def __init__(self, tag: int, parameter: str, view: _View, address: int, row: _Row):
        self.parameter, self.view, self.row = parameter, view, row
        self.low = (tag << TAG_SHIFT) + address
        self.high = self.low + (view.end - view.start)
        self.origin = np.uint64(self.low - view.start)  # where the storage starts; never below the tag, as low >= start


# ------------------------------------------------------------------------------------------------------- the meter


class TrafficMeter:
    """Counts the bytes of every kernel launched inside the ``with`` block, per tensor.

    Tensors are named after the kernel's parameter, or by you: ``TrafficMeter(x=x)`` or ``meter.watch(out=out)``, which
    also works after the kernels have run. Views of a named tensor count as that tensor.

    ``count_sectors=True`` also adds up, for every load, the 32-byte sectors that it touches: the traffic that a GPU
    cannot avoid when neighbouring lanes do not read neighbouring bytes. It costs a sort per load.

    ``undefined_lanes`` holds a number for each float dtype, as bits (``undefined_lanes.float32``), for the lanes that a
    load with a mask and no ``other=`` leaves undefined. By itself the interpreter gives 0 there, which a GPU need not.

    Raises :class:`MeterUnavailable` on entry when Triton does not interpret, when another meter is already counting,
    or when this Triton's inside is not the one known here.
    """

    _active: "TrafficMeter | None" = None

    def __init__(self, *, count_sectors: bool = False, undefined_lanes=None, **tensors: torch.Tensor):
        self._count_sectors = count_sectors
        self._undefined_lanes, self._undefined_loads = undefined_lanes, {}
        self._named: dict[str, _View] = {}
        self._rows: list[_Row] = []
        self._arguments: list[_Argument | None] = [None]  # by tag, of the running launch; tag 0 is "unknown"
        self._host_arguments: dict[int, _Argument] = {}  # by id of the interpreter's host tensor
        self._launches: list[Launch] = []
        self._wild: dict[tuple, dict] = {}
        self._wild_unlisted = 0
        self._allocated: dict[int, weakref.ref] = {}  # storage address -> tensor
        self._preparing_launch = False  # then the interpreter makes tensors of its own, which nobody asked for
        self._allocations: list[Allocation] = []
        self._kernel = None
        self._scratch = np.zeros(16, dtype=np.uint8)  # where a wild compare-and-swap is sent instead
        self.watch(**tensors)

    def watch(self, **tensors: torch.Tensor) -> "TrafficMeter":
        """Gives names to tensors; before, during or after the launches. Raises TypeError for what is no tensor."""
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"TrafficMeter was given {name}={type(tensor).__name__}; pass a torch.Tensor")
            self._named[name] = _View(tensor)
        return self

    def __enter__(self) -> "TrafficMeter":
        _require_interpreter()
        if TrafficMeter._active is not None:
            raise MeterUnavailable(
                "Another TrafficMeter is already counting. Leave its `with` block first, or name "
                "all tensors in one meter."
            )
        _self_test()
        self._open()
        return self

    def _open(self) -> None:
        from triton.runtime import interpreter

        TrafficMeter._active = self
        self._stack = contextlib.ExitStack()
        try:
            shim = _MemoryShim(interpreter._interpreter, self)
            self._stack.enter_context(_replaced(interpreter, "_interpreter", shim))
            if self._undefined_lanes is not None:
                builder = interpreter.interpreter_builder
                load = self._with_undefined_lanes(builder.create_masked_load)
                self._stack.enter_context(_replaced(builder, "create_masked_load", load))
            self._stack.enter_context(_replaced(interpreter, "_implicit_cvt", self._tagging(interpreter._implicit_cvt)))
            executor = interpreter.GridExecutor
            self._stack.enter_context(_replaced(executor, "_init_args_hst", self._registering(executor._init_args_hst)))
            self._stack.enter_context(_interpreted_launches(self._on_launch))
            self._stack.enter_context(_Allocations(self))
        except BaseException:
            self._close()
            raise

    def __exit__(self, *exception) -> None:
        self._close()

    def _close(self) -> None:
        try:
            self._stack.close()
        finally:
            TrafficMeter._active = None
            self._arguments, self._host_arguments = [None], {}

    # ---- a launch begins

    def _on_launch(self, launch: Launch) -> None:
        self._launches.append(launch)

    def _registering(self, original):
        """Wraps GridExecutor._init_args_hst(args, kwargs) -> host copies, where parameter names can still be bound."""

        def init_args(executor, args, kwargs):
            self._preparing_launch = True
            try:
                hosts, host_kwargs = original(executor, args, kwargs)
            finally:
                self._preparing_launch = False
            self._kernel = executor.fn.__name__
            self._arguments, self._host_arguments = [None], {}
            try:
                given = inspect.getcallargs(executor.fn, *args, **kwargs)
                host = inspect.getcallargs(executor.fn, *hosts, **host_kwargs)
            except TypeError:
                return hosts, host_kwargs  # wrong arguments: the executor makes the same call next and raises this
            for parameter, value in given.items():
                self._register(parameter, value, host[parameter])
            return hosts, host_kwargs

        return init_args

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
        view = _View(tensor)
        row = self._row_for(view, parameter, f"{self._kernel}.{parameter}")
        argument = _Argument(tag, parameter, view, address, row)
        self._arguments.append(argument)
        self._host_arguments[id(host)] = argument

    def _row_for(self, view: _View, name: str, parameter: str | None) -> _Row:
        """One row per tensor: the same view under any name, or the same storage under the same parameter."""
        for row in self._rows:
            if row.view.storage_address != view.storage_address or row.view.tensor.device != view.tensor.device:
                continue
            same_view = (row.view.start, row.view.end) == (view.start, view.end)
            if same_view or (parameter is not None and parameter in row.parameters):
                if parameter:
                    row.parameters[parameter] = None
                return row
        self._rows.append(_Row(view, name, parameter, self._count_sectors))
        return self._rows[-1]

    def _tagging(self, original):
        """Wraps _implicit_cvt(argument) -> tl.tensor, which the interpreter also calls for a descriptor's base."""

        def convert(argument):
            converted = original(argument)
            known = self._host_arguments.get(id(argument))
            if known is not None and hasattr(argument, "data_ptr"):
                converted.handle.data = np.array([known.low], dtype=np.uint64)
            return converted

        return convert

    # ---- an access

    def _with_undefined_lanes(self, original):
        """Wraps create_masked_load(pointers, mask, other, ...), where a missing ``other=`` is still None."""
        from triton.runtime.interpreter import TensorHandle

        def load(pointers, mask, other, *rest, **more):
            name = str(pointers.get_element_ty())
            bits = getattr(self._undefined_lanes, _FLOATS.get(name, ("", None))[0], None)
            if other is None and bits is not None and not mask.data.all():
                integer, dtype = _FLOATS[name][1:]
                values = np.full(pointers.data.shape, bits, dtype=integer).view(dtype)
                other = TensorHandle(values, pointers.get_element_ty())
                self._undefined_loads[(self._kernel, *_kernel_line())] = None
            return original(pointers, mask, other, *rest, **more)

        return load

    def account(self, kind: str, pointers: np.ndarray, mask: np.ndarray, item_bytes: int):
        """Counts one access. Returns the plain addresses, and None or the lanes (bool, like mask) that must not run."""
        active = pointers.ravel() if mask.all() else pointers[mask]
        if active.size == 0:
            return pointers & ADDRESS_MASK, None
        low, high = int(active.min()), int(active.max())
        tag = low >> TAG_SHIFT
        argument = self._arguments[tag] if tag < len(self._arguments) else None
        if argument is not None and argument.low <= low and high + item_bytes <= argument.high:
            argument.row.add(kind, active - argument.origin, item_bytes)
            return pointers & ADDRESS_MASK, None
        allowed = self._account_lane_by_lane(kind, active, item_bytes)
        if allowed.all():
            return pointers & ADDRESS_MASK, None
        wild = np.zeros(mask.shape, dtype=bool)
        wild[mask] = ~allowed
        return pointers & ADDRESS_MASK, wild

    def _account_lane_by_lane(self, kind: str, active: np.ndarray, item_bytes: int) -> np.ndarray:
        """For accesses that leave their tensor or mix several; returns which lanes are inside."""
        allowed = np.zeros(active.size, dtype=bool)
        tags = active >> np.uint64(TAG_SHIFT)
        size = np.uint64(item_bytes)
        for tag in np.unique(tags).tolist():
            lanes = np.flatnonzero(tags == tag)
            argument = self._arguments[tag] if tag < len(self._arguments) else None
            if argument is None:
                allowed[lanes] = self._account_by_address(kind, active[lanes], item_bytes)
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

    def _account_by_address(self, kind: str, values: np.ndarray, item_bytes: int) -> np.ndarray:
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

    def _known_views(self):
        """Host tensors that a pointer without a number may belong to: named, passed, or allocated in the block."""
        yield from ((name, view) for name, view in self._named.items() if view.tensor.device.type == "cpu")
        yield from ((row.name, row.view) for row in list(self._rows) if row.view.tensor.device.type == "cpu")
        for index, reference in enumerate(list(self._allocated.values())):
            tensor = reference()
            if tensor is not None and tensor.device.type == "cpu":
                yield f"allocation_{index}", _View(tensor)

    def _record(self, kind, row: _Row | None, parameter, view: _View | None, elements: np.ndarray) -> None:
        from triton.runtime.interpreter import interpreter_builder

        file, line = _kernel_line()
        program = tuple(interpreter_builder.grid_idx)
        key = (kind, id(row), parameter, self._kernel, file, line)
        record = self._wild.get(key)
        if record is None:
            if len(self._wild) >= MAX_RECORDS:
                self._wild_unlisted += elements.size
                return
            length = 0 if view is None else (view.end - view.start) // view.item_bytes
            record = self._wild[key] = {
                "row": row,
                "program": program,
                "programs": set(),
                "lanes": 0,
                "length": length,
                "low": None,
                "high": None,
            }
        record["programs"].add(program)
        record["lanes"] += elements.size
        if view is not None:
            low, high = int(elements.min()), int(elements.max())
            record["low"] = low if record["low"] is None else min(low, record["low"])
            record["high"] = high if record["high"] is None else max(high, record["high"])

    # ---- the result

    def report(self) -> TrafficReport:
        """What was counted so far."""
        names, groups = self._resolve_names()
        tensors = tuple(self._summary(name, rows) for name, rows in groups.items())
        wild = []
        for (kind, _, parameter, kernel, file, line), record in self._wild.items():
            row = record["row"]
            wild.append(
                OutOfBounds(
                    kind=kind,
                    tensor=names[id(row)] if row else "unknown",
                    parameter=parameter,
                    kernel=kernel,
                    file=file,
                    line=line,
                    source=linecache.getline(file, line).strip(),
                    program=record["program"],
                    programs=len(record["programs"]),
                    lanes=record["lanes"],
                    first_element=record["low"],
                    last_element=record["high"],
                    length=record["length"],
                )
            )
        undefined = tuple(
            f"{kernel}, line {line}: {linecache.getline(file, line).split('  #')[0].strip()}"
            for kernel, file, line in self._undefined_loads
        )
        return TrafficReport(
            tensors, tuple(self._launches), tuple(wild), self._wild_unlisted, tuple(self._allocations), undefined
        )

    def _resolve_names(self) -> tuple[dict[int, str], dict[str, list[_Row]]]:
        names: dict[int, str] = {}
        groups: dict[str, list[_Row]] = {}
        for row in self._rows:
            given = [name for name, view in self._named.items() if view.contains(row.view)]
            if given:  # the tightest of the views that hold this row
                name = min(given, key=lambda name: self._named[name].end - self._named[name].start)
            else:
                qualified = next(iter(row.parameters), row.name)
                numbered = (f"{qualified} ({number})" for number in itertools.count(2))
                name = next(
                    choice
                    for choice in itertools.chain((row.name, qualified), numbered)
                    if choice not in groups and choice not in self._named
                )
            names[id(row)] = name
            groups.setdefault(name, []).append(row)
        return names, groups

    def _summary(self, name: str, rows: list[_Row]) -> TensorTraffic:
        view = self._named[name] if name in self._named else rows[0].view
        item_bytes = {row.slot_bytes for row in rows}
        distinct = {}
        for kind in ("load", "store"):
            if len(item_bytes) == 1:
                touched = np.logical_or.reduce([row.touched[kind] for row in rows])
                distinct[kind] = int(np.count_nonzero(touched)) * rows[0].slot_bytes
            else:
                shortest = min(row.byte_map(kind).size for row in rows)
                touched = np.logical_or.reduce([row.byte_map(kind)[:shortest] for row in rows])
                distinct[kind] = int(np.count_nonzero(touched))
        return TensorTraffic(
            name=name,
            parameters=tuple(dict.fromkeys(p for row in rows for p in row.parameters)),
            shape=tuple(view.tensor.shape),
            dtype=str(view.tensor.dtype).removeprefix("torch."),
            size_bytes=view.tensor.numel() * view.item_bytes,
            loaded_bytes=sum(row.bytes["load"] for row in rows),
            stored_bytes=sum(row.bytes["store"] for row in rows),
            atomic_bytes=sum(row.bytes["atomic"] for row in rows),
            atomic_operations=sum(row.atomic_lanes for row in rows),
            loads=sum(row.calls["load"] for row in rows),
            stores=sum(row.calls["store"] for row in rows),
            distinct_loaded_bytes=distinct["load"],
            distinct_stored_bytes=distinct["store"],
            loaded_sector_bytes=sum(row.sector_bytes for row in rows) if self._count_sectors else None,
        )


class _Allocations(TorchDispatchMode):
    """Notes each tensor that PyTorch gives new memory, without keeping it alive."""

    def __init__(self, meter: TrafficMeter):
        super().__init__()
        self.meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # True would import torch._dynamo on first use, a second of start-up
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not self.meter._preparing_launch:
            given = {tensor.untyped_storage().data_ptr() for tensor in _tensors_in((args, kwargs))}
            for tensor in _tensors_in(result):
                self.note(tensor, given)
        return result

    def note(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        address, count = storage.data_ptr(), storage.nbytes()
        if count == 0 or address in given:  # empty, or a view or an update of an operand
            return
        self.meter._allocated[address] = weakref.ref(tensor)
        if len(self.meter._allocations) < MAX_ALLOCATIONS:
            self.meter._allocations.append(
                Allocation(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), count)
            )


def _tensors_in(value):
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.device.type != "meta":
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


# ------------------------------------------------------------------------------------------- in front of the memory


class _MemoryShim:
    """Stands in for the compiled module through which Triton's interpreter touches memory.

    Its four functions take plain NumPy arrays and have not changed from Triton 3.6 to 3.9, and every load, store and
    atomic, by pointer or by descriptor, ends in one of them.
    """

    def __init__(self, memory, meter: TrafficMeter):
        self._memory, self._meter = memory, meter

    def __getattr__(self, name):  # enumerations and arithmetic pass through
        return getattr(self._memory, name)

    def load(self, pointers, mask, other, dtype):
        mask = _fitted(mask, pointers)
        addresses, wild = self._meter.account("load", pointers, mask, np.dtype(dtype).itemsize)
        if wild is not None:
            mask = mask & ~wild
            if np.dtype(dtype).kind == "f":  # a value nobody may mistake for data; integers keep what masking gives
                other = np.where(wild, np.array(np.nan, dtype=dtype), other)
        return self._memory.load(addresses, mask, other, dtype)

    def store(self, pointers, value, mask):
        mask = _fitted(mask, pointers)
        addresses, wild = self._meter.account("store", pointers, mask, value.itemsize)
        return self._memory.store(addresses, value, mask if wild is None else mask & ~wild)

    def atomic_rmw(self, operation, pointers, value, mask, semantic):
        mask = _fitted(mask, pointers)
        addresses, wild = self._meter.account("atomic", pointers, mask, value.itemsize)
        return self._memory.atomic_rmw(operation, addresses, value, mask if wild is None else mask & ~wild, semantic)

    def atomic_cas(self, pointers, expected, value, semantic):
        everyone = np.ones(np.shape(pointers), dtype=bool)
        addresses, wild = self._meter.account("atomic", pointers, everyone, value.itemsize)
        if wild is not None:  # compare-and-swap has no mask, so a wild lane works on a scratch word
            addresses = np.where(wild, np.uint64(self._meter._scratch.ctypes.data), addresses)
        return self._memory.atomic_cas(addresses, expected, value, semantic)


def _fitted(mask: np.ndarray, pointers: np.ndarray) -> np.ndarray:
    mask = np.asarray(mask, dtype=bool)
    return mask if mask.shape == np.shape(pointers) else np.broadcast_to(mask, np.shape(pointers))


def _kernel_line() -> tuple[str, int]:
    """File and line of the innermost frame that is neither this file's, Triton's nor NumPy's: the kernel's own."""
    import triton

    foreign = (os.path.dirname(os.path.abspath(triton.__file__)), os.path.dirname(os.path.abspath(np.__file__)))
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_globals is not globals() or frame.f_code.co_name == _self_test_kernel.__name__:
            if not os.path.abspath(file).startswith(foreign):
                return file, frame.f_lineno
        frame = frame.f_back
    return "unknown", 0


@contextlib.contextmanager
def _replaced(owner, name: str, value):
    """Sets an attribute and restores it exactly, deleting it where it was only inherited."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is missing else setattr(owner, name, before)


# --------------------------------------------------------------------------------------------------------- launches


@contextlib.contextmanager
def record_launches():
    """Yields a list that fills with a :class:`Launch` for every Triton kernel started in the block, on a GPU or
    interpreted. Compiling or warming up a kernel adds nothing; an autotuner's trial runs do.

    Raises :class:`MeterUnavailable` when this Triton has no place to see launches.
    """
    launches: list[Launch] = []
    seen = _interpreted_launches if _interpreting() else _compiled_launches
    with seen(launches.append):
        yield launches


@contextlib.contextmanager
def _interpreted_launches(notify):
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    call, set_grid = executor.__call__, builder.set_grid_dim
    running = []

    def remembering(self, *args, **kwargs):
        running.append(self.fn)
        try:
            return call(self, *args, **kwargs)
        finally:
            running.pop()

    def announcing(*grid):  # called once for every launch, after the grid is known and before the first program
        if running:
            code = running[-1].__code__
            notify(Launch(running[-1].__name__, _three(grid), code.co_filename, code.co_firstlineno))
        return set_grid(*grid)

    with _replaced(executor, "__call__", remembering), _replaced(builder, "set_grid_dim", announcing):
        yield


@contextlib.contextmanager
def _compiled_launches(notify):
    try:
        from triton.compiler.compiler import CompiledKernel

        prepare = CompiledKernel.launch_metadata  # called for each launch, whichever way it was asked for
    except (ImportError, AttributeError) as error:
        raise MeterUnavailable(f"Launches cannot be recorded: {error}. {_versions()}") from error

    def announcing(self, grid, stream, *args):
        code = getattr(getattr(getattr(self.src, "fn", None), "fn", None), "__code__", None)
        file, line = (code.co_filename, code.co_firstlineno) if code else ("unknown", 0)
        notify(Launch(self.name, _three(grid), file, line))
        return prepare(self, grid, stream, *args)

    with _replaced(CompiledKernel, "launch_metadata", announcing):
        yield


def _three(grid) -> tuple[int, int, int]:
    return tuple((*(int(extent) for extent in grid), 1, 1)[:3])


# ------------------------------------------------------------------------- what the compiler is given, and what it says

# A kernel is refused that none of them takes. Hopper comes first: it has the dtypes that most kernels use.
ARCHITECTURES = (90, 80, 100)
MAX_VARIANTS = 256
_NO_KERNEL = "Cannot call @triton.jit'd outside of the scope of a kernel"  # Triton's words on one without a grid
_NO_ARGUMENT = "failed to specialize argument"  # Triton's words on a value that it cannot hand to a kernel
# Not the kernel's fault, though the compiler wraps them like everything else that is raised while it reads a kernel.
_FAULTS_OF_THE_PROCESS = (MemoryError, OSError, ImportError)


class _CannotBeSent(Exception):
    """A value that has no plain form, so that the other process cannot compile for it."""


@contextlib.contextmanager
def record_variants():
    """Yields a list that fills with what Triton would have to compile for the block's interpreted launches.

    Each is plain data and there once: the kernel's name and line, the parameters' types as Triton's own launcher finds
    them (an int of 1 is a constant there), the constants' values and the launch's options; or, under "unbound", what
    the launcher says of an argument that it does not take. A launch that has no plain form is left out; so is
    everything in a Triton not known here.

    Within the block a kernel or a helper that is called without a grid, outside of a kernel, raises what it raises on a
    GPU: the interpreter would run it.
    """
    variants: list[dict] = []
    if not _interpreting() or not _binding_is_known():
        yield variants
        return
    from triton.runtime.interpreter import InterpretedFunction

    run, call, seen, running = InterpretedFunction.run, InterpretedFunction.__call__, set(), []

    def called(self, *args, **kwargs):
        if not running:
            raise RuntimeError(_NO_KERNEL)
        return call(self, *args, **kwargs)

    def recording(self, *args, grid, warmup, **kwargs):
        with contextlib.suppress(Exception):  # what cannot be recorded is not compiled
            variant = _variant(self, args, kwargs)
            key = repr(variant)
            if key not in seen and len(variants) < MAX_VARIANTS:
                seen.add(key)
                variants.append(variant)
        running.append(self)
        try:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            running.pop()

    with _replaced(InterpretedFunction, "run", recording), _replaced(InterpretedFunction, "__call__", called):
        yield variants


def _variant(interpreted, args: tuple, kwargs: dict) -> dict:
    """One launch, bound as a GPU's launcher binds it (JITFunction.run and ._pack_args)."""
    from triton._utils import find_paths_if, get_iterable_path

    code = interpreted.fn.__code__
    variant = {"kernel": code.co_name, "line": code.co_firstlineno, "signature": {}, "constants": [], "options": {}}
    try:
        bound, specialization, options = _binder(interpreted)(*args, **kwargs)
    except TypeError as error:
        # A helper is another object where it is compiled, and may be an argument there, also in a tuple.
        if not str(error).startswith(_NO_ARGUMENT) or str(error).endswith(("InterpretedFunction", "tuple")):
            raise
        return {**variant, "unbound": str(error)}
    kinds, values = [pair[0] for pair in specialization], list(bound.values())
    constants = find_paths_if(kinds, lambda _, kind: kind == "constexpr")
    return {
        **variant,
        "signature": {name: _plain_types(kind) for name, kind in zip(bound, kinds)},
        "constants": [(path, _sent(get_iterable_path(values, path))) for path in constants],
        "options": {name: value for name, value in options.items() if type(value) in (bool, int, float, str)},
    }


@functools.lru_cache(maxsize=256)
def _binder(interpreted):
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    function = JITFunction(interpreted.fn, **interpreted.kwargs)
    return create_function_from_signature(function.signature, function.params, BaseBackend)


def _plain_types(kind):
    """A type, or the tuple of a tuple's types; the fields of a named tuple would be lost on the way."""
    if isinstance(kind, tuple):
        if type(kind) is not tuple:
            raise _CannotBeSent(type(kind).__name__)
        return tuple(map(_plain_types, kind))
    return kind


def _sent(value, depth: int = 0) -> tuple:
    """A constant as (kind, plain value)."""
    import triton.language as tl

    if value is None or type(value) in (bool, int, float, str):
        return "plain", value
    if isinstance(value, tl.constexpr):
        return "constexpr", _sent(value.value, depth + 1)
    if type(value) is tl.dtype:
        return "dtype", value.name
    if isinstance(value, torch.dtype):
        return "torch", str(value).removeprefix("torch.")
    if type(value) is tuple and depth < 4:
        return "tuple", tuple(_sent(item, depth + 1) for item in value)
    code = getattr(getattr(value, "fn", None), "__code__", None)
    if code is not None:
        return "function", (code.co_name, code.co_firstlineno)
    raise _CannotBeSent(type(value).__name__)


def _received(sent: tuple, functions):
    """The reverse of _sent; `functions` gives the kernel or helper of a name and line."""
    import triton.language as tl

    kind, value = sent
    if kind == "constexpr":
        return tl.constexpr(_received(value, functions))
    if kind == "dtype":
        return tl.dtype(value)
    if kind == "torch":
        return getattr(torch, value)
    if kind == "tuple":
        return tuple(_received(item, functions) for item in value)
    if kind == "function":
        return functions(*value)
    return value


def refusal(variant: dict, functions) -> BaseException | None:
    """What Triton raises on a kernel that its launcher or the compiler's front end (Python to Triton's IR) refuses, and
    None when they take it.

    Args:
        variant: of :func:`record_variants`.
        functions: called with a function's name and first line, gives the JITFunction or raises LookupError.

    Raises:
        Exception: the compiler was not asked, or failed for another reason than the kernel; that is no refusal.
    """
    if "unbound" in variant:
        return TypeError(variant["unbound"])
    function = functions(variant["kernel"], variant["line"])
    constants = {tuple(path): _received(sent, functions) for path, sent in variant["constants"]}
    first = None
    for architecture in ARCHITECTURES:
        refused = _front_end(function, variant["signature"], constants, dict(variant["options"]), architecture)
        if refused is None:
            return None
        first = first or refused
    return first


def _front_end(function, signature: dict, constants: dict, options: dict, architecture: int) -> Exception | None:
    """The beginning of triton.compile: no pass, no LLVM and no ptxas; it takes milliseconds and needs no driver."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    source = ASTSource(function, signature, constants, {})
    try:
        parsed = backend.parse_options(dict(options))
    except (AssertionError, ValueError) as error:  # a number of warps that is no power of two
        return error
    unknown = [name for name in options if not hasattr(parsed, name)]
    if unknown:
        return KeyError(f"Keyword argument {unknown[0]} was specified but unrecognised")
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    try:
        source.hash()  # looks through the functions that the kernel calls
        source.make_ir(target, parsed, implementation, modules, context)
    except Exception as error:
        if not _is_refusal(error):
            raise
        return error
    return None


def _is_refusal(error: BaseException) -> bool:
    from triton.compiler.errors import CompilationError

    if not isinstance(error, CompilationError):
        return type(error) is RuntimeError and str(error).startswith("Unsupported function referenced")
    innermost = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    if isinstance(innermost, _FAULTS_OF_THE_PROCESS):
        return False
    said = str(getattr(innermost, "error_message", None) or "")  # an exception's repr, where its cause was dropped
    return not re.match("|".join(rf"(?:\w+\.)?{fault.__name__}\(" for fault in _FAULTS_OF_THE_PROCESS), said)


def find_function(namespace: dict, code: types.CodeType, name: str, line: int):
    """The JITFunction of a name and first line, from a cell's namespace or, inside a function, from the cell's code.

    Raises:
        LookupError: there is none, or it needs another function's variables.
    """
    import triton
    from triton.runtime.jit import JITFunction

    for value in list(namespace.values()):
        for _ in range(8):  # autotuners and heuristics wrap a kernel, and each other
            if isinstance(value, JITFunction) or not hasattr(value, "fn"):
                break
            value = value.fn
        if isinstance(value, JITFunction) and _is_at(value.fn.__code__, name, line):
            return value
    inner = [code]
    while inner:
        candidate = inner.pop()
        inner += [constant for constant in candidate.co_consts if isinstance(constant, types.CodeType)]
        if _is_at(candidate, name, line) and not candidate.co_freevars:
            return triton.jit(types.FunctionType(candidate, namespace, name))
    raise LookupError(name)


def _is_at(code: types.CodeType, name: str, line: int) -> bool:
    return (code.co_name, code.co_firstlineno) == (name, line)


def _taken_kernel(source, target, total, length):
    kept = 0.0
    for index in range(total, length):
        kept += tl.load(source + index)
    tl.store(target, kept)


def _refused_kernel(source, target, total, length):
    kept = 0
    for index in range(total, length):
        kept += tl.load(source + index)  # an int that becomes a float
    tl.store(target, kept)


_KNOWN_TYPES = {"source": "*fp32", "target": "*fp16", "total": "constexpr", "length": "i32"}


@functools.lru_cache(maxsize=1)
def _binding_is_known() -> bool:
    """Whether this Triton binds arguments as is known here; tried once, on a kernel whose types are known."""
    global tl
    try:
        import triton
        import triton.language as tl

        kernel = triton.jit(_taken_kernel)
        variant = _variant(kernel, (torch.zeros(1), torch.zeros(1, dtype=torch.float16), 1), {"length": 7})
        return variant["signature"] == _KNOWN_TYPES and variant["constants"] == [((2,), ("plain", 1))]
    except Exception:
        return False


@functools.lru_cache(maxsize=1)
def front_end_is_known() -> bool:
    """Whether this Triton's front end can be asked; tried once, on a kernel that it takes and one that it refuses."""
    global tl
    if _interpreting():
        return False
    try:
        import triton
        import triton.language as tl

        launch = {"line": 0, "constants": [((2,), ("plain", 1))], "options": {"num_warps": 4}}
        good = {**launch, "kernel": "_taken_kernel", "signature": {**_KNOWN_TYPES}}
        bad = {**launch, "kernel": "_refused_kernel", "signature": {**_KNOWN_TYPES}}
        taken, refused = (refusal(variant, lambda name, line: triton.jit(globals()[name])) for variant in (good, bad))
        return taken is None and refused is not None and "Loop-carried variable" in str(refused)
    except Exception:
        return False


# ------------------------------------------------------------------------- is this a Triton that can be metered?


def _versions() -> str:
    import triton

    return f"Seen: Triton {triton.__version__}, NumPy {np.__version__}, PyTorch {torch.__version__}."


def _interpreting() -> bool:
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def _require_interpreter() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise MeterUnavailable(f"Triton cannot be imported ({error}), so there is no kernel to meter.") from error
    if not _interpreting():
        raise MeterUnavailable(
            "Kernels are compiled for the GPU in this process, where loads cannot be counted. Start "
            "Python with TRITON_INTERPRET=1 in its environment, before Triton is imported."
        )
    repair_interpreter()


def repair_interpreter() -> bool:
    """Lets Triton 3.6's interpreter run loops with run-time bounds under NumPy 2.4 and later.

    That Triton turns a loop bound, an array of one element, into an int by ``int(array)``, which NumPy >= 2.4 refuses.
    Returns whether a repair was needed now; does nothing when none is. Call it before the first interpreted launch.
    """
    from triton.runtime import interpreter

    class Probe:
        class handle:
            data = np.array([3], dtype=np.int32)

    class Scope:
        set_attr = staticmethod(setattr)

    patch = interpreter._patch_lang_tensor
    patch(Probe, Scope)
    try:
        range(Probe())
        return False
    except TypeError:
        pass

    def patch_lang_tensor(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())  # the launch's scope restores what was there

    interpreter._patch_lang_tensor = patch_lang_tensor
    return True


def repair_masks() -> bool:
    """Lets the interpreter take a mask that a scalar condition is part of: ``(lanes < length) & (slot >= 0)``.

    It keeps a comparison of scalars in the type of what was compared. Spread over a block and combined with a mask,
    that makes a mask of integers, which loads and stores refuse ("mask has unsupported dtype"); compiled kernels and
    the meter take it. Returns whether a repair was needed now. Call it before the first interpreted launch.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if hasattr(builder, "takes_any_mask"):
        return False
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, _with_boolean_mask(getattr(builder, name), place, interpreter.TensorHandle))
    builder.takes_any_mask = True
    return True


def _with_boolean_mask(operation, place, handle):
    @functools.wraps(operation)
    def run(*arguments, **named):
        mask = arguments[place]
        if mask.data.dtype != bool:
            arguments = (*arguments[:place], handle(mask.data.astype(bool), mask.dtype), *arguments[place + 1 :])
        return operation(*arguments, **named)

    return run


def _self_test_kernel(source, target, total, length):
    lanes = tl.program_id(0) * 8 + tl.arange(0, 8)  # tl becomes a global of this file when the test first runs
    values = tl.load(source + lanes, mask=lanes < length)
    tl.store(target + lanes, values)  # the last six lanes lie outside
    tl.atomic_add(total, 1.0)


_self_test_result: str | None = None  # None: not run yet; "": passed; else what was wrong


def _self_test() -> None:
    """Counts a kernel whose traffic is known: 10 of 16 lanes loaded, 10 stored, 6 stored past the end, 2 atomics."""
    global _self_test_result, tl
    if _self_test_result is None:
        try:
            import triton
            import triton.language as tl

            source, target, total = torch.arange(10.0), torch.zeros(16)[:10], torch.zeros(1)
            meter = TrafficMeter(source=source)
            meter._open()
            try:
                triton.jit(_self_test_kernel)[(2,)](source, target, total, 10)
            finally:
                meter._close()
            _self_test_result = _self_test_mismatch(meter.report(), target, total)
        except Exception as error:  # whatever moved inside Triton, the answer is the same: no meter
            _self_test_result = f"{type(error).__name__}: {error}"
    if _self_test_result:
        raise MeterUnavailable(
            f"The traffic meter does not understand this Triton ({_self_test_result}). "
            f"{_versions()} Install Triton 3.6 to 3.9 to count bytes; all else works without it."
        )


def _self_test_mismatch(report: TrafficReport, target: torch.Tensor, total: torch.Tensor) -> str:
    wild = report.out_of_bounds[0] if report.out_of_bounds else None
    seen = {
        "loaded": report["source"].loaded_bytes,
        "stored": report["target"].stored_bytes,
        "atomic": report["total"].atomic_operations,
        "grid": report.launches[0].grid,
        "result": target.tolist(),
        "count": total.item(),
        "wild": wild and (wild.kind, wild.tensor, wild.first_element, wild.last_element, wild.program),
        "line": wild and wild.line - _self_test_kernel.__code__.co_firstlineno,
    }
    expected = {
        "loaded": 40,
        "stored": 40,
        "atomic": 2,
        "grid": (2, 1, 1),
        "result": [float(i) for i in range(10)],
        "count": 2.0,
        "wild": ("store", "target", 10, 15, (1, 0, 0)),
        "line": 3,
    }
    wrong = [f"{key} is {seen[key]}, not {value}" for key, value in expected.items() if seen[key] != value]
    return "; ".join(wrong)
