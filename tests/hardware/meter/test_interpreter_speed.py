"""The quicker interpreter computes what the slow one does, and stays slow where Triton's inside is another."""

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
