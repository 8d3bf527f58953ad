"""Exercise 9.4: cycles of the tensor cores beside those of the exponentials, on paper."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Slip
from exercises.topics.formulas import for_arguments, rounded_result


def cycles_oracle(query_rows, key_rows, head_dim, flops_per_cycle, exps_per_cycle):
    products = 4 * query_rows * key_rows * head_dim / flops_per_cycle
    return products, query_rows * key_rows / exps_per_cycle


def share_oracle(head_dim, flops_per_cycle, exps_per_cycle, overlapped):
    products, exponentials = cycles_oracle(1, 1, head_dim, flops_per_cycle, exps_per_cycle)
    return products / (max(products, exponentials) if overlapped else products + exponentials)


def balanced_oracle(flops_per_cycle, exps_per_cycle):
    return flops_per_cycle / (4 * exps_per_cycle)


def cycle_cases(draw):
    rows, keys, dim = 64 * draw.integer(1, 4), draw.choice((64, 128, 176)), draw.choice((80, 96, 192, 512))
    flops, exps = draw.choice((1024, 2048, 6000)), draw.choice((16, 32, 24))
    cycles, share, balanced = "tile_cycles", "share_of_peak", "balanced_head_dim"
    return [
        Case("128 × 128, head dimension 128, Hopper", (128, 128, 128, 4096, 16), cycles),
        Case("128 × 128, head dimension 64, Hopper", (128, 128, 64, 4096, 16), cycles),
        Case("64 × 128, head dimension 128, FP8", (64, 128, 128, 8192, 16), cycles),
        Case(f"{rows} × {keys}, head dimension {dim}", (rows, keys, dim, flops, exps), cycles),
        Case("head dimension 128, in turn", (128, 4096, 16, False), share),
        Case("head dimension 128, at once", (128, 4096, 16, True), share),
        Case("head dimension 64, in turn", (64, 4096, 16, False), share),
        Case("head dimension 64, at once", (64, 4096, 16, True), share),
        Case("head dimension 64, FP8, at once: the exponentials limit", (64, 8192, 16, True), share),
        Case(f"head dimension {dim}, in turn", (dim, flops, exps, False), share),
        Case("head dimension 32, at once", (32, flops, exps, True), share),
        Case("Hopper, 16 bit", (4096, 16), balanced),
        Case("Blackwell, 16 bit", (8192, 16), balanced),
        Case("another chip", (flops, exps), balanced),
    ]


def _share(slip):
    def result(head_dim, flops_per_cycle, exps_per_cycle, overlapped):
        products, exponentials = cycles_oracle(1, 1, head_dim, flops_per_cycle, exps_per_cycle)
        return slip(products, exponentials, overlapped)

    return for_arguments(4, result)


EXERCISE = Exercise(
    id="9.4",
    title="Products against exponentials",
    entries=("tile_cycles", "share_of_peak", "balanced_head_dim"),
    cases=cycle_cases,
    oracle={"tile_cycles": cycles_oracle, "share_of_peak": share_oracle, "balanced_head_dim": balanced_oracle},
    hints=(
        "A tile takes two products, Q Kᵀ and P V, each 2 · query_rows · key_rows · head_dim FLOPs, and one "
        "exponential for each score.",
        "In turn, the time is the sum of both. At once, it is the longer of the two. The share of the peak is the "
        "products' time divided by that time. The tile's rows and keys cancel.",
        "Equal times: 4 · head_dim / flops_per_cycle = 1 / exps_per_cycle.",
    ),
    slips=(
        rounded_result(cycles_oracle, share_oracle, balanced_oracle),
        Slip(
            "one_product",
            "Half of the FLOPs are missing: there are two products, Q Kᵀ and P V, and each multiply-add is two FLOPs. "
            "That makes 4 · head_dim for each score, in tile_cycles and in the balance.",
            formula=(
                for_arguments(5, lambda m, n, d, f, e: (2 * m * n * d / f, m * n / e)),
                for_arguments(2, lambda f, e: f / (2 * e)),
            ),
        ),
        Slip(
            "exponentials_of_the_output",
            "You counted exponentials of the output, query_rows · head_dim. Each score has one: query_rows · key_rows.",
            formula=for_arguments(5, lambda m, n, d, f, e: (4 * m * n * d / f, m * d / e)),
        ),
        Slip(
            "exponential_for_every_product",
            "You counted head_dim exponentials for each score. The products run over head_dim; the exponential is "
            "taken once, of their sum.",
            formula=for_arguments(5, lambda m, n, d, f, e: (4 * m * n * d / f, m * n * d / e)),
        ),
        Slip(
            "at_once_added",
            "You added two times that run at once. The time is that of the longer one.",
            formula=_share(lambda products, exponentials, overlapped: products / (products + exponentials)),
        ),
        Slip(
            "shorter_of_the_two",
            "At once, the time is that of the longer of the two, not of the shorter.",
            formula=_share(
                lambda products, exponentials, overlapped: (
                    products / (min(products, exponentials) if overlapped else products + exponentials)
                )
            ),
        ),
        Slip(
            "always_hidden",
            "At once, the exponentials are hidden only as long as they take less time than the products. Where they "
            "take more, the matrix units wait for them.",
            formula=_share(
                lambda products, exponentials, overlapped: 1.0 if overlapped else products / (products + exponentials)
            ),
        ),
        Slip(
            "overlapped_reversed",
            "`overlapped` is the wrong way round. At once, the longer of the two counts; in turn, their sum.",
            formula=_share(
                lambda products, exponentials, overlapped: (
                    products / (products + exponentials if overlapped else max(products, exponentials))
                )
            ),
        ),
        Slip(
            "longer_where_in_turn",
            "In turn, both times add up; the longer of the two counts only where they run at once.",
            formula=_share(lambda products, exponentials, overlapped: products / max(products, exponentials)),
        ),
        Slip(
            "share_of_the_exponentials",
            "That is the exponentials' share of the time. The peak is that of the matrix units, so divide the "
            "products' time.",
            formula=(
                _share(
                    lambda products, exponentials, overlapped: (
                        exponentials / (max(products, exponentials) if overlapped else products + exponentials)
                    )
                ),
                _share(lambda products, exponentials, overlapped: exponentials / (products + exponentials)),
            ),
        ),
        Slip(
            "per_cent",
            "The share is given in per cent. It goes from 0 to 1.",
            formula=_share(
                lambda products, exponentials, overlapped: (
                    100 * products / (max(products, exponentials) if overlapped else products + exponentials)
                )
            ),
        ),
        Slip(
            "rounded_down",
            "The result was rounded down to a whole number. Divide by /, not by //.",
            formula=(
                for_arguments(5, lambda m, n, d, f, e: (4 * m * n * d // f, m * n // e)),
                for_arguments(2, lambda f, e: f // (4 * e)),
            ),
        ),
        Slip(
            "balance_upside_down",
            "The balance is upside down. With more FLOPs in a cycle the products are shorter, so the balanced head "
            "dimension is larger.",
            formula=for_arguments(2, lambda f, e: 4 * e / f),
        ),
    ),
)
