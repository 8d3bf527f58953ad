"""What the meter tells: bytes by tensor, launches, accesses outside a tensor; as text, as a table, as plain data."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field


class MeterUnavailable(RuntimeError):
    """The meter cannot count here; the message says why and what to do."""


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
        if self.first_element is None or self.last_element is None:
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
    contended_bytes: int = 0  # in one launch stored twice, stored and loaded, or updated: the order of programs matters

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
        rows: list[tuple[str, ...]] = [("tensor", "shape", "loaded", "times read", "stored", "atomic")]
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
    units = ("kB", "MB", "GB", "TB")
    power = next((power for power in range(1, len(units)) if count < 1000 ** (power + 1)), len(units))
    return f"{count / 1000**power:.3g} {units[power - 1]}"
