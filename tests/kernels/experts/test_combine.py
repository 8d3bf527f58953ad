"""Tokens get the weighted sum of their experts' rows, and nothing of what lies where there is no slot."""

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.experts.arrange import arrange
from course_lib.kernels.experts.combine import combine, combine_reference
from tests.kernels.experts.cases import ragged
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


def inputs(tokens, k, count, width, dtype=torch.float32):
    """Rows that are NaN where there is no slot, and weights that are NaN where a choice is not served."""
    arrangement = arrange(ragged(tokens, k, count), count, 16)
    rows = normal(1, len(arrangement.slots), width, dtype=dtype)
    rows[arrangement.slots == arrangement.sentinel] = torch.nan
    return rows, arrangement, normal(2, tokens, k).where(arrangement.places >= 0, torch.nan)


@pytest.mark.parametrize("tokens, k, count, width", [(1, 1, 3, 1), (7, 3, 5, 513), (2, 6, 7, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_token_gets_its_sum(tokens, k, count, width, dtype):
    rows, arrangement, weights = inputs(tokens, k, count, width, dtype)
    for given in (weights, None):
        assert_as_exact_as_plain(combine(rows, arrangement, given), combine_reference, rows, arrangement, given)
    assert torch.equal(combine(in_wider_rows(rows), arrangement, weights), combine(rows, arrangement, weights))


def test_sums_are_taken_in_float32_and_in_the_order_of_the_choices():
    """In float16, 2048 + 1 is 2048; in float32, 2²⁴ + 1 - 2²⁴ is 0 in this order and 1 in another."""
    arrangement = arrange(torch.tensor([[0, 1, 2]]), 3, 1)
    ones = torch.ones(3, 1, dtype=torch.float16)
    assert combine(ones, arrangement, torch.tensor([[2048.0, 1.0, 1.0]])).item() == 2050
    assert combine(ones.float(), arrangement, torch.tensor([[2.0**24, 1.0, -(2.0**24)]])).item() == 0


def test_the_meaning_is_a_loop_over_tokens():
    rows, arrangement, weights = inputs(5, 3, 6, 4)
    wanted = torch.zeros(5, 4)
    for token, choice in (arrangement.places >= 0).nonzero().tolist():
        wanted[token] += weights[token, choice] * rows[arrangement.places[token, choice]]
    torch.testing.assert_close(combine_reference(rows, arrangement, weights), wanted)


def test_rows_with_a_slot_are_read_once_and_others_never():
    rows, arrangement, weights = inputs(7, 3, 5, 64)
    report = metered(combine, rows, arrangement, weights)
    slots = int((arrangement.places >= 0).sum())
    assert report["rows_pointer"].loaded_bytes == slots * 64 * 4 and report["out_pointer"].stored_bytes == 7 * 64 * 4
    assert not report.out_of_bounds and report.contended_bytes == 0


def test_nothing_served_is_zero_and_no_tokens_are_none():
    nobody = arrange(torch.full((3, 2), -1), 4, 16)
    assert not combine(torch.full((len(nobody.slots), 5), torch.nan), nobody).any()
    assert combine(torch.zeros(0, 5), arrange(torch.zeros(0, 2).long(), 4, 16)).shape == (0, 5)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rows": torch.zeros(3, 4)}, ["rows has 3 rows", "16 places"]),
        ({"rows": torch.zeros(4, 16).t()}, ["rows has strides", "rows.contiguous()"]),
        ({"weights": torch.zeros(2, 2)}, ["weights has shape (2, 2)", "(2, 1)"]),
        ({"weights": torch.zeros(2, 1).half()}, ["weights has", "torch.float16", "torch.float32"]),
        ({"weights": torch.zeros(2, 2)[:, ::2]}, ["weights has", "contiguous"]),
        ({"weights": 1.0}, ["weights is a float"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    arrangement = arrange(torch.zeros(2, 1).long(), 1, 16)
    with pytest.raises(ValueError) as refusal:
        combine(**{"rows": torch.zeros(16, 4), "arrangement": arrangement} | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
