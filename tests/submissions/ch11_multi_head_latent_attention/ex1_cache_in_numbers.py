"""Wrong answers to exercise 11.1, and unusual right ones."""

from tests.submissions.edits import changed

ROW = "return layers * (latent_dim + rope_dim) * item_bytes"
DIVIDES = "key_heads % ranks == 0 and "

WRONG = {
    "values_forgotten": changed("11.1", ("return 2 * layers", "return layers")),
    "no_head_left": changed("11.1", ("max(1, key_heads // ranks)", "key_heads // ranks")),
    "not_divided_among_ranks": changed("11.1", ("max(1, key_heads // ranks)", "key_heads")),
    "latent_shared_out": changed("11.1", (ROW, f"{ROW} // ranks")),
    "latent_shared_out__the_latent_alone": changed(
        "11.1", ("(latent_dim + rope_dim)", "(latent_dim // ranks + rope_dim)")
    ),
    "latent_shared_out__the_rotary_key": changed(
        "11.1", ("(latent_dim + rope_dim)", "(latent_dim + rope_dim / ranks)")
    ),
    "latent_shared_out__or_the_heads_are_not": changed("11.1", ("2 * key_heads // ranks *", "2 * key_heads *")),
    "values_forgotten__or_the_row_twice": changed(
        "11.1", ("<= latent_dim + rope_dim", "<= 2 * (latent_dim + rope_dim)")
    ),
    "rope_forgotten": changed("11.1", ("(latent_dim + rope_dim)", "latent_dim")),
    "key_and_value_counted": changed("11.1", (ROW, ROW.replace("layers", "2 * layers"))),
    "bytes_forgotten": changed("11.1", ("(latent_dim + rope_dim) * item_bytes", "(latent_dim + rope_dim)")),
    "strictly_less": changed("11.1", ("<= latent_dim", "< latent_dim")),
    "uneven_ranks": changed("11.1", (DIVIDES, "")),
    "last_left_out": changed("11.1", ("key_heads + 1", "key_heads")),
    "powers_of_two": changed("11.1", (DIVIDES, DIVIDES + "ranks & (ranks - 1) == 0 and ")),
    "powers_of_two__doubled": changed(
        "11.1",
        ("for ranks in range(1, key_heads + 1):", "ranks = 1\n    while ranks <= key_heads:"),
        (f"if {DIVIDES}", "if "),
        ("            return ranks\n", "            return ranks\n        ranks *= 2\n"),
    ),
    "largest_number": changed("11.1", ("range(1, key_heads + 1)", "range(key_heads, 0, -1)")),
    "none_forgotten": changed("11.1", ("return None", "return key_heads")),
    "values_forgotten__and_rope_forgotten": changed(
        "11.1", ("2 * key_heads // ranks", "key_heads // ranks"), ("<= latent_dim + rope_dim", "<= latent_dim")
    ),
}

UNUSUAL = {
    "heads rounded up": changed("11.1", ("max(1, key_heads // ranks)", "-(-key_heads // ranks)")),
    "floats": changed("11.1", ("return 2 * layers", "return 2.0 * layers")),
    "by the heads on a rank": changed(
        "11.1",
        ("for ranks in range(1, key_heads + 1):", "for here in range(key_heads, 0, -1):"),
        (
            "key_heads % ranks == 0 and 2 * key_heads // ranks * head_dim <=",
            "key_heads % here == 0 and 2 * here * head_dim <=",
        ),
        ("return ranks", "return key_heads // here"),
    ),
}
