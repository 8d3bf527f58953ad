"""Exercise 10.6: the backward pass as two Triton kernels, with the bytes that they move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves, Requirement
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.exercise import Limits
from course_lib.checker.specification.layouts import any_strides, unit_last
from course_lib.checker.specification.requirements import Contiguous, SmallProducts
from exercises.ch10_backward_and_recomputation.parts import lower_than_bounds
from exercises.ch10_backward_and_recomputation.two_kernels import MODEL
from exercises.topics.attention_backward import (
    delta_of,
    gradients,
    left_by_the_forward,
    positions_seen,
    probabilities_of,
)
from exercises.topics.attention_inputs import MAGNITUDES, equal_and_far_below, large, ordered, ordinary
from exercises.topics.evidence import first_access

TILE = 64
ALL_ALIKE = 1 << 30  # keys: L was rounded otherwise than all of S


def backward(narrow=True, stray=0.0, turns=1):
    """The oracle: of 16 bits P and dS are rounded to them before their products, as kernels do it."""

    def oracle(query, key, value, output, log_sum, gradient, causal):
        visible = positions_seen(query.shape[1], key.shape[1], causal)
        delta = delta_of(output, gradient)
        rounded = query.dtype if narrow and query.element_size() == 2 else None
        found = gradients(
            query, key, value, gradient, log_sum, delta, visible, narrow=rounded, stray=stray, turns=turns
        )
        return tuple(each.to(query.dtype) for each in found)

    return oracle


def arguments_of(draw, query, key, value, causal, gradient_layout):
    """A case's arguments from Q, K and V: O and L as the forward pass leaves them, and dO."""
    visible = positions_seen(query.shape[1], key.shape[1], causal)
    output, log_sum = left_by_the_forward(query, key, value, visible)
    gradient = gradient_layout(draw, draw.normal(*query.shape).to(query.dtype))
    return query, key, value, output, log_sum, gradient, causal


def as_it_is(draw, tensor):
    return tensor


def of_a_sum(draw, tensor):
    """dO of output.sum(): one number, and all strides 0."""
    return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)


def large_gradients(draw, heads, query_length, key_length, head_dim):
    """Ordinary scores, and a dK near 20,000, whose sums pass what float16 holds before they are scaled."""
    query, key, value = ordinary(draw, heads, query_length, key_length, head_dim)
    return query * 30.0, key / 30.0, value * 300.0


def large_for_queries(draw, heads, query_length, key_length, head_dim):
    """The same for dQ."""
    query, key, value = ordinary(draw, heads, query_length, key_length, head_dim)
    return query / 30.0, key * 30.0, value * 300.0


def large_on_the_way():
    """16 equal scores for each of 192 queries: 64 add 40,000 to dV, 64 as much again, and 64 take half of it away."""
    apart = Draw(107)
    query, key, value = (part.half() for part in ordinary(apart, 1, 192, 16, 16))
    added = torch.tensor([4e4, 4e4, -4e4]).repeat_interleave(64) * 16 / 64
    made = arguments_of(apart, query * 0, key, value / 256, False, as_it_is)
    return *made[:5], added[None, :, None].expand(1, 192, 16).half().contiguous(), False


def backward_cases(draw):
    def case(name, heads, query_length, key_length, head_dim, causal, *, scores=ordinary, dtype=torch.float32,
             layout=as_it_is, **flags):  # fmt: skip
        made = [tensor.to(dtype) for tensor in scores(draw, heads, query_length, key_length, head_dim)]
        return Case(name, arguments_of(draw, *made, causal, layout), **flags)

    def low(name, scores):
        apart = Draw(106)
        return Case(name, arguments_of(apart, *scores(apart, 1, 20, 24, 16), True, as_it_is))

    prime = draw.choice((67, 71, 79))
    cases = [
        case("two queries, three keys", 1, 2, 3, 16, False),
        case("one tile of queries, one of keys", 1, 64, 64, 32, False),
        case("two heads, 128 × 64", 2, 128, 64, 32, False),
        case("64 × 129, causal", 1, 64, 129, 32, True),
        case(f"{prime} × 90, head dimension 40, causal", 1, prime, 90, 40, True),
        case("150 queries, 65 keys, causal: 85 queries see nothing", 1, 150, 65, 32, True),
        case("dO of a sum: every stride is 0, 3 heads", 3, 40, 70, 32, False, layout=of_a_sum),
        case("dO transposed: its last stride is not 1", 2, 70, 40, 16, True,
             layout=lambda draw, tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2)),
        case("scores of ±150, 63 × 127", 1, 63, 127, 32, False, scores=large),
        case("scores that rise by 4 from key to key, 60 × 60, causal", 1, 60, 60, 16, True, scores=ordered(4.0)),
        low("scores near -2¹⁸, 20 × 24, causal", lower_than_bounds()),
        low("scores near -2¹⁸ from long queries, causal", lower_than_bounds(2.0**18, -4.0)),
        case("scores of -2³², 20 × 24, causal", 1, 20, 24, 16, True, scores=equal_and_far_below),
        case("float16, 64 × 64, head dimension 64, causal: large sums", 1, 64, 64, 64, True, scores=large_gradients,
             dtype=torch.float16),
        Case("float16, 64 × 64, head dimension 64: large sums of dQ", arguments_of(
            Draw(108), *(part.half() for part in large_for_queries(Draw(109), 1, 64, 64, 64)), False, as_it_is)),
        Case("float16, 192 × 16: sums of dV that are large on the way", large_on_the_way()),
        case("float16, scores of ±150, 33 × 40, head dimension 40", 1, 33, 40, 40, False, scores=large,
             dtype=torch.float16),
        case("250 × 250, causal, bytes counted", 1, 250, 250, 32, True, metered=True),
        case("128 × 192, bytes counted", 1, 128, 192, 64, False, metered=True),
    ]  # fmt: skip
    if draw.on_gpu:
        half = torch.float16
        cases += [
            case("one query at the end of 200 keys, causal, float16", 2, 1, 200, 80, True, dtype=half),
            case("2 heads, 1000 × 1501, head dimension 72, float16, causal", 2, 1000, 1501, 72, True, dtype=half),
            case("2 heads, 1024 × 1024, head dimension 128, float16", 2, 1024, 1024, 128, False, dtype=half),
        ]
    return cases


def drawn(draw, *, heads, query_length, key_length, head_dim, dtype, scores, causal, layouts, gradient_layout):
    made = [tensor.to(dtype) for tensor in scores(draw, heads, query_length, key_length, head_dim)]
    laid = [layout(draw, tensor) for layout, tensor in zip(layouts, made)]
    return arguments_of(draw, *laid, causal, gradient_layout)


def small(heads, query_length, key_length, head_dim, **_) -> bool:
    """Whether Triton's interpreter is quick with these sizes."""
    return heads * query_length * key_length * head_dim < 2**20


def each_its_own():
    """Layouts of query, key and value together: one of them stored in another way, or all."""
    query, key, value = (unit_last(name) for name in ("query", "key", "value"))
    plain = query[0].value
    yield Level((plain, plain, plain), "")
    yield Level((query[1].value, key[2].value, value[1].value), "Q and V with gaps, K with dimensions exchanged")
    yield Level((query[2].value, key[1].value, value[2].value), "K with gaps, Q and V with dimensions exchanged")
    yield Level((query[3].value, plain, plain), "Q expanded over dimension 0")


CONTRACT = Contract(
    drawn,
    most=12,
    choices={
        "heads": (1, 2),
        "query_length": (1, 2, 37, 63, 64, 65, 129),
        "key_length": (1, 3, 63, 64, 65, 129),
        "head_dim": (16, 17, 40, 64, 128),
        "dtype": (torch.float32, torch.float16),
        "scores": MAGNITUDES,
        "causal": (False, True),
        "layouts": tuple(each_its_own()),
        "gradient_layout": any_strides("dO"),
    },
    says={
        "query_length": "any lengths",
        "head_dim": "any head dimension from 16 to 128",
        "dtype": "float32 or float16",
        "scores": "Numbers of any size",
        "causal": "True or False",
        "layouts": "any strides but the last, which is 1",
        "gradient_layout": "Any strides, the last one too",
    },
    valid=small,
)


def largest_input(query, key, *rest):
    return max(query.numel(), key.numel())


def rows_loaded(query_length, key_length, causal, block_n=TILE, block_m=TILE) -> tuple[int, int]:
    """(rows of Q, rows of K) that both kernels load together; of dO and V they load as many.

    causal: whether tiles in which nothing is visible are left out, of queries in the first kernel, of keys in the
        second.
    """
    queries, keys = query_length, key_length  # those that stay in their programs
    for first in range(0, key_length, block_n):
        queries += max(0, query_length - (max(0, first + query_length - key_length) if causal else 0))
    for first in range(0, query_length, block_m):
        keys += max(0, min(key_length, first + block_m + key_length - query_length) if causal else key_length)
    return queries, keys


def loads_of_queries(query, key, *rest) -> int:
    """Bytes of Q and dO that both kernels load in tiles of 64 × 64."""
    return 2 * query[:, 0].numel() * query.element_size() * rows_loaded(query.shape[1], key.shape[1], rest[-1])[0]


def loads_of_keys(query, key, *rest) -> int:
    """The same of K and V."""
    return 2 * query[:, 0].numel() * query.element_size() * rows_loaded(query.shape[1], key.shape[1], rest[-1])[1]


def tiled_bytes(query, key, *rest) -> int:
    """Bytes of both kernels with tiles of 64 × 64: all that they load, L and Δ too, and what they store."""
    queries, _ = rows_loaded(query.shape[1], key.shape[1], rest[-1])
    stored = (query.numel() + 2 * key.numel()) * query.element_size()
    return loads_of_queries(query, key, *rest) + loads_of_keys(query, key, *rest) + 8 * len(query) * queries + stored


@dataclass(frozen=True)
class Loads(Requirement):
    """In metered cases the kernels load at most `slack` times the bytes of these tensors that `minimum` counts.

    All bytes together say little of one kernel of two. `pointers` are parameters of the kernels.
    """

    words: str
    pointers: tuple[str, ...]
    minimum: Callable[..., int]
    slack: float = 1.3
    id: str = "too_many_bytes"

    def complaint(self, case, seen):
        if not (case.metered and seen.traffic):
            return None
        minimum = self.minimum(*case.args)
        loaded = sum(seen.traffic.get(pointer, {}).get("loaded", 0) for pointer in self.pointers)
        if loaded <= self.slack * minimum:
            return None
        return (
            f"Your kernels loaded {loaded:,} bytes of {self.words} where {minimum:,} are enough "
            f"({loaded / minimum:.2f} times as many)."
        )


READS_OUTSIDE = (
    "A load reaches memory that is not the tensor's; the message names it. Is each tensor read by its own strides? dO "
    "has three, and all are 0 after a sum. Do L and Δ of a head begin at head · query_length? Is the grid "
    "(tiles, heads)? Does the loop begin at row 0 or later, and does the mask leave out rows and columns past the end?"
)
WRITES_OUTSIDE = (
    "A store reaches memory that is not the result's; the message names it. A head of dK and dV has key_length · "
    "head_dim elements, one of dQ query_length · head_dim. Does the mask leave out rows and columns past the end?"
)


def _rows_seen(case, seen) -> tuple[float, float]:
    """(rows of Q, rows of K) that kernels loaded; zeros where nothing was counted."""
    row = case.args[0][:, 0].numel() * case.args[0].element_size()
    queries, keys = (seen.traffic.get(name, {}).get("loaded", 0) / row for name in ("query_pointer", "key_pointer"))
    return queries, keys


def walks_over_all(queries: bool, keys: bool):
    """A `when`: right numbers, causal, and the loads of tiles of 64, all those of queries, of keys, or of both."""

    def when(case, seen, got) -> bool:
        if not case.metered or not case.args[-1]:
            return False
        lengths = case.args[0].shape[1], case.args[1].shape[1]
        (seen_by_keys, _), (_, seen_by_queries) = rows_loaded(*lengths, not queries), rows_loaded(*lengths, not keys)
        return _rows_seen(case, seen) == (seen_by_keys, seen_by_queries)

    return when


def in_small_tiles(case, seen, got) -> bool:
    """A `when`: right numbers, and the loads of smaller tiles, tile by tile."""
    if not case.metered:
        return False
    lengths = case.args[0].shape[1], case.args[1].shape[1]
    sizes = [(n, m) for n in (16, 32, TILE) for m in (16, 32, TILE) if n * m < TILE * TILE]
    return _rows_seen(case, seen) in [rows_loaded(*lengths, case.args[-1], n, m) for n, m in sizes]


LOADS_WHAT_IS_HIDDEN = "The numbers are right, but tiles are loaded in which no pair is visible"
BEGIN_LATER = "Begin the loop over queries at the first one that sees the block"
END_EARLIER = "End the loop over keys at the last key that the tile sees"
ROUNDED_EARLY = (
    "Only float16 cases are wrong, by no more than rounding to 16 bits makes: something is rounded too early. Convert "
    "O and dO to float32 before you multiply them for Δ, keep Δ, the scores and dP as float32, which tl.dot gives, and "
    "round P and dS only for their own products. What is left of dP - Δ is often much smaller than the two."
)


def rounded_early(case, seen, got) -> bool:
    """A `when` for every failing case: of float16, and off by what rounding Δ, scores, P or dP to 16 bits makes."""
    query, key, value, output, log_sum, gradient, causal = case.args
    if query.element_size() != 2 or [each.dtype for each in got] != [query.dtype] * 3:
        return False
    visible = positions_seen(query.shape[1], key.shape[1], causal)
    exact = backward(narrow=False)(*(each.double() for each in case.args[:6]), causal)
    query, key, value, output, gradient = (each.double().abs() for each in (query, key, value, output, gradient))
    scale, epsilon = query.shape[-1] ** -0.5, torch.finfo(torch.float16).eps
    scores = scale * (case.args[0].double() @ case.args[1].double().transpose(1, 2))
    weights = scores if visible is None else scores.masked_fill(~visible, -math.inf)
    weights = probabilities_of(weights, log_sum.double()) * torch.expm1(epsilon * (4 + scores.abs()))
    score_gradients = weights * (gradient @ value.transpose(1, 2) + delta_of(output, gradient)[..., None])
    allowed = (
        scale * (score_gradients @ key),
        scale * (score_gradients.transpose(1, 2) @ query),
        weights.transpose(1, 2) @ gradient,
    )
    return all(
        bool(((mine.double() - right).abs() <= 4 * epsilon * right.abs() + error + 1e-6).all())
        for mine, right, error in zip(got, exact, allowed)
    )


EXERCISE = Exercise(
    id="10.6",
    title="The backward pass in Triton",
    entries=("flash_attention_backward",),
    cases=backward_cases,
    oracle=backward(),
    inputs_belong_together=True,
    contracts=(CONTRACT,),
    # Where keys lie far from 0, a row of dQ is moved by one number, the sum of what dS was rounded by: one form may be
    # lucky in it.
    plain=(
        *(backward(stray=stray) for stray in (1.0, 0.5, -0.5, -1.0)),
        *(backward(stray=1.0, turns=turns) for turns in (8, ALL_ALIKE)),
        backward(narrow=False, stray=-1.0),
    ),
    models=(MODEL,),
    needs=TRITON,
    uses_dot=True,
    limits=Limits(seconds=20.0),
    requirements=(
        LaunchesTriton(at_least=2, at_most=3),
        Allocates(largest_input),
        Contiguous(),
        Forbids(("scaled_dot_product_attention", "_softmax", "softmax")),
        SmallProducts(lambda query, *rest: query.shape[0] * query.shape[1], "Δ, one number for each query,"),
        Moves(tiled_bytes, slack=1.3),
        Loads("Q and dO", ("query_pointer", "output_gradient_pointer"), loads_of_queries),
        Loads("K and V", ("key_pointer", "value_pointer"), loads_of_keys),
    ),
    hints=(
        "Both kernels compute P and dS of a tile again, as in 10.3 and 10.4. In the first the block of keys stays and "
        "the queries pass by; in the second the queries stay. Write and check the first, then copy its inside.",
        "dO has the offsets head · output_gradient_head_stride + rows[:, None] · output_gradient_stride + "
        "columns[None, :] · output_gradient_column_stride. L and Δ are contiguous: head · query_length + rows.",
        'P: scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale; differences = '
        'tl.where(visible, scores - log_sum_exp[:, None], float("-inf")); tl.exp2(differences * 1.4426950408889634).',
        "dV += Pᵀ dO: value_gradient += tl.dot(tl.trans(probabilities.to(output_gradient.dtype)), output_gradient, "
        'input_precision="ieee"). dP is tl.dot(output_gradient, tl.trans(value_tile)), and dS is probabilities * '
        "(dP - delta[:, None]). dK += dSᵀ Q, dQ += dS K; both get the scale once, before they are stored.",
        "Causal: the key at first_key is first seen by query first_key + query_length - key_length, or by query 0. The "
        "queries up to first_row + BLOCK_M see the keys up to first_row + BLOCK_M + key_length - query_length.",
        "Launch key_gradient_kernel[(triton.cdiv(key_length, 64), heads)](*inputs, key_gradient, value_gradient, "
        "*strides, *sizes, **tiles) and query_gradient_kernel[(triton.cdiv(query_length, 64), heads)](*inputs, "
        "query_gradient, *strides, *sizes, **tiles).",
    ),
    mistakes=(
        Mistake("reads_outside", READS_OUTSIDE, when=first_access("reads")),
        Mistake("writes_outside", WRITES_OUTSIDE, when=first_access("writes")),
        Mistake("rounded_early", ROUNDED_EARLY, when=rounded_early, every=True, first=True),
        Mistake(
            "skips_nothing",
            f"{LOADS_WHAT_IS_HIDDEN}. {BEGIN_LATER}, and {END_EARLIER[0].lower()}{END_EARLIER[1:]}.",
            when=walks_over_all(queries=True, keys=True),
            cost=True,
        ),
        Mistake(
            "skips_no_queries",
            f"{LOADS_WHAT_IS_HIDDEN}, in the kernel of dK and dV. {BEGIN_LATER}.",
            when=walks_over_all(queries=True, keys=False),
            cost=True,
        ),
        Mistake(
            "skips_no_keys",
            f"{LOADS_WHAT_IS_HIDDEN}, in the kernel of dQ. {END_EARLIER}.",
            when=walks_over_all(queries=False, keys=True),
            cost=True,
        ),
        Mistake(
            "tiles_too_small",
            "The numbers are right, but the tiles are smaller than 64 × 64. Every tile of keys that passes is read "
            "again for each tile of queries, and the other way round: halve the tiles, and twice the bytes move. "
            "BLOCK_M and BLOCK_N are 64.",
            when=in_small_tiles,
            cost=True,
        ),
    ),
)
