"""Wrong answers to exercise 6.3, and unusual right ones."""

from tests.submissions.edits import changed

PAGE = "table[positions // page_size].long() * page_size"


WRONG = {
    "none_taken_for_all": changed("6.3", ("torch.arange(length - new, length)", "torch.arange(length)[-new:]")),
    "one_new_token_at_least": changed("6.3", ("torch.arange(length - new,", "torch.arange(length - max(new, 1),")),
    "padding_left_in": changed(
        "6.3",
        (
            "return torch.cat(slots)",
            "return torch.nn.utils.rnn.pad_sequence(slots, batch_first=True, padding_value=-1).flatten()",
        ),
    ),
    "slots_in_floats": changed(
        "6.3",
        (
            "table[positions // page_size].long() * page_size + positions % page_size",
            "(table[positions // page_size].float() * page_size + positions % page_size).long()",
        ),
    ),
    "one_token_late__clamped": changed(
        "6.3",
        (
            "torch.arange(length - new, length)",
            "torch.arange(length - new + 1, length + 1).clamp(max=len(table) * page_size - 1)",
        ),
    ),
    "page_0_taken_for_none": changed(
        "6.3",
        (
            "    return torch.cat(slots)",
            "    slots = [part[part >= page_size] for part in slots]\n    return torch.cat(slots)",
        ),
    ),
    "offset_from_one": changed("6.3", ("+ positions % page_size", "+ (positions - 1) % page_size")),
    "slots_sorted": changed("6.3", ("return torch.cat(slots)", "return torch.cat(slots).sort().values")),
    "table_not_multiplied": changed("6.3", (PAGE, "table[positions // page_size].long()")),
    "offset_forgotten": changed("6.3", (PAGE + " + positions % page_size", PAGE)),
    "position_added_whole": changed("6.3", (PAGE + " + positions % page_size", PAGE + " + positions")),
    "division_and_remainder_exchanged": changed(
        "6.3",
        (PAGE + " + positions % page_size", "table[positions % page_size].long() * page_size + positions // page_size"),
    ),
    "offset_counted_anew": changed(
        "6.3", (PAGE + " + positions % page_size", PAGE + " + torch.arange(new) % page_size")
    ),
    "page_looked_up_once": changed(
        "6.3",
        (
            PAGE + " + positions % page_size",
            "table[(length - new) // page_size].long() * page_size + (length - new) % page_size + torch.arange(new)",
        ),
    ),
    "old_tokens_too": changed("6.3", ("torch.arange(length - new, length)", "torch.arange(length)")),
    "positions_run_on": """# Exercise 6.3 · Slot mapping
def slot_mapping(block_tables, lengths, new_tokens, page_size):
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), new_tokens.long())
    position = (lengths - new_tokens)[sequence] + torch.arange(len(sequence))
    return block_tables[sequence, position // page_size].long() * page_size + position % page_size
""",
    "pages_consecutive": changed("6.3", (PAGE + " + positions % page_size", "table[0].long() * page_size + positions")),
    "table_ignored": changed("6.3", (PAGE + " + positions % page_size", "positions")),
    "first_table_for_all": changed("6.3", (PAGE, "block_tables[0][positions // page_size].long() * page_size")),
    "positions_from_zero": changed("6.3", ("torch.arange(length - new, length)", "torch.arange(new)")),
    "one_token_late": changed("6.3", ("torch.arange(length - new, length)", "torch.arange(length, length + new)")),
    "one_token_late__by_one": changed(
        "6.3", ("torch.arange(length - new, length)", "torch.arange(length - new + 1, length + 1)")
    ),
    "one_token_early": changed(
        "6.3", ("torch.arange(length - new, length)", "torch.arange(length - new - 1, length - 1)")
    ),
    "slots_in_32_bits": changed("6.3", (PAGE, "(table[positions // page_size] * page_size).long()")),
    "by_shift": changed(
        "6.3",
        ("slots.append(", "bits = page_size.bit_length() - 1\n        slots.append("),
        (PAGE, "(table[positions >> bits].long() << bits)"),
        ("positions % page_size", "(positions & (page_size - 1))"),
    ),
    "page_of_the_last_token": changed("6.3", ("table[positions // page_size]", "table[(length - 1) // page_size]")),
}


WRONG |= {
    "offset_by_bits": changed("6.3", ("positions % page_size)", "(positions & (page_size - 1)))")),
    "new_of_first_sequence__and_one_token_late": changed(
        "6.3",
        ("torch.arange(length - new, length)", "torch.arange(length, length + new)"),
        ("positions // page_size]", "(positions // page_size).clamp(max=len(table) - 1)]"),
        ("new_tokens.tolist())", "[int(new_tokens[0])] * len(new_tokens))"),
    ),
    "first_table_for_all__and_offset_forgotten": changed(
        "6.3", (PAGE + " + positions % page_size", "block_tables[0][positions // page_size].long() * page_size")
    ),
}


UNUSUAL = {
    "a boolean mask over all slots": """# Exercise 6.3 · Slot mapping
def slot_mapping(block_tables, lengths, new_tokens, page_size):
    every = (block_tables.to(torch.int64)[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    token = torch.arange(every.shape[1])
    return every[(token >= (lengths - new_tokens)[:, None]) & (token < lengths[:, None])]
""",
    "token by token": """# Exercise 6.3 · Slot mapping
def slot_mapping(block_tables, lengths, new_tokens, page_size):
    slots = []
    for b in range(len(lengths)):
        for p in range(int(lengths[b]) - int(new_tokens[b]), int(lengths[b])):
            slots.append(int(block_tables[b][p // page_size]) * page_size + p % page_size)
    return torch.tensor(slots, dtype=torch.int64)
""",
    "without a loop": """# Exercise 6.3 · Slot mapping
def slot_mapping(block_tables, lengths, new_tokens, page_size):
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), new_tokens.long())
    first = torch.cumsum(new_tokens, 0) - new_tokens
    position = (lengths - new_tokens)[sequence] + torch.arange(len(sequence)) - first[sequence]
    page = block_tables[sequence, position // page_size].long()
    return page * page_size + position % page_size
""",
    "every slot first": """# Exercise 6.3 · Slot mapping
def slot_mapping(block_tables, lengths, new_tokens, page_size):
    every = (block_tables.long()[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    rows = [row[n - k:n] for row, n, k in zip(every, lengths.tolist(), new_tokens.tolist())]
    return torch.cat(rows)
""",
}
