"""The slips of writing into a cache in words, the most basic first: of two in one answer, the earlier is told first."""

from __future__ import annotations

from course_lib.checker.specification.model import Slip
from exercises.topics.cache_model import PAGES, WIDTHS


def _of_each(identity: str, sentence: str, alone: bool = True) -> tuple[Slip, ...]:
    """A slip that is made with the keys or with the values alone; {} in the sentence stands for the tensor."""
    return tuple(Slip(f"{identity}__{name}", sentence.replace("{}", name), alone) for name in ("key", "value"))


NOTHING_WRITTEN = (
    "The caches are as they were. Does the kernel store, and into the tensors that it was given, not into copies of "
    "them?"
)
WRITTEN_INTO_A_COPY = (
    "The rows were written into a copy. `.contiguous()` and `.reshape()` copy a tensor whose elements do not lie in "
    "that order, and nothing brings the copy back. Write into the tensor that was given, by its own strides."
)
IN_A_COPY = (
    *(
        Slip(f"written_into_a_copy{which}", WRITTEN_INTO_A_COPY)
        for which in ("", "__two_dimensions", "__three_dimensions")
    ),
    *_of_each("written_into_a_copy", WRITTEN_INTO_A_COPY),
)
SOURCE_HEAD = "Every head of the cache was given head 0's new rows. Add `head` times the source's head stride."
TARGET_HEAD = (
    "All heads were written into head 0 of the cache, one over the other. Add `head` times the cache's head stride."
)
SOURCE_SEQUENCE = (
    "Every sequence was given the new tokens of the first one. Move the source pointer by `batch` times its batch "
    "stride."
)
TARGET_SEQUENCE = (
    "All sequences were written into the first one's part of the cache. Add `batch` times the cache's batch stride."
)
ROWS_CONTIGUOUS = (
    "The new rows were read as if they were contiguous. A projection leaves them as [batch, tokens, heads, head_dim], "
    "and a transpose moves no byte: use the strides of the tensor for heads and for tokens."
)
ROWS_CONTIGUOUS_IN = (
    "The new rows were read as if they were contiguous along one dimension: {which}. Use the stride that the launcher "
    "passes."
)
CACHE_CONTIGUOUS = (
    "The cache was written as if it were contiguous. Its heads lie `stride(1)` and its slots `stride(2)` elements "
    "apart; they may be stored in another order."
)
CACHE_CONTIGUOUS_IN = (
    "The cache was written as if it were contiguous along one dimension: {which}. Use the stride that the launcher "
    "passes."
)
TAIL_NOT_MASKED = (
    "Slots behind the new tokens were written as well: the last tile is wider than the tokens that are left. Mask the "
    "store with `tokens < new_tokens`."
)
ONLY_FIRST_TILE = (
    "Only the first tile of new tokens was written. The tokens of tile i begin at i * BLOCK_T, and the grid needs a "
    "program for each tile."
)

APPEND = (
    Slip("nothing_written", NOTHING_WRITTEN),
    *IN_A_COPY,
    Slip("values_forgotten", "Only the keys were appended. The values need the same."),
    Slip(
        "keys_as_values",
        "The keys were written into both caches. Hand the second launch `value` and `value_cache`.",
    ),
    Slip("caches_exchanged", "The keys went into value_cache and the values into key_cache."),
    Slip(
        "only_first_sequence",
        "Only the first sequence of the batch was written. Move both pointers by `batch` times their batch stride.",
    ),
    Slip("rows_of_first_sequence", SOURCE_SEQUENCE),
    *_of_each("rows_of_first_sequence", "Every sequence was given the first one's new `{}`. Add the batch stride."),
    Slip("sequence_ignored_in_target", TARGET_SEQUENCE),
    *_of_each("sequence_ignored_in_target", "Every sequence's `{}` was written into the first one's part of {}_cache."),
    Slip("head_ignored_in_source", SOURCE_HEAD),
    *_of_each(
        "head_ignored_in_source",
        "Every head of {}_cache was given head 0's new `{}`. Add the head stride.",
        alone=False,
    ),
    Slip("head_ignored_in_target", TARGET_HEAD),
    *_of_each(
        "head_ignored_in_target",
        "All heads of `{}` were written into head 0 of {}_cache. Add the head stride.",
        alone=False,
    ),
    Slip(
        "position_ignored",
        "The new tokens were written from slot 0 on, over the oldest ones. Load the sequence's position and add it to "
        "the token's number.",
    ),
    Slip(
        "position_of_first_sequence",
        "Every sequence was written at the position of the first. Load `positions_pointer + batch`.",
    ),
    Slip(
        "one_slot_for_all",
        "All new tokens of a sequence were written to the same slot, one over the other. Token t goes to position + t: "
        "add the token's number to the slot as well.",
    ),
    Slip(
        "slot_too_late",
        "Every token was written one slot too far. The position given is already the first free slot: token t goes to "
        "position + t.",
    ),
    Slip(
        "slot_too_early",
        "Every token was written one slot too early, and the first of them over the newest token in the cache. Token t "
        "goes to position + t.",
    ),
    Slip(
        "only_first_token",
        "Only the first new token of each sequence was written. A prompt brings many at once: cover them with "
        "`tl.arange(0, BLOCK_T)`.",
    ),
    Slip("only_first_tile", ONLY_FIRST_TILE),
    Slip(
        "tile_ignored_in_slots",
        "Every tile of new tokens was written to the slots of the first. The slot of a token is position + its number, "
        "and the numbers of tile i begin at i * BLOCK_T.",
    ),
    Slip(
        "tile_ignored_in_rows",
        "Every tile of slots was given the new rows of the first tile. The tokens of tile i begin at i * BLOCK_T, "
        "where they are read too.",
    ),
    Slip(
        "grid_rounded_down",
        "The last, partly filled tile of new tokens was not written. The grid needs triton.cdiv(new_tokens, BLOCK_T) "
        "programs.",
    ),
    Slip(
        "grid_rounded_down__but_one",
        "The last, partly filled tile of new tokens was not written, save where it is the only one. The grid needs "
        "triton.cdiv(new_tokens, BLOCK_T) programs.",
    ),
    *(
        Slip(
            f"width_fixed__{width}{unmasked}",
            f"A row is taken to be {width} columns wide. Its width is head_dim, which is 16, 32, 64 or 128: "
            "tl.arange(0, HEAD_DIM).",
            alone=True,
        )
        for width in WIDTHS
        for unmasked in ("", "_unmasked")
    ),
    Slip(
        "last_token_missing",
        "The last new token was not written: the mask ends one too early. It is `tokens < new_tokens`.",
    ),
    Slip(
        "slots_masked_by_new_tokens",
        "The slots were compared with new_tokens. new_tokens counts the new rows: compare their numbers with it, "
        "before the position is added.",
    ),
    Slip("tail_not_masked", TAIL_NOT_MASKED),
    Slip("tail_not_masked__at_all", TAIL_NOT_MASKED),
    Slip(
        "position_in_the_source",
        "The position was added where the new rows are read. They are counted from 0; the position belongs to the slot "
        "in the cache alone.",
    ),
    Slip("rows_read_as_contiguous", ROWS_CONTIGUOUS),
    *(
        Slip(f"rows_read_as_contiguous__{place}", ROWS_CONTIGUOUS_IN.replace("{which}", which), alone=place != 2)
        for place, which in enumerate(("sequences", "heads", "tokens"))
    ),
    Slip(
        "rows_read_as_contiguous__batch_is_heads",
        "The batch stride of the new rows was taken to be key_heads times their head stride. It has a value of its "
        "own: stride(0).",
        alone=True,
    ),
    *_of_each("rows_read_as_contiguous", "`{}` was read as if it were contiguous. It has three strides of its own."),
    Slip("cache_written_as_contiguous", CACHE_CONTIGUOUS),
    *(
        Slip(f"cache_written_as_contiguous__{place}", CACHE_CONTIGUOUS_IN.replace("{which}", which), alone=place != 2)
        for place, which in enumerate(("sequences", "heads", "slots"))
    ),
    Slip(
        "cache_written_as_contiguous__batch_is_heads",
        "The cache's batch stride was taken to be key_heads times its head stride. It has a value of its own: "
        "stride(0).",
        alone=True,
    ),
    Slip(
        "cache_written_as_contiguous__head_is_slots",
        "The cache's head stride was taken to be capacity times its slot stride. It has a value of its own: stride(1).",
        alone=True,
    ),
    *_of_each("cache_written_as_contiguous", "{}_cache was written as if it were contiguous. It has its own strides."),
    Slip(
        "source_strides_in_cache",
        "The slots of the cache were found with the strides of the new rows. The cache has strides of its own: "
        "cache_batch_stride, cache_head_stride, cache_slot_stride.",
    ),
    Slip(
        "rows_by_the_caches_strides",
        "The new rows were read with the strides of the cache. They have strides of their own: new_batch_stride, "
        "new_head_stride, new_token_stride.",
    ),
    Slip(
        "rows_by_the_other_strides",
        "`value` was read with the strides of `key`. The two may lie in memory differently: take value.stride().",
    ),
    Slip(
        "cache_by_the_other_strides",
        "value_cache was written with the strides of key_cache. The two may lie in memory differently: take "
        "value_cache.stride().",
    ),
    Slip(
        "heads_and_tokens_exchanged__source",
        "Heads and tokens have changed places where the new rows are read: `head` goes with the head stride, `tokens` "
        "with the token stride.",
    ),
    Slip(
        "heads_and_tokens_exchanged__target",
        "Heads and slots have changed places in the cache: `head` goes with the head stride, the slot with the slot "
        "stride.",
    ),
)

PAGE_APPEND = (
    Slip(
        "nothing_written",
        "The pages are as they were. Does the kernel store, and into the tensors that it was given, not into copies of "
        "them?",
    ),
    *IN_A_COPY,
    Slip("keys_and_values_exchanged", "Keys went into value_pages and values into key_pages."),
    *(
        Slip(name, "The keys were written into both pools. Load the values for the second.")
        for name in ("keys_written_twice", "keys_written_twice__by_the_strides_of_values")
    ),
    Slip("values_not_written", "Only the keys are written. The values go to the same slot of value_pages."),
    Slip(
        "slots_ignored",
        "The tokens are written one behind another from the start of the pool. Where token i goes stands in slots[i].",
    ),
    Slip(
        "page_and_offset_exchanged",
        "The quotient was used as the offset and the remainder as the page. The page is slot // PAGE_SIZE.",
    ),
    Slip(
        "slot_used_as_row",
        "The slot was used as it is: the pool is not one long list of tokens. Between two pages lie those of the other "
        "heads: split it into page = slot // PAGE_SIZE and offset = slot % PAGE_SIZE, each with its stride.",
    ),
    Slip(
        "offset_forgotten",
        "Every token is written to the first slot of its page, over the one before. Add offset * slot stride.",
    ),
    Slip(
        "slot_for_the_offset",
        "The whole slot was added in the page. Only the offset in the page is: slot % PAGE_SIZE.",
    ),
    Slip("first_page_for_all", "Every token is written into page 0. Its page is slot // PAGE_SIZE."),
    *(
        Slip(
            name,
            "The page's number is multiplied by the wrong stride, as if a page were one row. A page begins page * page "
            "stride elements into the pool.",
        )
        for name in (
            "page_not_multiplied",
            "page_not_multiplied__by_its_width",
            "page_not_multiplied__left_as_it_is",
        )
    ),
    *(
        Slip(
            name,
            "A page is taken to hold one head. It holds all of them: its stride is heads · page_size · head_dim, which "
            "the launcher passes.",
        )
        for name in (
            "heads_of_a_page_forgotten",
            "heads_of_a_page_forgotten__by_sizes",
            "heads_of_a_page_forgotten__head_by_its_stride",
        )
    ),
    Slip("only_first_head", "Only head 0 was written. The grid is (tokens, heads): a program for each token and head."),
    Slip(
        "only_first_token", "Only the first token was written. The grid is (tokens, heads): a program for each of both."
    ),
    Slip("first_head_for_all", "Every head got head 0's key and value. Add head * head stride where they are read."),
    *_of_each(
        "first_head_for_all",
        "Every head got head 0's `{}`. Add head * {}_head_stride where it is read.",
        alone=False,
    ),
    Slip(
        "first_token_for_all",
        "Every token got the key and value of the first one. Add token * key_stride, and value_stride, to where they "
        "are read.",
    ),
    *_of_each("first_token_for_all", "Every token got the first one's `{}`. Add token * {}_stride where it is read."),
    Slip(
        "heads_on_top_of_each_other",
        "All heads are written to the rows of head 0. Add head * head stride to where they are written.",
    ),
    *_of_each(
        "heads_on_top_of_each_other",
        "All heads of `{}` are written to head 0's rows. Add {}_page_head_stride.",
        alone=False,
    ),
    *(
        Slip(
            name,
            "Heads and slots have changed places: in a page all slots of head 0 come first, then those of head 1. The "
            "head goes with the head stride, the offset with the slot stride.",
        )
        for name in ("head_and_slot_exchanged", "head_and_slot_exchanged__by_sizes")
    ),
    Slip(
        "one_slot_late",
        "Every token lies one slot behind its own, where the next one belongs. The mapping names the slot itself: add "
        "nothing to it.",
    ),
    Slip(
        "slot_zero_skipped",
        "A token whose slot is 0 is not written. 0 is the first slot of page 0; only -1 means no place.",
    ),
    *(
        Slip(
            name,
            "A token whose slot is -1 was written: before the pool, over the last slot of the head before, or into "
            "slot 0. It has no place: let nothing be stored where slot < 0.",
        )
        for name in ("padding_written", "padding_written__clamped")
    ),
    Slip(
        "padding_written__last_of_page_0",
        "A token whose slot is -1 was written into the last slot of page 0, which is another token's. It has no place: "
        "let nothing be stored where slot < 0.",
    ),
    *(
        Slip(
            name,
            "The slots behind the first -1 were not looked at. A -1 may stand anywhere, and tokens with a slot of "
            "their own come behind it.",
        )
        for name in ("stopped_at_padding", "stopped_at_padding__unless_first")
    ),
    *(
        Slip(
            name,
            "Page and offset are taken by bits, which is right where the page size is a power of two. It may be any "
            "number: slot // PAGE_SIZE and slot % PAGE_SIZE.",
        )
        for name in ("offset_by_bits", "offset_by_bits__page_too")
    ),
    Slip(
        "page_size_rounded_up",
        "The slots are divided by a power of two that is larger than the page. A page holds key_pages.shape[2] tokens, "
        "any number: divide by that.",
    ),
    *(
        Slip(
            f"page_size_fixed__{size}",
            f"The slots are divided by {size}, whatever the page. Its size is key_pages.shape[2].",
            alone=True,
        )
        for size in PAGES
    ),
    Slip(
        "padding_written__zeros",
        "For a token whose slot is -1 zeros were written into slot 0. -1 is no slot, and slot 0 is another token's: "
        "let nothing be stored where slot < 0.",
    ),
    Slip(
        "padding_taken_for_the_end",
        "As many tokens were taken as have a slot, the first ones. A -1 may stand anywhere among the slots, and the "
        "tokens behind it were lost.",
    ),
    Slip(
        "columns_not_masked",
        "More than head_dim columns are written, over the row behind. BLOCK_D is a power of two: mask the columns from "
        "HEAD_DIM on.",
    ),
    Slip("last_column_missing", "The last column of a row is not written. The mask is columns < HEAD_DIM."),
    Slip(
        "tokens_read_contiguously",
        "The new keys and values were read as if they were contiguous. They may be a part of a larger tensor: their "
        "rows lie key_stride and key_head_stride apart, and those of the values as their own strides say.",
    ),
    *(
        Slip(
            f"tokens_read_contiguously__{place}",
            f"The {which} of the new keys and values were taken to lie one behind another. Use the {stride} strides "
            "that the launcher passes.",
        )
        for place, (which, stride) in enumerate((("tokens", "first"), ("heads", "head")))
    ),
    *_of_each("tokens_read_contiguously", "`{}` was read as if it were contiguous. Its rows lie {}_stride apart."),
    Slip(
        "tokens_read_head_by_head",
        "The new keys and values were read as [heads, tokens, head_dim]. They are [tokens, heads, head_dim].",
    ),
    *(
        Slip(
            f"tokens_by_the_other_strides{which}",
            "The new values were read by the strides of the keys. The two may lie in memory differently: take "
            "value_stride and value_head_stride.",
            alone=bool(which),
        )
        for which in ("", "__token", "__head")
    ),
    Slip(
        "strides_ignored",
        "Where a row begins was computed from sizes, as if the pool were contiguous. It may be stored token by token, "
        "or with gaps: use the strides that the launcher passes.",
    ),
    *(
        Slip(
            f"strides_ignored__{place}",
            f"Where a {which} begins was computed from sizes, as if the pool were contiguous. Use its {which} stride.",
        )
        for place, which in enumerate(("page", "head", "slot"))
    ),
    Slip(
        "strides_ignored__page_is_heads",
        "The page stride was taken to be heads times the head stride. It has a value of its own: stride(0).",
        alone=True,
    ),
    Slip(
        "strides_ignored__head_is_slots",
        "The head stride was taken to be page_size times the slot stride. It has a value of its own: stride(1).",
        alone=True,
    ),
    *_of_each("strides_ignored", "{}_pages was written as if it were contiguous. It has three strides of its own."),
    *(
        Slip(
            f"other_strides{which}",
            f"The values are written by {said} of the key pages. The two pools may lie in memory differently: each has "
            "three strides of its own.",
            alone=bool(which),
        )
        for which, said in (
            ("", "the strides"),
            ("__page", "the page stride"),
            ("__head", "the head stride"),
            ("__slot", "the slot stride"),
        )
    ),
)
