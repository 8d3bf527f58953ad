"""Wrong answers to exercise 17.7, and unusual right ones."""

from tests.submissions.edits import changed

SUM, PAIRS = "return full * (full + 1) // 2 + (length - full) * full", "pairs(length) + attended"
INDEX, CHOSEN = '2 * shape["index_heads"] * shape["index_dim"] * pairs(length)', 'attended * pairs(shape["k"])'
OF_INDEX = '2 * shape["index_heads"] * shape["index_dim"]'
PAYS = "return index * (length * (length + 1) // 2) + chosen * attended <= dense * (length * (length + 1) // 2)"
ATTENDED = "attended = full * (full + 1) // 2 + (length - full) * full"
NEVER = "    if index >= dense:\n        return None\n"
RATE = '["head_dim"] / rates["chosen"]'


def wrong(*replacements):
    return changed("17.7", *replacements)


WRONG = {
    "not_causal": wrong(("pairs(length if kind", "(length * length if kind"),
                        ('else shape["window"])', 'else pairs(shape["window"]))'),
                        (INDEX, INDEX.replace("pairs(length)", "length * length")),
                        ("index * (length * (length + 1) // 2)", "index * length * length"),
                        ("dense * (length * (length + 1) // 2)", "dense * length * length")),
    "not_causal__index": wrong((INDEX, INDEX.replace("pairs(length)", "length**2"))),
    "triangle_forgotten__all": wrong((SUM, "return length * full")),
    "triangle_forgotten__crossover": wrong((
        PAYS, 'return index * length / 2 + chosen * shape["k"] <= dense * length / 2')),
    "own_key_missing": wrong((SUM, SUM.replace("full + 1", "full - 1"))),
    "shorter_than_the_window": wrong(("        full = min(length, most)\n", "        full = most\n")),
    # hf#39408, zml#763: one key more than the window has.
    "window_without_itself": wrong(('else shape["window"])', 'else shape["window"] + 1)')),
    "window_too_short": wrong(('else shape["window"])', 'else shape["window"] - 1)')),
    "half_the_flops": wrong(("4 * shape", "2 * shape")),
    "indexer_with_values": wrong((OF_INDEX, OF_INDEX.replace("2", "4"))),
    "indexer_halved": wrong((OF_INDEX, OF_INDEX.replace("2 * ", ""))),
    # ROCm/rocm-libraries#11881: the indexer is O(N²) still.
    "indexer_free": wrong((INDEX + " + ", ""), ("index * (length * (length + 1) // 2) + ", "")),
    "indexer_free__up_to_k": wrong((INDEX, f"{INDEX} * (length > shape['k'])")),
    "indexer_free__in_flops": wrong((INDEX + " + ", "")),
    "indexer_free__in_crossover": wrong(("return index * (length * (length + 1) // 2) + ", "return ")),
    "attention_missing": wrong((" + " + CHOSEN, "")),
    "indexer_of_the_chosen": wrong((INDEX, INDEX.replace("pairs(length)", 'pairs(shape["k"])')),
                                   (NEVER, '    if index * 0 + dense <= 0:\n        return None\n'),
                                   ("index * (length * (length + 1) // 2)", "index * attended")),
    "indexer_of_attention": wrong((OF_INDEX, '2 * shape["query_heads"] * shape["head_dim"]')),
    "indexer_of_attention__heads": wrong((OF_INDEX, '2 * shape["query_heads"] * shape["index_dim"]')),
    "window_for_k": wrong(('shape["k"]', 'shape["window"]')),
    "last_query_alone": wrong((SUM, "return full")),
    "one_rate": wrong((' / rates["dense"]', ""), (' / rates["index"]', ""), (' / rates["chosen"]', "")),
    "index_at_another_rate": wrong(('rates["index"]', 'rates["dense"]')),
    "chosen_at_another_rate": wrong(('rates["chosen"]', 'rates["dense"]')),
    "indexer_free__beside": wrong((PAYS, "pairs = length * (length + 1) // 2\n"
                                 "        return max(index * pairs, chosen * attended) <= dense * pairs")),
    "equal_left_out": wrong((PAYS, PAYS.replace("<=", "<"))),
    "one_too_small": wrong(("    return high\n", "    return low\n")),
    "one_too_small__not_0": wrong(("    return high\n", "    return max(low, 1)\n")),
    "one_too_large": wrong(("    return high\n", "    return high + 1\n")),
    "not_before_k": wrong(("    high = 1\n", '    high = shape["k"]\n'),
                          ("low = high // 2", 'low = max(high // 2, shape["k"] - 1)')),
    "own_key_missing__index": wrong((INDEX, INDEX.replace("pairs(length)", "(length * (length - 1) // 2)"))),
    "half_the_diagonal": wrong(("return attended * pairs(length if", "if kind == 'dense':\n"
        "        return attended * length * length // 2\n    return attended * pairs(length if")),
    "window_for_k__in_window": wrong(('else shape["window"])', 'else shape["k"])')),
    "doubled_alone": wrong(("    while high - low > 1", "    while high < low")),
    "rounded": wrong((SUM, "return int(full * (full + 1) / 2 + (length - full) * full)")),
    "no_token": wrong(("    def pairs(most)", "    length = max(length, 1)\n\n    def pairs(most)")),
    "told_never__late": wrong(("    while not pays(high):\n", "    while not pays(high):\n        if high > 2**32:\n"
                               "            return None\n")),
    "told_never__dear_indexer": wrong(("if index >= dense:", 'if index >= dense or index >= dense * rates["dense"] / '
                                       'rates["chosen"]:')),
    "never_not_told": wrong((NEVER, "    if index >= dense:\n        return 2**40\n")),
    "a_float": wrong(("(full + 1) // 2 + (length", "(full + 1) / 2 + (length")),
    "a_float__of_tokens": wrong(("high = 1\n", "high = 1.0\n")),
    "query_by_query": wrong((SUM, "return sum(min(t + 1, most) for t in range(length))")),
    "query_by_query__length": wrong(("high *= 2", "high += 1"), ("low = high // 2", "low = high - 1")),
}

UNUSUAL = {
    "the root of a quadratic": """# Exercise 17.7 · From which length choosing pays
def flops(kind, length, shape):
    most = {"dense": length, "window": shape["window"], "chosen": shape["k"]}[kind]
    rest = max(0, length - most)
    triangle = lambda n: n * (n + 1) // 2
    attended = triangle(length) - triangle(rest)
    indexed = triangle(length) if kind == "chosen" else 0
    return 4 * shape["query_heads"] * shape["head_dim"] * attended + \\
        2 * shape["index_heads"] * shape["index_dim"] * indexed

def crossover(shape, rates):
    from fractions import Fraction

    pair, k = 4 * shape["query_heads"] * shape["head_dim"], shape["k"]
    gain = pair / Fraction(rates["dense"]) - 2 * shape["index_heads"] * shape["index_dim"] / Fraction(rates["index"])
    chosen = pair / Fraction(rates["chosen"])
    if gain <= 0:
        return None
    if gain >= chosen:
        return 1
    # gain · n(n + 1)/2 ≥ chosen · (k n - k(k - 1)/2)
    b, c = gain / 2 - chosen * k, chosen * Fraction(k * (k - 1), 2)
    n = int((-b + Fraction(math.isqrt(int((b * b - 2 * gain * c) * 10**80)), 10**40)) / gain)
    short = lambda n: gain * n * (n + 1) / 2 + c < chosen * k * n
    n = max(n - 2, k)
    while short(n):
        n += 1
    return n
""",
    "halving from 2⁴⁰ down, with the other function": """# Exercise 17.7 · From which length choosing pays
def flops(kind, length, shape):
    def pairs(most):
        if length <= most:
            return length * (length + 1) // 2
        return length * most - most * (most - 1) // 2

    pair = 4 * shape["query_heads"] * shape["head_dim"]
    if kind == "dense":
        return pair * pairs(length)
    if kind == "window":
        return pair * pairs(shape["window"])
    return pair * pairs(shape["k"]) + shape["index_heads"] * shape["index_dim"] * length * (length + 1)

def crossover(shape, rates):
    import bisect

    class Pays:
        def __len__(self):
            return 2**40 + 1

        def __getitem__(self, n):
            n += 1
            dense, both = flops("dense", n, shape), flops("chosen", n, shape)
            attended = flops("window", n, {**shape, "window": shape["k"]})
            index = both - attended
            return index / rates["index"] + attended / rates["chosen"] <= dense / rates["dense"]

    place = bisect.bisect_left(Pays(), True)
    return place + 1 if place <= 2**40 else None
""",
    "bits from the highest": changed(
        "17.7", ("    high = 1\n", "    low = 0\n    for bit in reversed(range(42)):\n"
                                    "        low += 0 if pays(low + 2**bit) else 2**bit\n"
                                    "    return low + 1\n    high = 1\n")),
}
