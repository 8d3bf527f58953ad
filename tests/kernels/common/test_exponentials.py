"""2^x from multiply-adds: the best coefficients, the errors that are claimed, the ends, and the machine code."""

import math
import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.views import compile_many, compile_view
from course_lib.hardware.device import interpreting
from course_lib.kernels.common.exponentials import (
    COEFFICIENTS,
    DEGREES,
    exp2_by_polynomial,
    exp2_kernel,
    exp2_of_scores,
    exp2_polynomial_reference,
    exp2_scores_kernel,
)

FRACTIONS = np.linspace(0, 1, 2**15 + 1)
POINTS = torch.arange(2**17) / 2**17
PAPER = {2: 2.1e-3, 3: 8.77e-5, 4: 3.1e-6, 5: 1.6e-7}  # the paper's largest errors in float32; ours are smaller
FLOAT32_ROUNDINGS = {2: 1e-6, 3: 1e-7, 4: 1e-7, 5: 1e-7}  # of coefficients and multiply-adds: a digit is 1.2e-7
NUMBERS = {"x_pointer": "*fp32", "out_pointer": "*fp32", "length": "i32"}
SPECIAL_UNIT = ("MUFU", "FRND", "F2I", "I2F")  # what shares the unit of exponentials, as the machine code spells it

needs_interpreter = pytest.mark.skipif(not interpreting(), reason="on a GPU, tests/gpu does this with the kernels")


def polynomial(degree):
    return (1.0, *COEFFICIENTS.value[DEGREES.index(degree)])


def relative_errors(coefficients, x=FRACTIONS):
    return np.polyval(coefficients[::-1], x) / 2**x - 1


def best_coefficients(degree):
    """The polynomial with p(0) = 1 whose largest relative error on [0, 1] is least, and that error (Remez).

    Where the error is as large as it gets its sign alternates, at degree + 1 points. So solve p(x) = 2^x (1 ± e) for
    the coefficients and e at guessed points, move each to where the error really is largest, and solve again.
    """
    powers, signs = np.arange(1, degree + 1), (-1.0) ** np.arange(degree + 1)
    x = (1 - np.cos(np.pi * np.arange(1, degree + 2) / (degree + 1))) / 2
    for _ in range(20):
        *coefficients, largest = np.linalg.solve(np.c_[x[:, None] ** powers, -signs * 2**x], 2**x - 1)
        errors = relative_errors((1.0, *coefficients))
        changes = np.flatnonzero(np.diff(np.sign(errors[1:]))) + 2
        x = np.array([part[np.abs(errors[part]).argmax()] for part in np.split(np.arange(len(errors)), changes)])
        x = FRACTIONS[x]
    return (1.0, *coefficients), abs(largest)


def ulps_apart(one, other):
    return (one.view(torch.int16).int() - other.view(torch.int16).int()).abs()


def operations(sass):
    """The instructions of machine code, in order, without their suffixes."""
    return re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", sass)


# ------------------------------------------------------------------------------------------------- how good they are


@pytest.mark.parametrize("degree", DEGREES)
def test_the_coefficients_are_the_best_with_a_constant_of_1(degree):
    best, largest = best_coefficients(degree)
    assert polynomial(degree) == tuple(float(np.float32(number)) for number in best)
    errors = relative_errors(best)
    peaks = np.abs(errors).max()
    assert peaks == pytest.approx(largest, rel=1e-6)  # no point is worse: it is the best there is


@pytest.mark.parametrize("degree", DEGREES)
def test_in_float32_the_error_is_that_of_the_coefficients_and_below_the_papers(degree):
    exact = torch.exp2(POINTS.double())
    error = float((exp2_polynomial_reference(POINTS, degree) / exact - 1).abs().max())
    assert error < PAPER[degree]
    assert error == pytest.approx(best_coefficients(degree)[1], abs=FLOAT32_ROUNDINGS[degree])


@pytest.mark.parametrize(
    "degree, identical, worst",
    [(2, 0.7607, 5.55e-3), (3, 0.9900, 3.90e-3), (4, 0.9996, 3.89e-3), (5, 0.99998, 3.89e-3)],
)
def test_after_rounding_to_bfloat16_few_results_differ_and_none_by_more_than_one_ulp(degree, identical, worst):
    exact = torch.exp2(POINTS.double())
    rounded, best = exp2_polynomial_reference(POINTS, degree).bfloat16(), exact.float().bfloat16()
    assert ulps_apart(rounded, best).max() <= 1
    assert float((rounded == best).double().mean()) == pytest.approx(identical, abs=1e-4)
    assert float((rounded / exact - 1).abs().max()) == pytest.approx(worst, abs=0.01e-3)
    assert float((best / exact - 1).abs().max()) == pytest.approx(3.89e-3, abs=0.005e-3)  # bfloat16's own


def test_taylors_coefficients_are_64_times_worse():
    taylor = [math.log(2) ** power / math.factorial(power) for power in range(4)]
    errors = np.abs(relative_errors(taylor))
    assert errors.max() == pytest.approx(5.6e-3, rel=0.02)
    assert 64 < errors.max() / np.abs(relative_errors(polynomial(3))).max() < 67


def test_a_fraction_rounded_to_the_nearest_whole_number_leaves_the_interval_of_the_coefficients():
    """In [-1/2, 1/2] a polynomial for [0, 1] is as bad as Taylor's."""
    assert np.abs(relative_errors(polynomial(3), FRACTIONS - 0.5)).max() > 20 * 8.77e-5


# ------------------------------------------------------------------------------------------------- the kernel's bits


@needs_interpreter
@pytest.mark.parametrize("degree", DEGREES)
def test_the_kernel_makes_the_bits_of_its_meaning(degree):
    draw = torch.Generator().manual_seed(degree)
    ends = torch.tensor([-math.inf, -1e30, -127.0, -126.99999, -126.5, -126.0, -1e-9, 0.0, 1e-9, 127.0, 127.99999])
    x = torch.cat([ends, torch.rand(3000, generator=draw) * 254.9 - 127, -torch.rand(500, generator=draw)])
    made = exp2_by_polynomial(x, degree)
    # Some interpreters round the product of a multiply-add too.
    assert any(torch.equal(made, exp2_polynomial_reference(x, degree, fused)) for fused in (True, False))


@needs_interpreter
@pytest.mark.parametrize("degree", DEGREES)
def test_whole_numbers_give_their_power_of_two_and_minus_infinity_gives_0(degree):
    whole = torch.arange(-126.0, 128.0)
    assert torch.equal(exp2_by_polynomial(whole, degree), torch.exp2(whole))
    nothing = torch.tensor([-math.inf, -3e38, -1000.0, -128.0, -127.0])
    assert torch.equal(exp2_by_polynomial(nothing, degree), torch.zeros(5))


@needs_interpreter
@pytest.mark.parametrize("degree", DEGREES)
def test_below_the_normal_numbers_the_result_is_off_by_less_than_half_the_smallest_of_them(degree):
    x = torch.arange(-130.0, -126.0, 2**-10)
    made = exp2_by_polynomial(x, degree).double()
    assert (made >= 0).all() and (made.diff() >= 0).all()
    off = (made - torch.exp2(x.double())).abs()
    assert off.max() <= 2.0**-127 and off[x == -127] == 2.0**-127


@needs_interpreter
@pytest.mark.parametrize("degree", DEGREES)
def test_just_below_a_whole_number_the_carry_goes_into_the_exponent(degree):
    whole = torch.arange(-125.0, 128.0)
    below = torch.nextafter(whole, torch.tensor(-math.inf))
    made, exact = exp2_by_polynomial(below, degree).double(), torch.exp2(below.double())
    assert ((made / exact - 1).abs() < PAPER[degree]).all()


def test_nan_becomes_0():
    """On a GPU, whose maximum is the number of the two; older interpreters keep the NaN."""
    assert exp2_polynomial_reference(torch.tensor([math.nan]), 3).item() == 0.0
    ptx = compile_view(exp2_kernel, NUMBERS, {"DEGREE": 3, "BLOCK": 128}).ptx
    assert "max.f32" in ptx and "max.NaN" not in ptx


@needs_interpreter
def test_nothing_in_nothing_out():
    assert exp2_by_polynomial(torch.empty(0, 3)).shape == (0, 3)


@needs_interpreter
@pytest.mark.parametrize("share", [0, 4, 8, 32])
def test_a_share_of_the_columns_comes_from_the_polynomial_and_the_rest_does_not(share):
    draw = torch.Generator().manual_seed(share)
    query, key = (torch.randn(64, 64, generator=draw).half() for _ in range(2))
    made = exp2_of_scores(query, key, 2, share)
    by_share = exp2_of_scores(query, key, 2, 32)
    exact = exp2_of_scores(query, key, 2, 0)
    taken = torch.arange(64) % 32 >= 32 - share
    assert torch.equal(made, torch.where(taken, by_share, exact))
    assert (by_share != exact).float().mean() > 0.9  # degree 2 is seen in float32
    scores = query.double() @ key.double().T
    assert ((made / torch.exp2(scores) - 1).abs() < PAPER[2] + 2e-5).all()


@needs_interpreter
@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: exp2_by_polynomial(torch.zeros(3), 6), "degree is 6; there are coefficients for 2, 3, 4, 5"),
        (lambda: exp2_by_polynomial(torch.zeros(3).half()), "float16"),
        (lambda: exp2_by_polynomial(torch.zeros(6)[::2]), "must be contiguous"),
        (lambda: exp2_of_scores(torch.zeros(64, 64).half(), torch.zeros(64, 32).half()), "key has shape"),
        (lambda: exp2_of_scores(*2 * [torch.zeros(64, 64).half()], share=33), "share is 33"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# ------------------------------------------------------------------------------------------------- the machine code


@triton.jit
def exp2_by_floor_kernel(x_pointer, out_pointer, length, BLOCK: tl.constexpr):
    """How one would write it first: a floor, and an integer of it. The polynomial, of degree 1, is not the point."""
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_pointer + offsets, mask=offsets < length, other=0.0)
    whole = tl.floor(x)
    power = 1.0 + (x - whole)
    bits = power.to(tl.int32, bitcast=True) + (whole.to(tl.int32) << 23)
    tl.store(out_pointer + offsets, bits.to(tl.float32, bitcast=True), mask=offsets < length)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_nothing_of_the_polynomial_runs_on_the_special_function_unit(arch):
    """Floor and integer would: two instructions of that unit instead of the one that was to be saved."""
    usual = {"signature": NUMBERS, "arch": arch, "want_sass": True}
    view, naive = compile_many(
        [
            {"kernel": exp2_kernel, "constexprs": {"DEGREE": 3, "BLOCK": 1024}, **usual},
            {"kernel": exp2_by_floor_kernel, "constexprs": {"BLOCK": 1024}, **usual},
        ]
    )
    assert view.spill_bytes == 0 and "ex2" not in view.ptx
    assert not set(operations(view.sass)) & set(SPECIAL_UNIT)
    assert {"FRND", "F2I"} <= set(operations(naive.sass))


def test_a_power_takes_six_instructions_and_as_many_multiply_adds_as_the_degree():
    """On sm_90: a maximum, three additions, an AND, the multiply-adds, and a shift with an addition."""

    def counted(degree, block):
        view = compile_view(
            exp2_kernel, NUMBERS, {"DEGREE": degree, "BLOCK": block}, divisible=tuple(NUMBERS), want_sass=True
        )
        found = operations(view.sass)
        return {name: found.count(name) for name in ("FMNMX", "FADD", "FFMA")}

    more, less = counted(3, 2048), counted(3, 1024)  # 16 and 8 numbers a thread
    assert {name: more[name] - less[name] for name in more} == {"FMNMX": 8, "FADD": 24, "FFMA": 24}


@pytest.mark.parametrize(
    "arch, share, exponentials, polynomials",
    [(80, 8, 32, 16), (90, 4, 32, 8), (90, 8, 24, 8), (100, 4, 28, 4)],
)
def test_a_share_is_free_where_the_layout_tells_which_columns_a_register_holds(arch, share, exponentials, polynomials):
    tiles = {"query_pointer": "*fp16", "key_pointer": "*fp16", "out_pointer": "*fp32"}
    view = compile_view(exp2_scores_kernel, tiles, {"DEGREE": 3, "SHARE": share}, arch=arch, want_sass=True)
    found = operations(view.sass)
    assert (found.count("MUFU"), found.count("FMNMX")) == (exponentials, polynomials)  # of 32 numbers a thread
