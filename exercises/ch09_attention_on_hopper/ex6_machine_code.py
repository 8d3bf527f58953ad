"""Exercise 9.6: what a Hopper kernel became, read from its machine code (SASS)."""

from __future__ import annotations

import re

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.draw import Draw

# An instruction: after its address, perhaps under a predicate such as @!P0, its name with modifiers and its operands.
ADDRESS, PREDICATE, NAME = r"^\s*/\*[0-9a-f]+\*/\s+", r"(?:@!?U?P\w+\s+)?", r"([A-Z][\w.]*)([^;]*?)\s*;"


def instructions(text):
    return re.findall(ADDRESS + PREDICATE + NAME, text, re.MULTILINE)


def census(text):
    found = instructions(text)
    products = sum(name.split(".")[0] == "HGMMA" for name, operands in found)
    registers = [int(operands.split()[-1], 16) for name, operands in found if name.startswith("USETMAXREG")]
    kinds = [name.split(".")[0] for name, operands in found]
    return products, registers, kinds.count("STL") + kinds.count("LDL")


def hidden_exponentials(text):
    in_flight = hidden = 0
    for name, operands in instructions(text):
        if name.startswith("HGMMA"):
            in_flight += "gsb0" in operands
        elif "WARPGROUP.DEPBAR" in name:
            allowed = int(operands.split(",")[-1], 16)
            in_flight = min(in_flight, allowed)
        elif name.startswith("MUFU.EX2"):
            hidden += in_flight > 0
    return hidden


HEXADECIMAL = (
    "The registers are hexadecimal: 0x18 is 24, and neither 0 nor 18. Take all of it, letters too, and read it "
    "by int(text, 16)."
)
SEEN = (
    *edits(
        "Instructions under a predicate, such as @!P1 STL, were not seen. The predicate stands between the address and "
        "the name.",
        predicated_missed=("PREDICATE", "''"),
        predicated_missed__products=("PREDICATE", repr(r"(?:@!?U?P\w+\s+(?!HGMMA))?")),
        predicated_missed__others=("PREDICATE", repr(r"(?:@!?U?P\w+\s+(?=HGMMA))?")),
    ),
    *edits(
        "Instructions under a negated predicate, such as @!P1 STL, were not seen. The exclamation mark may be there "
        "or not.",
        negated_missed=("PREDICATE", repr(r"(?:@U?P\w+\s+)?")),
    ),
    *edits(
        "Lines whose address has five digits were not seen. An address has as many as it needs: match [0-9a-f]+ "
        "between /* and */.",
        long_addresses_missed=("ADDRESS", repr(r"^\s*/\*[0-9a-f]{4}\*/\s+")),
    ),
)
PRODUCT, LAST = 'name.split(".")[0] == "HGMMA"', "operands.split()[-1]"
NUMBER, REGISTERS = f"int({LAST}, 16)", 'name.startswith("USETMAXREG")'
LISTED, SPILLS = f"[{NUMBER} for name, operands in found if {REGISTERS}]", 'kinds.count("STL") + kinds.count("LDL")'
IN_CENSUS = (
    *edits(
        "Only the stores of spilled registers were counted. They are loaded back by LDL.",
        loads_of_spills_forgotten=(SPILLS, 'kinds.count("STL")'),
    ),
    *edits(
        "Only the loads of spilled registers were counted. They are stored by STL.",
        stores_of_spills_forgotten=(SPILLS, 'kinds.count("LDL")'),
    ),
    *SEEN,
    *edits(
        "A number of registers that comes twice was listed once. Two consumers ask for the same number, and each "
        "USETMAXREG counts.",
        registers_once=(", registers,", ", list(dict.fromkeys(registers)),"),
    ),
    *edits(
        "Registers with a letter in their number, such as 0xf0, were not listed. A hexadecimal digit is one of 0-9 and "
        "a-f: match [0-9a-f]+.",
        letters_missed=(REGISTERS, f"{REGISTERS} and not re.search('0x[a-f]', operands)"),
    ),
    *edits(
        "The registers were sorted. They belong in the text's order.", registers_sorted=(LISTED, f"sorted({LISTED})")
    ),
    *edits(
        "Only the requests for registers (TRY_ALLOC) were listed. The producer's DEALLOC gives registers back.",
        requests_only=(REGISTERS, '"TRY_ALLOC" in name'),
    ),
    *edits(
        "Only the registers given back (DEALLOC) were listed. The consumers ask for theirs by TRY_ALLOC.",
        releases_only=(REGISTERS, '"DEALLOC" in name'),
    ),
    *edits(
        "The registers are text, such as '0xf0'. int(text, 16) makes 240 of it.", numbers_left_as_text=(NUMBER, LAST)
    ),
    *edits(
        HEXADECIMAL,
        numbers_read_as_decimal=(NUMBER, f"int({LAST}.split('x')[0])"),
        numbers_read_as_decimal__the_last_digits=(NUMBER, f"int(re.search('[0-9]*$', {LAST})[0] or 0)"),
    ),
    *edits(
        "STL and LDL with something behind a dot, such as STL.64, were not counted. Compare what stands before "
        "the first dot.",
        widths_missed=('[name.split(".")[0] for', "[name for"),
    ),
    *edits(
        "Only the HGMMA instructions with gsb0 were counted. Each HGMMA counts here, those that leave their "
        "group open too.",
        groups_counted=(PRODUCT, f"{PRODUCT} and 'gsb0' in operands"),
    ),
    *edits(
        "Every gsb0 was counted as a product. Waits name gsb0 too, and most HGMMA instructions don't: count the "
        "instructions whose name is HGMMA.",
        alone=True,
        waits_counted_too=(PRODUCT, "'gsb0' in operands"),
    ),
    *edits(
        "Only the HGMMA instructions of one shape were counted, such as HGMMA.64x64x16. What stands behind the "
        "first dot differs from kernel to kernel: compare what stands before it.",
        alone=True,
        **{
            f"one_width_counted__{width}": (PRODUCT, f"name.startswith('HGMMA.64x{width}x')")
            for width in (64, 128, 256)
        },
    ),
)

LEFT, COUNTED = "min(in_flight, allowed)", "in_flight > 0"
STRETCHES = {  # of a text, that are searched; where there is no such thing, `find` gives -1, as it does in an answer
    "to_the_last_product": '"HGMMA") : text.rfind("HGMMA")',
    "to_the_last_group": '"gsb0") : text.rfind("HGMMA")',
    "to_the_last_wait": '"HGMMA") : text.rfind("WARPGROUP.DEPBAR")',
    "to_the_last_wait_for_all": '"gsb0") : text.rfind("gsb0, 0x0")',
}
IN_HIDDEN = (
    *SEEN,
    *edits(
        "The exponentials with no product in flight were counted. Hidden are the others, behind products that run.",
        those_in_the_open_counted=(COUNTED, f"not {COUNTED}"),
    ),
    *edits(
        "All exponentials were counted, whether a product was in flight or not.",
        all_exponentials=(COUNTED, "True"),
        all_exponentials__beside_a_product=(COUNTED, '"HGMMA" in text'),
    ),
    *edits(
        "One stretch of the text was searched for exponentials, from the first product to one product or wait. "
        "Groups start and are waited for many times in a text: follow their number line by line.",
        alone=True,
        **{
            f"one_stretch_searched__{name}": ("return hidden", f'return text[text.find({stretch}].count("MUFU.EX2")')
            for name, stretch in STRETCHES.items()
        },
    ),
    *edits(
        "DEPBAR.LE SB0 was taken for a wait for products. It waits for loads and the like; products are waited "
        "for by WARPGROUP.DEPBAR.LE gsb0.",
        any_barrier_taken=('"WARPGROUP.DEPBAR"', '"DEPBAR"'),
    ),
    *edits(
        "Each wait was taken for a wait for all products. Its last operand says how many groups may still run: "
        "after 0x1 one product goes on.",
        waits_for_all=(LEFT, "0"),
    ),
    *edits(
        "After a wait with N, N products were taken to be in flight. It waits until at most N are, and there may "
        "have been fewer, even none: min(in_flight, N).",
        wait_sets_the_count=(LEFT, "allowed"),
    ),
    *edits(
        "An HGMMA without gsb0 was counted as a group in flight. Several make one product; the one that has gsb0 "
        "among its operands closes the group, and a wait knows only closed ones.",
        open_group_counted=('"gsb0" in operands', "1"),
    ),
    *edits(
        "You counted every exponential after the first product. But after WARPGROUP.DEPBAR.LE gsb0, 0x0 no product "
        "runs any more.",
        waits_ignored=(LEFT, "in_flight"),
        waits_ignored__from_the_first_piece=("return hidden", "return text[text.find('HGMMA') :].count('MUFU.EX2')"),
    ),
    *edits(
        "Reciprocals (MUFU.RCP) and logarithms (MUFU.LG2) were counted too. An exponential is MUFU.EX2.",
        every_special_function=('"MUFU.EX2"', '"MUFU"'),
    ),
    *edits(
        "After each wait one group less was taken to be in flight. Its last operand says how many may still "
        "run: min(in_flight, N).",
        wait_ends_one_group=(LEFT, "max(0, in_flight - 1)"),
        wait_ends_one_group__below_none=(LEFT, "in_flight - 1"),
    ),
    *edits(
        "A wait with N was taken to end N groups. It waits until at most N are left: min(in_flight, N).",
        wait_ends_so_many=(LEFT, "max(0, in_flight - allowed)"),
        wait_ends_so_many__below_none=(LEFT, "in_flight - allowed"),
    ),
    *edits(
        "After a wait the larger of the two numbers was taken. It leaves at most N groups in flight: "
        "min(in_flight, N).",
        larger_of_the_two=(LEFT, "max(in_flight, allowed)"),
    ),
    *edits(
        "An exponential was counted only where two groups or more were in flight. One is enough.",
        one_in_flight_is_none=(COUNTED, "in_flight > 1"),
    ),
)
CENSUS = model_of(census, IN_CENSUS, (instructions,))
HIDDEN = model_of(hidden_exponentials, IN_HIDDEN, (instructions,), entry="hidden_exponentials")


# Not the meanings themselves: many of their small changes count alike.
def census_oracle(text):
    return CENSUS.right(text)


def hidden_oracle(text):
    return HIDDEN.right(text)


class Listing:
    """Machine code as the disassembler prints it, instruction by instruction."""

    def __init__(self, draw, address=0x40):
        self.draw, self.lines, self.address, self.labels = draw, [], address, 0
        self.columns = draw.choice((64, 128, 256))

    def add(self, *texts):
        for text in texts:
            predicate, text = text.split(" ", 1) if text.startswith("@") else ("", text)
            self.lines.append(f"        /*{self.address:04x}*/ {predicate:>18} {text} ;")
            self.address += 16

    def label(self):
        self.labels += 1
        self.lines.append(f".L_x_{self.labels}:")

    def product(self, pieces, left="gdesc[UR8]"):
        """One product of `pieces` instructions; the last one closes the group that a wait can name."""
        for piece in range(pieces):
            tail = ", gsb0" if piece == pieces - 1 else ""
            self.add(f"HGMMA.64x{self.columns}x16.F32.BF16 R24, {left}, R24{tail}")

    def softmax(self, exponentials):
        for number in range(exponentials):
            register = 24 + number % 64
            self.add(f"FFMA R{register}, R{register}, UR4, -R3", f"MUFU.EX2 R{register}, R{register}")
            if number % 8 == 5:
                self.add(f"@!P2 FMUL R{register}, R{register}, R{register}")

    def noise(self):
        self.add(
            *(
                self.draw.choice(
                    (
                        "IMAD.MOV.U32 R9, RZ, RZ, R11",
                        "UIADD3 UR4, UR4, 0x1, URZ",
                        "MUFU.RCP R7, R7",
                        "SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR11+0x30140], R12",
                        "UTMALDG.4D [UR8], [UR16]",
                        "MUFU.LG2 R6, R6",
                    )
                )
                for _ in range(3)
            )
        )

    def text(self):
        return ".text.attention_kernel:\n" + "\n".join(self.lines) + "\n"


def listings(draw):
    """(what is special, the text) of small kernels: each a loop of two products and a softmax, in other orders."""
    pieces, exponentials = draw.integer(3, 9), draw.integer(9, 30)

    def kernel(order, spills=(), registers=(), draw=draw, address=0x40):
        listing = Listing(draw, address)
        listing.noise()
        for name, count in registers:
            listing.add(f"USETMAXREG.{name}.CTAPOOL {'UP0, ' if name == 'TRY_ALLOC' else ''}{count:#x}")
        listing.label()
        for part in order:
            if part == "scores":
                listing.product(pieces)
            elif part == "output":
                listing.product(pieces, left="R152, gdesc[UR16].tnspB")
            elif part == "softmax":
                listing.softmax(exponentials)
                if spills:
                    listing.add(*spills)
            elif part == "open":  # a piece of a product whose group nothing has closed yet
                listing.add(f"HGMMA.64x{listing.columns}x16.F32.BF16 R24, gdesc[UR8], R24")
            elif part == "guarded":  # a product and exponentials, each under a condition
                listing.add(f"@P0 HGMMA.64x{listing.columns}x16.F32.BF16 R24, gdesc[UR8], R24, gsb0")
                listing.add("MUFU.EX2 R31, R31", "@P2 MUFU.EX2 R32, R32", "@!P2 MUFU.EX2 R33, R33")
            elif part == "other":
                listing.add("DEPBAR.LE SB0, 0x0")
            else:
                listing.add(f"WARPGROUP.DEPBAR.LE gsb0, {part:#x}")
            listing.noise()
        listing.add("@P0 BRA `(.L_x_1)", "EXIT")
        return listing.text()

    alike = Draw(96)  # the same at every check
    shares = [("DEALLOC", 24), ("TRY_ALLOC", 240)]
    two_consumers = [*shares, ("TRY_ALLOC", 240)]
    spills = [
        "STL [R1+0x8], R20",
        "@!P1 STL.64 [R1+0x10], R22",
        "@P0 STL [R1+0x18], R5",
        "STL.128 [R1+0x20], R8",
        "LDL.LU R20, [R1+0x8]",
        "@!P0 LDL R5, [R1+0x18]",
        "LDL.128 R8, [R1+0x20]",
        "LDL.64 R22, [R1+0x10]",
        "LDL.64 R12, [R1+0x30]",
    ]
    in_turn = ["scores", 0, "softmax", "output", 0]
    overlapped = ["scores", "output", 1, "softmax", 0]
    return [
        ("a product that nothing waits for", kernel(["softmax", "scores"])),
        ("nothing but a softmax", kernel(["softmax"])),
        ("in turn", kernel(in_turn)),
        ("the output's product under the softmax", kernel(overlapped, registers=shares)),
        (
            "a wait that was moved before the softmax",
            kernel(["scores", "output", 1, 0, "softmax"], registers=two_consumers),
        ),
        ("a wait for something else before the softmax", kernel(["scores", "output", 1, "other", "softmax", 0])),
        ("registers spilled", kernel(in_turn, spills=spills, registers=shares)),
        ("one product, and no wait before the softmax", kernel(["scores", "softmax", 0])),
        ("one product, and a wait that lets one run", kernel(["scores", 1, "softmax", 0])),
        ("a wait that lets one run, before any product", kernel([1, "softmax", "scores", 0, "softmax", "softmax"])),
        ("a group that is not closed yet", kernel(["open", "softmax", "scores", 0, "softmax", "softmax"])),
        (
            "two softmaxes",
            kernel(
                ["softmax", *overlapped, "other", "softmax", "scores", 0],
                spills=spills[:1],
                registers=[("DEALLOC", 32), ("TRY_ALLOC", 160), ("DEALLOC", 96)],
            ),
        ),
        (
            "a product and exponentials under a condition",
            kernel(
                ["guarded", 0, *in_turn],
                registers=[("DEALLOC", 40), ("TRY_ALLOC", 152), ("TRY_ALLOC", 240)],
                draw=alike,
            ),
        ),
        (
            "a long kernel, whose addresses have five digits",
            kernel(overlapped, spills=spills[:2], registers=shares, draw=alike, address=0xFF00),
        ),
    ]


def reading_cases(draw):
    texts = listings(draw)
    return [Case(f"{name}", (text,), entry) for entry in ("census", "hidden_exponentials") for name, text in texts]


EXERCISE = Exercise(
    id="9.6",
    title="Reading the machine code",
    entries=("census", "hidden_exponentials"),
    cases=reading_cases,
    models=(CENSUS, HIDDEN),
    oracle={"census": census_oracle, "hidden_exponentials": hidden_oracle},
    hints=(
        "Go line by line. After the address there may be a predicate such as @!P0. Then come the instruction's name "
        "and its operands, up to the semicolon. A regular expression finds both.",
        "census: count HGMMA by name, and STL and LDL with whatever follows after a dot. The hexadecimal number at the "
        "end of each USETMAXREG line is int(text, 16).",
        "hidden_exponentials: keep the number of groups in flight. An HGMMA line that ends in gsb0 closes a group: "
        "one more. WARPGROUP.DEPBAR.LE gsb0, 0x1 waits until at most one is left: min(in_flight, 1).",
        "DEPBAR.LE SB0 without WARPGROUP waits for something else. A MUFU.EX2 counts when in_flight > 0 at its line.",
    ),
    mistakes=(
        Mistake(
            "groups_of_the_text_before",
            "A text without products has hidden exponentials: the groups in flight at the end of the text before were "
            "taken over. Each call begins with none.",
            when=lambda case, seen, got: isinstance(got, int) and got > 0 and "HGMMA" not in case.args[0],
            every=True,
        ),
        Mistake(
            "numbers_read_as_decimal",
            HEXADECIMAL,
            when=lambda case, seen, got: bool(seen.error) and "with base 10: '0x" in seen.error.text,
        ),
    ),
)
