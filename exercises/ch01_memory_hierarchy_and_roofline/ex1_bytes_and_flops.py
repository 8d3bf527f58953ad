"""Exercise 1.1: the FLOPs and the least bytes of an operation, on paper."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, Slip


def elementwise_oracle(elements, inputs, flops_per_element, item_bytes):
    return elements * flops_per_element, (inputs + 1) * elements * item_bytes


def softmax_oracle(rows, columns, item_bytes):
    return 4 * rows * columns, 2 * rows * columns * item_bytes


def matmul_oracle(m, k, n, item_bytes):
    return 2 * m * k * n, (m * k + k * n + m * n) * item_bytes


def scores_oracle(heads, queries, keys, head_dim, item_bytes):
    flops = 2 * heads * queries * keys * head_dim
    return flops, heads * (queries * head_dim + keys * head_dim + queries * keys) * item_bytes


COSTS = {
    "elementwise_cost": elementwise_oracle,
    "softmax_cost": softmax_oracle,
    "matmul_cost": matmul_oracle,
    "scores_cost": scores_oracle,
}


def cost_cases(draw):
    elements, rows, columns = draw.integer(2, 10**6), draw.integer(2, 5000), draw.integer(2, 5000)
    m, k, n = (draw.integer(2, 5000) for _ in range(3))
    # Three heads or more: with two, a forgotten head count and a multiply-add counted once look alike.
    heads, queries, keys, head_dim = (draw.integer(3, top) for top in (64, 4000, 4000, 256))
    return [
        Case("x + y, 16 Mi float32", (2**24, 2, 1, 4), "elementwise_cost"),
        Case(f"relu(scale * x + y), {elements:,} float16", (elements, 2, 3, 2), "elementwise_cost"),
        Case("relu(x), 1000 float32", (1000, 1, 1, 4), "elementwise_cost"),
        Case(f"a + b * c + d, {elements + 1:,} float16", (elements + 1, 4, 3, 2), "elementwise_cost"),
        Case("a softmax of 32 × 8192 rows of 8192, float16", (32 * 8192, 8192, 2), "softmax_cost"),
        Case(f"a softmax of {rows:,} rows of {columns:,}, float32", (rows, columns, 4), "softmax_cost"),
        Case("matmul 4096 × 4096 × 4096, float16", (4096, 4096, 4096, 2), "matmul_cost"),
        Case("matrix times vector: 8192 × 8192 × 1, float16", (8192, 8192, 1, 2), "matmul_cost"),
        Case(f"matmul [{m}, {k}] × [{k}, {n}], float32", (m, k, n, 4), "matmul_cost"),
        Case("scores of 32 heads, 8192 × 8192, head dimension 128, float16", (32, 8192, 8192, 128, 2), "scores_cost"),
        Case("scores of one query against 32768 keys, float16", (8, 1, 32768, 128, 2), "scores_cost"),
        Case(
            f"scores of {heads} heads, {queries} × {keys}, head dimension {head_dim}, one byte an element",
            (heads, queries, keys, head_dim, 1),
            "scores_cost",
        ),
    ]


def _pair(got) -> tuple[float, float] | None:
    usable = isinstance(got, (tuple, list)) and len(got) == 2 and all(isinstance(v, (int, float)) for v in got)
    return (got[0], got[1]) if usable else None


def _bytes_would_be(wrong):
    """A `when` that recognises a wrong count of bytes: `wrong(entry, args)` is that count, or None."""

    def when(case, seen, got):
        pair, count = _pair(got), wrong(case.entry, case.args)
        return pair is not None and count is not None and pair[1] == count != COSTS[case.entry](*case.args)[1]

    return when


def _flops_would_be(wrong):
    """A `when` that recognises a wrong count of FLOPs."""

    def when(case, seen, got):
        pair, count = _pair(got), wrong(case.entry, case.args)
        return pair is not None and count is not None and pair[0] == count != COSTS[case.entry](*case.args)[0]

    return when


def _swapped(case, seen, got):
    right = COSTS[case.entry](*case.args)
    return _pair(got) == right[::-1] != right


def _output_bytes(entry, args):
    if entry == "elementwise_cost":
        return args[0] * args[-1]
    if entry == "softmax_cost":
        return args[0] * args[1] * args[-1]
    if entry == "matmul_cost":
        return args[0] * args[2] * args[-1]
    return args[0] * args[1] * args[2] * args[-1]


def _without_heads(flops, moved):
    """A slip's formula for `scores_cost` alone (five numbers): heads missing from FLOPs, bytes or both."""

    def result(*args):
        if len(args) != 5:
            return None
        whole, one = scores_oracle(*args), scores_oracle(1, *args[1:])
        return (one if flops else whole)[0], (one if moved else whole)[1]

    return result


def _one_addition_less(entry):
    """A slip's formula for one of the two products: as many multiplications as the inner dimension, and one addition
    less."""

    def result(*args):
        if entry == "matmul_cost" and len(args) == 4 and args[0] != 1 or entry == "scores_cost" and len(args) == 5:
            flops, moved = COSTS[entry](*args)
            return flops - flops // (2 * args[1 if entry == "matmul_cost" else 3]), moved
        return None

    return result


def _no_reuse(entry, args):
    """Bytes when every multiply-add fetches both operands."""
    if entry == "matmul_cost":
        m, k, n, item_bytes = args
        return (2 * m * k * n + m * n) * item_bytes
    if entry == "scores_cost":
        heads, queries, keys, head_dim, item_bytes = args
        return heads * (2 * queries * keys * head_dim + queries * keys) * item_bytes
    return None


EXERCISE = Exercise(
    id="1.1",
    title="Bytes and FLOPs on paper",
    entries=("elementwise_cost", "softmax_cost", "matmul_cost", "scores_cost"),
    cases=cost_cases,
    oracle=COSTS,
    hints=(
        "For the bytes, forget the arithmetic. Which tensors are read, and which are written? Each counts once: its "
        "number of elements times `item_bytes`.",
        "For the FLOPs, count what one element of the result costs, then multiply by the number of those elements. "
        "One element of a matrix product takes k multiplications and k additions.",
        "Softmax does four operations for each element: subtract the maximum, exp, add to the sum, divide. The least "
        "traffic reads the matrix once and writes it once, however many passes a poor kernel makes.",
        "Each head's scores are a matrix product, `[queries, head_dim] × [head_dim, keys]`. Most of the bytes are the "
        "result's: it has `heads * queries * keys` elements.",
        "matmul: `2*m*k*n` and `(m*k + k*n + m*n) * item_bytes`. The scores are `matmul_cost(queries, head_dim, keys, "
        "item_bytes)`, times `heads`, both numbers.",
    ),
    slips=(
        Slip(
            "heads_forgotten",
            "The number of heads is missing from both numbers of the scores. Every head has its own queries, keys and "
            "scores, so it multiplies the FLOPs and the bytes.",
            formula=_without_heads(flops=True, moved=True),
        ),
        Slip(
            "heads_forgotten_in_flops",
            "The number of heads is missing from the FLOPs of the scores. Every head multiplies its own queries with "
            "its own keys.",
            formula=_without_heads(flops=True, moved=False),
        ),
        Slip(
            "heads_forgotten_in_bytes",
            "The number of heads is missing from the bytes of the scores. Every head has its own queries, keys and "
            "scores, and it multiplies all three.",
            formula=_without_heads(flops=False, moved=True),
        ),
        Slip(
            "one_addition_less",
            "k products need only k - 1 additions, but that is not how it is counted: a multiply-add is two FLOPs, and "
            "each element of the product takes k of them.",
            formula=(_one_addition_less("matmul_cost"), _one_addition_less("scores_cost")),
        ),
        Slip(
            "scaling_counted",
            "The FLOPs of the scores count one multiplication too many for each score. The scaling is not counted.",
            formula=lambda *args: (
                (scores_oracle(*args)[0] + args[0] * args[1] * args[2], scores_oracle(*args)[1])
                if len(args) == 5
                else None
            ),
        ),
    ),
    mistakes=(
        Mistake(
            "swapped",
            "The two numbers are right but in the wrong order. Return the FLOPs first, then the bytes.",
            when=_swapped,
            every=True,
        ),
        Mistake(
            "elements_not_bytes",
            "That is the number of elements moved, not of bytes. Multiply by `item_bytes`.",
            when=_bytes_would_be(lambda entry, args: COSTS[entry](*args)[1] // args[-1]),
            every=True,
        ),
        Mistake(
            "multiply_add_counted_once",
            "Each multiply-add was counted as one operation. It is two, a multiplication and an addition.",
            when=_flops_would_be(
                lambda entry, args: COSTS[entry](*args)[0] // 2 if entry in ("matmul_cost", "scores_cost") else None
            ),
            every=True,
        ),
        Mistake(
            "output_not_counted",
            "What is written was left out of the bytes. The result crosses the memory bus too; for the scores it is "
            "by far the largest part.",
            when=_bytes_would_be(lambda entry, args: COSTS[entry](*args)[1] - _output_bytes(entry, args)),
            every=True,
        ),
        Mistake(
            "output_counted_twice",
            "The result was counted twice in the bytes. A kernel that keeps its sums in registers writes each element "
            "once and never reads it back.",
            when=_bytes_would_be(lambda entry, args: COSTS[entry](*args)[1] + _output_bytes(entry, args)),
            every=True,
        ),
        Mistake(
            "no_reuse",
            "You counted a fetch of both operands for every multiply-add. A kernel without any reuse moves that much. "
            "The least is each matrix once.",
            when=_bytes_would_be(_no_reuse),
            every=True,
        ),
        Mistake(
            "three_reads",
            "You counted three reads of the row: for the maximum, for the sum, for the result. The least is one read "
            "and one write, because a row can stay on the chip.",
            when=_bytes_would_be(
                lambda entry, args: 4 * args[0] * args[1] * args[2] if entry == "softmax_cost" else None
            ),
            every=True,
        ),
        Mistake(
            "softmax_operations",
            "The softmax has 4 FLOPs for each element: subtract the maximum, exp, add to the sum, divide. The "
            "comparisons that find the maximum are not counted.",
            when=lambda case, seen, got: (
                case.entry == "softmax_cost"
                and _pair(got) is not None
                and _pair(got)[0] in [count * case.args[0] * case.args[1] for count in (1, 2, 3, 5, 6)]
            ),
            every=True,
        ),
        Mistake(
            "operations_per_element_ignored",
            "`flops_per_element` is missing from the FLOPs of the elementwise operation: relu(scale * x + y) does "
            "three operations on each element.",
            when=_flops_would_be(lambda entry, args: args[0] if entry == "elementwise_cost" else None),
            every=True,
        ),
    ),
)
