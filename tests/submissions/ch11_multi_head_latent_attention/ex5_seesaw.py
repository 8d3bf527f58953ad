"""Wrong answers to exercise 11.5, and unusual right ones."""

from tests.submissions.edits import changed

LEFT = "left = left * second + odd_weights"
RIGHT = "right = right * (first * second)"
EVEN = "right = right + (even_weights * second) @ even"
TOTAL = "total = (total * first + even_sum) * second + odd_sum"
ODD = "odd_largest = torch.maximum(even_largest, odd_scores.amax(dim=1, keepdim=True))"

WHOLE = """# Exercise 11.5 · The seesaw
def seesaw_attention(query, cache, scale, value_dim, block):
    heads, half = query.shape[0], value_dim // 2
    out = torch.zeros(heads, value_dim)
    top, total = torch.full((heads, 1), -math.inf), torch.zeros(heads, 1)
    for rows in cache.split(block):
        s = query @ rows.T * scale
        new = torch.maximum(top, s.amax(1, keepdim=True))
        w, shrink = torch.exp(s - new), torch.exp(top - new)
        out, total, top = out * shrink + w @ rows[:, :value_dim], total * shrink + w.sum(1, keepdim=True), new
    return out[:, :half] / total, out[:, half:] / total
"""

WRONG = {
    "left_not_rescaled_again": changed("11.5", (LEFT, "left = left + odd_weights")),
    "even_weights_not_corrected": changed("11.5", (EVEN, "right = right + even_weights @ even")),
    "old_output_not_rescaled": changed("11.5", ("left = left * first +", "left = left +")),
    "old_output_not_rescaled__right": changed("11.5", (RIGHT, "right = right * second")),
    "right_not_rescaled_again": changed("11.5", (RIGHT, "right = right * first")),
    "corrected_twice": changed("11.5", ("(even_weights * second) @ even", "(even_weights * second * second) @ even")),
    "sum_not_rescaled": changed("11.5", (TOTAL, "total = total + even_sum + odd_sum")),
    "sum_not_rescaled__second": changed("11.5", (TOTAL, "total = total * first + even_sum + odd_sum")),
    "one_block_in_the_sum": changed("11.5", (" * second + odd_sum", " * second")),
    "own_block_alone": changed(
        "11.5",
        (LEFT + " @ odd[:, :half]", "left = left * second"),
        ("        right = right + (even_weights * second) @ even[:, half:value_dim]\n", ""),
    ),
    "own_block_alone__left": changed("11.5", (LEFT + " @ odd[:, :half]", "left = left * second")),
    "own_block_alone__right": changed(
        "11.5", ("        right = right + (even_weights * second) @ even[:, half:value_dim]\n", "")
    ),
    "even_by_the_first_factor": changed("11.5", ("(even_weights * second) @ even", "(even_weights * first) @ even")),
    "factor_turned_round": changed(
        "11.5", ("torch.exp(even_largest - odd_largest)", "torch.exp(odd_largest - even_largest)")
    ),
    "even_from_m1_and_corrected": changed(
        "11.5",
        ("        even_weights = torch.exp(even_scores - even_largest)\n", ""),
        (
            "odd_weights = torch.exp(odd_scores - odd_largest)",
            "odd_weights, even_weights = torch.exp(odd_scores - odd_largest), torch.exp(even_scores - odd_largest)",
        ),
    ),
    "odd_weights_from_m0": changed("11.5", ("odd_scores - odd_largest)", "odd_scores - even_largest)")),
    "halves_exchanged": changed("11.5", ("return left / total, right / total", "return right / total, left / total")),
    "rope_forgotten": changed(
        "11.5",
        ("query @ even.T", "query[:, :value_dim] @ even[:, :value_dim].T"),
        ("query @ odd.T", "query[:, :value_dim] @ odd[:, :value_dim].T"),
    ),
    "rope_forgotten__odd": changed("11.5", ("query @ odd.T", "query[:, :value_dim] @ odd[:, :value_dim].T")),
    "scale_by_the_width": changed("11.5", (".T * scale", ".T * query.shape[1] ** -0.5")),
    "sum_not_rescaled__old_once": changed("11.5", (TOTAL, "total = total * first + even_sum * second + odd_sum")),
    "scaled_before_the_product": changed(
        "11.5", (".T * scale", ".T"), ("    heads, half = ", "    query = query * scale\n    heads, half = ")
    ),
    "scaled_before_the_product__a_block": changed(
        "11.5", (".T * scale", ".T"), ("@ even.T", "@ (even * scale).T"), ("@ odd.T", "@ (odd * scale).T")
    ),
    "too_much_memory": changed(
        "11.5",
        (
            "left, right = torch.zeros(heads, half), torch.zeros(heads, half)",
            "output = torch.zeros(heads, value_dim)\n    left, right = output[:, :half], output[:, half:]",
        ),
    ),
    "sum_not_rescaled__and_own_block_alone": changed(
        "11.5",
        (LEFT + " @ odd[:, :half]", "left = left * second"),
        (TOTAL, "total = total + even_sum + odd_sum"),
    ),
    "weights_exchanged": changed("11.5", ("even_weights @ even[:, :half]", "even_weights @ odd[:, :half]")),
    "odd_maximum_alone": changed("11.5", (ODD, "odd_largest = odd_scores.amax(dim=1, keepdim=True)")),
    "even_maximum_left_out": changed("11.5", (ODD, ODD.replace("even_largest", "largest"))),
    "odd_measured_from_m0": changed("11.5", (ODD, "odd_largest = even_largest")),
    "odd_measured_from_m0__its_minimum": changed("11.5", (ODD, ODD.replace("amax", "amin"))),
    "one_maximum_for_all": changed("11.5", (".amax(dim=1, keepdim=True)", ".amax()")),
    "too_many_products": changed(
        "11.5", (f"        {ODD}", f"        even_scores = query @ even.T * scale\n        {ODD}")
    ),
    "maximum_not_carried__at_all": changed("11.5", ("        largest = odd_largest\n", "")),
    "maximum_not_carried__and_scale_missing": changed(
        "11.5", ("        largest = odd_largest\n", ""), (".T * scale", ".T")
    ),
    "maximum_not_carried": changed("11.5", ("largest = odd_largest\n", "largest = even_largest\n")),
    "right_columns_of_the_left": changed("11.5", ("half:value_dim", ":half")),
    "right_columns_at_the_end": changed("11.5", ("[:, half:value_dim]", "[:, -half:]")),
    "scale_missing": changed("11.5", (".T * scale", ".T")),
    "not_divided": changed("11.5", ("return left / total, right / total", "return left, right")),
    "both_halves_at_once": WHOLE,
    "both_halves_at_once__all_scores": """# Exercise 11.5 · The seesaw
def seesaw_attention(query, cache, scale, value_dim, block):
    w = torch.softmax(query @ cache.T * scale, dim=1)
    return w @ cache[:, :value_dim // 2], w @ cache[:, value_dim // 2 : value_dim]
""",
    "nan_from_the_start": changed("11.5", ("torch.exp(largest - even_largest)", "torch.exp(even_largest - largest)")),
    "left_not_rescaled_again__and_even_weights_not_corrected": changed(
        "11.5", (LEFT, "left = left + odd_weights"), (EVEN, "right = right + even_weights @ even")
    ),
}

UNUSUAL = {
    "both maxima first": changed(
        "11.5",
        (
            "even_largest = torch.maximum(largest, even_scores.amax(dim=1, keepdim=True))  # m0",
            "odd_scores = query @ odd.T * scale\n"
            "        both = torch.maximum(even_scores.amax(1), odd_scores.amax(1))[:, None]\n"
            "        even_largest = torch.maximum(largest, both)",
        ),
        ("        odd_scores = query @ odd.T * scale  # [heads, block], the right worker's\n", ""),
    ),
    "the sum as a worker's own, joined at the end": """# Exercise 11.5 · The seesaw
def seesaw_attention(query, cache, scale, value_dim, block):
    H = value_dim // 2
    halves = [torch.zeros(query.shape[0], H), torch.zeros(query.shape[0], H)]
    top, sums = torch.full((query.shape[0], 1), -math.inf), [0.0, 0.0]
    for i in range(0, len(cache), 2 * block):
        blocks = cache[i : i + block], cache[i + block : i + 2 * block]
        for owner, rows in enumerate(blocks):
            s = query @ rows.T * scale
            new = torch.maximum(top, s.max(1, keepdim=True).values)
            shrink, w = torch.exp(top - new), torch.exp(s - new)
            sums = [total * shrink for total in sums]
            sums[owner] = sums[owner] + w.sum(1, keepdim=True)
            halves = [halves[h] * shrink + w @ rows[:, h * H : h * H + H] for h in (0, 1)]
            top = new
    return halves[0] / (sums[0] + sums[1]), halves[1] / (sums[0] + sums[1])
""",
    "base 2": changed("11.5", ("torch.exp(", "torch.exp2("), (".T * scale", ".T * (scale * math.log2(math.e))")),
    "the odd block first": changed(
        "11.5",
        (
            "even, odd = cache[start : start + block], cache[start + block : start + 2 * block]",
            "odd, even = cache[start : start + block], cache[start + block : start + 2 * block]",
        ),
    ),
}
