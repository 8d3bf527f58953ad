"""From the accounts to a report: which name each row goes by, and its figures."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterable

import numpy as np

from .accounts import Accounts, Wild
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
        contended_bytes=_contended_bytes(accounts.rows),
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
        loaded_bytes=sum(row.bytes["load"] for row in rows),
        stored_bytes=sum(row.bytes["store"] for row in rows),
        atomic_bytes=sum(row.bytes["atomic"] for row in rows),
        atomic_operations=sum(row.atomic_lanes for row in rows),
        loads=sum(row.calls["load"] for row in rows),
        stores=sum(row.calls["store"] for row in rows),
        distinct_loaded_bytes=_distinct_bytes(rows, "load"),
        distinct_stored_bytes=_distinct_bytes(rows, "store"),
        loaded_sector_bytes=sum(row.sector_bytes for row in rows) if rows[0].count_sectors else None,
    )


def _contended_bytes(rows: list[Row]) -> int:
    """Bytes stored again, loaded as well as stored, or updated: without any, programs may run in any order."""
    contended = 0
    for _, group in itertools.groupby(sorted(rows, key=_storage), key=_storage):
        of_one = list(group)
        loaded, stored = (_distinct_bytes(of_one, kind) for kind in ("load", "store"))
        updated = sum(row.bytes["atomic"] for row in of_one)
        contended += updated + sum(row.bytes["store"] for row in of_one) + updated - stored
        contended += loaded + stored - _distinct_bytes(of_one, "load", "store")
    return contended


def _storage(row: Row) -> tuple[str, int]:
    return str(row.view.tensor.device), row.view.storage_address


def _distinct_bytes(rows: list[Row], *kinds: str) -> int:
    """Bytes that at least one access, of one of these kinds, of any of the rows, all of one storage, has touched."""
    if any(row.far for row in rows):
        return len(set().union(*(row.far_bytes(kind) for row in rows for kind in kinds)))
    if len({row.slot_bytes for row in rows}) == 1:
        touched = np.any([row.touched[kind] for row in rows for kind in kinds], axis=0)
        return int(np.count_nonzero(touched)) * rows[0].slot_bytes
    maps = [row.byte_map(kind) for row in rows for kind in kinds]
    shortest = min(map.size for map in maps)
    return int(np.count_nonzero(np.any([map[:shortest] for map in maps], axis=0)))
