"""Exercise 9.3: what fits into 227 kilobytes of shared memory."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from exercises.ch09_attention_on_hopper.ex2_register_shares import live_registers

SHARED_BYTES = 232_448 - 1024  # what a program may use, less a kilobyte for barriers


def shared_memory(head_dim, item_bytes, consumers, key_rows, stages, query_buffers):
    return (64 * consumers * query_buffers + 2 * stages * key_rows) * head_dim * item_bytes


def choose_arrangement(head_dim, item_bytes, consumers, registers):
    for key_rows in (256, 128, 64):
        if live_registers(key_rows, head_dim, item_bytes) + 24 > registers:
            continue
        for query_buffers in (2, 1):
            for stages in (4, 3, 2):
                size = shared_memory(head_dim, item_bytes, consumers, key_rows, stages, query_buffers)
                if size <= SHARED_BYTES:
                    return key_rows, stages, query_buffers
    return 0, 0, 0


QUERIES, QUERY_BUFFERS = "64 * consumers * query_buffers", "in (2, 1)"
SHARED = (
    *edits(
        "The queries' tiles are missing: 64 rows for each consumer and query buffer.", queries_forgotten=(QUERIES, "0")
    ),
    *edits(
        "Only one tile a stage was counted. A stage holds a tile of keys and a tile of values.",
        values_forgotten=("2 * stages", "stages"),
    ),
    *edits(
        "The tiles of one stage were counted. Each stage has its own keys and values.",
        one_stage=("stages * key_rows", "1 * key_rows"),
    ),
    *edits(
        "One tile of 64 queries was counted, but each consumer has its own.", one_query_tile=("64 * consumers", "64")
    ),
    *edits(
        "The queries were counted once, whatever their number of buffers. With two, the next tile's queries "
        "arrive while this one's are used.",
        query_buffers_forgotten=("consumers * query_buffers", "consumers"),
    ),
    *edits(
        "A consumer's tile of queries was counted with 128 rows. It has 64.",
        queries_of_128_rows=("64 * consumers", "128 * consumers"),
    ),
    *edits(
        "You counted a tile for the output. It needs none, because it leaves through the buffer of its queries.",
        output_counted=(QUERIES, "64 * consumers * (query_buffers + 1)"),
    ),
    *edits(
        "You counted elements. Each has item_bytes bytes.", elements_for_bytes=("head_dim * item_bytes", "head_dim")
    ),
)
CHOICES = (
    *edits(
        "The smallest key_rows that fits was chosen. Best is the largest: try 256 first.",
        smallest_key_rows_first=("(256, 128, 64)", "(64, 128, 256)"),
    ),
    *edits(
        "Registers are ignored. The tile's scores, weights and accumulator must leave "
        "24 of a consumer's registers free.",
        registers_ignored=("if live_registers(key_rows, head_dim, item_bytes) + 24 > registers", "if False"),
    ),
    *edits(
        "(4 + item_bytes) // 8 is rounded down, to 0, before it is multiplied. Multiply by key_rows first, then "
        "divide.",
        divided_before_the_product=("key_rows * (4 + item_bytes) // 8", "(4 + item_bytes) // 8 * key_rows"),
    ),
    *edits(
        "Scores, weights and accumulator fill all registers. Row maxima, sums, addresses and operands need some "
        "too, so leave 24.",
        no_registers_spared=("item_bytes) + 24", "item_bytes)"),
    ),
    *edits(
        "An arrangement that leaves exactly 24 registers was refused. That is enough: live + 24 may be `registers`.",
        full_registers_refused=("> registers", ">= registers"),
    ),
    *edits(
        "You gave up the second query buffer for more stages. Try two query buffers before one.",
        stages_before_query_buffers=(
            *("query_buffers in (2, 1)", "stages in (4, 3, 2)"),
            *("stages in (4, 3, 2)", "query_buffers in (2, 1)"),
        ),
    ),
    *edits(
        "More than four stages were chosen. They would fit, but gain nothing: four blocks in flight hide any copy.",
        more_than_four_stages=("(4, 3, 2)", "(*range(64, 4, -1), 4, 3, 2)"),
    ),
    *edits(
        "One stage was chosen. Copies and products overlap only with two or more: 2, 3 or 4.",
        one_stage_allowed=("(4, 3, 2)", "(4, 3, 2, 1)"),
    ),
    *edits(
        "You gave up at the first key_rows that needs too many registers. A smaller one needs fewer: go on with it.",
        gives_up_at_registers=("continue", "break"),
    ),
    *edits("One query buffer was chosen where two fit.", second_query_buffer_never_taken=(QUERY_BUFFERS, "in (1,)")),
    *edits(
        "Where two query buffers do not fit, one is enough. Try one query buffer before you take fewer keys.",
        second_query_buffer_insisted_on=(QUERY_BUFFERS, "in (2,)"),
    ),
    *edits(
        "The tiles were given all of the 232,448 bytes. The barriers need room too: take 1,024 off.",
        barriers_forgotten=("SHARED_BYTES", "SHARED_BYTES + 1024"),
    ),
    *edits(
        "Tiles that fill their 231,424 bytes to the last were refused. They fit: compare with <=.",
        full_memory_refused=("<= SHARED_BYTES", "< SHARED_BYTES"),
    ),
    *SHARED,
)
CHOICE = model_of(choose_arrangement, CHOICES, (shared_memory, live_registers), entry="choose_arrangement")


def choice_oracle(head_dim, item_bytes, consumers, registers):
    # Not `choose_arrangement` itself: many of its small changes choose alike.
    return CHOICE.right(head_dim, item_bytes, consumers, registers)


def arrangement_cases(draw):
    shared, choose = EXERCISE.entries
    head_dim, consumers = draw.choice((96, 160, 192)), draw.choice((2, 3))
    return [
        Case("head dimension 128, 2 consumers, 128 keys, 2 stages, 2 query buffers", (128, 2, 2, 128, 2, 2), shared),
        Case("head dimension 64, 3 consumers, 128 keys, 4 stages", (64, 2, 3, 128, 4, 2), shared),
        Case("head dimension 256, 64 keys, 1 query buffer", (256, 2, 2, 64, 2, 1), shared),
        Case("8 bit", (128, 1, 2, 128, 3, 1), shared),
        Case(f"head dimension {head_dim}, {consumers} consumers", (head_dim, 2, consumers, 64, 3, 2), shared),
        Case("head dimension 128, 2 consumers with 240 registers", (128, 2, 2, 240), choose),
        Case("the same with 184: just enough for 128 keys", (128, 2, 2, 184), choose),
        Case("the same with 183: one too few", (128, 2, 2, 183), choose),
        Case("head dimension 64, 3 consumers with 160", (64, 2, 3, 160), choose),
        Case("head dimension 128, 3 consumers with 160: registers are the limit", (128, 2, 3, 160), choose),
        Case("head dimension 256, 2 consumers with 240: one query buffer", (256, 2, 2, 240), choose),
        Case("head dimension 256, 3 consumers with 160: nothing fits", (256, 2, 3, 160), choose),
        Case("head dimension 64, 2 consumers with 240", (64, 2, 2, 240), choose),
        Case("head dimension 48, 3 consumers with 240: 228 KB would be too many", (48, 2, 3, 240), choose),
        Case("head dimension 192, 2 consumers with 240: 227 KB is the limit", (192, 2, 2, 240), choose),
        Case("head dimension 128, 8 bit", (128, 1, 2, 240), choose),
        Case("head dimension 64, 1 consumer with 256: two query buffers", (64, 2, 1, 256), choose),
        Case("head dimension 256, 2 consumers with 144: the accumulator alone is too large", (256, 2, 2, 144), choose),
        Case("an imagined head dimension, 4 consumers: full to the last byte", (113, 1, 4, 248), choose),
        Case("an imagined head dimension: room for the tiles, not for the barriers", (181, 1, 2, 200), choose),
        Case(f"head dimension {head_dim}, {consumers} consumers with 232", (head_dim, 2, consumers, 232), choose),
    ]


EXERCISE = Exercise(
    id="9.3",
    title="227 kilobytes",
    entries=("shared_memory", "choose_arrangement"),
    cases=arrangement_cases,
    models=(model_of(shared_memory, SHARED), CHOICE),
    oracle={"shared_memory": shared_memory, "choose_arrangement": choice_oracle},
    hints=(
        "Shared memory holds a tile of 64 queries for each consumer and query buffer, and for each stage a tile of "
        "keys and one of values. A row is head_dim · item_bytes bytes.",
        "shared_memory: (64 · consumers · query_buffers + 2 · stages · key_rows) · head_dim · item_bytes.",
        "choose_arrangement: three loops from the best down, key_rows in (256, 128, 64) outside, then query_buffers "
        "in (2, 1), then stages in (4, 3, 2); return the first that fits.",
        "Registers limit key_rows only: key_rows · (4 + item_bytes) / 8 + head_dim / 2, plus 24, may be at most "
        "`registers`.",
    ),
)
