"""Rotary positions and the append to pages in one launch: against float64, in pages that keep what was there."""

import functools

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.fused.rope_append_pages import rope_append_to_pages, rope_append_to_pages_reference
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
PAGES, PAGE_SIZE, PLACES = 5, 3, 40


def inputs(tokens=4, query_heads=4, key_heads=2, head_dim=8, dtype=torch.float32, scale=1.0):
    """qkv, angles, both pools, positions, and slots: the last of the pool, one that goes nowhere, and others."""
    qkv = normal(1, tokens, (query_heads + 2 * key_heads) * head_dim, dtype=dtype, scale=scale)
    angles = torch.arange(PLACES)[:, None] * 10_000.0 ** -(torch.arange(head_dim // 2) * 2 / head_dim)
    pools = [normal(seed, PAGES, key_heads, PAGE_SIZE, head_dim, dtype=dtype) for seed in (2, 3)]
    positions = torch.linspace(PLACES - 1, 0, tokens).long()
    slots = torch.tensor([PAGES * PAGE_SIZE - 1, -1, 0, 4, 7, 9][:tokens])
    return [qkv, angles.cos(), angles.sin(), *pools, positions, slots]


def gains(head_dim=8, dtype=torch.float32):
    return {"query_gain": normal(4, head_dim, dtype=dtype), "key_gain": normal(5, head_dim, dtype=dtype)}


def changed(function, **options):
    """(query, key pages, value pages) as a function of arguments that stay as they are."""

    def run(qkv, cosine, sine, key_pages, value_pages, positions, slots):
        pools = key_pages.clone(), value_pages.clone()
        return function(qkv, cosine, sine, *pools, positions, slots, **options), *pools

    return run


def assert_right(arguments, **options):
    found = changed(rope_append_to_pages, **options)(*arguments)
    plain = functools.partial(changed(rope_append_to_pages_reference, **options))
    assert_as_exact_as_plain(found, plain, *arguments)
    assert torch.equal(found[2], plain(*arguments)[2]), "values are moved, not computed"
    untouched = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
    untouched[[slot for slot in arguments[-1].tolist() if slot >= 0]] = False
    before, after = (pool.transpose(1, 2).flatten(0, 1)[untouched] for pool in (arguments[3], found[1]))
    assert torch.equal(before, after), "keys of other places have changed"


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("query_heads, key_heads", [(1, 1), (4, 2), (5, 2)])
@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_any_heads_are_right(query_heads, key_heads, head_dim, normed):
    arguments = inputs(query_heads=query_heads, key_heads=key_heads, head_dim=head_dim)
    assert_right(arguments, **(gains(head_dim) if normed else {}))


@pytest.mark.parametrize("dtype, scale", [(torch.float16, 1.0), (torch.float16, 3e3), (torch.float32, 1e15)])
@pytest.mark.parametrize("tokens", [1, 3, 6])
def test_any_tokens_and_magnitudes_are_right(tokens, dtype, scale):
    arguments = inputs(tokens, dtype=dtype, scale=scale)
    assert_right(arguments)
    assert_right(arguments, **gains(dtype=dtype), epsilon=1e-3)


def test_the_norm_may_have_weights_of_32_bits_and_a_large_epsilon():
    assert_right(inputs(dtype=torch.float16), **gains(), epsilon=2.0)


def test_tokens_may_lie_apart_and_the_pools_differently():
    arguments = inputs()
    arguments[0] = in_wider_rows(arguments[0])
    assert_right(arguments)
    plain = changed(rope_append_to_pages_reference)(*arguments)
    pools = arguments[3].transpose(1, 2).contiguous().transpose(1, 2), in_wider_rows(arguments[4])
    query = rope_append_to_pages(*arguments[:3], *pools, arguments[5].int(), arguments[6].int())
    for ours, right in zip((query, *pools), plain):
        torch.testing.assert_close(ours, right)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("options", [{}, gains()])
def test_values_that_are_not_finite_arrive_as_they_are(options):
    arguments = inputs()
    arguments[0][0, -8:] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1, 2, 3, 4, torch.inf])
    _, _, values = changed(rope_append_to_pages, **options)(*arguments)
    assert torch.equal(values[-1, -1, -1].nan_to_num(), arguments[0][0, -8:].nan_to_num())


def test_a_token_that_goes_nowhere_has_its_query_all_the_same():
    arguments = inputs()
    everywhere = [*arguments[:-1], torch.arange(4)]
    query = changed(rope_append_to_pages)(*arguments)[0]
    assert torch.equal(query, changed(rope_append_to_pages)(*everywhere)[0])


def test_each_number_is_read_once_and_written_once():
    arguments = inputs()
    arguments[-1] = torch.arange(4)
    report = metered(rope_append_to_pages, *arguments)
    names = ("qkv_pointer", "query_pointer", "key_pages_pointer", "value_pages_pointer")
    assert [report[name].loaded_bytes for name in names] == [arguments[0].nbytes, 0, 0, 0]
    assert sum(report[name].stored_bytes for name in names) == arguments[0].nbytes
    assert len(report.launches) == 1 and not report.out_of_bounds and report.contended_bytes == 0


@pytest.mark.parametrize(
    "place, argument, words",
    [
        (0, torch.zeros(4, 65), ["qkv has width 65", "(query_heads + 4) · 8"]),
        (0, torch.zeros(4, 32), ["qkv has width 32", "at least one query head"]),
        (0, torch.zeros(1, 4, 64), ["qkv has shape (1, 4, 64)", "[tokens, width]"]),
        (0, torch.zeros(4, 64).int(), ["qkv has dtype torch.int32"]),
        (1, torch.zeros(40, 3), ["cosine has shape (40, 3)", "4 numbers"]),
        (2, torch.zeros(39, 4), ["sine has shape (39, 4)", "that of cosine"]),
        (2, torch.zeros(40, 4).half(), ["sine has dtype torch.float16"]),
        (3, torch.zeros(5, 2, 3, 8).half(), ["key_pages has dtype torch.float16"]),
        (4, torch.zeros(6, 2, 3, 8), ["value_pages has shape (6, 2, 3, 8)"]),
        (5, torch.tensor([0, 40, 0, 0]), ["positions[1] is 40", "0 to 39"]),
        (5, torch.tensor([-1, 0, 0, 0]), ["positions[0] is -1"]),
        (5, torch.tensor([0, 0, 0]), ["positions has shape (3,)"]),
        (6, torch.tensor([0, 1, 2, 15]), ["slots[3] is 15", "0 to 14"]),
        (6, torch.tensor([0, -2, 2, 3]), ["slots[1] is -2"]),
        (6, torch.zeros(4), ["slots has dtype torch.float32"]),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(place, argument, words):
    arguments = inputs()
    arguments[place] = argument
    before = arguments[3].clone()
    with pytest.raises(ValueError) as refusal:
        rope_append_to_pages(*arguments)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert torch.equal(arguments[3], before)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"query_gain": torch.ones(8)}, "query_gain is given and key_gain is None"),
        ({"key_gain": torch.ones(8)}, "key_gain is given and query_gain is None"),
        ({"query_gain": torch.ones(7), "key_gain": torch.ones(8)}, "query_gain has shape .7,.; it must be .8,."),
        ({"query_gain": torch.ones(8), "key_gain": torch.ones(8).half()}, "key_gain has dtype torch.float16"),
        ({**gains(), "epsilon": -1.0}, "epsilon is -1.0"),
    ],
)
def test_bad_norms_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        rope_append_to_pages(*inputs(), **options)
