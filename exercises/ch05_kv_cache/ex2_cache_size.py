"""Exercise 5.2: how many bytes a cache takes."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.edits import without


def cache_bytes(layers, query_heads, key_heads, head_dim, batch, length, item_bytes):
    rows = 2 * key_heads
    return rows * layers * batch * length * head_dim * item_bytes


def sequences_that_fit(memory_bytes, parameters, layers, query_heads, key_heads, head_dim, length, item_bytes):
    one = cache_bytes(layers, query_heads, key_heads, head_dim, 1, length, item_bytes)
    weights = parameters * item_bytes
    left = memory_bytes - weights
    count = left // one
    return max(0, count)


LLAMA_2_70B = (80, 64, 8, 128)  # layers, query heads, KV heads, head dimension


def size_cases(draw):
    key_heads = draw.choice((2, 4, 8))
    shape = (draw.integer(2, 90), 6 * key_heads, key_heads, draw.choice((64, 80, 96)))
    batch, length, item_bytes = draw.integer(2, 70), draw.integer(100, 9000), draw.choice((1, 4))
    fits, parameters = draw.integer(3, 40), draw.integer(10**8, 10**9)
    exact = parameters * item_bytes + fits * cache_bytes(*shape, 1, length, item_bytes)
    return [
        Case("Llama-2-70B with all 64 heads, one token, float16", (80, 64, 64, 128, 1, 1, 2)),
        Case("Llama-2-70B as released, 4096 tokens, float16", (*LLAMA_2_70B, 1, 4096, 2)),
        Case("Llama-2-70B with all 64 heads, 512 sequences of 2048", (80, 64, 64, 128, 512, 2048, 2)),
        Case("one of everything, one byte an element", (1, 1, 1, 1, 1, 1, 1)),
        Case(
            f"{shape[0]} layers, {shape[1]} and {shape[2]} heads of {shape[3]}, {batch} × {length} tokens, "
            f"{item_bytes} B an element",
            (*shape, batch, length, item_bytes),
        ),
        Case(
            "Llama-3-8B on 80 GB, sequences of 8192",
            (80 * 10**9, 8_030_261_248, 32, 32, 8, 128, 8192, 2),
            entry="sequences_that_fit",
        ),
        Case(
            f"memory for exactly {fits} sequences",
            (exact, parameters, *shape, length, item_bytes),
            entry="sequences_that_fit",
        ),
        Case(
            "the same, less one byte", (exact - 1, parameters, *shape, length, item_bytes), entry="sequences_that_fit"
        ),
        Case("a small model in 1 MB, sequences of 2", (10**6, 20_000, 4, 4, 2, 16, 2, 2), entry="sequences_that_fit"),
        Case(
            "weights alone do not fit: Llama-2-70B on 80 GB",
            (80 * 10**9, 68_976_648_192, *LLAMA_2_70B, 4096, 2),
            entry="sequences_that_fit",
        ),
    ]


SIZE = (
    *edits("Half is missing: a token leaves a key and a value.", keys_only=("2 *", "1 *")),
    *edits("The query heads were counted. Keys and values exist once for each KV head, and queries are not kept. "
        "Llama-2-70B has 64 query heads and 8 KV heads.", query_heads_counted=("* key_heads", "* query_heads")),
    *edits("The number of query heads that share a KV head was counted, query_heads / key_heads. A token leaves a key "
        "and a value for each KV head: key_heads.", group_size_counted=("* key_heads", "* (query_heads // key_heads)")),
    *edits("head_dim is divided by the number of query heads that share a KV head. Sharing makes fewer KV heads; each "
        "is as wide as before.", head_dim_shared_too=("* head_dim", "* (head_dim * key_heads // query_heads)")),
    *edits("The queries were counted as well. A query is used once, in its own step. Only keys and values are needed "
        "again later.", queries_kept=("2 * key_heads", "2 * key_heads + query_heads")),
    *edits("This is the cache of one layer. Every layer has its own keys and values.",
        one_layer=("rows * layers", "rows")),
    *edits("The batch is missing: every sequence has a cache of its own.", one_sequence=("layers * batch", "layers")),
    *edits("These are elements, not bytes. Multiply by item_bytes.",
        elements_not_bytes=("head_dim * item_bytes", "head_dim")),
    *edits("This is the cache of one KV head. Every KV head has keys and values of its own.",
        heads_forgotten=("* key_heads", "")),
    *edits("The length counts twice. A cache holds keys and values, one of each for a token; scores are not kept.",
        length_squared=("* length", "* length * length")),
    *edits("`head_dim` is missing as a factor.", factor_missing__head_dim=("length * head_dim", "length")),
    *edits("`length` is missing as a factor.", factor_missing__length=("batch * length", "batch")),
)  # fmt: skip

WEIGHTS, LEFT, COUNT, RESULT = "parameters * item_bytes", "memory_bytes - weights", "left // one", "max(0, count)"
FIT = (
    *edits("The model's weights lie in the same memory. Take parameters · item_bytes off before you divide.",
        weights_forgotten=(LEFT, "memory_bytes")),
    *edits("The weights were taken off as a number of parameters. Each of them takes item_bytes bytes.",
        weights_in_elements=(WEIGHTS, "parameters")),
    *edits("The weights were counted once for each sequence. All sequences share them: take them off once, then "
        "divide what is left.", weights_for_each_sequence=(LEFT, "memory_bytes", COUNT, "left // (one + weights)")),
    *edits("The parameters are multiplied by the layers. They are those of the whole model already.",
        weights_of_one_layer=(WEIGHTS, "parameters * item_bytes * layers")),
    *edits("A sequence that fits only in part was counted. Divide with `//`.", rounded_up=(COUNT, "-(-left // one)")),
    *edits("This is not a whole number: a part of a sequence has been counted. Divide with `//`.",
        part_of_a_sequence=(COUNT, "left / one")),
    *edits("The last sequence that fits is not counted where it fills the memory to the byte. All of memory_bytes may "
        "be used: compare with <=.", exactly_full=(COUNT, "(left - 1) // one")),
    *edits("Weights that do not fit leave room for no sequence: 0, not a negative number.",
        below_zero=(RESULT, "count"), below_zero__int=(COUNT, "int(left / one)", RESULT, "count"),
        below_zero__positive=(RESULT, "abs(count)"), below_zero__positive_first=(RESULT, "abs(left) // one")),
    *without(SIZE, "one_sequence"),
)  # fmt: skip

CONTRACT = Contract(
    lambda draw, *, key_heads, group, batch, item_bytes: (
        draw.integer(2, 90),
        key_heads * group,
        key_heads,
        64,
        batch,
        draw.integer(100, 9000),
        item_bytes,
    ),
    choices={"key_heads": (1, 3, 8), "group": (1, 2, 8), "batch": (1, 5, 64), "item_bytes": (1, 2, 4)},
    says={"batch": "`batch` sequences"},
    most=5,
)


EXERCISE = Exercise(
    id="5.2",
    title="The size of a cache",
    entries=("cache_bytes", "sequences_that_fit"),
    cases=size_cases,
    contracts=(CONTRACT,),
    models=(
        model_of(cache_bytes, SIZE),
        model_of(sequences_that_fit, FIT, (cache_bytes,), entry="sequences_that_fit"),
    ),
    oracle={"cache_bytes": cache_bytes, "sequences_that_fit": sequences_that_fit},
    hints=(
        "What does each token leave in the cache of every layer? And for which heads?",
        "In one layer a token leaves one key and one value for each KV head, head_dim elements each. The query is "
        "used once and not kept, so query_heads is not in the formula.",
        "`2 * layers * key_heads * head_dim` elements a token, times tokens, times bytes an element.",
        "For the second function: memory_bytes - parameters * item_bytes is left beside the weights. Divide it by one "
        "sequence's cache with `//`, and return 0 if it is negative.",
    ),
)
