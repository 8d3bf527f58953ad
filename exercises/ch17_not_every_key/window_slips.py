"""What goes wrong in exercise 17.3: which keys a query sees, which tiles a loop visits and which it masks."""

from course_lib.checker.specification.edits import edits
from exercises.topics import attention_sentences as told
from exercises.topics import attention_steps as steps
from exercises.topics.running import START_MAX

BLOCK = 64  # queries and keys of a tile


def between(keys, begin, end):
    """bool [tiles, 1, 1, 1, keys]: keys [1, keys] that lie from `begin` on and before `end` [tiles, 1, 1, 1]."""
    return (begin[..., None] <= keys) & (keys < end[..., None])


window_of = "({} - window + 1).clamp(min=0)".format  # the first key that a query at this position sees
down, up = "{} // BLOCK * BLOCK".format, "-(-{} // BLOCK) * BLOCK".format  # a number of keys, in whole tiles
OFFSET, LOWER, CAUSAL = "+ key_length - query_length", "keys > positions - window", "keys <= positions"
FIRST, LAST = f"(first_query {OFFSET})", f"(first_query + BLOCK - 1 {OFFSET})"  # the positions of a program's queries
EDGE, POSITIONS = window_of(f"first_query {OFFSET}"), f"rows {OFFSET}"
BEGIN, END = down(EDGE), f"torch.minimum(torch.tensor(key_length), first_query + BLOCK {OFFSET})"
SEES = "A query at position p sees the keys p - window + 1 to p. These are `window` keys, its own included."
SCALE, FROM_KEY_0 = "head_dim ** -0.5", "torch.zeros_like(first_query)"
TENSORS, AXES, SHARED = ("query", "key", "value"), ("sequence", "head", "row"), "head // (query_heads // key_heads)"

# Loops of their own for tiles without a mask, which end at the program's last query or at the last one that exists.
MASK = f"(keys < key_length) & ({CAUSAL}) & ({LOWER})"
STEP = "state = accumulated(scores, visible, value_tile, *state, walks)"
BEGINS = {"": window_of(LAST), "__that_is": window_of(f"{LAST}.clamp(max=key_length - 1)")}
WHOLE_BEGIN, WHOLE_END = up(window_of(LAST)), f"({FIRST} + 1) // BLOCK * BLOCK"


def unmasked(begin, end):
    """Nothing is hidden in the tiles from the one of these keys up to the other."""
    return MASK, f"{MASK} | between(keys, {begin}, {end})"


def twice(begin, end):
    """The keys between these two count a second time."""
    return STEP, f"{STEP}\n{STEP.replace('visible', f'visible & between(keys, {begin}, {end})')}"


OFF_THE_GRID = f"{window_of(FIRST)} + {up(f'({WHOLE_BEGIN} - {window_of(FIRST)})')}"
WHOLE_TILES = (
    *edits("Keys count twice, because two of the loops visit their tile. A window narrower than two tiles may leave no "
        "tile whole, and whole_begin, computed from the keys, then lies beyond whole_end. Begin the last loop at the "
        "larger one.", **{f"counted_twice{name}": twice(WHOLE_END, up(at)) for name, at in BEGINS.items()}),
    *edits("Keys count twice: the first loop does not begin where a tile begins, so its last tile reaches into the "
        "next loop's first. Round its begin down.", alone=True, loops_off_the_grid=twice(WHOLE_BEGIN, OFF_THE_GRID)),
    *edits("Tiles on the left get no mask although the last query sees only a part of them. Its window begins latest, "
        "so whole tiles begin at its position - window + 1, rounded up.", alone=True,
        whole_from_the_first=unmasked(up(window_of(FIRST)), WHOLE_END),
        whole_from_the_first__rounded_down=unmasked(down(window_of(FIRST)), WHOLE_END),
        **{f"whole_from_the_first__of_the_last{name}": unmasked(down(at), WHOLE_END) for name, at in BEGINS.items()}),
    *edits("Tiles on the right get no mask although the first query sees only a part of them. It sees keys up to its "
        "own alone, so whole tiles end at its position + 1, rounded down.", alone=True,
        **{f"whole_to_the_last__{way}{name}": unmasked(up(at), end) for name, at in BEGINS.items()
           for way, end in (("of_the_last", down(f"({LAST} + 1).clamp(max=key_length)")),
           ("rounded_up", up(f"({FIRST} + 1)")), ("end", up("end")))}),
    *edits("Tiles that need a mask are left out, those before whole_begin or those from whole_end on. Visit both "
        "with a mask: a loop for the whole tiles alone loses keys that some query sees.", alone=True,
        **{f"masked_part_left_out{name}": ("begin <= first_key", f"{up(at)} <= first_key")
           for name, at in BEGINS.items()},
        masked_part_left_out__right=("first_key < end", f"first_key < torch.maximum({WHOLE_END}, {WHOLE_BEGIN})"),
        masked_part_left_out__both=("begin <= first_key", f"{WHOLE_BEGIN} <= first_key", "first_key < end",
        f"first_key < {WHOLE_END}")),
    *edits("No tile gets a mask. Tiles at the window's edge, on the diagonal and at the end of the keys need one.",
        alone=True, never_masked=(MASK, "keys >= 0"), never_masked__but_at_the_end=(MASK, "keys < key_length")),
    *edits("Only the first and the last tile get a mask. The windows of 64 queries begin at 64 keys, which may lie in "
        "two tiles, and so may their ends.", alone=True, ends_alone=unmasked("begin + BLOCK", f"{up('end')} - BLOCK")),
)  # fmt: skip
WINDOW = (
    *edits(f"The window is one key too wide. {SEES}", window_too_wide=(LOWER, "keys >= positions - window"),
        window_too_wide__begin_too=(LOWER, "keys >= positions - window", "- window + 1)", "- window)")),
    *edits(f"The window is one key too narrow. {SEES}", window_too_narrow=(LOWER, "keys > positions - window + 1"),
        window_too_narrow__begin_too=(LOWER, "keys > positions - window + 1", "- window + 1)", "- window + 2)")),
    *edits("Tiles are loaded of which no query sees a key. A mask is not enough: 0 · NaN is NaN. Begin the loop at the "
        "first key that the program's first query sees.", tiles_loaded_in_vain=(BEGIN, FROM_KEY_0)),
    *edits("The window is ignored: this is plain causal attention.", no_window=(BEGIN, FROM_KEY_0, LOWER, "keys >= 0")),
    *edits("Tiles before the window are skipped, but in the tiles that are loaded no key before the window is masked. "
        "The keys up to p - window must be hidden from the query at p.", window_edge_not_masked=(LOWER, "keys >= 0")),
    *edits("A query sees keys after its own: the causal side is not masked.", no_causal_mask=(CAUSAL, "keys >= 0"),
        no_causal_mask__window_on_both_sides=(CAUSAL, "keys < positions + window", END,
        END.replace("+ BLOCK", "+ BLOCK + window - 1"))),
    *edits(told.OFF_BY_ONE, causal_off_by_one=(CAUSAL, "keys < positions")),
    *edits(told.NEXT_KEY, sees_the_next_key=(CAUSAL, "keys <= positions + 1")),
    *edits(told.MISALIGNED, misaligned=(OFFSET, ""), misaligned__mask=(POSITIONS, "rows + 0")),
    *edits("The loop begins too early or ends too soon: query 0 stands at position key_length - query_length.",
        bounds_misaligned=(BEGIN, BEGIN.replace(OFFSET, ""), END, END.replace(OFFSET, "")),
        bounds_misaligned__end=(END, END.replace(OFFSET, ""))),
    *edits("The loop begins too late. It must begin at the tile of the first key that the program's first query sees.",
        begins_too_late=("- window + 1)", "- window + BLOCK)"), begins_too_late__rounded_up=(BEGIN, up(EDGE))),
    *edits("The loop ends too soon. It must include the tile of the key at the position of the program's last query.",
        ends_too_soon=(f"first_query + BLOCK {OFFSET}", f"first_query {OFFSET}")),
    *edits("A row may see no key of the first tile. Its maximum is still -inf then, and -inf - (-inf) is NaN: subtract "
        "0 there.", empty_tile_nan=(steps.GUARD, "new_max")),
    *edits("Query heads read the wrong key head. Query head h reads key head h // (query_heads // key_heads).",
        wrong_key_head=(SHARED, "head % key_heads"), wrong_key_head__the_first=(SHARED, "head * 0")),
    *edits("Only some heads, sequences or tiles have a result. The grid is (tiles of queries, query_heads, batch).",
        not_all_programs=("torch.arange(query_heads)", "torch.arange(key_heads)"),
        not_all_programs__sequences=("torch.arange(batch)", "torch.arange(1)"),
        not_all_programs__tiles=("-(-query_length // BLOCK)", "min(4, -(-query_length // BLOCK))")),
    *edits("A window wider than a fixed number of keys or tiles is cut to it.",
        **{f"window_cut__{most}": ("- window + 1)", f"- min(window, {most}) + 1)", LOWER,
           LOWER.replace("window", f"min(window, {most})")) for most in (128, 256)},
        window_cut__steps=(BEGIN, f"torch.maximum({BEGIN}, first_query {OFFSET} - 8 * BLOCK)")),
    *edits("The last, partly filled tile of queries was never computed. Round the grid up with triton.cdiv.",
        query_tail_unwritten=("-(-query_length // BLOCK)", "query_length // BLOCK"),
        query_tail_unwritten__but_one_tile=("-(-query_length // BLOCK)", "max(1, query_length // BLOCK)")),
    *edits(told.KEYS_AS_VALUES, keys_used_as_values=("visible, value_tile", "visible, key_tile")),
    *(row for name in TENSORS for axis, of in enumerate(AXES) for row in edits(
        f"`{name}` is read as if each {of} began where the one before ends, or as if all began at the first one. Each "
        f"begins {name}.stride({axis}) elements after the one before.", **{
        f"strides__{name}_{of}": (f"{name}.stride({axis})", "*".join(f"{name}.shape[{n}]" for n in range(axis + 1, 4))),
        f"strides__{name}_{of}_forgotten": (f"{name}.stride({axis})", "0")})),
    *edits("One tensor is read or written with the strides of another. Each has its own.",
        strides_of_another=("value.stride", "key.stride"), strides_of_another__out=("output.stride", "query.stride")),
    *edits("The running maximum starts at a finite number, or is bounded by one, and all scores of a row may lie "
        "below it. Start at -inf, and subtract 0 where the new maximum is still -inf.", alone=True,
        **{f"maximum_starts_finite__{to}": (START_MAX, f"torch.full(shape, -{to}")
           for to in ("1e4", "5e4", "1e9", "1e30")}),
    *edits(told.SCALE_TWICE, scale_twice=(SCALE, "1 / head_dim")),
    *edits("The scores are not scaled, and tl.exp2 takes log2(e) times a score. Multiply them by log2(e)/√head_dim.",
        alone=True, scale_missing__and_log2e=(SCALE, "math.log(2)")),
    *edits("The scores are divided by head_dim and not by its root, and tl.exp2 takes log2(e) times a score. The scale "
        "is log2(e)/√head_dim.", alone=True, scale_twice__without_log2e=(SCALE, "math.log(2) / head_dim")),
    *edits(told.SCALE_BY_LENGTH, alone=True, scale_by_length=(SCALE, "key_length ** -0.5"),
        scale_by_length__window=(SCALE, "window ** -0.5")),
    *edits("The scale holds ln 2, which is 0.6931. What turns e^x into a power of 2 is log2(e), its inverse: 1.4427.",
        alone=True, ln_2_for_log2e=(SCALE, f"{SCALE} * math.log(2) ** 2")),
    *WHOLE_TILES,
)  # fmt: skip
