"""Wrong answers to exercise 6.4, and unusual right ones."""

from tests.submissions.edits import changed

KEY_ROW = "page * key_page_stride + head * key_page_head_stride + offset * key_slot_stride"


VALUE_ROW = "page * value_page_stride + head * value_page_head_stride + offset * value_slot_stride"


def rows(pattern):
    """Both rows of the pool computed another way."""
    return changed("6.4", (KEY_ROW, pattern.format("key")), (VALUE_ROW, pattern.format("value")))


WRONG = {
    "copied_by_pytorch": changed(
        "6.4", ("    append_kernel[(", "    key, value = key.contiguous(), value.contiguous()\n    append_kernel[(")
    ),
    "copied_by_pytorch__of_those_with_a_slot": changed(
        "6.4",
        (
            "    append_kernel[(tokens,",
            "    key, value, slots = key[slots >= 0], value[slots >= 0], slots[slots >= 0]\n"
            "    append_kernel[(len(slots),",
        ),
    ),
    "modified_input": changed("6.4", ("    append_kernel[(", "    slots[slots < 0] = -2\n    append_kernel[(")),
    "offset_by_bits": changed("6.4", ("slot % PAGE_SIZE", "slot & (PAGE_SIZE - 1)")),
    "page_size_rounded_up": changed(
        "6.4", ("PAGE_SIZE=key_pages.shape[2]", "PAGE_SIZE=triton.next_power_of_2(key_pages.shape[2])")
    ),
    "page_size_fixed": changed("6.4", ("PAGE_SIZE=key_pages.shape[2]", "PAGE_SIZE=16")),
    "stopped_at_padding": changed(
        "6.4",
        (
            "tokens, heads, head_dim = key.shape",
            "(_, heads, head_dim), tokens = key.shape, int((slots >= 0).int().cumprod(0).sum())",
        ),
    ),
    "out_of_bounds__by_the_width_of_a_tile": changed(
        "6.4",
        (
            "page = slot // PAGE_SIZE\n    offset = slot % PAGE_SIZE",
            "page = slot // BLOCK_D\n    offset = slot % BLOCK_D",
        ),
    ),
    "only_first_head": changed(
        "6.4",
        ('append_kernel[(tokens, heads)]', 'append_kernel[(tokens, 1)]'),
    ),
    "slot_used_as_row": rows("slot * {0}_slot_stride + head * {0}_page_head_stride"),
    "page_and_offset_exchanged": changed(
        "6.4",
        ("page = slot // PAGE_SIZE", "page = slot % PAGE_SIZE"),
        ("offset = slot % PAGE_SIZE", "offset = slot // PAGE_SIZE"),
    ),
    "offset_forgotten": rows("page * {0}_page_stride + head * {0}_page_head_stride"),
    "page_not_multiplied": rows("page * {0}_slot_stride + head * {0}_page_head_stride + offset * {0}_slot_stride"),
    "heads_of_a_page_forgotten": rows("(page + head) * {0}_page_head_stride + offset * {0}_slot_stride"),
    "heads_of_a_page_forgotten__head_by_its_stride": rows(
        "page * PAGE_SIZE * HEAD_DIM + head * {0}_page_head_stride + offset * {0}_slot_stride"
    ),
    "page_not_multiplied__by_its_width": rows(
        "page * PAGE_SIZE + head * {0}_page_head_stride + offset * {0}_slot_stride"
    ),
    # Outside the slots, in the case of the fused tensor too, and nothing to do with where keys are read.
    "out_of_bounds": changed("6.4", ("tl.load(slots_pointer + token)", "tl.load(slots_pointer + token + head)")),
    "heads_of_a_page_forgotten__by_sizes": rows("(page * PAGE_SIZE + offset) * HEAD_DIM + head * PAGE_SIZE * HEAD_DIM"),
    "head_and_slot_exchanged": rows("page * {0}_page_stride + head * {0}_slot_stride + offset * {0}_page_head_stride"),
    "head_and_slot_exchanged__by_sizes": rows("((page * PAGE_SIZE + offset) * tl.num_programs(1) + head) * HEAD_DIM"),
    "slot_zero_skipped": changed("6.4", ("slot >= 0", "slot > 0")),
    "tokens_read_contiguously": changed(
        "6.4",
        ("token * key_stride + head * key_head_stride", "(token * tl.num_programs(1) + head) * HEAD_DIM"),
    ),
    "slots_ignored": changed(
        "6.4",
        ("page = slot // PAGE_SIZE", "page = token // PAGE_SIZE"),
        ("offset = slot % PAGE_SIZE", "offset = token % PAGE_SIZE"),
    ),
    "one_slot_late": changed(
        "6.4",
        ("page = slot // PAGE_SIZE", "page = (slot + 1) // PAGE_SIZE"),
        ("offset = slot % PAGE_SIZE", "offset = (slot + 1) % PAGE_SIZE"),
    ),
    "first_head_for_all": changed(
        "6.4",
        ("token * key_stride + head * key_head_stride", "token * key_stride"),
        ("token * value_stride + head * value_head_stride", "token * value_stride"),
    ),
    "heads_on_top_of_each_other": rows("page * {0}_page_stride + offset * {0}_slot_stride"),
    "keys_and_values_exchanged": changed(
        "6.4",
        ("tl.store(key_pages_pointer", "tl.store(other_pool"),
        ("tl.store(value_pages_pointer", "tl.store(key_pages_pointer"),
        ("tl.store(other_pool", "tl.store(value_pages_pointer"),
        (KEY_ROW, "THE_ROW"),
        (VALUE_ROW, KEY_ROW),
        ("THE_ROW", VALUE_ROW),
    ),
    "keys_written_twice": changed(
        "6.4",
        ("tl.load(value_pointer + token * value_stride + head * value_head_stride + columns, mask=inside)", "key"),
    ),
    "strides_ignored": rows("((page * tl.num_programs(1) + head) * PAGE_SIZE + offset) * HEAD_DIM"),
    "other_strides": changed("6.4", (VALUE_ROW, KEY_ROW)),
    "other_strides__slot": changed("6.4", ("offset * value_slot_stride", "offset * key_slot_stride")),
    "tokens_by_the_other_strides__head": changed("6.4", ("head * value_head_stride", "head * key_head_stride")),
    "page_and_offset_exchanged__and_padding_written": changed(
        "6.4",
        ("page = slot // PAGE_SIZE", "page = slot % PAGE_SIZE"),
        ("offset = slot % PAGE_SIZE", "offset = slot // PAGE_SIZE"),
        (" & (slot >= 0)", ""),
    ),
    "first_head_for_all__and_slot_zero_skipped": changed(
        "6.4",
        ("token * key_stride + head * key_head_stride", "token * key_stride"),
        ("token * value_stride + head * value_head_stride", "token * value_stride"),
        ("slot >= 0", "slot > 0"),
    ),
    "values_not_written": changed(
        "6.4", ("    tl.store(value_pages_pointer + value_row + columns, value, mask=inside)\n", "")
    ),
    "padding_written": changed("6.4", (" & (slot >= 0)", "")),
    "padding_written__clamped": changed(
        "6.4",
        (" & (slot >= 0)", ""),
        ("slot = tl.load(slots_pointer + token)", "slot = tl.maximum(tl.load(slots_pointer + token), 0)"),
    ),
    "columns_not_masked": changed("6.4", ("(columns < HEAD_DIM) & (slot >= 0)", "(columns >= 0) & (slot >= 0)")),
    "padding_taken_for_the_end": changed(
        "6.4",
        (
            "    append_kernel[(tokens, heads)](",
            "    tokens = int((slots >= 0).sum())\n    if not tokens:\n        return\n"
            "    append_kernel[(tokens, heads)](",
        ),
    ),
    "padding_written__zeros": changed(
        "6.4",
        (
            "slot = tl.load(slots_pointer + token)",
            "raw = tl.load(slots_pointer + token)\n    slot = tl.maximum(raw, 0)",
        ),
        (
            "inside = (columns < HEAD_DIM) & (slot >= 0)",
            "real = columns < HEAD_DIM\n    inside = real & (raw >= 0)",
        ),
        ("+ columns, mask=inside)\n    key_row", "+ columns, mask=inside, other=0.0)\n    key_row"),
        ("+ columns, mask=inside)\n    value_row", "+ columns, mask=inside, other=0.0)\n    value_row"),
        ("columns, key, mask=inside", "columns, key, mask=real"),
        ("columns, value, mask=inside", "columns, value, mask=real"),
    ),
    "written_into_a_copy": changed(
        "6.4",
        (
            "    append_kernel[(tokens, heads)](",
            "    key_pages, value_pages = key_pages.contiguous(), value_pages.contiguous()\n"
            "    append_kernel[(tokens, heads)](",
        ),
    ),
    "rounded_to_16_bits": changed("6.4", ("key_row + columns, key,", "key_row + columns, key.to(tl.float16),")),
    "padding_written__and_columns_not_masked": changed(
        "6.4",
        ("(columns < HEAD_DIM) & (slot >= 0)", "(columns >= 0) & (slot >= 0)"),
        ("value_row + columns, value, mask=inside", "value_row + columns, value"),
    ),
}


UNUSUAL = {
    "padding marked in a copy of the slots": changed(
        "6.4", ("    append_kernel[(", "    slots = slots.clone()\n    slots[slots < 0] = -2\n    append_kernel[(")
    ),
    "an early return": changed(
        "6.4",
        ("    page = slot // PAGE_SIZE", "    if slot < 0:\n        return\n    page = slot // PAGE_SIZE"),
        (" & (slot >= 0)", ""),
    ),
    "a program for each token": """# Exercise 6.4 · Append into pages
@triton.jit
def kernel(k, v, kp, vp, slots, k0, k1, v0, v1, kp0, kp1, kp2, vp0, vp1, vp2,
           H: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr):
    t = tl.program_id(0)
    slot = tl.load(slots + t)
    h, d = tl.arange(0, BH)[:, None], tl.arange(0, BD)[None, :]
    ok = (h < H) & (d < D) & (slot > -1)
    tl.store(kp + slot // S * kp0 + h * kp1 + slot % S * kp2 + d, tl.load(k + t * k0 + h * k1 + d, mask=ok), mask=ok)
    tl.store(vp + slot // S * vp0 + h * vp1 + slot % S * vp2 + d, tl.load(v + t * v0 + h * v1 + d, mask=ok), mask=ok)

def append_to_pages(key, value, key_pages, value_pages, slots):
    n, h, d = key.shape
    kernel[(n,)](key, value, key_pages, value_pages, slots, *key.stride()[:2], *value.stride()[:2],
                 *key_pages.stride()[:3], *value_pages.stride()[:3], H=h, BH=triton.next_power_of_2(h),
                 D=d, BD=triton.next_power_of_2(d), S=key_pages.shape[2])
""",
    "keys and values in turn": """# Exercise 6.4 · Append into pages
@triton.jit
def put(x, pool, slots, x0, x1, p0, p1, p2, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr):
    t, h = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)
    slot = tl.load(slots + t)
    row = tl.load(x + t * x0 + h * x1 + d, mask=d < D, other=0.0)
    tl.store(pool + (slot // S) * p0 + h * p1 + (slot - slot // S * S) * p2 + d, row, mask=(d < D) & (slot >= 0))

@triton.jit
def both(k, v, kp, vp, slots, k0, k1, v0, v1, kp0, kp1, kp2, vp0, vp1, vp2,
         D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr):
    put(k, kp, slots, k0, k1, kp0, kp1, kp2, D, BD, S)
    put(v, vp, slots, v0, v1, vp0, vp1, vp2, D, BD, S)

def append_to_pages(key, value, key_pages, value_pages, slots):
    n, h, d = key.shape
    both[(n, h)](key, value, key_pages, value_pages, slots, *key.stride()[:2], *value.stride()[:2],
                 *key_pages.stride()[:3], *value_pages.stride()[:3], d, triton.next_power_of_2(d), key_pages.shape[2])
""",
    "a grid of one dimension": changed(
        "6.4",
        ("append_kernel[(tokens, heads)](", "append_kernel[(tokens * heads,)](\n        heads,"),
        ("def append_kernel(\n", "def append_kernel(\n    heads,\n"),
        ("token = tl.program_id(0).to(tl.int64)", "token = (tl.program_id(0) // heads).to(tl.int64)"),
        ("head = tl.program_id(1).to(tl.int64)", "head = (tl.program_id(0) % heads).to(tl.int64)"),
    ),
    "padding left out by the launcher": """# Exercise 6.4 · Append into pages
@triton.jit
def append_kernel(key, value, key_pages, value_pages, slots, tokens, heads, ks, kh, vs, vh, kp, kph, ksl, vp, vph, vsl,
                  D: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    token = tl.load(tokens + tl.program_id(0))
    slot = tl.load(slots + token)
    page, offset = slot // P, slot % P
    columns = tl.arange(0, BLOCK)
    head = 0
    while head < heads:
        k = tl.load(key + token * ks + head * kh + columns, mask=columns < D)
        v = tl.load(value + token * vs + head * vh + columns, mask=columns < D)
        tl.store(key_pages + page * kp + head * kph + offset * ksl + columns, k, mask=columns < D)
        tl.store(value_pages + page * vp + head * vph + offset * vsl + columns, v, mask=columns < D)
        head += 1


def append_to_pages(key, value, key_pages, value_pages, slots):
    tokens = torch.nonzero(slots >= 0)[:, 0]
    if len(tokens):
        append_kernel[(len(tokens),)](
            key, value, key_pages, value_pages, slots, tokens, key.shape[1], *key.stride()[:2], *value.stride()[:2],
            *key_pages.stride()[:3], *value_pages.stride()[:3], D=key.shape[2],
            BLOCK=triton.next_power_of_2(key.shape[2]), P=key_pages.shape[2])
""",
    "a launch for the keys and one for the values": """# Exercise 6.4 · Append into pages
@triton.jit
def half_kernel(new, pages, slots, count, stride, head_stride, page_stride, page_head_stride, slot_stride,
                D: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    tokens = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)[None, :]
    slot = tl.load(slots + tokens, mask=tokens < count, other=-1)
    page = tl.where(slot < 0, 0, slot // P)
    offset = tl.where(slot < 0, 0, slot - page * P)
    mask = (slot >= 0)[:, None] & (columns < D)
    rows = tl.load(new + (tokens * stride + head * head_stride)[:, None] + columns, mask=mask)
    target = page * page_stride + head * page_head_stride + offset * slot_stride
    tl.store(pages + target[:, None] + columns, rows, mask=mask)


def append_to_pages(key, value, key_pages, value_pages, slots):
    tokens, heads, d = key.shape
    for new, pages in ((key, key_pages), (value, value_pages)):
        half_kernel[(triton.cdiv(tokens, 4), heads)](new, pages, slots, tokens, *new.stride()[:2], *pages.stride()[:3],
                                                     D=d, BLOCK=triton.next_power_of_2(d), P=pages.shape[2])
""",
}


WRONG |= {
    "offset_in_32_bits": changed(
        "6.4", ("tl.load(slots_pointer + token)", "tl.load(slots_pointer + token).to(tl.int32)")
    ),
}


KEYS_FOR_VALUES = ("tl.load(value_pointer", "tl.load(key_pointer")
BY_STRIDES_OF_KEYS = ("token * value_stride + head * value_head_stride", "token * key_stride + head * key_head_stride")
WRONG |= {
    "keys_written_twice__by_the_strides_of_values": changed("6.4", KEYS_FOR_VALUES),
    # Two at once, of which one is made with the keys or the values alone.
    "keys_written_twice__and_columns_not_masked": changed(
        "6.4", KEYS_FOR_VALUES, ("(columns < HEAD_DIM) & (slot >= 0)", "(columns < BLOCK_D) & (slot >= 0)")
    ),
    "heads_on_top_of_each_other__and_other_strides": changed(
        "6.4", (" + head * key_page_head_stride", ""), BY_STRIDES_OF_KEYS
    ),
    "first_head_for_all__and_heads_on_top_of_each_other": changed(
        "6.4", (" + head * key_head_stride", ""), (" + head * value_page_head_stride", "")
    ),
}
