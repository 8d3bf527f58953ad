"""The ladder of matrix products against float64: any sizes and strides, each step; the same bits; what is refused."""

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.kernels.products.candidates import ProductTiles
from course_lib.kernels.products.epilogue import product_reference
from course_lib.kernels.products.naive import naive_product
from course_lib.kernels.products.persistent import persistent_product
from course_lib.kernels.products.split_k import split_k_product, splits_for
from course_lib.kernels.products.stream_k import stream_k_product
from course_lib.kernels.products.tiled import ordered, tiled, tiled_product
from course_lib.kernels.products.tma import tma_product
from tests.kernels.fused.cases import in_wider_rows, normal
from tests.kernels.products.error import assert_product_right

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
STEPS = [tiled_product, persistent_product, split_k_product, stream_k_product]
WITH_EPILOGUE = [persistent_product, tma_product]
SMALL = ProductTiles(32, 16, 16, warps=4, stages=1, group=2)
UNEVEN = ProductTiles(16, 32, 32, warps=4, stages=1, group=3)


def inputs(rows: int, outer: int, inner: int, dtype=torch.float32):
    return normal(1, rows, inner, dtype=dtype), normal(2, outer, inner, dtype=dtype, scale=inner**-0.5)


def everything(rows: int, columns: int, outer: int, dtype=torch.float32) -> dict:
    return {"bias": normal(3, outer, dtype=dtype), "residual": normal(4, rows, columns, dtype=dtype)}


def of_each_step(test):
    return pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)(test)


@of_each_step
@pytest.mark.parametrize("rows, outer, inner", [(1, 1, 1), (67, 37, 61), (97, 31, 1), (32, 48, 64), (1, 65, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_size_is_right(step, rows, outer, inner, dtype):
    tiles = SMALL if dtype == torch.float32 else UNEVEN
    assert_product_right(step, *inputs(rows, outer, inner, dtype), tiles=tiles)


@pytest.mark.parametrize("rows, outer, inner", [(1, 1, 1), (3, 67, 61), (2, 31, 129), (4, 32, 256), (0, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_naive_step_is_right_at_any_size(rows, outer, inner, dtype):
    assert_product_right(naive_product, *inputs(rows, outer, inner, dtype))


@of_each_step
def test_tiles_are_chosen(step):
    assert_product_right(step, *inputs(70, 66, 65, torch.float16))


@of_each_step
def test_no_rows_give_no_rows(step):
    found = step(*inputs(0, 5, 7))
    assert found.shape == (0, 5) and found.dtype == torch.float32


@of_each_step
def test_rows_may_lie_apart_and_nothing_between_them_is_read(step):
    x, weight = inputs(35, 33, 40)
    exact = step(x, weight, tiles=SMALL)
    assert torch.equal(step(in_wider_rows(x), in_wider_rows(weight), tiles=SMALL), exact)
    assert_product_right(step, x[:1].expand(35, 40), weight[:1].expand(33, 40), tiles=SMALL)


@of_each_step
def test_a_nan_stays_in_its_row_of_x_and_in_its_row_of_the_weight(step):
    x, weight = inputs(34, 20, 18)
    x[33, 17] = weight[19, 0] = torch.nan
    isnan = step(x, weight, tiles=SMALL).isnan()
    assert isnan.sum(dim=1).tolist() == [1] * 33 + [20] and isnan.sum(dim=0).tolist() == [1] * 19 + [34]


@of_each_step
def test_rows_beyond_32_bits_are_read_in_their_place(step):
    """Two rows that lie 2³¹ + 64 numbers apart, in memory that is never touched between them."""
    x, weight = inputs(2, 2, 32, torch.float16)
    far = []
    for near in (x, weight):
        memory = torch.empty(2**31 + 128, dtype=torch.half)  # the system gives pages as they are written
        far.append(memory.as_strided((2, 32), (2**31 + 64, 1)))
        far[-1].copy_(near)
    assert torch.equal(step(*far), step(x, weight))


@pytest.mark.parametrize("setting", [tiled, ordered], ids=lambda setting: setting.__name__)
def test_the_first_two_steps_are_settings_of_the_third(setting):
    x, weight = inputs(150, 70, 20)
    assert_product_right(tiled_product, x, weight, tiles=setting(x))


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_any_number_of_parts_is_right(splits):
    """Of 5 steps: the parts are uneven, or more than there are steps."""
    x, weight = inputs(40, 20, 70, torch.float16)
    found = assert_product_right(split_k_product, x, weight, tiles=SMALL, splits=splits)
    assert torch.equal(found, split_k_product(x, weight, tiles=SMALL, splits=splits))


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 7, 19, 30, 40])
def test_any_number_of_programs_is_right(programs):
    """Of 4 tiles with 5 steps: tiles that programs share, programs within a tile, more programs than steps."""
    x, weight = inputs(40, 20, 70, torch.float16)
    found = assert_product_right(stream_k_product, x, weight, tiles=SMALL, programs=programs)
    assert torch.equal(found, stream_k_product(x, weight, tiles=SMALL, programs=programs))


def test_parts_are_as_many_as_fill_the_gpu():
    assert splits_for(8, 64, 132) == 16 and splits_for(40, 64, 132) == 3
    assert splits_for(8, 2, 132) == 2 and splits_for(200, 64, 132) == 1


@pytest.mark.parametrize(
    "step, name", [(split_k_product, "splits"), (stream_k_product, "programs")], ids=["splits", "programs"]
)
@pytest.mark.parametrize("parts", [0, -1, True, 2.0])
def test_a_bad_number_of_parts_is_refused(step, name, parts):
    with pytest.raises(ValueError, match=f"{name} is {parts}.* at least 1"):
        step(*inputs(2, 3, 4), **{name: parts})


def test_the_meaning_is_that_of_a_layer_an_activation_a_gate_and_an_addition():
    x, weight = (tensor.double() for tensor in inputs(3, 10, 7))
    options = {name: it.double() for name, it in everything(3, 10, 10).items()}
    layer = F.linear(x, weight, options["bias"])
    added = product_reference(x, weight, activation="gelu_tanh", **options)
    torch.testing.assert_close(added, F.gelu(layer, approximate="tanh") + options["residual"])
    torch.testing.assert_close(product_reference(x, weight, gated=True), F.silu(x @ weight[:5].T) * (x @ weight[5:].T))


def with_epilogue(test):
    return pytest.mark.parametrize("step", WITH_EPILOGUE, ids=lambda step: step.__name__)(test)


@with_epilogue
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # σ(x) of a very negative number is 1 / inf
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("rows, outer, inner", [(67, 40, 72), (1, 8, 8)])
def test_what_stands_behind_a_product_is_right(step, activation, rows, outer, inner):
    x, weight = inputs(rows, outer, inner, torch.float16)
    weight *= 4  # activations with slopes
    options = everything(rows, outer, outer, torch.float16)
    assert_product_right(step, x, weight, activation=activation, tiles=SMALL, **options)
    assert_product_right(step, x, weight, activation=activation, tiles=UNEVEN, bias=options["bias"].float())


@with_epilogue
@pytest.mark.parametrize("rows, columns, inner", [(67, 40, 72), (5, 8, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_gate_is_right_with_all_else_and_without(step, rows, columns, inner, dtype):
    x, weight = inputs(rows, 2 * columns, inner, dtype)
    assert_product_right(step, x, weight, gated=True, tiles=SMALL)
    options = everything(rows, columns, 2 * columns, dtype)
    options["residual"] = in_wider_rows(options["residual"])
    assert_product_right(step, x, weight, gated=True, tiles=UNEVEN, **options)


def test_a_gate_of_any_size_is_right():
    for rows, columns, inner in ((1, 1, 1), (37, 29, 31)):
        x, weight = inputs(rows, 2 * columns, inner)
        assert_product_right(persistent_product, x, weight, gated=True, **everything(rows, columns, 2 * columns))


def test_the_copy_engine_takes_rows_that_lie_multiples_of_16_bytes_apart():
    x, weight = inputs(67, 40, 33, torch.float16)
    wide_x, wide_weight = torch.full((67, 48), torch.nan).half(), torch.full((40, 56), torch.nan).half()
    wide_x[:, 8:41], wide_weight[:, 16:49] = x, weight
    found = assert_product_right(tma_product, wide_x[:, 8:41], wide_weight[:, 16:49], tiles=SMALL)
    assert torch.equal(found, persistent_product(x, weight, tiles=SMALL))
    assert tma_product(wide_x[:0, 8:], wide_weight[:, 16:]).shape == (0, 40)


@pytest.mark.parametrize(
    "x, weight, words",
    [
        (torch.zeros(3, 10)[:, 1:9], torch.zeros(4, 8), ["x begins at an address"]),
        (torch.zeros(3, 10)[:, :8], torch.zeros(4, 8), ["x has strides (10, 1)"]),
        (torch.zeros(3, 8), torch.zeros(1, 8).expand(4, 8), ["weight has strides (0, 1)"]),
        (torch.zeros(3, 8), torch.zeros(5, 8), ["The result has 5 columns"]),
    ],
)
def test_what_the_copy_engine_cannot_move_is_refused(x, weight, words):
    with pytest.raises(ValueError) as refusal:
        tma_product(x, weight)
    assert all(word in str(refusal.value) for word in [*words, "persistent_product"]), str(refusal.value)


@with_epilogue
@pytest.mark.parametrize(
    "change, words",
    [
        ({"bias": torch.zeros(5)}, ["bias has shape (5,)", "(16,)"]),
        ({"activation": "relu"}, ["activation is 'relu'", "gelu, gelu_tanh, silu"]),
        ({"activation": "silu", "gated": True}, ["activation is 'silu' and gated is True"]),
        ({"residual": torch.zeros(2, 16), "gated": True}, ["residual has shape (2, 16)", "(2, 8)"]),
        ({"weight": torch.zeros(5, 8), "gated": True}, ["weight has 5 rows", "as many for up"]),
    ],
)
def test_a_bad_epilogue_is_refused_with_what_is_allowed(step, change, words):
    with pytest.raises(ValueError) as refusal:
        step(**{"x": torch.zeros(2, 8), "weight": torch.zeros(16, 8)} | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@of_each_step
@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": 3}, ["x is a int"]),
        ({"x": torch.zeros(8)}, ["x has shape (8,)", "[rows, inner]"]),
        ({"x": torch.zeros(8, 2).t()}, ["x has strides", "x.contiguous()"]),
        ({"weight": torch.zeros(6, 7)}, ["weight has inner dimension 7", "8"]),
        ({"weight": torch.zeros(6, 8).half()}, ["weight has dtype torch.float16"]),
        ({"weight": torch.zeros(0, 8)}, ["weight has shape (0, 8)", "no dimension may be 0"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(step, change, words):
    with pytest.raises(ValueError) as refusal:
        step(**{"x": torch.zeros(2, 8), "weight": torch.zeros(6, 8)} | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
