"""Wrong answers to exercise 6.1, and unusual right ones."""

from tests.submissions.edits import changed, rounded

WRONG = {
    "longest_run_taken_off": changed(
        "6.1",
        ("0 if longest >= wanted else slots - reserved", "0 if longest >= wanted else slots - reserved - longest"),
    ),
    "missing_slots_counted": changed(
        "6.1", ("0 if longest >= wanted else slots - reserved", "0 if longest >= wanted else wanted - longest")
    ),
    "prompt_halved": changed("6.1", ("(prompt + (output + 1) / 2)", "(prompt + output + 1) / 2")),
    "sorted_by_length": changed(
        "6.1",
        ('sorted(regions)', 'sorted(regions, key=lambda region: region[2])'),
    ),
    "regions_not_sorted__and_exact_fit_refused": changed(
        "6.1",
        ('longest >= wanted', 'longest > wanted'),
        ('in sorted(regions)', 'in regions'),
    ),
    "free_always_counted": changed("6.1", ("0 if longest >= wanted else slots - reserved", "slots - reserved")),
    "free_runs_added_up": changed(
        "6.1", ("0 if longest >= wanted else", "0 if slots - reserved >= wanted else")
    ),
    "short_runs_counted": changed(
        "6.1", ("longest, end = 0, 0", "runs, end = [], 0"), ("longest = max(longest, start - end)",
                                                              "runs.append(start - end)"),
        ("longest = max(longest, slots - end)", "runs.append(slots - end)"),
        ("0 if longest >= wanted else slots - reserved", "sum(run for run in runs if run < wanted)"),
    ),
    "longest_run_alone": changed("6.1", ("else slots - reserved", "else longest")),
    "reserved_called_used": changed("6.1", ("return used, reserved - used,", "return reserved, reserved - used,")),
    "lengths_added_up": changed("6.1", ("sum(-length % page_size for length in lengths)", "-sum(lengths) % page_size")),
    "given_in_percent": changed("6.1", ("(prompt + (output + 1) / 2) / reserved",
                                        "100 * (prompt + (output + 1) / 2) / reserved")),
    "exact_fit_refused": changed("6.1", ("longest >= wanted", "longest > wanted")),
    "regions_not_sorted": changed("6.1", ("in sorted(regions)", "in regions")),
    "run_at_the_end_forgotten": changed("6.1", ("    longest = max(longest, slots - end)\n", "")),
    "run_at_the_end_forgotten__nor_added": changed(
        "6.1",
        ("    longest = max(longest, slots - end)\n", ""),
        ("longest, end = 0, 0", "longest, end, free = 0, 0, 0"),
        ("        longest = max(longest, start - end)\n",
         "        longest = max(longest, start - end)\n        free += start - end\n"),
        ("else slots - reserved", "else free"),
    ),
    "run_at_the_start_forgotten": changed(
        "6.1", ("longest, end = 0, 0", "longest, end = 0, min((r[0] for r in regions), default=0)")
    ),
    "reserved_counted_whole": changed("6.1", ("return used, reserved - used,", "return used, reserved,")),
    "remainder_counted": changed("6.1", ("-length % page_size", "length % page_size")),
    "full_page_counted_empty": changed("6.1", ("-length % page_size", "page_size - length % page_size")),
    "pages_rounded_down": changed("6.1", ("-length % page_size", "length // page_size * page_size - length")),
    "pages_rounded_down__int": changed(
        "6.1", ("sum(-length % page_size for length in lengths)",
                "sum(max(0, int(length / page_size) * page_size - length) for length in lengths)")
    ),
    "final_length_taken": changed("6.1", ("(prompt + (output + 1) / 2) / reserved", "(prompt + output) / reserved")),
    "prompt_forgotten": changed("6.1", ("(prompt + (output + 1) / 2) / reserved", "(output + 1) / 2 / reserved")),
    "half_a_token_short": changed("6.1", ("(output + 1) / 2", "output / 2")),
    "half_a_token_short__before_each_step": changed(
        "6.1", ("(prompt + (output + 1) / 2) / reserved",
                "sum(prompt + step for step in range(output)) / output / reserved")
    ),
    "half_a_token_dropped": changed("6.1", ("(output + 1) / 2", "(output + 1) // 2")),
    "regions_not_sorted__by_size": changed(
        "6.1", ("in sorted(regions)", "in sorted(regions, key=lambda region: region[1])")
    ),
}


UNUSUAL = {
    "slot by slot": """# Exercise 6.1 · What a contiguous layout wastes
def layout_waste(regions, slots, wanted):
    state = ["free"] * slots
    for start, size, length in regions:
        for slot in range(start, start + size):
            state[slot] = "used" if slot < start + length else "internal"
    runs = "".join("." if s == "free" else "x" for s in state).split("x")
    fits = max(map(len, runs)) >= wanted
    return state.count("used"), state.count("internal"), 0 if fits else state.count("free")

def paged_waste(lengths, page_size):
    return sum(math.ceil(n / page_size) * page_size - n for n in lengths)

def mean_use(prompt, output, reserved):
    shares = [(prompt + k) / reserved for k in range(1, output + 1)]
    return sum(shares) / len(shares)
""",
    "with a torch mask": """# Exercise 6.1 · What a contiguous layout wastes
def layout_waste(regions, slots, wanted):
    taken = torch.zeros(slots + 1, dtype=torch.bool)
    taken[slots] = True
    used = internal = 0
    for start, size, length in regions:
        taken[start:start + size] = True
        used, internal = used + length, internal + size - length
    longest = run = 0
    for slot in taken.tolist():
        run = 0 if slot else run + 1
        longest = max(longest, run)
    free = slots - used - internal
    return [used, internal, free * (longest < wanted)]

def paged_waste(lengths, page_size):
    return int((-torch.tensor(lengths) % page_size).sum())

def mean_use(prompt, output, reserved):
    return torch.arange(prompt + 1, prompt + output + 1).double().mean().item() / reserved
""",
    "sentinels": changed(
        "6.1",
        ("longest, end = 0, 0\n    for start, size, _ in sorted(regions):", "longest, end = 0, 0\n"
         "    for start, size, _ in sorted([*regions, (slots, 0, 0)]):"),
        ("    longest = max(longest, slots - end)\n", ""),
    ),
}


WRONG["result_rounded"] = rounded("6.1", "mean_use", 2)
