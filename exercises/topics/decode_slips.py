"""The slips of decode kernels in words, the most basic first: of two in one answer, the earlier is told first."""

from __future__ import annotations

from dataclasses import replace

from course_lib.checker.specification.model import Slip
from exercises.topics.attention_sentences import LOG2E_MISSING, NATURAL_EXP
from exercises.topics.attention_slips import RESCALED_WRONGLY

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
SCALE_TWICE = (
    "The scores are divided by head_dim instead of its square root. Is the root missing, or is the scale applied "
    "twice, where the queries are loaded and where the scores are made?"
)
EMPTY_SEQUENCE = (
    "A sequence without a token has NaN for a result, or memory that nobody wrote. Two steps can make it: the "
    "division, "
    "as 0 / 0, and a tile without a key, as exp(-inf - (-inf)). Make no step for it, divide by 1 where the sum is 0, "
    "and store its zeros too."
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
ONE_OF_THE_NEXT_SPLIT = (
    "A split counts one key too many, the first of the next split or the slot behind the last token. `last` itself is "
    "not a part of it: the condition is keys < last."
)
ONE_OF_THE_SPLIT_MISSING = (
    "Every split's last key is left out. A split has the keys from `first` up to, not including, `last`: the condition "
    "is keys < last."
)
ALL_HEADS = (
    "Every program takes all query heads for the group of its KV head. Those of one KV head are only query_heads // "
    "key_heads: that is GROUP."
)
TILES_OF_HEADS = (
    "The query heads of a KV head are taken to begin a whole tile of rows after those of the last one. They begin at "
    "key_head * GROUP: only the first GROUP rows of a tile are heads."
)
FIRST_TABLE = "Every sequence reads the table of the first one. Row b begins b · table_stride entries in."

HEADS = (
    Slip("by_modulo", BY_MODULO),
    Slip("by_count", BY_COUNT),
    Slip("by_count__unclamped", BY_COUNT),
    Slip("first_head_for_all", FIRST_HEAD),
    Slip(
        "group_offset_missing",
        "Every program takes the query heads of the first group and writes its result there. Those of KV head k begin "
        "at k * GROUP.",
    ),
    Slip(
        "group_offset_missing__in_the_load",
        "Every program loads the query heads of the first group. Those of KV head k begin at k * GROUP.",
    ),
    Slip("group_of_all_heads", ALL_HEADS),
    Slip("group_of_all_heads__in_its_tile", ALL_HEADS),
    Slip("rows_of_no_head_read", TILES_OF_HEADS),
    Slip(
        "rows_of_no_head_stored",
        "The results of a KV head are stored a whole tile of rows after those of the last one. Its heads begin at "
        "key_head * GROUP, in the output as in the queries.",
    ),
    Slip(
        "group_larger_than_the_tile",
        "A group of more than 16 query heads doesn't fit into 16 rows, and the others were never computed. Let the "
        "tile have the next power of two of rows, and at least 16.",
    ),
)

KEYS = (
    Slip(
        "keys_used_as_values",
        "The weights are multiplied with the keys. The second product takes the values: look at its pointer and "
        "strides.",
    ),
    Slip(
        "values_used_as_keys",
        "The queries are multiplied with the values. The first product takes the keys: look at its pointer and "
        "strides.",
    ),
    Slip(
        "first_length_for_all",
        "All sequences were given the length of the first one. A program's own is at lengths_pointer + sequence.",
    ),
    Slip("one_token_too_few", TOO_FEW),
    Slip("one_token_too_few__mask", TOO_FEW),
    Slip(
        "newest_loaded_as_zeros",
        "The newest token's key and value are not loaded, and zeros are counted in their place: the mask of the loads "
        "ends one too early, and that of the scores does not. It is keys < length for all three.",
    ),
    Slip("one_token_too_many", TOO_MANY),
    Slip("one_token_too_many__mask", TOO_MANY),
    Slip("one_token_too_many__in_the_cache", TOO_MANY),
    Slip("only_first_tile", "Only the first tile of keys is used. Does the loop move on to the others?"),
    Slip("last_tile_skipped", "The last tile of keys is never looked at. Does the loop end one tile too early?"),
)

KEYS_OF_A_SPLIT = tuple(
    replace(slip, sentence=of_the_mask[slip.id]) if slip.id in of_the_mask else slip
    for of_the_mask in (
        {"one_token_too_few__mask": ONE_OF_THE_SPLIT_MISSING, "one_token_too_many__mask": ONE_OF_THE_NEXT_SPLIT},
    )
    for slip in KEYS
)

CACHE = (
    Slip(
        "length_ignored",
        "Every sequence was read as long as the cache has room. Slots behind its length hold no token: the loop ends "
        "at the sequence's own length.",
    ),
    Slip(
        "longest_length_for_all",
        "All sequences were given the length of the longest one. A program's own is at lengths_pointer + sequence.",
    ),
    Slip(
        "only_first_tile__of_128",
        "Only the first tile of keys is used. Does the loop move on to the others?",
    ),
    Slip(
        "last_tile_dropped",
        "The last tile is dropped when it isn't full. Round the number of tiles up: range(0, length, BLOCK_N).",
    ),
)

SOFTMAX = (
    Slip("scale_missing", SCALE_MISSING),
    Slip("scale_missing__in_base_two", SCALE_MISSING),
    Slip("scale_twice", SCALE_TWICE),
    Slip("scale_twice__in_base_two", SCALE_TWICE),
    *(
        Slip(
            f"scale_of_one_size__{size}",
            "The scale is that of one head dimension, whatever the queries have. It is 1/√head_dim: take head_dim from "
            "the query's shape.",
        )
        for size in (64, 128)
    ),
    Slip("scale_inverted", "The scores are multiplied by √head_dim. They are divided by it: the scale is 1/√head_dim."),
    Slip("log2e_missing", LOG2E_MISSING),
    Slip("not_divided", "The accumulator is not divided by the running sum. Divide once, after the last tile."),
    Slip(
        "divided_by_the_maximum", "The accumulator is divided by the running maximum. It is divided by the running sum."
    ),
    Slip(
        "divided_at_every_tile",
        "The accumulator is divided by the running sum at every tile, and the next product is added to what is an "
        "average already. Divide once, after the last tile.",
    ),
    Slip(
        "no_running_max",
        "The exponential is taken of the scores as they are. It overflows float32 above 88, and far below 0 every "
        "weight is 0. Subtract the running maximum first.",
    ),
    Slip(
        "no_running_max__empty_ones_right",
        "The exponential is taken of the scores as they are. It overflows float32 above 88, and far below 0 every "
        "weight is 0. Subtract the running maximum first.",
    ),
    Slip(
        "maximum_not_updated",
        "The running maximum is never updated, so that every rescaling is by 0 and only the last tile counts. End the "
        "step with running_max = new_max.",
    ),
    Slip(
        "maximum_forgets_the_old",
        "The new maximum is the tile's own, even where an earlier tile held a larger score: exp(old maximum - new "
        "maximum) then grows without bound. Take tl.maximum of the running one and the tile's.",
    ),
    Slip(
        "old_maximum_in_weights",
        "The weights are measured from the maximum before this tile, and everything else from the one after it. Use "
        "the new maximum in the weights too.",
    ),
    Slip(
        "maximum_starts_at_zero",
        "The running maximum starts at 0, so that scores far below 0 all underflow and their sum is 0. Start it at "
        "minus infinity.",
    ),
    Slip(
        "maximum_starts_finite",
        "The running maximum starts at a finite number, and scores may lie below it: all their weights are 0 then. "
        "Start it at minus infinity.",
    ),
    Slip(
        "nothing_rescaled",
        "Neither the sum nor the accumulator is rescaled when the running maximum grows. Multiply both by exp(old "
        "maximum - new maximum).",
    ),
    Slip(
        "accumulator_not_rescaled",
        "The accumulator is not rescaled when the running maximum grows. Multiply it by the exponential of old maximum "
        "- new maximum before the tile's values are added.",
    ),
    Slip(
        "sum_not_rescaled",
        "The running sum is not rescaled when the running maximum grows. It gets the same factor as the accumulator.",
    ),
    *RESCALED_WRONGLY,
    Slip(
        "tail_keys_scored",
        "Keys past the end were loaded as zeros and counted: a key of zeros scores 0, and exp(0 - maximum) is not 0. "
        "Give their scores minus infinity.",
    ),
    Slip("unused_slots_count", SLOTS_COUNT),
    Slip("unused_slots_count__value", SLOTS_COUNT),
    *(
        Slip(
            f"scores_in_float16{where}",
            "The scores are rounded to float16, which keeps three digits and nothing above 65,504. Leave them in "
            "float32, as tl.dot gives them.",
        )
        for where in ("", "__natural")
    ),
    Slip(
        "accumulator_in_float16",
        "The accumulator is kept in float16, which ends at 65,504 and rounds at every tile. Keep it in float32, and "
        "cast the finished output alone.",
    ),
)

GROUPED_SOFTMAX = (
    Slip("natural_exp", NATURAL_EXP),
    Slip("natural_exp__and_log", NATURAL_EXP),
    Slip(
        "maximum_of_the_group",
        "One maximum is taken for all rows of the tile. Each query head has its own: the maximum over axis 1, the "
        "keys, of [rows, keys]. A head far below the others loses all its weights.",
    ),
    Slip(
        "softmax_over_the_group",
        "Maximum and sum run over the query heads of the group. Each query head weighs its keys: reduce axis 1 of "
        "[rows, keys].",
    ),
)


def strides(outer: str, *, paged: bool = False) -> tuple[Slip, ...]:
    """The slips of strides; `outer` is what the first dimension of keys and values counts."""
    of_query = "sequences lie query_stride" if paged else "sequences lie query_batch_stride"
    of_query += " elements apart and its heads query_head_stride."
    named = {"outer": outer, "head": "head", "row": "slot" if paged else "token"}
    return (
        Slip(
            "strides_ignored",
            "The tensors are read as if they were contiguous. Each has strides of its own among the kernel's "
            "arguments: queries, keys and values may lie in three ways.",
        ),
        *(
            Slip(
                f"strides_ignored__both_{place}",
                f"Keys and values are read as if they were contiguous from one {which} to the next. Each has strides "
                "of its own, which the launcher passes.",
                alone=True,
            )
            for place, which in named.items()
        ),
        *(
            Slip(
                f"strides_ignored__value_{place}_by_key",
                f"From one {which} of the values to the next the keys' {which} stride was taken. The values have one "
                "of their own.",
            )
            for place, which in named.items()
        ),
        Slip(
            "strides_ignored__value_by_key",
            f"The values are read by the keys' strides. Their {outer}s, heads and {named['row']}s lie apart as their "
            "own strides say.",
        ),
        *(
            Slip(
                f"strides_ignored__key_{place}_by_value",
                f"From one {which} of the keys to the next the values' {which} stride was taken. The keys have one of "
                "their own.",
                alone=True,
            )
            for place, which in named.items()
        ),
        Slip(
            "strides_ignored__key_by_value",
            f"The keys are read by the values' strides. Their {outer}s, heads and {named['row']}s lie apart as their "
            "own strides say.",
            alone=True,
        ),
        *(
            Slip(
                f"strides_ignored__{name}{place}",
                f"The {name}s are read as if they were contiguous{said}. Use the strides of that tensor that the "
                "launcher passes.",
                alone=True,
            )
            for name in ("key", "value")
            for place, said in (
                ("", ""),
                *((f"_{place}", f" from one {which} to the next") for place, which in named.items()),
            )
        ),
        Slip("strides_ignored__query", f"The queries are read as if they were contiguous. Their {of_query}"),
        Slip(
            "strides_ignored__query_sequence",
            f"The sequences of the queries are taken as contiguous. Their {of_query}",
        ),
        Slip("strides_ignored__query_head", f"The heads of the queries are taken as contiguous. Their {of_query}"),
        *(
            Slip(
                f"first_sequence_for_all__{name}",
                f"Every sequence reads the {said} of the first one. Add sequence · its stride to the pointer.",
                alone=True,
            )
            for name, said in (("query", "query"), *(() if paged else (("key", "keys"), ("value", "values"))))
        ),
    )


OUTPUT_STRIDES = tuple(
    Slip(
        f"output_by_other_strides{variant}",
        f"The output was written by the query's {which}. It has strides of its own among the kernel's arguments.",
    )
    for variant, which in (("", "strides"), ("__sequence", "sequence stride"), ("__head", "head stride"))
)
OUTPUT_LIKE_QUERY = Slip(
    "output_laid_out_like_query",
    "torch.empty_like(query) lays the output out in query's order, which need not be contiguous, and its rows were "
    "stored as if it were. Hand the kernel the output's own strides, or make it by torch.empty with the query's shape.",
)
TAIL_OUT_OF_BOUNDS = (
    "Keys or values behind the last token were read, and in places memory that is not the tensor's. Mask both loads "
    "with keys < length and other=0.0: a weight of 0 does not help, as 0 · NaN is NaN."
)
OUT_OF_BOUNDS = (
    Slip("tail_read_out_of_bounds", TAIL_OUT_OF_BOUNDS),
    Slip("tail_read_out_of_bounds__key", TAIL_OUT_OF_BOUNDS),
    Slip("tail_read_out_of_bounds__value", TAIL_OUT_OF_BOUNDS),
)

PAGES = (
    Slip(
        "table_ignored",
        "Block i of the sequence is read from page i of the pool. Which page it is stands in the table.",
    ),
    Slip(
        "pages_consecutive",
        "Only the first entry of the table is used, and the pages behind it are taken to follow in memory. Every block "
        "has an entry of its own: look each one up.",
    ),
    Slip("first_table_for_all", FIRST_TABLE),
    Slip("first_table_for_all__no_page_is_0", FIRST_TABLE),
    Slip(
        "page_not_multiplied",
        "A page's number was taken as the number of its first row. Page p begins at p · page stride.",
    ),
    *(
        Slip(
            name,
            "A page is taken to hold one head. It holds all of them: multiply its number by the page stride, which the "
            "launcher passes.",
        )
        for name in ("heads_of_a_page_forgotten", "heads_of_a_page_forgotten__by_sizes")
    ),
    Slip(
        "offset_left_out",
        "The first token of a page was read for all of its tokens. Add the place in the page times the slots' stride.",
    ),
    Slip(
        "last_page_read_whole",
        "The last page is read to its end, whatever it holds there. Positions from `length` on get no load and a score "
        "of minus infinity.",
    ),
    Slip(
        "last_page_left_out",
        "The tokens of the last, partly filled page are missing: the number of pages was rounded down. Round it up, "
        "and mask.",
    ),
)

AHEAD = (
    Slip(
        "pages_of_the_tile_before",
        "From the second tile on the page numbers are those of the tile before. What you load in a step is for the "
        "next "
        "one: the pages of keys + BLOCK_N.",
    ),
    Slip(
        "pages_ahead_cut_short",
        "Page numbers that are loaded one step ahead are masked as if BLOCK_N keys were missing at the end. The keys "
        "looked up are keys + BLOCK_N already: compare them with `last`.",
    ),
    Slip(
        "slot_counted_from_the_split",
        "The place in a page is counted from the split's first key. A split may begin in the middle of a page: the "
        "place is keys % PAGE_SIZE, of the position in the sequence.",
    ),
    Slip(
        "blocks_counted_from_the_split",
        "The entry of the table is counted from the split's first key. The table is that of the whole sequence: its "
        "entry is keys // PAGE_SIZE, of the position in the sequence.",
    ),
    Slip(
        "first_pages_of_the_sequence",
        "The page numbers that are loaded before the loop are those of the sequence's first keys. The loop begins at "
        "`first`, the split's own: look up keys from there on.",
    ),
    Slip(
        "pages_of_the_first_tile",
        "The page numbers are loaded once, for the first tile, and used for all. Load those of the next tile in every "
        "step of the loop.",
    ),
    Slip(
        "table_from_the_end",
        "The table is read from its end. Its entry i is the page of tokens i · page_size and following, the oldest "
        "first.",
    ),
)

SPLITS = (
    Slip(
        "last_keys_lost",
        "The last keys of a sequence belong to no split: length / splits was rounded down. A split has ⌈length / "
        "splits⌉ keys, tl.cdiv(length, splits), and the last ones have fewer.",
    ),
    Slip(
        "reaches_into_the_next_split",
        "A split's last tile goes on into the keys of the next split, which counts them again. The mask must end at "
        "the split's own end, not at the sequence's.",
    ),
    Slip(
        "past_the_sequences_end",
        "The last split that has keys goes on behind the last token, and empty ones are no longer empty. A split ends "
        "where the sequence does, if that is earlier: tl.minimum(first + split_length, length).",
    ),
)

SPLIT_SIZES = (
    Slip(
        "splits_of_equal_shares",
        "The splits are cut at split · length // splits. Here every split has ⌈length / splits⌉ keys, as far as the "
        "sequence has them: the last ones may have fewer, or none.",
    ),
    Slip(
        "split_ends_at_its_length",
        "`last` is the number of keys of a split and not its end. A split ends at first + split_length, or where the "
        "sequence does.",
    ),
    Slip(
        "empty_split_reads_the_last_key",
        "A split without keys begins at the last key, and counts it again. Where `first` is not below `last` there is "
        "nothing to count: leave `first` as it is.",
    ),
    Slip(
        "split_begins_at_a_tile",
        "A split's first key is rounded down to the beginning of a tile, so that keys of the split before count twice. "
        "The loop may begin at any key.",
    ),
    Slip(
        "split_of_the_longest",
        "The size of a split was taken from the longest sequence. Every sequence is split by its own length: "
        "tl.cdiv(length, splits) in the kernel.",
    ),
    Slip(
        "split_of_the_capacity",
        "The size of a split was taken from the cache's capacity. Split the tokens that are there: tl.cdiv(length, "
        "splits).",
    ),
    Slip(
        "split_of_whole_tiles",
        "The size of a split was rounded up to whole tiles of keys. Here it is ⌈length / splits⌉ itself, whatever the "
        "tile: only the mask ends a tile early.",
    ),
    Slip(
        "split_rounded_down",
        "The size of a split was rounded down, and the last split takes what is left. Here every split has ⌈length / "
        "splits⌉ keys and the last ones fewer: tl.cdiv(length, splits).",
    ),
)

LOG_SUM_EXP = (
    Slip(
        "lse_base_changed_the_wrong_way",
        "The log-sum-exp is multiplied by log2(e) where it should be divided by it. From base 2 to the natural one "
        "the factor is ln 2 = 0.6931471805599453.",
    ),
    *(
        Slip(
            f"ln_2_of_few_digits__{digits}",
            "The factor that makes the log-sum-exp natural has too few digits. ln 2 is 0.6931471805599453.",
        )
        for digits in (0.69, 0.693, 0.7)
    ),
    Slip(
        "lse_rounded_to_16_bits",
        "The log-sum-exp is rounded to the query's 16 bits before it is stored. It is float32: cast the output alone.",
    ),
    Slip(
        "lse_in_base_2",
        "The log-sum-exp is in base 2: the kernel works in units of log 2. Multiply by ln 2 = 0.6931 before it is "
        "stored.",
    ),
    Slip(
        "log_of_sum_only",
        "The running maximum is missing from the log-sum-exp. The sum is of exp(score - maximum): add the maximum.",
    ),
    Slip(
        "log_of_sum_only__empty_ones_right",
        "The running maximum is missing from the log-sum-exp. The sum is of exp(score - maximum): add the maximum.",
    ),
    Slip("lse_is_the_maximum", "The running maximum was stored as the log-sum-exp. Add the logarithm of the sum."),
    Slip("lse_is_the_sum", "The running sum was stored as the log-sum-exp. Take its logarithm and add the maximum."),
    Slip(
        "mixed_bases",
        "The maximum is in units of log 2 and the logarithm of the sum is natural. Bring both to one base: (maximum + "
        "log2(sum)) · ln 2.",
    ),
    Slip(
        "mixed_bases__sum",
        "The maximum is natural and the logarithm of the sum is in base 2. Bring both to one base before you add them.",
    ),
)

EMPTY_SPLIT = (
    "A split without keys has NaN for a result, or memory that nobody wrote. Its sum is 0: divide by 1 there, and "
    "store zeros and minus infinity for it too, without an early return."
)
EMPTY_TILE = (
    "A split without keys makes a step of the loop, with all keys masked. The maximum stays at minus infinity there, "
    "and -inf - -inf is NaN. Such a split makes no step; or measure from 0 while the maximum is -inf."
)
EMPTY_SPLITS = (
    Slip("empty_split_nan", EMPTY_SPLIT),
    Slip("empty_split_nan__not_written", EMPTY_SPLIT),
    Slip("empty_split_nan__in_the_loop", EMPTY_TILE, is_nan=True),
    Slip("empty_split_nan__in_one_step_at_least", EMPTY_TILE, is_nan=True),
    Slip(
        "empty_split_counts",
        "A split without keys has a log-sum-exp of 0, as if its weights added up to 1. The logarithm of an empty sum "
        "is minus infinity.",
    ),
)

SPLITS_EXCHANGED = Slip(
    "splits_and_sequences_exchanged",
    "The results are stored as [batch, splits, ...] where [splits, batch, ...] is asked for: the row number is (split "
    "· batch + sequence) · query_heads + head.",
)

LARGEST_MISSING = (
    "The largest log-sum-exp is missing from the merged one. The sum is of exp(lse - largest): add the largest to its "
    "logarithm."
)

AVERAGED = (
    "The splits were averaged as equals. One whose scores are higher has a larger share of the softmax: weigh it by "
    "exp(its log-sum-exp - the whole's)."
)
EMPTY_MERGE = (
    "A sequence without any key has NaN for a result, or memory that nobody wrote. Store zeros and minus infinity: "
    "measure from 0 where the largest is -inf, divide by 1 where the weights' total is 0."
)
