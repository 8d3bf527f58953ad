"""Wrong answers to the exercises of chapter 06, and unusual right ones; the form is that of ch00.py.

Most are the course's own answer with one step changed, as a learner would get it wrong.
"""

from tests.mistakes.edits import changed

# ------------------------------------------------------------------------------------------------------------------ 6.1

WASTE_WRONG = {
    "free_always_counted": changed("6.1", ("0 if longest >= wanted else slots - reserved", "slots - reserved")),
    "free_runs_added_up": changed(
        "6.1", ("0 if longest >= wanted else", "0 if slots - reserved >= wanted else")
    ),
    "short_runs_counted": changed(
        "6.1", ("longest, end = 0, 0", "runs, end = [], 0"), ("longest = max(longest, start - end)",
                                                              "runs.append(start - end)"),
        ("longest = max(longest, slots - end)", "runs.append(slots - end)"),
        ("0 if longest >= wanted else slots - reserved", "sum(run for run in runs if run < wanted)"),
    ),
    "longest_run_alone": changed("6.1", ("else slots - reserved", "else longest")),
    "reserved_called_used": changed("6.1", ("return used, reserved - used,", "return reserved, reserved - used,")),
    "lengths_added_up": changed("6.1", ("sum(-length % page_size for length in lengths)", "-sum(lengths) % page_size")),
    "given_in_percent": changed("6.1", ("(prompt + (output + 1) / 2) / reserved",
                                        "100 * (prompt + (output + 1) / 2) / reserved")),
    "exact_fit_refused": changed("6.1", ("longest >= wanted", "longest > wanted")),
    "regions_not_sorted": changed("6.1", ("in sorted(regions)", "in regions")),
    "run_at_the_end_forgotten": changed("6.1", ("    longest = max(longest, slots - end)\n", "")),
    "run_at_the_end_forgotten__nor_added": changed(
        "6.1",
        ("    longest = max(longest, slots - end)\n", ""),
        ("longest, end = 0, 0", "longest, end, free = 0, 0, 0"),
        ("        longest = max(longest, start - end)\n",
         "        longest = max(longest, start - end)\n        free += start - end\n"),
        ("else slots - reserved", "else free"),
    ),
    "run_at_the_start_forgotten": changed(
        "6.1", ("longest, end = 0, 0", "longest, end = 0, min((r[0] for r in regions), default=0)")
    ),
    "reserved_counted_whole": changed("6.1", ("return used, reserved - used,", "return used, reserved,")),
    "remainder_counted": changed("6.1", ("-length % page_size", "length % page_size")),
    "full_page_counted_empty": changed("6.1", ("-length % page_size", "page_size - length % page_size")),
    "pages_rounded_down": changed("6.1", ("-length % page_size", "length // page_size * page_size - length")),
    "pages_rounded_down__int": changed(
        "6.1", ("sum(-length % page_size for length in lengths)",
                "sum(max(0, int(length / page_size) * page_size - length) for length in lengths)")
    ),
    "final_length_taken": changed("6.1", ("(prompt + (output + 1) / 2) / reserved", "(prompt + output) / reserved")),
    "prompt_forgotten": changed("6.1", ("(prompt + (output + 1) / 2) / reserved", "(output + 1) / 2 / reserved")),
    "half_a_token_short": changed("6.1", ("(output + 1) / 2", "output / 2")),
    "half_a_token_short__before_each_step": changed(
        "6.1", ("(prompt + (output + 1) / 2) / reserved",
                "sum(prompt + step for step in range(output)) / output / reserved")
    ),
}  # fmt: skip

WASTE_UNUSUAL = {
    "slot by slot": """# Exercise 6.1 · What a contiguous layout wastes
def layout_waste(regions, slots, wanted):
    state = ["free"] * slots
    for start, size, length in regions:
        for slot in range(start, start + size):
            state[slot] = "used" if slot < start + length else "internal"
    runs = "".join("." if s == "free" else "x" for s in state).split("x")
    fits = max(map(len, runs)) >= wanted
    return state.count("used"), state.count("internal"), 0 if fits else state.count("free")

def paged_waste(lengths, page_size):
    return sum(math.ceil(n / page_size) * page_size - n for n in lengths)

def mean_use(prompt, output, reserved):
    shares = [(prompt + k) / reserved for k in range(1, output + 1)]
    return sum(shares) / len(shares)
""",
    "with a torch mask": """# Exercise 6.1 · What a contiguous layout wastes
def layout_waste(regions, slots, wanted):
    taken = torch.zeros(slots + 1, dtype=torch.bool)
    taken[slots] = True
    used = internal = 0
    for start, size, length in regions:
        taken[start:start + size] = True
        used, internal = used + length, internal + size - length
    longest = run = 0
    for slot in taken.tolist():
        run = 0 if slot else run + 1
        longest = max(longest, run)
    free = slots - used - internal
    return [used, internal, free * (longest < wanted)]

def paged_waste(lengths, page_size):
    return int((-torch.tensor(lengths) % page_size).sum())

def mean_use(prompt, output, reserved):
    return torch.arange(prompt + 1, prompt + output + 1).double().mean().item() / reserved
""",
    "sentinels": changed(
        "6.1",
        ("longest, end = 0, 0\n    for start, size, _ in sorted(regions):", "longest, end = 0, 0\n"
         "    for start, size, _ in sorted([*regions, (slots, 0, 0)]):"),
        ("    longest = max(longest, slots - end)\n", ""),
    ),
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------------ 6.2

MORE = "more = -(-length // self.page_size) - len(self.pages_of.get(sequence, []))"
CHECK = (
    '        if more > len(self.unused):\n            raise MemoryError(f"{sequence} needs {more} more pages, and '
    '{len(self.unused)} are free")\n'
)
EXTEND = "self.pages_of.setdefault(sequence, []).extend(self.unused.pop() for _ in range(more))"
FREE = "self.unused.extend(self.pages_of.pop(sequence))\n        del self.length_of[sequence]"

ALLOCATOR_WRONG = {
    "half_appended": changed(
        "6.2",
        (CHECK, ""),
        (EXTEND, "table = self.pages_of.setdefault(sequence, [])\n        for _ in range(more):\n"
                 "            if not self.unused:\n                raise MemoryError('full')\n"
                 "            table.append(self.unused.pop())"),
    ),
    "half_appended__length_first": changed(
        "6.2",
        (CHECK, "        self.length_of[sequence] = length\n" + CHECK),
        ("self.length_of.get(sequence, 0) + count", "self.length_of.get(sequence, 0) + count\n"
         "        self.pages_of.setdefault(sequence, [])"),
    ),
    "pages_for_every_append": changed("6.2", (MORE, "more = -(-count // self.page_size)")),
    "pages_for_every_append__nothing_subtracted": changed("6.2", (MORE, "more = -(-length // self.page_size)")),
    "one_page_at_most": changed("6.2", (MORE, "more = 1 if (length - count) % self.page_size == 0 else 0")),
    "refused_one_stays": changed(
        "6.2", ("self.pages_of.get(sequence, [])", "self.pages_of.setdefault(sequence, [])"),
        ("        del self.length_of[sequence]", "        self.length_of.pop(sequence, None)"),
    ),
    "not_refused": changed("6.2", (CHECK, "        if more > len(self.unused):\n            return False\n")),
    "attribute_hides_method": changed(
        "6.2", ("self.unused = list", "self.free_pages = list"), ("len(self.unused):", "len(self.free_pages):"),
        ("self.unused.pop()", "self.free_pages.pop()"), ("self.unused.extend", "self.free_pages.extend"),
    ),
    "one_page_too_many": changed(
        "6.2", (MORE, "more = length // self.page_size + 1 - len(self.pages_of.get(sequence, []))")
    ),
    "pages_rounded_down": changed(
        "6.2", (MORE, "more = length // self.page_size - len(self.pages_of.get(sequence, []))")
    ),
    "pages_rounded_down__for_every_append": changed("6.2", (MORE, "more = count // self.page_size")),
    "pages_not_returned": changed("6.2", ("self.unused.extend(self.pages_of.pop(sequence))",
                                          "self.pages_of.pop(sequence)")),
    "double_free": changed("6.2", (FREE, "self.unused.extend(self.pages_of.pop(sequence, []))\n"
                                         "        self.length_of.pop(sequence, None)")),
    "double_free__table_kept": changed("6.2", (FREE, "self.unused.extend(self.pages_of[sequence])")),
    "double_free__empty_table_kept": changed(
        "6.2", (FREE, "self.unused.extend(self.pages_of.get(sequence, []))\n        self.pages_of[sequence] = []\n"
                      "        self.length_of[sequence] = 0")
    ),
    "length_survives_free": changed("6.2", ("\n        del self.length_of[sequence]", "")),
    "page_in_two_tables": changed("6.2", ("self.unused.pop() for _", "self.unused[-1] for _")),
    "page_in_two_tables__a_counter": changed(
        "6.2",
        ("self.unused.pop() for _ in range(more))", "self.next_page() for _ in range(more))"),
        ("    def free(self", "    def next_page(self):\n        page = len(self.pages_of) % 8\n"
         "        self.unused.pop()\n        return page\n\n    def free(self"),
    ),
    "last_page_never_used": changed("6.2", ("if more > len(self.unused):", "if more and more >= len(self.unused):")),
    "new_sequence_refused": changed("6.2", ("self.length_of.get(sequence, 0)", "self.length_of[sequence]")),
    "length_from_pages": changed(
        "6.2", ("return self.length_of[sequence]", "return len(self.pages_of[sequence]) * self.page_size")
    ),
    "other_exception": changed("6.2", ("raise MemoryError(", "raise RuntimeError(")),
    "other_exception__assert": changed(
        "6.2", ("self.unused.extend(self.pages_of.pop(sequence))",
                "assert sequence in self.pages_of\n        self.unused.extend(self.pages_of.pop(sequence))")
    ),
    "pool_not_checked": changed("6.2", (CHECK, "")),
}  # fmt: skip

ALLOCATOR_UNUSUAL = {
    "lowest page first": changed("6.2", ("self.unused.pop() for", "self.unused.pop(0) for")),
    "owner of each page": """# Exercise 6.2 · An allocator of pages
class PageAllocator:
    def __init__(self, pages, page_size):
        self.owner, self.page_size, self.count, self.order = [None] * pages, page_size, {}, {}
    def append(self, sequence, count):
        after = self.count.get(sequence, 0) + count
        have = self.order.get(sequence, ())
        need = (after + self.page_size - 1) // self.page_size - len(have)
        free = [page for page, owner in enumerate(self.owner) if owner is None]
        if need > len(free):
            raise MemoryError
        for page in free[:need]:
            self.owner[page] = sequence
        self.order[sequence] = (*have, *free[:need])
        self.count[sequence] = after
    def free(self, sequence):
        if sequence not in self.count:
            raise KeyError(sequence)
        self.owner = [None if owner == sequence else owner for owner in self.owner]
        del self.count[sequence], self.order[sequence]
    def table(self, sequence):
        return self.order[sequence]
    def length(self, sequence):
        return self.count[sequence]
    def free_pages(self):
        return sum(owner is None for owner in self.owner)
""",
    "one step at a time, undone when refused": """# Exercise 6.2 · An allocator of pages
class PageAllocator:
    def __init__(self, pages, page_size):
        self.free_set, self.page_size, self.state = set(range(pages)), page_size, {}
    def append(self, sequence, count):
        table, length = self.state.get(sequence, ([], 0))
        taken = []
        while (len(table) + len(taken)) * self.page_size < length + count:
            if not self.free_set:
                self.free_set.update(taken)
                raise MemoryError("no page left")
            taken.append(self.free_set.pop())
        self.state[sequence] = (table + taken, length + count)
    def free(self, sequence):
        table, _ = self.state.pop(sequence)
        self.free_set |= set(table)
    def table(self, sequence):
        return self.state[sequence][0]
    def length(self, sequence):
        return self.state[sequence][1]
    def free_pages(self):
        return len(self.free_set)
""",
    "tables as tensors": changed(
        "6.2", ("return self.pages_of[sequence]", "return torch.tensor(self.pages_of[sequence], dtype=torch.int32)")
    ),
    "what append returns is its own affair": changed(
        "6.2", ("self.length_of[sequence] = length\n",
                "self.length_of[sequence] = length\n        return self.pages_of[sequence]\n")
    ),
    "an exception of its own": changed(
        "6.2", ("class PageAllocator:", "class PoolIsFull(MemoryError):\n    pass\n\n\nclass PageAllocator:"),
        ("raise MemoryError(", "raise PoolIsFull("),
    ),
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------------ 6.3

PAGE = "table[positions // page_size].long() * page_size"
SLOTS_WRONG = {
    "table_not_multiplied": changed("6.3", (PAGE, "table[positions // page_size].long()")),
    "offset_forgotten": changed("6.3", (PAGE + " + positions % page_size", PAGE)),
    "position_added_whole": changed("6.3", (PAGE + " + positions % page_size", PAGE + " + positions")),
    "division_and_remainder_exchanged": changed(
        "6.3", (PAGE + " + positions % page_size",
                "table[positions % page_size].long() * page_size + positions // page_size")
    ),
    "offset_counted_anew": changed("6.3", (PAGE + " + positions % page_size",
                                           PAGE + " + torch.arange(new) % page_size")),
    "page_looked_up_once": changed(
        "6.3", (PAGE + " + positions % page_size",
                "table[(length - new) // page_size].long() * page_size + (length - new) % page_size"
                " + torch.arange(new)")
    ),
    "old_tokens_too": changed("6.3", ("torch.arange(length - new, length)", "torch.arange(length)")),
    "positions_run_on": """# Exercise 6.3 · Slot mapping
def slot_mapping(block_tables, lengths, new_tokens, page_size):
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), new_tokens.long())
    position = (lengths - new_tokens)[sequence] + torch.arange(len(sequence))
    return block_tables[sequence, position // page_size].long() * page_size + position % page_size
""",
    "pages_consecutive": changed("6.3", (PAGE + " + positions % page_size", "table[0].long() * page_size + positions")),
    "table_ignored": changed("6.3", (PAGE + " + positions % page_size", "positions")),
    "first_table_for_all": changed("6.3", (PAGE, "block_tables[0][positions // page_size].long() * page_size")),
    "positions_from_zero": changed("6.3", ("torch.arange(length - new, length)", "torch.arange(new)")),
    "one_token_late": changed("6.3", ("torch.arange(length - new, length)", "torch.arange(length, length + new)")),
    "one_token_late__by_one": changed(
        "6.3", ("torch.arange(length - new, length)", "torch.arange(length - new + 1, length + 1)")
    ),
    "one_token_early": changed(
        "6.3", ("torch.arange(length - new, length)", "torch.arange(length - new - 1, length - 1)")
    ),
}  # fmt: skip

SLOTS_UNUSUAL = {
    "token by token": """# Exercise 6.3 · Slot mapping
def slot_mapping(block_tables, lengths, new_tokens, page_size):
    slots = []
    for b in range(len(lengths)):
        for p in range(int(lengths[b]) - int(new_tokens[b]), int(lengths[b])):
            slots.append(int(block_tables[b][p // page_size]) * page_size + p % page_size)
    return torch.tensor(slots, dtype=torch.int64)
""",
    "without a loop": """# Exercise 6.3 · Slot mapping
def slot_mapping(block_tables, lengths, new_tokens, page_size):
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), new_tokens.long())
    first = torch.cumsum(new_tokens, 0) - new_tokens
    position = (lengths - new_tokens)[sequence] + torch.arange(len(sequence)) - first[sequence]
    page = block_tables[sequence, position // page_size]
    return (page * page_size + position % page_size).long()
""",
    "every slot first": """# Exercise 6.3 · Slot mapping
def slot_mapping(block_tables, lengths, new_tokens, page_size):
    every = (block_tables.long()[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    rows = [row[n - k:n] for row, n, k in zip(every, lengths.tolist(), new_tokens.tolist())]
    return torch.cat(rows)
""",
}

# ------------------------------------------------------------------------------------------------------------------ 6.4

KEY_ROW = "page * key_page_stride + head * key_page_head_stride + offset * key_slot_stride"
VALUE_ROW = "page * value_page_stride + head * value_page_head_stride + offset * value_slot_stride"


def rows(pattern):
    """Both rows of the pool computed another way."""
    return changed("6.4", (KEY_ROW, pattern.format("key")), (VALUE_ROW, pattern.format("value")))


APPEND_WRONG = {
    "slot_used_as_row": rows("slot * {0}_slot_stride + head * {0}_page_head_stride"),
    "page_and_offset_exchanged": changed("6.4", ("page = slot // PAGE_SIZE", "page = slot % PAGE_SIZE"),
                                         ("offset = slot % PAGE_SIZE", "offset = slot // PAGE_SIZE")),
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
        "6.4", ("token * key_stride + head * key_head_stride", "(token * tl.num_programs(1) + head) * HEAD_DIM"),
    ),
    "slots_ignored": changed("6.4", ("page = slot // PAGE_SIZE", "page = token // PAGE_SIZE"),
                             ("offset = slot % PAGE_SIZE", "offset = token % PAGE_SIZE")),
    "one_slot_late": changed("6.4", ("page = slot // PAGE_SIZE", "page = (slot + 1) // PAGE_SIZE"),
                             ("offset = slot % PAGE_SIZE", "offset = (slot + 1) % PAGE_SIZE")),
    "first_head_for_all": changed("6.4", ("token * key_stride + head * key_head_stride", "token * key_stride"),
                                  ("token * value_stride + head * value_head_stride", "token * value_stride")),
    "heads_on_top_of_each_other": rows("page * {0}_page_stride + offset * {0}_slot_stride"),
    "keys_and_values_exchanged": changed(
        "6.4", ("tl.store(key_pages_pointer", "tl.store(other_pool"),
        ("tl.store(value_pages_pointer", "tl.store(key_pages_pointer"),
        ("tl.store(other_pool", "tl.store(value_pages_pointer"),
        (KEY_ROW, "THE_ROW"), (VALUE_ROW, KEY_ROW), ("THE_ROW", VALUE_ROW),
    ),
    "keys_written_twice": changed(
        "6.4",
        ("tl.load(value_pointer + token * value_stride + head * value_head_stride + columns, mask=inside)", "key"),
    ),
    "strides_ignored": rows("((page * tl.num_programs(1) + head) * PAGE_SIZE + offset) * HEAD_DIM"),
    "other_strides": changed("6.4", (VALUE_ROW, KEY_ROW)),
    "values_not_written": changed(
        "6.4", ("    tl.store(value_pages_pointer + value_row + columns, value, mask=inside)\n", "")
    ),
    "padding_written": changed("6.4", (" & (slot >= 0)", "")),
    "padding_written__clamped": changed(
        "6.4", (" & (slot >= 0)", ""),
        ("slot = tl.load(slots_pointer + token)", "slot = tl.maximum(tl.load(slots_pointer + token), 0)"),
    ),
    "columns_not_masked": changed("6.4", ("(columns < HEAD_DIM) & (slot >= 0)", "(columns >= 0) & (slot >= 0)")),
}  # fmt: skip

APPEND_UNUSUAL = {
    "an early return": changed(
        "6.4", ("    page = slot // PAGE_SIZE", "    if slot < 0:\n        return\n    page = slot // PAGE_SIZE"),
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
        "6.4", ("append_kernel[(tokens, heads)](", "append_kernel[(tokens * heads,)](\n        heads,"),
        ("def append_kernel(\n", "def append_kernel(\n    heads,\n"),
        ("token = tl.program_id(0).to(tl.int64)", "token = (tl.program_id(0) // heads).to(tl.int64)"),
        ("head = tl.program_id(1).to(tl.int64)", "head = (tl.program_id(0) % heads).to(tl.int64)"),
    ),
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------------ 6.5

PAGE_LOAD = "page = tl.load(tables_pointer + sequence * table_stride + block).to(tl.int64)"
KEYS = "page * key_page_stride + head * key_head_stride + offsets * key_slot_stride"
VALUES = "page * value_page_stride + head * value_head_stride + offsets * value_slot_stride"
INSIDE = "inside = block * PAGE_SIZE + offsets < length"
MASKED = '        scores = tl.where(inside, scores, float("-inf"))\n'
LOOP = "for block in range(0, tl.cdiv(length, PAGE_SIZE)):"


def tiles(pattern):
    """Keys and values read from other rows."""
    return changed("6.5", (KEYS, pattern.format("key")), (VALUES, pattern.format("value")))


DECODE_WRONG = {
    "last_page_read_whole": changed("6.5", (INSIDE, "inside = offsets < PAGE_SIZE")),
    "last_page_read_whole__offset_compared": changed("6.5", (INSIDE, "inside = offsets < length")),
    "strides_ignored": tiles("((page * tl.num_programs(1) + head) * PAGE_SIZE + offsets) * HEAD_DIM"),
    "strides_ignored__values_by_the_keys": changed("6.5", ("value_pointer + value_rows", "value_pointer + key_rows")),
    "empty_slots_scored": changed("6.5", (MASKED, "")),
    "last_page_dropped": changed("6.5", (LOOP, "for block in range(0, length // PAGE_SIZE):")),
    "table_not_multiplied": tiles("page * {0}_slot_stride + head * {0}_head_stride + offsets * {0}_slot_stride"),
    "heads_of_a_page_forgotten": tiles("(page + head) * {0}_head_stride + offsets * {0}_slot_stride"),
    "pages_consecutive": changed("6.5", (PAGE_LOAD, PAGE_LOAD.replace(" + block", "") + " + block")),
    "table_ignored": changed("6.5", (PAGE_LOAD, "page = tl.zeros([], tl.int64) + block")),
    "first_table_for_all": changed("6.5", (PAGE_LOAD, PAGE_LOAD.replace("sequence * table_stride + ", ""))),
    "stale_length": changed("6.5", ("length = tl.load(lengths_pointer + sequence)",
                                    "length = tl.load(lengths_pointer + sequence) - 1")),
    "stale_length__mask_alone": changed("6.5", (INSIDE, INSIDE + " - 1")),
    "one_token_too_many": changed("6.5", (INSIDE, INSIDE.replace("<", "<="))),
    "one_token_too_many__length": changed("6.5", ("length = tl.load(lengths_pointer + sequence)",
                                                  "length = tl.load(lengths_pointer + sequence) + 1")),
    "read_outside_the_pool__whole_table": changed("6.5", (LOOP, "for block in range(0, table_stride):"),
                                (INSIDE, "inside = offsets < PAGE_SIZE")),
    "offset_forgotten": tiles("page * {0}_page_stride + head * {0}_head_stride + offsets * 0"),
    "first_head_for_all": tiles("page * {0}_page_stride + offsets * {0}_slot_stride"),
    "only_first_page": changed("6.5", (PAGE_LOAD, PAGE_LOAD.replace(" + block", "")),
                               (LOOP, "for block in range(0, tl.minimum(1, tl.cdiv(length, PAGE_SIZE))):")),
    "keys_used_as_values": changed("6.5", ("tl.load(value_pointer + value_rows", "tl.load(key_pointer + key_rows")),
    "empty_sequence_nan": changed("6.5", ("tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum")),
    "scale_missing": changed("6.5", ("query.to(tl.float32) * scale", "query.to(tl.float32)")),
    "scaled_twice": changed("6.5", ("query[None, :] * key, axis=1)", "query[None, :] * key, axis=1) * scale")),
    "last_page_dropped__nothing_read": changed(
        "6.5", (LOOP, "for block in range(0, length // PAGE_SIZE):"),
        ("accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)",
         "tl.where(length > 0, accumulator / running_sum, 0.0)"),
    ),
    "maximum_of_the_page": changed(
        "6.5", ("new_max = tl.maximum(running_max, tl.max(scores, axis=0))",
                "new_max = tl.max(scores, axis=0) + tl.zeros([1], tl.float32)")
    ),
    "memory_behind_the_end_used": changed("6.5", (", mask=inside[:, None], other=0.0", "")),
    "table_read_past_its_end": changed("6.5", (LOOP, "for block in range(0, length // PAGE_SIZE + 1):")),
    "table_read_past_its_end__empty_guarded": changed(
        "6.5", (LOOP, "for block in range(0, length // PAGE_SIZE + 1):"),
        ("accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)",
         "tl.where(length > 0, accumulator / running_sum, 0.0)"),
    ),
    "log2e_missing": changed("6.5", ("tl.exp(", "tl.exp2(")),
    "no_running_max": changed("6.5", ("weights = tl.exp(scores - new_max)", "weights = tl.exp(scores)"),
                              ("rescale = tl.exp(running_max - new_max)", "rescale = 1.0")),
    "maximum_starts_at_zero": changed("6.5", ('running_max = tl.full([1], float("-inf"), tl.float32)',
                                              "running_max = tl.zeros([1], tl.float32)")),
    "maximum_not_updated": changed("6.5", ("        running_max = new_max\n", "")),
    "not_divided": changed("6.5", ("accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)", "accumulator")),
    "accumulator_not_rescaled": changed("6.5", ("accumulator * rescale + tl.sum", "accumulator + tl.sum")),
    "sum_not_rescaled": changed("6.5", ("running_sum * rescale + tl.sum", "running_sum + tl.sum")),
    "nothing_rescaled": changed("6.5", ("rescale = tl.exp(running_max - new_max)", "rescale = 1.0")),
    "read_outside_the_pool": changed("6.5", (LOOP, "for block in range(0, tl.cdiv(length, PAGE_SIZE) + 1):"),
                                     (INSIDE, "inside = offsets < PAGE_SIZE"),
                                     (MASKED, MASKED.replace("inside", "block * PAGE_SIZE + offsets < length"))),
    "too_many_bytes": changed("6.5", ("mask=inside[:, None], other=0.0)\n        scores",
                                      "mask=inside[:, None], other=0.0)\n"
                                      "        key += 0 * tl.load(key_pointer + key_rows[:, None] + columns[None, :], "
                                      "mask=inside[:, None], other=0.0)\n        scores")),
    "no_kernel_launched": """# Exercise 6.5 · Paged decode
def paged_decode(query, key_pages, value_pages, block_tables, lengths):
    output = torch.zeros_like(query)
    for b, length in enumerate(lengths.tolist()):
        if length:
            pages = block_tables[b, : -(-length // key_pages.shape[2])].long()
            keys, values = (
                cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for cache in (key_pages, value_pages)
            )
            scores = (query[b, :, None].float() * keys).sum(-1) / query.shape[2] ** 0.5
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            output[b] = (weights[..., None] * values).sum(1) / weights.sum(-1, keepdim=True)
    return output
""",
}  # fmt: skip

DECODE_UNUSUAL = {
    "token by token": """# Exercise 6.5 · Paged decode
@triton.jit
def one(q, k, v, tables, lengths, o, q0, q1, k0, k1, k2, v0, v1, v2, t0, o0, o1, scale,
        D: tl.constexpr, S: tl.constexpr):
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    query = tl.load(q + b * q0 + h * q1 + d).to(tl.float32)
    n = tl.load(lengths + b)
    top, total, acc = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32), tl.zeros([D], tl.float32)
    for p in range(n):
        page = tl.load(tables + b * t0 + p // S).to(tl.int64)
        s = tl.sum(query * tl.load(k + page * k0 + h * k1 + p % S * k2 + d), axis=0) * scale
        new = tl.maximum(top, s)
        acc = acc * tl.exp(top - new) + tl.exp(s - new) * tl.load(v + page * v0 + h * v1 + p % S * v2 + d)
        total = total * tl.exp(top - new) + tl.exp(s - new)
        top = new
    if n > 0:
        acc = acc / total
    tl.store(o + b * o0 + h * o1 + d, acc.to(o.dtype.element_ty))

def paged_decode(query, key_pages, value_pages, block_tables, lengths):
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    one[query.shape[:2]](query, key_pages, value_pages, block_tables, lengths, out, *query.stride()[:2],
                         *key_pages.stride()[:3], *value_pages.stride()[:3], block_tables.stride(0),
                         *out.stride()[:2], query.shape[2] ** -0.5, D=query.shape[2], S=key_pages.shape[2])
    return out
""",
    "base 2": changed(
        "6.5", ("1 / math.sqrt(head_dim)", "math.log2(math.e) / math.sqrt(head_dim)"), ("tl.exp(", "tl.exp2(")
    ),
    "a tile of 32 tokens over several pages": changed(
        "6.5",
        (LOOP, "lanes = tl.arange(0, 32)\n    for first in range(0, length, 32):"),
        (PAGE_LOAD, "positions = first + lanes"),
        (INSIDE, "inside = positions < length\n        page = tl.load(tables_pointer + sequence * table_stride + "
                 "positions // PAGE_SIZE, mask=inside, other=0).to(tl.int64)\n        offsets = positions % PAGE_SIZE"),
        ("    offsets = tl.arange(0, PAGE_SIZE)  # [PAGE_SIZE]\n", ""),
    ),
    "the next page loaded ahead": changed(
        "6.5",
        (LOOP, "table = tables_pointer + sequence * table_stride\n"
               "    page = tl.load(table, mask=length > 0, other=0).to(tl.int64)\n    " + LOOP),
        (PAGE_LOAD, "following = tl.load(table + block + 1, mask=(block + 1) * PAGE_SIZE < length, other=0)"),
        ("        running_max = new_max\n", "        running_max = new_max\n        page = following.to(tl.int64)\n"),
    ),
    "with tl.dot": changed(
        "6.5",
        ("scores = tl.sum(query[None, :] * key, axis=1)",
         "several = tl.broadcast_to(query[None, :], (16, HEAD_DIM))\n"
         "        scores = tl.max(tl.dot(several, tl.trans(key.to(tl.float32)), input_precision='ieee'), axis=0)"),
    ),
    "divided as it goes": changed(
        "6.5",
        ("accumulator = accumulator * rescale + tl.sum(weights[:, None] * value, axis=0)",
         "before = (running_sum - tl.sum(weights, axis=0)) / running_sum\n"
         "        accumulator = accumulator * before + tl.sum(weights[:, None] / running_sum * value, axis=0)"),
        ("accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)", "accumulator"),
    ),
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------------ 6.6

COPYING = "copying = length % self.page_size > 0 and self.holders[table[-1]] > 1"
REFUSE = "if more + copying > len(self.unused):"
COPY = (
    "            source, table[-1] = table[-1], pages.pop()\n            self.holders[source] -= 1\n"
    "            copies = [(source, table[-1])]\n"
)
KEYS_ANSWER = "return [tuple(tokens[:end]) for end in ends]"
FREE_LOOP = "for page in self.pages_of.pop(sequence):"

SHARING_WRONG = {
    "copy_on_write_forgotten": changed("6.6", (COPYING, "copying = False")),
    "copy_not_returned": changed("6.6", ("            copies = [(source, table[-1])]\n", "")),
    "copied_the_wrong_way": changed("6.6", ("copies = [(source, table[-1])]", "copies = [(table[-1], source)]")),
    "copy_not_in_table": changed(
        "6.6", (COPY, COPY.replace("source, table[-1] = table[-1], pages.pop()", "source, target = table[-1], "
                                   "pages.pop()").replace("(source, table[-1])", "(source, target)"))
    ),
    "copied_without_need": changed("6.6", (COPYING, "copying = length % self.page_size > 0")),
    "full_page_copied": changed("6.6", (COPYING, "copying = bool(table) and self.holders[table[-1]] > 1")),
    "copied_at_fork": changed(
        "6.6",
        ("self.pages_of[child] = list(self.pages_of[parent])",
         "pages = self.pages_of[parent]\n        if len(pages) > len(self.unused):\n            raise MemoryError\n"
         "        self.pages_of[child] = [self.unused.pop() for _ in pages]"),
    ),
    "copied_at_fork__last_page": changed(
        "6.6",
        ("        for page in self.pages_of[child]:\n            self.holders[page] += 1",
         "        for page in self.pages_of[child]:\n            self.holders[page] += 1\n"
         "        if self.unused:\n            self.holders[self.pages_of[child][-1]] -= 1\n"
         "            self.pages_of[child][-1] = self.unused.pop()\n"
         "            self.holders[self.pages_of[child][-1]] = 1"),
    ),
    "old_page_kept": changed("6.6", ("            self.holders[source] -= 1\n", "")),
    "fork_not_counted": changed("6.6", ("self.holders[page] += 1", "pass")),
    "table_shared_not_copied": changed(
        "6.6", ("self.pages_of[child] = list(self.pages_of[parent])", "self.pages_of[child] = self.pages_of[parent]"),
        ("self.pages_of[sequence] = table + pages",
         "table.extend(pages)\n        self.pages_of[sequence] = table"),
    ),
    "freed_while_shared": changed(
        "6.6", ("            self.holders[page] -= 1\n            if self.holders[page] == 0:\n"
                "                self.unused.append(page)",
                "            self.holders[page] = 0\n            self.unused.append(page)")
    ),
    "pages_not_returned": changed("6.6", ("                self.unused.append(page)", "                pass")),
    "double_free": changed(
        "6.6", (FREE_LOOP, "for page in self.pages_of.pop(sequence, []):"),
        ("del self.length_of[sequence]", "self.length_of.pop(sequence, None)"),
    ),
    "double_free__table_kept": changed(
        "6.6", (FREE_LOOP, "for page in self.pages_of[sequence]:"), ("        del self.length_of[sequence]\n", ""),
    ),
    "copy_without_room": changed("6.6", (REFUSE, "if more > len(self.unused):")),
    "half_appended": changed(
        "6.6", (REFUSE, "self.length_of[sequence] = length + count\n        self.pages_of[sequence] = table\n"
                        "        " + REFUSE)
    ),
    "new_page_not_counted": changed(
        "6.6", ("        for page in pages:\n            self.holders[page] = 1\n", "")
    ),
    "new_page_not_counted__the_copy": changed(
        "6.6", ("            copies = [(source, table[-1])]\n",
                "            self.holders[table[-1]] = 0\n            copies = [(source, table[-1])]\n")
    ),
    "attribute_hides_method": changed(
        "6.6", ("self.page_size = page_size", "self.page_size, self.table = page_size, {}")
    ),
    "key_of_two_pages": changed("6.6", ("tuple(tokens[:end])", "tuple(tokens[max(0, end - 2 * page_size):end])")),
    "last_full_page_missed": changed("6.6", ("range(page_size, len(tokens) + 1,", "range(page_size, len(tokens),")),
    "pair_without_list": changed("6.6", ("copies = [(source, table[-1])]", "copies = (source, table[-1])")),
    "digits_run_together": changed("6.6", ("tuple(tokens[:end])", "''.join(map(str, tokens[:end]))")),
    "key_not_hashable": changed("6.6", ("tuple(tokens[:end])", "list(tokens[:end])")),
    "key_of_the_page_alone": changed("6.6", ("tuple(tokens[:end])", "tuple(tokens[end - page_size:end])")),
    "key_by_place": changed("6.6", ("tuple(tokens[:end])", "(end, tuple(tokens[end - page_size:end]))")),
    "partial_page_has_a_key": changed(
        "6.6", ("range(page_size, len(tokens) + 1, page_size)", "range(page_size, len(tokens) + page_size, page_size)")
    ),
    "order_lost": changed("6.6", ("tuple(tokens[:end])", "tuple(sorted(tokens[:end]))")),
    "order_lost__sum": changed("6.6", ("tuple(tokens[:end])", "sum(tokens[:end])")),
}  # fmt: skip

SHARING_UNUSUAL = {
    "holders as sets": """# Exercise 6.6 · Shared pages, copied when written
class SharingAllocator:
    def __init__(self, pages, page_size):
        self.size, self.held, self.tables, self.lengths = page_size, [set() for _ in range(pages)], {}, {}
    def unused(self):
        return [page for page, who in enumerate(self.held) if not who]
    def append(self, sequence, count):
        table = list(self.tables.get(sequence, []))
        start = self.lengths.get(sequence, 0)
        writes_shared = start % self.size != 0 and self.held[table[-1]] != {sequence}
        need = math.ceil((start + count) / self.size) - len(table) + writes_shared
        fresh = self.unused()[:need]
        if len(fresh) < need:
            raise MemoryError
        copies = []
        if writes_shared:
            copies = [(table[-1], fresh[0])]
            self.held[table[-1]].discard(sequence)
            table[-1] = fresh[0]
        table += fresh[writes_shared:]
        for page in table:
            self.held[page].add(sequence)
        self.tables[sequence], self.lengths[sequence] = table, start + count
        return copies
    def fork(self, parent, child):
        self.tables[child], self.lengths[child] = self.tables[parent][:], self.lengths[parent]
        for page in self.tables[child]:
            self.held[page].add(child)
    def free(self, sequence):
        del self.tables[sequence], self.lengths[sequence]
        for who in self.held:
            who.discard(sequence)
    def table(self, sequence):
        return self.tables[sequence]
    def length(self, sequence):
        return self.lengths[sequence]
    def free_pages(self):
        return len(self.unused())

def page_keys(tokens, page_size):
    keys, previous = [], None
    for i in range(len(tokens) // page_size):
        previous = (previous, tuple(tokens[i * page_size:(i + 1) * page_size]))
        keys.append(previous)
    return keys
""",
    "counted when needed": """# Exercise 6.6 · Shared pages, copied when written
class SharingAllocator:
    def __init__(self, pages, page_size):
        self.pages, self.page_size, self.of, self.n = range(pages), page_size, {}, {}
    def holders(self, page):
        return sum(page in table for table in self.of.values())
    def append(self, sequence, count):
        table, n = self.of.get(sequence, ()), self.n.get(sequence, 0)
        old = table[-1:] if n % self.page_size and self.holders(table[-1]) > 1 else ()
        kept = table[:len(table) - len(old)]
        need = -(-(n + count) // self.page_size) - len(kept)
        free = [page for page in self.pages if not self.holders(page)]
        if need > len(free):
            raise MemoryError("full")
        self.of[sequence], self.n[sequence] = (*kept, *free[:need]), n + count
        return [(page, free[0]) for page in old]
    def fork(self, parent, child):
        self.of[child], self.n[child] = self.of[parent], self.n[parent]
    def free(self, sequence):
        self.of.pop(sequence), self.n.pop(sequence)
    def table(self, sequence):
        return list(self.of[sequence])
    def length(self, sequence):
        return self.n[sequence]
    def free_pages(self):
        return sum(not self.holders(page) for page in self.pages)

def page_keys(tokens, page_size):
    import hashlib
    text = [str(token) for token in tokens]
    ends = [page_size * (i + 1) for i in range(len(text) // page_size)]
    return [hashlib.sha256(",".join(text[:end]).encode()).hexdigest() for end in ends]
""",
    "keys as a generator": changed("6.6", ("return [tuple(tokens[:end]) for end in ends]",
                                           "yield from (hash(tuple(tokens[:end])) for end in ends)")),
    "lowest page first": changed("6.6", ("self.unused.pop() for", "self.unused.pop(0) for")),
    "nothing to copy is None": changed("6.6", ("return copies", "return copies or None")),
}  # fmt: skip

WRONG = {
    "6.1": WASTE_WRONG,
    "6.2": ALLOCATOR_WRONG,
    "6.3": SLOTS_WRONG,
    "6.4": APPEND_WRONG,
    "6.5": DECODE_WRONG,
    "6.6": SHARING_WRONG,
}
UNUSUAL = {
    "6.1": WASTE_UNUSUAL,
    "6.2": ALLOCATOR_UNUSUAL,
    "6.3": SLOTS_UNUSUAL,
    "6.4": APPEND_UNUSUAL,
    "6.5": DECODE_UNUSUAL,
    "6.6": SHARING_UNUSUAL,
}
