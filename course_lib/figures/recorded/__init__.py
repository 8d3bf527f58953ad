"""Runs of the course's benchmarks on GPUs that a reader may not have: what `bench` wrote there, kept as data.

A record names the GPU, the versions and the date. It is never a live measurement, and whoever shows it says so.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent


def recorded(bench: str, gpu: str = "h200") -> dict:
    """The record of a benchmark ("backward") on a GPU ("h200"): what the benchmark writes, and "date".

    Raises:
        ValueError: nothing was recorded under these names; the message lists what was.
    """
    path = FOLDER / f"{bench}_{gpu}.json"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
        raise ValueError(f"No run of {bench!r} on {gpu!r} is recorded. There are: {known}.")
    return json.loads(path.read_text())
