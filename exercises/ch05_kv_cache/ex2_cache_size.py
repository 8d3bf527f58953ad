"""Exercise 5.2: how many bytes a cache takes."""

from __future__ import annotations

import math
from typing import NamedTuple

from course_lib.checker import Case, Exercise, Slip


def cache_bytes_oracle(layers, query_heads, key_heads, head_dim, batch, length, item_bytes):
    return 2 * layers * key_heads * head_dim * batch * length * item_bytes


def sequences_oracle(memory_bytes, parameters, layers, query_heads, key_heads, head_dim, length, item_bytes):
    left = memory_bytes - parameters * item_bytes
    return max(0, left // cache_bytes_oracle(layers, query_heads, key_heads, head_dim, 1, length, item_bytes))


LLAMA_2_70B = (80, 64, 8, 128)  # layers, query heads, KV heads, head dimension


def size_cases(draw):
    key_heads = draw.choice((2, 4, 8))
    shape = (draw.integer(2, 90), 6 * key_heads, key_heads, draw.choice((64, 80, 96)))
    batch, length, item_bytes = draw.integer(2, 70), draw.integer(100, 9000), draw.choice((1, 2, 4))
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
        Case(
            "weights alone do not fit: Llama-2-70B on 80 GB",
            (80 * 10**9, 68_976_648_192, *LLAMA_2_70B, 4096, 2),
            entry="sequences_that_fit",
        ),
    ]


class Shape(NamedTuple):
    """The arguments of `cache_bytes`."""

    layers: int
    query_heads: int
    key_heads: int
    head_dim: int
    batch: int
    length: int
    item_bytes: int


def _size(change):
    """A slip in the size, `change(right, shape)`; of the other function it says nothing."""
    return lambda *args: change(cache_bytes_oracle(*args), Shape(*args)) if len(args) == 7 else None


def _fit(slip):
    """A slip in the number of sequences alone: `slip(memory left, weights in elements, one sequence, shape)`."""

    def result(*args):
        if len(args) != 8:
            return None
        memory, parameters, *shape, length, item_bytes = args
        shape = Shape(*shape, 1, length, item_bytes)
        return slip(memory - parameters * item_bytes, parameters, cache_bytes_oracle(*shape), shape)

    return result


EXERCISE = Exercise(
    id="5.2",
    title="The size of a cache",
    entries=("cache_bytes", "sequences_that_fit"),
    cases=size_cases,
    oracle={"cache_bytes": cache_bytes_oracle, "sequences_that_fit": sequences_oracle},
    hints=(
        "What does each token leave in the cache of every layer? And for which heads?",
        "In one layer a token leaves one key and one value for each KV head, head_dim elements each. The query is "
        "used once and not kept, so query_heads is not in the formula.",
        "`2 * layers * key_heads * head_dim` elements a token, times tokens, times bytes an element.",
        "For the second function: memory_bytes - parameters * item_bytes is left beside the weights. Divide it by one "
        "sequence's cache with `//`, and return 0 if it is negative.",
    ),
    slips=(
        Slip(
            "keys_only",
            "Half is missing: a token leaves a key and a value.",
            formula=_size(lambda right, shape: right // 2),
        ),
        Slip(
            "query_heads_counted",
            "The query heads were counted. Keys and values exist once for each KV head, and queries are not kept. "
            "Llama-2-70B has 64 query heads and 8 KV heads.",
            formula=(
                _size(lambda right, shape: right // shape.key_heads * shape.query_heads),
                _fit(lambda left, _, one, shape: max(0, left) // (one // shape.key_heads * shape.query_heads)),
            ),
        ),
        Slip(
            "group_size_counted",
            "The number of query heads that share a KV head was counted, query_heads / key_heads. A token leaves a "
            "key and a value for each KV head: key_heads.",
            formula=_size(lambda right, shape: right // shape.key_heads * (shape.query_heads // shape.key_heads)),
        ),
        Slip(
            "queries_kept",
            "The queries were counted as well. A query is used once, in its own step. Only keys and values are needed "
            "again later.",
            formula=_size(
                lambda right, shape: right // (2 * shape.key_heads) * (shape.query_heads + 2 * shape.key_heads)
            ),
        ),
        Slip(
            "one_layer",
            "This is the cache of one layer. Every layer has its own keys and values.",
            formula=_size(lambda right, shape: right // shape.layers),
        ),
        Slip(
            "one_sequence",
            "The batch is missing: every sequence has a cache of its own.",
            formula=_size(lambda right, shape: right // shape.batch),
        ),
        Slip(
            "elements_not_bytes",
            "These are elements, not bytes. Multiply by item_bytes.",
            formula=_size(lambda right, shape: right // shape.item_bytes),
        ),
        Slip(
            "length_squared",
            "The length counts twice. A cache holds keys and values, one of each for a token; scores are not kept.",
            formula=_size(lambda right, shape: right * shape.length),
        ),
        Slip(
            "weights_forgotten",
            "The model's weights lie in the same memory. Take parameters · item_bytes off before you divide.",
            formula=_fit(lambda left, parameters, one, shape: (left + parameters * shape.item_bytes) // one),
        ),
        Slip(
            "weights_in_elements",
            "The weights were taken off as a number of parameters. Each of them takes item_bytes bytes.",
            formula=_fit(
                lambda left, parameters, one, shape: max(0, left + parameters * (shape.item_bytes - 1)) // one
            ),
        ),
        Slip(
            "rounded_up",
            "A sequence that fits only in part was counted. Divide with `//`.",
            formula=_fit(lambda left, parameters, one, shape: max(0, -(-left // one))),
        ),
        Slip(
            "part_of_a_sequence",
            "This is not a whole number: a part of a sequence has been counted. Divide with `//`.",
            formula=tuple(
                _fit(lambda left, parameters, one, shape, least=least: max(least, left / one))
                for least in (0, -math.inf)
            ),
        ),
        Slip(
            "weights_for_each_sequence",
            "The weights were counted once for each sequence. All sequences share them: take them off once, then "
            "divide what is left.",
            formula=_fit(
                lambda left, parameters, one, shape: (
                    (left + parameters * shape.item_bytes) // (parameters * shape.item_bytes + one)
                )
            ),
        ),
        Slip(
            "exactly_full",
            "The last sequence that fits is not counted where it fills the memory to the byte. All of memory_bytes may "
            "be used: compare with <=.",
            formula=_fit(lambda left, parameters, one, shape: max(0, (left - 1) // one)),
        ),
        Slip(
            "below_zero",
            "Weights that do not fit leave room for no sequence: 0, not a negative number.",
            formula=(
                _fit(lambda left, parameters, one, shape: left // one),
                _fit(lambda left, parameters, one, shape: int(left / one)),
            ),
        ),
    ),
)
