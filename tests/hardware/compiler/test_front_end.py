"""What Triton's compiler would be given for an interpreted launch, and what its front end says to it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from course_lib.hardware.meter import traffic
from course_lib.hardware.meter.traffic import known_kernels, triton_internals
from course_lib.hardware.meter.traffic import variants as recording
from course_lib.home import ROOT

pytestmark = pytest.mark.skipif(not triton_internals.interpreting(), reason="launches are recorded in the interpreter")


def test_a_launch_is_recorded_as_triton_binds_it():
    kernel = known_kernels.jit("taken_kernel")
    x, half = torch.ones(8), torch.ones(8, dtype=torch.float16)
    with traffic.record_variants() as variants:
        for total, length in ((0, 8), (1, 8), (0, 4), (0, 1)):
            kernel[(1,)](x, half, total, length)
        kernel[(1,)](x, x, total=1 << 40, length=0, num_warps=2)
    signatures = [tuple(variant["signature"].values()) for variant in variants]
    assert signatures == [
        ("*fp32", "*fp16", "i32", "i32"),
        ("*fp32", "*fp16", "constexpr", "i32"),
        ("*fp32", "*fp16", "i32", "constexpr"),
        ("*fp32", "*fp32", "i64", "i32"),
    ]
    assert variants[1]["constants"] == [((2,), ("plain", 1))]
    assert variants[3]["options"] == {"num_warps": 2}
    assert {variant["line"] for variant in variants} == {known_kernels.taken_kernel.__code__.co_firstlineno}


def test_recording_is_off_where_triton_binds_in_another_way(monkeypatch):
    monkeypatch.setattr(known_kernels, "TYPES", {**known_kernels.TYPES, "length": "i64"})
    recording._binding_is_known.cache_clear()
    try:
        with traffic.record_variants() as variants:
            known_kernels.jit("taken_kernel")[(1,)](torch.ones(8), torch.ones(8), 0, 8)
        assert variants == []
    finally:
        recording._binding_is_known.cache_clear()


def test_the_front_end_is_not_asked_where_kernels_are_interpreted():
    assert not traffic.front_end_is_known()


FAULTS = """
import importlib.util, sys
front = sys.argv[1] + "/__init__.py"
spec = importlib.util.spec_from_file_location("traffic", front, submodule_search_locations=[sys.argv[1]])
traffic = importlib.util.module_from_spec(spec); sys.modules["traffic"] = traffic
spec.loader.exec_module(traffic)
assert traffic.front_end_is_known()
from traffic import known_kernels
from triton.compiler import code_generator
def find(name, line): return known_kernels.jit(name)
variant = {"kernel": "taken_kernel", "line": 0, "signature": dict(known_kernels.TYPES),
           "constants": [((2,), ("plain", 1))], "options": {}}
visit = code_generator.CodeGenerator.visit_For
for fault in (MemoryError("x"), OSError(24, "too many files"), ImportError("x")):
    def failing(self, node): raise fault
    code_generator.CodeGenerator.visit_For = failing
    try: print(traffic.refusal(variant, find))
    except Exception as error: print("no refusal", type(error).__name__)
def failing(self, node): raise ValueError("of the kernel")
code_generator.CodeGenerator.visit_For = failing
print("refused", type(traffic.refusal(variant, find)).__name__)
code_generator.CodeGenerator.visit_For = visit
print("threads", len(__import__("os").listdir("/proc/self/task")))
"""


def test_a_fault_of_the_machine_is_no_refusal_though_the_compiler_wraps_it():
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, str(Path(traffic.__file__).parent)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    expected = ["no refusal CompilationError"] * 3 + ["refused CompilationError"]
    lines = done.stdout.splitlines()
    assert lines[:4] == expected, done.stdout
    assert lines[4] == "threads 1", "a forked child could not go on with the compiler's threads"
