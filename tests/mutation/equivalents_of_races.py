"""Exercises 4.7 and 8.6, which race on a GPU: what passes their small cases although it differs, and why it may.

Here numbers are judged, in float16. What makes an answer slower and no number wrong is the clock's business.
"""

from __future__ import annotations

from tests.mutation.reasons import (
    A_CONDITION,
    ANY_REFERENCE,
    ANYTHING,
    DEFAULT_DTYPE,
    FIRST_RESCALING,
    IMPLICIT_CAST,
    LOW_ENOUGH,
    NOT_THE_MAXIMUM,
    OFFSETS_OF_64_BITS,
    ONE_DIMENSION,
    SAME_NUMBER,
    STARTS_EXACT,
)
from tests.mutation.reasons import entry as _

FURTHER_TILES = "The further tiles hold only keys that are hidden: more work, and the same numbers."
MASKED_TILES = "Tiles that could go without masks are masked: more work, and the same numbers."
NEVER_LESS = "The bound that is left out is never the smaller one: the first row of a program is one of the queries."
A_KEY_IN_EVERY_TILE = "Every tile that is looked at has a key, and no score comes near: exp of the difference is 0."
CONTIGUOUS = "Keys and values are contiguous and of one shape here, so their strides are the same."
NO_SPLIT_EMPTY = "The launcher cuts so that every split has a key."
NO_KEY_NO_CHANGE = "A further tile without a key changes neither maximum nor sums, as one with keys came before it."
OTHER_SPLITS = (
    "Any number of splits, and any length of them that is whole tiles and covers the context, gives the same numbers."
)
NOT_READ = "Where MASKED is False, fast_step does not read these."
OTHER_TILES = (
    "Which tiles a GPU gets changes no number. Those of one kind of GPU are the fastest there, and may not fit the "
    "shared memory of another, which only that GPU can tell."
)
TUNED_FOR_HOPPER = (
    "On Hopper HEAD_DIM and BLOCK_N are the same, 64 or 128; on other GPUs 128 and 64, and there this fails."
)
IN_ANOTHER_ORDER = "Programs in another order give the same tiles."
HIDDEN_ANYWAY = "The scores of these lanes are replaced by -inf before they are used."
WEIGHT_0 = "What stands in these lanes is multiplied by a weight of 0."
NOT_STORED = "Rows beyond the queries, or the group, are computed and never stored, whatever stands in them."
FLOAT16_ALREADY = "Inputs are float16 here, so this changes no number. On a GPU it makes the product a slow one."
AS_PLAIN_FLOAT16 = (
    "The plain implementation in float16, which sets the tolerance, rounds it too; a rounding for each tile or score "
    "is no more than the output's own. Weights are at most 1, so their sum stays below 65,504."
)

LAST = "mask=(keys < last)[:, None]"
SIZES = "running_max, running_sum, accumulator, scale_log2, HEAD_DIM, BLOCK_N"
STEP = "query, key_pointer, value_pointer, key_stride, value_stride, first_key, key_length, positions"
END = "tl.minimum(key_length, tl.maximum(first_query + BLOCK_M + offset, 0))"
WHOLE_END = "tl.minimum(key_length, tl.maximum(first_query + offset + 1, 0)) // BLOCK_N * BLOCK_N"

EQUIVALENT = (
    # ---- tiles
    _("4.7", "range(whole_end, end, BLOCK_N)", "range(whole_end, end + BLOCK_N, BLOCK_N)", FURTHER_TILES),
    *(
        _("4.7", END, end, FURTHER_TILES)
        for end in (
            "key_length",
            "tl.maximum(key_length, tl.maximum(first_query + BLOCK_M + offset, 0))",
            "tl.maximum(first_query + BLOCK_M + offset, 0)",
            "tl.minimum(key_length, tl.maximum(first_query + BLOCK_M + offset, 1))",
        )
    ),
    _("4.7", f"end = {END}", "pass", FURTHER_TILES),
    _("4.7", END, "tl.minimum(key_length, (first_query + BLOCK_M + offset))", "A range to a number below 0 is empty."),
    _("4.7", WHOLE_END, "tl.maximum(first_query + offset + 1, 0) // BLOCK_N * BLOCK_N", NEVER_LESS),
    *(
        _("4.7", WHOLE_END, end, MASKED_TILES)
        for end in (
            "tl.minimum(key_length, 0) // BLOCK_N * BLOCK_N",
            "tl.minimum(key_length, tl.maximum((first_query + offset), 0)) // BLOCK_N * BLOCK_N",
            "tl.minimum(key_length, tl.maximum(1, 0)) // BLOCK_N * BLOCK_N",
            "tl.minimum(key_length, tl.maximum(offset + 1, 0)) // BLOCK_N * BLOCK_N",
            "tl.minimum(key_length, tl.maximum(first_query + offset + 0, 0)) // BLOCK_N * BLOCK_N",
            "tl.minimum(key_length, tl.maximum(first_query + offset - 1, 0)) // BLOCK_N * BLOCK_N",
            "tl.minimum(key_length, tl.maximum(first_query + offset + 1, 1)) // BLOCK_N * BLOCK_N",
            "tl.minimum(key_length, tl.maximum(first_query + offset + 1, 0)) // BLOCK_M * BLOCK_N",
            "tl.minimum(query_length, tl.maximum(first_query + offset + 1, 0)) // BLOCK_N * BLOCK_N",
        )
    ),
    _("4.7", "whole_end = key_length // BLOCK_N", "whole_end = key_length // BLOCK_M", MASKED_TILES),
    *(
        _("4.7", "range(0, whole_end, BLOCK_N)", f"range(0, {end}, BLOCK_N)", "whole_end is a whole number of tiles.")
        for end in ("whole_end - 1", "whole_end // BLOCK_N * BLOCK_N")
    ),
    _("4.7 8.6", "if MASKED:", "if True:", MASKED_TILES),
    _("4.7", "if CAUSAL:", "if True:", IN_ANOTHER_ORDER, place=2),
    _("4.7", "if CAUSAL:", "if False:", IN_ANOTHER_ORDER, place=2),
    _("4.7", "tile = tl.num_programs(0) - 1 - tile", "pass", IN_ANOTHER_ORDER),
    *(
        _("4.7", STEP, STEP.replace("key_length, positions", unread), NOT_READ, place=1)
        for unread in ("key_length, columns", "key_length, rows", "positions, key_length", "query_length, positions")
    ),
    _("4.7", SIZES, SIZES.replace("HEAD_DIM, BLOCK_N", "BLOCK_N, HEAD_DIM"), TUNED_FOR_HOPPER),
    _("8.6", "tl.maximum(last - first, 0)", "(last - first)", NO_SPLIT_EMPTY),
    _("8.6", "tl.maximum(last - first, 0)", "tl.maximum(last - first, 1)", NO_SPLIT_EMPTY),
    *(
        _("8.6", "range(first, whole, BLOCK_N)", f"range(first, {end}, BLOCK_N)", "Both ends are multiples of a tile.")
        for end in ("whole - 1", "whole // BLOCK_N * BLOCK_N")
    ),
    _("8.6", "if whole < last:", "if True:", NO_KEY_NO_CHANGE),
    _("8.6", "if whole < last:", "if whole <= last:", NO_KEY_NO_CHANGE),
    *(
        _("8.6", "*key.stride()[:3], *value.stride()[:3]", strides, CONTIGUOUS)
        for strides in (
            "*value.stride()[:3], *value.stride()[:3]",
            "*key.stride()[:3], *key.stride()[:3]",
            "*value.stride()[:3], *key.stride()[:3]",
        )
    ),
    _("8.6", "key_stride, value_stride", "value_stride, key_stride", CONTIGUOUS),
    _(
        "8.6",
        "splits = triton.cdiv(context, split_length) ; outputs = torch.empty(splits, batch, query_heads, head_dim, "
        "dtype=torch.float32, device=query.device)",
        "outputs = torch.empty(splits, batch, query_heads, head_dim, dtype=torch.float32, device=query.device) ; "
        "splits = triton.cdiv(context, split_length)",
        "More room than is needed: a split's place does not depend on how many there are.",
    ),
    # ---- what a launcher chooses
    *(
        _("4.7", line, ANYTHING, OTHER_TILES)
        for line in ("if capability < (8, 0):", "elif head_dim == 64:", "elif capability == (9, 0):", "tiles = {")
    ),
    *(
        _("8.6", line, ANYTHING, OTHER_TILES)
        for line in ("if capability in ((8, 0), (9, 0), (10, 0)):", "elif capability >= (8, 0):", "tiles = {")
    ),
    *(_("8.6", line, ANYTHING, OTHER_SPLITS) for line in ("splits = max(1,", "split_length =")),
    _("4.7", "key.shape[2]", "value.shape[2]", SAME_NUMBER),
    _("8.6", "key.shape[1:3]", "value.shape[1:3]", SAME_NUMBER),
    _("8.6", "output.to(output_pointer.dtype.element_ty)", "output", IMPLICIT_CAST),
    # ---- offsets and types
    _("4.7 8.6", ".to(tl.int64)", "", OFFSETS_OF_64_BITS),
    _("4.7 8.6", "tl.int64", "tl.int32", OFFSETS_OF_64_BITS),
    *(
        _("8.6", f"{one}_{kind}", f"{other}_{kind}", CONTIGUOUS)
        for one, other in (("key", "value"), ("value", "key"))
        for kind in ("stride", "head_stride", "batch_stride")
    ),
    _(
        "4.7",
        "(accumulator / total[:, None]).to(output_pointer.dtype.element_ty)",
        "(accumulator / total[:, None])",
        IMPLICIT_CAST,
    ),
    *(
        _(
            exercise,
            f"tl.zeros({size}, tl.float32)",
            f"(tl.zeros({size}, tl.float32)).to(tl.float16).to(tl.float32)",
            STARTS_EXACT,
        )
        for exercise, size in (
            ("4.7", "[BLOCK_M]"),
            ("4.7", "[BLOCK_M, HEAD_DIM]"),
            ("8.6", "[BLOCK_G, BLOCK_N]"),
            ("8.6", "[BLOCK_G, HEAD_DIM]"),
        )
    ),
    *(
        _("4.7", load, f"({load}).to(tl.float16).to(tl.float32)", FLOAT16_ALREADY)
        for load in ("tl.load(value_pointers, mask=present, other=0.0)", "tl.load(value_pointers)")
    ),
    *(
        _("4.7", value, f"({value}).to(tl.float16).to(tl.float32)", AS_PLAIN_FLOAT16)
        for value in (
            "tl.dot(query, tl.trans(key_tile))",
            'tl.where(visible, scores, float("-inf"))',
            "tl.exp2(scores * scale_log2 - reference_max[:, None])",
            "tl.exp2(running_max - reference_max)",
            "running_sum * rescale + tl.sum(weights, axis=1)",
            "tl.where(running_sum == 0.0, 1.0, running_sum)",
        )
    ),
    *(
        _("8.6", load, f"({load}).to(tl.float16).to(tl.float32)", FLOAT16_ALREADY)
        for load in (
            f"tl.load(value_pointers, {LAST}, other=0.0)",
            'tl.load(value_pointers, eviction_policy="evict_first")',
        )
    ),
    *(
        _("8.6", value, f"({value}).to(tl.float16).to(tl.float32)", AS_PLAIN_FLOAT16)
        for value in (
            "tl.dot(query, tl.trans(key_tile))",
            'tl.where((keys < last)[None, :], scores, float("-inf"))',
            "tl.exp2(scores * scale_log2 - new_max[:, None])",
            "tl.exp2(running_max - new_max)",
            "column_sums * rescale[:, None] + weights",
            "tl.sum(column_sums, axis=1)",
            'tl.load(lses_pointer + partial_rows, mask=present, other=float("-inf"))',
            "tl.load(outputs_pointer + partial_offsets, mask=present[:, None], other=0.0)",
            "tl.exp2(lses - tl.max(lses, axis=0))",
            "tl.sum(weights[:, None] * parts, axis=0) / tl.sum(weights, axis=0)",
        )
    ),
    _("8.6", "dtype=torch.float32, device", "device", DEFAULT_DTYPE),
    _(
        "8.6",
        "head_dim, dtype=torch.float32",
        "head_dim, dtype=torch.float16",
        "A split's output is an average of values in float16: rounded to it, it errs as much as the output itself.",
    ),
    # ---- lanes that do not count
    *(
        _("8.6", f"tl.load({pointers}, {LAST}, other=0.0", f"tl.load({pointers}, {LAST}{other}", why)
        for pointers, other, why in (
            ("key_pointers", "", HIDDEN_ANYWAY),
            ("key_pointers", ", other=1.0", HIDDEN_ANYWAY),
            ("value_pointers", ", other=1.0", WEIGHT_0),
        )
    ),
    _("8.6", "mask=present[:, None], other=0.0", "mask=present[:, None], other=1.0", WEIGHT_0),
    _("8.6", "< GROUP)[:, None], other=0.0", "< GROUP)[:, None]", NOT_STORED),
    _("8.6", "< GROUP)[:, None], other=0.0", "< GROUP)[:, None], other=1.0", NOT_STORED),
    *(_("8.6", 'scores, float("-inf")', f"scores, {low}", A_KEY_IN_EVERY_TILE) for low in ("-1e30", "-1e4")),
    _(
        "4.7",
        "visible & (keys[None, :] <= positions[:, None])",
        "(keys[None, :] <= positions[:, None])",
        "A key at or before a query's position is one that exists.",
    ),
    _(
        "4.7",
        "visible & (keys[None, :] <= positions[:, None])",
        "(visible & (keys[None, :] <= positions[:, None])).to(tl.float16).to(tl.float32)",
        A_CONDITION,
    ),
    _("4.7", "tl.load(key_pointers, mask=present, other=0.0)", "tl.load(key_pointers, mask=present)", HIDDEN_ANYWAY),
    _(
        "4.7",
        "tl.load(key_pointers, mask=present, other=0.0)",
        "tl.load(key_pointers, mask=present, other=1.0)",
        HIDDEN_ANYWAY,
    ),
    _(
        "4.7",
        "tl.load(value_pointers, mask=present, other=0.0)",
        "tl.load(value_pointers, mask=present, other=1.0)",
        WEIGHT_0,
    ),
    _("4.7", "mask=inside, other=0.0", "mask=inside", NOT_STORED),
    _("4.7", "mask=inside, other=0.0", "mask=inside, other=1.0", NOT_STORED),
    # ---- maxima and sums
    _("8.6", '[BLOCK_G], float("-inf")', "[BLOCK_G], -1e30", LOW_ENOUGH),
    _("8.6", '[BLOCK_G], float("-inf")', "[BLOCK_G], -1e4", LOW_ENOUGH),
    *(
        _("8.6", 'mask=present, other=float("-inf")', f"mask=present, other={low}", LOW_ENOUGH)
        for low in ("-1e30", "-1e4")
    ),
    *(
        _("8.6", f"tl.zeros({size}, tl.float32)", f"tl.full({size}, 1.0, tl.float32)", FIRST_RESCALING)
        for size in ("[BLOCK_G, BLOCK_N]", "[BLOCK_G, HEAD_DIM]")
    ),
    _("8.6", "tl.max(lses, axis=0)", "tl.max(lses)", ONE_DIMENSION),
    _("8.6", "tl.sum(weights, axis=0)", "tl.sum(weights)", ONE_DIMENSION),
    _("4.7", '[BLOCK_M], float("-inf")', "[BLOCK_M], -1e30", LOW_ENOUGH),
    _("4.7", '[BLOCK_M], float("-inf")', "[BLOCK_M], -1e4", LOW_ENOUGH),
    _("4.7", "tl.zeros([BLOCK_M], tl.float32)", "tl.full([BLOCK_M], 1.0, tl.float32)", FIRST_RESCALING),
    _("4.7", 'float("-inf"), 0.0, new_max', 'float("-inf"), 1.0, new_max', ANY_REFERENCE),
    *(
        _(exercises, maximum, f"({maximum}).to(tl.float16).to(tl.float32)", NOT_THE_MAXIMUM)
        for exercises, maximum in (
            ("4.7 8.6", "tl.maximum(running_max, tl.max(scores, axis=1) * scale_log2)"),
            ("4.7", 'tl.where(new_max == float("-inf"), 0.0, new_max)'),
        )
    ),
)
