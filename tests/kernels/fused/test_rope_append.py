"""Rotary positions and the append in one launch: against float64, in caches that are NaN where nothing was written."""

import re

import pytest
import torch

from course_lib.hardware.compiler.views import compile_view
from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.fused.rope_append import (
    compile_cases,
    rope_append,
    rope_append_operator,
    rope_append_reference,
)
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
CAPACITY = 11


def inputs(batch=2, tokens=3, query_heads=4, key_heads=2, head_dim=8, dtype=torch.float32, scale=1.0):
    """qkv, cosine, sine, both caches with a number of their own everywhere, and positions at both ends of the room."""
    qkv = normal(1, batch, tokens, (query_heads + 2 * key_heads) * head_dim, dtype=dtype, scale=scale)
    angles = torch.arange(CAPACITY)[:, None] * 10_000.0 ** -(torch.arange(head_dim // 2) * 2 / head_dim)
    caches = [normal(seed, batch, key_heads, CAPACITY, head_dim, dtype=dtype) for seed in (2, 3)]
    positions = torch.linspace(0, CAPACITY - tokens, batch).long()
    return [qkv, angles.cos(), angles.sin(), *caches, positions]


def changed(function):
    """(query, key cache, value cache) as a function of arguments that stay as they are."""

    def run(qkv, cosine, sine, key_cache, value_cache, positions):
        caches = key_cache.clone(), value_cache.clone()
        return function(qkv, cosine, sine, *caches, positions), *caches

    return run


def assert_right(arguments):
    found = changed(rope_append)(*arguments)
    assert_as_exact_as_plain(found, changed(rope_append_reference), *arguments)
    plain = changed(rope_append_reference)(*arguments)
    assert torch.equal(found[2], plain[2]), "values are moved, not computed"
    untouched = torch.ones(found[1].shape[0], CAPACITY, dtype=torch.bool)
    for sequence, position in enumerate(arguments[-1].tolist()):
        untouched[sequence, position : position + arguments[0].shape[1]] = False
    before, after = (cache.transpose(1, 2)[untouched] for cache in (arguments[3], found[1]))
    assert torch.equal(before, after), "keys of other places have changed"


@pytest.mark.parametrize("query_heads, key_heads", [(1, 1), (4, 2), (8, 1), (3, 3), (5, 2)])
@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_any_heads_are_right(query_heads, key_heads, head_dim):
    assert_right(inputs(query_heads=query_heads, key_heads=key_heads, head_dim=head_dim))


@pytest.mark.parametrize("dtype, scale", [(torch.float16, 1.0), (torch.float16, 3e3), (torch.float32, 1e20)])
@pytest.mark.parametrize("batch, tokens", [(1, 1), (3, 1), (2, CAPACITY)])
def test_any_tokens_and_magnitudes_are_right(batch, tokens, dtype, scale):
    assert_right(inputs(batch, tokens, dtype=dtype, scale=scale))


def test_a_whole_tensor_may_lie_apart_and_the_caches_differently():
    arguments = inputs()
    arguments[0] = in_wider_rows(arguments[0])
    assert_right(arguments)
    plain = changed(rope_append_reference)(*arguments)
    caches = arguments[3].transpose(1, 2).contiguous().transpose(1, 2), in_wider_rows(arguments[4])
    query = rope_append(*arguments[:3], *caches, arguments[5].int())
    for ours, right in zip((query, *caches), plain):
        torch.testing.assert_close(ours, right)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_that_are_not_finite_arrive_as_they_are():
    arguments = inputs()
    arguments[0][0, 0, -8:] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1, 2, 3, 4, torch.inf])
    _, _, values = changed(rope_append)(*arguments)
    assert torch.equal(values[0, -1, 0].nan_to_num(), arguments[0][0, 0, -8:].nan_to_num())


def test_each_number_is_read_once_and_written_once():
    arguments = inputs()
    report = metered(rope_append, *arguments)
    names = ("qkv_pointer", "query_pointer", "key_cache_pointer", "value_cache_pointer")
    assert [report[name].loaded_bytes for name in names] == [arguments[0].nbytes, 0, 0, 0]
    assert sum(report[name].stored_bytes for name in names) == arguments[0].nbytes
    assert len(report.launches) == 1 and not report.out_of_bounds and report.contended_bytes == 0


def test_opcheck_passes_and_a_compiled_step_has_one_graph():
    torch.library.opcheck(rope_append_operator, (*inputs(), True))
    arguments = inputs()
    compiled = torch.compile(lambda *them: rope_append_operator(*them, True) + 1, fullgraph=True, backend="aot_eager")
    found = changed(compiled)(*arguments)
    right = changed(rope_append)(*arguments)
    for ours, plain in zip(found, (right[0] + 1, *right[1:])):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize(
    "place, argument, words",
    [
        (0, torch.zeros(2, 3, 65), ["qkv has width 65", "(query_heads + 4) · 8"]),
        (0, torch.zeros(2, 3, 32), ["qkv has width 32", "at least one query head"]),
        (0, torch.zeros(3, 3, 64), ["key_cache has batch size 2", "3"]),
        (0, torch.zeros(2, 3, 64).int(), ["qkv has dtype torch.int32"]),
        (1, torch.zeros(10, 4), ["cosine has shape (10, 4)", "11 places"]),
        (2, torch.zeros(11, 4).half(), ["sine has dtype torch.float16"]),
        (3, torch.zeros(2, 2, 11, 8).half(), ["key_cache has dtype torch.float16"]),
        (4, torch.zeros(2, 2, 12, 8), ["value_cache has shape (2, 2, 12, 8)"]),
        (5, torch.tensor([0, 9]), ["positions[1] is 9", "0 to 8", "cache of 11"]),
        (5, torch.tensor([-1, 0]), ["positions[0] is -1"]),
        (5, torch.tensor([0.0, 1.0]), ["positions has dtype torch.float32"]),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(place, argument, words):
    arguments = inputs()
    arguments[place] = argument
    before = arguments[3].clone()
    with pytest.raises(ValueError) as refusal:
        rope_append(*arguments)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert torch.equal(arguments[3], before)


@pytest.mark.parametrize("rows, bits", [("i32", 32), ("i64", 64)])
def test_heads_are_divided_in_as_many_bits_as_their_number_has(rows, bits):
    """Divided in 64 bits wherever they are, the kernel has half as many instructions more."""
    case = compile_cases()[0]
    ptx = compile_view(case.kernel, {**case.signature, "rows": rows}, case.constexprs).ptx
    assert bool(re.search(r"\b(div|rem)\.[su]64", ptx)) == (bits == 64)
