"""Wrong answers to exercise 19.6, and unusual right ones."""

from tests.submissions.edits import changed

LOOP = "for work in works:\n        heapq.heapreplace(free, free[0] + work)"
BEGIN, END = "free = [0] * slots  # when", "return max(free)"
FIT, POWER = "l2_bytes // (2 * tokens * head_dim * 2) * group", "1 << (max(1, heads).bit_length() - 1)"
FIRST, WIDTH, PLACE = "number // (section * tiles) * section", "min(section, heads - first)", "number - first * tiles"
RESULT = "return first + place % width, tiles - 1 - place // width"


def wrong(*replacements):
    return changed("19.6", *replacements)


WRONG = {
    "sorted_first": wrong(("for work in works", "for work in sorted(works, reverse=True)")),
    "sorted_first__short": wrong(("for work in works", "for work in sorted(works)")),
    # Dao-AILab/flash-attention#2754: tiles dealt out in advance.
    "dealt_in_advance": wrong((LOOP, "for number, work in enumerate(works):\n        free[number % slots] += work")),
    "shared_evenly": wrong((END, "return math.ceil(sum(works) / slots)")),
    "shared_evenly__or_longest": wrong((END, "return max(math.ceil(sum(works) / slots), max(works, default=0))")),
    "in_rounds": wrong((END, "return sum(max(works[i : i + slots]) for i in range(0, len(works), slots))")),
    "another_end": wrong((LOOP, "end = 0\n    for work in works:\n        end = heapq.heappop(free) + work\n"
                         "        heapq.heappush(free, end)"), (END, "return end")),
    "another_end__first": wrong((END, "return free[0]")),
    "another_end__heap": wrong((LOOP, "for work in works:\n        heapq.heappush(free, heapq.heappop(free) + work)"),
                               (END, "return free[-1]")),
    "full_refused": wrong((FIT, f"(l2_bytes - 1){FIT.removeprefix('l2_bytes')}")),
    "logarithm_rounded": wrong((POWER, "2 ** int(torch.log2(torch.tensor(float(max(1, heads)))))")),
    "fails_without_programs": wrong((BEGIN, "assert max(works)\n    " + BEGIN)),
    "half_of_the_bytes": wrong((FIT, "l2_bytes // (tokens * head_dim * 2) * group")),
    "too_many_bytes": wrong((FIT, "l2_bytes // (2 * tokens * head_dim * 4) * group")),
    "half_of_the_bytes__no_bytes": wrong((FIT, "l2_bytes // (2 * tokens * head_dim) * group")),
    "too_many_bytes__queries": wrong((FIT, "l2_bytes // (3 * tokens * head_dim * 2) * group")),
    "group_divided": wrong((FIT, "l2_bytes // (2 * tokens * head_dim * 2 * group)")),
    "group_ignored": wrong((" * group", "")),
    "part_of_a_key_head": wrong((FIT, "l2_bytes * group // (2 * tokens * head_dim * 2)")),
    "part_of_a_key_head__float": wrong((FIT, "int(l2_bytes / (2 * tokens * head_dim * 2) * group)")),
    "not_a_power_of_two": wrong((POWER, "max(1, heads)")),
    "power_before_the_group": wrong((" * group", ""), (POWER, f"({POWER}) * group if heads else 1")),
    "power_before_the_group__always": wrong((" * group", ""), (POWER, f"({POWER}) * group")),
    "rounded_up": wrong((POWER, "1 << (max(1, heads) - 1).bit_length()")),
    "rounded_up__nearest": wrong((POWER, "2 ** round(math.log2(max(1, heads)))")),
    "none_where_nothing_fits": wrong((POWER, "1 << (heads.bit_length() - 1) if heads else 0")),
    "fails_where_nothing_fits": wrong((POWER, "2 ** int(math.log2(heads))")),
    "last_section_too_wide": wrong((WIDTH, "section")),
    "shortest_first": wrong(("tiles - 1 - place // width", "place // width")),
    "exchanged": wrong((RESULT, "return tiles - 1 - place // width, first + place % width")),
    "head_by_head": wrong((RESULT, "return number // tiles, tiles - 1 - number % tiles")),
    "head_by_head__as_a_grid": wrong((RESULT, "return number // tiles, number % tiles")),
    "section_ignored": wrong((RESULT, "return number % heads, tiles - 1 - number // heads")),
    "section_number_as_head": wrong((FIRST, "number // (section * tiles)"), (PLACE, "number % (section * tiles)")),
    "all_sections_at_head_0": wrong(("first + place % width", "place % width")),
    "place_not_reduced": wrong((PLACE, "number")),
    "place_not_reduced__row": wrong(("place // width", "number // width")),
    "one_by_one": wrong((FIRST, "0\n    while number >= (first + section) * tiles:\n        first += section")),
}  # fmt: skip
UNUSUAL = {
    "a plain list of times, a logarithm and divmod": """# Exercise 19.6 · The longest first
def makespan(works, slots):
    free = torch.zeros(min(slots, max(1, len(works))), dtype=torch.int64)
    for work in works:
        free[free.argmin()] += work
    return int(free.max())


def heads_at_once(l2_bytes, tokens, head_dim, group):
    fitting = l2_bytes // (4 * tokens * head_dim)
    return 2 ** math.floor(math.log2(fitting * group)) if fitting else 1


def tile_at(number, heads, tiles, section):
    which, place = divmod(number, section * tiles)
    row, head = divmod(place, min(section, heads - which * section))
    return [which * section + head, tiles - 1 - row]
""",
    "a heap of running programs and whole sections apart": """# Exercise 19.6 · The longest first
from heapq import heappush, heappop


def makespan(works, slots):
    running, now, end = [], 0, 0
    for work in works:
        if len(running) == slots:
            now = heappop(running)
        heappush(running, now + work)
        end = max(end, now + work)
    return end


def heads_at_once(l2_bytes, tokens, head_dim, group):
    heads = 1
    while -(-2 * heads // group) * tokens * head_dim * 4 <= l2_bytes:
        heads *= 2
    return heads


def tile_at(number, heads, tiles, section):
    whole = heads // section * section * tiles
    if number < whole:
        inside = number % (section * tiles)
        return number // (section * tiles) * section + inside % section, tiles - 1 - inside // section
    left = heads % section
    number -= whole
    return heads - left + number % left, tiles - 1 - number // left
""",
    "the section's end first": """# Exercise 19.6 · The longest first
import heapq


def makespan(works, slots):
    ends = [0]
    heap = [(0, slot) for slot in range(slots)]
    for work in works:
        begin, slot = heapq.heappop(heap)
        heapq.heappush(heap, (begin + work, slot))
        ends.append(begin + work)
    return max(ends)


def heads_at_once(l2_bytes, tokens, head_dim, group):
    key_heads = l2_bytes // (tokens * head_dim) // 4
    return int('1' + '0' * (len(bin(key_heads * group)) - 3), 2) if key_heads > 0 else 1


def tile_at(number, heads, tiles, section):
    section = min(section, heads)
    end = min(heads, (number // (section * tiles) + 1) * section)
    wide = end - (end - 1) // section * section
    begin = end - wide
    return range(begin, end)[(number - begin * tiles) % wide], range(tiles)[::-1][(number - begin * tiles) // wide]
""",
}  # fmt: skip
