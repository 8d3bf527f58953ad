"""Wrong answers to exercise 7.1, and unusual right ones."""

from tests.submissions.edits import changed

REFUSAL = """    if query_heads % key_heads:
        raise ValueError(f"key_heads = {key_heads} must divide query_heads = {query_heads}.")
"""


DIVISION = "return query_head // (query_heads // key_heads)"


MEMBERS = "torch.arange(query_heads).view(key_heads, -1)"


WRONG = {
    "numbers_not_said": changed("7.1", ('f"key_heads = {key_heads} must divide query_heads = {query_heads}."', '"no"')),
    "by_count__and_numbers_not_said": changed(
        "7.1",
        (DIVISION, "return query_head // key_heads"),
        ('f"key_heads = {key_heads} must divide query_heads = {query_heads}."', '"no"'),
    ),
    "heads_turned_round": changed("7.1", (DIVISION, f"return key_heads - 1 - {DIVISION.removeprefix('return ')}")),
    "refused_by_another_error": changed("7.1", (REFUSAL, "    assert query_heads % key_heads == 0\n")),
    "not_refused__by_pytorch": changed("7.1", (REFUSAL + "    return torch", "    return torch")),
    "head_is_no_index": changed("7.1", (DIVISION, "return query_head // (query_heads / key_heads)")),
    "divided_the_wrong_way__and_no_group_left": changed("7.1", ("query_heads % key_heads", "key_heads % query_heads")),
    "no_group_left": changed(
        "7.1", ("if query_heads % key_heads", "if query_heads > key_heads and query_heads % key_heads")
    ),
    "divided_the_wrong_way": """# Exercise 7.1 · The head map
def key_head_of(query_head, query_heads, key_heads):
    if key_heads % query_heads:
        raise ValueError("no")
    return query_head * key_heads // query_heads

def groups(query_heads, key_heads):
    if query_heads % key_heads:
        raise ValueError("no")
    return torch.arange(query_heads).view(key_heads, -1)
""",
    "by_modulo": changed("7.1", (DIVISION, "return query_head % key_heads")),
    "groups_by_modulo": changed("7.1", (MEMBERS, "torch.arange(query_heads).view(-1, key_heads).T")),
    "groups_by_modulo__listed": changed(
        "7.1", (MEMBERS, "torch.tensor([list(range(k, query_heads, key_heads)) for k in range(key_heads)])")
    ),
    "by_count": changed("7.1", (DIVISION, "return query_head // key_heads")),
    "groups_of_key_heads": changed("7.1", (MEMBERS, "torch.arange(query_heads).view(-1, key_heads)")),
    "groups_turned": changed("7.1", (MEMBERS, "torch.arange(query_heads).view(key_heads, -1).T")),
    "not_refused": changed("7.1", (REFUSAL, "")),
    "not_refused__in_one_of_them": """# Exercise 7.1 · The head map
def key_head_of(query_head, query_heads, key_heads):
    if query_heads % key_heads:
        raise ValueError(f"{query_heads}, {key_heads}")
    return query_head * key_heads // query_heads

def groups(query_heads, key_heads):
    group = query_heads // key_heads
    return torch.tensor([list(range(k * group, (k + 1) * group)) for k in range(key_heads)])
""",
    "head_rounded_up": changed("7.1", (DIVISION, "return -(-query_head // (query_heads // key_heads))")),
    "members_descending": changed("7.1", (MEMBERS, f"{MEMBERS}.flip(1)")),
    "groups_from_the_last": changed("7.1", (MEMBERS, f"{MEMBERS}.flip(0)")),
}


SCALED_MAP = """# Exercise 7.1 · The head map
def key_head_of(query_head, query_heads, key_heads):
    group, rest = divmod(query_heads, key_heads)
    if rest != 0:
        raise ValueError(f"{query_heads} heads do not divide into {key_heads}")
    return query_head * key_heads // query_heads

def groups(query_heads, key_heads):
    found = [[] for _ in range(key_heads)]
    for head in range(query_heads):
        found[key_head_of(head, query_heads, key_heads)].append(head)
    return torch.tensor(found)
"""


TENSOR_MAP = """# Exercise 7.1 · The head map
def groups(query_heads, key_heads):
    if query_heads % key_heads != 0:
        raise ValueError(f"{query_heads} / {key_heads}")
    return torch.stack(torch.arange(query_heads).chunk(key_heads))

def key_head_of(query_head, query_heads, key_heads):
    return next(k for k, group in enumerate(groups(query_heads, key_heads).tolist()) if query_head in group)
"""


REPEATED_MAP = changed(
    "7.1",
    (DIVISION, "return int(torch.arange(key_heads).repeat_interleave(query_heads // key_heads)[query_head])"),
    (
        MEMBERS,
        "torch.arange(query_heads // key_heads) + torch.arange(0, query_heads, query_heads // key_heads)[:, None]",
    ),
)


UNUSUAL = {
    "multiplied first, lists filled": SCALED_MAP,
    "by a tensor": TENSOR_MAP,
    "repeated and added": REPEATED_MAP,
}
