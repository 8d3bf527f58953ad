"""Exercise 4.2: tiles within a budget."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Slip

TILE_CHOICES = (16, 32, 64, 128, 256)
REGISTERS_FOR_TILES = 128


def shared_memory_oracle(query_rows, key_rows, head_dim, item_bytes, stages):
    return (query_rows + 2 * stages * key_rows) * head_dim * item_bytes


def traffic_oracle(heads, query_length, key_length, head_dim, item_bytes, query_rows):
    query_tiles = -(-query_length // query_rows)
    return heads * (2 * query_length + 2 * query_tiles * key_length) * head_dim * item_bytes


def _tiles(
    head_dim,
    item_bytes,
    budget,
    threads,
    *,
    fits=lambda need, budget: need <= budget,
    registers=REGISTERS_FOR_TILES,
    order=lambda pair: pair,
    stages=2,
    scores=True,
):
    pairs = [
        (m, n)
        for m in TILE_CHOICES
        for n in TILE_CHOICES
        if fits((m + 2 * stages * n) * head_dim * item_bytes, budget)
        and m * (head_dim + n * scores) <= registers * threads
    ]
    return max(pairs, key=order, default=None)


def choose_tiles_oracle(head_dim, item_bytes, shared_memory_bytes, threads):
    return _tiles(head_dim, item_bytes, shared_memory_bytes, threads)


def budget_cases(draw):
    lengths = [draw.integer(2, 5000) for _ in "qk"]
    exact = shared_memory_oracle(64, 64, 128, 2, 2)
    return [
        Case("128 × 64 tiles, head dimension 64, float16, 3 stages", (128, 64, 64, 2, 3), "shared_memory"),
        Case("64 × 64 tiles, head dimension 128, float32, one stage", (64, 64, 128, 4, 1), "shared_memory"),
        Case("128 × 128 tiles, head dimension 128, float16, 2 stages", (128, 128, 128, 2, 2), "shared_memory"),
        Case(
            "32 heads, 8192 × 8192, head dimension 128, float16, 128 queries a tile",
            (32, 8192, 8192, 128, 2, 128),
            "traffic",
        ),
        Case("one query, 1000 keys", (8, 1, 1000, 64, 2, 64), "traffic"),
        Case(f"{lengths[0]} queries, {lengths[1]} keys: a tile that is not full", (3, *lengths, 80, 4, 64), "traffic"),
        Case("H100: 227 KiB, head dimension 128, float16, 256 threads", (128, 2, 227 << 10, 256), "choose_tiles"),
        Case("H100, head dimension 64, 128 threads", (64, 2, 227 << 10, 128), "choose_tiles"),
        Case("T4: 64 KiB, head dimension 128, float16, 128 threads", (128, 2, 64 << 10, 128), "choose_tiles"),
        Case("RTX 4090: 99 KiB, head dimension 256, float16, 256 threads", (256, 2, 99 << 10, 256), "choose_tiles"),
        Case("a budget that 64 × 64 tiles fill to the last byte", (128, 2, exact, 128), "choose_tiles"),
        Case("the same, less one byte", (128, 2, exact - 1, 128), "choose_tiles"),
        Case(
            "48 KiB, head dimension 16, 64 threads: the largest beside the smallest",
            (16, 2, 48 << 10, 64),
            "choose_tiles",
        ),
        Case("16 KiB, head dimension 16, 256 threads: shared memory decides", (16, 2, 16 << 10, 256), "choose_tiles"),
        Case("99 KiB, head dimension 320, 512 threads", (320, 2, 99 << 10, 512), "choose_tiles"),
        Case("head dimension 65, one column more than registers for 128 × 64", (65, 2, 227 << 10, 128), "choose_tiles"),
        Case("16 KiB and float32 rows of 256: nothing fits", (256, 4, 16 << 10, 128), "choose_tiles"),
    ]


def _for_arguments(count, function):
    """A slip's formula for one of the exercise's functions, told apart by how many arguments it takes."""
    return lambda *args: function(*args) if len(args) == count else NotImplemented


EXERCISE = Exercise(
    id="4.2",
    title="Tiles within a budget",
    entries=("shared_memory", "traffic", "choose_tiles"),
    cases=budget_cases,
    oracle={"shared_memory": shared_memory_oracle, "traffic": traffic_oracle, "choose_tiles": choose_tiles_oracle},
    hints=(
        "A tile of r rows takes r · head_dim · item_bytes. Which tiles lie in shared memory, and how many of "
        "each? There is one tile of queries, because it is loaded once. Of keys and of values there are "
        "`stages` tiles each, in use or on their way.",
        "For the traffic, first count the programs of a head, rounding up. Each program reads its own queries, "
        "writes its own output, and reads all keys and all values.",
        "`choose_tiles` can try all 25 pairs. Keep those with shared_memory(...) <= shared_memory_bytes and "
        "query_rows · (head_dim + key_rows) <= 128 · threads.",
        "Python compares tuples from the left. So max(pairs) prefers the largest query_rows, and then the "
        "largest key_rows. max(pairs, default=None) covers the case that no pair is left.",
    ),
    slips=(
        Slip(
            "value_tile_forgotten",
            "Only one tile is counted for each stage. Each stage has two: one of keys and one of values.",
            formula=_for_arguments(5, lambda m, n, d, size, stages: (m + stages * n) * d * size),
        ),
        Slip(
            "stages_forgotten",
            "The stages are missing. With s stages, shared memory holds s tiles of keys and s of values.",
            formula=_for_arguments(5, lambda m, n, d, size, stages: (m + 2 * n) * d * size),
        ),
        Slip(
            "stages_on_queries",
            "The tile of queries is multiplied by the stages too. But there is only one, because it is loaded once.",
            formula=_for_arguments(5, lambda m, n, d, size, stages: stages * (m + 2 * n) * d * size),
        ),
        Slip(
            "keys_read_once",
            "Keys and values are counted once. Every program of a head reads them all: multiply by the "
            "number of query tiles.",
            formula=_for_arguments(6, lambda h, q, k, d, size, m: h * (2 * q + 2 * k) * d * size),
        ),
        Slip(
            "output_forgotten",
            "The output is missing: it is written once, as many bytes as the queries.",
            formula=_for_arguments(6, lambda h, q, k, d, size, m: h * (q + 2 * -(-q // m) * k) * d * size),
        ),
        Slip(
            "tiles_rounded_down",
            "The number of query tiles was rounded down. Round up: a last tile that is not full reads all keys too.",
            formula=_for_arguments(6, lambda h, q, k, d, size, m: h * (2 * q + 2 * (q // m) * k) * d * size),
        ),
        Slip(
            "padding_counted",
            "The empty rows of the last tile of queries are counted too. Queries and output have only query_length "
            "rows.",
            formula=_for_arguments(6, lambda h, q, k, d, size, m: traffic_oracle(h, -(-q // m) * m, k, d, size, m)),
        ),
        Slip(
            "heads_forgotten",
            "The heads are missing: each has queries, keys, values and an output of its own.",
            formula=_for_arguments(6, lambda h, q, k, d, size, m: traffic_oracle(1, q, k, d, size, m)),
        ),
        Slip(
            "registers_ignored",
            "The registers are ignored. query_rows · (head_dim + key_rows) float32 values must fit into 128 "
            "registers of each thread.",
            formula=_for_arguments(
                4, lambda d, size, budget, threads: _tiles(d, size, budget, threads, registers=1 << 30)
            ),
        ),
        Slip(
            "one_stage_counted",
            "The tiles are chosen for one stage of keys and values. Two stages must fit.",
            formula=_for_arguments(4, lambda *args: _tiles(*args, stages=1)),
        ),
        Slip(
            "accumulator_alone",
            "Only the accumulator is counted in the registers. The scores are there too: query_rows · key_rows values.",
            formula=_for_arguments(4, lambda *args: _tiles(*args, scores=False)),
        ),
        Slip(
            "registers_in_bytes",
            "The registers are counted as bytes. Each holds a float32 value of 4 bytes: compare numbers of values.",
            formula=_for_arguments(
                4, lambda d, size, budget, threads: _tiles(d, size, budget, threads, registers=128 / 4)
            ),
        ),
        Slip(
            "registers_strictly",
            "Tiles that take exactly 128 registers of each thread were refused, but they fit. Compare with <=.",
            formula=_for_arguments(
                4, lambda d, size, budget, threads: _tiles(d, size, budget, threads, registers=128 - 0.5 / threads)
            ),
        ),
        Slip(
            "largest_product",
            "The pair with the largest product of query_rows and key_rows is chosen. Bytes depend on query_rows alone: "
            "take the largest of those first.",
            formula=tuple(
                _for_arguments(
                    4, lambda *args, way=way: _tiles(*args, order=lambda pair: (pair[0] * pair[1], *way(pair)))
                )
                for way in (lambda pair: pair, lambda pair: pair[::-1])  # of equals that with the most queries, or keys
            ),
        ),
        Slip(
            "key_rows_first",
            "The largest key_rows is preferred. Bytes depend on query_rows alone: take the largest of those, "
            "and the largest key_rows that goes with it.",
            formula=_for_arguments(4, lambda *args: _tiles(*args, order=lambda pair: pair[::-1])),
        ),
        Slip(
            "fits_strictly",
            "Tiles that fill the budget to the last byte were refused, but they fit. Compare with <=.",
            formula=_for_arguments(4, lambda *args: _tiles(*args, fits=lambda need, budget: need < budget)),
        ),
    ),
)
