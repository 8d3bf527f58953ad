"""The same verdicts on other processors: what once hung on the order of additions, run as two others add up.

PyTorch, NumPy and OpenBLAS choose their kernels by the processor's instructions, and each adds up a sum in another
order. Environment variables make them choose as an older processor would. Under these, names were lost and kernels
found wrong that were right; which ones, was each processor's.
"""

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from course_lib.home import ROOT

WRONG = "tests/submissions/test_submissions.py::test_a_wrong_answer_is_rejected_and_its_mistake_named"
LARGE_SCORES = "tests/kernels/attention/test_backward.py::test_large_and_very_negative_scores_are_right"
DECODE = "tests/kernels/paged/test_attention.py::test_decode_with_any_pages_lengths_strides_and_splits_is_right"
ONCE_BROKEN = [
    f"{WRONG}[4.4-no_running_max]",
    f"{WRONG}[4.6-probabilities_cast_before_sum]",
    f"{WRONG}[8.5-averaged_without_weights]",
    f"{WRONG}[8.5-averaged_without_weights__where_present]",
    f"{WRONG}[8.5-added_without_weights]",
    f"{WRONG}[10.6-log_sum_natural]",
    f"{WRONG}[10.6-head_forgotten]",
    LARGE_SCORES,
    f"{DECODE}[18]",
]
PLAYED = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "OPENBLAS_CORETYPE": "Haswell"},
    "DEFAULT": {"ATEN_CPU_CAPABILITY": "default", "OPENBLAS_CORETYPE": "Prescott"},
}
ONE_PRODUCT = """
import hashlib, numpy
factors = numpy.random.default_rng(0).standard_normal((2, 65, 65), dtype=numpy.float32)
print(hashlib.sha256((factors[0] @ factors[1]).tobytes()).hexdigest())
"""

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"),
    reason="only an x86-64 processor can play these two; this one's name is " + platform.machine(),
)


def without_numpys(instructions):
    """The features that NumPy must leave, which are those it has kernels for and this processor has: others it takes
    for mistakes, and warns or fails by its version."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    kept = ("SSE", "X86_V2", "X86_V3", "AVX2", "FMA", "F16C") if instructions == "AVX2" else ("SSE", "X86_V2")
    return " ".join(name for name in found if not name.startswith(kept))


def as_on(instructions, *arguments):
    """What a Python process prints that runs as on a processor with these instructions."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COURSE_STRICT"))}
    played = {**PLAYED[instructions], "NPY_DISABLE_CPU_FEATURES": without_numpys(instructions), "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=ours | played, capture_output=True, text=True, timeout=1500
    )


@pytest.mark.slow
@pytest.mark.parametrize("instructions", PLAYED)
def test_outcomes_and_names_are_the_same(instructions):
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT" != instructions:
        pytest.skip(f"this processor has no {instructions}")
    run = as_on(instructions, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *ONCE_BROKEN)
    assert f"\n{instructions}, python " in run.stdout, f"another processor was played:\n{run.stdout[:2000]}{run.stderr}"
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr
    assert f"{len(ONCE_BROKEN) + 1} passed" in run.stdout, run.stdout[-2000:]  # of LARGE_SCORES there are two


def test_the_played_processors_add_up_in_other_orders():
    """Else the test above would show nothing."""
    made = [as_on(instructions, "-c", ONE_PRODUCT) for instructions in PLAYED]
    assert all(run.returncode == 0 for run in made), [run.stderr for run in made]
    assert len({run.stdout for run in made}) == len(PLAYED)
