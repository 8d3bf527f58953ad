"""Wrong answers to exercise 9.7, and unusual right ones."""

from tests.submissions.edits import changed

TILE_ROW = "[(first_tile + block) * ROWS, 0]"


ARRIVED = "mbarrier.arrive(free.index(buffer), count=1)"


LOAD = f"load_tile(source, {TILE_ROW}"


STORE = f"store_tile(target, {TILE_ROW}"


SCALED = "(tile.to(gl.float32) * factor).to(tile.dtype)"


WRONG = {
    "factor_forgotten": changed("9.7", (SCALED, "tile")),
    "one_tile_only": changed("9.7", (LOAD, "load_tile(source, [first_tile * ROWS, 0]")),
    "first_tile_forgotten": changed("9.7", (LOAD, "load_tile(source, [block * ROWS, 0]")),
    "tiles_for_rows": changed("9.7", (LOAD, "load_tile(source, [first_tile + block, 0]")),
    "not_stored": changed("9.7", (STORE, "store_tile(target, [first_tile * ROWS, 0]")),
}


UNUSUAL = {
        "the first uses without a wait": changed(
            "9.7",
            ("wait(free.index(buffer), phase ^ 1)", "wait(free.index(buffer), phase ^ 1, pred=block >= STAGES)"),
        ),
        "freed after the store": changed(
            "9.7",
            (f"        {ARRIVED}\n        tma", "        tma"),
            ("        fence_async_shared()\n", f"        {ARRIVED}\n        fence_async_shared()\n"),
        ),
        "waits for its store at once": changed(
            "9.7",
            ("        tma.store_wait(0)\n        outgoing", "        outgoing"),
            (f"{STORE}, outgoing)", f"{STORE}, outgoing)\n        tma.store_wait(0)"),
        ),
    }
