"""What the passes over a row share: tokens in groups, an order of the logits as integers, weights that add up exactly.

A row is cut into groups of neighbouring tokens (64 of them for usual vocabularies), and a tile holds whole groups.

**Keys.** An IEEE number's bits, read as an integer, grow with it; those of a negative number fall. Turned around, they
are integers in the order of the numbers, which a search by halves needs few steps for: 16 bits for a 16-bit type. NaN
gets the largest key and is found as a maximum. Tokens of equal keys are in the order of their index.

**Weights.** A token's weight exp((logit - largest) / temperature), 1 at most, is rounded to a multiple of 2⁻³⁰, and
sums are of integers. Integers add up to the same whatever their order: the sum, and with it the last token that top-p
keeps, does not depend on tiles, programs or the batch. An error of 2⁻³¹ a token is at most 6e-5 of the largest weight
over 128,256 tokens, and usually 1e-7, as the errors cancel.
"""

import triton
import triton.language as tl

from course_lib.kernels.common.numbers import LOG2_E
from course_lib.kernels.sampling.noise import log2_of, noise_of
from course_lib.kernels.sampling.reference import LEAST_TEMPERATURE

LEAST = tl.constexpr(LEAST_TEMPERATURE)
LOWEST_KEY, NAN_KEY = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
LAST_TOKEN = tl.constexpr(2**31 - 1)  # stands after every token there is
ONE = tl.constexpr(2.0**30)  # the weight of the largest logit


@triton.jit
def turned(bits, is_short: tl.constexpr):
    """Bits of numbers to keys, and keys to bits; -0 becomes +0."""
    smallest: tl.constexpr = -(2**15) if is_short else -(2**31)
    return tl.where(bits >= 0, bits, smallest - bits)


@triton.jit
def key_of(x):
    """int32: in the order of the numbers x."""
    is_short: tl.constexpr = x.dtype.primitive_bitwidth == 16
    bits = x.to(tl.int16 if is_short else tl.int32, bitcast=True).to(tl.int32)
    wide = x.to(tl.float32)
    return tl.where(wide == wide, turned(bits, is_short), NAN_KEY)


@triton.jit
def number_of(key, element: tl.constexpr):
    """float32: the number of the type `element` that has this key; NaN for NAN_KEY."""
    is_short: tl.constexpr = element.primitive_bitwidth == 16
    bits = turned(key, is_short).to(tl.int16 if is_short else tl.int32)
    return bits.to(element, bitcast=True).to(tl.float32)


@triton.jit
def load_groups(row_pointer, group, vocabulary, GROUP: tl.constexpr):
    """(logits float32, keys int32, tokens int32), each [groups, GROUP], of the groups [groups] of a row.

    What lies outside of the row has the logit -inf and LOWEST_KEY, which no number has.
    """
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [groups, GROUP]
    inside = token < vocabulary
    logits = tl.load(row_pointer + token, mask=inside, other=float("-inf"))  # [groups, GROUP]
    return logits.to(tl.float32), tl.where(inside, key_of(logits), LOWEST_KEY), token


@triton.jit
def load_options(row, temperature_pointer, top_k_pointer, top_p_pointer, min_p_pointer, vocabulary):
    """(whether they are allowed, temperature, top_k int32, top_p, min_p); a top_k that cuts nothing is 0."""
    temperature = tl.load(temperature_pointer + row)
    top_k = tl.load(top_k_pointer + row)
    top_p = tl.load(top_p_pointer + row)
    min_p = tl.load(min_p_pointer + row)
    allowed = (temperature >= 0.0) & (temperature < float("inf")) & (top_k >= 0)
    allowed = allowed & (top_p >= 0.0) & (top_p <= 1.0) & (min_p >= 0.0) & (min_p <= 1.0)
    return allowed, temperature, tl.where(top_k < vocabulary, top_k, 0).to(tl.int32), top_p, min_p


@triton.jit
def reaches(key, token, edge_key, edge_token):
    """Whether tokens stand at the edge or before it, by their keys or logits, and of equals the smaller first."""
    return (key > edge_key) | ((key == edge_key) & (token <= edge_token))


@triton.jit
def whole(weights):
    """int64: weights from 0 to 1 as multiples of 2⁻³⁰."""
    return (weights * ONE + 0.5).to(tl.int32).to(tl.int64)


@triton.jit
def chances(exponents, token, kept, key, ASSEMBLY: tl.constexpr):
    """log2 of weight / noise where kept, -inf elsewhere: the largest one's token is drawn.

    exponents: log2 of the weights.
    """
    return tl.where(kept, exponents - log2_of(noise_of(key, token, ASSEMBLY), ASSEMBLY), float("-inf"))


@triton.jit
def exponents_of(logits, largest, temperature):
    """log2 of the weights of a row's logits: 0 for the largest."""
    return (logits - largest) * (LOG2_E / temperature)
