"""Wrong answers to exercise 2.2, and unusual right ones."""

from tests.submissions.edits import changed

ROOT = "return math.isqrt(budget + head_dim * head_dim) - head_dim"


BUDGET = "budget = memory_bytes // (2 * item_bytes * heads)"


WRONG = {
    "one_matrix": changed(
        "2.2",
        (BUDGET, "budget = memory_bytes // (item_bytes * heads)"),
        (ROOT, "return math.isqrt(budget + 4 * head_dim * head_dim) - 2 * head_dim"),
    ),
    "one_matrix__and_inputs_forgotten": changed(
        "2.2", (BUDGET, "budget = memory_bytes // (item_bytes * heads)"), (ROOT, "return math.isqrt(budget)")
    ),
    "inputs_forgotten": changed("2.2", (ROOT, "return math.isqrt(budget)")),
    "one_too_long": changed("2.2", (ROOT, ROOT + " + 1")),
    "one_too_long__2": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high) // 2
        if item_bytes * heads * (4 * middle * head_dim + 2 * middle * middle) > memory_bytes:
            high = middle
        else:
            low = middle + 1
    return low
""",
    "one_too_short": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        if item_bytes * heads * (4 * middle * head_dim + 2 * middle * middle) >= memory_bytes:
            high = middle
        else:
            low = middle
    return low
""",
    "heads_forgotten": changed("2.2", (" * heads", "")),
    "bytes_forgotten": changed("2.2", ("2 * item_bytes * heads)\n", "2 * heads)\n")),
    "powers_of_two_only": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    need = lambda n: item_bytes * heads * (4 * n * head_dim + 2 * n * n)
    n = 1
    if need(n) > memory_bytes:
        return 0
    while need(2 * n) <= memory_bytes:
        n *= 2
    return n
""",
}


UNUSUAL = {
    "halving": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        fits = item_bytes * heads * (4 * middle * head_dim + 2 * middle * middle) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low
""",
    "estimate and mend": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    def need(n):
        return item_bytes * heads * (4 * n * head_dim + 2 * n * n)
    n = max(0, int(math.sqrt(memory_bytes / (2 * item_bytes * heads) + head_dim**2) - head_dim))
    while need(n + 1) <= memory_bytes:
        n += 1
    while n and need(n) > memory_bytes:
        n -= 1
    return n
""",
    "bit by bit": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    n = 0
    for bit in reversed(range(40)):
        trial = n | (1 << bit)
        if 2 * trial * (trial + 2 * head_dim) * heads * item_bytes <= memory_bytes:
            n = trial
    return n
""",
}
