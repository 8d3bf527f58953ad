"""The cells of exercises 9.7 and 9.8 as the worker sees them, compiled for sm_90 without a GPU.

Gluon has no interpreter, so that on most machines nothing else tries these kernels. Here each cell travels as in a
check (a file of its own, with the names that every chapter imports) and is held to what its chapter says of it.
"""

import importlib.util
import math
import re
import sys

import pytest
import torch

from course_lib.checker import Draw, Seen
from course_lib.checker.judge import compare, evaluate
from course_lib.checker.judge.decide import judge
from course_lib.checker.judge.explain import explain
from course_lib.checker.judge.formula_slips import formula_model
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.specification import catalog
from course_lib.checker.specification.catalog import solution_source
from course_lib.checker.specification.cells import undefined_names
from course_lib.hardware.compiler.views import compile_many
from course_lib.hardware.device import machine
from exercises.ch09_attention_on_hopper import ex8_overlap
from tests.submissions.edits import changed
from tests.submissions.everything import unusual, wrong

PREDEFINED = ("torch", "triton", "tl", "np", "math", "F")


def module_of(source, folder, name):
    """The cell run from a file, as the worker does."""
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    vars(module).update(torch=torch, math=math)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tiles(gl, rows, columns, kind="bf16"):
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<{kind}[{rows},{columns}],{layout!r}>"


def ring_request(module):
    tile = tiles(module.gl, 64, 64)
    types = {"source": tile, "target": tile, "factor": "fp32", "all_tiles": "i32"}
    return {
        "kernel": module.ring_kernel,
        "signature": types,
        "constexprs": {},
        "arch": 90,
        "num_warps": 4,
        "maxnreg": 128,
        "want_sass": True,
    }


def attention_request(module, overlapped, turns=True):
    queries, keys = tiles(module.gl, 64, 128), tiles(module.gl, 128, 128)
    types = {
        "queries": queries,
        "keys": keys,
        "values": keys,
        "outputs": queries,
        "query_length": "i32",
        "key_length": "i32",
        "scale_log2": "fp32",
    }
    return {
        "kernel": module.attention_kernel,
        "signature": types,
        "arch": 90,
        "num_warps": 4,
        "maxnreg": 168,
        "constexprs": {"OVERLAPPED": overlapped, "TURNS": turns},
        "want_sass": True,
    }


@pytest.mark.parametrize("identity", ["9.7", "9.8"])
def test_a_gluon_cell_stands_alone(identity):
    assert not undefined_names(solution_source(identity), PREDEFINED)


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    ring = module_of(solution_source("9.7"), folder, "cell_9_7")
    attention = module_of(solution_source("9.8"), folder, "cell_9_8")
    requests = [ring_request(ring), attention_request(attention, False), attention_request(attention, True)]
    return dict(zip(("ring", "in turn", "overlapped"), compile_many(requests)))


def test_the_ring_moves_its_tiles_by_the_copy_engine(views):
    ring = views["ring"]
    assert ring.asynchronous_copies == {"tma": 2} and ring.spill_bytes == 0
    assert not ring.load_widths and not ring.store_widths


def hidden(view):
    """Exponentials under a product, by the course's own answer to 9.6."""
    names = {}
    exec(solution_source("9.6"), names)
    return names["hidden_exponentials"](view.sass)


def test_exponentials_stand_under_a_product_only_where_the_loop_overlaps(views):
    for name in ("in turn", "overlapped"):
        assert views[name].spill_bytes == 0 and views[name].num_warps == 12 and views[name].fits
    exponentials = len(re.findall(r"MUFU\.EX2", views["overlapped"].sass))
    assert hidden(views["in turn"]) == 0
    # Half of them: the other half belongs to each consumer's first block, which has no product to hide behind.
    assert hidden(views["overlapped"]) == exponentials // 2 > 100


def test_the_oracle_of_many_keys_is_attention(monkeypatch):
    """Its shortcut, one block of keys for all of them, is right for the keys that the case draws."""
    query, value = torch.randn(2, 128, 128).double(), torch.randn(2, 640, 128).double()
    key = torch.randn(2, 128, 128).double().repeat(1, 5, 1)
    plainly = ex8_overlap.overlap_oracle(query, key, value)
    monkeypatch.setattr(ex8_overlap, "LONG", 512)
    torch.testing.assert_close(ex8_overlap.overlap_oracle(query, key, value), plainly)


@pytest.mark.slow
@pytest.mark.parametrize("identity", ["9.7", "9.8"])
def test_each_slip_is_told_as_itself(identity):
    """What a slip makes of the cases, rounded as a GPU would round it, is named as that slip and no other."""
    task = catalog.exercise(identity)
    cases = [case for case in task.cases(Draw(11, on_gpu=True, bfloat16=True)) if case.args[0].numel() < 10**6]
    truths = [compare.truth(task, case, tf32=False) for case in cases]
    model = formula_model(task.oracle_for(cases[0]), None, task.slips, made=False)
    for slip in model.slips:
        outcomes = []
        for case, truth in zip(cases, truths):
            got = evaluate.call(slip.formula, case, torch.Tensor.float).to(case.args[0].dtype)
            outcomes.append(Outcome(case, Seen(), got, truth, compare.compare(got, truth, task)))
        found = explain(model, outcomes)
        assert found and found.sentence == slip.sentence, f"{slip.id} was told as {found and found.sentence}"


@pytest.mark.slow
@pytest.mark.parametrize("identity, request_of", [("9.7", ring_request), ("9.8", lambda m: attention_request(m, True))])
def test_wrong_and_unusual_answers_compile(identity, request_of, tmp_path):
    """Where no Hopper GPU is, a submission that doesn't even compile would go unseen."""
    answers = {**wrong(identity), **unusual(identity)}
    modules = [
        module_of(source, tmp_path, f"cell_{identity.replace('.', '_')}_{number}")
        for number, source in enumerate(answers.values())
    ]
    views = compile_many([request_of(module) for module in modules])
    broken = {name: str(view) for name, view in zip(answers, views) if isinstance(view, Exception)}
    assert not broken


without_a_hopper = pytest.mark.skipif(machine().compute_capability == (9, 0), reason="a Hopper GPU runs the kernels")
REFUSED = {
    "an argument forgotten": ("9.7", ", buffers.index(buffer))", ")", "missing 1 required positional argument"),
    "brackets": ("9.7", "ready.index(buffer), phase)", "ready[buffer], phase)", "is picked by `.index(buffer)`"),
    "all buffers at once": ("9.7", "buffers.index(buffer).load", "buffers.load", "is `.index(buffer)` missing"),
    "another type stored": ("9.7", ".to(tile.dtype))", ")", "source dtype fp32 and destination dtype bf16 must match"),
    "a column left out": (
        "9.8",
        "accumulator * gl.expand_dims(rescale, 1)\n",
        "accumulator * rescale\n",
        "rank mismatch",
    ),
}


@without_a_hopper
@pytest.mark.parametrize("identity, old, new, told", REFUSED.values(), ids=REFUSED)
def test_what_the_compiler_refuses_is_told_where_no_hopper_runs_it(identity, old, new, told):
    verdict = judge(catalog.exercise(identity), changed(identity, (old, new)))
    assert (verdict.outcome, verdict.mistake) == ("error", "kernel_cannot_be_compiled"), str(verdict)
    assert told in verdict.message and "of the cell)" in verdict.message and "interpreter" not in verdict.message


@without_a_hopper
@pytest.mark.parametrize("identity", ["9.7", "9.8"])
def test_what_the_compiler_takes_is_left_to_a_hopper(identity):
    """Wrong answers too, whose kernels compile; nothing is said of numbers that nobody has seen."""
    answers = {"the course's": solution_source(identity)} | wrong(identity) | unusual(identity)
    for name, source in answers.items():
        verdict = judge(catalog.exercise(identity), source)
        assert verdict.outcome == "unsupported" and "The compiler reads your kernel" in verdict.message, name


@without_a_hopper
@pytest.mark.parametrize(
    "old, new", [("ring_kernel", "my_kernel"), ("@gluon.jit", "@gluon.jit("), ("gl.int64", "int_64")]
)
def test_what_the_compiler_cannot_be_asked_is_no_ones_fault_but_pythons(old, new):
    source = solution_source("9.7").replace(old, new)
    verdict = judge(catalog.exercise("9.7"), source)
    assert verdict.outcome == "unsupported" and "The compiler" not in verdict.message
