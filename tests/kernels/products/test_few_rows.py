"""Products for few rows against float64: any sizes, strides, parts and options; the same bits; what is refused."""

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.products.few_rows import few_rows_product, few_rows_product_reference
from course_lib.kernels.products.tiles import FewRowsTiles, few_rows_tiles
from course_lib.kernels.products.workspace import ProductWorkspace, few_rows_workspace
from tests.kernels.fused.cases import in_wider_rows, normal
from tests.kernels.products.few_rows_error import assert_right

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
DTYPES = [torch.float32, torch.float16]
SPLIT = FewRowsTiles(outer=32, inner=16, splits=3, warps=4, stages=1)
EPSILON = 1e-5


def inputs(rows: int, outer: int, inner: int, dtype=torch.float32):
    return normal(1, rows, inner, dtype=dtype), normal(2, outer, inner, dtype=dtype, scale=inner**-0.5)


def everything(rows: int, outer: int, inner: int, dtype=torch.float32) -> dict:
    """All options at once, for a weight of `outer` rows."""
    return {"epsilon": EPSILON, "gain": normal(3, inner, dtype=dtype), "gated": True,
            "residual": normal(4, rows, outer // 2, dtype=dtype)}  # fmt: skip


def test_the_meaning_is_that_of_a_norm_a_layer_a_gate_and_an_addition():
    x, weight = (tensor.double() for tensor in inputs(3, 10, 7))
    options = {name: it.double() if torch.is_tensor(it) else it for name, it in everything(3, 10, 7).items()}
    gate, up = F.linear(F.rms_norm(x, (7,), options["gain"], EPSILON), weight).split(5, dim=-1)
    torch.testing.assert_close(
        few_rows_product_reference(x, weight, **options), F.silu(gate) * up + options["residual"]
    )
    assert torch.equal(few_rows_product_reference(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_rows_is_right(rows, dtype):
    x, weight = inputs(rows, 96, 80, dtype)
    assert_right(x, weight)
    assert_right(x, weight, tiles=SPLIT, **everything(rows, 96, 80, dtype))


@pytest.mark.parametrize("outer", [2, 62, 130])
@pytest.mark.parametrize("inner", [1, 3, 50, 129])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_size_is_right(outer, inner, dtype):
    x, weight = inputs(5, outer, inner, dtype)
    assert_right(x, weight)
    assert_right(x, weight, **everything(5, outer, inner, dtype))
    assert_right(x, weight, tiles=SPLIT, **everything(5, outer, inner, dtype))


@pytest.mark.parametrize("left_out", ["epsilon", "gain", "gated", "residual"])
@pytest.mark.parametrize("splits", [1, 3])
def test_each_option_may_be_missing(left_out, splits):
    x, weight = inputs(5, 70, 66, torch.float16)
    options = everything(5, 70, 66, torch.float16)
    del options[left_out]
    options = options if "epsilon" in options else options | {"gain": None}
    if left_out == "gated":
        options["residual"] = normal(4, 5, 70, dtype=torch.float16)
    assert_right(x, weight, tiles=SPLIT._replace(splits=splits), **options)


def test_more_parts_than_blocks_are_right():
    x, weight = inputs(2, 40, 20)
    assert_right(x, weight, tiles=SPLIT._replace(splits=8), **everything(2, 40, 20))


def test_rows_may_lie_apart_in_each_tensor():
    x, weight = inputs(5, 66, 70)
    options = everything(5, 66, 70)
    assert_right(in_wider_rows(x), weight, **options)
    assert_right(x, in_wider_rows(weight), **options)
    assert_right(x, weight, **options | {"residual": in_wider_rows(options["residual"])})
    assert_right(x[:1].expand(5, 70), weight[::2].contiguous()[:1].expand(66, 70))
    out = in_wider_rows(torch.zeros(5, 33))
    exact = few_rows_product(x, weight, **options)
    assert few_rows_product(x, weight, out, **options) is out and torch.equal(out, exact)
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
    assert_right(x, weight, epsilon=EPSILON, gain=normal(3, 70))


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_small_and_large_rows_are_normalised(size):
    x, weight = inputs(3, 32, 64, torch.float16)
    assert_right(x * size, weight, epsilon=EPSILON, gain=normal(3, 64, dtype=torch.float16).clamp(-1, 1))


def test_a_nan_stays_in_its_row_of_x_and_in_its_row_of_the_weight():
    x, weight = inputs(3, 40, 50)
    x[1, 7] = torch.nan
    assert few_rows_product(x, weight, tiles=SPLIT, epsilon=EPSILON).isnan().sum(dim=1).tolist() == [0, 40, 0]
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
            first = few_rows_product(x, weight, epsilon=EPSILON, workspace=workspace)
            assert torch.equal(first, few_rows_product(x, weight, epsilon=EPSILON, workspace=workspace))
            assert torch.equal(first, few_rows_product(x, weight, epsilon=EPSILON))
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
    assert splits(1, 1024, 8192) > splits(1, 2048, 8192) > 1
    assert splits(1, 16, 64) == 1


STREAM = torch.zeros(2, 7)
GOOD = {"x": torch.zeros(2, 8), "weight": torch.zeros(6, 8)}


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
        ({"epsilon": -1.0}, ["epsilon is -1.0"]),
        ({"gain": torch.ones(8)}, ["gain is given and epsilon is None"]),
        ({"gain": torch.ones(7), "epsilon": 0.1}, ["gain has shape (7,)", "(8,)"]),
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
            {"workspace": ProductWorkspace(*3 * [torch.zeros(1)]), "tiles": SPLIT},
            ["workspace has room for", "needs"],
        ),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    with pytest.raises(ValueError) as refusal:
        few_rows_product(**GOOD | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
