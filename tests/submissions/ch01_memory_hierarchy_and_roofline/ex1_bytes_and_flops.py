"""Wrong answers to exercise 1.1, and unusual right ones."""

from tests.submissions.edits import changed, edited

COSTS = {
    "elementwise_cost": "elements * flops_per_element, (inputs + 1) * elements * item_bytes",
    "softmax_cost": "4 * rows * columns, 2 * rows * columns * item_bytes",
    "matmul_cost": "2 * m * k * n, (m * k + k * n + m * n) * item_bytes",
    "scores_cost": "2 * heads * queries * keys * head_dim, "
                   "heads * (queries * head_dim + keys * head_dim + queries * keys) * item_bytes",
}


def costs(**wrong):
    """The cell of 1.1 with some of its four results replaced."""
    result = COSTS | wrong
    return f"""# Exercise 1.1 · Bytes and FLOPs on paper
def elementwise_cost(elements, inputs, flops_per_element, item_bytes):
    return {result["elementwise_cost"]}

def softmax_cost(rows, columns, item_bytes):
    return {result["softmax_cost"]}

def matmul_cost(m, k, n, item_bytes):
    return {result["matmul_cost"]}

def scores_cost(heads, queries, keys, head_dim, item_bytes):
    return {result["scores_cost"]}
"""


WRONG = {
        "swapped": costs(matmul_cost="(m * k + k * n + m * n) * item_bytes, 2 * m * k * n"),
        "elements_not_bytes": costs(elementwise_cost="elements * flops_per_element, (inputs + 1) * elements"),
        "elements_not_bytes__2": costs(scores_cost=COSTS["scores_cost"].replace(" * item_bytes", "")),
        "multiply_add_counted_once": costs(matmul_cost="m * k * n, (m * k + k * n + m * n) * item_bytes"),
        "output_not_counted": costs(elementwise_cost="elements * flops_per_element, inputs * elements * item_bytes"),
        "output_not_counted__2": costs(scores_cost=COSTS["scores_cost"].replace(" + queries * keys", "")),
        "output_counted_twice": costs(matmul_cost="2 * m * k * n, (m * k + k * n + 2 * m * n) * item_bytes"),
        "no_reuse": costs(matmul_cost="2 * m * k * n, (2 * m * k * n + m * n) * item_bytes"),
        "three_reads": costs(softmax_cost="4 * rows * columns, 4 * rows * columns * item_bytes"),
        "softmax_operations": costs(softmax_cost="5 * rows * columns, 2 * rows * columns * item_bytes"),
        "heads_forgotten": costs(scores_cost=COSTS["scores_cost"].replace("heads * (", "(").replace("2 * heads", "2")),
        "heads_forgotten_in_bytes": costs(scores_cost=COSTS["scores_cost"].replace("heads * (", "(")),
        "heads_forgotten_in_flops": costs(scores_cost=COSTS["scores_cost"].replace("2 * heads * ", "2 * ")),
        "operations_per_element_ignored": costs(elementwise_cost="elements, (inputs + 1) * elements * item_bytes"),
    }


UNUSUAL = {
        "floats instead of integers": costs(
            matmul_cost="2.0 * m * k * n, 1.0 * (m * k + k * n + m * n) * item_bytes"),
        "one written with the other": edited(
            costs(), ("    return " + COSTS["scores_cost"],
                      "    flops, moved = matmul_cost(queries, head_dim, keys, item_bytes)\n"
                      "    return heads * flops, heads * moved")),
        "lists instead of tuples": costs(softmax_cost="[4 * rows * columns, 2 * rows * columns * item_bytes]"),
        "counted tensor by tensor": costs(
            elementwise_cost="elements * flops_per_element, sum(elements * item_bytes for _ in range(inputs + 1))"),
    }


WRONG |= {
    "factor_too_many": changed("1.1", ("elements * flops_per_element,", "elements * inputs * flops_per_element,")),
    "factor_too_many__in_the_bytes": changed(
        "1.1", ("(inputs + 1) * elements * item_bytes", "(inputs + 1) * elements * item_bytes * flops_per_element")
    ),
    "taken_as_fixed": changed("1.1", ("(inputs + 1) * elements", "3 * elements")),
    "units": changed("1.1", ("(m * k + k * n + m * n) * item_bytes", "(m * k + k * n + m * n) * item_bytes * 8")),
    "one_addition_less": changed("1.1", ("2 * m * k * n, (m", "m * n * (2 * k - 1), (m")),
    "one_addition_less__in_the_scores": changed(
        "1.1", ("2 * heads * queries * keys * head_dim", "heads * queries * keys * (2 * head_dim - 1)")
    ),
    "scaling_counted": changed(
        "1.1", ("2 * heads * queries * keys * head_dim", "heads * queries * keys * (2 * head_dim + 1)")
    ),
}
