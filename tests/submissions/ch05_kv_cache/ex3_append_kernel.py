"""Wrong answers to exercise 5.3, and unusual right ones."""

from tests.submissions.edits import changed

SLOTS = "slots = tl.load(positions_pointer + batch) + tokens"


TOKENS = "tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)"


LOAD = "rows = tl.load(new_rows + columns[None, :], mask=inside)  # [BLOCK_T, HEAD_DIM]"


STORE = "tl.store(cache_rows + columns[None, :], rows, mask=inside)"


LAUNCHES = "for new, cache in ((key, key_cache), (value, value_cache)):"


WRONG = {
    # The rows behind the new ones are read and written back: the read that leaves the cache is no read of new rows.
    "out_of_bounds__the_rest_written_back": changed(
        "5.3",
        (STORE, STORE.replace("rows, mask=inside", "tl.where(inside, rows, tl.load(cache_rows + columns[None, :]))")),
    ),
    "copied_by_pytorch": changed("5.3", (LAUNCHES, LAUNCHES.replace("(key,", "(key.contiguous(),"))),
    "offset_in_32_bits__of_slots": changed("5.3", (SLOTS, f"slots = ({SLOTS[8:]}).to(tl.int32)")),
    "position_in_16_bits": changed("5.3", (SLOTS, f"slots = ({SLOTS[8:]}).to(tl.int16)")),
    "written_into_a_copy__of_the_values": changed(
        "5.3",
        ("in ((key, key_cache), (value, value_cache)):", "in ((key, key_cache), (value, value_cache.contiguous())):"),
    ),
    "offset_in_32_bits": changed("5.3", (".to(tl.int64)", "")),
    "position_ignored": changed("5.3", (SLOTS, "slots = tokens")),
    "slot_too_late": changed("5.3", (SLOTS, SLOTS + " + 1")),
    "slot_too_early": changed("5.3", (SLOTS, SLOTS + " - 1")),
    "one_slot_for_all": changed("5.3", (SLOTS, "slots = tl.load(positions_pointer + batch) + 0 * tokens")),
    "position_of_first_sequence": changed("5.3", (SLOTS, "slots = tl.load(positions_pointer) + tokens")),
    "only_first_token": changed("5.3", ("inside = (tokens < new_tokens)[:, None]", "inside = (tokens < 1)[:, None]")),
    "only_first_tile": changed("5.3", (TOKENS, "tokens = tl.arange(0, BLOCK_T)")),
    "only_first_tile__grid": changed("5.3", ("grid = (triton.cdiv(new_tokens, BLOCK_T), ", "grid = (1, ")),
    "only_first_sequence": changed("5.3", ("key_heads, batch)\n", "key_heads, 1)\n")),
    "rows_of_first_sequence": changed("5.3", ("new_pointer + batch * new_batch_stride + ", "new_pointer + ")),
    "head_ignored_in_source": changed("5.3", (" + head * new_head_stride", "")),
    "head_ignored_in_target": changed("5.3", (" + head * cache_head_stride", "")),
    "rows_read_as_contiguous": changed(
        "5.3", ("*new.stride()[:3]", "key_heads * new_tokens * head_dim, new_tokens * head_dim, head_dim")
    ),
    "cache_written_as_contiguous": changed(
        "5.3",
        ("*cache.stride()[:3]", "key_heads * cache.shape[2] * head_dim, cache.shape[2] * head_dim, head_dim"),
    ),
    "source_strides_in_cache": changed("5.3", ("*cache.stride()[:3]", "*new.stride()[:3]")),
    "slots_masked_by_new_tokens": changed(
        "5.3", (STORE, STORE.replace("mask=inside", "mask=(slots < new_tokens)[:, None]"))
    ),
    "positions_out_of_bounds": changed("5.3", (SLOTS, SLOTS.replace("+ batch)", "+ head)"))),
    "position_in_the_source": changed(
        "5.3",
        (
            LOAD,
            LOAD.replace(
                "columns[None, :]", "columns[None, :] + tl.load(positions_pointer + batch) * new_token_stride"
            ),
        ),
    ),
    "positions_out_of_bounds__numbers_exchanged": changed(
        "5.3",
        ("tl.program_id(1)", "tl.program_id(9)"),
        ("tl.program_id(2)", "tl.program_id(1)"),
        ("tl.program_id(9)", "tl.program_id(2)"),
    ),
    "tile_ignored_in_slots": changed(
        "5.3", (SLOTS, "slots = tl.load(positions_pointer + batch) + tl.arange(0, BLOCK_T)")
    ),
    "cache_by_the_other_strides": changed("5.3", ("*cache.stride()[:3]", "*key_cache.stride()[:3]")),
    "rows_by_the_other_strides": changed("5.3", ("*new.stride()[:3]", "*key.stride()[:3]")),
    "rows_read_as_contiguous__tokens": changed(
        "5.3", ("tokens[:, None] * new_token_stride", "tokens[:, None] * HEAD_DIM")
    ),
    "cache_written_as_contiguous__batch_is_heads": changed(
        "5.3", ("*cache.stride()[:3]", "key_heads * cache.stride(1), *cache.stride()[1:3]")
    ),
    "position_of_first_sequence__and_tail_not_masked": changed(
        "5.3", (SLOTS, "slots = tl.load(positions_pointer) + tokens"), (STORE, STORE.replace(", mask=inside", ""))
    ),
    "head_ignored_in_source__and_slot_too_late": changed(
        "5.3", (" + head * new_head_stride", ""), (SLOTS, SLOTS + " + 1")
    ),
    "values_forgotten": changed("5.3", (LAUNCHES, "for new, cache in ((key, key_cache),):")),
    "keys_as_values": changed("5.3", (LAUNCHES, "for new, cache in ((key, key_cache), (key, value_cache)):")),
    "nothing_written": changed("5.3", (LAUNCHES, LAUNCHES + "\n        cache = cache.clone()")),
    "tail_not_masked": changed(
        "5.3",
        (LOAD, LOAD + "\n    cache_tail = inside | (slots[:, None] < tl.num_programs(1) * 6)"),
        (STORE, STORE.replace("inside", "cache_tail")),
    ),
    "tail_not_masked__at_all": changed("5.3", (STORE, STORE.replace(", mask=inside", ""))),
    "out_of_bounds_write": changed(
        "5.3",
        (
            "+ batch * cache_batch_stride + head * cache_head_stride",
            "+ batch * cache_head_stride + head * cache_batch_stride",
        ),
    ),
    "out_of_bounds_read": changed("5.3", (LOAD, LOAD.replace(", mask=inside", ""))),
    "no_kernel_launched": """# Exercise 5.3 · The append kernel
def append_to_cache(key, value, key_cache, value_cache, positions):
    new = key.shape[2]
    for b, position in enumerate(positions.tolist()):
        key_cache[b, :, position : position + new] = key[b]
        value_cache[b, :, position : position + new] = value[b]
""",
    "too_many_bytes": """# Exercise 5.3 · The append kernel
@triton.jit
def rebuild(new, cache, positions, new_tokens, capacity, nb, nh, nt, cb, ch, cs, D: tl.constexpr, BLOCK: tl.constexpr):
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slots, columns = tl.arange(0, BLOCK).to(tl.int64), tl.arange(0, D)
    token = slots - tl.load(positions + batch)
    fresh = (token >= 0) & (token < new_tokens)
    old_rows = cache + batch * cb + head * ch + slots[:, None] * cs + columns[None, :]
    old = tl.load(old_rows, mask=(slots < capacity)[:, None])
    rows = tl.load(new + batch * nb + head * nh + token[:, None] * nt + columns[None, :], mask=fresh[:, None])
    tl.store(old_rows, tl.where(fresh[:, None], rows, old), mask=(slots < capacity)[:, None])

def append_to_cache(key, value, key_cache, value_cache, positions):
    batch, heads, new, head_dim = key.shape
    capacity = key_cache.shape[2]
    for fresh, cache in ((key, key_cache), (value, value_cache)):
        rebuild[(heads, batch)](fresh, cache, positions, new, capacity, *fresh.stride()[:3], *cache.stride()[:3],
                                D=head_dim, BLOCK=triton.next_power_of_2(capacity))
""",
    "written_into_a_copy": changed("5.3", (LAUNCHES, LAUNCHES + "\n        cache = cache.contiguous()")),
    "width_fixed": changed(
        "5.3",
        ("tl.arange(0, HEAD_DIM)", "tl.arange(0, 64)"),
        ("[:, None]  # [BLOCK_T, 1]", "[:, None] & (columns < HEAD_DIM)[None, :]"),
    ),
    "width_fixed__unmasked": changed("5.3", ("tl.arange(0, HEAD_DIM)", "tl.arange(0, 32)")),
    "grid_rounded_down__but_one_and_the_other_strides": changed(
        "5.3",
        ("triton.cdiv(new_tokens, BLOCK_T)", "max(1, new_tokens // BLOCK_T)"),
        ("*new.stride()[:3]", "*key.stride()[:3]"),
    ),
    "rounded_to_16_bits": changed("5.3", (STORE, STORE.replace("rows,", "rows.to(tl.float16),"))),
}


UNUSUAL = {
    "16 columns at a time, last rows first, masked by slots": changed(
        "5.3",
        (TOKENS, "tokens = tile * BLOCK_T + BLOCK_T - 1 - tl.arange(0, BLOCK_T)"),
        ("inside = (tokens < new_tokens)[:, None]", "end = tl.load(positions_pointer + tl.program_id(2)) + new_tokens"),
        (LOAD, ""),
        (
            "    " + STORE,
            "    inside = (slots < end)[:, None]\n    for first in range(0, HEAD_DIM, 16):\n"
            "        part = first + tl.arange(0, 16)[None, :]\n"
            "        tl.store(cache_rows + part, tl.load(new_rows + part, mask=inside), mask=inside)",
        ),
    ),
    "one launch for both": """# Exercise 5.3 · The append kernel
@triton.jit
def append_both(key, value, key_cache, value_cache, positions, T,
                kb, kh, kt, vb, vh, vt, ckb, ckh, cks, cvb, cvh, cvs, D: tl.constexpr, BLOCK: tl.constexpr):
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = tl.load(positions + b)
    d = tl.arange(0, D)[None, :]
    for first in range(0, T, BLOCK):
        t = first + tl.arange(0, BLOCK)[:, None].to(tl.int64)
        k = tl.load(key + b * kb + h * kh + t * kt + d, mask=t < T, other=0.0)
        v = tl.load(value + b * vb + h * vh + t * vt + d, mask=t < T, other=0.0)
        tl.store(key_cache + b * ckb + h * ckh + (start + t) * cks + d, k, mask=t < T)
        tl.store(value_cache + b * cvb + h * cvh + (start + t) * cvs + d, v, mask=t < T)

def append_to_cache(key, value, key_cache, value_cache, positions):
    batch, heads, new, head_dim = key.shape
    append_both[(batch, heads)](
        key, value, key_cache, value_cache, positions, new, *key.stride()[:3], *value.stride()[:3],
        *key_cache.stride()[:3], *value_cache.stride()[:3], D=head_dim, BLOCK=8)
""",
    "a program for each row": """# Exercise 5.3 · The append kernel
@triton.jit
def append_row(new, cache, positions, heads, nb, nh, nt, cb, ch, cs, D: tl.constexpr):
    t, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, b = row % heads, row // heads
    slot = t + tl.load(positions + b)
    d = tl.arange(0, D)
    tl.store(cache + b * cb + h * ch + slot * cs + d, tl.load(new + b * nb + h * nh + t * nt + d))

def append_to_cache(key, value, key_cache, value_cache, positions):
    batch, heads, new, head_dim = key.shape
    for x, cache in ((key, key_cache), (value, value_cache)):
        append_row[(new, batch * heads)](x, cache, positions, heads, *x.stride()[:3], *cache.stride()[:3], head_dim)
""",
    "all heads in one tile": """# Exercise 5.3 · The append kernel
@triton.jit
def append_heads(new, cache, positions, heads, nb, nh, nt, cb, ch, cs, D: tl.constexpr, H: tl.constexpr):
    t, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(positions + b) + t
    h, d = tl.arange(0, H)[:, None].to(tl.int64), tl.arange(0, D)[None, :]
    row = tl.load(new + b * nb + h * nh + t * nt + d, mask=h < heads)
    tl.store(cache + b * cb + h * ch + slot * cs + d, row, mask=h < heads)

def append_to_cache(key, value, key_cache, value_cache, positions):
    batch, heads, new, head_dim = key.shape
    for fresh, cache in zip((value, key), (value_cache, key_cache)):
        append_heads[(new, batch)](fresh, cache, positions, heads, *fresh.stride()[:3], *cache.stride()[:3],
                                   D=head_dim, H=triton.next_power_of_2(heads))
""",
    "a position loaded for each element, one launch": """# Exercise 5.3 · The append kernel
@triton.jit
def move(new, cache, slot, batch, head, token, column, nb, nh, nt, cb, ch, cs, mask):
    x = tl.load(new + batch * nb + head * nh + token * nt + column, mask=mask)
    tl.store(cache + batch * cb + head * ch + slot * cs + column, x, mask=mask)


@triton.jit
def append_kernel(key, value, key_cache, value_cache, positions, total, heads, new_tokens,
                  kb, kh, kt, vb, vh, vt, kcb, kch, kcs, vcb, vch, vcs, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    flat = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = flat < total
    column = flat % HEAD_DIM
    row = flat // HEAD_DIM
    token = row % new_tokens
    head = (row // new_tokens) % heads
    batch = row // new_tokens // heads
    slot = tl.load(positions + batch, mask=mask, other=0).to(tl.int64) + token
    move(key, key_cache, slot, batch, head, token, column, kb, kh, kt, kcb, kch, kcs, mask)
    move(value, value_cache, slot, batch, head, token, column, vb, vh, vt, vcb, vch, vcs, mask)


def append_to_cache(key, value, key_cache, value_cache, positions):
    batch, heads, new_tokens, head_dim = key.shape
    total = key.numel()
    append_kernel[(triton.cdiv(total, 256),)](
        key, value, key_cache, value_cache, positions, total, heads, new_tokens, *key.stride()[:3],
        *value.stride()[:3], *key_cache.stride()[:3], *value_cache.stride()[:3], HEAD_DIM=head_dim, BLOCK=256)
""",
}
