"""Exercise 9.6: what a Hopper kernel became, read from its machine code (SASS)."""

from __future__ import annotations

import re

from course_lib.checker import Case, Exercise, Mistake

# An instruction: after its address, perhaps under a predicate such as @!P0.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE)


def instructions(text, predicated=True):
    """(name with its modifiers, operands) of each instruction."""
    return [(m[2], m[3].strip()) for m in INSTRUCTION.finditer(text) if predicated or not m[1]]


def census_oracle(text, *, spills=("STL", "LDL"), changes=("DEALLOC", "TRY_ALLOC"), predicated=True, number=None):
    found = instructions(text, predicated)
    products = sum(name.split(".")[0] == "HGMMA" for name, _ in found)
    registers = [
        (number or (lambda text: int(text, 16)))(operands.split()[-1])
        for name, operands in found
        if name.startswith("USETMAXREG") and any(change in name for change in changes)
    ]
    return products, registers, sum(name.split(".")[0] in spills for name, _ in found)


def hidden_oracle(
    text,
    *,
    exponential=("MUFU.EX2",),
    waits="WARPGROUP.DEPBAR",
    left_by_a_wait=min,
    closes_a_group=lambda operands: "gsb0" in operands,
):
    in_flight = hidden = 0
    for name, operands in instructions(text):
        if name.split(".")[0] == "HGMMA":
            in_flight += closes_a_group(operands)
        elif waits in name:
            in_flight = left_by_a_wait(in_flight, int(operands.split(",")[-1], 16))
        elif name.startswith(exponential):
            hidden += in_flight > 0
    return hidden


class Listing:
    """Machine code as the disassembler prints it, instruction by instruction."""

    def __init__(self, draw):
        self.draw, self.lines, self.address, self.labels = draw, [], 0x40, 0

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
            self.add(f"HGMMA.64x128x16.F32.BF16 R24, {left}, R24{tail}")

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

    def kernel(order, spills=(), registers=()):
        listing = Listing(draw)
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
                listing.add("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24")
            elif part == "other":
                listing.add("DEPBAR.LE SB0, 0x0")
            else:
                listing.add(f"WARPGROUP.DEPBAR.LE gsb0, {part:#x}")
            listing.noise()
        listing.add("@P0 BRA `(.L_x_1)", "EXIT")
        return listing.text()

    shares = [("DEALLOC", 24), ("TRY_ALLOC", 240)]
    spills = ["STL [R1+0x8], R20", "@!P1 STL.64 [R1+0x10], R22", "@P0 STL [R1+0x18], R5", "LDL.LU R20, [R1+0x8]"]
    in_turn = ["scores", 0, "softmax", "output", 0]
    overlapped = ["scores", "output", 1, "softmax", 0]
    return [
        ("nothing but a softmax", kernel(["softmax"])),
        ("in turn", kernel(in_turn)),
        ("the output's product under the softmax", kernel(overlapped, registers=shares)),
        ("a wait that was moved before the softmax", kernel(["scores", "output", 1, 0, "softmax"], registers=shares)),
        ("a wait for something else before the softmax", kernel(["scores", "output", 1, "other", "softmax", 0])),
        ("registers spilled", kernel(in_turn, spills=spills, registers=shares)),
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
    ]


def reading_cases(draw):
    texts = listings(draw)
    return [Case(f"{name}", (text,), entry) for entry in ("census", "hidden_exponentials") for name, text in texts]


def census_mistake(**slips):
    """A slip's formula of `census`, which answers with three things; `hidden_exponentials` answers with a number."""
    return lambda case, seen, got: (
        (case.entry == "census")
        and _same(got, census_oracle(*case.args, **slips))
        and not _same(got, census_oracle(*case.args))
    )


def hidden_mistake(**slips):
    return lambda case, seen, got: (
        case.entry == "hidden_exponentials" and got == hidden_oracle(*case.args, **slips) != hidden_oracle(*case.args)
    )


def _same(got, told):
    if not isinstance(got, (tuple, list)) or len(got) != 3 or not isinstance(got[1], (tuple, list)):
        return False
    return got[0] == told[0] and list(got[1]) == list(told[1]) and got[2] == told[2]


def _all_exponentials(case, seen, got):
    every = sum(name == "MUFU.EX2" for name, _ in instructions(case.args[0]))
    return case.entry == "hidden_exponentials" and got == every != hidden_oracle(case.args[0])


def _digits_only(case, seen, got):
    """Of 0xf0 and 0x18 only decimal digits were taken: the first ones, 0 and 0, or the last ones, 0 and 18."""
    ends = (lambda text: int(re.match(r"\d+", text)[0]), lambda text: int(re.search(r"\d+$", text)[0]))
    return any(census_mistake(number=number)(case, seen, got) for number in ends)


EXERCISE = Exercise(
    id="9.6",
    title="Reading the machine code",
    entries=("census", "hidden_exponentials"),
    cases=reading_cases,
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
            "loads_of_spills_forgotten",
            "Only the stores of spilled registers were counted. They are loaded back by LDL.",
            when=census_mistake(spills=("STL",)),
            every=True,
        ),
        Mistake(
            "stores_of_spills_forgotten",
            "Only the loads of spilled registers were counted. They are stored by STL.",
            when=census_mistake(spills=("LDL",)),
            every=True,
        ),
        Mistake(
            "predicated_missed",
            "Instructions under a predicate, such as @!P1 STL, were not seen. The predicate stands between the "
            "address and the name.",
            when=census_mistake(predicated=False),
            every=True,
        ),
        Mistake(
            "requests_only",
            "Only the requests for registers (TRY_ALLOC) were listed. The producer's DEALLOC gives registers back.",
            when=census_mistake(changes=("TRY_ALLOC",)),
            every=True,
        ),
        Mistake(
            "releases_only",
            "Only the registers given back (DEALLOC) were listed. The consumers ask for theirs by TRY_ALLOC.",
            when=census_mistake(changes=("DEALLOC",)),
            every=True,
        ),
        Mistake(
            "numbers_left_as_text",
            "The registers are text, such as '0xf0'. int(text, 16) makes 240 of it.",
            when=census_mistake(number=lambda text: text),
            every=True,
        ),
        Mistake(
            "numbers_read_as_decimal",
            "The registers are hexadecimal: 0x18 is 24, and neither 0 nor 18. Take all of it, letters too, and read it "
            "by int(text, 16).",
            when=_digits_only,
            every=True,
        ),
        Mistake(
            "any_barrier_taken",
            "DEPBAR.LE SB0 was taken for a wait for products. It waits for loads and the like; products are waited "
            "for by WARPGROUP.DEPBAR.LE gsb0.",
            when=hidden_mistake(waits="DEPBAR"),
            every=True,
        ),
        Mistake(
            "waits_for_all",
            "Each wait was taken for a wait for all products. Its last operand says how many groups may still run: "
            "after 0x1 one product goes on.",
            when=hidden_mistake(left_by_a_wait=lambda in_flight, allowed: 0),
            every=True,
        ),
        Mistake(
            "wait_sets_the_count",
            "After a wait with N, N products were taken to be in flight. It waits until at most N are, and there may "
            "have been fewer, even none: min(in_flight, N).",
            when=hidden_mistake(left_by_a_wait=lambda in_flight, allowed: allowed),
            every=True,
        ),
        Mistake(
            "open_group_counted",
            "An HGMMA without gsb0 was counted as a group in flight. Several make one product; the one that has gsb0 "
            "among its operands closes the group, and a wait knows only closed ones.",
            when=hidden_mistake(closes_a_group=lambda operands: True),
            every=True,
        ),
        Mistake(
            "waits_ignored",
            "You counted every exponential after the first product. But after WARPGROUP.DEPBAR.LE gsb0, 0x0 no product "
            "runs any more.",
            when=hidden_mistake(left_by_a_wait=lambda in_flight, allowed: in_flight),
            every=True,
        ),
        Mistake(
            "every_special_function",
            "Reciprocals (MUFU.RCP) and logarithms (MUFU.LG2) were counted too. An exponential is MUFU.EX2.",
            when=hidden_mistake(exponential=("MUFU",)),
            every=True,
        ),
        Mistake(
            "all_exponentials",
            "All exponentials were counted, whether a product was in flight or not.",
            when=_all_exponentials,
            every=True,
        ),
    ),
)
