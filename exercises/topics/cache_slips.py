"""The slips of writing into a cache, the most basic first: of two in one answer, the earlier is told first."""

from __future__ import annotations

from course_lib.checker import edits
from course_lib.checker.specification.edits import Edit


def of_both(old: str, new: str) -> tuple[str, ...]:
    """The pieces of an edit that is made with the keys and with the values; {} stands for the tensor."""
    return tuple(piece.replace("{}", name) for name in ("key", "value") for piece in (old, new))


def of_each(identity: str, sentence: str, old: str, new: str, alone: bool = True) -> tuple[Edit, ...]:
    """An edit that is made with the keys or with the values alone; {} stands for the tensor, in the sentence too."""
    return tuple(
        edit
        for name in ("key", "value")
        for edit in edits(
            sentence.replace("{}", name),
            alone=alone,
            **{f"{identity}__{name}": (old.replace("{}", name), new.replace("{}", name))},
        )
    )


def in_a_copy(cache: str) -> dict[str, tuple[str, ...]]:
    """What is written goes into a copy, which `.contiguous()` and `.reshape()` make of some tensors alone."""
    ways = {
        "": f"not {cache}.is_contiguous()",
        "__two_dimensions": f"is_copied({cache}, 2)",
        "__three_dimensions": f"is_copied({cache}, 3)",
    }
    return {
        f"written_into_a_copy{way}": ("programs =", f"if {copied}:\n    return\nprograms =")
        for way, copied in ways.items()
    }


WRITTEN_INTO_A_COPY = (
    "The rows were written into a copy. `.contiguous()` and `.reshape()` copy a tensor whose elements do not lie in "
    "that order, and nothing brings the copy back. Write into the tensor that was given, by its own strides."
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
    *edits("The caches are as they were. Does the kernel store, and into the tensors that it was given, not into "
        "copies of them?", nothing_written=("copy_rows(key,", "return\ncopy_rows(key,")),
    *edits(WRITTEN_INTO_A_COPY, **in_a_copy("cache")),
    *of_each("written_into_a_copy", WRITTEN_INTO_A_COPY, "copy_rows({},", "{}_cache.is_contiguous() and copy_rows({},"),
    *edits("Only the keys were appended. The values need the same.",
        values_forgotten=("copy_rows(value,", "return\ncopy_rows(value,")),
    *edits("The keys were written into both caches. Hand the second launch `value` and `value_cache`.",
        keys_as_values=("copy_rows(value,", "value = key\ncopy_rows(value,")),
    *edits("The keys went into value_cache and the values into key_cache.",
        caches_exchanged=("copy_rows(key,", "key_cache, value_cache = value_cache, key_cache\ncopy_rows(key,")),
    *edits("Only the first sequence of the batch was written. Move both pointers by `batch` times their batch stride.",
        only_first_sequence=("heads, batch", "heads, 1")),
    *edits("Every sequence was given the new tokens of the first one. Move the source pointer by `batch` times its "
        "batch stride.", rows_of_first_sequence=("sequence * source[0]", "0 * sequence")),
    *of_each("rows_of_first_sequence", "Every sequence was given the first one's new `{}`. Add the batch stride.",
        "{}.stride()", "replaced_at({}, 0, 0)"),
    *edits("All sequences were written into the first one's part of the cache. Add `batch` times the cache's batch "
        "stride.", sequence_ignored_in_target=("sequence * target[0]", "0 * sequence")),
    *of_each("sequence_ignored_in_target", "Every sequence's `{}` was written into the first one's part of {}_cache.",
        "{}_cache.stride()", "replaced_at({}_cache, 0, 0)"),
    *edits("Every head of the cache was given head 0's new rows. Add `head` times the source's head stride.",
        head_ignored_in_source=("head * source[1]", "0 * head")),
    *of_each("head_ignored_in_source", "Every head of {}_cache was given head 0's new `{}`. Add the head stride.",
        "{}.stride()", "replaced_at({}, 1, 0)", alone=False),
    *edits("All heads were written into head 0 of the cache, one over the other. Add `head` times the cache's head "
        "stride.", head_ignored_in_target=("head * target[1]", "0 * head")),
    *of_each("head_ignored_in_target", "All heads of `{}` were written into head 0 of {}_cache. Add the head stride.",
        "{}_cache.stride()", "replaced_at({}_cache, 1, 0)", alone=False),
    *edits("The new tokens were written from slot 0 on, over the oldest ones. Load the sequence's position and add it "
        "to the token's number.", position_ignored=("load(positions, sequence).long()", "0 * sequence")),
    *edits("Every sequence was written at the position of the first. Load `positions_pointer + batch`.",
        position_of_first_sequence=("load(positions, sequence)", "load(positions, 0 * sequence)")),
    *edits("All new tokens of a sequence were written to the same slot, one over the other. Token t goes to position "
        "+ t: add the token's number to the slot as well.", one_slot_for_all=("start + tokens", "start + 0 * tokens")),
    *edits("Every token was written one slot too far. The position given is already the first free slot: token t goes "
        "to position + t.", slot_too_late=("slots * target[2]", "(slots + 1) * target[2]")),
    *edits("Every token was written one slot too early, and the first of them over the newest token in the cache. "
        "Token t goes to position + t.", slot_too_early=("slots * target[2]", "(slots - 1) * target[2]")),
    *edits("Only the first new token of each sequence was written. A prompt brings many at once: cover them with "
        "`tl.arange(0, BLOCK_T)`.", only_first_token=("tokens < count", "tokens < 1")),
    *edits(ONLY_FIRST_TILE, only_first_tile=("-(-count // TILE)", "1")),
    *edits("Every tile of new tokens was written to the slots of the first. The slot of a token is position + its "
        "number, and the numbers of tile i begin at i * BLOCK_T.",
        tile_ignored_in_slots=("start + tokens", "start + row")),
    *edits("Every tile of slots was given the new rows of the first tile. The tokens of tile i begin at i * BLOCK_T, "
        "where they are read too.", tile_ignored_in_rows=("tokens * source[2]", "row * source[2]")),
    *edits("The last, partly filled tile of new tokens was not written. The grid needs triton.cdiv(new_tokens, "
        "BLOCK_T) programs.", grid_rounded_down=("-(-count // TILE)", "count // TILE")),
    *edits("The last, partly filled tile of new tokens was not written, save where it is the only one. The grid needs "
        "triton.cdiv(new_tokens, BLOCK_T) programs.",
        grid_rounded_down__but_one=("-(-count // TILE)", "max(1, count // TILE)")),
    *(
        edit
        for width in (16, 32, 64, 128)
        for edit in edits(
            f"A row is taken to be {width} columns wide. Its width is head_dim, which is 16, 32, 64 or 128: "
            "tl.arange(0, HEAD_DIM).",
            alone=True,
            **{
                f"width_fixed__{width}": ("tiles =", f"width = min({width}, width)\ntiles ="),
                f"width_fixed__{width}_unmasked": ("tiles =", f"width = {width}\ntiles ="),
            },
        )
    ),
    *edits("The last new token was not written: the mask ends one too early. It is `tokens < new_tokens`.",
        last_token_missing=("tokens < count", "tokens < count - 1")),
    *edits("The slots were compared with new_tokens. new_tokens counts the new rows: compare their numbers with it, "
        "before the position is added.", slots_masked_by_new_tokens=("tokens < count", "slots < count")),
    *edits(TAIL_NOT_MASKED, tail_not_masked=("rows, inside", "rows"),
        tail_not_masked__at_all=("rows, inside", "rows", "new, offsets, inside", "new, offsets, None")),
    *edits("The position was added where the new rows are read. They are counted from 0; the position belongs to the "
        "slot in the cache alone.", position_in_the_source=("tokens * source[2]", "(start + tokens) * source[2]")),
    *edits("The new rows were read as if they were contiguous. A projection leaves them as [batch, tokens, heads, "
        "head_dim], and a transpose moves no byte: use the strides of the tensor for heads and for tokens.",
        rows_read_as_contiguous=of_both("{}.stride()", "packed({})")),
    *(
        edit
        for place, which in enumerate(("sequences", "heads", "tokens"))
        for edit in edits(
            f"The new rows were read as if they were contiguous along one dimension: {which}. Use the stride that the "
            "launcher passes.",
            alone=place != 2,
            **{
                f"rows_read_as_contiguous__{place}": of_both("{}.stride()", f"packed_at({{}}, {place})")
            },
        )
    ),
    *edits("The batch stride of the new rows was taken to be key_heads times their head stride. It has a value of its "
        "own: stride(0).", alone=True,
        rows_read_as_contiguous__batch_is_heads=of_both("{}.stride()",
            "replaced_at({}, 0, {}.shape[1] * {}.stride(1))")),
    *of_each("rows_read_as_contiguous", "`{}` was read as if it were contiguous. It has three strides of its own.",
        "{}.stride()", "packed({})"),
    *edits("The cache was written as if it were contiguous. Its heads lie `stride(1)` and its slots `stride(2)` "
        "elements apart; they may be stored in another order.",
        cache_written_as_contiguous=of_both("{}_cache.stride()", "packed({}_cache)")),
    *(
        edit
        for place, which in enumerate(("sequences", "heads", "slots"))
        for edit in edits(
            f"The cache was written as if it were contiguous along one dimension: {which}. Use the stride that the "
            "launcher passes.",
            alone=place != 2,
            **{
                f"cache_written_as_contiguous__{place}": of_both("{}_cache.stride()", f"packed_at({{}}_cache, {place})")
            },
        )
    ),
    *edits("The cache's batch stride was taken to be key_heads times its head stride. It has a value of its own: "
        "stride(0).", alone=True,
        cache_written_as_contiguous__batch_is_heads=of_both("{}_cache.stride()",
            "replaced_at({}_cache, 0, {}_cache.shape[1] * {}_cache.stride(1))")),
    *edits("The cache's head stride was taken to be capacity times its slot stride. It has a value of its own: "
        "stride(1).", alone=True,
        cache_written_as_contiguous__head_is_slots=of_both("{}_cache.stride()",
            "replaced_at({}_cache, 1, {}_cache.shape[2] * {}_cache.stride(2))")),
    *of_each("cache_written_as_contiguous", "{}_cache was written as if it were contiguous. It has its own strides.",
        "{}_cache.stride()", "packed({}_cache)"),
    *edits("The slots of the cache were found with the strides of the new rows. The cache has strides of its own: "
        "cache_batch_stride, cache_head_stride, cache_slot_stride.",
        source_strides_in_cache=of_both("{}_cache.stride()", "{}.stride()")),
    *edits("The new rows were read with the strides of the cache. They have strides of their own: new_batch_stride, "
        "new_head_stride, new_token_stride.", rows_by_the_caches_strides=of_both("{}.stride()", "{}_cache.stride()")),
    *edits("`value` was read with the strides of `key`. The two may lie in memory differently: take value.stride().",
        rows_by_the_other_strides=("value.stride()", "key.stride()")),
    *edits("value_cache was written with the strides of key_cache. The two may lie in memory differently: take "
        "value_cache.stride().", cache_by_the_other_strides=("value_cache.stride()", "key_cache.stride()")),
    *edits("Heads and tokens have changed places where the new rows are read: `head` goes with the head stride, "
        "`tokens` with the token stride.",
        heads_and_tokens_exchanged__source=("head * source[1]", "head * source[2]", "tokens * source[2]",
            "tokens * source[1]")),
    *edits("Heads and slots have changed places in the cache: `head` goes with the head stride, the slot with the "
        "slot stride.",
        heads_and_tokens_exchanged__target=("head * target[1]", "head * target[2]", "slots * target[2]",
            "slots * target[1]")),
    *edits("", masked_lanes_are_0=("math.nan", "0.0")),
)  # fmt: skip

PAGE, OFFSET = "torch.div(slot, size, rounding_mode='trunc')", "torch.fmod(slot, size)"
PLACE = f"{PAGE}, {OFFSET}"
PAGE_APPEND = (
    *edits("The pages are as they were. Does the kernel store, and into the tensors that it was given, not into "
        "copies of them?", nothing_written=("copy_to_pages(key,", "return\ncopy_to_pages(key,")),
    *edits(WRITTEN_INTO_A_COPY, **in_a_copy("pool")),
    *of_each("written_into_a_copy", WRITTEN_INTO_A_COPY, "copy_to_pages({},",
        "{}_pages.is_contiguous() and copy_to_pages({},"),
    *edits("Keys went into value_pages and values into key_pages.",
        keys_and_values_exchanged=("copy_to_pages(key,",
            "key_pages, value_pages = value_pages, key_pages\ncopy_to_pages(key,")),
    *edits("The keys were written into both pools. Load the values for the second.",
        keys_written_twice=("copy_to_pages(value,", "value = key\ncopy_to_pages(value,"),
        keys_written_twice__by_the_strides_of_values=("value, value.stride()", "key, value.stride()")),
    *edits("Only the keys are written. The values go to the same slot of value_pages.",
        values_not_written=("copy_to_pages(value,", "return\ncopy_to_pages(value,")),
    *edits("The tokens are written one behind another from the start of the pool. Where token i goes stands in "
        "slots[i].", slots_ignored=(PLACE, PLACE.replace("slot", "token"))),
    *edits("The quotient was used as the offset and the remainder as the page. The page is slot // PAGE_SIZE.",
        page_and_offset_exchanged=("page, offset =", "offset, page =")),
    *edits("The slot was used as it is: the pool is not one long list of tokens. Between two pages lie those of the "
        "other heads: split it into page = slot // PAGE_SIZE and offset = slot % PAGE_SIZE, each with its stride.",
        slot_used_as_row=(PLACE, "0 * slot, slot")),
    *edits("Every token is written to the first slot of its page, over the one before. Add offset * slot stride.",
        offset_forgotten=(OFFSET, "0 * slot")),
    *edits("The whole slot was added in the page. Only the offset in the page is: slot % PAGE_SIZE.",
        slot_for_the_offset=(OFFSET, "slot")),
    *edits("Every token is written into page 0. Its page is slot // PAGE_SIZE.", first_page_for_all=(PAGE, "0 * slot")),
    *edits("The page's number is multiplied by the wrong stride, as if a page were one row. A page begins page * page "
        "stride elements into the pool.", page_not_multiplied=("page * target[0]", "page * target[2]"),
        page_not_multiplied__by_its_width=("page * target[0]", "page * size"),
        page_not_multiplied__left_as_it_is=("page * target[0]", "page")),
    *edits("A page is taken to hold one head. It holds all of them: its stride is heads · page_size · head_dim, which "
        "the launcher passes.", heads_of_a_page_forgotten=("page * target[0]", "page * target[1]"),
        heads_of_a_page_forgotten__by_sizes=("page * target[0] + head * target[1] + offset * target[2]",
            "((page + head) * size + offset) * head_dim"),
        heads_of_a_page_forgotten__head_by_its_stride=("page * target[0]", "page * size * head_dim")),
    *edits("Only head 0 was written. The grid is (tokens, heads): a program for each token and head.",
        only_first_head=("count, heads\ntoken", "count, 1\ntoken")),
    *edits("Only the first token was written. The grid is (tokens, heads): a program for each of both.",
        only_first_token=("programs = count", "programs = min(count, 1)")),
    *edits("Every head got head 0's key and value. Add head * head stride where they are read.",
        first_head_for_all=("head * source[1]", "0 * head")),
    *of_each("first_head_for_all", "Every head got head 0's `{}`. Add head * {}_head_stride where it is read.",
        "{}.stride()", "replaced_at({}, 1, 0)", alone=False),
    *edits("Every token got the key and value of the first one. Add token * key_stride, and value_stride, to where "
        "they are read.", first_token_for_all=("token * source[0]", "0 * token")),
    *of_each("first_token_for_all", "Every token got the first one's `{}`. Add token * {}_stride where it is read.",
        "{}.stride()", "replaced_at({}, 0, 0)"),
    *edits("All heads are written to the rows of head 0. Add head * head stride to where they are written.",
        heads_on_top_of_each_other=("head * target[1]", "0 * head")),
    *of_each("heads_on_top_of_each_other", "All heads of `{}` are written to head 0's rows. Add {}_page_head_stride.",
        "{}_pages.stride()", "replaced_at({}_pages, 1, 0)", alone=False),
    *edits("Heads and slots have changed places: in a page all slots of head 0 come first, then those of head 1. The "
        "head goes with the head stride, the offset with the slot stride.",
        head_and_slot_exchanged=("head * target[1]", "head * target[2]", "offset * target[2]", "offset * target[1]"),
        head_and_slot_exchanged__by_sizes=("page * target[0] + head * target[1] + offset * target[2]",
            "((page * size + offset) * heads + head) * head_dim")),
    *edits("Every token lies one slot behind its own, where the next one belongs. The mapping names the slot itself: "
        "add nothing to it.", one_slot_late=(PLACE, PLACE.replace("slot", "(slot + 1)"))),
    *edits("A token whose slot is 0 is not written. 0 is the first slot of page 0; only -1 means no place.",
        slot_zero_skipped=("slot >= 0", "slot > 0")),
    *edits("A token whose slot is -1 was written: before the pool, over the last slot of the head before, or into "
        "slot 0. It has no place: let nothing be stored where slot < 0.", padding_written=("slot >= 0", "slot == slot"),
        padding_written__clamped=("slots[token]", "slots[token].clamp(min=0)")),
    *edits("A token whose slot is -1 was written into the last slot of page 0, which is another token's. It has no "
        "place: let nothing be stored where slot < 0.",
        padding_written__last_of_page_0=("slots[token]", "torch.where(slots < 0, size - 1, slots)[token]")),
    *edits("The slots behind the first -1 were not looked at. A -1 may stand anywhere, and tokens with a slot of "
        "their own come behind it.",
        stopped_at_padding=("programs = count", "programs = int((slots >= 0).int().cumprod(0).sum())"),
        stopped_at_padding__unless_first=("programs = count",
            "programs = int((slots >= 0).int().cumprod(0).sum()) or count")),
    *edits("Page and offset are taken by bits, which is right where the page size is a power of two. It may be any "
        "number: slot // PAGE_SIZE and slot % PAGE_SIZE.", offset_by_bits=(OFFSET, "slot & size - 1"),
        offset_by_bits__page_too=(PAGE, "slot >> size.bit_length() - 1", OFFSET, "slot & size - 1")),
    *edits("The slots are divided by a power of two that is larger than the page. A page holds key_pages.shape[2] "
        "tokens, any number: divide by that.",
        page_size_rounded_up=(PLACE, PLACE.replace("size", "(1 << (size - 1).bit_length())"))),
    *(
        edit
        for size in (4, 8, 16, 32)
        for edit in edits(
            f"The slots are divided by {size}, whatever the page. Its size is key_pages.shape[2].",
            alone=True,
            **{f"page_size_fixed__{size}": (PLACE, PLACE.replace("size", str(size)))},
        )
    ),
    *edits("For a token whose slot is -1 zeros were written into slot 0. -1 is no slot, and slot 0 is another "
        "token's: let nothing be stored where slot < 0.",
        padding_written__zeros=("slots[token]", "slots[token].clamp(min=0)", "offsets, rows",
            "offsets, torch.where(slots[token] < 0, 0, rows)")),
    *edits("As many tokens were taken as have a slot, the first ones. A -1 may stand anywhere among the slots, and "
        "the tokens behind it were lost.",
        padding_taken_for_the_end=("programs = count", "programs = int((slots >= 0).sum())")),
    *edits("More than head_dim columns are written, over the row behind. BLOCK_D is a power of two: mask the columns "
        "from HEAD_DIM on.", columns_not_masked=("present & (column < head_dim)", "present")),
    *edits("The last column of a row is not written. The mask is columns < HEAD_DIM.",
        last_column_missing=("column < head_dim", "column < head_dim - 1")),
    *edits("The new keys and values were read as if they were contiguous. They may be a part of a larger tensor: "
        "their rows lie key_stride and key_head_stride apart, and those of the values as their own strides say.",
        tokens_read_contiguously=of_both("{}.stride()", "packed({})")),
    *edits("The tokens of the new keys and values were taken to lie one behind another. Use the first strides that "
        "the launcher passes.", tokens_read_contiguously__0=of_both("{}.stride()", "packed_at({}, 0)")),
    *edits("The heads of the new keys and values were taken to lie one behind another. Use the head strides that the "
        "launcher passes.", tokens_read_contiguously__1=of_both("{}.stride()", "packed_at({}, 1)")),
    *of_each("tokens_read_contiguously", "`{}` was read as if it were contiguous. Its rows lie {}_stride apart.",
        "{}.stride()", "packed({})"),
    *edits("The new keys and values were read as [heads, tokens, head_dim]. They are [tokens, heads, head_dim].",
        tokens_read_head_by_head=("token * source[0] + head * source[1]", "(head * count + token) * head_dim")),
    *edits("The new values were read by the strides of the keys. The two may lie in memory differently: take "
        "value_stride and value_head_stride.", tokens_by_the_other_strides=("value.stride()", "key.stride()")),
    *edits("The new values were read by the strides of the keys. The two may lie in memory differently: take "
        "value_stride and value_head_stride.", alone=True,
        tokens_by_the_other_strides__token=("value.stride()", "replaced_at(value, 0, key.stride(0))")),
    *edits("The new values were read by the strides of the keys. The two may lie in memory differently: take "
        "value_stride and value_head_stride.", alone=True,
        tokens_by_the_other_strides__head=("value.stride()", "replaced_at(value, 1, key.stride(1))")),
    *edits("Where a row begins was computed from sizes, as if the pool were contiguous. It may be stored token by "
        "token, or with gaps: use the strides that the launcher passes.",
        strides_ignored=of_both("{}_pages.stride()", "packed({}_pages)")),
    *(
        edit
        for place, which in enumerate(("page", "head", "slot"))
        for edit in edits(
            f"Where a {which} begins was computed from sizes, as if the pool were contiguous. Use its {which} stride.",
            **{f"strides_ignored__{place}": of_both("{}_pages.stride()", f"packed_at({{}}_pages, {place})")},
        )
    ),
    *edits("The page stride was taken to be heads times the head stride. It has a value of its own: stride(0).",
        alone=True,
        strides_ignored__page_is_heads=of_both("{}_pages.stride()",
            "replaced_at({}_pages, 0, {}_pages.shape[1] * {}_pages.stride(1))")),
    *edits("The head stride was taken to be page_size times the slot stride. It has a value of its own: stride(1).",
        alone=True,
        strides_ignored__head_is_slots=of_both("{}_pages.stride()",
            "replaced_at({}_pages, 1, {}_pages.shape[2] * {}_pages.stride(2))")),
    *of_each("strides_ignored", "{}_pages was written as if it were contiguous. It has three strides of its own.",
        "{}_pages.stride()", "packed({}_pages)"),
    *edits("The values are written by the strides of the key pages. The two pools may lie in memory differently: each "
        "has three strides of its own.", other_strides=("value_pages.stride()", "key_pages.stride()")),
    *edits("The values are written by the page stride of the key pages. The two pools may lie in memory differently: "
        "each has three strides of its own.", alone=True,
        other_strides__page=("value_pages.stride()", "replaced_at(value_pages, 0, key_pages.stride(0))")),
    *edits("The values are written by the head stride of the key pages. The two pools may lie in memory differently: "
        "each has three strides of its own.", alone=True,
        other_strides__head=("value_pages.stride()", "replaced_at(value_pages, 1, key_pages.stride(1))")),
    *edits("The values are written by the slot stride of the key pages. The two pools may lie in memory differently: "
        "each has three strides of its own.", alone=True,
        other_strides__slot=("value_pages.stride()", "replaced_at(value_pages, 2, key_pages.stride(2))")),
)  # fmt: skip
