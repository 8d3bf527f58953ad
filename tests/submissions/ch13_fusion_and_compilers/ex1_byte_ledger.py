"""Wrong answers to exercise 13.1, and unusual right ones."""

from tests.submissions.edits import changed

READ = "read = {name for inputs, _ in steps for name in inputs if name not in made}"
WRITTEN = "sum(sizes[name] for name in made if name in kept)"
EAGER_CASTS = "casts = 0 if item_bytes == 4 else 2 * (item_bytes + 4)"
NUMBER = "number = 3 * item_bytes + casts + 8 + 4 + 8 + 2 * item_bytes"
EAGER_NORMS = "norms = 2 * hidden * (tokens * number + item_bytes)"
FUSED_NORMS = "norms = 2 * hidden * (4 * tokens + 1) * item_bytes"

WRONG = {
    "steps_alone": changed(
        "13.1",
        (READ, "read = [name for inputs, _ in steps for name in dict.fromkeys(inputs)]"),
        (WRITTEN, "sum(sizes[name] for name in made)"),
    ),
    "made_and_read": changed("13.1", (" if name not in made}", "}")),
    "all_written": changed("13.1", (WRITTEN, "sum(sizes[name] for name in made)")),
    "last_alone_written": changed("13.1", (WRITTEN, "(sizes[made[-1]] if made[-1] in kept else 0)")),
    "read_for_each_step": changed("13.1", (READ, READ.replace("{", "[").replace("}", "]"))),
    "last_always_written": changed("13.1", (WRITTEN, f"{WRITTEN[:-1]} or name == made[-1])")),
    "others_written": changed("13.1", (WRITTEN, WRITTEN.replace(" in kept", " not in kept"))),
    "first_step_alone_read": changed("13.1", (READ, "read = set(steps[0][0])")),
    "nothing_written": changed("13.1", (f" + {WRITTEN}", "")),
    "one_norm": changed("13.1", (EAGER_NORMS, EAGER_NORMS.replace("2 * ", ""))),
    "one_norm__fused": changed("13.1", (FUSED_NORMS, FUSED_NORMS.replace("= 2 * ", "= "))),
    "weight_forgotten": changed("13.1", ("(4 * tokens + 1)", "4 * tokens")),
    "weight_for_each_token": changed("13.1", ("(tokens * number + item_bytes)", "tokens * (number + item_bytes)")),
    "keys_not_turned": changed("13.1", ("tokens * (query_heads + key_heads)", "tokens * query_heads")),
    "keys_not_turned__values_too": changed(
        "13.1", ("tokens * (query_heads + key_heads)", "tokens * (query_heads + 2 * key_heads)")
    ),
    "table_for_each_head": changed(
        "13.1", ("table = tokens * head_dim", "table = tokens * (query_heads + key_heads) * head_dim")
    ),
    "table_for_each_head__of_k": changed(
        "13.1", ("table = tokens * head_dim", "table = tokens * key_heads * head_dim")
    ),
    "casts_forgotten": changed("13.1", (EAGER_CASTS, "casts = 0")),
    "casts_forgotten__one": changed("13.1", ("else 2 * (item_bytes + 4)", "else item_bytes + 4")),
    "casts_of_float32": changed("13.1", (EAGER_CASTS, "casts = 2 * (item_bytes + 4)")),
    "casts_forgotten__narrow": changed("13.1", ("else 2 * (item_bytes + 4)", "else 4 * item_bytes")),
    "casts_of_float32__as_16": changed("13.1", (EAGER_CASTS, "casts = 12")),
    "casts_of_float32__one": changed("13.1", (EAGER_CASTS, "casts = 8 if item_bytes == 4 else 12")),
    "casts_exchanged": changed("13.1", (EAGER_CASTS, EAGER_CASTS.replace("==", "!="))),
    "all_wide": changed("13.1", (NUMBER, "number = 3 * 4 + casts + 8 + 4 + 8 + 2 * 4")),
    # All in the layer's own dtype, as if the norm were computed in 16 bits.
    "all_narrow": changed("13.1", (NUMBER, "number = 3 * item_bytes + casts + 7 * item_bytes")),
    "float32_short": changed("13.1", ("casts + 8 + 4 + 8", "casts + 8 + 8")),
    "addition_is_free": changed("13.1", ("number = 3 * item_bytes + casts", "number = casts")),
    "rotation_short": changed("13.1", ("10 * turned", "7 * turned")),
    "tables_read_once": changed("13.1", ("4 * table", "2 * table")),
    "swiglu_short": changed("13.1", ("5 * tokens", "4 * tokens")),
    "sum_not_written": changed("13.1", ("(4 * tokens + 1)", "(3 * tokens + 1)")),
    "sum_read_again": changed("13.1", ("(4 * tokens + 1)", "(5 * tokens + 1)")),
    "rotation_long": changed("13.1", ("+ 2 * turned", "+ 3 * turned")),
    "tables_twice": changed("13.1", ("2 * turned + 2 * table", "2 * turned + 4 * table")),
    "swiglu_long": changed("13.1", ("3 * tokens * intermediate", "5 * tokens * intermediate")),
}

UNUSUAL = {
    "two sets, step by step": changed(
        "13.1",
        (
            READ,
            "read = []\n    for place, (inputs, _) in enumerate(steps):\n        for name in inputs:\n"
            "            if name not in read and name not in made[:place]:\n                read.append(name)",
        ),
    ),
    "the fused ledger by kernel_bytes": changed(
        "13.1",
        (
            FUSED_NORMS,
            "n, w = tokens * hidden * item_bytes, hidden * item_bytes\n"
            '    steps = ((("x", "r"), "s"), (("s", "w"), "n"))\n'
            '    norms = 2 * kernel_bytes(steps, {"x": n, "r": n, "s": n, "n": n, "w": w}, ("s", "n"))',
        ),
    ),
    "casts by the dtype's size": changed("13.1", (EAGER_CASTS, "casts = (12, 0)[item_bytes // 4]")),
}
