"""Wrong answers to exercise 17.1, and unusual right ones."""

from tests.submissions.edits import changed

SIDES = "(key_length + query_length if side == -1 else side for side in window)"
OTHERS, ARGUMENTS = 'window - (library == "transformers"), 0', '"flash_attn": (keys - 1, 0)'
RETURN = "return (key >= position - before) & (key <= position + after)"


def wrong(*replacements):
    return changed("17.1", *replacements)


WRONG = {
    "aligned_to_the_start": wrong((" + key_length - query_length\n", "\n")),
    "minus_one_taken_for_a_number": wrong((SIDES, "window")),
    "minus_one_taken_for_a_number__right": wrong((SIDES, "(key_length + query_length if window[0] < 0 else window[0]), "
                                                         "window[1]")),
    "minus_one_taken_for_0": wrong((SIDES, "(max(side, 0) for side in window)")),
    "zero_taken_for_no_bound": wrong(("side == -1", "side <= 0")),
    "one_minus_one_for_both": wrong(("if side == -1", "if -1 in window")),
    "always_causal": wrong((SIDES, f"[*{SIDES}][0], 0")),
    "left_with_itself": wrong((SIDES, "(10**6 if side == -1 else side for side in window)\n"
                                      "        before -= window[0] != -1")),
    "right_with_itself": wrong((SIDES, "(10**6 if side == -1 else side for side in window)\n"
                                       "        after -= window[1] != -1")),
    "sides_exchanged": wrong(("before, after = (key", "after, before = (key")),
    "transformers_without_itself": wrong((OTHERS, "window, 0")),
    "course_with_itself": wrong((OTHERS, "window - 1, 0")),
    "libraries_exchanged": wrong(('library == "transformers"', 'library == "course_lib"')),
    "looks_ahead": wrong((OTHERS, 'window - (library == "transformers"), 0\n        after = before')),
    "first_key_missing": wrong(("key >= position", "key > position")),
    "last_key_missing": wrong(("key <= position", "key < position")),
    "turned_round": wrong((RETURN, "return (key < position - before) | (key > position + after)")),
    # hf#39408, zml#763, Megatron-Bridge#2656: W where W - 1 is meant.
    "one_key_too_many": wrong((ARGUMENTS, '"flash_attn": (keys, 0)')),
    "one_key_too_many__course": wrong(('"course_lib": keys - 1', '"course_lib": keys')),
    "same_for_all": wrong((ARGUMENTS, '"flash_attn": (keys, 0)'), ('"course_lib": keys - 1', '"course_lib": keys')),
    "one_key_too_few": wrong(('"transformers": keys', '"transformers": keys - 1')),
    # LightLLM#1311: the right side is as wide as the left one.
    "right_not_0": wrong((ARGUMENTS, '"flash_attn": (keys - 1, keys - 1)')),
    "right_not_0__and_too_many": wrong((ARGUMENTS, '"flash_attn": (keys, keys)')),
    "right_without_a_bound": wrong((ARGUMENTS, '"flash_attn": (keys - 1, -1)')),
    # hippogriff#7: a negative left side is no bound.
    "left_negative": wrong((ARGUMENTS, '"flash_attn": (1 - keys, 0)')),
    "left_negative__and_too_many": wrong((ARGUMENTS, '"flash_attn": (-keys, 0)')),
}

UNUSUAL = {
    "triangles": """# Exercise 17.1 · One window, three conventions
def visible(library, window, query_length, key_length):
    shift = key_length - query_length
    everything = torch.ones(query_length, key_length, dtype=torch.bool)
    left, right = window if isinstance(window, tuple) else (window - int(library == "transformers"), 0)
    if right >= 0:
        everything = everything.tril(shift + right)
    if left >= 0:
        everything = everything.triu(shift - left)
    return everything

def arguments(keys):
    number = int(keys)
    return dict(transformers=number, flash_attn=[number - 1, 0], course_lib=number - 1)
""",
    "distances": """# Exercise 17.1 · One window, three conventions
def visible(library, window, query_length, key_length):
    behind = torch.arange(key_length)[None] - torch.arange(key_length - query_length, key_length)[:, None]
    if library == "flash_attn":
        low = -math.inf if window[0] < 0 else -window[0]
        high = math.inf if window[1] < 0 else window[1]
        return (low <= behind) & (behind <= high)
    if library == "transformers":
        return (behind <= 0) & (behind > -window)
    return torch.logical_and(behind <= 0, -behind <= window)

def arguments(keys):
    return {"transformers": keys, "course_lib": keys - 1, "flash_attn": (keys - 1, 0)}
""",
    "loops": """# Exercise 17.1 · One window, three conventions
def visible(library, window, query_length, key_length):
    rows = []
    for i in range(query_length):
        p = i + key_length - query_length
        if library == "flash_attn":
            seen = [(window[0] < 0 or j >= p - window[0]) and (window[1] < 0 or j <= p + window[1])
                    for j in range(key_length)]
        else:
            first = p - window + (1 if library == "transformers" else 0)
            seen = [first <= j <= p for j in range(key_length)]
        rows.append(seen)
    return torch.tensor(rows)

def arguments(keys):
    return {"course_lib": keys - 1, "flash_attn": (keys - 1, 0), "transformers": keys}
""",
}
