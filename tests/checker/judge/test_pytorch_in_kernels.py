"""What works on PyTorch's tensors and not in a kernel is told as what Triton has instead."""

from dataclasses import replace

import pytest

from course_lib.checker.judge.decide import judge
from course_lib.checker.judge.exceptions import error_message
from course_lib.checker.specification.seen import RaisedError
from tests.checker.samples import ADD, ADD_CELL

SMALL = replace(ADD, cases=lambda draw: list(ADD.cases(draw))[:1])
LOAD = "tl.load(x + i * x_stride, mask=mask)"
STORE = "tl.store(out + i, total, mask=mask)"
READ, WRITE = "tl.load(x + offsets, mask=...)", "tl.store(out + offsets, values, mask=...)"
TILE, CHANGED = "A tile's elements have no numbers", "tl.where(condition, new, old)"
SIZE = "Pass what the kernel needs as arguments"
HABITS = {
    "an element read": (LOAD, "x[i]", "`x[i]` (line 6 of the cell)", READ),
    "one read": (LOAD, "x[0]", "`x[0]`", READ),
    "elements written": (STORE, "out[i] = total", "`out[i]`", WRITE),
    "one written": (STORE, "out[tl.program_id(0)] = total", "`out[tl.program_id(0)]`", WRITE),
    "an element of a tile": (STORE, "tl.store(out, total[0])", "`total[0]`", TILE),
    "elements of a tile": (STORE, "tl.store(out + i, total[i])", "`total[i]`", TILE),
    "part of a tile": (STORE, "tl.store(out + i, total[:4])", "`total[:4]`", TILE),
    "a row of a tile": (STORE, "tl.store(out + i, total[None, :][0, :])", "`total[None, :][0, :]`", TILE),
    "a walk through a tile": (STORE, "for value in total: tl.store(out, value)", "`for value in total`", TILE),
    "a tile changed": (STORE, "total[0] = 1.0", "`total[0]`", CHANGED),
    "a product": (STORE, "total = total[:, None] @ total[None, :]", "total[None, :]`", "tl.dot(a, b)"),
    "a product in place": (STORE, "z = total[:, None]; z @= total[None, :]", "`z @= total[None, :]`", "tl.dot(a, b)"),
    "a shape": ("mask = i < length", "mask = i < x.shape[0]", "`x.shape`", SIZE),
    "all sizes": ("mask = i < length", "n, = x.shape", "`x.shape`", SIZE),
    "a stride": (LOAD, "tl.load(x + i * x.stride(0), mask=mask)", "`x.stride`", SIZE),
    "a number of elements": ("mask = i < length", "mask = i < x.numel()", "`x.numel`", SIZE),
    "a length": ("mask = i < length", "mask = i < len(x)", "`len(x)`", SIZE),
    "a function of PyTorch": (STORE, "total = torch.exp(total)", "`torch.exp(total)`", "functions of `tl`"),
    "a function of Python": (STORE, "total = math.exp(total)", "`math.exp(total)`", "functions of `tl`"),
    "a method": (STORE, "total = total.mean()", "`total.mean`", "A tile has no `mean`"),
}


@pytest.mark.parametrize("old, new, code, words", HABITS.values(), ids=HABITS)
def test_a_habit_of_pytorchs_is_told_with_what_triton_has(old, new, code, words):
    assert old in ADD_CELL
    verdict = judge(SMALL, ADD_CELL.replace(old, new))
    assert verdict.outcome == "error" and code in verdict.message and words in verdict.message, verdict


RIGHT_IN_A_KERNEL = {
    "rows and columns": "z = total[:, None] * total[None, :]",
    "a tile's own shape": "z = total * total.shape[0]",
}


@pytest.mark.parametrize("line", RIGHT_IN_A_KERNEL.values(), ids=RIGHT_IN_A_KERNEL)
def test_what_triton_takes_is_no_such_habit(line):
    assert judge(SMALL, ADD_CELL.replace("    tl.store", f"    {line}\n    tl.store")).passed


@pytest.mark.parametrize("text", ["division by zero", "name 'z' is not defined", "Both operands must be same dtype"])
def test_an_error_of_another_kind_on_such_a_line_is_told_as_itself(text):
    cell = ADD_CELL.replace(LOAD, "tl.load(x + i, mask=mask[:, None])")
    assert "PyTorch's" not in error_message(RaisedError("ValueError", text, line=6), cell).message


def test_a_size_of_what_a_helper_is_given_is_told_as_itself():
    """Of 19.2, where a function took its tile for one of two dimensions, and was told that it is an address."""
    helper = "@triton.jit\ndef flat(x):\n    return tl.reshape(x, [x.shape[0] * x.shape[1]])\n\n\n"
    error = RaisedError("IndexError", "tuple index out of range", line=3)
    assert "address" not in error_message(error, helper + ADD_CELL).message


def test_the_same_line_in_a_launcher_is_pythons_matter():
    cell = ADD_CELL.replace("    return out", "    return out[0][0][0]")
    verdict = judge(SMALL, cell)
    assert verdict.outcome == "error" and "PyTorch's" not in verdict.message, verdict


def test_block_pointers_which_triton_has_removed_are_told_with_what_to_write_instead():
    """`tl.make_block_ptr` stands in most tutorials; from Triton 3.8 on it raises, in the interpreter's words alone."""
    removed = "Block pointers have been removed in favor of the tensor descriptor API"
    said = error_message(RaisedError("NotImplementedError", removed, line=3), ADD_CELL).message
    assert "there is no `tl.make_block_ptr`" in said and "rows[:, None] * row_stride" in said
