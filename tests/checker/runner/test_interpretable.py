"""An answer is judged alike in the interpreter and on a GPU, or told that this machine cannot judge it."""

from dataclasses import replace

import pytest

from course_lib.checker.judge.decide import judge
from course_lib.checker.runner import running
from course_lib.checker.runner.frames import Frame
from course_lib.checker.runner.worker import Ending
from course_lib.checker.specification.seen import RaisedError, Seen
from course_lib.hardware.device import machine
from tests.checker.samples import ADD, ADD_CELL

ONLY_ON_A_GPU = {
    "benchmark": (
        "    return out",
        "    triton.testing.do_bench(lambda: None)\n    return out",
        "asks Triton for its GPU",
    ),
    "assembly": (
        "    tl.store",
        "    total = tl.inline_asm_elementwise('mov.b32 $0, $1;', '=r,r', [total], tl.float32, True, 1)\n    tl.store",
        "holds inline assembly",
    ),
    "libdevice": (
        "    tl.store",
        "    total = triton.language.extra.libdevice.rint(total) * 1.0\n    tl.store",
        "calls CUDA's libdevice (line 7 of the cell)",
    ),
}


@pytest.mark.skipif(machine().tier != "none", reason="on a GPU these are judged")
@pytest.mark.parametrize("old, new, words", ONLY_ON_A_GPU.values(), ids=ONLY_ON_A_GPU)
def test_what_the_interpreter_lacks_is_no_error_of_the_answers(old, new, words):
    verdict = judge(ADD, ADD_CELL.replace(old, new))
    assert verdict.outcome == "unsupported" and words in verdict.message, verdict
    assert "cannot be judged on this machine" in verdict.message


def test_on_a_gpu_what_the_interpreter_lacks_is_left_to_the_gpu(monkeypatch):
    monkeypatch.setattr(running, "machine", lambda: replace(machine(), tier="nvidia"))
    monkeypatch.setattr(running, "supports_bfloat16", lambda: False)
    runs = []

    def grouped(exercise, source, names, draw, interpreted, **how):
        runs.append("interpreted" if interpreted else "compiled")
        error = RaisedError("NotImplementedError", "inline_asm not supported in interpreter mode")
        return [running.Run([], interpreted, Ending([{"kind": "done"}]), {0: Frame(Seen(error=error))})]

    monkeypatch.setattr(running, "_grouped", grouped)
    kept = running.run_cases(ADD, ADD_CELL, {"add": "add"}, seed=1)
    assert runs == ["interpreted", "compiled"] and [run.interpreted for run in kept] == [False]


AS_ON_A_GPU = {
    "a float's own cast": ("total, mask=mask)", "total * scale.to(tl.float32), mask=mask)"),
    "a scalar condition": ("total, mask=mask)", "total, mask=mask & (tl.max(total) > -float('inf')))"),
    "imported names": ("@triton.jit", "from triton.language import load, store\n@triton.jit"),
    "tuned": (
        "@triton.jit",
        "@triton.autotune([triton.Config({'BLOCK': 256}), triton.Config({'BLOCK': 512})], key=['length'])\n@triton.jit",
    ),
}


@pytest.mark.parametrize("name", AS_ON_A_GPU)
def test_what_compiled_kernels_do_the_check_takes_too(name):
    cell = ADD_CELL.replace(*AS_ON_A_GPU[name])
    if name == "a float's own cast":
        cell = cell.replace("y_stride, BLOCK", "y_stride, scale, BLOCK").replace(
            "y.stride(0), BLOCK", "y.stride(0), 1.0, BLOCK"
        )
    if name == "imported names":
        cell = cell.replace("tl.load", "load").replace("tl.store", "store")
    if name == "tuned":
        cell = cell.replace(", BLOCK=512", "").replace("[(triton.cdiv(x.numel(), 512),)]", "[grid]")
        cell = cell.replace(
            "    kernel[", "    grid = lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)\n    kernel["
        )
    verdict = judge(ADD, cell)
    assert verdict.passed, verdict
