"""Wrong answers to exercise 9.4, and unusual right ones."""

from tests.submissions.edits import changed, rounded

PAIR = "return 4 * scores * head_dim / flops_per_cycle, scores / exps_per_cycle"


SHARE = "products / (max(products, exponentials) if overlapped else products + exponentials)"


BALANCED = "flops_per_cycle / (4 * exps_per_cycle)"


OWN_TIMES = ("products, exponentials = tile_cycles(1, 1, head_dim, flops_per_cycle, exps_per_cycle)",
             "products, exponentials = 4 * head_dim / flops_per_cycle, 1 / exps_per_cycle")


WRONG = {
    "overlapped_reversed": changed("9.4", (" if overlapped else ", " if not overlapped else ")),
    "share_of_the_exponentials__of_the_sum": changed("9.4", (SHARE, "1 - products / (products + exponentials)")),
    "one_product": changed("9.4", (PAIR, PAIR.replace("4 *", "2 *")), OWN_TIMES),
    "one_product__and_all_that_follows": changed(
        "9.4", (PAIR, PAIR.replace("4 *", "2 *")), (BALANCED, "flops_per_cycle / (2 * exps_per_cycle)")
    ),
    "one_product__in_the_balance": changed("9.4", (BALANCED, "flops_per_cycle / (2 * exps_per_cycle)")),
    "exponentials_of_the_output": changed(
        "9.4", (PAIR, PAIR.replace("scores / exps", "query_rows * head_dim / exps")), OWN_TIMES
    ),
    "exponential_for_every_product": changed(
        "9.4", (PAIR, PAIR.replace("scores / exps", "scores * head_dim / exps")), OWN_TIMES
    ),
    "at_once_added": changed("9.4", (SHARE, "products / (products + exponentials)")),
    "shorter_of_the_two": changed("9.4", ("max(products", "min(products")),
    "always_hidden": changed("9.4", (SHARE, "1.0 if overlapped else products / (products + exponentials)")),
    "longer_where_in_turn": changed("9.4", (SHARE, "products / max(products, exponentials)")),
    "share_of_the_exponentials": changed("9.4", ("return products / (max", "return exponentials / (max")),
    "per_cent": changed("9.4", ("return products / (max", "return 100 * products / (max")),
    "rounded_down": changed(
        "9.4",
        (PAIR, PAIR.replace("/ flops", "// flops").replace("/ exps", "// exps")),
        OWN_TIMES,
    ),
    "rounded_down__in_the_balance": changed("9.4", (BALANCED, BALANCED.replace(" / ", " // "))),
    "balance_upside_down": changed("9.4", (BALANCED, "4 * exps_per_cycle / flops_per_cycle")),
}


BY_RATES = """# Exercise 9.4 · Products against exponentials
def tile_cycles(m, n, d, flops, exps):
    return [(2 * m * n * d + 2 * m * d * n) / flops, m * n / exps]

def share_of_peak(head_dim, flops_per_cycle, exps_per_cycle, overlapped):
    ratio = balanced_head_dim(flops_per_cycle, exps_per_cycle) / head_dim
    return min(1, 1 / ratio) if overlapped else 1 / (1 + ratio)

def balanced_head_dim(flops_per_cycle, exps_per_cycle):
    return flops_per_cycle / exps_per_cycle / 4
"""


UNUSUAL = {
        "by the balance": BY_RATES,
        "times of one score": changed("9.4", OWN_TIMES),
        "a large tile": changed("9.4", ("tile_cycles(1, 1,", "tile_cycles(128, 128,")),
    }


WRONG["result_rounded"] = rounded("9.4", "share_of_peak", 2)
