"""The number of splits fills the chip in whole waves, and the merge of splits is that of one softmax."""

import math
from random import Random

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.decode.combine import combine_splits, combine_splits_reference
from course_lib.kernels.decode.splits import LEAST_KEYS_PER_SPLIT, choose_splits
from course_lib.kernels.decode.tiles import cheapest_plan, decode_cuts
from tests.kernels.decode.cases import assert_close_to_float64, random_tensor
from tests.kernels.rounding import rounded_otherwise

in_the_interpreter = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter")


def test_one_long_sequence_fills_the_chip_once():
    """8 KV heads on 132 multiprocessors: 16 splits are 128 programs; 17 would wait for a second wave."""
    assert choose_splits(1, 8, 131072, 132) == 16
    assert choose_splits(1, 8, 524288, 132) == 16, "33 splits fill two waves, but memory was busy before"


def test_a_batch_that_fills_the_chip_is_not_split_in_vain():
    assert choose_splits(128, 1, 4096, 132) == choose_splits(512, 1, 4096, 132, residents=4) == 1


@pytest.mark.parametrize("longest", [0, 1, LEAST_KEYS_PER_SPLIT])
def test_short_sequences_are_not_split(longest):
    assert choose_splits(1, 8, longest, 132) == 1


def test_splits_never_get_smaller_than_a_tile_and_never_more_with_a_larger_batch():
    for longest in (64, 100, 1000, 8192, 524288):
        counts = [choose_splits(batch, 8, longest, 132) for batch in (1, 2, 4, 8, 16, 32, 64)]
        assert counts == sorted(counts, reverse=True) or counts[0] <= max(1, longest // LEAST_KEYS_PER_SPLIT)
        assert all(1 <= count <= max(1, -(-longest // LEAST_KEYS_PER_SPLIT)) for count in counts)


@pytest.mark.parametrize(
    "name, value", [("batch", 0), ("key_heads", -1), ("longest", -1), ("multiprocessors", 0), ("longest", 1.5)]
)
def test_numbers_that_make_no_sense_are_refused_by_name(name, value):
    numbers = {"batch": 1, "key_heads": 8, "longest": 100, "multiprocessors": 132} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        choose_splits(**numbers)


@in_the_interpreter
@pytest.mark.parametrize("seed", range(12))
def test_the_merge_is_right_for_any_number_of_splits(seed):
    draw = Random(seed)
    shape = draw.choice([1, 2, 7, 33, 70, 300]), draw.randint(1, 3), draw.randint(1, 3)
    outputs = random_tensor(draw, *shape, draw.choice([16, 80, 128]), dtype=torch.float32)
    lses = 10 * random_tensor(draw, *shape, dtype=torch.float32)
    lses[random_tensor(draw, *shape, dtype=torch.float32) > 1] = -math.inf
    outputs[lses == -math.inf] = math.nan  # a split without keys: what is there must not matter
    right = combine_splits_reference(outputs.double(), lses.double())
    assert_close_to_float64(
        combine_splits(outputs, lses), right, rounded_otherwise(combine_splits_reference, outputs, lses), f"{shape}"
    )


@in_the_interpreter
def test_splits_without_any_keys_merge_to_zeros():
    output, lse = combine_splits(torch.full((3, 1, 2, 16), math.nan), torch.full((3, 1, 2), -math.inf))
    assert torch.all(output == 0) and torch.all(lse == -math.inf)


@in_the_interpreter
def test_log_sum_exps_far_apart_do_not_overflow():
    outputs = torch.stack([torch.zeros(1, 1, 16), torch.ones(1, 1, 16)])
    output, lse = combine_splits(outputs, torch.tensor([-1e4, 1e4])[:, None, None], dtype=torch.float16)
    assert torch.all(output == 1) and lse.item() == 1e4 and output.dtype == torch.float16


@in_the_interpreter
@pytest.mark.parametrize(
    "change, words",
    [
        ({"partial_outputs": torch.zeros(2, 3, 16)}, ["partial_outputs", "[splits, batch, query_heads, head_dim]"]),
        ({"partial_outputs": torch.zeros(2, 1, 3, 16).half()}, ["partial_outputs", "float16", "float32"]),
        ({"partial_outputs": torch.zeros(2, 1, 16, 3).mT}, ["partial_outputs", "contiguous()"]),
        ({"partial_lses": torch.zeros(3, 1, 3)}, ["partial_lses", "(3, 1, 3)", "(2, 1, 3)"]),
        ({"dtype": torch.int32}, ["dtype", "int32"]),
    ],
)
def test_the_merge_refuses_bad_input(change, words):
    inputs = {"partial_outputs": torch.zeros(2, 1, 3, 16), "partial_lses": torch.zeros(2, 1, 3)} | change
    with pytest.raises(ValueError) as refusal:
        combine_splits(**inputs)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def plan(batch, query_heads, key_heads, longest, splits=None):
    return cheapest_plan(90, torch.bfloat16, 128, batch, query_heads // key_heads, key_heads, longest, 132, splits)


def test_few_programs_get_a_multiprocessor_each_and_many_share_them():
    few, many = plan(1, 32, 8, 8192), plan(64, 32, 8, 4096)
    assert few.programs * few.splits == 128 and many.splits == 1
    assert few.tiles.key_rows * few.tiles.stages > many.tiles.key_rows * many.tiles.stages


@pytest.mark.parametrize("shape", [(16, 32, 8, 8192), (16, 64, 8, 16384), (1, 32, 32, 32768), (1, 32, 8, 131072)])
def test_one_wave_is_filled_and_none_begun_for_a_few_programs(shape):
    chosen = plan(*shape)
    assert 120 <= shape[0] * chosen.programs * chosen.splits <= 132


@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_two_programs_for_each_multiprocessor_need_no_splits(group):
    """With 16 heads in a group the merge of two splits left room for three programs of four, and a second wave."""
    chosen = plan(32, 8 * group, 8, 4096)
    assert chosen.splits == 1 and chosen.tiles.stages == 3


def test_splits_that_are_given_are_kept():
    assert [plan(2, 8, 2, 1000, splits).splits for splits in (1, 5, 300)] == [1, 5, 300]


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_architecture_has_cuts_for_every_head_dimension_and_group(arch, dtype):
    for block_d in (16, 32, 64, 128, 256):
        for group in (1, 2, 8, 32, 128):
            assert all(cut.residents >= 1 for cut in decode_cuts(arch, dtype, block_d, group))
