"""Exercise 9.3: what fits into 227 kilobytes of shared memory."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Slip
from exercises.ch09_attention_on_hopper.ex2_register_shares import live_oracle
from exercises.topics.formulas import for_arguments

SHARED_BYTES = 232_448 - 1024  # what a program may use, less a kilobyte for barriers


def shared_oracle(head_dim, item_bytes, consumers, key_rows, stages, query_buffers):
    return (64 * consumers * query_buffers + 2 * stages * key_rows) * head_dim * item_bytes


def choose_oracle(
    head_dim,
    item_bytes,
    consumers,
    registers,
    *,
    shared_bytes=SHARED_BYTES,
    spare=24,
    most_stages=4,
    live=live_oracle,
    query_buffers=(2, 1),
    shared=shared_oracle,
):
    for key_rows in (256, 128, 64):
        if live(key_rows, head_dim, item_bytes) + spare > registers:
            continue
        for buffers in query_buffers:
            for stages in range(most_stages, 1, -1):
                if shared(head_dim, item_bytes, consumers, key_rows, stages, buffers) <= shared_bytes:
                    return key_rows, stages, buffers
    return 0, 0, 0


def arrangement_cases(draw):
    shared, choose = "shared_memory", "choose_arrangement"
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
        Case(f"head dimension {head_dim}, {consumers} consumers with 232", (head_dim, 2, consumers, 232), choose),
    ]


def _shared(slip):
    return for_arguments(6, slip)


def _choose(**slips):
    return for_arguments(4, lambda *args: choose_oracle(*args, **slips))


EXERCISE = Exercise(
    id="9.3",
    title="227 kilobytes",
    entries=("shared_memory", "choose_arrangement"),
    cases=arrangement_cases,
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
    slips=(
        Slip(
            "values_forgotten",
            "Only one tile a stage was counted. A stage holds a tile of keys and a tile of values.",
            formula=_shared(
                lambda dim, item, consumers, keys, stages, buffers: (
                    (64 * consumers * buffers + stages * keys) * dim * item
                )
            ),
        ),
        Slip(
            "one_query_tile",
            "One tile of 64 queries was counted, but each consumer has its own.",
            formula=_shared(
                lambda dim, item, consumers, keys, stages, buffers: (64 * buffers + 2 * stages * keys) * dim * item
            ),
        ),
        Slip(
            "elements_for_bytes",
            "You counted elements. Each has item_bytes bytes.",
            formula=_shared(lambda dim, item, *rest: shared_oracle(dim, 1, *rest)),
        ),
        Slip(
            "query_buffers_forgotten",
            "The queries were counted once, whatever their number of buffers. With two, the next tile's queries "
            "arrive while this one's are used.",
            formula=_shared(
                lambda dim, item, consumers, keys, stages, buffers: (64 * consumers + 2 * stages * keys) * dim * item
            ),
        ),
        Slip(
            "output_counted",
            "You counted a tile for the output. It needs none, because it leaves through the buffer of its queries.",
            formula=_shared(
                lambda dim, item, consumers, keys, stages, buffers: (
                    (64 * consumers * (buffers + 1) + 2 * stages * keys) * dim * item
                )
            ),
        ),
        Slip(
            "registers_ignored",
            "Shared memory is right, but registers are ignored. The tile's scores, weights and accumulator must leave "
            "24 of a consumer's registers free.",
            formula=_choose(spare=-(10**6)),
        ),
        Slip(
            "no_registers_spared",
            "Scores, weights and accumulator fill all registers. Row maxima, sums, addresses and operands need some "
            "too, so leave 24.",
            formula=_choose(spare=0),
        ),
        Slip(
            "stages_before_query_buffers",
            "You gave up the second query buffer for more stages. Try two query buffers before one.",
            formula=for_arguments(4, lambda *args: _stages_first(*args)),
        ),
        Slip(
            "more_than_four_stages",
            "More than four stages were chosen. They would fit, but gain nothing: four blocks in flight hide any copy.",
            formula=_choose(most_stages=64),
        ),
        Slip(
            "second_query_buffer_never_taken",
            "One query buffer was chosen where two fit.",
            formula=_choose(query_buffers=(1,)),
        ),
        Slip(
            "second_query_buffer_insisted_on",
            "Where two query buffers do not fit, one is enough. Try one query buffer before you take fewer keys.",
            formula=_choose(query_buffers=(2,)),
        ),
    ),
)


def _stages_first(head_dim, item_bytes, consumers, registers):
    for key_rows in (256, 128, 64):
        if live_oracle(key_rows, head_dim, item_bytes) + 24 > registers:
            continue
        for stages in (4, 3, 2):
            for buffers in (2, 1):
                if shared_oracle(head_dim, item_bytes, consumers, key_rows, stages, buffers) <= SHARED_BYTES:
                    return key_rows, stages, buffers
    return 0, 0, 0
