"""Wrong answers to exercise 5.4, and unusual right ones."""

from tests.submissions.edits import changed

POSITIONS = "positions = past[:, None] + torch.arange(new_tokens, device=past.device)"


COMPARE = "return torch.arange(capacity, device=past.device) <= positions[:, :, None]"


WRONG = {
    **{
        f"diagonal_of_another_sequence__{name}": f"""# Exercise 5.4 · The causal mask over a cache
def visible_slots(past: torch.Tensor, new_tokens: int, capacity: int) -> torch.Tensor:
    slots = torch.arange(capacity, device=past.device)
    triangle = torch.ones(new_tokens, capacity, dtype=torch.bool, device=past.device).tril(int({past}))
    return triangle & (slots < (past + new_tokens)[:, None])[:, None, :]
"""
        for name, past in {"longest": "past.max()", "first": "past[0]", "shortest": "past.min()"}.items()
    },
    "own_slot_alone": changed("5.4", (COMPARE, COMPARE.replace("<=", "=="))),
    "newest_first": changed("5.4", ("torch.arange(new_tokens,", "torch.arange(new_tokens - 1, -1, -1,")),
    "one_token_sees_all": changed(
        "5.4", (COMPARE, COMPARE.replace("return ", "return (new_tokens == 1) | (") + ")")
    ),
    "positions_in_few_bits": changed("5.4", ("positions[:, :, None]", "positions.half()[:, :, None]")),
    "past_of_longest_sequence": changed("5.4", ("past[:, None] +", "past.max().repeat(len(past))[:, None] +")),
    "no_offset": """# Exercise 5.4 · The causal mask over a cache
def visible_slots(past, new_tokens, capacity):
    mask = torch.ones(new_tokens, capacity, dtype=torch.bool, device=past.device).tril()
    return mask.expand(len(past), new_tokens, capacity)
""",
    "own_slot_hidden": changed("5.4", (COMPARE, COMPARE.replace("<=", "<"))),
    "new_tokens_apart": """# Exercise 5.4 · The causal mask over a cache
def visible_slots(past, new_tokens, capacity):
    slots = torch.arange(capacity)
    own = past[:, None, None] + torch.arange(new_tokens)[:, None]
    return (slots < past[:, None, None]) | (slots == own)
""",
    "one_too_many": changed("5.4", (POSITIONS, POSITIONS.replace("past[:, None]", "past[:, None] + 1"))),
    "one_too_many__counted_from_one": changed(
        "5.4", (POSITIONS, POSITIONS.replace("arange(new_tokens", "arange(1, new_tokens + 1"))
    ),
    "aligned_to_capacity": """# Exercise 5.4 · The causal mask over a cache
def visible_slots(past, new_tokens, capacity):
    mask = torch.ones(new_tokens, capacity, dtype=torch.bool, device=past.device).tril(capacity - new_tokens)
    return mask.expand(len(past), new_tokens, capacity)
""",
    "past_of_first_sequence": """# Exercise 5.4 · The causal mask over a cache
def visible_slots(past, new_tokens, capacity):
    mask = torch.ones(new_tokens, capacity, dtype=torch.bool, device=past.device).tril(int(past[0]))
    return mask.repeat(len(past), 1, 1)
""",
    "past_hidden": """# Exercise 5.4 · The causal mask over a cache
def visible_slots(past, new_tokens, capacity):
    mask = torch.zeros(len(past), new_tokens, capacity, dtype=torch.bool)
    for b, start in enumerate(past.tolist()):
        for i in range(new_tokens):
            mask[b, i, start : start + i + 1] = True
    return mask
""",
    "not_causal": changed(
        "5.4",
        (POSITIONS, "total = (past + new_tokens)[:, None, None]"),
        (COMPARE, "return (torch.arange(capacity) < total).expand(-1, new_tokens, -1)"),
    ),
    "only_unused_hidden": changed(
        "5.4", (COMPARE, "return (torch.arange(capacity) < past[:, None, None]).repeat(1, new_tokens, 1)")
    ),
    "turned_round": changed("5.4", (COMPARE, COMPARE.replace("<=", ">"))),
}


WRONG |= {
    "no_offset__and_own_slot_hidden": changed(
        "5.4",
        (POSITIONS, "positions = torch.arange(new_tokens).expand(len(past), -1)"),
        (COMPARE, COMPARE.replace("<=", "<")),
    ),
    "past_of_first_sequence__and_not_causal": changed(
        "5.4",
        (POSITIONS, "positions = (past[:1, None] + new_tokens - 1).expand(len(past), new_tokens)"),
    ),
}


UNUSUAL = {
    "rows of one triangle": """# Exercise 5.4 · The causal mask over a cache
def visible_slots(past, new_tokens, capacity):
    triangle = torch.ones(capacity, capacity, dtype=torch.bool).tril()
    return triangle[past.long().unsqueeze(1) + torch.arange(new_tokens)]
""",
    "loops": """# Exercise 5.4 · The causal mask over a cache
def visible_slots(past, new_tokens, capacity):
    mask = torch.zeros(len(past), new_tokens, capacity, dtype=torch.bool)
    for b, start in enumerate(past.tolist()):
        for i in range(new_tokens):
            mask[b, i, : start + i + 1] = True
    return mask
""",
    "tril of each sequence": """# Exercise 5.4 · The causal mask over a cache
def visible_slots(past, new_tokens, capacity):
    return torch.stack([torch.ones(new_tokens, capacity, dtype=torch.bool).tril(int(start)) for start in past])
""",
    "two parts joined": """# Exercise 5.4 · The causal mask over a cache
def visible_slots(past, new_tokens, capacity):
    slot = torch.arange(capacity).view(1, 1, -1)
    start = past.view(-1, 1, 1)
    query = torch.arange(new_tokens).view(1, -1, 1)
    return (slot < start) | ((slot - start >= 0) & (slot - start <= query))
""",
    "rolled": """# Exercise 5.4 · The causal mask over a cache
def visible_slots(past, new_tokens, capacity):
    late = np.arange(capacity)[None, None, :] - past.numpy()[:, None, None]
    return torch.from_numpy(~(late > np.arange(new_tokens)[None, :, None]))
""",
}
