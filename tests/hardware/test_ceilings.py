"""Ceilings: measured once, remembered per device, never believed when damaged."""

import dataclasses
import json

import pytest

from course_lib.hardware.ceilings import cache_sweep
from course_lib.hardware.ceilings import cpu as cpu_ceilings
from course_lib.hardware.ceilings import measured as ceilings
from course_lib.hardware.ceilings.measured import Ceilings

ROUND = Ceilings(
    device="any",
    kind="cpu",
    copy_bandwidth=2e10,
    read_bandwidth=3e10,
    matmul_rate={"float32": 1e11},
    fma_rate=4e10,
    launch_overhead=2e-6,
    l2_bandwidth=None,
    on_chip_bandwidth=1e11,
    spread={"fma_rate": 0.1},
    sweep=((16384, 9e10), (2**25, 2e10)),
    measured_at="2026-01-01T00:00:00+00:00",
    notes=("a note",),
)


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A course folder of its own, and measuring replaced by a count."""
    monkeypatch.setenv("COURSE_HOME", str(tmp_path))
    measured = []

    def measure():
        measured.append(None)
        return dataclasses.replace(ROUND, copy_bandwidth=2e10 + len(measured))

    monkeypatch.setattr(ceilings, "measure_ceilings", measure)
    return measured


def test_what_was_measured_is_remembered_exactly(home):
    first = ceilings.ceilings()
    assert ceilings.ceilings() == first
    assert len(home) == 1


def test_refresh_measures_again_and_is_remembered(home):
    first = ceilings.ceilings()
    second = ceilings.ceilings(refresh=True)
    assert second != first
    assert ceilings.ceilings() == second


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: json.dumps({"copy_bandwidth": 1}),
        lambda text: text.replace('"fma_rate": 40000000000.0', '"fma_rate": -1', 1),
        lambda text: text.replace('"fma_rate": 40000000000.0', '"fma_rate": NaN', 1),
        lambda text: text.replace('"fma_rate": 40000000000.0', '"fma_rate": "fast"', 1),
        lambda text: json.dumps(json.loads(text) | {"matmul_rate": {}}),
        lambda text: json.dumps(json.loads(text) | {"matmul_rate": None}),
        lambda text: json.dumps(json.loads(text) | {"sweep": [1, 2]}),
        lambda text: json.dumps(json.loads(text) | {"from_the_future": 1}),
    ],
    ids=["cut off", "empty", "list", "few fields", "negative", "NaN", "a word", "no matmul", "null", "sweep", "new"],
)
def test_a_damaged_file_is_measured_anew(home, damage):
    ceilings.ceilings()
    path = ceilings.cache_path()
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    ceilings.ceilings()
    assert len(home) == 2
    assert ceilings.read_cache(path) is not None


def test_a_file_that_is_not_text_is_measured_anew(home):
    ceilings.ceilings()
    ceilings.cache_path().write_bytes(b"\xff\xfe\x00")
    ceilings.ceilings()
    assert len(home) == 2


def test_another_driver_or_pytorch_is_another_file(home, monkeypatch):
    before = ceilings.cache_path()
    here = ceilings.machine()
    for change in ({"torch": "9.9.9"}, {"driver": (99, 0)}, {"cpu_name": "another"}, {"cpu_cores": 999}):
        monkeypatch.setattr(ceilings, "machine", lambda change=change: dataclasses.replace(here, **change))
        assert ceilings.cache_path() != before


def test_no_half_written_file_is_left(home):
    ceilings.ceilings()
    assert [path.suffix for path in ceilings.cache_path().parent.iterdir()] == [".json"]


def test_the_memory_roof_is_the_better_of_copy_and_read():
    assert ROUND.memory_bandwidth == 3e10
    assert dataclasses.replace(ROUND, copy_bandwidth=5e10).memory_bandwidth == 5e10


def test_a_cpu_is_really_measured(monkeypatch):
    """Every figure is there and of the size that a computer has; no more can be asked of a busy machine."""
    monkeypatch.setattr(cpu_ceilings, "SECONDS", 0.02)
    monkeypatch.setattr(cpu_ceilings, "LEAST_TENSOR", 2**25)
    monkeypatch.setattr(cpu_ceilings, "MATMUL_SIZES", (256,))
    monkeypatch.setattr(cpu_ceilings, "CACHED_ELEMENTS", (16 * 1024,))
    figures = cpu_ceilings.measure_cpu()
    found = dataclasses.replace(ROUND, **figures)
    assert ceilings.plausible(found)
    assert 1e8 < found.memory_bandwidth < 1e13
    assert 1e8 < found.fma_rate < 1e14
    assert 1e-8 < found.launch_overhead < 1e-2
    assert set(found.spread) >= {"copy_bandwidth", "read_bandwidth", "fma_rate", "matmul_rate.float32"}


def test_the_sweep_leaves_the_number_of_threads_as_it_was(monkeypatch):
    import torch

    monkeypatch.setattr(cache_sweep, "SECONDS", 0.001)
    monkeypatch.setattr(cache_sweep, "CPU_WINDOWS", (2**14, 2**16))
    before = torch.get_num_threads()
    sweep = cache_sweep.cpu_sweep()
    assert torch.get_num_threads() == before
    assert [window for window, _ in sweep] == [2**14, 2**16]
    assert all(speed > 1e8 for _, speed in sweep)


def test_a_levels_speed_is_read_where_the_level_fits_and_the_one_before_does_not():
    sweep = ((16, 9.0), (32, 8.0), (64, 5.0), (128, 4.0), (256, 2.0))
    assert cache_sweep.speed_within(sweep, 0, 48) == 8.0
    assert cache_sweep.speed_within(sweep, 48, 200) == 4.0
    assert cache_sweep.speed_within(sweep, 200, 210) is None
