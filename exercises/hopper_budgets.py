"""Exercises 9.2 to 9.4: registers, shared memory and cycles of one multiprocessor, shared out on paper."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake

REGISTERS = 65_536  # of a multiprocessor
GROUP_THREADS = 128
SHARED_BYTES = 232_448 - 1024  # what a program may use, less a kilobyte for barriers


def _only(entry_arguments, function):
    """A fingerprint for one of several functions, told apart by how many arguments they take."""
    return lambda *args: function(*args) if len(args) == entry_arguments else None


# ------------------------------------------------------------------------------------------------ 9.2 the registers


def starting_oracle(groups, *, limit=248, step=8):
    return min(limit, REGISTERS // (GROUP_THREADS * groups) // step * step)


def legal_oracle(registers, *, step=8, least=24, most=256, pool=None):
    pool = len(registers) * starting_oracle(len(registers)) if pool is None else pool(registers)
    return all(count % step == 0 and least <= count <= most for count in registers) and sum(registers) <= pool


def live_oracle(key_rows, head_dim, item_bytes):
    return key_rows * (4 + item_bytes) // 8 + head_dim * 4 // 8


def consumer_oracle(consumers, producer, *, most=256, step=8):
    left = (consumers + 1) * starting_oracle(consumers + 1) - producer
    return min(most, left // consumers // step * step)


def register_cases(draw):
    groups, head_dim = draw.integer(5, 9), draw.choice((80, 96, 192))
    loose = 8 * draw.integer(4, 10)
    start, legal, live, share = (
        "starting_registers",
        "is_legal",
        "live_registers",
        "registers_of_a_consumer",
    )
    return [
        Case("3 groups", (3,), start),
        Case("4 groups", (4,), start),
        Case("5 groups: 102.4", (5,), start),
        Case("2 groups: more than a thread may have", (2,), start),
        Case(f"{groups} groups", (groups,), start),
        Case("240, 240, 24: what this chapter's kernel asks for", ([240, 240, 24],), legal),
        Case("160, 160, 160, 32", ([160, 160, 160, 32],), legal),
        Case("240, 240, 32: 512, which the chip has and the launch did not take", ([240, 240, 32],), legal),
        Case("248, 232, 24: as many in all, in other shares", ([248, 232, 24],), legal),
        Case("256, 224, 24: the most that a thread can name", ([256, 224, 24],), legal),
        Case("240, 240, 16: too few for a group", ([240, 240, 16],), legal),
        Case("236, 236, 24: no multiples of 8", ([236, 236, 24],), legal),
        Case("168, 168, 168: nothing given away", ([168, 168, 168],), legal),
        Case("264, 208, 24: more than a thread can name", ([264, 208, 24],), legal),
        Case("240, 240, 240: what three consumers would like", ([240, 240, 240],), legal),
        Case(f"{loose}, {loose}, {loose}: some left over", ([loose, loose, loose],), legal),
        Case("128 keys, head dimension 128, 16 bit", (128, 128, 2), live),
        Case("64 keys, head dimension 256, 16 bit", (64, 256, 2), live),
        Case("128 keys, head dimension 64, 8 bit", (128, 64, 1), live),
        Case(f"128 keys, head dimension {head_dim}, 16 bit", (128, head_dim, 2), live),
        Case("2 consumers, the producer keeps 24", (2, 24), share),
        Case("2 consumers, the producer keeps 32", (2, 32), share),
        Case("2 consumers, the producer keeps 40", (2, 40), share),
        Case("3 consumers, the producer keeps 32", (3, 32), share),
        Case("3 consumers, the producer keeps 24", (3, 24), share),
        Case("1 consumer, the producer keeps 24: more than a thread can name", (1, 24), share),
    ]


def _legal(slip):
    """A fingerprint of `is_legal`: the one function that takes a list."""
    return lambda *args: slip(args[0]) if len(args) == 1 and isinstance(args[0], list) else None


def _starting(slip):
    return lambda *args: slip(args[0]) if len(args) == 1 and isinstance(args[0], int) else None


REGISTER_SHARES = Exercise(
    id="9.2",
    title="Sharing out the registers",
    entries=("starting_registers", "is_legal", "live_registers", "registers_of_a_consumer"),
    cases=register_cases,
    oracle={
        "starting_registers": starting_oracle,
        "is_legal": legal_oracle,
        "live_registers": live_oracle,
        "registers_of_a_consumer": consumer_oracle,
    },
    hints=(
        "A group has 128 threads, so g groups with r registers each take 128 · g · r of 65,536. Round r down to a "
        "multiple of 8, and cap it at 248.",
        "What groups may share out later is what the launch took: groups · starting_registers(groups) registers for "
        "each of 128 threads. For 3 groups that is 3 · 168 = 504, not 512.",
        "64 rows over 128 threads: each thread holds half a row's worth of columns. Scores: key_rows / 2 registers. "
        "Weights: key_rows · item_bytes / 8. Accumulator: head_dim / 2.",
        "registers_of_a_consumer: (consumers + 1) · starting_registers(consumers + 1), less the producer's, divided by "
        "consumers, down to a multiple of 8, at most 256.",
    ),
    mistakes=(
        Mistake(
            "no_multiple_of_eight",
            "The registers at the start are not rounded down to a multiple of 8, the unit in which they are handed "
            "out.",
            result=_starting(lambda groups: min(248, REGISTERS // (GROUP_THREADS * groups))),
        ),
        Mistake(
            "more_than_a_thread_may_have",
            "With two groups there would be 256 registers for each thread at the start, and a kernel is compiled for "
            "255 at most: the multiple of 8 below that is 248.",
            result=_starting(lambda groups: starting_oracle(groups, limit=256)),
        ),
        Mistake(
            "warps_for_groups",
            "You counted 32 threads for each group: that is a warp. A warp group has four warps, 128 threads.",
            result=_starting(lambda groups: min(248, REGISTERS // (32 * groups) // 8 * 8)),
        ),
        Mistake(
            "pool_of_the_chip",
            "The sum is compared with all that a multiprocessor has, 65,536 / 128 = 512. Groups can only share out "
            "what the launch took: 3 groups began with 3 · 168 = 504. A request for more waits for ever.",
            result=_legal(lambda registers: legal_oracle(registers, pool=lambda r: 512)),
        ),
        Mistake(
            "multiples_of_eight_forgotten",
            "A number that is no multiple of 8 was taken for legal. `setmaxnreg` takes multiples of 8 only.",
            result=_legal(lambda registers: legal_oracle(registers, step=1)),
        ),
        Mistake(
            "least_registers_forgotten",
            "Fewer than 24 registers were taken for legal. `setmaxnreg` takes 24 to 256.",
            result=_legal(lambda registers: legal_oracle(registers, least=0)),
        ),
        Mistake(
            "most_registers_forgotten",
            "More than 256 registers were taken for legal. `setmaxnreg` takes 24 to 256.",
            result=_legal(lambda registers: legal_oracle(registers, most=10**6)),
        ),
        Mistake(
            "sum_must_be_equal",
            "A split that leaves registers over was taken for illegal. Groups may ask for less than there is.",
            result=_legal(
                lambda registers: (
                    legal_oracle(registers) and sum(registers) == len(registers) * starting_oracle(len(registers))
                )
            ),
        ),
        Mistake(
            "sum_forgotten",
            "Each number is legal by itself, but together they may be more than the launch took. Compare their sum "
            "with groups · starting_registers(groups).",
            result=_legal(lambda registers: legal_oracle(registers, pool=lambda r: 10**6)),
        ),
        Mistake(
            "weights_forgotten",
            "The weights are missing. With the overlap they are alive together with the next block's scores: key_rows "
            "· item_bytes / 8 registers more.",
            result=_only(3, lambda keys, dim, item: keys // 2 + dim // 2),
        ),
        Mistake(
            "weights_in_float32",
            "The weights were counted with 4 bytes. They are cast to the inputs' type before the second product.",
            result=_only(3, lambda keys, dim, item: keys + dim // 2),
        ),
        Mistake(
            "accumulator_in_item_bytes",
            "The accumulator was counted in the inputs' type. It is float32, whatever the inputs are.",
            result=_only(3, lambda keys, dim, item: keys * (4 + item) // 8 + dim * item // 8),
        ),
        Mistake(
            "bytes_for_registers",
            "You counted bytes. A register holds four of them.",
            result=_only(3, lambda keys, dim, item: 4 * live_oracle(keys, dim, item)),
        ),
        Mistake(
            "rows_of_the_tile",
            "You spread the 64 rows of a group over 64 threads, or took 128 rows for 128 threads: a register too many "
            "for each. A group's 64 rows are held by 128 threads.",
            result=_only(3, lambda keys, dim, item: 2 * live_oracle(keys, dim, item)),
        ),
        Mistake(
            "producer_not_counted",
            "The producer's group is missing from the pool: with two consumers three groups start, and bring 3 · 168.",
            result=_only(
                2,
                lambda consumers, producer: min(
                    256, (consumers * starting_oracle(consumers) - producer) // consumers // 8 * 8
                ),
            ),
        ),
        Mistake(
            "share_not_capped",
            "One consumer was given more registers than a thread can name: 256 is the most.",
            result=_only(2, lambda consumers, producer: consumer_oracle(consumers, producer, most=10**6)),
        ),
        Mistake(
            "share_no_multiple_of_eight",
            "What a consumer gets is not rounded down to a multiple of 8. `setmaxnreg` takes multiples of 8 only.",
            result=_only(2, lambda consumers, producer: consumer_oracle(consumers, producer, step=1)),
        ),
        Mistake(
            "shared_pool_of_the_chip",
            "You shared out all 512 registers (for each of 128 threads) that a multiprocessor has. The launch took "
            "only (consumers + 1) · starting_registers(consumers + 1).",
            result=_only(2, lambda consumers, producer: min(256, (512 - producer) // consumers // 8 * 8)),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------- 9.3 227 kilobytes


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
    return _only(6, slip)


def _choose(**slips):
    return _only(4, lambda *args: choose_oracle(*args, **slips))


ARRANGEMENT = Exercise(
    id="9.3",
    title="227 kilobytes",
    entries=("shared_memory", "choose_arrangement"),
    cases=arrangement_cases,
    oracle={"shared_memory": shared_oracle, "choose_arrangement": choose_oracle},
    hints=(
        "What lies there: for each consumer and query buffer a tile of 64 queries, for each stage a tile of keys and "
        "one of values. All have rows of head_dim · item_bytes bytes.",
        "shared_memory: (64 · consumers · query_buffers + 2 · stages · key_rows) · head_dim · item_bytes.",
        "choose_arrangement: three loops from the best down, key_rows in (256, 128, 64) outside, then query_buffers "
        "in (2, 1), then stages in (4, 3, 2); return the first that fits.",
        "Registers decide about key_rows alone: key_rows · (4 + item_bytes) / 8 + head_dim / 2, and 24 more, must not "
        "pass `registers`.",
    ),
    mistakes=(
        Mistake(
            "values_forgotten",
            "Only one tile a stage was counted. A stage holds a tile of keys and a tile of values.",
            result=_shared(
                lambda dim, item, consumers, keys, stages, buffers: (
                    (64 * consumers * buffers + stages * keys) * dim * item
                )
            ),
        ),
        Mistake(
            "one_query_tile",
            "One tile of 64 queries was counted, and each consumer has its own.",
            result=_shared(
                lambda dim, item, consumers, keys, stages, buffers: (64 * buffers + 2 * stages * keys) * dim * item
            ),
        ),
        Mistake(
            "elements_for_bytes",
            "You counted elements. Each has item_bytes bytes.",
            result=_shared(lambda dim, item, *rest: shared_oracle(dim, 1, *rest)),
        ),
        Mistake(
            "query_buffers_forgotten",
            "The queries were counted once, whatever their number of buffers. With two, the next tile's queries "
            "arrive while this one's are used.",
            result=_shared(
                lambda dim, item, consumers, keys, stages, buffers: (64 * consumers + 2 * stages * keys) * dim * item
            ),
        ),
        Mistake(
            "output_counted",
            "A tile for the output was counted. The output leaves through its queries' buffer, which nobody reads any "
            "more.",
            result=_shared(
                lambda dim, item, consumers, keys, stages, buffers: (
                    (64 * consumers * (buffers + 1) + 2 * stages * keys) * dim * item
                )
            ),
        ),
        Mistake(
            "registers_ignored",
            "Shared memory is right, but the registers were not asked: the tile's scores, weights and accumulator "
            "must leave 24 of a consumer's registers free.",
            result=_choose(spare=-(10**6)),
        ),
        Mistake(
            "no_registers_spared",
            "Scores, weights and accumulator fill the registers to the last one. Row maxima, sums, addresses and "
            "operands need some too: leave 24.",
            result=_choose(spare=0),
        ),
        Mistake(
            "stages_before_query_buffers",
            "More stages were bought with the second query buffer. Two query buffers come before more than two stages.",
            result=_only(4, lambda *args: _stages_first(*args)),
        ),
        Mistake(
            "more_than_four_stages",
            "More than four stages were chosen. They would fit, and bring nothing: four blocks in flight hide any "
            "copy.",
            result=_choose(most_stages=64),
        ),
        Mistake(
            "second_query_buffer_never_taken",
            "One query buffer was chosen where two fit.",
            result=_choose(query_buffers=(1,)),
        ),
        Mistake(
            "second_query_buffer_insisted_on",
            "Where two query buffers do not fit, one is enough: the next tile's queries then arrive after this tile's "
            "output has left. Before you take fewer keys, try one query buffer.",
            result=_choose(query_buffers=(2,)),
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


# ------------------------------------------------------------------------------------------- 9.4 two units, one tile


def cycles_oracle(query_rows, key_rows, head_dim, flops_per_cycle, exps_per_cycle):
    products = 4 * query_rows * key_rows * head_dim / flops_per_cycle
    return products, query_rows * key_rows / exps_per_cycle


def share_oracle(head_dim, flops_per_cycle, exps_per_cycle, overlapped):
    products, exponentials = cycles_oracle(1, 1, head_dim, flops_per_cycle, exps_per_cycle)
    return products / (max(products, exponentials) if overlapped else products + exponentials)


def balanced_oracle(flops_per_cycle, exps_per_cycle):
    return flops_per_cycle / (4 * exps_per_cycle)


def cycle_cases(draw):
    rows, keys, dim = 64 * draw.integer(1, 4), draw.choice((64, 128, 176)), draw.choice((80, 96, 192, 512))
    flops, exps = draw.choice((1024, 2048, 6000)), draw.choice((16, 32, 24))
    cycles, share, balanced = "tile_cycles", "share_of_peak", "balanced_head_dim"
    return [
        Case("128 × 128, head dimension 128, Hopper", (128, 128, 128, 4096, 16), cycles),
        Case("128 × 128, head dimension 64, Hopper", (128, 128, 64, 4096, 16), cycles),
        Case("64 × 128, head dimension 128, FP8", (64, 128, 128, 8192, 16), cycles),
        Case(f"{rows} × {keys}, head dimension {dim}", (rows, keys, dim, flops, exps), cycles),
        Case("head dimension 128, in turn", (128, 4096, 16, False), share),
        Case("head dimension 128, at once", (128, 4096, 16, True), share),
        Case("head dimension 64, in turn", (64, 4096, 16, False), share),
        Case("head dimension 64, at once", (64, 4096, 16, True), share),
        Case("head dimension 64, FP8, at once: the exponentials limit", (64, 8192, 16, True), share),
        Case(f"head dimension {dim}, in turn", (dim, flops, exps, False), share),
        Case("head dimension 32, at once", (32, flops, exps, True), share),
        Case("Hopper, 16 bit", (4096, 16), balanced),
        Case("Blackwell, 16 bit", (8192, 16), balanced),
        Case("another chip", (flops, exps), balanced),
    ]


def _share(slip):
    def result(head_dim, flops_per_cycle, exps_per_cycle, overlapped):
        products, exponentials = cycles_oracle(1, 1, head_dim, flops_per_cycle, exps_per_cycle)
        return slip(products, exponentials, overlapped)

    return _only(4, result)


CYCLES = Exercise(
    id="9.4",
    title="Products against exponentials",
    entries=("tile_cycles", "share_of_peak", "balanced_head_dim"),
    cases=cycle_cases,
    oracle={"tile_cycles": cycles_oracle, "share_of_peak": share_oracle, "balanced_head_dim": balanced_oracle},
    hints=(
        "A tile takes two products, Q Kᵀ and P V, each 2 · query_rows · key_rows · head_dim FLOPs, and one "
        "exponential for each score.",
        "In turn, the time is the sum of both; at once, the longer of the two. The share of the peak is the products' "
        "time divided by that time. The tile's rows and keys cancel.",
        "Equal times: 4 · head_dim / flops_per_cycle = 1 / exps_per_cycle.",
    ),
    mistakes=(
        Mistake(
            "one_product",
            "Half of the FLOPs are missing: there are two products, Q Kᵀ and P V, and each multiply-add is two FLOPs. "
            "That makes 4 · head_dim for each score, in tile_cycles and in the balance.",
            result=(
                _only(5, lambda m, n, d, f, e: (2 * m * n * d / f, m * n / e)),
                _only(2, lambda f, e: f / (2 * e)),
            ),
        ),
        Mistake(
            "exponentials_of_the_output",
            "You counted exponentials of the output, query_rows · head_dim. Each score has one: query_rows · key_rows.",
            result=_only(5, lambda m, n, d, f, e: (4 * m * n * d / f, m * d / e)),
        ),
        Mistake(
            "exponential_for_every_product",
            "You counted head_dim exponentials for each score. The products run over head_dim; the exponential is "
            "taken once, of their sum.",
            result=_only(5, lambda m, n, d, f, e: (4 * m * n * d / f, m * n * d / e)),
        ),
        Mistake(
            "at_once_added",
            "What happens at once is not added: the time is that of the longer one.",
            result=_share(lambda products, exponentials, overlapped: products / (products + exponentials)),
        ),
        Mistake(
            "shorter_of_the_two",
            "At once, the time is that of the longer of the two, not of the shorter.",
            result=_share(
                lambda products, exponentials, overlapped: (
                    products / (min(products, exponentials) if overlapped else products + exponentials)
                )
            ),
        ),
        Mistake(
            "always_hidden",
            "At once, the exponentials are hidden only as long as they take less time than the products. Where they "
            "take more, the matrix units wait for them.",
            result=_share(
                lambda products, exponentials, overlapped: 1.0 if overlapped else products / (products + exponentials)
            ),
        ),
        Mistake(
            "longer_where_in_turn",
            "In turn, both times add up; the longer of the two counts only where they run at once.",
            result=_share(lambda products, exponentials, overlapped: products / max(products, exponentials)),
        ),
        Mistake(
            "share_of_the_exponentials",
            "That is the exponentials' share of the time. The peak is that of the matrix units: divide the products' "
            "time.",
            result=_share(
                lambda products, exponentials, overlapped: (
                    exponentials / (max(products, exponentials) if overlapped else products + exponentials)
                )
            ),
        ),
        Mistake(
            "balance_upside_down",
            "The balance is upside down: more FLOPs in a cycle make the products shorter, and it takes a larger head "
            "dimension to keep up with the exponentials.",
            result=_only(2, lambda f, e: 4 * e / f),
        ),
    ),
)
