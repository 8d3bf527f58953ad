"""Exercise 9.3: what fits into 227 kilobytes of shared memory."""

from __future__ import annotations

from course_lib.checker import Case, Exercise
from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.ch09_attention_on_hopper.ex2_register_shares import live_oracle

SHARED_BYTES = 232_448 - 1024  # what a program may use, less a kilobyte for barriers


def shared(s: Slips, head_dim, item_bytes, consumers, key_rows, stages, query_buffers):
    """Bytes of shared memory as they are counted with these slips."""
    tiles = (1 if s("one_query_tile") else consumers) * (1 if s("query_buffers_forgotten") else query_buffers)
    if s("output_counted"):
        tiles += 1 if s("one_query_tile") else consumers
    queries = (128 if s("queries_of_128_rows") else 64) * tiles
    if s("queries_forgotten"):
        queries = 0
    rows = queries + (1 if s("values_forgotten") else 2) * (1 if s("one_stage") else stages) * key_rows
    return rows * head_dim * (1 if s("elements_for_bytes") else item_bytes)


SHARED = (
    Slip("queries_forgotten", "The queries' tiles are missing: 64 rows for each consumer and query buffer."),
    Slip("values_forgotten", "Only one tile a stage was counted. A stage holds a tile of keys and a tile of values."),
    Slip("one_stage", "The tiles of one stage were counted. Each stage has its own keys and values."),
    Slip("one_query_tile", "One tile of 64 queries was counted, but each consumer has its own."),
    Slip(
        "query_buffers_forgotten",
        "The queries were counted once, whatever their number of buffers. With two, the next tile's queries "
        "arrive while this one's are used.",
    ),
    Slip("queries_of_128_rows", "A consumer's tile of queries was counted with 128 rows. It has 64."),
    Slip(
        "output_counted",
        "You counted a tile for the output. It needs none, because it leaves through the buffer of its queries.",
    ),
    Slip("elements_for_bytes", "You counted elements. Each has item_bytes bytes."),
)


def chosen(s: Slips, head_dim, item_bytes, consumers, registers):
    """The arrangement that is chosen with these slips."""

    def fits(key_rows, stages, buffers):
        size = shared(s, head_dim, item_bytes, consumers, key_rows, stages, buffers)
        limit = SHARED_BYTES + (1024 if s("barriers_forgotten") else 0)
        return size < limit if s("full_memory_refused") else size <= limit

    buffers = (1,) if s("second_query_buffer_never_taken") else (2, 1)
    buffers = (2,) if s("second_query_buffer_insisted_on") else buffers
    least = 1 if s("one_stage_allowed") else 2
    stages = range(64 if s("more_than_four_stages") else 4, least - 1, -1)
    for key_rows in (64, 128, 256) if s("smallest_key_rows_first") else (256, 128, 64):
        live = live_oracle(key_rows, head_dim, item_bytes)
        if s("divided_before_the_product"):
            live = (4 + item_bytes) // 8 * key_rows + head_dim // 2
        needed = live + (0 if s("no_registers_spared") else 24)
        if not s("registers_ignored") and (needed >= registers if s("full_registers_refused") else needed > registers):
            if s("gives_up_at_registers"):
                break
            continue
        order = [(count, held) for held in buffers for count in stages]
        if s("stages_before_query_buffers"):
            order = [(count, held) for count in stages for held in buffers]
        found = next((pair for pair in order if fits(key_rows, *pair)), None)
        if found:
            return key_rows, *found
    return 0, 0, 0


CHOSEN = (
    Slip("smallest_key_rows_first", "The smallest key_rows that fits was chosen. Best is the largest: try 256 first."),
    Slip(
        "registers_ignored",
        "Registers are ignored. The tile's scores, weights and accumulator must leave "
        "24 of a consumer's registers free.",
    ),
    Slip(
        "divided_before_the_product",
        "(4 + item_bytes) // 8 is rounded down, to 0, before it is multiplied. Multiply by key_rows first, then "
        "divide.",
    ),
    Slip(
        "no_registers_spared",
        "Scores, weights and accumulator fill all registers. Row maxima, sums, addresses and operands need some "
        "too, so leave 24.",
    ),
    Slip(
        "full_registers_refused",
        "An arrangement that leaves exactly 24 registers was refused. That is enough: live + 24 may be `registers`.",
    ),
    Slip(
        "stages_before_query_buffers",
        "You gave up the second query buffer for more stages. Try two query buffers before one.",
    ),
    Slip(
        "more_than_four_stages",
        "More than four stages were chosen. They would fit, but gain nothing: four blocks in flight hide any copy.",
    ),
    Slip("one_stage_allowed", "One stage was chosen. Copies and products overlap only with two or more: 2, 3 or 4."),
    Slip(
        "gives_up_at_registers",
        "You gave up at the first key_rows that needs too many registers. A smaller one needs fewer: go on with it.",
    ),
    Slip("second_query_buffer_never_taken", "One query buffer was chosen where two fit."),
    Slip(
        "second_query_buffer_insisted_on",
        "Where two query buffers do not fit, one is enough. Try one query buffer before you take fewer keys.",
    ),
    Slip(
        "barriers_forgotten",
        "The tiles were given all of the 232,448 bytes. The barriers need room too: take 1,024 off.",
    ),
    Slip(
        "full_memory_refused",
        "Tiles that fill their 231,424 bytes to the last were refused. They fit: compare with <=.",
    ),
    *SHARED,
)


def shared_oracle(head_dim, item_bytes, consumers, key_rows, stages, query_buffers):
    return (64 * consumers * query_buffers + 2 * stages * key_rows) * head_dim * item_bytes


def choose_oracle(head_dim, item_bytes, consumers, registers):
    return chosen(Slips(), head_dim, item_bytes, consumers, registers)


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
    models=(Model(shared, SHARED), Model(chosen, CHOSEN, entry="choose_arrangement")),
    oracle={"shared_memory": shared_oracle, "choose_arrangement": choose_oracle},
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
