"""Exercise 5.2: how many bytes a cache takes."""

from __future__ import annotations

from course_lib.checker import Case, Exercise
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.formulas import factors_missing, product


def cache_bytes_oracle(layers, query_heads, key_heads, head_dim, batch, length, item_bytes):
    return 2 * layers * key_heads * head_dim * batch * length * item_bytes


def sequences_oracle(memory_bytes, parameters, layers, query_heads, key_heads, head_dim, length, item_bytes):
    left = memory_bytes - parameters * item_bytes
    return max(0, left // cache_bytes_oracle(layers, query_heads, key_heads, head_dim, 1, length, item_bytes))


LLAMA_2_70B = (80, 64, 8, 128)  # layers, query heads, KV heads, head dimension


def size_cases(draw):
    key_heads = draw.choice((2, 4, 8))
    shape = (draw.integer(2, 90), 6 * key_heads, key_heads, draw.choice((64, 80, 96)))
    batch, length, item_bytes = draw.integer(2, 70), draw.integer(100, 9000), draw.choice((1, 4))
    fits, parameters = draw.integer(3, 40), draw.integer(10**8, 10**9)
    exact = parameters * item_bytes + fits * cache_bytes_oracle(*shape, 1, length, item_bytes)
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


def size(s: Slips, layers, query_heads, key_heads, head_dim, batch, length, item_bytes):
    """Bytes of the caches as they are counted with these slips."""
    heads = key_heads
    if s("query_heads_counted"):
        heads = query_heads
    if s("group_size_counted"):
        heads = query_heads // key_heads
    rows = heads if s("keys_only") else 2 * heads
    if s("queries_kept"):
        rows += query_heads
    if s("heads_forgotten"):
        rows //= heads
    if s("length_squared"):
        length *= length
    if s("head_dim_shared_too"):
        head_dim = head_dim * key_heads // query_heads
    layers = 1 if s("one_layer") else layers
    batch = 1 if s("one_sequence") else batch
    item_bytes = 1 if s("elements_not_bytes") else item_bytes
    return rows * layers * batch * item_bytes * product(s, head_dim=head_dim, length=length)


def fitting(s: Slips, memory_bytes, parameters, layers, query_heads, key_heads, head_dim, length, item_bytes):
    """The sequences that fit as they are counted with these slips."""
    one = size(s, layers, query_heads, key_heads, head_dim, 1, length, item_bytes)
    weights = parameters * (1 if s("weights_in_elements") else item_bytes)
    if s("weights_of_one_layer"):
        weights *= layers
    left = memory_bytes - (0 if s("weights_forgotten", "weights_for_each_sequence") else weights)
    if s("weights_for_each_sequence"):
        one += weights
    count = left // one
    if s("exactly_full"):
        count = (left - 1) // one
    if s("rounded_up"):
        count = -(-left // one)
    if s("part_of_a_sequence"):
        count = left / one
    if s("below_zero__int"):
        count = int(left / one)
    if s("below_zero__positive", "below_zero__positive_first"):
        return abs(left) // one if s("below_zero__positive_first") else abs(count)
    return count if s("below_zero", "below_zero__int") else max(0, count)


SIZE = (
    Slip(
        "keys_only",
        "Half is missing: a token leaves a key and a value.",
    ),
    Slip(
        "query_heads_counted",
        "The query heads were counted. Keys and values exist once for each KV head, and queries are not kept. "
        "Llama-2-70B has 64 query heads and 8 KV heads.",
    ),
    Slip(
        "group_size_counted",
        "The number of query heads that share a KV head was counted, query_heads / key_heads. A token leaves a "
        "key and a value for each KV head: key_heads.",
    ),
    Slip(
        "head_dim_shared_too",
        "head_dim is divided by the number of query heads that share a KV head. Sharing makes fewer KV heads; each is "
        "as wide as before.",
    ),
    Slip(
        "queries_kept",
        "The queries were counted as well. A query is used once, in its own step. Only keys and values are needed "
        "again later.",
    ),
    Slip(
        "one_layer",
        "This is the cache of one layer. Every layer has its own keys and values.",
    ),
    Slip(
        "one_sequence",
        "The batch is missing: every sequence has a cache of its own.",
    ),
    Slip(
        "elements_not_bytes",
        "These are elements, not bytes. Multiply by item_bytes.",
    ),
    Slip("heads_forgotten", "This is the cache of one KV head. Every KV head has keys and values of its own."),
    Slip(
        "length_squared",
        "The length counts twice. A cache holds keys and values, one of each for a token; scores are not kept.",
    ),
    *factors_missing("head_dim", "length"),
)

FIT = (
    Slip(
        "weights_forgotten",
        "The model's weights lie in the same memory. Take parameters · item_bytes off before you divide.",
    ),
    Slip(
        "weights_in_elements",
        "The weights were taken off as a number of parameters. Each of them takes item_bytes bytes.",
    ),
    Slip(
        "weights_for_each_sequence",
        "The weights were counted once for each sequence. All sequences share them: take them off once, then "
        "divide what is left.",
    ),
    Slip(
        "weights_of_one_layer",
        "The parameters are multiplied by the layers. They are those of the whole model already.",
    ),
    Slip(
        "rounded_up",
        "A sequence that fits only in part was counted. Divide with `//`.",
    ),
    Slip(
        "part_of_a_sequence",
        "This is not a whole number: a part of a sequence has been counted. Divide with `//`.",
    ),
    Slip(
        "exactly_full",
        "The last sequence that fits is not counted where it fills the memory to the byte. All of memory_bytes may "
        "be used: compare with <=.",
    ),
    *(
        Slip(
            name,
            "Weights that do not fit leave room for no sequence: 0, not a negative number.",
        )
        for name in ("below_zero", "below_zero__int", "below_zero__positive", "below_zero__positive_first")
    ),
    # Here there is one sequence.
    *(slip for slip in SIZE if slip.id != "one_sequence"),
)

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
    models=(Model(size, SIZE), Model(fitting, FIT, entry="sequences_that_fit")),
    oracle={"cache_bytes": cache_bytes_oracle, "sequences_that_fit": sequences_oracle},
    hints=(
        "What does each token leave in the cache of every layer? And for which heads?",
        "In one layer a token leaves one key and one value for each KV head, head_dim elements each. The query is "
        "used once and not kept, so query_heads is not in the formula.",
        "`2 * layers * key_heads * head_dim` elements a token, times tokens, times bytes an element.",
        "For the second function: memory_bytes - parameters * item_bytes is left beside the weights. Divide it by one "
        "sequence's cache with `//`, and return 0 if it is negative.",
    ),
)
