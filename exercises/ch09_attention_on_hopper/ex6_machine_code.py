"""Exercise 9.6: what a Hopper kernel became, read from its machine code (SASS)."""

from __future__ import annotations

import re

from course_lib.checker import Case, Exercise, Mistake
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.model import Model, Slip, Slips

# An instruction: after its address, perhaps under a predicate such as @!P0.
INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_.]*)(?P<operands>[^;]*);",
    re.MULTILINE,
)


def instructions(s: Slips, text):
    """(name with its modifiers, operands) of each instruction that is seen with these slips."""
    without = "@" if s("predicated_missed") else "@!" if s("negated_missed") else None
    for found in INSTRUCTION.finditer(text):
        predicate, name = found["predicate"] or "", found["name"]
        missed = without and predicate.startswith(without)
        missed = missed or predicate and s(f"predicated_missed__{'products' if 'HGMMA' in name else 'others'}")
        if not missed and not (s("long_addresses_missed") and len(found["address"]) > 4):
            yield name, found["operands"].strip()


def counted(s: Slips, text):
    """What `census` gives with these slips."""
    found = list(instructions(s, text))
    products = sum(name.split(".")[0] == "HGMMA" for name, _ in found)
    if s("groups_counted"):
        products = sum(name.split(".")[0] == "HGMMA" and "gsb0" in operands for name, operands in found)
    if s("waits_counted_too"):
        products = sum("gsb0" in operands for _, operands in found)
    for width in WIDTHS:
        if s(f"one_width_counted__{width}"):
            products = sum((name + operands).startswith(f"HGMMA.64x{width}x") for name, operands in found)
    number = next((read for slip, read in READ_WRONGLY.items() if s(slip)), lambda text: int(text, 16))
    changes = [change for change, slip in CHANGES.items() if not s(slip)]
    registers = [
        number(operands.split()[-1])
        for name, operands in found
        if name.startswith("USETMAXREG") and any(change in name for change in changes)
        if not (s("letters_missed") and re.search("0x[a-f]", operands))
    ]
    if s("registers_once"):
        registers = list(dict.fromkeys(registers))
    if s("registers_sorted"):
        registers = sorted(registers)
    spills = [kind for kind, slip in SPILLS.items() if not s(slip)]
    names = [name if s("widths_missed") else name.split(".")[0] for name, _ in found]
    return products, registers, sum(name in spills for name in names)


WIDTHS = (64, 128, 256)  # columns of a product
SPILLS = {"STL": "stores_of_spills_forgotten", "LDL": "loads_of_spills_forgotten"}
CHANGES = {"DEALLOC": "requests_only", "TRY_ALLOC": "releases_only"}
READ_WRONGLY = {
    "numbers_left_as_text": lambda text: text,
    "numbers_read_as_decimal": lambda text: int(re.match(r"\d+", text)[0]),
    "numbers_read_as_decimal__the_last_digits": lambda text: int((re.findall(r"\d+$", text) or [0])[0]),
}


def hidden(s: Slips, text):
    """What `hidden_exponentials` gives with these slips."""
    stretch = next((stretch for name, stretch in STRETCHES.items() if s(f"one_stretch_searched__{name}")), None)
    if stretch:
        return stretch(text).count("MUFU.EX2")
    if s("all_exponentials__beside_a_product") and "HGMMA" in text:
        return text.count("MUFU.EX2")
    if s("waits_ignored__from_the_first_piece"):
        return text[text.find("HGMMA") :].count("MUFU.EX2")
    waits = "DEPBAR" if s("any_barrier_taken") else "WARPGROUP.DEPBAR"
    in_flight = hidden = exponentials = 0
    for name, operands in instructions(s, text):
        if name.split(".")[0] == "HGMMA":
            in_flight += "gsb0" in operands or s("open_group_counted")
        elif waits in name:
            in_flight = _after_a_wait(s, in_flight, int(operands.split(",")[-1], 16))
        elif name.startswith("MUFU" if s("every_special_function") else "MUFU.EX2"):
            exponentials += 1
            hidden += in_flight > (1 if s("one_in_flight_is_none") else 0) or s("all_exponentials")
    return exponentials - hidden if s("those_in_the_open_counted") else hidden


# What of a text is searched; where there is no such thing, `find` gives -1, as it does in an answer.
STRETCHES = {
    "to_the_last_product": lambda text: text[text.find("HGMMA") : text.rfind("HGMMA")],
    "to_the_last_group": lambda text: text[text.find("gsb0") : text.rfind("HGMMA")],
    "to_the_last_wait": lambda text: text[text.find("HGMMA") : text.rfind("WARPGROUP.DEPBAR")],
    "to_the_last_wait_for_all": lambda text: text[text.find("gsb0") : text.rfind("gsb0, 0x0")],
}


def _after_a_wait(s: Slips, in_flight, allowed):
    """How many groups are taken to be in flight after a wait until at most `allowed` are."""
    if s("waits_for_all"):
        return 0
    if s("wait_sets_the_count"):
        return allowed
    if s("waits_ignored"):
        return in_flight
    if s("wait_ends_one_group", "wait_ends_one_group__below_none"):
        return in_flight - 1 if s("wait_ends_one_group__below_none") else max(0, in_flight - 1)
    if s("wait_ends_so_many", "wait_ends_so_many__below_none"):
        return in_flight - allowed if s("wait_ends_so_many__below_none") else max(0, in_flight - allowed)
    return max(in_flight, allowed) if s("larger_of_the_two") else min(in_flight, allowed)


def census_oracle(text):
    return counted(Slips(), text)


def hidden_oracle(text):
    return hidden(Slips(), text)


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


HEXADECIMAL = (
    "The registers are hexadecimal: 0x18 is 24, and neither 0 nor 18. Take all of it, letters too, and read it "
    "by int(text, 16)."
)
PREDICATED = (
    "Instructions under a predicate, such as @!P1 STL, were not seen. The predicate stands between the address and the "
    "name."
)
SEEN = (
    Slip("predicated_missed", PREDICATED),
    Slip("predicated_missed__products", PREDICATED),
    Slip("predicated_missed__others", PREDICATED),
    Slip(
        "negated_missed",
        "Instructions under a negated predicate, such as @!P1 STL, were not seen. The exclamation mark may be there "
        "or not.",
    ),
    Slip(
        "long_addresses_missed",
        "Lines whose address has five digits were not seen. An address has as many as it needs: match [0-9a-f]+ "
        "between /* and */.",
    ),
)
CENSUS = (
    Slip(
        "loads_of_spills_forgotten", "Only the stores of spilled registers were counted. They are loaded back by LDL."
    ),
    Slip("stores_of_spills_forgotten", "Only the loads of spilled registers were counted. They are stored by STL."),
    *SEEN,
    Slip(
        "registers_once",
        "A number of registers that comes twice was listed once. Two consumers ask for the same number, and each "
        "USETMAXREG counts.",
    ),
    Slip(
        "letters_missed",
        "Registers with a letter in their number, such as 0xf0, were not listed. A hexadecimal digit is one of 0-9 and "
        "a-f: match [0-9a-f]+.",
    ),
    Slip("registers_sorted", "The registers were sorted. They belong in the text's order."),
    Slip(
        "requests_only",
        "Only the requests for registers (TRY_ALLOC) were listed. The producer's DEALLOC gives registers back.",
    ),
    Slip(
        "releases_only",
        "Only the registers given back (DEALLOC) were listed. The consumers ask for theirs by TRY_ALLOC.",
    ),
    Slip("numbers_left_as_text", "The registers are text, such as '0xf0'. int(text, 16) makes 240 of it."),
    *(Slip(name, HEXADECIMAL) for name in READ_WRONGLY if name != "numbers_left_as_text"),
    Slip(
        "widths_missed",
        "STL and LDL with something behind a dot, such as STL.64, were not counted. Compare what stands before "
        "the first dot.",
    ),
    Slip(
        "groups_counted",
        "Only the HGMMA instructions with gsb0 were counted. Each HGMMA counts here, those that leave their "
        "group open too.",
    ),
    Slip(
        "waits_counted_too",
        "Every gsb0 was counted as a product. Waits name gsb0 too, and most HGMMA instructions don't: count the "
        "instructions whose name is HGMMA.",
        alone=True,
    ),
    *(
        Slip(
            f"one_width_counted__{width}",
            "Only the HGMMA instructions of one shape were counted, such as HGMMA.64x64x16. What stands behind the "
            "first dot differs from kernel to kernel: compare what stands before it.",
            alone=True,
        )
        for width in WIDTHS
    ),
)

HIDDEN = (
    *SEEN,
    Slip(
        "those_in_the_open_counted",
        "The exponentials with no product in flight were counted. Hidden are the others, behind products that run.",
    ),
    *(
        Slip(name, "All exponentials were counted, whether a product was in flight or not.")
        for name in ("all_exponentials", "all_exponentials__beside_a_product")
    ),
    *(
        Slip(
            f"one_stretch_searched__{name}",
            "One stretch of the text was searched for exponentials, from the first product to one product or wait. "
            "Groups start and are waited for many times in a text: follow their number line by line.",
            alone=True,
        )
        for name in STRETCHES
    ),
    Slip(
        "any_barrier_taken",
        "DEPBAR.LE SB0 was taken for a wait for products. It waits for loads and the like; products are waited "
        "for by WARPGROUP.DEPBAR.LE gsb0.",
    ),
    Slip(
        "waits_for_all",
        "Each wait was taken for a wait for all products. Its last operand says how many groups may still run: "
        "after 0x1 one product goes on.",
    ),
    Slip(
        "wait_sets_the_count",
        "After a wait with N, N products were taken to be in flight. It waits until at most N are, and there may "
        "have been fewer, even none: min(in_flight, N).",
    ),
    Slip(
        "open_group_counted",
        "An HGMMA without gsb0 was counted as a group in flight. Several make one product; the one that has gsb0 "
        "among its operands closes the group, and a wait knows only closed ones.",
    ),
    *(
        Slip(
            name,
            "You counted every exponential after the first product. But after WARPGROUP.DEPBAR.LE gsb0, 0x0 no product "
            "runs any more.",
        )
        for name in ("waits_ignored", "waits_ignored__from_the_first_piece")
    ),
    Slip(
        "every_special_function",
        "Reciprocals (MUFU.RCP) and logarithms (MUFU.LG2) were counted too. An exponential is MUFU.EX2.",
    ),
    *(
        Slip(
            name,
            "After each wait one group less was taken to be in flight. Its last operand says how many may still "
            "run: min(in_flight, N).",
        )
        for name in ("wait_ends_one_group", "wait_ends_one_group__below_none")
    ),
    *(
        Slip(name, "A wait with N was taken to end N groups. It waits until at most N are left: min(in_flight, N).")
        for name in ("wait_ends_so_many", "wait_ends_so_many__below_none")
    ),
    Slip(
        "larger_of_the_two",
        "After a wait the larger of the two numbers was taken. It leaves at most N groups in flight: "
        "min(in_flight, N).",
    ),
    Slip(
        "one_in_flight_is_none",
        "An exponential was counted only where two groups or more were in flight. One is enough.",
    ),
)

EXERCISE = Exercise(
    id="9.6",
    title="Reading the machine code",
    entries=("census", "hidden_exponentials"),
    cases=reading_cases,
    models=(Model(counted, CENSUS), Model(hidden, HIDDEN, entry="hidden_exponentials")),
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
