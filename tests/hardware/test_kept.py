"""Launchers that keep what they decided: the same results as if they decided anew, and new tensors for them.

Here kernels are interpreted, where the course's functions keep nothing; so their keepers are made here by themselves,
and repeat launches through Triton's launcher. tests/gpu/test_kept.py goes straight to the driver.
"""

import gc
import weakref

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.hardware import kept as module
from course_lib.hardware.kept import CALLS_BEFORE, Kept, kept
from course_lib.hardware.meter.traffic import record_launches, repair_interpreter
from course_lib.kernels.attention.dispatch import portable
from course_lib.kernels.decode.append import append_to_pages
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.decode.workspace import decode_workspace
from tests.hardware.test_prepared import scaled_kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU: tests/gpu/test_kept.py")


@pytest.fixture(autouse=True, scope="module")
def as_in_a_notebook():
    repair_interpreter()


class Counted:
    """A launcher, and how often its own Python ran."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, *, factor=2.0, output=None, both=False):
        self.calls += 1
        if x.dim() != 1:
            raise ValueError(f"x has {x.dim()} dimensions; it must have one.")
        output = torch.empty_like(x) if output is None else output
        scaled_kernel[(triton.cdiv(len(x), 4),)](x, output, len(x), factor, BLOCK=4)
        return (output, None, x) if both else output


def decode_inputs(capacity=50):
    caches = [torch.randn(2, 2, capacity, 16) for _ in "kv"]
    return torch.randn(2, 4, 16), *caches, torch.randint(1, capacity + 1, (2,), dtype=torch.int32)


@pytest.mark.parametrize("options", [{"splits": 1}, {"return_lse": True, "splits": 1}, {"window": 7, "splits": 1}])
def test_decode_gives_what_it_gives_anew(options):
    keeper = Kept(decode_attention)
    for _ in range(CALLS_BEFORE + 4):
        inputs = decode_inputs()
        ours, wanted = (function(*inputs, validate=False, **options) for function in (keeper, decode_attention))
        for one, other in zip(*((found,) if isinstance(found, torch.Tensor) else found for found in (ours, wanted))):
            assert torch.equal(one, other)
    assert [program is not None for program in keeper.programs.values()] == [True]


def test_attention_and_a_function_that_returns_nothing_are_kept():
    keeper = Kept(portable)
    for _ in range(CALLS_BEFORE + 2):
        inputs = [torch.randn(1, heads, 33, 16) for heads in (4, 2, 2)]
        assert torch.equal(keeper(*inputs, causal=True), portable(*inputs, causal=True))
    append = Kept(append_to_pages)
    for _ in range(CALLS_BEFORE + 2):
        key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
        pools = [torch.zeros(4, 2, 4, 16) for _ in "kv"]
        assert append(key, value, *pools, torch.tensor([5, 0, 9]), validate=False) is None
        assert torch.equal(pools[0][1, :, 1], key[0]) and torch.equal(pools[1][1, :, 1], value[0])
    assert all([*keeper.programs.values(), *append.programs.values()])


def test_results_are_new_tensors_and_what_is_given_back_is_given_back():
    launcher = Counted()
    keeper = Kept(launcher)
    x = torch.randn(10)
    results = [keeper(x, factor=3.0) for _ in range(CALLS_BEFORE + 3)]
    assert len({result.data_ptr() for result in results}) == len(results)
    assert all(torch.equal(result, 3 * x) for result in results)
    assert launcher.calls == CALLS_BEFORE + 1
    for _ in range(CALLS_BEFORE + 3):
        result, nothing, same = keeper(x, both=True)
        assert torch.equal(result, 2 * x) and nothing is None and same is x
    output = torch.empty(10)
    for _ in range(CALLS_BEFORE + 3):
        assert keeper(x, output=output) is output
    assert torch.equal(output, 2 * x)


def test_buffers_in_a_workspace_are_those_that_are_given():
    keeper = Kept(decode_attention)
    for _ in range(CALLS_BEFORE + 3):
        inputs, workspace = decode_inputs(), decode_workspace(2, 4, 16, 3, "cpu")
        output, lse = keeper(*inputs, workspace=workspace, return_lse=True, validate=False)
        wanted = decode_attention(*inputs, splits=3, return_lse=True)
        assert torch.equal(output, wanted[0]) and torch.equal(lse, wanted[1]) and lse is workspace.lse


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.randn(11), {}),
        lambda: (torch.randn(20)[::2], {}),
        lambda: (torch.randn(10, dtype=torch.float64), {}),
        lambda: (torch.randn(10), {"factor": 3.0}),
        lambda: (torch.empty(12)[1:11].normal_(), {}),
    ],
)
def test_another_layout_or_option_is_decided_anew(other):
    launcher = Counted()
    keeper = Kept(launcher)
    x = torch.empty(32)[:10].normal_()
    for _ in range(CALLS_BEFORE + 2):
        keeper(x)
    before = launcher.calls
    x, options = other()
    keeper(x, **options)
    assert launcher.calls == before + 1


def test_true_is_not_one():
    launcher = Counted()
    keeper = Kept(launcher)
    for _ in range(CALLS_BEFORE + 2):
        keeper(torch.ones(10), factor=1)
    before = launcher.calls
    keeper(torch.ones(10), factor=True)
    assert launcher.calls == before + 1


def test_errors_stay_as_they_are():
    keeper = Kept(Counted())
    for _ in range(CALLS_BEFORE + 3):
        with pytest.raises(ValueError, match="x has 2 dimensions"):
            keeper(torch.randn(3, 4))


def adds(x):
    return Counted()(x) + 1


def reads(x):
    return Counted()(x, factor=x.tolist()[0])


def views(x):
    return Counted()(x)[2:]


def counts(x):
    return Counted()(x), 3


@pytest.mark.parametrize("function", [adds, reads, views, counts, torch.neg])
def test_a_function_that_does_more_than_launch_goes_the_long_way(function):
    keeper = Kept(function)
    for number in range(CALLS_BEFORE + 3):
        x = torch.full((10,), float(number))
        ours, wanted = keeper(x), function(x)
        if function is counts:
            ours, wanted = ours[0], wanted[0]
        assert torch.equal(ours, wanted)
    assert list(keeper.programs.values()) == [None]


def test_a_tensor_that_is_given_twice_is_known_as_such():
    def pair(x, y):
        calls.append(None)
        return Counted()(x), Counted()(y)

    keeper, calls = Kept(pair), []
    for number in range(CALLS_BEFORE + 3):
        x = torch.full((10,), float(number))
        for found in keeper(x, x):
            assert torch.equal(found, 2 * x)
    assert len(calls) == CALLS_BEFORE + 1
    x, y = torch.randn(10), torch.randn(10)
    first, second = keeper(x, y)
    assert torch.equal(first, 2 * x) and torch.equal(second, 2 * y) and len(calls) == CALLS_BEFORE + 2


def test_inputs_that_share_memory_go_the_long_way():
    def pair(x, y):
        return Counted()(x[:8], output=y[:8])

    keeper, x = Kept(pair), torch.randn(20)
    for _ in range(CALLS_BEFORE + 2):
        before = x.clone()
        keeper(x, x)
        assert torch.equal(x[:8], 2 * before[:8])


def test_no_input_is_kept_alive():
    """A cache of gigabytes would be."""
    keeper = Kept(Counted())
    tensors = [torch.randn(10) for _ in range(CALLS_BEFORE + 2)]
    watched = [weakref.ref(keeper(x)) for x in tensors] + [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert keeper.programs and not any(reference() is not None for reference in watched[:-1])


def test_what_changes_operations_sees_them_all():
    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            seen.append(str(operation))
            return operation(*args, **(kwargs or {}))

    launcher, seen = Counted(), []
    keeper = Kept(launcher)
    for _ in range(CALLS_BEFORE + 2):
        keeper(torch.randn(10))
    before = launcher.calls
    with Sees():
        keeper(torch.randn(10))
    assert launcher.calls == before + 1 and "aten.empty_like.default" in seen


def test_launches_are_counted():
    keeper = Kept(Counted())
    for _ in range(CALLS_BEFORE + 2):
        with record_launches() as launches:
            keeper(torch.randn(10))
        assert [launch.kernel for launch in launches] == ["scaled_kernel"]


def test_a_class_of_tensors_of_its_own_is_not_looked_through():
    class Own(torch.Tensor):
        pass

    launcher = Counted()
    keeper = Kept(launcher)
    for number in range(1, CALLS_BEFORE + 4):
        keeper(torch.randn(10).as_subclass(Own))
        assert launcher.calls == number


def test_many_layouts_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(module, "MOST_PROGRAMS", 3)
    keeper = Kept(Counted())
    for length in range(1, 9):
        for _ in range(CALLS_BEFORE + 1):
            keeper(torch.empty(length))
    assert len(keeper.programs) == 3


def test_the_function_keeps_its_name_and_words():
    assert decode_attention.__name__ == "decode_attention" and "Flash-Decoding" in decode_attention.__doc__
    assert kept(Counted.__call__).__name__ == "__call__"
