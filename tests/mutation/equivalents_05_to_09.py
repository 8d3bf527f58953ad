"""Chapters 05 to 09: what passes although it differs from the course's answer, and why it may."""

from __future__ import annotations

from tests.mutation.reasons import (
    ANOTHER_BLOCK,
    ANY_REFERENCE,
    DEFAULT_DTYPE,
    FIRST_RESCALING,
    IMPLICIT_CAST,
    IN_ANY_ORDER,
    LOW_ENOUGH,
    MASKED_LANES,
    NOT_THE_MAXIMUM,
    OFFSETS_OF_64_BITS,
    ONE_DIMENSION,
    STARTS_EXACT,
)
from tests.mutation.reasons import entry as _

MULTIPLIED = "The two are multiplied with one another."
ROWS_BEYOND_THE_GROUP = "Rows beyond the group are computed and never stored, whatever stands in them."
HIDDEN_ANYWAY = "The scores that come of these lanes are replaced by -inf before they are used."
A_KEY_IN_EVERY_TILE = "Every tile that is looked at has a key, and no score comes near: exp of the difference is 0."
WEIGHT_0 = "What stands in these lanes is multiplied by a weight of 0."
ONE_SHAPE = "Keys and values have the same shape, and rows as long as the query's."
ROWS_OF_ANY_NUMBER = (
    "16 rows are the least that fill a matrix instruction; tl.dot takes fewer and fills them up, so the result is the "
    "same."
)
TOKENS_ALONE = (
    "The tokens are judged, and the cases' tokens win by more than such a rounding: a cache in float16 is as good."
)
TWO_DIMENSIONS = "A transpose names its two dimensions in either order."
IN_EIGHTS = "Registers are multiples of 8, which another test sees to, and so are their sums."
WHOLE_KILOBYTES = (
    "Tiles take whole kilobytes, and no sizes of tiles multiply to 226 or 227 of them, which are 2 · 113 and a prime."
)
ANY_IN_FLIGHT = "Whether any group is in flight counts, not how many: a wait that lets N run leaves none, or some."
SAYS_ONLY = "Only the words of the MemoryError differ, and they are the answer's own."

EQUIVALENT = (
    # ---- counts
    _("5.2", "key_heads, head_dim, 1", "head_dim, key_heads, 1", MULTIPLIED),
    _("5.2", "head_dim, 1, length", "1, head_dim, length", MULTIPLIED),
    _("5.2", "1, length, item_bytes", "length, 1, item_bytes", MULTIPLIED),
    _("5.2", "length, item_bytes", "item_bytes, length", MULTIPLIED),
    _("7.6", "head_dim, tokens, item_bytes", "tokens, head_dim, item_bytes", MULTIPLIED),
    _("7.6", "tokens, item_bytes, ranks", "item_bytes, tokens, ranks", MULTIPLIED),
    *(
        _("7.6", "range(1, query_heads + 1)", more, "A number above query_heads does not divide it.")
        for more in ("range(1, query_heads + 1 + 1, 1)", "range(1, query_heads + 2)")
    ),
    *(
        _(
            "7.6",
            "(key_heads % ranks == 0 or ranks % key_heads == 0)",
            fewer,
            "Fewer heads than ranks take as much room on each rank as one head for each, and ranks divides "
            "query_heads: where they fit, a larger number fits, and it is taken.",
        )
        for fewer in (
            "((key_heads % ranks == 0))",
            "(key_heads % ranks == 0 or ranks % key_heads == 1)",
            "(key_heads % ranks == 0 or ranks == 0)",
        )
    ),
    _("6.1", "longest, end = 0, 0", "longest, end = 1, 0", "Where no slot is free, the result is 0 either way."),
    _("9.2", "65_536", "65537", "65,537 is a prime: no number of groups divides it where it does not divide 65,536."),
    _(
        "9.2",
        "128 * groups",
        "127 * groups",
        "The shares 512 / groups and 516 / groups, rounded down to multiples of 8, are the same for every number of "
        "groups: none has a multiple of 8 · groups between 512 and 516.03.",
    ),
    _("9.2", "24 <= count", "23 <= count", IN_EIGHTS),
    _("9.2", "<= 256", "<= 257", IN_EIGHTS),
    _("9.2", "groups * starting_registers(groups)", "(groups * starting_registers(groups)) + 1", IN_EIGHTS),
    _("9.3", "query_buffers) <=", "query_buffers) <", WHOLE_KILOBYTES),
    *(
        _("9.3", "232_448 - 1024", bound, WHOLE_KILOBYTES)
        for bound in (
            "(232_448 - 1024) + 1",
            "232447 - 1024",
            "232449 - 1024",
            "232_448 - 1023",
            "232_448 - 1025",
            "232_448 - 512",
            "232_448",
        )
    ),
    _("9.3", "consumers, key_rows, stages", "consumers, stages, key_rows", MULTIPLIED),
    _("9.3", "head_dim, item_bytes", "item_bytes, head_dim", MULTIPLIED),
    _("9.4", "tile_cycles(1, 1", "tile_cycles(1, 2", "The number of scores cancels in the share."),
    _("9.4", "tile_cycles(1, 1", "tile_cycles(2, 1", "The number of scores cancels in the share."),
    _("9.6", "in_flight += 1", "in_flight += 2", ANY_IN_FLIGHT),
    _("9.6", "in_flight += 1", "in_flight = 1", ANY_IN_FLIGHT),
    # ---- what is nobody's business
    _("6.6", "[0] * pages", "[1] * pages", "A page's number of holders is set when it is taken, and not read before."),
    *(_("6.6", "{more + copying}", other, SAYS_ONLY) for other in ("{copying}", "{more - copying}", "{more}")),
    _("5.3", "((key, key_cache), (value, value_cache))", "((value, value_cache), (key, key_cache))", IN_ANY_ORDER),
    _(
        "5.5",
        "key_cache[sequences, :, past.long()] = key ; value_cache[sequences, :, past.long()] = value",
        "value_cache[sequences, :, past.long()] = value ; key_cache[sequences, :, past.long()] = key",
        IN_ANY_ORDER,
    ),
    _("5.5", "transpose(2, 3)", "transpose(3, 2)", TWO_DIMENSIONS),
    _("7.4", "transpose(-1, -2)", "transpose(-2, -1)", TWO_DIMENSIONS),
    # ---- shapes that agree
    _("7.4", "key.shape[1]", "value.shape[1]", ONE_SHAPE),
    _("7.4", "query.shape[-1]", "key.shape[-1]", ONE_SHAPE),
    _("7.4", "query.shape[-1]", "value.shape[-1]", ONE_SHAPE),
    # ---- blocks
    _("5.3", "BLOCK_T = 16", "BLOCK_T = 8", ANOTHER_BLOCK),
    _("7.5 8.2 8.5", "BLOCK_N=64", "BLOCK_N=32", ANOTHER_BLOCK),
    _("7.5 8.2 8.5 8.6", "max(16, triton", "max(8, triton", ROWS_OF_ANY_NUMBER),
    _("7.5 8.2 8.5 8.6", "max(16, triton.next_power_of_2(group))", "triton.next_power_of_2(group)", ROWS_OF_ANY_NUMBER),
    # ---- offsets
    _("5.3 6.4 6.5 7.5 8.2 8.5", ".to(tl.int64)", "", OFFSETS_OF_64_BITS),
    _("5.3 6.4 6.5 7.5 8.2 8.5", "tl.int64", "tl.int32", OFFSETS_OF_64_BITS),
    # ---- types
    _("6.5 7.5 8.5", ".to(output_pointer.dtype.element_ty)", "", IMPLICIT_CAST),
    _("8.2 8.3 8.5", "dtype=torch.float32, device", "device", DEFAULT_DTYPE),
    _(
        "6.5",
        "query.to(tl.float32) * scale",
        "query * scale",
        "A query that is scaled in float16 is rounded once more, by no more than when it was stored; its products are "
        "added in float32 all the same.",
    ),
    *(
        _(exercises, zeros, f"({zeros}).to(tl.float16).to(tl.float32)", STARTS_EXACT)
        for exercises, zeros in (
            ("6.5", "tl.zeros([1], tl.float32)"),
            ("7.5", "tl.zeros([ROWS], tl.float32)"),
            ("8.2 8.5", "tl.zeros([BLOCK_G], tl.float32)"),
            ("6.5", "tl.zeros([HEAD_DIM], tl.float32)"),
            ("7.5", "tl.zeros([ROWS, HEAD_DIM], tl.float32)"),
            ("8.2 8.5", "tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)"),
        )
    ),
    _("12.7", "torch.ones(1, 1, dtype=vectors.dtype, device", "torch.ones(1, 1, device", DEFAULT_DTYPE),
    _(
        "12.7",
        "torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])",
        "(torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])).half().float()",
        "1 and -1 are the same numbers in float16.",
    ),
    _("12.7", ".to(torch.float8_e4m3fn).float()", ".to(torch.float8_e4m3fn)", "What is assigned to a slice is cast."),
    *(
        _("5.6", computed, f"({computed}).half().float()", TOKENS_ALONE)
        for computed in (
            "torch.cat([cache[layer][0], key], dim=1)",
            "torch.cat([cache[layer][1], value], dim=1)",
            "model.finish(layer, x, model.attend(query, key, value))",
        )
    ),
    # ---- axes
    _("6.5", "tl.max(scores, axis=0)", "tl.max(scores)", ONE_DIMENSION),
    _("6.5 8.3 8.5", "tl.sum(weights, axis=0)", "tl.sum(weights)", ONE_DIMENSION),
    _("8.3 8.5", "tl.max(lses, axis=0)", "tl.max(lses)", ONE_DIMENSION),
    # ---- lanes that do not count
    _("7.5", "mask=in_group, other=0.0", "mask=in_group", ROWS_BEYOND_THE_GROUP),
    _("7.5", "mask=in_group, other=0.0", "mask=in_group, other=1.0", ROWS_BEYOND_THE_GROUP),
    _(
        "8.2 8.5",
        "mask=(members < GROUP)[:, None], other=0.0",
        "mask=(members < GROUP)[:, None]",
        ROWS_BEYOND_THE_GROUP,
    ),
    _("8.2 8.5", "< GROUP)[:, None], other=0.0", "< GROUP)[:, None], other=1.0", ROWS_BEYOND_THE_GROUP),
    *(
        _(exercises, f"{load}, other=0.0", f"{load}{other}", HIDDEN_ANYWAY)
        for exercises, load in (
            ("6.5", "tl.load(key_pointer + key_rows[:, None] + columns[None, :], mask=inside[:, None]"),
            ("7.5", "tl.load(key_pointer + keys[:, None] * key_stride + columns[None, :], mask=in_use"),
            ("8.2 8.5", "tl.load(key_pointer + key_offsets, mask=present[:, None]"),
        )
        for other in ("", ", other=1.0")
    ),
    *(
        _(exercises, f"{load}, other=0.0", f"{load}, other=1.0", WEIGHT_0)
        for exercises, load in (
            ("6.5", "tl.load(value_pointer + value_rows[:, None] + columns[None, :], mask=inside[:, None]"),
            ("7.5", "tl.load(value_pointer + keys[:, None] * value_stride + columns[None, :], mask=in_use"),
            ("8.2 8.5", "tl.load(value_pointer + value_offsets, mask=present[:, None]"),
            ("8.3 8.5", "tl.load(outputs_pointer + partial_offsets, mask=present[:, None]"),
        )
    ),
    _("8.5", "mask=keys < last, other=0", "mask=keys < last", MASKED_LANES),
    _("8.5", "mask=keys < last, other=0", "mask=keys < last, other=1", MASKED_LANES),
    _("8.5", "mask=ahead < last, other=0", "mask=ahead < last", MASKED_LANES),
    _("8.5", "mask=ahead < last, other=0", "mask=ahead < last, other=1", MASKED_LANES),
    # ---- maxima and sums
    _("5.5", "-math.inf", "-1e4", LOW_ENOUGH),
    *(
        _(exercises, f'{start}, float("-inf")', f"{start}, {low}", LOW_ENOUGH)
        for exercises, start in (("6.5", "[1]"), ("7.5", "[ROWS]"))
        for low in ("-1e30", "-1e4")
    ),
    *(
        _("6.5 7.5 8.2 8.5", 'scores, float("-inf")', f"scores, {low}", A_KEY_IN_EVERY_TILE)
        for low in ("-1e30", "-1e4")
    ),
    _("6.5", "tl.zeros([1], tl.float32)", "tl.full([1], 1.0, tl.float32)", FIRST_RESCALING),
    _("7.5", "tl.zeros([ROWS], tl.float32)", "tl.full([ROWS], 1.0, tl.float32)", FIRST_RESCALING),
    _(
        "8.2 8.5",
        "tl.zeros([BLOCK_G], tl.float32)",
        "tl.full([BLOCK_G], 1.0, tl.float32)",
        FIRST_RESCALING + " A split without keys divides its zeros by 1 either way.",
    ),
    _(
        "8.5",
        "tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)",
        "tl.full([BLOCK_G, HEAD_DIM], 1.0, tl.float32)",
        FIRST_RESCALING + " A split without keys has a weight of 0 in the merge, whatever its output.",
    ),
    _("8.3 8.5", 'float("-inf"), 0.0, largest', 'float("-inf"), 1.0, largest', ANY_REFERENCE),
    *(
        _(exercises, maximum, f"({maximum}).to(tl.float16).to(tl.float32)", NOT_THE_MAXIMUM)
        for exercises, maximum in (
            ("6.5", "tl.maximum(running_max, tl.max(scores, axis=0))"),
            ("7.5 8.2 8.5", "tl.maximum(running_max, tl.max(scores, axis=1))"),
            ("8.3 8.5", "tl.max(lses, axis=0)"),
        )
    ),
)
