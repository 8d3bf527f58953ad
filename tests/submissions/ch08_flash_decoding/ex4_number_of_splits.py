"""Wrong answers to exercise 8.4, and unusual right ones."""

from tests.submissions.edits import changed, rounded

PROGRAM = "program_bytes = 2 * -(-context // splits) * head_dim * item_bytes"


CHOICE = "min(range(1, most + 1), key=lambda splits: decode_microseconds(splits, *shape))"


WAVE = 'chip["slots"] // (batch * key_heads)'


WRONG = {
    "values_forgotten__and_launch_forgotten": changed(
        "8.4",
        ("program_bytes = 2 *", "program_bytes ="),
        ('chip["launch_seconds"] + ', ""),
    ),
    "programs_by_query_heads": changed(
        "8.4",
        ("kernel_seconds(batch * key_heads * splits", "kernel_seconds(batch * query_heads * splits"),
    ),
    "powers_of_two_only": changed(
        "8.4", ("range(1, most + 1)", "[2**power for power in range(9) if 2**power <= most]")
    ),
    "values_forgotten": changed("8.4", (PROGRAM, "program_bytes = -(-context // splits) * head_dim * item_bytes")),
    "keys_rounded_down": changed("8.4", (PROGRAM, "program_bytes = 2 * (context // splits) * head_dim * item_bytes")),
    "keys_in_fractions": changed("8.4", (PROGRAM, "program_bytes = 2 * context / splits * head_dim * item_bytes")),
    "in_seconds": changed("8.4", ("return 1e6 * seconds", "return seconds")),
    "partials_cross_once": changed("8.4", ("+ 2 * partial_bytes", "+ partial_bytes")),
    "partials_by_key_heads": changed("8.4", ("batch * query_heads * (head_dim", "batch * key_heads * (head_dim")),
    "log_sum_exp_forgotten": changed("8.4", ("(head_dim + 1) * 4", "head_dim * 4")),
    "partials_in_half_precision": changed("8.4", ("(head_dim + 1) * 4", "(head_dim + 1) * item_bytes")),
    "launch_forgotten": changed("8.4", ('chip["launch_seconds"] + 2', "2")),
    "combine_without_a_split": changed("8.4", ("if splits > 1:", "if splits > 0:")),
    "combine_forgotten": changed(
        "8.4",
        (
            CHOICE,
            "min(range(1, most + 1), key=lambda n: kernel_seconds(\n"
            "        batch * key_heads * n, 2 * -(-context // n) * head_dim * item_bytes, chip))",
        ),
    ),
    "always_one_wave": changed("8.4", (CHOICE, f"max(1, min(most, {WAVE}))")),
    "one_wave_rounded_up": changed("8.4", (CHOICE, 'max(1, min(most, -(-chip["slots"] // (batch * key_heads))))')),
    "as_many_as_allowed": changed("8.4", (CHOICE, "most")),
    "slowest_chosen": changed("8.4", (CHOICE, CHOICE.replace("min(", "max("))),
    "divisors_only": changed(
        "8.4", (CHOICE, CHOICE.replace("range(1, most + 1)", "[n for n in range(1, most + 1) if context % n == 0]"))
    ),
    "one_wave_at_most": changed("8.4", (CHOICE, CHOICE.replace("most + 1", f"max(1, min(most, {WAVE})) + 1"))),
    "first_that_is_nearly_as_good": changed(
        "8.4",
        (
            f"return {CHOICE}",
            "times = [decode_microseconds(n, *shape) for n in range(1, most + 1)]\n"
            "    return next(n for n, time in enumerate(times, 1) if time <= 1.05 * min(times))",
        ),
    ),
    "one_less_than_the_best": changed("8.4", (CHOICE, f"max(1, {CHOICE} - 1)")),
    "not_split_where_nearly_full": changed(
        "8.4", (CHOICE, f'1 if batch * key_heads >= 0.8 * chip["slots"] else {CHOICE}')
    ),
    "slots_of_one_chip": changed(
        "8.4", ("head_dim, item_bytes, chip)\n", "head_dim, item_bytes, dict(chip, slots=132))\n")
    ),
    "bytes_of_all_splits": changed("8.4", (PROGRAM, f"{PROGRAM} * splits")),
    "launch_for_each_split__after_the_first": changed(
        "8.4", ('seconds += chip["launch_seconds"]', 'seconds += (splits - 1) * chip["launch_seconds"]')
    ),
    "partials_at_one_programs_rate": changed(
        "8.4", ('2 * partial_bytes / chip["bandwidth"]', '2 * partial_bytes / chip["program_bandwidth"]')
    ),
    "rounded_to_microseconds": changed("8.4", ("return 1e6 * seconds", "return round(1e6 * seconds)")),
    "kept_result": "CHOSEN = {}\n\n"
    + changed("8.4", (CHOICE, f"CHOSEN.setdefault((batch, query_heads, key_heads, context, item_bytes), {CHOICE})")),
}


LISTED = changed(
    "8.4",
    (
        f"return {CHOICE}",
        "best, least = None, math.inf\n"
        "    for splits in range(most, 0, -1):\n"
        "        seconds = decode_microseconds(splits, *shape)\n"
        "        if seconds < 1.004 * least:\n"
        "            best, least = splits, min(least, seconds)\n"
        "    return best",
    ),
)


UNUSUAL = {
    "any of those as good": LISTED,
    "sorted by time": changed(
        "8.4", (CHOICE, "sorted((decode_microseconds(n, *shape), n) for n in range(1, most + 1))[0][1]")
    ),
    "ceil of a fraction": changed("8.4", ("-(-context // splits)", "math.ceil(context / splits)")),
    "candidates that differ in their longest split": changed(
        "8.4",
        (
            CHOICE,
            "min([n for n in range(1, most + 1) if n == 1 or -(-context // n) != -(-context // (n - 1))],\n"
            "               key=lambda splits: decode_microseconds(splits, *shape))",
        ),
    ),
}


WRONG["result_rounded"] = rounded("8.4", "decode_microseconds", 1)
