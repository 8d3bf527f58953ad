"""The quicker interpreter computes what the slow one does, and stays slow where Triton's inside is another."""

import ast
import os
import subprocess
import sys
import textwrap

import pytest

from course_lib.hardware.meter.traffic import triton_internals
from course_lib.hardware.meter.traffic.triton_internals import speed
from course_lib.home import ROOT

pytestmark = pytest.mark.skipif(not triton_internals.interpreting(), reason="this is about the interpreter")


def _in_a_fresh_process(code):
    """What `code` prints where nothing of the interpreter has been touched."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    head = "import triton, triton.language as tl\nfrom triton.runtime import interpreter\n"
    head += "from course_lib.hardware.meter.traffic.triton_internals import speed\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_each_part_is_put_in_place_once():
    """Where Triton must be repaired before it is used, the import of the course has done so already."""
    code = """
    said = [quicken() for _ in range(2) for quicken in speed._QUICKER]
    print(*said, hasattr(interpreter._get_np_dtype, "known"))
    """
    *said, in_place = _in_a_fresh_process(code)
    count = len(speed._QUICKER)
    assert in_place == "True" and said[count:] == ["False"] * count and len(set(said[:count])) == 1


CHANGES = {
    "_numpy_types": "interpreter._get_np_dtype = lambda kind: object()",
    "_block_types": "tl.core.block_type.__init__ = lambda self, *_: vars(self).update(shape=(), numel=id(self))",
    "_tensors": "tl.core.tensor.__init__ = lambda self, *_: vars(self).update(handle=id(self))",
    "_broadcasts": "type(interpreter.interpreter_semantic).broadcast_impl_value = lambda self, *both: both[::-1]",
    "_builtins": "interpreter._patch_builtin = lambda pkg, builder, scope: None",
    "_nested_calls": "del interpreter._LangPatchScope",
}


def test_a_part_that_is_not_the_one_known_here_stays():
    """Each change in a process of its own, forked from one that has imported Triton."""
    code = f"""
import ast
import os
for part, change in {CHANGES!r}.items():
    if os.fork() == 0:
        exec(change)
        try:
            print(part, getattr(speed, part)(), flush=True)
        except Exception:
            print(part, False, flush=True)
        os._exit(0)
    os.wait()
"""
    said = _in_a_fresh_process(code)
    assert said[::2] == list(CHANGES) and set(said[1::2]) == {"False"}


KERNEL = """
import sys
import torch

@triton.jit
def doubled(values, BLOCK: tl.constexpr):
    return values + values

@triton.jit
def kernel(source, target, large, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    offsets = rows[:, None] * 2 * BLOCK + columns[None, :]
    tile = tl.load(source + offsets, mask=columns[None, :] < 7, other=1)
    wrapped = doubled(tl.full([BLOCK], 1, tl.int32) * large, BLOCK)
    total = tl.sum(tl.trans(doubled(tile, BLOCK)).to(tl.float32), axis=0) + wrapped
    tl.store(target + rows, tl.where(rows % 2 == 0, total, -total.to(tl.float16)))
"""


def test_the_results_are_those_of_the_slow_interpreter(tmp_path):
    """With sums that leave 32 bits, which wrap in both, and a function called within the kernel."""
    ask = "source, target = torch.arange(128.0).reshape(8, 16), torch.zeros(8)\n"
    ask += "kernel[(1,)](source, target, 2**30 + 5, BLOCK=8)\nprint(target.tolist())\n"
    results = []
    for quick in ("", "print(speed.quicken_interpreter(), file=sys.stderr)\n"):
        path = tmp_path / "kernel.py"
        path.write_text(
            "import triton, triton.language as tl\n"
            "from course_lib.hardware.meter.traffic.triton_internals import speed\n" + KERNEL + quick + ask + ask
        )
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        results.append(done.stdout)
    assert results[0] == results[1] and results[0].count("[") == 2


REDUCING = """
import time
import torch

@triton.jit
def merged(maximum, total, other_maximum, other_total):
    new = tl.maximum(maximum, other_maximum)
    return new, total * tl.exp(maximum - new) + other_total * tl.exp(other_maximum - new)

@triton.jit
def left_of(one, other):
    return one

@triton.jit
def larger(one, other):
    if one > other:
        return one
    return other

@triton.jit
def product(one, other):
    return one * other

@triton.jit
def kernel(source, sums, firsts, largest, products, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    offsets = rows[:, None] * COLUMNS + columns[None, :]
    tile = tl.load(source + offsets)
    maximum, total = tl.reduce((tile, tl.full([ROWS, COLUMNS], 1.0, tl.float32)), 1, merged)
    tl.store(sums + rows, maximum + tl.log(total))
    tl.store(firsts + columns, tl.reduce(tile, 0, left_of))
    tl.store(largest + columns, tl.reduce(tile, 0, larger))
    tl.store(products + offsets, tl.associative_scan(tile, 1, product, reverse=True))

def differences(rows, columns):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    found = [torch.empty(shape) for shape in (rows, columns, columns, (rows, columns))]
    started = time.process_time()
    kernel[(1,)](x, *found, ROWS=rows, COLUMNS=columns)
    seconds = time.process_time() - started
    exact = x.double()
    right = [exact.logsumexp(1), exact[0], exact.amax(0), exact.flip(1).cumprod(1).flip(1)]
    return seconds, [float((one - other).abs().max()) for one, other in zip(found, right)]
"""


def test_a_reduction_by_a_function_of_ones_own_takes_no_step_for_each_element(tmp_path):
    """A right answer to 3.5 that merged states by `tl.reduce` was stopped after 8 s: "a loop never ends"."""
    path = tmp_path / "kernel.py"
    path.write_text(
        "import triton, triton.language as tl\n"
        "from course_lib.hardware.meter.traffic import triton_internals\n" + REDUCING + "slow = differences(8, 64)\n"
        "triton_internals.repair_interpreter()\nprint(slow, differences(8, 64), differences(2, 4096))\n"
        "from triton.runtime import interpreter\nprint(interpreter.ReduceOps.generic_reduce.quick)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    said, in_place = done.stdout.splitlines()
    runs = ast.literal_eval("[" + said.replace(") (", "), (") + "]")
    assert in_place == "True" and len(runs) == 3
    for _, (sums, firsts, largest, products) in runs:
        assert sums < 1e-5 and not firsts > 1e-7 and not largest > 1e-7 and products < 1e-3
    assert runs[2][0] < 2.0, "4,096 columns by the pair"
