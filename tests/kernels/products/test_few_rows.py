"""Products for few rows against float64: any sizes, strides, parts and options; the same bits; what is refused."""

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.products.few_rows import Unscaled, few_rows_product, few_rows_product_reference
from course_lib.kernels.products.tiles import FewRowsTiles, few_rows_tiles
from course_lib.kernels.products.workspace import ProductWorkspace, few_rows_workspace
from tests.kernels.fused.cases import in_wider_rows, normal
from tests.kernels.products.error import assert_right, unscaled

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
DTYPES = [torch.float32, torch.float16]
SPLIT = FewRowsTiles(outer=32, inner=16, splits=3, warps=4, stages=1)
EPSILON = 1e-5


def inputs(rows: int, outer: int, inner: int, dtype=torch.float32):
    return normal(1, rows, inner, dtype=dtype), normal(2, outer, inner, dtype=dtype, scale=inner**-0.5)


def everything(rows: int, outer: int, dtype=torch.float32) -> dict:
    """All options at once for `Unscaled` rows and a weight of `outer` rows."""
    return {"epsilon": EPSILON, "gated": True, "residual": normal(4, rows, outer // 2, dtype=dtype),
            "gain": normal(3, outer // 2, dtype=dtype)}  # fmt: skip


def test_the_meaning_is_that_of_a_norm_a_layer_a_gate_and_an_addition():
    x, weight = (tensor.double() for tensor in inputs(3, 10, 7))
    options = {name: it.double() if torch.is_tensor(it) else it for name, it in everything(3, 10).items()}
    gate, up = F.linear(F.rms_norm(x, (7,), None, EPSILON), weight).split(5, dim=-1)
    summed, behind = few_rows_product_reference(Unscaled(x, x.square()), weight, **options)
    torch.testing.assert_close(summed, F.silu(gate) * up + options["residual"])
    next_weight = torch.eye(5, dtype=torch.float64)
    normalised = few_rows_product_reference(behind, next_weight, epsilon=EPSILON)
    torch.testing.assert_close(normalised, F.rms_norm(summed, (5,), options["gain"], EPSILON))
    assert torch.equal(few_rows_product_reference(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_rows_is_right(rows, dtype):
    x, weight = inputs(rows, 96, 80, dtype)
    assert_right(x, weight)
    assert_right(unscaled(x), weight, tiles=SPLIT, **everything(rows, 96, dtype))


@pytest.mark.parametrize("outer", [2, 62, 130])
@pytest.mark.parametrize("inner", [1, 3, 50, 129])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_size_is_right(outer, inner, dtype):
    x, weight = inputs(5, outer, inner, dtype)
    assert_right(x, weight)
    assert_right(unscaled(x), weight, **everything(5, outer, dtype))
    assert_right(unscaled(x, 1), weight, tiles=SPLIT, **everything(5, outer, dtype))


@pytest.mark.parametrize("left_out", ["epsilon", "gain", "gated", "residual"])
@pytest.mark.parametrize("splits", [1, 3])
def test_each_option_may_be_missing(left_out, splits):
    x, weight = inputs(5, 70, 66, torch.float16)
    options = everything(5, 140 if left_out == "gated" else 70, torch.float16)
    del options[left_out]
    tiles = SPLIT._replace(splits=splits)
    assert_right(x if left_out == "epsilon" else unscaled(x), weight, tiles=tiles, **options)


def test_more_parts_than_blocks_are_right():
    x, weight = inputs(2, 40, 20)
    assert_right(unscaled(x), weight, tiles=SPLIT._replace(splits=8), **everything(2, 40))


def test_rows_may_lie_apart_in_each_tensor():
    x, weight = inputs(5, 66, 70)
    options = everything(5, 66)
    before = unscaled(x)
    assert_right(before._replace(rows=in_wider_rows(x)), weight, **options)
    assert_right(before, in_wider_rows(weight), **options)
    assert_right(before, weight, **options | {"residual": in_wider_rows(options["residual"])})
    assert_right(x[:1].expand(5, 70), weight[::2].contiguous()[:1].expand(66, 70))
    out = in_wider_rows(torch.zeros(5, 33))
    exact, exact_behind = few_rows_product(before, weight, **options)
    found, behind = few_rows_product(before, weight, out, **options)
    assert found is out and torch.equal(out, exact) and all(map(torch.equal, behind, exact_behind))
    assert out._base.isnan().sum() == 5 * 5


def test_the_result_may_be_float32_and_take_the_residuals_place():
    x, weight = inputs(5, 66, 70, torch.float16)
    wide = torch.empty(5, 66)
    few_rows_product(x, weight, wide)
    torch.testing.assert_close(wide, x.float() @ weight.float().t(), atol=1e-5, rtol=1e-5)
    stream = normal(4, 5, 66, dtype=torch.float16)
    apart = few_rows_product(x, weight, residual=stream)
    assert torch.equal(few_rows_product(x, weight, stream, residual=stream), apart)


def test_a_gain_of_float32_serves_16_bits():
    x, weight = inputs(5, 66, 70, torch.float16)
    assert_right(x, weight, gain=normal(3, 66))


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_small_and_large_rows_are_normalised(size):
    x, weight = inputs(3, 32, 64, torch.float16)
    assert_right(unscaled(x.clamp(-1, 1) * size), weight, epsilon=EPSILON)


def test_a_norm_s_rows_go_from_one_product_to_the_next():
    """RMSNorm of stream + x · weightᵀ, and a product with it, in float64: as near as the numbers in between allow."""
    x, weight = inputs(5, 96, 80)
    stream, gain, behind = normal(4, 5, 96), normal(3, 96), normal(5, 40, 96, scale=0.1)
    summed, before = few_rows_product(x, weight, residual=stream, gain=gain, tiles=SPLIT)
    found = few_rows_product(before, behind, epsilon=EPSILON)
    exact = F.rms_norm(stream.double() + x.double() @ weight.double().T, (96,), gain.double(), EPSILON)
    torch.testing.assert_close(found.double(), exact @ behind.double().T, atol=1e-5, rtol=1e-5)


def test_a_nan_stays_in_its_row_of_x_and_in_its_row_of_the_weight():
    x, weight = inputs(3, 40, 50)
    x[1, 7] = torch.nan
    found, behind = few_rows_product(unscaled(x), weight, tiles=SPLIT, epsilon=EPSILON, gain=torch.ones(40))
    assert found.isnan().sum(dim=1).tolist() == behind.rows.isnan().sum(dim=1).tolist() == [0, 40, 0]
    assert behind.squares.isnan().any(dim=1).tolist() == [False, True, False]
    x, weight = inputs(3, 40, 50)
    weight[39, 49] = torch.nan
    assert few_rows_product(x, weight, tiles=SPLIT).isnan().sum(dim=0).tolist() == [0] * 39 + [3]


def test_a_workspace_serves_any_of_its_products_one_after_another_with_the_same_bits():
    weights = [normal(seed, outer, inner) for seed, (outer, inner) in enumerate([(66, 700), (130, 256), (40, 512)])]
    workspace = few_rows_workspace(20, weights)
    assert workspace.arrivals.numel() and workspace.parts.numel()
    for rows in (1, 20, 3):
        for weight in weights:
            x = normal(9, rows, weight.shape[1])
            first = few_rows_product(x, weight, workspace=workspace)
            assert torch.equal(first, few_rows_product(x, weight, workspace=workspace))
            assert torch.equal(first, few_rows_product(x, weight))
            assert not workspace.arrivals.any()


@pytest.mark.parametrize("splits", [1, 3])
def test_the_weight_is_read_once(splits):
    x, weight = inputs(5, 64, 96)
    report = metered(few_rows_product, x, weight, tiles=SPLIT._replace(splits=splits))
    assert report["weight_pointer"].loaded_bytes == weight.nbytes and not report.out_of_bounds
    assert report["x_pointer"].loaded_bytes == 2 * x.nbytes  # once for each tile


def test_few_tiles_are_cut_into_parts_until_the_gpu_is_full():
    def splits(rows, outer, inner):
        return few_rows_tiles(rows, outer, inner, torch.bfloat16, 90, 132).splits

    assert splits(1, 128_256, 2048) == splits(1, 16_384, 2048) == 1
    assert splits(1, 2048, 8192) > splits(1, 3072, 2048) > 1
    assert splits(1, 16, 64) == 1


STREAM = torch.zeros(2, 7)
GOOD = {"x": torch.zeros(2, 8), "weight": torch.zeros(6, 8)}
BEFORE = Unscaled(torch.zeros(2, 8), torch.ones(2, 1))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": 3}, ["x is a int"]),
        ({"x": torch.zeros(8)}, ["x has shape (8,)", "[rows, inner]"]),
        ({"x": torch.zeros(2, 8).int()}, ["x has dtype torch.int32"]),
        ({"x": torch.zeros(65, 8)}, ["x has 65 rows", "64", "functional.linear"]),
        ({"x": torch.zeros(0, 8)}, ["x has shape (0, 8)", "no dimension may be 0"]),
        ({"x": torch.zeros(8, 2).t()}, ["x has strides", "x.contiguous()"]),
        ({"weight": torch.zeros(6, 7)}, ["weight has inner dimension 7", "8"]),
        ({"weight": torch.zeros(6, 8).half()}, ["weight has dtype torch.float16"]),
        ({"weight": torch.zeros(8, 6).t()}, ["weight has strides", "weight.contiguous()"]),
        ({"weight": torch.zeros(5, 8), "gated": True}, ["weight has 5 rows", "as many for up"]),
        ({"x": BEFORE, "epsilon": -1.0}, ["epsilon is -1.0"]),
        ({"x": BEFORE}, ["epsilon is None", "Unscaled rows"]),
        ({"epsilon": 0.1}, ["epsilon is 0.1", "Unscaled rows"]),
        ({"x": BEFORE._replace(squares=torch.ones(3, 1)), "epsilon": 0.1}, ["squares has shape (3, 1)", "[2, parts]"]),
        ({"x": BEFORE._replace(squares=torch.ones(2, 1).half()), "epsilon": 0.1}, ["squares has dtype"]),
        ({"gain": torch.ones(7)}, ["gain has shape (7,)", "(6,)"]),
        ({"residual": torch.zeros(2, 5)}, ["residual has shape (2, 5)", "(2, 6)"]),
        ({"residual": torch.zeros(2, 6), "gated": True}, ["residual has shape (2, 6)", "(2, 3)"]),
        ({"out": torch.zeros(2, 5)}, ["out has shape (2, 5)", "(2, 6)"]),
        ({"out": torch.zeros(2, 6).half()}, ["out has dtype torch.float16", "torch.float32"]),
        ({"out": torch.zeros(6).expand(2, 6)}, ["out has strides (0, 1)", "must not overlap"]),
        ({"out": STREAM[:, 1:7], "residual": STREAM[:, :6]}, ["out overlaps residual"]),
        ({"out": GOOD["x"][:, :6]}, ["out overlaps x"]),
        ({"out": GOOD["weight"][2:4, :6]}, ["out overlaps weight"]),
        ({"dependent": True}, ["dependent is True", "9.0"]),
        ({"tiles": (32, 16, 3, 4, 1)}, ["tiles is a tuple", "FewRowsTiles"]),
        ({"tiles": SPLIT._replace(outer=48)}, ["tiles is FewRowsTiles(outer=48", "powers of two"]),
        ({"tiles": SPLIT._replace(splits=0)}, ["splits=0", "at least 1"]),
        ({"workspace": 1}, ["workspace is a int", "few_rows_workspace()"]),
        (
            {"workspace": ProductWorkspace(*2 * [torch.zeros(1)]), "tiles": SPLIT},
            ["workspace has room for", "needs"],
        ),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    with pytest.raises(ValueError) as refusal:
        few_rows_product(**GOOD | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
