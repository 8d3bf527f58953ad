"""What Triton's compiler refuses is told in its own words, at its line of the cell, with what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.checker.judge.exceptions import error_message
from course_lib.checker.runner.frames import raised_error
from tests.checker.runner import refused_kernels

WORKER_PROCESS = Path(__file__).resolve().parents[3] / "course_lib" / "checker" / "runner" / "process"
# The kernel to the line of the cell that the compiler names (counted from the first of the kernel's own, None where it
# names none), and words of what is said.
SAID = {
    "redefined under an if": (0, "initial value for `values` is of type fp32", "a name of its own"),
    "another dtype in a loop": (1, "Loop-carried variable total", "before the loop"),
    "another shape in a loop": (1, "Loop-carried variable total", "before the loop"),
    "no power of two": (0, "must be a power of 2", "a mask takes care"),
    "a length at run time": (0, "tl.constexpr", "compiler must know"),
    "two dtypes in a dot": (1, "same dtype", "a.to(b.dtype)"),
    "break": (2, "Break", "no `break`"),
    "continue": (2, "Continue", "no `continue`"),
    "return in a loop": (1, "`return`", "mask"),
    "a name that is not there": (0, "`offsets` is not defined", "it is no parameter of the kernel `kernel`"),
    "a global": (0, "global variable SIZE", "`tl.constexpr` parameter"),
    "a name of one branch": (2, "more is not defined", "only one branch"),
    "PyTorch's function": (None, "Unsupported function referenced", "run on the CPU"),
    "a helper without jit": (None, "Unsupported function referenced: <function twice>", "@triton.jit"),
    "an element of a tile": (0, "unsupported tensor index", "no numbers"),
    "an element assigned": (0, "__setitem__", "another"),
    "shapes that do not fit": (0, "", "equal or 1"),
    "a keyword that is none": (0, "unexpected keyword argument 'masks'", ""),
    "too large a tile": (0, "exceeds triton maximum tensor numel", "in a loop"),
}
FIRST_LINE = refused_kernels.CELL[: refused_kernels.CELL.index("{body}")].count("\n") + 1


@pytest.fixture(scope="module")
def described():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", refused_kernels.__file__, str(WORKER_PROCESS)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(output)


@pytest.mark.parametrize("name", SAID)
def test_a_refused_kernel_is_told_with_its_line_the_compilers_words_and_advice(described, name):
    line, words, advice = SAID[name]
    assert described[name] is not None, "the compiler took it"
    outcome, message, _ = error_message(raised_error(described[name]), refused_kernels.cell(name))
    assert outcome == "error"
    assert words in message and advice in message, message
    assert "at 0x" not in message and "\n" not in message and "tl.store" not in message, message
    if line is not None:
        assert f"(line {FIRST_LINE + line} of the cell)" in message, message


def test_an_error_in_a_helper_is_told_with_the_helpers_line(described):
    cell = refused_kernels.cell("inside a helper")
    line = cell[: cell.index("return tl.dot")].count("\n") + 1
    message = error_message(raised_error(described["inside a helper"]), cell)[1]
    assert f"(line {line} of the cell)" in message and "rank" in message, message


def test_every_refused_kernel_is_held_to_its_words():
    assert {*SAID, "inside a helper"} == set(refused_kernels.BODIES)


PTXAS = """PTXAS error: Internal Triton PTX codegen error
`ptxas` stderr:
ptxas /tmp/kernel.ptx, line 40; fatal   : Parsing error near '.v8': syntax error
Repro command: ptxas -lineinfo /tmp/kernel.ptx
"""


def test_what_the_assembler_refuses_is_the_answers_only_where_it_holds_assembly():
    error = raised_error({"type": "PTXASError", "text": PTXAS, "line": 4})
    said = error_message(error, "@triton.jit\ndef kernel(x): tl.store(x, tl.multiple_of(1, 16))\n")
    assert (said.outcome, said.mistake) == ("unsupported", "assembler_refused")
    assert "line 40; fatal   : Parsing error near '.v8'" in said.message and "Repro" not in said.message
    assert error_message(error, "tl.inline_asm_elementwise('mov', '=r', [x], tl.int32, True, 1)").outcome == "error"
