"""The grouped product against its meaning: each row with its expert's weight, and nothing read beside them."""

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.experts.arrange import arrange
from course_lib.kernels.experts.grouped import grouped_product, grouped_product_reference
from course_lib.kernels.experts.grouped_tma import copy_engine_takes
from course_lib.kernels.experts.tiles import expert_tiles
from course_lib.kernels.products.candidates import ProductTiles
from tests.kernels.experts.cases import operands, ragged, served
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
SMALL = ProductTiles(16, 32, 32, warps=4, stages=1, group=2)
FORMS = [{}, {"gated": True}, {"gathered": False}, {"gathered": False, "gated": True}, {"transposed": True}]


def assert_right(x, weight, arrangement, tiles=SMALL, **form):
    found = grouped_product(x, weight, arrangement, tiles=tiles, **form)
    assert_as_exact_as_plain(
        served(found, arrangement), grouped_product_reference, x.nan_to_num(), weight, arrangement, **form
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("columns, inner", [(40, 70), (1, 1), (64, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_row_meets_the_weight_of_its_expert(form, columns, inner, dtype):
    outer = columns * 2 if form.get("gated") else columns
    x, weight, arrangement = operands(19, 3, 6, outer, inner, dtype=dtype, gathered=form.get("gathered", True))
    assert_right(x, weight.transpose(1, 2).contiguous() if form.get("transposed") else weight, arrangement, **form)


@pytest.mark.parametrize("form", [*FORMS, {"gathered": False, "transposed": True}], ids=str)
@pytest.mark.parametrize("columns, inner", [(40, 72), (8, 8), (64, 32)])
def test_the_form_with_the_copy_engine_is_the_same_product(form, columns, inner, monkeypatch):
    monkeypatch.setattr("course_lib.kernels.experts.grouped.by_copy_engine", lambda *_: True)
    outer = columns * 2 if form.get("gated") else columns
    x, weight, arrangement = operands(19, 3, 6, outer, inner, dtype=torch.float16, gathered=form.get("gathered", True))
    assert copy_engine_takes(x, weight, columns)
    assert_right(x, weight.transpose(1, 2).contiguous() if form.get("transposed") else weight, arrangement, **form)


def test_what_the_copy_engine_cannot_move_is_left_to_the_plain_form():
    x, weight, _ = operands(19, 3, 6, 40, 72, dtype=torch.float16)
    assert not copy_engine_takes(x, weight, 41)
    assert not copy_engine_takes(x[:, 1:], weight, 40)
    assert not copy_engine_takes(x, weight[:, :, :70].contiguous(), 40)


@pytest.mark.parametrize("tokens, k, count", [(1, 1, 1), (1, 4, 4), (33, 1, 3), (5, 8, 8)])
def test_one_token_one_choice_and_all_experts(tokens, k, count):
    experts = torch.arange(k).expand(tokens, k) if k > 1 else torch.zeros(tokens, 1, dtype=torch.int64)
    arrangement = arrange(experts, count, 16)
    assert_right(normal(1, tokens, 24), normal(2, count, 20, 24), arrangement)


@pytest.mark.parametrize("rows", [1, 60])
def test_tiles_are_chosen_by_the_rows_of_an_expert(rows):
    tiles = expert_tiles(None, torch.float32, rows)
    assert tiles.rows == (16 if rows == 1 else 64)
    assert_right(*operands(19, 2, 4, 70, 40, block=tiles.rows), tiles=None)


def test_the_meaning_is_a_layer_of_each_tokens_expert():
    experts = ragged(9, 2, 4)
    x, weight, arrangement = normal(1, 9, 5).double(), normal(2, 4, 6, 5).double(), arrange(experts, 4, 16)
    plain, gated = (grouped_product_reference(x, weight, arrangement, gated=gated) for gated in (False, True))
    for token, choice in (experts >= 0).nonzero().tolist():
        sums = F.linear(x[token], weight[experts[token, choice]])
        torch.testing.assert_close(plain[arrangement.places[token, choice]], sums)
        torch.testing.assert_close(gated[arrangement.places[token, choice]], F.silu(sums[:3]) * sums[3:])


def test_rows_and_experts_may_lie_apart_and_nothing_between_them_is_read():
    x, weight, arrangement = operands(19, 3, 6, 40, 24)
    exact = served(grouped_product(x, weight, arrangement, tiles=SMALL), arrangement)
    apart = torch.full((12, 43, 24), torch.nan)[::2, 1:41]
    apart.copy_(weight)
    for wide in (in_wider_rows(weight), apart):
        found = grouped_product(in_wider_rows(x), wide, arrangement, tiles=SMALL)
        assert torch.equal(served(found, arrangement), exact)


def test_experts_beyond_32_bits_are_read_in_their_place():
    """Expert 2 begins 2³¹ numbers behind expert 0, in memory that is never touched between them.

    The stride itself is less than that, so nothing but the kernel's own arithmetic makes the product one of 64 bits.
    """
    weight = normal(2, 3, 16, 32, dtype=torch.float16)
    stride = 2**30 + 64
    far = torch.empty(2 * stride + 16 * 32, dtype=torch.float16).as_strided(weight.shape, (stride, 32, 1))
    far.copy_(weight)
    x, arrangement = normal(1, 4, 32, dtype=torch.float16), arrange(torch.tensor([[2], [0], [1], [2]]), 3, 16)
    exact, found = (served(grouped_product(x, it, arrangement, tiles=SMALL), arrangement) for it in (weight, far))
    assert torch.equal(found, exact)
    exact, found = (grouped_product(x[:, :16], it, arrangement, transposed=True, tiles=SMALL) for it in (weight, far))
    assert torch.equal(served(found, arrangement), served(exact, arrangement))


def test_weights_of_experts_without_a_token_are_not_read_and_a_gated_product_stores_a_hidden_number_once():
    x, weight, arrangement = operands(10, 2, 8, 64, 32)
    weight[7] = torch.nan  # of the expert without a token
    report = metered(grouped_product, x, weight, arrangement, gated=True, tiles=SMALL)
    tiles = int(arrangement.first_tiles[-1])
    slots = int((arrangement.slots < arrangement.sentinel).sum())
    assert report["weight_pointer"].loaded_bytes == tiles * weight[0].nbytes
    assert report["out_pointer"].stored_bytes == slots * 32 * 4
    assert not report.out_of_bounds and report.contended_bytes == 0
    report = metered(grouped_product, x, normal(3, 8, 32, 40), arrangement, transposed=True, tiles=SMALL)
    assert report["weight_pointer"].loaded_bytes == tiles * 32 * 40 * 4 and not report.out_of_bounds


def test_no_tokens_have_no_places_and_choices_of_nobody_no_product():
    no_tokens = arrange(torch.zeros(0, 1).long(), 2, 16)
    assert grouped_product(torch.zeros(0, 4), torch.zeros(2, 3, 4), no_tokens).shape == (0, 3)
    nobody = arrange(torch.full((3, 2), -1), 2, 16)
    report = metered(grouped_product, torch.zeros(3, 4), torch.zeros(2, 3, 4), nobody, tiles=SMALL)
    assert report["out_pointer"].stored_bytes == report["weight_pointer"].loaded_bytes == 0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": torch.zeros(3, 7)}, ["weight has inner dimension 8", "7"]),
        ({"x": torch.zeros(4, 8)}, ["x has 4 rows", "3 tokens"]),
        ({"gathered": False}, ["x has 3 rows", "32 places"]),
        ({"weight": torch.zeros(3, 6, 8)}, ["weight has 3 experts", "made for 2"]),
        ({"weight": torch.zeros(6, 8)}, ["weight has shape (6, 8)", "[experts, outer, inner]"]),
        ({"weight": torch.zeros(2, 8, 6).mT}, ["weight has strides", "weight.contiguous()"]),
        ({"weight": torch.zeros(2, 5, 8), "gated": True}, ["weight has 5 rows", "as many for up"]),
        ({"weight": torch.zeros(2, 8, 6), "gated": True, "transposed": True}, ["gated and transposed"]),
        ({"tiles": SMALL._replace(rows=32)}, ["tiles has 32 rows", "made for tiles of 16", "other experts"]),
        ({"arrangement": arrange(torch.zeros(3, 1).long(), 2, 8)}, ["tiles of 8 places", "16, 64 rows"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    arrangement = arrange(torch.zeros(3, 1).long(), 2, 16)
    good = {"x": torch.zeros(3, 8), "weight": torch.zeros(2, 6, 8), "arrangement": arrangement}
    with pytest.raises(ValueError) as refusal:
        grouped_product(**good | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
