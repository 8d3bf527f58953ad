"""Wrong answers to exercise 9.6, and unusual right ones."""

from tests.submissions.edits import changed

SPILLS = 'names.count("STL") + names.count("LDL")'


PREDICATE = r"(?:@!?U?P\w+\s+)?"


FLIGHT = "in_flight = min(in_flight, int(wait[1], 16))"


EXP = '"MUFU.EX2" in line and in_flight > 0'


WRONG = {
    "loads_of_spills_forgotten__and_requests_only": changed(
        "9.6",
        ('names.count("STL") + names.count("LDL")', 'names.count("STL")'),
        ('r"USETMAXREG\\S*', 'r"USETMAXREG.TRY_ALLOC\\S*'),
    ),
    "numbers_read_as_decimal__beside_another_functions_mistake": changed(
        "9.6",
        ('[int(count, 16) for count in registers]', '[int(count) for count in registers]'),
        ('min(in_flight, int(wait[1], 16))', '0'),
    ),
    "one_in_flight_is_none": changed(
        "9.6",
        ('in_flight > 0', 'in_flight > 1'),
    ),
    "loads_of_spills_forgotten": changed("9.6", (SPILLS, 'names.count("STL")')),
    "stores_of_spills_forgotten": changed("9.6", (SPILLS, 'names.count("LDL")')),
    "predicated_missed": changed("9.6", (PREDICATE, "")),
    "requests_only": changed("9.6", (r"USETMAXREG\S*", r"USETMAXREG\.TRY_ALLOC\S*")),
    "releases_only": changed("9.6", (r"USETMAXREG\S*", r"USETMAXREG\.DEALLOC\S*")),
    "numbers_left_as_text": changed("9.6", ("[int(count, 16) for count in registers]", "registers")),
    "numbers_read_as_decimal": changed("9.6", (r"(0x[0-9a-f]+)\s*;", r"(\d+)\s*;"), ("int(count, 16)", "int(count)")),
    "numbers_read_as_decimal__the_first_digits": changed(
        "9.6", (r"(0x[0-9a-f]+)\s*;", r"(\d+)x"), ("int(count, 16)", "int(count)")
    ),
    "any_barrier_taken": changed("9.6", (r"WARPGROUP\.DEPBAR\.LE gsb0, ", r"DEPBAR\.LE \S+, ")),
    "waits_for_all": changed("9.6", (FLIGHT, "in_flight = 0")),
    "wait_sets_the_count": changed("9.6", (FLIGHT, "in_flight = int(wait[1], 16)")),
    "waits_ignored": changed("9.6", (FLIGHT, "pass")),
    "open_group_counted": changed("9.6", (' and "gsb0" in line', "")),
    "every_special_function": changed("9.6", ('"MUFU.EX2" in line', '"MUFU" in line')),
    "negated_missed": changed("9.6", (PREDICATE, r"(?:@U?P\w+\s+)?")),
    "registers_once": changed(
        "9.6", ("[int(count, 16) for count in registers]", "list(dict.fromkeys(int(n, 16) for n in registers))")
    ),
    "registers_sorted": changed(
        "9.6", ("[int(count, 16) for count in registers]", "sorted(int(count, 16) for count in registers)")
    ),
    "those_in_the_open_counted": changed("9.6", ("in_flight > 0", "in_flight == 0")),
    "groups_of_the_text_before": changed(
        "9.6",
        ("    in_flight = hidden = 0\n", "    global in_flight\n    hidden = 0\n"),
        ("def hidden_exponentials", "in_flight = 0\n\n\ndef hidden_exponentials"),
    ),
    "long_addresses_missed": changed("9.6", (r"/\*[0-9a-f]+\*/", r"/\*[0-9a-f]{4}\*/")),
    "predicated_missed__exponentials": changed(
        "9.6", ('"MUFU.EX2" in line', r're.search(r"\*/\s+MUFU.EX2", line)')
    ),
    "predicated_missed__products": changed(
        "9.6", ('if "HGMMA" in line and', r'if re.search(r"\*/\s+HGMMA", line) and')
    ),
    "letters_missed": changed("9.6", (r"(0x[0-9a-f]+)\s*;", r"(0x[0-9]+)\s*;")),
    "all_exponentials": changed("9.6", (EXP, '"MUFU.EX2" in line')),
}


LINE_BY_LINE = """# Exercise 9.6 · Reading the machine code
def census(text):
    products, registers, spills = 0, [], 0
    for line in text.split("\\n"):
        if "HGMMA." in line:
            products += 1
        if "USETMAXREG" in line:
            registers.append(int(line.replace(";", "").split()[-1], 0))
        if " STL" in line or " LDL" in line:
            spills += 1
    return products, tuple(registers), spills

def hidden_exponentials(text):
    flying, count = 0, 0
    for line in text.split("\\n"):
        if "gsb0" in line and "DEPBAR" not in line:
            flying += 1
        if "WARPGROUP.DEPBAR" in line:
            allowed = int(line.split("gsb0,")[1].strip(" ;"), 16)
            while flying > allowed:
                flying -= 1
        count += "EX2" in line and bool(flying)
    return count
"""


UNUSUAL = {
        "line by line": LINE_BY_LINE,
        "predicates taken off first": changed("9.6", (PREDICATE, r"(?:@\S+\s+)?")),
        "booleans added": changed("9.6", ("hidden += 1", "hidden += bool(in_flight)")),
    }


PRODUCTS = 'names.count("HGMMA")'


def exponentials(result):
    """The course's `census`, and an answer that counts a word in the text instead of reading it line by line."""
    return changed("9.6").split("def hidden_exponentials")[0] + f"def hidden_exponentials(text):\n    return {result}\n"


WRONG |= {
    "all_exponentials__in_the_text": exponentials('text.count("MUFU.EX2")'),
    "all_exponentials__and_every_special_function": exponentials('text.count("MUFU")'),
    "all_exponentials__beside_a_product": exponentials('text.count("MUFU.EX2") if "HGMMA" in text else 0'),
    "waits_ignored__from_the_first_piece": exponentials('text[text.find("HGMMA"):].count("MUFU.EX2")'),
    "one_stretch_searched": exponentials('text[text.find("HGMMA"):text.rfind("HGMMA")].count("MUFU.EX2")'),
    "one_stretch_searched__to_a_wait": exponentials(
        'text[text.find("gsb0"):text.rfind("gsb0, 0x0")].count("MUFU.EX2")'
    ),
    "widths_missed": changed("9.6", (SPILLS, 'text.count("STL ") + text.count("LDL ")')),
    "waits_counted_too": changed("9.6", (PRODUCTS, 'text.count("gsb0")')),
    "one_width_counted": changed("9.6", (PRODUCTS, 'text.count("HGMMA.64x64x16")')),
}
