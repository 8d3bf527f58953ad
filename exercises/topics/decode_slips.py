"""The slips of decode kernels as edits of their meanings, whose steps are those of `decode_steps.py`.

The most basic come first: of two in one answer, the earlier is told first. Every meaning takes `lengths.long()` for its
tokens and `keys.shape[2]` for the slots of a cache or page, reads by `rows_at(keys, present, keys.stride(0), ...)`,
calls `walk`, and divides by `torch.where(running_sum == 0, 1.0, running_sum)`.
"""

from __future__ import annotations

import math

from course_lib.checker.specification.edits import Edit, edits, only
from exercises.topics import softmax_slips as told
from exercises.topics.attention_sentences import LOG2E_MISSING, NATURAL_EXP, SCALE_TWICE
from exercises.topics.rising import MAXIMUM_OF_THE_FIRST_TILE
from exercises.topics.running import (
    ADDED,
    FIRST_NAN,
    FROM,
    GUARD,
    MAXIMUM,
    NEVER_UPDATED,
    RESCALE,
    RUNNING,
    START_MAX,
    SUM,
)

LN_2 = math.log(2)

BY_MODULO = (
    "The heads are shared out like cards: query head h goes to KV head h % key_heads. Groups are neighbours: the first "
    "query_heads // key_heads query heads share KV head 0, so it is a division by the group's size."
)
BY_COUNT = (
    "The query head is divided by the number of KV heads. Divide it by the group's size, query_heads // key_heads: "
    "that many neighbours share one KV head."
)
FIRST_HEAD = "Every query head reads KV head 0. Which one is it for this group? It belongs into the pointer or index."
SCALE_MISSING = "The scores are not scaled. Multiply the products of query and keys by 1/√head_dim."
EMPTY_SEQUENCE = (
    "A sequence without a token has NaN for a result, or memory that nobody wrote. Two steps can make it: the "
    "division, as 0 / 0, and a tile without a key, as exp(-inf - (-inf)). Make no step for it, divide by 1 where the "
    "sum is 0, and store its zeros too."
)
EMPTY_SPLIT = (
    "A split without keys has NaN for a result, or memory that nobody wrote. Its sum is 0: divide by 1 there, and "
    "store zeros and minus infinity for it too, without an early return."
)
EMPTY_MERGE = (
    "A sequence without any key has NaN for a result, or memory that nobody wrote. Store zeros and minus infinity: "
    "measure from 0 where the largest is -inf, divide by 1 where the weights' total is 0."
)
AVERAGED = (
    "The splits were averaged as equals. One whose scores are higher has a larger share of the softmax: weigh it by "
    "exp(its log-sum-exp - the whole's)."
)
LARGEST_MISSING = (
    "The largest log-sum-exp is missing from the merged one. The sum is of exp(lse - largest): add the largest to its "
    "logarithm."
)
SLOTS_COUNT = (
    "Slots that hold no token reached the result: their weight is 0, and 0 · NaN is NaN. Mask the loads of keys and "
    "values with the same condition as the scores, and other=0.0."
)
TOO_FEW = "The newest token is left out: the lengths count the current token, so keys 0 to length - 1 are all seen."
TOO_MANY = (
    "One slot too many counts, the one right behind the last token. Keys are counted from 0: the condition is "
    "keys < length."
)
SCORES_IN_FLOAT16 = (
    "The scores are rounded to float16, which keeps three digits and nothing above 65,504. Leave them in float32, as "
    "tl.dot gives them."
)
ONE_OF_THE_NEXT_SPLIT = (
    "A split counts one key too many, the first of the next split or the slot behind the last token. `last` itself is "
    "not a part of it: the condition is keys < last."
)
ONE_OF_THE_SPLIT_MISSING = (
    "Every split's last key is left out. A split has the keys from `first` up to, not including, `last`: the condition "
    "is keys < last."
)
FIRST_TABLE = "Every sequence reads the table of the first one. Row b begins b · table_stride entries in."
LAST_PAGE_READ_WHOLE = (
    "The last page is read to its end, whatever it holds there. Positions from `length` on get no load and a score of "
    "minus infinity."
)

HEADS_OF, OWN = "torch.arange(query_heads).view(key_heads, group)", "torch.arange(query_heads)[:, None]"
QUOTIENT, KEY_HEAD = "torch.arange(query_heads) // key_heads", "torch.arange(key_heads)"
TILE = "max(16, 1 << (group - 1).bit_length())"
LENGTH, TOTAL = "lengths.long()", "torch.where(running_sum == 0, 1.0, running_sum)"
OUTPUT, LSE = "accumulator / total[..., None]", "running_max + torch.log(total)"
SCALE, HIDDEN = "query.shape[-1] ** -0.5", "torch.where(present[:, :, None, None], scores, -INF)"
SCORES, OF_STEP = f"query @ keys.float().mT * {SCALE}", "tile = scores.float()"
WALKS, STEPS = "first + begin < last", "range(0, scores.shape[-1], tile)"
ADDS = "accumulator * rescale[..., None] + product"
OF_KEYS, OF_VALUES = "rows_at(keys, present", "rows_at(values, present"
ONE_HEAD = ("keys.stride(1)", "0", "values.stride(1)", "0")
BOTH_READ = "key_rows, value_rows"

HEADS = (
    *edits(BY_MODULO, by_modulo=(HEADS_OF, "torch.arange(query_heads).view(group, key_heads).T")),
    *edits(
        BY_COUNT,
        by_count=(HEADS_OF, OWN, KEY_HEAD, f"({QUOTIENT}).clamp(max=key_heads - 1)"),
        by_count__unclamped=(HEADS_OF, OWN, KEY_HEAD, QUOTIENT),
    ),
    *edits(FIRST_HEAD, first_head_for_all=ONE_HEAD),
    *edits(
        "Every program takes the query heads of the first group and writes its result there. Those of KV head k begin "
        "at k * GROUP.",
        group_offset_missing=(HEADS_OF, "torch.arange(group).expand(key_heads, group)"),
    ),
    *edits(
        "Every program loads the query heads of the first group. Those of KV head k begin at k * GROUP.",
        group_offset_missing__in_the_load=("heads * query.stride(1)", "heads % heads.shape[1] * query.stride(1)"),
    ),
    *edits(
        "Every program takes all query heads for the group of its KV head. Those of one KV head are only query_heads "
        "// key_heads: that is GROUP.",
        group_of_all_heads=(HEADS_OF, "torch.arange(key_heads)[:, None] * query_heads + torch.arange(query_heads)"),
        group_of_all_heads__in_its_tile=(
            *(HEADS_OF, f"torch.arange(key_heads)[:, None] * query_heads + torch.arange(min(query_heads, {TILE}))"),
        ),
    ),
    *edits(
        "The query heads of a KV head are taken to begin a whole tile of rows after those of the last one. They begin "
        "at key_head * GROUP: only the first GROUP rows of a tile are heads.",
        rows_of_no_head_read=(HEADS_OF, f"torch.arange(key_heads)[:, None] * {TILE} + torch.arange(group)"),
    ),
    *edits(
        "The results of a KV head are stored a whole tile of rows after those of the last one. Its heads begin at "
        "key_head * GROUP, in the output as in the queries.",
        rows_of_no_head_stored=(
            "heads, query)",
            f"heads // heads.shape[1] * {TILE.replace('group', 'heads.shape[1]')} + heads % heads.shape[1], query)",
        ),
    ),
    *edits(
        "The tile has fewer rows than a group has query heads, and the others were never computed. Let it have the "
        "next power of two of rows, and at least 16.",
        **{
            f"group_larger_than_the_tile__of_{rows}": (
                *(TOTAL, f"torch.where(torch.arange(running_sum.shape[-1]) < {rows}, {TOTAL}, torch.nan)"),
            )
            for rows in (16, 32, 64)
        },
    ),
)


def keys_that_count(
    end: str = "last", capacity: str = "keys.shape[2]", too_few: str = TOO_FEW, too_many: str = TOO_MANY
):
    """The rows of which keys count, where the meaning says `present = positions < end[..., None]`.

    too_few, too_many: what is said of a mask that ends one key early or late.
    """
    present = f"positions < {end}[..., None]"
    return (
        *edits(
            "The weights are multiplied with the keys. The second product takes the values: look at its pointer and "
            "strides.",
            keys_used_as_values=(BOTH_READ, "key_rows, key_rows"),
        ),
        *edits(
            "The queries are multiplied with the values. The first product takes the keys: look at its pointer and "
            "strides.",
            values_used_as_keys=(BOTH_READ, "value_rows, value_rows"),
        ),
        *edits(
            "All sequences were given the length of the first one. A program's own is at lengths_pointer + sequence.",
            first_length_for_all=(LENGTH, "lengths[:1].expand(len(lengths)).long()"),
        ),
        *edits(TOO_FEW, one_token_too_few=(LENGTH, "(lengths.long() - 1).clamp(min=0)")),
        *edits(too_few, one_token_too_few__mask=(present, f"positions < {end}[..., None] - 1")),
        *edits(
            "The newest token's key and value are not loaded, and zeros are counted in their place: the mask of the "
            "loads ends one too early, and that of the scores does not. It is keys < length for all three.",
            newest_loaded_as_zeros=(
                *(OF_KEYS, f"rows_at(keys, positions + 1 < {end}[..., None]"),
                *(OF_VALUES, f"rows_at(values, positions + 1 < {end}[..., None]"),
            ),
        ),
        *edits(TOO_MANY, one_token_too_many=(LENGTH, "(lengths.long() + 1)")),
        *edits(too_many, one_token_too_many__mask=(present, f"positions <= {end}[..., None]")),
        *edits(TOO_MANY, one_token_too_many__in_the_cache=(LENGTH, f"(lengths.long() + 1).clamp(max={capacity})")),
        *edits(
            "Only the first tile of keys is used. Does the loop move on to the others?",
            only_first_tile=(STEPS, "range(0, tile, tile)"),
        ),
        *edits(
            "The last tile of keys is never looked at. Does the loop end one tile too early?",
            last_tile_skipped=(WALKS, "first + begin < last - tile"),
        ),
        *edits(
            SLOTS_COUNT,
            unused_slots_count=(
                *(OF_KEYS, f"rows_at(keys, positions < {capacity}"),
                *(OF_VALUES, f"rows_at(values, positions < {capacity}"),
            ),
            unused_slots_count__value=(OF_VALUES, f"rows_at(values, positions < {capacity}"),
        ),
    )


CACHE = (
    *edits(
        "Every sequence was read as long as the cache has room. Slots behind its length hold no token: the loop ends "
        "at the sequence's own length.",
        length_ignored=(LENGTH, "torch.full_like(lengths, keys.shape[2]).long()"),
    ),
    *edits(
        "All sequences were given the length of the longest one. A program's own is at lengths_pointer + sequence.",
        longest_length_for_all=(LENGTH, "lengths.max().expand(len(lengths)).long()"),
    ),
    *edits(
        "Only the first tile of keys is used. Does the loop move on to the others?",
        only_first_tile__of_128=(STEPS, "range(0, min(128, scores.shape[-1]), tile)"),
    ),
    *edits(
        "The last tile is dropped when it isn't full. Round the number of tiles up: range(0, length, BLOCK_N).",
        last_tile_dropped=(WALKS, "first + begin + tile <= last"),
    ),
)
OUT_OF_BOUNDS = edits(
    "Keys or values behind the last token were read, and in places memory that is not the tensor's. Mask both loads "
    "with keys < length and other=0.0: a weight of 0 does not help, as 0 · NaN is NaN.",
    tail_read_out_of_bounds=(OF_KEYS, "rows_at(keys, positions >= 0", OF_VALUES, "rows_at(values, positions >= 0"),
    tail_read_out_of_bounds__key=(OF_KEYS, "rows_at(keys, positions >= 0"),
    tail_read_out_of_bounds__value=(OF_VALUES, "rows_at(values, positions >= 0"),
)

SOFTMAX = (
    *edits(SCALE_MISSING, scale_missing=(SCALE, "1.0"), scale_missing__in_base_two=(SCALE, f"{LN_2}")),
    *edits(
        SCALE_TWICE,
        scale_twice=(SCALE, "query.shape[-1] ** -1.0"),
        scale_twice__in_base_two=(SCALE, f"query.shape[-1] ** -1.0 / {LN_2}"),
    ),
    *edits(
        "The scale is that of one head dimension, whatever the queries have. It is 1/√head_dim: take head_dim from the "
        "query's shape.",
        scale_of_one_size__64=(SCALE, "64**-0.5"),
        scale_of_one_size__128=(SCALE, "128**-0.5"),
    ),
    *edits(
        "The scores are multiplied by √head_dim. They are divided by it: the scale is 1/√head_dim.",
        scale_inverted=(SCALE, "query.shape[-1] ** 0.5"),
    ),
    *edits(LOG2E_MISSING, log2e_missing=(OF_STEP, f"{OF_STEP} * {LN_2}")),  # so that it goes with slips of the scale
    *edits(
        "The weights and the factor by which sum and accumulator are rescaled are powers of different numbers: one of "
        "2, the other of e. Take tl.exp2 in both, with log2(e) in the scale, or tl.exp in both without it.",
        alone=True,
        mixed_exponentials__rescale_of_2=("rescale = torch.exp(", "rescale = torch.exp2("),
        mixed_exponentials__rescale_of_e=(RESCALE, f"torch.exp((running_max - reference) / {LN_2})"),
    ),
    # In the weights alone: where a split has one tile, nothing tells that from both.
    *edits(LOG2E_MISSING, alone=True, log2e_missing__in_the_weights=("weights = torch.exp(", "weights = torch.exp2(")),
    *edits(
        NATURAL_EXP, alone=True, natural_exp__in_the_weights=(f"torch.exp({FROM})", f"torch.exp(({FROM}) / {LN_2})")
    ),
    *edits(
        "The accumulator is not divided by the running sum. Divide once, after the last tile.",
        not_divided=(OUTPUT, "accumulator"),
    ),
    *edits(
        "The accumulator is divided by the running maximum. It is divided by the running sum.",
        divided_by_the_maximum=(OUTPUT, "accumulator / running_max[..., None]"),
    ),
    *edits(
        "The accumulator is divided by the running sum at every tile, and the next product is added to what is an "
        "average already. Divide once, after the last tile.",
        divided_at_every_tile=(ADDS, f"({ADDS}) / new_sum[..., None]"),
    ),
    *only(RUNNING, "no_running_max"),
    *edits(
        "The running maximum is never updated, so that every rescaling is by 0 and only the last tile counts. End the "
        "step with running_max = new_max.",
        maximum_not_updated=NEVER_UPDATED,
    ),
    *edits(
        MAXIMUM_OF_THE_FIRST_TILE,
        maximum_of_the_first_tile=(MAXIMUM, "torch.where(running_max == -INF, tile.amax(-1), running_max)"),
    ),
    *only(RUNNING, "maximum_starts_at_zero", "minimum_for_maximum", "maximum_forgets_the_old"),
    *edits(
        "The running maximum starts at a finite number, or is kept from falling below one, and scores may lie below "
        "it: all their weights are 0 then. Start it at minus infinity, and give it no floor.",
        maximum_starts_finite=(START_MAX, "torch.full(shape, -1e4"),
    ),
    *only(RUNNING, "old_maximum_in_weights", "tile_not_rescaled"),
    *edits(told.NAN_FROM_THE_START, **FIRST_NAN),
    *edits(
        "Neither the sum nor the accumulator is rescaled when the running maximum grows. Multiply both by exp(old "
        "maximum - new maximum).",
        nothing_rescaled=(RESCALE, "torch.ones_like(running_max)"),
    ),
    *edits(
        "The accumulator is not rescaled when the running maximum grows. Multiply it by the exponential of old maximum "
        "- new maximum before the tile's values are added.",
        accumulator_not_rescaled=(ADDS, "accumulator + product"),
    ),
    *only(RUNNING, "sum_not_rescaled", "rescale_turned_round"),
    *edits(
        "The accumulator is rescaled after the tile's product was added. The product is measured from the new maximum "
        "already: rescale first, then add.",
        accumulator_rescaled_after_adding=(ADDS, "(accumulator + product) * rescale[..., None]"),
    ),
    *only(RUNNING, "sum_rescaled_after_adding", "sum_rescaled_after_adding__but_the_first"),
    *edits(
        "The accumulator holds the last tile's product alone: it is overwritten where it should be added to.",
        accumulator_overwritten=(ADDS, "product"),
    ),
    *edits(
        "The running sum holds the last tile's weights alone. Add them to what it held, rescaled.",
        sum_not_kept=(SUM, ADDED),
    ),
    *edits(
        "Keys past the end were loaded as zeros and counted: a key of zeros scores 0, and exp(0 - maximum) is not 0. "
        "Give their scores minus infinity.",
        tail_keys_scored=(HIDDEN, "scores"),
    ),
    *edits(
        SCORES_IN_FLOAT16,
        scores_in_float16=(SCORES, f"({SCORES.replace(SCALE, f'({SCALE} / {LN_2})')}).half().float() * {LN_2}"),
        scores_in_float16__natural=(SCORES, f"({SCORES}).half().float()"),
    ),
    *edits(
        "The accumulator is kept in float16, which ends at 65,504 and rounds at every tile. Keep it in float32, and "
        "cast the finished output alone.",
        accumulator_in_float16=(ADDS, f"({ADDS}).half().float()"),
        accumulator_in_float16__if_the_values_are=(ADDS, f"({ADDS}).to(values.dtype).float()"),
    ),
)
PRODUCTS = "query @ keys.float().mT"
IN_16_BITS = (
    *edits(
        SCORES_IN_FLOAT16,
        scores_in_float16__if_the_values_are=(
            *(SCORES, f"({SCORES.replace(SCALE, f'({SCALE} / {LN_2})')}).to(narrow).float() * {LN_2}"),
        ),
    ),
    *edits(
        "The products of queries and keys are rounded to float16, which ends at 65,504: they may lie above it where "
        "the scores do not, and lose their last digits below. Leave them in float32, as tl.dot gives them.",
        products_in_float16=(SCORES, f"({PRODUCTS}).half().float() * {SCALE}"),
        products_in_float16__if_the_values_are=(SCORES, f"({PRODUCTS}).to(narrow).float() * {SCALE}"),
    ),
    *edits(
        "The running sum is kept in 16 bits, and every tile rounds it: what a tile adds is lost where the sum is 2,048 "
        "times as large. Keep it in float32, like the accumulator.",
        sum_in_float16=(SUM, f"({SUM}).to(narrow).float()"),
        sum_in_float16__always=(SUM, f"({SUM}).half().float()"),
    ),
)
UNGUARDED = edits("", unguarded=(GUARD, "new_max"))  # most kernels: a tile without a key gives NaN


def strides(outer: str, *, paged: bool = False) -> tuple[Edit, ...]:
    """The rows of strides; `outer` is what the first dimension of keys and values counts."""
    of_query = "sequences lie query_stride" if paged else "sequences lie query_batch_stride"
    of_query += " elements apart and its heads query_head_stride."
    named = {"outer": outer, "head": "head", "row": "slot" if paged else "token"}
    numbers = {place: number for number, place in enumerate(named)}

    def plain(name: str, *places: str) -> tuple[str, ...]:
        """The strides of these dimensions as those of a contiguous tensor."""
        ways = ((f"{name}.stride({at})", f"{name}.shape[{at + 1}:].numel()") for at in map(numbers.get, places))
        return tuple(piece for way in ways for piece in way)

    def by_other(name: str, other: str, *places: str) -> tuple[str, ...]:
        ways = ((f"{name}.stride({at})", f"{other}.stride({at})") for at in map(numbers.get, places))
        return tuple(piece for way in ways for piece in way)

    of_sequence = ("query.stride(0)", "query.shape[1:].numel()")
    of_head = ("query.stride(1)", "query.shape[2]")
    return (
        *edits(
            "The tensors are read as if they were contiguous. Each has strides of its own among the kernel's "
            "arguments: queries, keys and values may lie in three ways.",
            strides_ignored=(*plain("keys", *named), *plain("values", *named), *of_sequence, *of_head),
        ),
        *(
            row
            for place, which in named.items()
            for row in (
                *edits(
                    f"Keys and values are read as if they were contiguous from one {which} to the next. Each has "
                    "strides of its own, which the launcher passes.",
                    alone=True,
                    **{f"strides_ignored__both_{place}": (*plain("keys", place), *plain("values", place))},
                ),
                *edits(
                    f"From one {which} of the values to the next the keys' {which} stride was taken. The values have "
                    "one of their own.",
                    **{f"strides_ignored__value_{place}_by_key": by_other("values", "keys", place)},
                ),
                *edits(
                    f"From one {which} of the keys to the next the values' {which} stride was taken. The keys have one "
                    "of their own.",
                    alone=True,
                    **{f"strides_ignored__key_{place}_by_value": by_other("keys", "values", place)},
                ),
            )
        ),
        *(
            row
            for name, other in (("value", "key"), ("key", "value"))
            for row in edits(
                f"The {name}s are read by the {other}s' strides. Their {outer}s, heads and {named['row']}s lie apart "
                "as their own strides say.",
                alone=name == "key",
                **{f"strides_ignored__{name}_by_{other}": by_other(f"{name}s", f"{other}s", *named)},
            )
        ),
        *(
            row
            for name in ("key", "value")
            for suffix, said, places in (
                ("", "", named),
                *((f"_{place}", f" from one {which} to the next", (place,)) for place, which in named.items()),
            )
            for row in edits(
                f"The {name}s are read as if they were contiguous{said}. Use the strides of that tensor that the "
                "launcher passes.",
                alone=True,
                **{f"strides_ignored__{name}{suffix}": plain(f"{name}s", *places)},
            )
        ),
        *edits(
            f"The queries are read as if they were contiguous. Their {of_query}",
            strides_ignored__query=(*of_sequence, *of_head),
        ),
        *edits(
            f"The sequences of the queries are taken as contiguous. Their {of_query}",
            strides_ignored__query_sequence=of_sequence,
        ),
        *edits(
            f"The heads of the queries are taken as contiguous. Their {of_query}", strides_ignored__query_head=of_head
        ),
        *(
            row
            for name, said in (("query", "query"), *(() if paged else (("keys", "keys"), ("values", "values"))))
            for row in edits(
                f"Every sequence reads the {said} of the first one. Add sequence · its stride to the pointer.",
                alone=True,
                **{f"first_sequence_for_all__{name.removesuffix('s')}": (f"{name}.stride(0)", "0")},
            )
        ),
    )


OUTPUT_STRIDES = tuple(
    row
    for way, which, places in (
        ("", "strides", (0, 1)),
        ("__sequence", "sequence stride", (0,)),
        ("__head", "head stride", (1,)),
    )
    for row in edits(
        f"The output was written by the query's {which}. It has strides of its own among the kernel's arguments.",
        **{
            f"output_by_other_strides{way}": tuple(
                f"{name}.stride({place})" for place in places for name in ("result", "like")
            )
        },
    )
)


def output_laid_out_like_query(result: str) -> tuple[Edit, ...]:
    """result: what the meaning returns as the output, a contiguous tensor."""
    return edits(
        "torch.empty_like(query) lays the output out in query's order, which need not be contiguous, and its rows were "
        "stored as if it were. Hand the kernel the output's own strides, or make it by torch.empty with the query's "
        "shape.",
        output_laid_out_like_query=(result, f"{result}.as_strided(query.shape, torch.empty_like(query).stride())"),
    )


PLACE, LOADED = "positions % page_size", "load(tables, rows + blocks, mask).long()"
LOOKED_UP, BLOCKS, TABLE = "looked_up = positions", "looked_up // page_size", "tables.stride(0)"
OF_PAGE = "outer * of_outer"
BLOCK_ROWS = "rows + blocks, mask"
ONE_ENTRY_TOO_FAR = (
    "Page numbers are taken from the entry behind their own: the table is read one block too far. The entry of "
    "position p is p // page size, counted from 0."
)
PAGES = (
    *edits(
        "Block i of the sequence is read from page i of the pool. Which page it is stands in the table.",
        table_ignored=(f"return {LOADED}", "return blocks"),
    ),
    *edits(
        "Only the first entry of the table is used, and the pages behind it are taken to follow in memory. Every block "
        "has an entry of its own: look each one up.",
        pages_consecutive=(LOADED, f"{LOADED.replace('blocks', '0 * blocks')} + blocks"),
    ),
    *edits(
        ONE_ENTRY_TOO_FAR,
        next_entry_of_the_table=(BLOCKS, "(looked_up // page_size + 1)"),
    ),
    *edits(
        "1 is added to what the table says, so that the page behind the right one is read. The entry is the page's "
        "number as it is.",
        next_page_of_the_pool=(LOADED, f"({LOADED} + 1)"),
    ),
    *edits(
        FIRST_TABLE,
        first_table_for_all=(TABLE, "0"),
        first_table_for_all__no_page_is_0=(TABLE, "0", LOADED, f"{LOADED}.clamp(min=0)"),
    ),
    *edits(
        "A page's number was taken as the number of its first row. Page p begins at p · page stride.",
        page_not_multiplied=(OF_PAGE, "outer * of_row"),
    ),
    *edits(
        "A page is taken to hold one head. It holds all of them: multiply its number by the page stride, which the "
        "launcher passes.",
        heads_of_a_page_forgotten=(OF_PAGE, "outer * of_head"),
        heads_of_a_page_forgotten__by_sizes=(OF_PAGE, "outer * tensor.shape[2:].numel()"),
    ),
    *edits(
        "The first token of a page was read for all of its tokens. Add the place in the page times the slots' stride.",
        offset_left_out=("inner * of_row", "0 * inner"),
    ),
    *edits(
        LAST_PAGE_READ_WHOLE,
        last_page_read_whole=(LENGTH, "(-(-lengths.long() // keys.shape[2]) * keys.shape[2])"),
    ),
    *edits(
        "The tokens of the last, partly filled page are missing: the number of pages was rounded down. Round it up, "
        "and mask.",
        last_page_left_out=(LENGTH, "(lengths.long() // keys.shape[2] * keys.shape[2])"),
    ),
)

IN_THE_TILE = "(torch.arange(positions.shape[-1]) < tile)"
FROM_THE_FIRST = "(positions - positions[..., :1])"
SLOT_OF_THE_SPLIT = (
    "The place in a page is counted from the split's first key. A split may begin in the middle of a page: the place "
    "is keys % PAGE_SIZE, of the position in the sequence."
)
BLOCK_OF_THE_SPLIT = (
    "The entry of the table is counted from the split's first key. The table is that of the whole sequence: its entry "
    "is keys // PAGE_SIZE, of the position in the sequence."
)
AHEAD = (
    *edits(
        "From the second tile on the page numbers are those of the tile before. What you load in a step is for the "
        "next one: the pages of keys + BLOCK_N.",
        pages_of_the_tile_before=(LOOKED_UP, f"looked_up = torch.where({IN_THE_TILE}, positions, positions - tile)"),
    ),
    *edits(
        "Page numbers are looked up one tile too far. What is loaded before the loop is for the first tile, keys from "
        "`first` on; what is loaded in a step is for the next one, keys + BLOCK_N.",
        alone=True,
        pages_of_the_tile_after=(
            *(LOOKED_UP, f"looked_up = torch.where({IN_THE_TILE}, positions, positions + tile)"),
            *(BLOCK_ROWS, f"{BLOCK_ROWS} & ({IN_THE_TILE} | (positions + tile < last[..., None]))"),
        ),
        pages_of_the_tile_after__at_first=(
            *(LOOKED_UP, f"looked_up = torch.where({IN_THE_TILE}, positions + tile, positions)"),
            *(BLOCK_ROWS, f"{BLOCK_ROWS} & (~{IN_THE_TILE} | (positions + tile < last[..., None]))"),
        ),
        pages_of_the_tile_after__always=(
            *(LOOKED_UP, "looked_up = positions + tile"),
            *(BLOCK_ROWS, f"{BLOCK_ROWS} & (positions + tile < last[..., None])"),
        ),
    ),
    *edits(
        "The page numbers that are loaded before the loop are of keys from `last` on, where the mask lets none "
        "through. The loop begins at `first`: look up the pages of the split's own first tile.",
        alone=True,
        first_pages_of_the_next_split=(BLOCK_ROWS, f"{BLOCK_ROWS} & ~{IN_THE_TILE}"),
    ),
    *edits(
        ONE_ENTRY_TOO_FAR,
        alone=True,
        next_entry_of_the_table__before_the_loop=(BLOCKS, f"(looked_up // page_size + {IN_THE_TILE})"),
        next_entry_of_the_table__in_the_loop=(BLOCKS, f"(looked_up // page_size + ~{IN_THE_TILE})"),
    ),
    *edits(
        "The page numbers that are loaded for the next step are those of the table's next entry. The next step is "
        "BLOCK_N keys further, and a tile may hold many pages or part of one: look up (keys + BLOCK_N) // PAGE_SIZE.",
        one_entry_for_one_step=(
            BLOCKS,
            f"torch.where({IN_THE_TILE}, looked_up, looked_up - tile + page_size) // page_size",
        ),
    ),
    *edits(
        "Page numbers that are loaded one step ahead are masked as if BLOCK_N keys were missing at the end. The keys "
        "looked up are keys + BLOCK_N already: compare them with `last`.",
        pages_ahead_cut_short=(
            *("rows + blocks, mask", f"rows + blocks, mask & ({IN_THE_TILE} | (positions + tile < last[..., None]))"),
        ),
    ),
    *edits(SLOT_OF_THE_SPLIT, slot_counted_from_the_split=(PLACE, f"{FROM_THE_FIRST} % page_size")),
    *edits(BLOCK_OF_THE_SPLIT, blocks_counted_from_the_split=(BLOCKS, f"{FROM_THE_FIRST} // page_size")),
    *edits(
        "The page numbers that are loaded before the loop are those of the sequence's first keys. The loop begins at "
        "`first`, the split's own: look up keys from there on.",
        first_pages_of_the_sequence=(
            *(
                LOOKED_UP,
                f"looked_up = torch.where(torch.arange(positions.shape[-1]) < 64, {FROM_THE_FIRST}, positions)",
            ),
        ),
    ),
    *edits(
        "The page numbers are loaded once, for the first tile, and used for all. Load those of the next tile in every "
        "step of the loop.",
        pages_of_the_first_tile=(*(LOOKED_UP, f"looked_up = positions[..., :1] + {FROM_THE_FIRST} % tile"),),
    ),
    *edits(
        "The table is read from its end. Its entry i is the page of tokens i · page_size and following, the oldest "
        "first.",
        table_from_the_end=(BLOCKS, f"-(-last.amax(0)[:, None] // page_size) - 1 - {BLOCKS}"),
    ),
)

SIZE, FIRST, LAST = "-(-length // splits)", "split * size", "torch.minimum(first + size, length)"
SPLITS = (
    *edits(
        "The last keys of a sequence belong to no split: length / splits was rounded down. A split has ⌈length / "
        "splits⌉ keys, tl.cdiv(length, splits), and the last ones have fewer.",
        last_keys_lost=(SIZE, "length // splits"),
        last_keys_lost__of_pages=(SIZE, "-(-length // keys.shape[2]) // splits * keys.shape[2]"),
    ),
    *edits(
        "A split's last tile goes on into the keys of the next split, which counts them again. The mask must end at "
        "the split's own end, not at the sequence's.",
        reaches_into_the_next_split=("positions < last[..., None]", "positions < length[:, None]"),
    ),
    *edits(
        "The last split that has keys goes on behind the last token, and empty ones are no longer empty. A split ends "
        "where the sequence does, if that is earlier: tl.minimum(first + split_length, length).",
        past_the_sequences_end=(LAST, "first + size"),
    ),
)
SPLIT_SIZES = (
    *edits(
        "The splits are cut at split · length // splits. Here every split has ⌈length / splits⌉ keys, as far as the "
        "sequence has them: the last ones may have fewer, or none.",
        splits_of_equal_shares=(FIRST, "split * length // splits", LAST, "(split + 1) * length // splits"),
    ),
    *edits(
        "`last` is the number of keys of a split and not its end. A split ends at first + split_length, or where the "
        "sequence does.",
        split_ends_at_its_length=(LAST, "torch.minimum(0 * first + size, length)"),
    ),
    *edits(
        "A split without keys begins at the last key, and counts it again. Where `first` is not below `last` there is "
        "nothing to count: leave `first` as it is.",
        empty_split_reads_the_last_key=(FIRST, "torch.minimum(split * size, (length - 1).clamp(min=0))"),
    ),
    *edits(
        "A split's first key is rounded down to the beginning of a tile, so that keys of the split before count twice. "
        "The loop may begin at any key.",
        split_begins_at_a_tile=(f"last = {LAST}", f"last = {LAST}\nfirst = first // tile * tile"),
    ),
    *edits(
        "The size of a split was taken from the longest sequence. Every sequence is split by its own length: "
        "tl.cdiv(length, splits) in the kernel.",
        split_of_the_longest=(SIZE, "-(-length.max() // splits)"),
    ),
    *edits(
        "The size of a split was taken from the cache's capacity. Split the tokens that are there: tl.cdiv(length, "
        "splits).",
        split_of_the_capacity=(SIZE, "-(-keys.shape[2] // splits)"),
    ),
    *edits(
        "The size of a split was rounded up to whole tiles of keys. Here it is ⌈length / splits⌉ itself, whatever the "
        "tile: only the mask ends a tile early.",
        split_of_whole_tiles=(SIZE, "-(-(-(-length // splits)) // tile) * tile"),
    ),
    *edits(
        "The size of a split was rounded down, and the last split takes what is left. Here every split has ⌈length / "
        "splits⌉ keys and the last ones fewer: tl.cdiv(length, splits).",
        split_rounded_down=(SIZE, "length // splits", LAST, "torch.where(split == splits - 1, length, first + size)"),
    ),
)

LAGGING = edits(
    "The running maximum may lag so far behind the scores that a weight overflows float16, to which it is cast for the "
    "product: e^12 is 162,755, and float16 ends at 65,504. Let it lag by 8 at most in units of log 2, where a weight "
    "reaches 256; or take the new maximum at every tile.",
    **{
        f"maximum_lags__by_{lag}": (
            *(MAXIMUM, f"torch.where(tile.amax(-1) > running_max + {lag}, tile.amax(-1), running_max)"),
        )
        for lag in (12, 16, 24, 40)
    },
)
NATURAL = edits(NATURAL_EXP, natural_exp=(OF_STEP, f"{OF_STEP} / {LN_2}"))
OF_A_GROUP = (
    *edits(
        "One maximum is taken for all rows of the tile. Each query head has its own: the maximum over axis 1, the "
        "keys, of [rows, keys]. A head far below the others loses all its weights.",
        maximum_of_the_group=("tile.amax(-1)", "of_all_rows(tile)"),
    ),
    *edits(
        "Maximum and sum run over the query heads of the group. Each query head weighs its keys: reduce axis 1 of "
        "[rows, keys].",
        softmax_over_the_group=(
            *("torch.exp(tile - reference[..., None])", "torch.softmax(tile, -2)"),
            *(SUM, "torch.ones_like(running_sum)", RESCALE, "torch.ones_like(running_max)"),
        ),
    ),
)
LOG_OF_SUM = "The running maximum is missing from the log-sum-exp. The sum is of exp(score - maximum): add the maximum."
LOG_SUM_EXP = (
    *edits(
        NATURAL_EXP,
        natural_exp=(OF_STEP, f"{OF_STEP} / {LN_2}", LSE, f"(running_max + torch.log2(total)) * {LN_2}"),
        natural_exp__and_log=(OF_STEP, f"{OF_STEP} / {LN_2}"),
    ),
    *edits(
        told.NO_MAXIMUM,
        no_running_max=(MAXIMUM, "torch.zeros_like(running_max)", LSE, "torch.log(total)"),
        no_running_max__empty_ones_right=(MAXIMUM, "torch.zeros_like(running_max)"),
    ),
    *edits(
        "The log-sum-exp is multiplied by log2(e) where it should be divided by it. From base 2 to the natural one "
        "the factor is ln 2 = 0.6931471805599453.",
        lse_base_changed_the_wrong_way=(LSE, f"({LSE}) / {LN_2**2}"),
    ),
    *edits(
        "The factor that makes the log-sum-exp natural has too few digits. ln 2 is 0.6931471805599453.",
        **{f"ln_2_of_few_digits__{digits}": (LSE, f"({LSE}) * {digits / LN_2}") for digits in (0.69, 0.693, 0.7)},
    ),
    *edits(
        "The log-sum-exp is rounded to the query's 16 bits before it is stored. It is float32: cast the output alone.",
        lse_rounded_to_16_bits=(LSE, f"({LSE}).to(query.dtype).float()"),
    ),
    *edits(
        "The log-sum-exp is in base 2: the kernel works in units of log 2. Multiply by ln 2 = 0.6931 before it is "
        "stored.",
        lse_in_base_2=(LSE, f"({LSE}) / {LN_2}"),
    ),
    *edits(
        LOG_OF_SUM,
        log_of_sum_only=(LSE, "torch.log(total)"),
        log_of_sum_only__empty_ones_right=(LSE, "torch.log(running_sum)"),
    ),
    *edits(
        "The running maximum was stored as the log-sum-exp. Add the logarithm of the sum.",
        lse_is_the_maximum=(LSE, "running_max"),
    ),
    *edits(
        "The running sum was stored as the log-sum-exp. Take its logarithm and add the maximum.",
        lse_is_the_sum=(LSE, "running_sum"),
    ),
    *edits(
        "The maximum is in units of log 2 and the logarithm of the sum is natural. Bring both to one base: (maximum + "
        "log2(sum)) · ln 2.",
        mixed_bases=(LSE, f"running_max / {LN_2} + torch.log(total)"),
    ),
    *edits(
        "The maximum is natural and the logarithm of the sum is in base 2. Bring both to one base before you add them.",
        mixed_bases__sum=(LSE, "running_max + torch.log2(total)"),
    ),
)
EMPTY_SPLITS = (
    *edits(
        EMPTY_SPLIT,
        empty_split_nan=(TOTAL, "running_sum"),
        empty_split_nan__not_written=(TOTAL, f"torch.where((last > first)[..., None, None], {TOTAL}, torch.nan)"),
    ),
    *edits(
        "A split without keys makes a step of the loop, with all keys masked. The maximum stays at minus infinity "
        "there, and -inf - -inf is NaN. Such a split makes no step; or measure from 0 while the maximum is -inf.",
        is_nan=True,
        empty_split_nan__in_the_loop=(WALKS, "first // tile * tile + begin < last"),
        empty_split_nan__in_one_step_at_least=(WALKS, "(first + begin < last) | (begin == 0)"),
    ),
    *edits(
        "A split without keys has a log-sum-exp of 0, as if its weights added up to 1. The logarithm of an empty sum "
        "is minus infinity.",
        empty_split_counts=(LSE, f"torch.where(running_sum == 0, 0.0, {LSE})"),
    ),
)
TILES = edits("", **{f"tile_{rows}": ("tile = 64", f"tile = {rows}") for rows in (16, 32, 128)})
