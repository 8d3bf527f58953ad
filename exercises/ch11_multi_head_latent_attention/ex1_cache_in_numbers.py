"""Exercise 11.1: what a token leaves in a cache of heads or of latents, on one GPU and on several."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract


def heads_bytes(layers, key_heads, head_dim, item_bytes, ranks):
    heads_here = max(1, key_heads // ranks)
    return 2 * layers * heads_here * head_dim * item_bytes


def latent_bytes(layers, latent_dim, rope_dim, item_bytes, ranks):
    row = latent_dim + rope_dim
    return layers * row * item_bytes


def even_ranks(key_heads, head_dim, latent_dim, rope_dim):
    for ranks in range(1, key_heads + 1):
        if key_heads % ranks == 0 and 2 * key_heads // ranks * head_dim <= latent_dim + rope_dim:
            return ranks
    return None


def cache_cases(draw):
    layers, item_bytes = draw.integer(3, 90), draw.choice((1, 4))
    return [
        Case("DeepSeek-V3's heads, all of them, 16 bits", (61, 128, 128, 2, 1), "heads_token_bytes"),
        Case("Llama-3-70B on one GPU", (80, 8, 128, 2, 1), "heads_token_bytes"),
        Case("Llama-3-70B on 8 GPUs", (80, 8, 128, 2, 8), "heads_token_bytes"),
        Case("Llama-3-70B on 16 GPUs: two ranks for each head", (80, 8, 128, 2, 16), "heads_token_bytes"),
        Case(f"12 KV heads on 3, {layers} layers", (layers, 12, 80, item_bytes, 3), "heads_token_bytes"),
        Case("DeepSeek-V3's latents, 16 bits", (61, 512, 64, 2, 1), "latent_token_bytes"),
        Case("DeepSeek-V3's latents on 8 GPUs, 16 bits", (61, 512, 64, 2, 8), "latent_token_bytes"),
        Case(f"256 + 32, {layers} layers", (layers, 256, 32, item_bytes, 2), "latent_token_bytes"),
        Case("8 KV heads against 512 + 64", (8, 128, 512, 64), "ranks_until_even"),
        Case("128 KV heads against 512 + 64", (128, 128, 512, 64), "ranks_until_even"),
        Case("12 KV heads: 5 does not divide them", (12, 64, 256, 64), "ranks_until_even"),
        Case("one KV head is enough", (1, 128, 512, 64), "ranks_until_even"),
        Case("as many bytes on both sides", (6, 64, 320, 64), "ranks_until_even"),
        Case("even one head is more", (4, 256, 256, 64), "ranks_until_even"),
    ]


DIVIDED = "max(1, key_heads // ranks)"
SIZE = "2 * layers * heads_here * head_dim * item_bytes"
NO_HEAD = (
    "With more ranks than heads, a rank was given no head, or a part of one. A head cannot be divided: then each rank "
    "keeps a copy of one."
)
LATENT_SHARED = (
    "The row, or a part of it, was divided among the ranks. Every head needs all of it, so every rank keeps the whole "
    "row, however many ranks there are."
)
FITS = "key_heads % ranks == 0 and 2 * key_heads // ranks * head_dim <= latent_dim + rope_dim"
HEADS = (
    *edits("Only keys or only values are counted. Both are cached: multiply by 2.", values_forgotten=(SIZE, SIZE[4:])),
    *edits("`layers` is missing as a factor.", layers_forgotten=("2 * layers *", "2 *")),
    *edits("`item_bytes` is missing: numbers are counted and not bytes.", bytes_forgotten=(" * item_bytes", "")),
    *edits("`head_dim` is missing as a factor.", head_dim_forgotten=(" * head_dim", "")),
    *edits(NO_HEAD, no_head_left=(DIVIDED, "key_heads // ranks"),
        no_head_left__a_part=(f"heads_here = {DIVIDED}", "heads_here = key_heads / ranks")),
    *edits("Every rank is counted with all heads. They are divided among the ranks: each keeps key_heads // ranks.",
        not_divided_among_ranks=(DIVIDED, "key_heads")),
)  # fmt: skip
LATENTS = (
    *edits(LATENT_SHARED, latent_shared_out=("layers * row * item_bytes", "layers * row * item_bytes // ranks")),
    *edits(LATENT_SHARED,
        latent_shared_out__the_latent_alone=("latent_dim + rope_dim", "latent_dim // ranks + rope_dim"),
        latent_shared_out__the_rotary_key=("latent_dim + rope_dim", "latent_dim + rope_dim // ranks"),
        latent_shared_out__as_quotient=("layers * row * item_bytes", "layers * row * item_bytes / ranks")),
    *edits("The rotary key is missing: a row is latent_dim + rope_dim numbers.", rope_forgotten=(" + rope_dim", "")),
    *edits("The row is counted twice. Keys and values are both computed from the latent, so it is stored once.",
        key_and_value_counted=("layers * row", "2 * layers * row"),
        key_and_value_counted__the_latent=("latent_dim + rope_dim", "2 * latent_dim + rope_dim")),
    *edits("`layers` is missing as a factor.", layers_forgotten=("layers * row", "row")),
    *edits("`item_bytes` is missing: numbers are counted and not bytes.", bytes_forgotten=(" * item_bytes", "")),
)  # fmt: skip
RANKS = (
    *edits("Against the row, the heads have half of their numbers. A KV head is 2 · head_dim, its key and its value, "
        "and a row counts once.",
        values_forgotten=("2 * key_heads // ranks", "key_heads // ranks")),
    *edits("The rotary key is a part of the row: latent_dim + rope_dim numbers.", rope_forgotten=(" + rope_dim", "")),
    *edits("Equal bytes count too: the heads then leave at most as much as the latent. Compare with <=.",
        strictly_less=("<=", "<")),
    *edits("The result is a number of ranks that does not divide key_heads, so the heads cannot be divided evenly.",
        uneven_ranks=("key_heads % ranks == 0 and ", ""),
        uneven_ranks__as_a_quotient=(FITS, "2 * key_heads * head_dim <= (latent_dim + rope_dim) * ranks")),
    *edits("The number of ranks may be key_heads itself, with one head on each. Let the loop reach it.",
        last_left_out=("key_heads + 1", "key_heads")),
    *edits("Both sides are treated alike: the latent is divided among the ranks too, or the heads are not. A rank "
        "keeps key_heads // ranks heads, and the whole row.",
        latent_shared_out=("<= latent_dim + rope_dim", "<= (latent_dim + rope_dim) / ranks")),
    *edits("The largest number of ranks was looked for. Try them from 1 upwards, and return the first that fits.",
        largest_number=("range(1, key_heads + 1)", "range(key_heads, 0, -1)")),
    *edits("When no number of ranks is enough, the result is None.",
        none_forgotten=("return None", "return key_heads")),
    *edits("Only powers of two are tried. Any divisor of key_heads counts: 6 divides 12 as well.",
        powers_of_two=("key_heads % ranks == 0", "key_heads % ranks == 0 and ranks & (ranks - 1) == 0"),
        powers_of_two__not_all_divisors=("key_heads % ranks == 0", "ranks & (ranks - 1) == 0")),
)  # fmt: skip

EXERCISE = Exercise(
    id="11.1",
    title="The cache in numbers",
    entries=("heads_token_bytes", "latent_token_bytes", "ranks_until_even"),
    cases=cache_cases,
    oracle={"heads_token_bytes": heads_bytes, "latent_token_bytes": latent_bytes, "ranks_until_even": even_ranks},
    contracts=(
        Contract(
            lambda draw, *, key_heads, ranks: (draw.integer(2, 90), key_heads, 64, 2, ranks),
            choices={"key_heads": (1, 2, 6, 24), "ranks": (1, 2, 6, 24)},
            says={"ranks": "Either ranks divides key_heads, or key_heads divides ranks"},
            valid=lambda key_heads, ranks: key_heads % ranks == 0 or ranks % key_heads == 0,
            entry="heads_token_bytes",
            most=6,
        ),
        Contract(
            lambda draw, *, key_heads, latent_dim: (key_heads, 64, latent_dim, 32),
            choices={"key_heads": (1, 6, 10, 36, 64), "latent_dim": (64, 96, 224, 500, 2000)},
            says={"key_heads": "Only numbers that divide key_heads are asked for"},
            entry="ranks_until_even",
            most=8,
        ),
    ),
    models=(
        model_of(heads_bytes, HEADS, entry="heads_token_bytes"),
        model_of(latent_bytes, LATENTS, entry="latent_token_bytes"),
        model_of(even_ranks, RANKS, entry="ranks_until_even", none_is_a_result=True),
    ),
    hints=(
        "heads_token_bytes is chapter 07's formula for one token. With 8 heads, how many does a rank keep if there are "
        "8 ranks? And if there are 16?",
        "A row of a latent cache has latent_dim + rope_dim numbers. Keys and values are computed from the same row, so "
        "it is stored once. Does a rank with fewer heads need less of it?",
        "For ranks_until_even try every number from 1 to key_heads that divides key_heads. A rank then keeps "
        "2 * key_heads // ranks * head_dim numbers, which must be at most latent_dim + rope_dim.",
    ),
)
