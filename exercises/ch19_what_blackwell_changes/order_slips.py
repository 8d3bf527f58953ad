"""What exercise 19.6 asks for: a makespan, the heads that fit in the L2 cache, the order of tiles; with the slips."""

import heapq

import torch

from course_lib.checker.specification.edits import edits


def in_float32(number):
    return int(torch.tensor(number, dtype=torch.float32))


def ends_at(works, slots):
    free = [0] * slots
    for work in works:
        heapq.heapreplace(free, free[0] + work)
    return max(free)


def heads_in(l2_bytes, tokens, head_dim, group):
    key_head = 2 * tokens * head_dim * 2
    heads = l2_bytes // key_head * group
    power = 1
    while 2 * power <= heads:
        power = 2 * power
    return power


def tile_of(number, heads, tiles, section):
    of_a_section = section * tiles
    which = number // of_a_section
    place = number % of_a_section
    first = which * section
    width = min(section, heads - first)
    head, row = first + place % width, tiles - 1 - place // width
    return head, row


WORKS, NEXT, END = "work in works", "heapq.heapreplace(free, free[0] + work)", "return max(free)"
TIME = (
    *edits("The programs were sorted first. They start in the order of the list.",
        sorted_first=(WORKS, "work in sorted(works)"),
        sorted_first__longest=(WORKS, "work in sorted(works, reverse=True)")),
    *edits("The programs were dealt out to the slots in advance. The next one goes to the slot that is free first.",
        dealt_in_advance=(END, "return max(sum(works[slot::slots]) for slot in range(slots))")),
    *edits("The work was shared evenly. A program runs on one slot from beginning to end, so some slots end later.",
        shared_evenly=(END, "return -(-sum(works) // slots)"), shared_evenly__exact=(END, "return sum(works) / slots"),
        shared_evenly__or_longest=(END, "return max([-(-sum(works) // slots), *works])")),
    *edits("The programs ran in rounds that wait for their longest one. A slot takes the next program as soon as it is "
        "free.", in_rounds=(END, "return sum(max(works[at : at + slots]) for at in range(0, len(works), slots))")),
    *edits("The end of the last program or of one slot was returned. A heap's largest number need not be its last.",
        another_end=(NEXT, f"last = free[0] + work\n{NEXT}", "free = ", "last = 0\nfree = ", END, "return last"),
        another_end__first=(END, "return min(free)"), another_end__heap=(END, "return free[-1]"),
        another_end__pushed=(NEXT, "heapq.heappush(free, heapq.heappop(free) + work)", END, "return free[-1]")),
    *edits("The times were added in float32, which is what torch.zeros has. It rounds whole numbers beyond 2^24.",
        in_float32=(NEXT, "heapq.heapreplace(free, in_float32(free[0] + in_float32(work)))")),
)  # fmt: skip

BYTES, FIT, POWER = "2 * tokens * head_dim * 2", "l2_bytes // key_head * group", "return power"
HEADS = (
    *edits("Half of the bytes were counted. A key head has keys and values, and each of their numbers has 2 bytes.",
        half_of_the_bytes=(BYTES, "tokens * head_dim * 2")),
    *edits("Too many bytes were counted. A key head has 2 · tokens · head_dim numbers of 2 bytes each.",
        too_many_bytes=(BYTES, "2 * tokens * head_dim * 4"),
        too_many_bytes__queries=(BYTES, "3 * tokens * head_dim * 2")),
    *edits("The group is missing or on the wrong side. Query heads that share keys and values need them once, so each "
        "key head that fits serves `group` query heads.", group_divided=(FIT, "l2_bytes // (key_head * group)"),
        group_divided__after=(FIT, "l2_bytes // key_head // group"), group_ignored=(FIT, "l2_bytes // key_head")),
    *edits("A part of a key head was counted, with as large a part of its query heads. Count whole key heads first, "
        "then multiply by group.", part_of_a_key_head=(FIT, "l2_bytes * group // key_head"),
        part_of_a_key_head__up=(FIT, "-(-l2_bytes // key_head) * group")),
    *edits("Key heads that fill the cache to its last byte were refused. They fit.",
        full_refused=(FIT, "(l2_bytes - 1) // key_head * group")),
    *edits("The result is not a power of two. Take the largest one that is not more than the heads that fit.",
        not_a_power_of_two=(POWER, "return max(1, heads)")),
    *edits("The power of two was taken of the key heads, before the group. It is that of the query heads.",
        power_before_the_group=("key_head * group", "key_head", POWER, "return power * group if heads else 1"),
        power_before_the_group__always=("key_head * group", "key_head", POWER, "return power * group"),
        power_before_the_group__twice=("key_head * group", "key_head", POWER,
            "return 1 << (power * group if heads else 1).bit_length() - 1")),
    *edits("The power of two was rounded up. Then not all of these heads fit: round down.",
        rounded_up=("2 * power <= heads", "power < heads"),
        rounded_up__nearest=("2 * power <= heads", "2 * power * power <= heads * heads")),
    *edits("Heads a little below a large power of two count as that power: float32 rounds their number or logarithm.",
        logarithm_rounded=(POWER, "return 2 ** int(torch.log2(torch.tensor(float(max(1, heads)))))")),
    *edits("Where not even one key head fits, the number of heads is 1.",
        none_where_nothing_fits=(POWER, "return power if heads else 0"),
        none_where_nothing_fits__group=(POWER, "return power if heads else 1 << group.bit_length() - 1")),
)  # fmt: skip

WIDTH, FIRST = "min(section, heads - first)", "which * section"
HEAD, ROW, PLACE = "first + place % width", "tiles - 1 - place // width", "number % of_a_section"
ORDER = (
    *edits("The last section was taken to have as many heads as the others, so heads come out that do not exist. It "
        "has the smaller one of section and the heads that are left.",
        last_section_too_wide=(WIDTH, "section"), last_section_too_wide__but_the_only=(WIDTH, "min(section, heads)")),
    *edits("The rows go from the first to the last. The last row has the most keys to read, so it comes first.",
        shortest_first=(ROW, "place // width")),
    *edits("Head and row are exchanged. Return the head first.", exchanged=("return head, row", "return row, head")),
    *edits("The rows of one head come after each other, and then those of the next head. In a section the last rows of "
        "all its heads come first, and then the rows before them.",
        head_by_head=(HEAD, "first + place // tiles", ROW, "tiles - 1 - place % tiles"),
        head_by_head__rows_up=(HEAD, "first + place // tiles", ROW, "place % tiles")),
    *edits("The section is ignored: all heads take turns. Only those of one section do.",
        section_ignored=(HEAD, "number % heads", ROW, "tiles - 1 - number // heads")),
    *edits("A section begins at the wrong head. Section n begins at head n · section.",
        section_number_as_head=(FIRST, "which"), section_number_as_head__only=(HEAD, "which + place % width"),
        all_sections_at_head_0=(HEAD, "place % width")),
    *edits("The place was not counted from the section's beginning. The sections before it have first · tiles tiles.",
        place_not_reduced=(PLACE, "number"), place_not_reduced__row=("place // width", "number // width")),
)  # fmt: skip
