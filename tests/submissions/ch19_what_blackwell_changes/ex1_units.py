"""Wrong answers to exercise 19.1, and unusual right ones."""

from tests.submissions.edits import changed, rounded

CYCLES = "4 * rows * keys * head_dim / flops, rows * keys / exponentials, 2 * numbers / shared_bytes"
NUMBERS = "rows * head_dim + 2 * keys * head_dim"
BUSY, EACH = "rows * keys * others / 128", "rows * keys * instructions / 128"
ENOUGH, EVEN = "1 - max(products, shared_memory) / exponentials", "(exponentials - busy) / (exponentials + each)"
SHARE = "max(0.0, min(as_fast_as_the_others, both_equally_long))"


def wrong(*replacements):
    return changed("19.1", *replacements)


def by_trying(code):
    """best_share with a function of the time, and these lines behind it."""
    lines = ["times = forward_cycles(rows, keys, head_dim, chip)", "", "def time(share):",
             "    adds = rows * keys * (others + share * instructions) / 128",
             "    return max(times[0], times[2], (1 - share) * times[1], adds)", "", *code]  # fmt: skip
    head = wrong().partition("    products, exponentials, shared_memory = ")[0]
    return head + "".join(f"    {line}\n" for line in lines)


WRONG = {
    "one_product": wrong(("return 4 *", "return 2 *")),
    "multiplications_alone": wrong(("return 4 *", "return 1 *")),
    "exponentials_of_the_output": wrong(("rows * keys / exponentials", "rows * head_dim / exponentials")),
    "exponential_for_every_product": wrong(("rows * keys / exponentials", "rows * keys * head_dim / exponentials")),
    "exponential_of_a_row": wrong(("rows * keys / exponentials", "rows / exponentials")),
    "q_forgotten": wrong((NUMBERS, "2 * keys * head_dim")),
    "one_of_k_and_v": wrong((NUMBERS, "rows * head_dim + keys * head_dim")),
    "tensor_memory_counted": wrong((NUMBERS, NUMBERS + " + rows * keys")),
    "tensor_memory_counted__o": wrong((NUMBERS, NUMBERS + " + rows * head_dim")),
    "tensor_memory_counted__both": wrong((NUMBERS, NUMBERS + " + rows * head_dim + rows * keys")),
    "rows_for_keys": wrong((NUMBERS, "2 * rows * head_dim + keys * head_dim")),
    "bytes_of_a_number": wrong(("2 * numbers", "numbers")),
    "bytes_of_a_number__4": wrong(("2 * numbers", "4 * numbers")),
    "bytes_of_scores": wrong((NUMBERS, "rows * keys")),
    "rounded": wrong((CYCLES, CYCLES.replace(" / ", " // "))),
    "order_of_the_chip": wrong(("exponentials, shared_bytes = chip", "shared_bytes, exponentials = chip")),
    "wrong_order": wrong((CYCLES, "rows * keys / exponentials, 4 * rows * keys * head_dim / flops, "
                                  "2 * numbers / shared_bytes")),
    "negative": wrong((SHARE, "min(as_fast_as_the_others, both_equally_long)")),
    "negative__balance": wrong((SHARE, "both_equally_long")),
    "multiply_adds_free": wrong((SHARE, "max(0.0, as_fast_as_the_others)")),
    "multiply_adds_free__products": wrong((SHARE, "max(0.0, 1 - products / exponentials)")),
    "others_forgotten": wrong((BUSY, "0")),
    "others_or_instructions": wrong((EACH, "rows * keys * (instructions - others) / 128")),
    "others_of_the_share": wrong((BUSY, "0"), (EACH, "rows * keys * (instructions + others) / 128")),
    "shared_memory_forgotten": wrong(("max(products, shared_memory)", "products")),
    "products_forgotten": wrong(("max(products, shared_memory)", "shared_memory")),
    "balanced_alone": wrong((SHARE, "max(0.0, both_equally_long)")),
    "balanced_alone__unless_0": wrong(
        (SHARE, "0 if max(products, shared_memory, busy) >= exponentials else both_equally_long")
    ),
    "given_up_early": wrong((SHARE, f"0 if busy >= max(products, shared_memory) else {SHARE}")),
    "largest_of_equals__by_thirds": by_trying([
        "low, high = 0.0, 1.0", "for _ in range(200):", "    third = (high - low) / 3",
        "    if time(low + third) < time(high - third):", "        high -= third", "    else:", "        low += third",
        "return low if low > 1e-12 else 0.0"]),
    "largest_of_equals": wrong((f"return {SHARE}", "least = max(products, shared_memory, exponentials * "
        "(1 - max(0.0, both_equally_long)))\n    return min(1.0, max(0.0, (least - busy) / each))")),
    "share_that_stays": wrong((f"return {SHARE}", f"return 1 - {SHARE}")),
    "per_cent": wrong((f"return {SHARE}", f"return 100 * {SHARE}")),
    "instructions_a_cycle": wrong((BUSY, BUSY.replace("128", "256")), (EACH, EACH.replace("128", "256"))),
    "one_score": wrong((BUSY, "others / 128"), (EACH, "instructions / 128")),
    "exponentials_not_relieved": wrong((EVEN, "(exponentials - busy) / each")),
    "few_digits__tried": by_trying(["return min((i / 100 for i in range(101)), key=time)"]),
    "few_digits__1000": by_trying(["return min([i / 1000 for i in range(1001)], key=time)"]),
    "times_added": wrong(("max(products, shared_memory)", "(products + shared_memory)")),
    "few_digits": rounded("19.1", "best_share", 2),
    "whole_number": wrong((f"return {SHARE}", f"return int({SHARE})")),
    "several_numbers": wrong((f"return {SHARE}", f"share = {SHARE}\n    return share, exponentials * (1 - share)")),
    "q_forgotten__and_a_share_too": wrong((NUMBERS, "2 * keys * head_dim"),
        ("products, exponentials, shared_memory = forward_cycles(rows, keys, head_dim, chip)",
         "products, exponentials = 4 * rows * keys * head_dim / chip[0], rows * keys / chip[1]\n"
         "    shared_memory = 4 * keys * head_dim / chip[2]")),
}  # fmt: skip

UNUSUAL = {
    "by halving an interval": by_trying([
        "adds = lambda share: rows * keys * (others + share * instructions) / 128", "low, high = 0.0, 1.0",
        "for _ in range(200):", "    middle = (low + high) / 2",
        "    if max(times[0], times[2], adds(middle)) >= (1 - middle) * times[1]:", "        high = middle",
        "    else:", "        low = middle", "return high if high > 1e-15 else 0"]),
    "all the corners": by_trying([
        "first, second = rows * keys / chip[1], rows * keys / 128",
        "corners = [0, 1, 1 - times[0] / first, 1 - times[2] / first,",
        "           (first - second * others) / (first + second * instructions)]",
        "corners = [corner for corner in corners if 0 <= corner <= 1]",
        "least = min(map(time, corners))",
        "return min(corner for corner in corners if time(corner) <= least * (1 + 1e-12))"]),
    "cycles of one score, in fractions": """# Exercise 19.1 · Which unit limits
from fractions import Fraction


def forward_cycles(rows, keys, head_dim, chip):
    products = sum([2 * rows * keys * head_dim, 2 * rows * head_dim * keys])
    return [products / chip[0], rows * keys / chip[1], sum(2 * n * head_dim for n in (rows, keys, keys)) / chip[2]]


def best_share(rows, keys, head_dim, chip, instructions, others):
    flops, exponentials, bytes_ = map(Fraction, chip)
    floor = max(4 * head_dim / flops, Fraction(2 * head_dim * (rows + 2 * keys), rows * keys) / bytes_)
    unit, pace = 1 / exponentials, Fraction(1, 128)
    if floor >= unit or pace * Fraction(others) >= unit:
        return 0
    meets = (unit - pace * Fraction(others)) / (unit + pace * Fraction(instructions))
    return float(min(1 - floor / unit, meets))
""",
}
