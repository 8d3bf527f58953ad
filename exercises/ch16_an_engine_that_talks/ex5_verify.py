"""Exercise 16.5: a kernel that checks k guesses of every sequence in one reading of its pages."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves, ReadByKernels
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.edits import edits, model_of
from course_lib.checker.specification.layouts import contiguous, gaps
from exercises.topics import decode_inputs
from exercises.topics import decode_slips as known
from exercises.topics.attention import close_to
from exercises.topics.decode import PLAIN, decode, gather_pages
from exercises.topics.decode_inputs import SCORES, UNUSED, pages
from exercises.topics.decode_steps import heads_of, pages_of, queries, rows_at, stored, tiles, walk
from exercises.topics.evidence import NAN_FROM_THE_START, all_nan
from exercises.topics.heads_of_a_tile import times_loaded
from exercises.topics.running import start, step


def made(draw, *, guesses, key_heads, group, rubbish=-1, table_layout=gaps, **choices):
    """The arguments; `rubbish` stands in the entries of the table that no length reaches."""
    new, batch = guesses + 1, len(choices["lengths"])
    plain = dict.fromkeys(("query_layout", "key_layout", "value_layout"), contiguous)
    usual = {"head_dim": 16, "page_size": 16, "spare": 1, "dtype": torch.float32, "scores": SCORES[0].value}
    options = usual | {"unused": math.nan} | choices | plain
    query, *pools, tables, lengths = pages(draw, key_heads=key_heads, group=new * group, **options)
    query = query.view(batch, key_heads, new, group, -1).transpose(1, 2).flatten(2, 3).contiguous()
    pools = [pool.roll(-1, 0) for pool in pools]  # page 0 is one like others
    return query, *pools, table_layout(draw, (tables - 1).where(tables > 0, rubbish)), lengths


def verify_cases(draw):
    def case(name, guesses, key_heads, group, lengths, metered=False, draw=draw, **choices):
        choices = choices | {"guesses": guesses, "key_heads": key_heads, "group": group, "lengths": lengths}
        return Case(name, made(draw, **choices), metered=metered)

    return [
        case("3 guesses after 29 tokens, one head", 3, 1, 1, (32,), table_layout=contiguous),
        case("no guess: a step of decode", 0, 2, 2, (20, 33)),
        case("nothing but the newest token and its guesses", 4, 1, 2, (5, 7)),
        case("guesses on both sides of a page's end", 4, 2, 1, (18, 33), page_size=16),
        case("7 guesses, groups of 8: 64 rows", 7, 1, 8, (40,)),
        case("scores of ±150: exp overflows", 2, 1, 2, (50,), scores=SCORES[1].value),
        case("float16, head dimension 64", 3, 2, 3, (70, 9), head_dim=64, dtype=torch.float16),
        case("4 guesses, groups of 3, bytes counted", 4, 2, 3, (90, 61), head_dim=64, metered=True),
        case("7 guesses, one head, bytes counted", 7, 1, 1, (130,), True, Draw(165), head_dim=32, page_size=32),
    ]


CONTRACT = Contract(
    made,
    choices={
        "guesses": (0, 1, 2, 7),
        "key_heads": (1, 2, 3),
        "group": (1, 3, 8),
        "head_dim": (16, 32, 128),
        "lengths": decode_inputs.lengths((8,), (9, 32), (65, 17), (16, 48, 31)),
        "page_size": (16, 32, 128),
        "spare": (0, 3),
        "rubbish": (Level(-1, "-1 where the table has no page"), Level(10**6, "wild numbers where it has none")),
        "dtype": (torch.float32, torch.float16),
        "scores": (SCORES[0], *SCORES[2:]),  # ±150 has a case of its own
        "unused": UNUSED,
        "table_layout": (Level(contiguous, ""), Level(gaps, "a table with gaps")),
    },
    says={
        "guesses": "k + 1 from 1 to 8", "group": "group from 1 to 8", "head_dim": "head_dim 16, 32, 64 or 128",
        "lengths": "at least k + 1", "page_size": "page_size 16, 32, 64 or 128", "rubbish": "hold anything",
        "dtype": "float32 or float16", "unused": "hold anything, NaN too", "table_layout": "any row stride",
    },
    valid=lambda lengths, key_heads, **others: key_heads * sum(lengths) <= 200,
    most=8,
)  # fmt: skip


def each_query(function):
    """A function of decode for every query: each sees the keys up to its own."""

    def result(query, key_pages, value_pages, block_table, lengths):
        new, page_size = query.shape[1], key_pages.shape[2]
        used = torch.arange(block_table.shape[1]) < -(-lengths.long() // page_size)[:, None]
        caches = [gather_pages(part, block_table.where(used, 0)) for part in (key_pages, value_pages)]
        seen = [lengths - new + 1 + number for number in range(new)]
        return torch.stack([function(query[:, at], *caches, count) for at, count in enumerate(seen)], 1)

    return result


def verify(query, key_pages, value_pages, block_table, lengths):
    tile = key_pages.shape[2]
    keys, values, tables = key_pages, value_pages, block_table
    new, number = query.shape[1], torch.arange(query.shape[1])[:, None]
    heads, key_head = heads_of(query.shape[2], keys.shape[1])
    length, page_size = lengths.long()[None], keys.shape[2]  # [1, batch]
    first, last = torch.zeros_like(length), length
    positions = tiles(first, last, tile)  # [1, batch, keys]
    present = positions < last[..., None]
    end = length - new + 1 + number  # [new, batch]: where the keys end that a query sees
    seen = positions < end[..., None]
    pages, slots = pages_of(tables, positions, present, last, page_size, tile), positions % page_size
    key_rows = rows_at(keys, present, keys.stride(0), keys.stride(1), keys.stride(2), pages, key_head, slots)
    value_rows = rows_at(values, present, values.stride(0), values.stride(1), values.stride(2), pages, key_head, slots)
    rows = torch.stack([queries(one, heads) for one in query.unbind(1)])
    running_max, running_sum, accumulator = walk(rows, key_rows, value_rows, seen, first, last, tile, values.dtype)
    total = torch.where(running_sum == 0, 1.0, running_sum)
    output = (accumulator / total[..., None]).to(query.dtype)
    return torch.stack([stored(part, heads, query) for part, query in zip(output, query.unbind(1))], 1)


END, AS_USUAL = "length - new + 1 + number", ("unguarded", "zero_over_zero")
NOT_HERE = ("newest_loaded", "unused_slots", "one_token_too", "rows_of_no_head", "group_larger",
    "group_of_all_heads__in", "last_page_left_out", "last_page_read_whole")  # fmt: skip
PRESENT, LAST = "positions < last[..., None]", "first, last = torch.zeros_like(length), length"
UNMASKED = (PRESENT, "positions < length[..., None]")
OF_PAIRS = (
    *("seen = positions < end[..., None]", "seen = end[..., None] - positions"),
    *(known.HIDDEN, "torch.where(present[:, :, None, None] + off_by(*scores.shape[:4:3]) > 0, scores, -INF)"),
)


def off_by(new, group):
    """By how much the number of a row in a tile of pairs is larger than that of its query."""
    return (torch.arange(new)[:, None] * (group - 1) + torch.arange(group))[:, None, None, :, None]


CHANGES = (
    *edits("All queries see all keys. A guess is computed as if nothing came after it: query i of a sequence sees "
        "length - (k + 1) + i + 1 keys.", guesses_see_later_ones=(END, "length + 0 * number")),
    *edits("All queries see the keys of the newest token alone. Query i also sees the guesses up to its own: length - "
        "(k + 1) + i + 1 keys.", guesses_unseen=(END, "length - new + 1 + 0 * number")),
    *edits("The triangle is one key too narrow: a query does not see its own key. Query i sees length - (k + 1) + i + "
        "1 keys.", triangle_shifted=(END, "length - new + number"),
        triangle_shifted__first_sees_one=(END, "(length - new + number).clamp(min=1)"),
        triangle_shifted__if_there_are_guesses=(END, f"{END} - int(new > 1)")),
    *edits("The last query does not see its own key. The last guess is in the cache too: query i sees length - (k + 1) "
        "+ i + 1 keys.", last_misses_itself=(END, f"torch.minimum({END}, length - int(new > 1))"),
        last_misses_itself__always=(END, f"torch.minimum({END}, length - 1)"),
        last_misses_itself__of_8=(END, f"{END} - (number == 7).long()")),
    *edits("The triangle is one key too wide: a query sees the guess after its own. Query i sees length - (k + 1) + i "
        "+ 1 keys.", triangle_too_wide=(END, "length - new + 2 + number"),
        triangle_too_wide__not_the_last=(END, "torch.minimum(length - new + 2 + number, length)")),
    *edits("Only the last page is masked query by query. Guesses may lie on the page before it too: mask "
        "every page, or each from the newest token's on.", one_page_masked=("seen = positions < end[..., None]",
        "seen = (positions < end[..., None]) | (positions < ((last - 1) // page_size * page_size)[..., None])")),
    *edits("The causal mask is counted from the start of the sequence: query i sees i + 1 keys. The queries stand at "
        "its end, so it sees length - (k + 1) + i + 1.", mask_from_the_start=(END, "1 + number + 0 * length")),
    *edits("The queries are taken in the wrong order: the first sees the most keys. It is the newest token, and the "
        "guesses follow: query i sees length - (k + 1) + i + 1 keys.", triangle_turned_round=(END, "length - number")),
    *edits("The keys of the guesses are left out, as if `lengths` did not count them. It does: they are in the cache "
        "already.", guesses_left_out=(END, "length - new + 1 + 0 * number - int(new > 1)"),
        guesses_left_out__all_of_them=(END, "(length - 2 * new + 2 + number).clamp(min=1)")),
    *edits("The loop ends before the last guesses: pages that hold only keys of guesses were not read. `lengths` "
        "counts the guesses, so the loop goes on to the length.", loop_ends_early=(LAST, f"{LAST} - new", *UNMASKED),
        loop_ends_early__one_later=(LAST, f"{LAST} - new + 1", *UNMASKED)),
    *edits("The keys of the guesses are counted twice: `lengths` counts them already, so query i sees length - (k + 1) "
        "+ i + 1 keys.", guesses_counted_twice=(END, "length + 1 + number"),
        guesses_counted_twice__not_read=(END, "length + number")),
    *edits("All queries of a sequence were computed from its first one. Row r of the tile is query r // GROUP.",
        first_query_for_all=("query.unbind(1)])\n", "query[:, :1].expand_as(query).unbind(1)])\n")),
    *edits("The tile has fewer rows than there are pairs of a query and a head, and the others were never computed. It "
        "needs (k + 1) * GROUP rows, rounded up to a power of two, and at least 16.",
        **{f"tile_too_short__of_{rows}": (known.TOTAL, f"torch.where(number[..., None, None] * heads.shape[1] + "
        f"torch.arange(heads.shape[1]) < {rows}, {known.TOTAL}, torch.nan)") for rows in (16, 32)}),
    *edits("The mask takes the row of the tile for the query. A row is a pair of a query and a head: its query is row "
        "// GROUP.", row_taken_for_query=OF_PAIRS, row_taken_for_query__its_head=(END, "length - new + 1 + 0 * number",
        *(piece.replace("*scores.shape[:4:3]", "1, scores.shape[3]") for piece in OF_PAIRS))),
    *edits("The tokens of the last, partly filled page are missing: the number of pages was rounded down. Round it up, "
        "and mask.", last_page_left_out=(LAST, f"{LAST} // page_size * page_size")),
    *edits("Page 0 was taken for no page. It is one like others: which entries of the table count follows from the "
        "length alone.", page_0_left_out=("rows = torch.stack(", "seen = seen & (pages != 0)\nrows = torch.stack("),
        page_0_left_out__as_zeros=(known.OF_KEYS, f"{known.OF_KEYS} & (pages != 0)",
        known.OF_VALUES, f"{known.OF_VALUES} & (pages != 0)")),
    *edits(known.SLOTS_COUNT, unused_slots_count=(PRESENT,
        "positions < (-(-last // page_size) * page_size)[..., None]"),
        unused_slots_count__value=("rows_at(values, present", "rows_at(values, positions >= 0")),
    *(row for row in (*known.HEADS, *known.PAGES, *known.keys_that_count("end", "tables.shape[1] * keys.shape[2]"))
        if not row.id.startswith(NOT_HERE)),
    *edits("The table is read as if each row began max_blocks entries after the last. Rows lie block_table.stride(0) "
        "entries apart.", strides_ignored__table=("tables.stride(0)", "tables.shape[1]")),
    *(replace(row, alone=False) for row in known.SOFTMAX),
    *known.NATURAL,
    *known.UNGUARDED,
    *edits("", zero_over_zero=(known.TOTAL, "running_sum")),
    *edits("", **{f"tile_{rows}": ("tile = key_pages.shape[2]", f"tile = {rows}") for rows in (16, 32, 64)}),
)  # fmt: skip


def verify_bytes(query, key_pages, value_pages, block_table, lengths):
    """Keys, values and their page numbers once for all queries and heads of a KV head; queries, output and lengths."""
    key_heads, head_dim = key_pages.shape[1], key_pages.shape[3]
    tokens = int(lengths.sum())
    elements = 2 * tokens * key_heads * head_dim + 2 * query.numel()
    return elements * query.element_size() + 4 * key_heads * (tokens + len(lengths))


def _read_for_every(what, count):
    """Right numbers, and keys that were loaded as often as a case has queries, heads of a group, or pairs of them."""

    def when(case, seen, got):
        query, keys = case.args[:2]
        sizes = {"queries": query.shape[1], "heads": query.shape[2] // keys.shape[1]}
        wanted = math.prod(sizes[name] for name in count)
        exact = [arg.double() if arg.is_floating_point() else arg for arg in case.args]
        return wanted > 1 and 0.9 * wanted < times_loaded(seen) < 1.2 * wanted and close_to(got, EXACT(*exact))

    sentence = (
        f"The numbers are right, but each page was loaded once for every {what}. Let one program take all k + 1 "
        "queries of a sequence and all heads that share a KV head, as the rows of one tile."
    )
    return Mistake(f"pages_read_for_every_{what}", sentence, when=when, cost=True)


EXACT = each_query(decode)
EXERCISE = Exercise(
    id="16.5", title="Several queries, one reading", entries=("verify_attention",), cases=verify_cases, oracle=EXACT,
    contracts=(CONTRACT,), plain=tuple(map(each_query, PLAIN)),
    models=(model_of(verify, CHANGES, (heads_of, queries, tiles, pages_of, rows_at, start, step, walk, stored),
        uses=(off_by,), styles=(AS_USUAL, ("unguarded",), (), *((*AS_USUAL, f"tile_{n}") for n in (16, 32, 64)))),),
    needs=TRITON, uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1), Allocates(lambda query, *others: query.numel()),
        Forbids(("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "matmul", "_softmax", "softmax")),
        Moves(verify_bytes), ReadByKernels((1, 2)),
    ),
    hints=(
        "A program takes a KV head of a sequence, and the rows of its tile are pairs of a query and a head: rows = "
        "tl.arange(0, ROWS), the query is rows // GROUP and the head key_head * GROUP + rows % GROUP. Mask the rows "
        "from QUERIES * GROUP on, in the load and in the store.",
        "The loop is that of 8.5 or 6.5: a page in each step, with its number from the table, and keys and values "
        "masked where the position is not below the length. All rows share what you load.",
        "Only the mask of the scores differs from row to row. Row r sees ends = length - QUERIES + 1 + rows // GROUP "
        "keys, so the scores are kept where positions[None, :] < ends[:, None].",
        "ROWS = max(16, triton.next_power_of_2(queries * group)), and the grid is (batch, key_heads).",
    ),
    mistakes=(
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake("read_outside", "Memory outside a tensor was reached. Rows from QUERIES * GROUP on are no queries, "
            "positions from the length on are no keys, and entries of the table after a sequence's last page are no "
            "pages: mask all.", when=lambda case, seen, got: bool(seen.out_of_bounds)),
        _read_for_every("query", ("queries",)),
        _read_for_every("head", ("heads",)),
        _read_for_every("row", ("queries", "heads")),
    ),
)  # fmt: skip
