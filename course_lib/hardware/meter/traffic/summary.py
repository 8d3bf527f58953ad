"""From the accounts to a report: which name each row goes by, and its figures."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterable

from .accounts import Accounts, Wild
from .contention import distinct_bytes
from .results import Allocation, Launch, OutOfBounds, TensorTraffic, TrafficReport
from .tensors import Row, View


def report(
    accounts: Accounts,
    named: dict[str, View],
    launches: Iterable[Launch],
    allocations: Iterable[Allocation],
    undefined: Iterable[tuple[str, str, int]],
) -> TrafficReport:
    """``undefined``: kernel, file and line of the loads that left lanes undefined."""
    names, groups = _resolve_names(accounts.rows, named)
    return TrafficReport(
        tensors=tuple(_traffic(name, rows, named) for name, rows in groups.items()),
        launches=tuple(launches),
        out_of_bounds=tuple(
            _out_of_bounds(wild, names) for wild in sorted(accounts.wild.values(), key=lambda wild: wild.moment)
        ),
        out_of_bounds_unlisted=accounts.wild_unlisted,
        allocations=tuple(allocations),
        undefined_loads=tuple(
            f"{kernel}, line {line}: {linecache.getline(file, line).split('  #')[0].strip()}"
            for kernel, file, line in undefined
        ),
        contended_bytes=accounts.contended_bytes(),
    )


def _resolve_names(rows: list[Row], named: dict[str, View]) -> tuple[dict[int, str], dict[str, list[Row]]]:
    """The name of each row, by its id, and the rows of each name."""
    names: dict[int, str] = {}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        given = [name for name, view in named.items() if view.contains(row.view)]
        if given:  # the tightest of the views that hold this row
            name = min(given, key=lambda name: named[name].end - named[name].start)
        else:
            qualified = next(iter(row.parameters), row.name)
            numbered = (f"{qualified} ({number})" for number in itertools.count(2))
            choices = itertools.chain((row.name, qualified), numbered)
            name = next(choice for choice in choices if choice not in groups and choice not in named)
        names[id(row)] = name
        groups.setdefault(name, []).append(row)
    return names, groups


def _out_of_bounds(wild: Wild, names: dict[int, str]) -> OutOfBounds:
    return OutOfBounds(
        kind=wild.kind,
        tensor=names[id(wild.row)] if wild.row else "unknown",
        parameter=wild.parameter,
        kernel=wild.kernel,
        file=wild.file,
        line=wild.line,
        source=linecache.getline(wild.file, wild.line).strip(),
        program=wild.program,
        programs=len(wild.programs),
        lanes=wild.lanes,
        first_element=wild.low,
        last_element=wild.high,
        length=wild.length,
    )


def _traffic(name: str, rows: list[Row], named: dict[str, View]) -> TensorTraffic:
    view = named[name] if name in named else rows[0].view
    return TensorTraffic(
        name=name,
        parameters=tuple(dict.fromkeys(parameter for row in rows for parameter in row.parameters)),
        shape=tuple(view.tensor.shape),
        dtype=str(view.tensor.dtype).removeprefix("torch."),
        size_bytes=view.tensor.numel() * view.item_bytes,
        loaded_bytes=sum(row.whole.bytes["load"] for row in rows),
        stored_bytes=sum(row.whole.bytes["store"] for row in rows),
        atomic_bytes=sum(row.whole.bytes["atomic"] for row in rows),
        atomic_operations=sum(row.atomic_lanes for row in rows),
        loads=sum(row.calls["load"] for row in rows),
        stores=sum(row.calls["store"] for row in rows),
        distinct_loaded_bytes=distinct_bytes([row.whole for row in rows], "load"),
        distinct_stored_bytes=distinct_bytes([row.whole for row in rows], "store"),
        loaded_sector_bytes=sum(row.sector_bytes for row in rows) if rows[0].count_sectors else None,
    )
