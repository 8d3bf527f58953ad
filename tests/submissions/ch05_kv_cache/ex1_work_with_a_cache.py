"""Wrong answers to exercise 5.1, and unusual right ones."""

from tests.submissions.edits import changed

RETURN = "return sum(lengths), stored, sum(n * (n + 1) // 2 for n in lengths), stored * (stored + 1) // 2"


LENGTHS = "range(prompt_length, prompt_length + new_tokens)"


GUARD = "    if new_tokens == 0:\n        return 0, 0, 0, 0\n"


def work(text):
    return changed("5.1", (RETURN, f"return {text}"))


ALL_SCORES = "sum(n * (n + 1) // 2 for n in lengths)"


CACHED_SCORES = "stored * (stored + 1) // 2"


WRONG = {
    "last_key_stored": work(f"sum(lengths), stored + 1, {ALL_SCORES}, {CACHED_SCORES}"),
    "own_key_forgotten_in_all": changed(
        "5.1",
        (
            "return sum(lengths), stored, sum(n * (n + 1) // 2 for n in lengths), stored * (stored + 1) // 2",
            "return sum(lengths), stored, sum(n * (n - 1) // 2 for n in lengths), stored * (stored - 1) // 2",
        ),
    ),
    "prompt_ignored__and_not_causal": changed(
        "5.1",
        ('lengths = range(prompt_length, prompt_length + new_tokens)', 'lengths = range(1, 1 + new_tokens)'),
        (
            "return sum(lengths), stored, sum(n * (n + 1) // 2 for n in lengths), stored * (stored + 1) // 2",
            "return sum(lengths), stored, sum(n * n for n in lengths), stored * stored",
        ),
    ),
    "last_token_run": changed("5.1", (LENGTHS, "range(prompt_length + 1, prompt_length + new_tokens + 1)")),
    "prompt_ignored": changed("5.1", (LENGTHS, "range(1, new_tokens + 1)")),
    "last_token_stored": work(f"sum(lengths), stored + 1, {ALL_SCORES}, (stored + 1) * (stored + 2) // 2"),
    "one_step_too_many": changed("5.1", (LENGTHS, "range(prompt_length, prompt_length + new_tokens + 1)")),
    "one_step_too_many__none_for_none": changed(
        "5.1", (GUARD, ""), (LENGTHS, "range(prompt_length, prompt_length + new_tokens + 1)")
    ),
    "values_counted": work(f"2 * sum(lengths), 2 * stored, {ALL_SCORES}, {CACHED_SCORES}"),
    "order": work(f"sum(lengths), {ALL_SCORES}, stored, {CACHED_SCORES}"),
    "prompt_free__nor_scored": work(f"sum(lengths), new_tokens, {ALL_SCORES}, sum(lengths)"),
    "not_causal_with": work(f"sum(lengths), stored, {ALL_SCORES}, prompt_length**2 + sum(lengths[1:])"),
    "newest_query_only__in_the_prompt": work("sum(lengths), stored, sum(lengths), sum(lengths)"),
    "prompt_free": work(f"sum(lengths), new_tokens, {ALL_SCORES}, {CACHED_SCORES}"),
    "prompt_free__decode_alone": work(f"sum(lengths), new_tokens - 1, {ALL_SCORES}, {CACHED_SCORES}"),
    "not_causal": """# Exercise 5.1 · Work with and without a cache
def generation_work(prompt_length, new_tokens):
    keys_without = scores_without = 0
    keys_with = scores_with = 0
    for step in range(new_tokens):
        n = prompt_length + step
        keys_without += n
        scores_without += n * n
        fresh = n if step == 0 else 1
        keys_with += fresh
        scores_with += fresh * n
    return keys_without, keys_with, scores_without, scores_with
""",
    "not_causal_without": work(f"sum(lengths), stored, sum(n**2 for n in lengths), {CACHED_SCORES}"),
    "newest_query_only": work(f"sum(lengths), stored, sum(lengths), {CACHED_SCORES}"),
    "new_keys_forgotten": work(
        f"sum(lengths), stored, {ALL_SCORES}, "
        "prompt_length * (prompt_length + 1) // 2 + (new_tokens - 1) * prompt_length"
    ),
    "own_key_forgotten": """# Exercise 5.1 · Work with and without a cache
def generation_work(prompt_length, new_tokens):
    triangle = lambda n: n * (n + 1) // 2
    keys_without = scores_without = keys_with = scores_with = 0
    for step in range(new_tokens):
        known = prompt_length + step
        keys_without += known
        scores_without += triangle(known)
        if step == 0:
            keys_with, scores_with = known, triangle(known)
        else:
            scores_with += keys_with
            keys_with += 1
    return keys_without, keys_with, scores_without, scores_with
""",
    "prefill_not_scored": work(f"sum(lengths), stored, {ALL_SCORES}, sum(lengths)"),
    "no_step": changed("5.1", (GUARD, ""), ("stored = lengths[-1]", "stored = prompt_length + new_tokens - 1")),
}


WRONG |= {
    "no_step__the_prompt": changed(
        "5.1", ("return 0, 0, 0, 0", "return 0, prompt_length, 0, prompt_length * (prompt_length + 1) // 2")
    ),
    "last_token_run__and_no_step": changed(
        "5.1",
        (GUARD, ""),
        (LENGTHS, "range(prompt_length + 1, prompt_length + new_tokens + 1)"),
        ("stored = lengths[-1]", "stored = prompt_length + new_tokens - 1"),
    ),
}


UNUSUAL = {
    "step by step": """# Exercise 5.1 · Work with and without a cache
def generation_work(prompt_length, new_tokens):
    keys_without = scores_without = keys_with = scores_with = 0
    for step in range(new_tokens):
        known = prompt_length + step
        keys_without += known
        scores_without += sum(range(1, known + 1)) if known < 2000 else known * (known + 1) // 2
        fresh = known - keys_with
        scores_with += sum(keys_with + 1 + i for i in range(fresh))
        keys_with += fresh
    return keys_without, keys_with, scores_without, scores_with
""",
    "closed forms": """# Exercise 5.1 · Work with and without a cache
def generation_work(prompt_length, new_tokens):
    def tetrahedron(n):  # sum of k (k + 1) / 2 up to n
        return n * (n + 1) * (n + 2) // 6
    last = prompt_length + new_tokens - 1
    stored = last if new_tokens else 0
    return (new_tokens * (prompt_length + last) // 2, stored, tetrahedron(last) - tetrahedron(prompt_length - 1),
            stored * (stored + 1) // 2)
""",
    "through torch": """# Exercise 5.1 · Work with and without a cache
def generation_work(prompt_length, new_tokens):
    n = torch.arange(prompt_length, prompt_length + new_tokens)
    last = n[-1:].sum()
    return n.sum().item(), last.item(), (n * (n + 1) // 2).sum().item(), (last * (last + 1) // 2).item()
""",
}
