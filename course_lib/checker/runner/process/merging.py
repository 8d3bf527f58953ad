"""What all ranks report of one case, as one report."""

from __future__ import annotations

_SUMS = ("unwritten", "guard_values", "undefined_values", "contended")
_LARGEST = ("largest_allocation", "largest_grid", "seconds", "graphs", "captured")


def merged(index: int, reports: dict[int, dict]) -> dict:
    """One frame for a case: the results of all ranks in a list, or the error of the first rank that met one.

    Bytes are those of all ranks together. Of launches, operations and allocations the rank counts that has most:
    what is asked of an answer is asked of each rank. What one rank did wrong carries its number.
    """
    ranks = sorted(reports)
    frames = [reports[rank] for rank in ranks]
    failed = next((rank for rank in ranks if reports[rank]["error"]), None)
    frame: dict = {"kind": "case", "index": index, "error": None, "result": None, "written": {}}
    if failed is not None:
        frame["error"] = {**reports[failed]["error"], "rank": failed}
    else:
        frame["result"] = [report["result"] for report in frames]
    for key in _SUMS:
        frame[key] = sum(report.get(key) or 0 for report in frames)
    for key in _LARGEST:
        frame[key] = max(report.get(key) or 0 for report in frames)
    frame["seconds"] = float(frame["seconds"])
    frame["launches"] = max((report.get("launches") or [] for report in frames), key=len)
    frame["graph_breaks"] = max((report.get("graph_breaks") or [] for report in frames), key=len)
    for key in ("operations", "largest_results", "read_by_pytorch"):
        frame[key] = _most([report.get(key) or {} for report in frames])
    frame["traffic"] = _added([report.get("traffic") or {} for report in frames])
    frame["undefined_loads"] = sorted({line for report in frames for line in report.get("undefined_loads") or []})
    frame["variants"] = [variant for report in frames for variant in report.get("variants") or []]
    frame["out_of_bounds"] = [
        f"on rank {rank}, {sentence}" for rank in ranks for sentence in reports[rank].get("out_of_bounds") or []
    ]
    frame["modified_inputs"] = [
        f"{name} (rank {rank})" for rank in ranks for name in reports[rank].get("modified_inputs") or []
    ]
    return frame


def _most(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: max(count.get(name, 0) for count in counts) for name in {n: 0 for c in counts for n in c}}


def _added(traffics: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    together: dict[str, dict[str, int]] = {}
    for traffic in traffics:
        for tensor, counts in traffic.items():
            row = together.setdefault(tensor, dict.fromkeys(counts, 0))
            for kind, number in counts.items():
                row[kind] += number
    return together
