"""The compiler view tells the truth about a kernel for any architecture, from a process that interprets kernels."""

import linecache
import os
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler import process
from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.compiler.views import CompileError, compile_many, compile_view, compile_views

ADD = {"left": "*fp32", "right": "*fp32", "out": "*fp32", "length": "i32"}
MATMUL = {"left": "*fp16", "right": "*fp16", "out": "*fp32", "inner": "i32", "stride": "i32"}
SCALE = tl.constexpr(2.0)
TENSOR = torch.zeros(3)


@triton.jit
def helper(values):
    return values * SCALE


@triton.jit
def add_kernel(left, right, out, length, BLOCK: tl.constexpr = 1024):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < length
    tl.store(out + lanes, helper(tl.load(left + lanes, mask=inside)) + tl.load(right + lanes, mask=inside), mask=inside)


@triton.autotune([triton.Config({"TILE": 64}), triton.Config({"TILE": 128})], key=["inner"])
@triton.jit
def matmul_kernel(left, right, out, inner, stride, TILE: tl.constexpr, DEPTH: tl.constexpr):
    rows, columns, depth = tl.arange(0, TILE), tl.arange(0, TILE), tl.arange(0, DEPTH)
    total = tl.zeros([TILE, TILE], dtype=tl.float32)
    for start in range(0, inner, DEPTH):
        a = tl.load(left + rows[:, None] * stride + (start + depth)[None, :])
        b = tl.load(right + (start + depth)[:, None] * stride + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(out + rows[:, None] * stride + columns[None, :], total)


@triton.jit
def wrong_kernel(out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.zeros([BLOCK * 2], dtype=tl.float32))


@triton.jit
def tensor_using_kernel(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), TENSOR)


@triton.jit
def descriptor_kernel(matrix, out, BLOCK: tl.constexpr):
    tile = matrix.load([tl.program_id(0) * BLOCK, 0])
    tl.store(out + tl.arange(0, BLOCK), tl.sum(tile.to(tl.float32), axis=1))


class Bomb:
    """A constant that ends the process that unpacks it, as a crash of the compiler would."""

    def __reduce__(self):
        return os._exit, (3,)


class Abort:
    """The same, but as LLVM does it where it meets what must never happen."""

    def __reduce__(self):
        return os.abort, ()


def matmul(arch, **changes):
    request = {"kernel": matmul_kernel, "signature": MATMUL, "constexprs": {"TILE": 64, "DEPTH": 64}, "arch": arch}
    return {**request, **changes}


@pytest.fixture(scope="module")
def views():
    """Everything that these tests look at, compiled in one go."""
    add = {"kernel": add_kernel, "signature": ADD, "constexprs": {}}
    requests = {
        "add": add,
        "add, even length": {**add, "divisible": list(ADD), "want_sass": True},
        "add, nothing known": {**add, "divisible": []},
        "matmul 75": matmul(75),
        "matmul 80": matmul(80),
        "matmul 90": matmul(90),
        "matmul 100": matmul(100),
        "matmul short of registers": matmul(80, maxnreg=48),
        "matmul too large": matmul(86, num_stages=8),
        "descriptor": {
            "kernel": descriptor_kernel,
            "signature": {"matrix": "tensordesc<fp16[64,64]>", "out": "*fp32"},
            "constexprs": {"BLOCK": 64},
        },
        "wrong": {"kernel": wrong_kernel, "signature": {"out": "*fp32"}, "constexprs": {"BLOCK": 16}},
        "tensor": {"kernel": tensor_using_kernel, "signature": {"out": "*fp32"}, "constexprs": {"BLOCK": 16}},
        "bomb": {"kernel": wrong_kernel, "signature": {"out": "*fp32"}, "constexprs": {"BLOCK": Bomb()}},
        "aborts": {"kernel": wrong_kernel, "signature": {"out": "*fp32"}, "constexprs": {"BLOCK": Abort()}},
        "after the bomb": {**add, "constexprs": {"BLOCK": 512}},
    }
    return dict(zip(requests, compile_many(requests.values()), strict=True))


def test_a_memory_kernel_has_no_spills_no_shared_memory_and_no_matrix_instructions(views):
    view = views["add"]
    assert 8 <= view.registers <= 48 and view.spill_bytes == view.shared_bytes == 0
    assert view.instructions == {} and view.matrix_instruction is None
    assert view.fits and view.programs_per_sm == 16
    assert ".target sm_90" in view.ptx and view.sass is None


def test_wide_loads_need_addresses_and_length_to_be_multiples_of_16(views):
    assert views["add, even length"].load_widths == {16: 4} and views["add, even length"].store_widths == {16: 2}
    assert set(views["add, nothing known"].load_widths) == {4}


def test_sass_comes_on_request(views):
    assert "LDG.E.128" in views["add, even length"].sass


@pytest.mark.parametrize(("arch", "kind"), [(75, None), (80, "mma.sync"), (90, "wgmma"), (100, "tcgen05")])
def test_each_generation_has_its_matrix_instruction(views, arch, kind):
    assert views[f"matmul {arch}"].matrix_instruction == kind


def test_pipelined_loads_are_asynchronous_copies_into_shared_memory(views):
    assert views["matmul 80"].asynchronous_copies["cp.async"] > 0
    assert views["matmul 80"].shared_bytes >= 2 * 2 * 64 * 64 * 2
    assert "tma" in views["descriptor"].asynchronous_copies


def test_spills_are_counted_in_bytes_and_instructions(views):
    view = views["matmul short of registers"]
    assert view.registers <= 48 and view.spill_bytes > 0 and view.spill_stores > 0 and view.spill_loads > 0
    assert views["matmul 80"].spill_bytes == 0


def test_a_program_larger_than_shared_memory_is_told_so(views):
    view = views["matmul too large"]
    assert view.shared_bytes > ARCHITECTURES[86].shared_per_block
    assert not view.fits and view.programs_per_sm == 0 and "DOES NOT FIT" in str(view)


def test_a_compile_error_names_kernel_line_and_reason(views):
    error = views["wrong"]
    expected = wrong_kernel.fn.__code__.co_firstlineno + 3
    assert isinstance(error, CompileError) and error.line == expected
    assert "wrong_kernel for sm_90" in str(error) and f"line {expected}" in str(error) and "shape" in str(error)


def test_a_tensor_used_as_a_global_is_named(views):
    assert "TENSOR could not be sent to the compiler: it is a Tensor" in str(views["tensor"])


def test_a_crash_of_the_compiler_costs_one_kernel_not_the_batch(views):
    assert isinstance(views["bomb"], CompileError) and "status 3" in str(views["bomb"])
    assert views["after the bomb"].registers > 0
    aborted = str(views["aborts"])
    assert "the compiler's process died of SIGABRT (abort)" in aborted and "a shape, layout or dtype" in aborted


class Endless:
    """A constant that computes for ever while it is unpacked, as the compiler does on a tile of 100,003 elements."""

    def __reduce__(self):
        return exec, ("while True: pass",)


def test_a_compiler_that_never_ends_is_stopped_by_the_processors_clock_and_the_next_kernel_compiles():
    request = {"kernel": add_kernel, "signature": ADD}
    requests = [{**request, "constexprs": {"BLOCK": Endless()}}, {**request, "constexprs": {"BLOCK": 256}}]
    endless, fine = compile_many(requests, jobs=1, processor_seconds=2)
    assert "not done after 2 s of processor time" in str(endless)
    assert fine.registers > 0


def test_a_process_is_kept_for_the_next_kernels_and_replaced_when_it_dies_or_the_environment_changes(monkeypatch):
    process.pool.stop()
    compile_view(add_kernel, ADD)
    (first,) = process.pool.idle
    compile_view(add_kernel, ADD)
    assert process.pool.idle == [first]
    first.popen.kill()
    first.popen.wait()
    assert compile_view(add_kernel, ADD).registers > 0
    (second,) = process.pool.idle
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path(os.environ["COURSE_HOME"]) / "another cache"))
    assert compile_view(add_kernel, ADD).registers > 0
    assert second not in process.pool.idle and second.popen.poll() is not None


def test_equal_requests_are_compiled_once(monkeypatch):
    asked = []
    compile_share = process.compile_share
    monkeypatch.setattr(
        process, "compile_share", lambda share, seconds: asked.extend(share) or compile_share(share, seconds)
    )
    request = {"kernel": add_kernel, "signature": ADD}
    first, other, again = compile_many([request, {**request, "arch": 80}, dict(request)])
    assert len(asked) == 2 and first == again and (first.arch, other.arch) == (90, 80)


def test_a_changed_constant_of_a_kernels_module_is_seen_though_compiled_kernels_are_kept(monkeypatch):
    before = compile_view(add_kernel, ADD, arch=80)
    monkeypatch.setitem(globals(), "SCALE", tl.constexpr(3.0))
    changed = compile_view(add_kernel, ADD, arch=80)
    assert before.ptx != changed.ptx


def test_the_comparison_has_a_column_for_each_architecture():
    comparison = compile_views(add_kernel, ADD, archs=(75, "sm_80", 90))
    assert [view.arch for view in comparison] == [75, 80, 90]
    assert "sm_75 (T4)" in str(comparison) and comparison._repr_html_().count("<td>") == 3 * 9
    assert "registers per thread" in comparison[0]._repr_html_()


def test_a_kernel_from_notebook_cells_brings_helper_and_constant_of_other_cells():
    """The cells' text exists only in linecache, as in Jupyter; and their other lines must not run again."""
    cells = {
        "<cell 1>": "import triton\nimport triton.language as tl\nFACTOR: tl.constexpr = tl.constexpr(3)\n"
        "@triton.jit\ndef grow(x):\n    return x * FACTOR\n",
        "<cell 2>": "raised = 1\n@triton.jit\ndef cell_kernel(out, BLOCK: tl.constexpr):\n"
        "    lanes = tl.arange(0, BLOCK)\n    tl.store(out + lanes, grow(lanes))\n"
        "if raised != 1:\n    raise SystemExit\n",
    }
    notebook = {"__name__": "__main__"}
    for name, text in cells.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), notebook)
    view = compile_view(notebook["cell_kernel"], {"out": "*i32"}, {"BLOCK": 128}, arch=80)
    assert view.name == "cell_kernel" and view.store_widths


def test_two_meanings_of_one_name_are_refused():
    def make(factor):
        @triton.jit
        def scaled(x):
            return x * factor

        return scaled

    first, second = make(tl.constexpr(2)), make(tl.constexpr(3))

    @triton.jit
    def caller(out):
        tl.store(out, first(1) + second(1))

    with pytest.raises(ValueError, match="two different things"):
        compile_view(caller, {"out": "*i32"})


def test_a_gluon_kernel_compiles():
    gluon = pytest.importorskip("triton.experimental.gluon")
    from triton.experimental.gluon import language as gl

    layout = gl.BlockedLayout([4], [32], [4], [0])

    @gluon.jit
    def gluon_copy(source, target, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
        lanes = gl.arange(0, BLOCK, layout=LAYOUT)
        gl.store(target + lanes, gl.load(source + lanes))

    view = compile_view(gluon_copy, {"source": "*fp32", "target": "*fp32"}, {"BLOCK": 512, "LAYOUT": layout})
    assert view.load_widths == {16: 1}


# ------------------------------------------------------------------------------------------------- refused at once


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"arch": 70}, ValueError, r"arch was 70; allowed are 75 \(T4\), 80"),
        ({"arch": "hopper"}, ValueError, "arch was 'hopper'"),
        ({"kernel": len}, TypeError, "decorated with @triton.jit; got builtin_function_or_method 'len'"),
        ({"kernel": lambda x: x}, TypeError, "Pass the kernel itself"),
        ({"signature": {}}, ValueError, "no entry for 'left', a parameter of add_kernel"),
        ({"signature": {**ADD, "size": "i32"}}, ValueError, "names 'size', which add_kernel does not take"),
        ({"signature": {**ADD, "left": "*float"}}, ValueError, r"'left' is '\*float'"),
        ({"constexprs": {"BLOK": 3}}, ValueError, "constexprs names 'BLOK'"),
        ({"divisible": ["strid"]}, ValueError, "divisible names 'strid'"),
        (
            {"kernel": matmul_kernel, "signature": MATMUL, "constexprs": {"TILE": 64}},
            ValueError,
            "no value for 'DEPTH', a tl.constexpr parameter of matmul_kernel",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name_before_anything_is_compiled(changes, error, words):
    with pytest.raises(error, match=words):
        compile_many([{"kernel": add_kernel, "signature": ADD, "constexprs": {}, **changes}])


# -------------------------------------------------------------------------------------------------- the gate's judge


def test_a_case_says_every_thing_that_is_wrong(views):
    case = CompileCase(matmul_kernel, MATMUL, {"TILE": 64, "DEPTH": 64}, instruction={80: "wgmma", 86: None})
    assert len(case.problems(views["matmul 80"], 80)) == 1
    assert "should use wgmma; it uses mma.sync" in case.problems(views["matmul 80"], 80)[0]
    spilled = case.problems(views["matmul short of registers"], 80)
    assert any("spills" in sentence for sentence in spilled)
    assert "bytes of shared memory" in case.problems(views["matmul too large"], 86)[0]
    assert "does not compile" in case.problems(views["wrong"], 80)[0]
    assert CompileCase(matmul_kernel, MATMUL, {}, instruction="mma.sync").problems(views["matmul 80"], 80) == []


def test_a_case_asks_for_every_architecture_it_names():
    case = CompileCase(add_kernel, ADD, {"BLOCK": 64}, num_warps=2, archs=(75, 90))
    assert [(request["arch"], request["num_warps"]) for request in case.requests()] == [(75, 2), (90, 2)]
