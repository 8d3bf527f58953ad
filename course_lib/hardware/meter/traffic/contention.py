"""Memory for which the programs of a launch contend: without any, they may run in any order.

Launches run one after the other. What one stores and a later one loads is no contention.
"""

from __future__ import annotations

import itertools

import numpy as np

from .tensors import Footprint, Row


def end_launch(rows: list[Row]) -> int:
    """Bytes that a launch stored again, loaded as well as stored, or updated; the next launch begins with none."""
    contended = 0
    touched = sorted((row for row in rows if row.in_launch is not None), key=_storage)
    for _, group in itertools.groupby(touched, key=_storage):
        of_one = [row.in_launch for row in group if row.in_launch is not None]
        loaded, stored = (distinct_bytes(of_one, kind) for kind in ("load", "store"))
        updated = sum(footprint.bytes["atomic"] for footprint in of_one)
        contended += updated + sum(footprint.bytes["store"] for footprint in of_one) + updated - stored
        contended += loaded + stored - distinct_bytes(of_one, "load", "store")
    for row in touched:
        row.in_launch = None
    return contended


def _storage(row: Row) -> tuple[str, int]:
    return str(row.view.tensor.device), row.view.storage_address


def distinct_bytes(footprints: list[Footprint], *kinds: str) -> int:
    """Bytes that at least one access, of one of these kinds, has touched; all footprints are of one storage."""
    if any(footprint.far for footprint in footprints):
        return len(set().union(*(footprint.far_bytes(kind) for footprint in footprints for kind in kinds)))
    if len({footprint.slot_bytes for footprint in footprints}) == 1:
        touched = np.any([footprint.touched[kind] for footprint in footprints for kind in kinds], axis=0)
        return int(np.count_nonzero(touched)) * footprints[0].slot_bytes
    maps = [footprint.byte_map(kind) for footprint in footprints for kind in kinds]
    shortest = min(map.size for map in maps)
    return int(np.count_nonzero(np.any([map[:shortest] for map in maps], axis=0)))
