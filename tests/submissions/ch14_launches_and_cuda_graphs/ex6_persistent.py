"""Wrong answers to exercise 14.6, and unusual right ones."""

from tests.submissions.edits import changed, edited

LOOP = "for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):"
TILES = "tiles = tl.cdiv(rows, BLOCK_ROWS) * across"
PLACE = "tile // across, tile % across, rows"
STRIDE_LAUNCH = "stride_kernel[(programs,)](x, output, *x.shape, BLOCK_ROWS=16, BLOCK_COLUMNS=32)"
COUNTER_LAUNCH = "counter_kernel[(programs,)](x, output, counter, *x.shape, BLOCK_ROWS=16, BLOCK_COLUMNS=32)"
DRAWN = "tile = tl.atomic_add(counter_pointer, 1)"
WHILE = "while tile < tiles:"
NEXT = f"        {DRAWN}\n"
FIRST = f"    {DRAWN}\n    {WHILE}\n"
ALL_TILES = "-(-x.shape[0] // 16) * -(-x.shape[1] // 32)"
SWAPPED = (
    "seen = tl.load(counter_pointer)",
    "tile = tl.atomic_cas(counter_pointer, seen, seen + 1)",
    "while tile != seen:",
    "    seen = tile",
    "    tile = tl.atomic_cas(counter_pointer, seen, seen + 1)",
)


def drawn_by(*lines):
    """The course's answer with these lines in the place of `tile = tl.atomic_add(counter_pointer, 1)`."""
    body = "".join(f"    {line}\n" for line in lines)
    return changed(
        "14.6",
        (DRAWN, "tile = take(counter_pointer)"),
        ("@triton.jit\ndef counter_kernel",
         f"@triton.jit\ndef take(counter_pointer):\n{body}    return tile\n\n\n@triton.jit\ndef counter_kernel"),
    )


WRONG = {
    "not_every_nth": changed(
        "14.6",
        (LOOP, "share = tl.cdiv(tiles, tl.num_programs(0))\n    first = tl.program_id(0) * share\n"
               "    for tile in range(first, tl.minimum(first + share, tiles)):"),
    ),
    "not_every_nth__the_first_does_all": changed(
        "14.6", (LOOP, "for tile in range(0 if tl.program_id(0) == 0 else tiles, tiles):")
    ),
    "fixed_size": changed(
        "14.6", (LOOP, "for turn in range(64):\n        tile = tl.program_id(0) + turn * tl.num_programs(0)")
    ),
    "one_tile_each": changed("14.6", (LOOP, "for tile in range(tl.program_id(0), tl.program_id(0) + 1):")),
    # The grid's size and the number of tiles taken for each other: the step leads beyond the last tile at once.
    "one_tile_each__step_of_all_tiles": changed("14.6", (LOOP, "for tile in range(tl.program_id(0), tiles, tiles):")),
    "one_tile_each__from_the_counter": changed("14.6", (WHILE, "if tile < tiles:"), (NEXT, "")),
    "remainder_dropped": changed(
        "14.6",
        (LOOP, "share = tiles // tl.num_programs(0)\n"
               "    for tile in range(tl.program_id(0) * share, (tl.program_id(0) + 1) * share):"),
    ),
    "remainder_dropped__rounds": changed(
        "14.6",
        (LOOP, "for turn in range(tiles // tl.num_programs(0)):\n"
               "        tile = tl.program_id(0) + turn * tl.num_programs(0)"),
    ),
    "first_tile_missing": changed("14.6", (LOOP, LOOP.replace("tl.program_id(0)", "tl.program_id(0) + 1"))),
    "wrong_step": changed("14.6", (LOOP, LOOP.replace("num_programs(0)", "num_programs(0) + 1"))),
    "wrong_step__two_rounds": changed(
        "14.6",
        (LOOP, "for turn in range(2):\n        tile = tl.program_id(0) + turn * tl.num_programs(0)"),
    ),
    "one_tile_each__two_draws": changed("14.6", (WHILE, "if tile < tiles:")),
    "last_tile_missing": changed("14.6", (LOOP, LOOP.replace("tiles,", "tiles - 1,"))),
    "last_tile_missing__of_the_counter": changed("14.6", (WHILE, "while tile < tiles - 1:")),
    "rounded_down": changed("14.6", ("tl.cdiv(columns, BLOCK_COLUMNS)", "columns // BLOCK_COLUMNS"),
                            ("tl.cdiv(rows, BLOCK_ROWS)", "(rows // BLOCK_ROWS)"),
                            (PLACE, "tile // tl.maximum(across, 1), tile % tl.maximum(across, 1), rows")),
    "rounded_down__rows": changed("14.6", ("tl.cdiv(rows, BLOCK_ROWS)", "(rows // BLOCK_ROWS)")),
    "rounded_down__numbers": changed("14.6", (TILES, "tiles = rows * columns // (BLOCK_ROWS * BLOCK_COLUMNS)")),
    "one_dimension": changed("14.6", (TILES, "tiles = tl.cdiv(rows, BLOCK_ROWS)")),
    "wrong_place": changed(
        "14.6", (TILES, f"{TILES}\n    down = tl.cdiv(rows, BLOCK_ROWS)"), (PLACE, "tile // down, tile % down, rows")
    ),
    "wrong_place__exchanged": changed("14.6", (PLACE, "tile % across, tile // across, rows")),
    # A workspace that is made once, as an engine does, and never cleared.
    "counter_not_reset": changed("14.6", ("    counter.zero_()\n", "")),
    # Cleared by one program while others already draw: their tiles are computed again.
    "counter_set_in_the_kernel": changed(
        "14.6",
        ("    counter.zero_()\n", ""),
        (f"    {DRAWN}\n    while", f"    if tl.program_id(0) == 0:\n        tl.store(counter_pointer, 0)\n"
                                    f"    {DRAWN}\n    while"),
    ),
    "draw_lost": changed("14.6", (NEXT, ""), (f"{WHILE}\n", f"{WHILE}\n{NEXT}")),
    "draw_lost__every_second": changed(
        "14.6", (f"{WHILE}\n", f"{WHILE}\n        later = tl.atomic_add(counter_pointer, 1)\n")
    ),
    "grows_by_programs": changed("14.6", ("tl.atomic_add(counter_pointer, 1)",
                                          "tl.atomic_add(counter_pointer, tl.num_programs(0))")),
    "counter_without_atomic": drawn_by("tile = tl.load(counter_pointer)", "tl.store(counter_pointer, tile + 1)"),
    # One of the two steps is atomic, and two programs read the same number all the same.
    "counter_without_atomic__the_load_decides": drawn_by(
        "tile = tl.load(counter_pointer)", "tl.atomic_add(counter_pointer, 1)"
    ),
    "counter_without_atomic__exchanged": drawn_by(
        "tile = tl.load(counter_pointer)", "tl.atomic_xchg(counter_pointer, tile + 1)"
    ),
    "counter_without_atomic__after_the_first_tile": changed(
        "14.6", (NEXT, "        tile = tl.load(counter_pointer)\n        tl.store(counter_pointer, tile + 1)\n")
    ),
    "counter_without_atomic__ahead": changed(
        "14.6",
        (f"{WHILE}\n", f"{WHILE}\n        later = tl.load(counter_pointer)\n"
                       "        tl.atomic_add(counter_pointer, 1)\n"),
        (NEXT, "        tile = later\n"),
    ),
    "counter_without_atomic__the_load_is_atomic": drawn_by(
        "tile = tl.atomic_add(counter_pointer, 0)", "tl.store(counter_pointer, tile + 1)"
    ),
    "counter_without_atomic__read_afterwards": drawn_by(
        "tl.atomic_add(counter_pointer, 1)", "tile = tl.load(counter_pointer) - 1"
    ),
    "counter_without_atomic__for_the_first_tile": changed(
        "14.6", (FIRST, "    tile = tl.load(counter_pointer)\n    tl.store(counter_pointer, tile + 1)\n"
                       f"    {WHILE}\n"),
    ),
    "blocks_exchanged": changed("14.6", ("tl.cdiv(columns, BLOCK_COLUMNS)", "tl.cdiv(columns, BLOCK_ROWS)"),
                                ("tl.cdiv(rows, BLOCK_ROWS)", "tl.cdiv(rows, BLOCK_COLUMNS)")),
    "blocks_exchanged__down": changed("14.6", ("tl.cdiv(rows, BLOCK_ROWS)", "tl.cdiv(rows, BLOCK_COLUMNS)")),
    "not_every_nth__tiles_that_do_not_exist": changed(
        "14.6", ("tl.cdiv(columns, BLOCK_COLUMNS)", "tl.cdiv(columns, BLOCK_ROWS)")
    ),
    "draw_lost__begins_at_1": changed("14.6", ("counter.zero_()", "counter.fill_(1)")),
    "draw_lost__adds_1": changed("14.6", (DRAWN, f"{DRAWN} + 1")),
    "place_in_elements": changed("14.6", (PLACE, "tile // across * BLOCK_ROWS, tile % across * BLOCK_COLUMNS, rows")),
    "place_in_elements__row": changed("14.6", (PLACE, "tile // across * BLOCK_ROWS, tile % across, rows")),
    "place_in_elements__column": changed("14.6", (PLACE, "tile // across, tile % across * BLOCK_COLUMNS, rows")),
    "sizes_exchanged": changed("14.6", (f"{PLACE}, columns", f"{PLACE[:-4]}columns, rows")),
    "tiles_computed_again": changed("14.6", (LOOP, "for tile in range(tl.program_id(0), tiles):")),
    # Begins with its own number, and the counter begins at 0 all the same.
    "tiles_computed_again__own_number_first": changed(
        "14.6", (f"    {DRAWN}\n    while", "    tile = tl.program_id(0)\n    while")
    ),
    "more_programs_than_allowed": changed("14.6", ("stride_kernel[(programs,)]", f"stride_kernel[({ALL_TILES},)]")),
    "launch_for_each_tile": changed(
        "14.6",
        (LOOP, "for tile in range(first, tl.minimum(first + 1, tiles)):"),
        ("x_pointer, output_pointer, rows, columns, BLOCK_ROWS: tl.constexpr",
         "x_pointer, output_pointer, rows, columns, first, BLOCK_ROWS: tl.constexpr"),
        (STRIDE_LAUNCH, f"for tile in range({ALL_TILES}):\n        "
                        "stride_kernel[(1,)](x, output, *x.shape, tile, BLOCK_ROWS=16, BLOCK_COLUMNS=32)"),
    ),
    # The numbers of the counter decide nothing.
    "draw_ignored": changed(
        "14.6",
        (NEXT, "        tile += tl.num_programs(0)\n"),
        (DRAWN, "tl.atomic_add(counter_pointer, 1)\n    tile = tl.program_id(0)"),
    ),
    "draw_ignored__before_each_tile": changed(
        "14.6", (NEXT, ""), (FIRST, f"    {LOOP}\n        tl.atomic_add(counter_pointer, 1)\n")
    ),
    "draw_ignored__it_adds_nothing": changed(
        "14.6",
        (NEXT, "        tile += tl.num_programs(0)\n"),
        (DRAWN, "tile = tl.program_id(0) + tl.atomic_add(counter_pointer, 0)"),
    ),
    "draw_ignored__by_one_program": changed(
        "14.6",
        ("counter_kernel[(programs,)]", "counter_kernel[(1,)]"),
        (NEXT, ""),
        (FIRST, "    for tile in range(tiles):\n        tl.atomic_add(counter_pointer, 1)\n"),
    ),
    # Only some of a program's tiles are drawn.
    "goes_on_without_the_counter": changed("14.6", (NEXT, "        tile += tl.num_programs(0)\n")),
    "goes_on_without_the_counter__with_its_neighbours": changed(
        "14.6",
        (NEXT, ""),
        (FIRST, "    share = tl.cdiv(tiles, tl.num_programs(0))\n"
                "    first = share * tl.atomic_add(counter_pointer, 1)\n"
                "    for tile in range(first, tl.minimum(first + share, tiles)):\n"),
    ),
    "goes_on_without_the_counter__for_the_first_half": changed(
        "14.6",
        (NEXT, f"        tile = tiles // 2 + {DRAWN[7:]}\n"),
        (FIRST, "    for tile in range(tl.program_id(0), tiles // 2, tl.num_programs(0)):\n"
                "        silu_tile(x_pointer, output_pointer, tile // across, tile % across, rows, columns, "
                f"BLOCK_ROWS, BLOCK_COLUMNS)\n    tile = tiles // 2 + {DRAWN[7:]}\n    {WHILE}\n"),
    ),
    "tile_before_the_first": changed("14.6", (DRAWN, f"{DRAWN} - 1")),
    "tile_before_the_first__by_a_counter_at_minus_1": changed("14.6", ("counter.zero_()", "counter.fill_(-1)")),
    "host_waits": changed(
        "14.6", ("    counter.zero_()\n", "    counter = counter - int(counter)\n")
    ),
    "host_waits__and_the_kernel_subtracts": changed(
        "14.6",
        ("    counter.zero_()\n", "    base = counter.item()\n"),
        ("output, counter, *x.shape", "output, counter, base, *x.shape"),
        ("x_pointer, output_pointer, counter_pointer, rows", "x_pointer, output_pointer, counter_pointer, base, rows"),
        (DRAWN, f"{DRAWN} - base"),
    ),
    "forbidden_operation": changed("14.6", ("    counter.zero_()\n", "    counter = counter - counter\n")),
    "tiles_of_another_size": changed("14.6", (STRIDE_LAUNCH, STRIDE_LAUNCH.replace("16", "32", 1))),
    "tiles_of_another_size__exchanged": changed(
        "14.6", (COUNTER_LAUNCH, COUNTER_LAUNCH.replace("ROWS=16, BLOCK_COLUMNS=32", "ROWS=32, BLOCK_COLUMNS=16"))
    ),
    "tiles_of_another_size__smaller": changed("14.6", (STRIDE_LAUNCH, STRIDE_LAUNCH.replace("ROWS=16", "ROWS=8"))),
    "tiles_of_another_size__half_as_wide": changed(
        "14.6", (COUNTER_LAUNCH, COUNTER_LAUNCH.replace("COLUMNS=32", "COLUMNS=16"))
    ),
    "rounded_down__and_divided_by_down": changed(
        "14.6", ("tl.cdiv(columns, BLOCK_COLUMNS)", "columns // BLOCK_COLUMNS"),
        (TILES, f"{TILES}\n    down = tl.cdiv(rows, BLOCK_ROWS)"), (PLACE, "tile // down, tile % down, rows"),
    ),
    "wrong_step__of_a_block": changed("14.6", (LOOP, LOOP.replace("tl.num_programs(0)", "BLOCK_ROWS"))),
    "no_kernel_launched": changed("14.6", (STRIDE_LAUNCH, "output = x / (1 + torch.exp(-x))")),
    "counter_not_reset__and_last_missing": changed(
        "14.6", ("    counter.zero_()\n", ""), (WHILE, "while tile < tiles - 1:")
    ),
    "one_tile_each__and_rounded_down": changed(
        "14.6",
        (LOOP, "for tile in range(tl.program_id(0), tl.minimum(tl.program_id(0) + 1, tiles)):"),
        ("tl.cdiv(rows, BLOCK_ROWS)", "(rows // BLOCK_ROWS)"),
    ),
}

UNUSUAL = {
    "column by column": changed(
        "14.6", (TILES, f"{TILES}\n    down = tl.cdiv(rows, BLOCK_ROWS)"), (PLACE, "tile % down, tile // down, rows")
    ),
    "rounds, the last of which may reach beyond the tiles": changed(
        "14.6",
        (LOOP, "for turn in range(tl.cdiv(tiles, tl.num_programs(0))):\n"
               "        tile = turn * tl.num_programs(0) + tl.program_id(0)"),
    ),
    "backwards": changed("14.6", (PLACE, "(tiles - 1 - tile) // across, (tiles - 1 - tile) % across, rows")),
    "the own number first, then the counter": changed(
        "14.6",
        (f"    {DRAWN}\n    while", "    tile = tl.program_id(0)\n    while"),
        (NEXT, f"        tile = tl.num_programs(0) + {DRAWN[7:]}\n"),
    ),
    "the own number first, then a counter that begins behind these": changed(
        "14.6",
        ("counter.zero_()", "counter.fill_(programs)"),
        (f"    {DRAWN}\n    while", "    tile = tl.program_id(0)\n    while"),
    ),
    "the next number is drawn before the tile is computed": changed(
        "14.6",
        (f"{WHILE}\n", f"{WHILE}\n        later = tl.atomic_add(counter_pointer, 1)\n"),
        (NEXT, "        tile = later\n"),
    ),
    "by compare and swap": drawn_by(*SWAPPED),
    "by compare and swap, before the tile is computed": edited(
        drawn_by(*SWAPPED),
        (f"{WHILE}\n", f"{WHILE}\n        later = take(counter_pointer)\n"),
        ("        tile = take(counter_pointer)\n", "        tile = later\n"),
    ),
    "the last draw of all stores 0": changed(
        "14.6",
        (NEXT, f"{NEXT}    if tile == tiles + tl.num_programs(0) - 1:\n        tl.store(counter_pointer, 0)\n"),
    ),
    "a load says whether there is another tile": changed(
        "14.6",
        (NEXT, ""),
        (FIRST, f"    while tl.load(counter_pointer) < tiles:\n        {DRAWN}\n"),
    ),
    "as many rounds as there are tiles": changed(
        "14.6",
        (NEXT, ""),
        (FIRST, f"    for turn in range(tiles):\n        {DRAWN}\n        if tile < tiles:\n    "),
    ),
    "a row of tiles for each number": changed(
        "14.6",
        (NEXT, "        row = tl.atomic_add(counter_pointer, 1)\n"),
        (FIRST, "    row = tl.atomic_add(counter_pointer, 1)\n    while row < tiles // across:\n"
                "        for tile in range(row * across, row * across + across):\n    "),
    ),
    "a tile in four strips": changed(
        "14.6",
        ("    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]",
         "    for strip in range(4):\n        silu_strip(x_pointer, output_pointer, 4 * tile_row + strip, tile_column, "
         "rows, columns, BLOCK_ROWS // 4, BLOCK_COLUMNS)\n\n\n@triton.jit\ndef silu_strip(x_pointer, output_pointer, "
         "tile_row, tile_column, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):\n"
         "    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]"),
    ),
    "the last draw of all sets the counter back": changed(
        "14.6",
        (NEXT, f"{NEXT}    if tile == tiles + tl.num_programs(0) - 1:\n        tl.atomic_xchg(counter_pointer, 0)\n"),
    ),
    "set by a product in place": changed("14.6", ("counter.zero_()", "counter *= 0")),
    "two tiles a draw": changed(
        "14.6",
        ("tl.atomic_add(counter_pointer, 1)", "2 * tl.atomic_add(counter_pointer, 1)"),
        ("columns, BLOCK_ROWS, BLOCK_COLUMNS)\n        tile = 2",
         "columns, BLOCK_ROWS, BLOCK_COLUMNS)\n        if tile + 1 < tiles:\n            silu_tile(x_pointer, "
         "output_pointer, (tile + 1) // across, (tile + 1) % across, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)\n"
         "        tile = 2"),
    ),
    "a counter of its own, and no more programs than tiles": changed(
        "14.6",
        ("    counter.zero_()\n", "    counter = torch.zeros(1, dtype=torch.int32, device=x.device)\n"),
        ("[(programs,)]", f"[(min(programs, {ALL_TILES}),)]"),
    ),
    "counts down from the last": changed(
        "14.6",
        ("counter.zero_()", f"counter.fill_({ALL_TILES} - 1)"),
        (WHILE, "while tile >= 0:"),
        (DRAWN, "tile = tl.atomic_add(counter_pointer, -1)"),
    ),
}
