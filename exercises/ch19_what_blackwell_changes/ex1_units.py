"""Exercise 19.1: cycles of a multiprocessor's units for one tile, and the best share of exponentials to move."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level


def shared(functions, *arguments):
    """A share as a float of nine digits: a share found by halving an interval may be a hair above 0."""
    share = functions["best_share"](*arguments)
    if isinstance(share, (bool, str, tuple, list, dict, set)) or share is None:
        raise TypeError(f"best_share returned {share!r}; it must return one number")
    return round(float(share), 9)


def cycles_of(rows, keys, head_dim, chip):
    flops, exponentials, bytes_read = chip
    products = 2 * (2 * rows * keys * head_dim) / flops
    powers = rows * keys / exponentials
    shared_memory = 2 * (rows * head_dim + keys * head_dim + keys * head_dim) / bytes_read
    return products, powers, shared_memory


def share_of(rows, keys, head_dim, chip, instructions, others):
    products, powers, shared_memory = cycles_of(rows, keys, head_dim, chip)
    busy = rows * keys * others / 128
    each = rows * keys * instructions / 128
    least = max(products, shared_memory)
    enough = 1 - least / powers
    even = (powers - busy) / (powers + each)
    share = max(0.0, min(enough, even))
    return share


def largest_share(least, busy, each, powers, even):
    """The largest share with which the tile takes no longer."""
    return min(1.0, max(0.0, (max(least, powers * (1 - max(0.0, even))) - busy) / each))


def told(rows, keys, head_dim, chip, instructions, others):
    return round(share_of(rows, keys, head_dim, chip, instructions, others), 9)


CHIPS = {"B200": (8192, 16, 128), "H100": (4096, 16, 128), "B300": (8192, 32, 128)}
OTHERS = {"slow shared memory": (8192, 16, 40), "rates that are fractions": (6000.5, 7.25, 300.0)}
LEVELS = [Level(chip, name) for name, chip in (CHIPS | OTHERS).items()]


def cycle_cases(draw):
    b200, h100, b300 = CHIPS.values()
    rows, keys, dim = draw.choice((96, 192, 320)), draw.choice((48, 80, 176)), draw.choice((56, 72, 104))
    cycles = {
        "128 × 128, head dimension 128, B200": (128, 128, 128, b200),
        "128 × 128, head dimension 64, B200": (128, 128, 64, b200),
        "64 × 256, head dimension 128, H100": (64, 256, 128, h100),
        f"{rows} × {keys}, head dimension {dim}, B300": (rows, keys, dim, b300),
        "1 × 1, head dimension 1": (1, 1, 1, OTHERS["rates that are fractions"]),
    }
    shares = {
        "head dimension 64, B200: the multiply-add unit limits": (128, 128, 64, b200, 9, 4),
        "head dimension 64, B200, nothing else to do: the products limit": (128, 128, 64, b200, 3, 0),
        "head dimension 128, B200: nothing to gain": (128, 128, 128, b200, 9, 4),
        "head dimension 256, B200: the products take longer": (128, 128, 256, b200, 9, 4),
        "head dimension 32, B300": (128, 128, 32, b300, 4.5, 2.5),
        "head dimension 64, slow shared memory": (128, 64, 64, (8192, 16, 80), 3, 1),
        "the multiply-add unit is busy longer than the exponentials": (128, 128, 32, b200, 9, 12),
        "a small tile, and products that take no time": (8, 8, 16, (2**20, 16, 2**20), 9, 4),
        "shared memory that takes no time": (128, 128, 64, (8192, 16, 2**20), 1, 0),
        "few keys and many queries": (256, 16, 48, b200, 5, 1),
        f"{rows} × {keys}, head dimension {dim}": (rows, keys, dim, (16384, 8, 512), 7, draw.integer(1, 12) / 2),
    }
    return [
        *(Case(name, sizes, "forward_cycles") for name, sizes in cycles.items()),
        *(Case(name, sizes, "best_share", shared) for name, sizes in shares.items()),
    ]


def sizes_of(draw, *, rows, keys, head_dim, chip, **more):
    return rows, keys, head_dim, chip, *more.values()


SIZES = {"rows": (1, 64, 128, 1000), "keys": (1, 96, 128, 2**20), "head_dim": (1, 33, 64, 256), "chip": LEVELS}
PROMISED = {"rows": "at least 1", "keys": "at least 1", "head_dim": "at least 1", "chip": "three positive numbers"}
WORK = {"instructions": (1, 3, 4.5, 9, 40), "others": (0, 1, 2.5, 4, 9, 100)}
CONTRACTS = (
    Contract(sizes_of, SIZES, PROMISED, entry="forward_cycles", most=18),
    Contract(
        sizes_of, SIZES | {"rows": (1, 64, 128), "head_dim": (1, 16, 33, 64, 256)} | WORK,
        PROMISED | {"instructions": "at least 1", "others": "at least 0"}, entry="best_share", driver=shared, most=40,
        valid=lambda rows, keys, **_: rows * keys > 32,
    ),
)  # fmt: skip

PRODUCTS, POWERS = "2 * (2 * rows * keys * head_dim)", "rows * keys / exponentials"
READ = "2 * (rows * head_dim + keys * head_dim + keys * head_dim)"
RESULT, SHARE = "return products, powers, shared_memory", "max(0.0, min(enough, even))"
LARGEST = "largest_share(least, busy, each, powers, even)"
BUSY, EACH, LEAST = "rows * keys * others / 128", "rows * keys * instructions / 128", "max(products, shared_memory)"
CYCLES = (
    *edits("The FLOPs are half of what they should be. There are two products, Q Kᵀ and P V, and a multiply-add is two "
        "FLOPs, which makes 4 · rows · keys · head_dim.", one_product=(PRODUCTS, "2 * rows * keys * head_dim")),
    *edits("The FLOPs are a quarter of what they should be. There are two products, and a multiply-add is two FLOPs.",
        multiplications_alone=(PRODUCTS, "rows * keys * head_dim")),
    *edits("You counted exponentials of the output, rows · head_dim. Each score has one: rows · keys.",
        exponentials_of_the_output=(POWERS, "rows * head_dim / exponentials"),
        exponentials_of_the_output__of_keys=(POWERS, "keys * head_dim / exponentials")),
    *edits("You counted head_dim exponentials for each score. It has one, of the sum over head_dim.",
        exponential_for_every_product=(POWERS, "rows * keys * head_dim / exponentials")),
    *edits("You counted one exponential for each query, or for each key. Each score has one: rows · keys.",
        exponential_of_a_row=(POWERS, "rows / exponentials"),
        exponential_of_a_row__key=(POWERS, "keys / exponentials")),
    *edits("Q is missing among the bytes. For Q Kᵀ the tensor cores read both operands from shared memory.",
        q_forgotten=(READ, "2 * (keys * head_dim + keys * head_dim)")),
    *edits("K or V is missing among the bytes. Q and K are read for the first product, and V for the second.",
        one_of_k_and_v=(READ, "2 * (rows * head_dim + keys * head_dim)"),
        one_of_k_and_v__alone=(READ, "2 * keys * head_dim")),
    *edits("What lies in tensor memory was counted among the bytes: S, P or O. Count Q, K and V, and each once.",
        tensor_memory_counted=(READ, f"({READ} + 2 * rows * keys)"),
        tensor_memory_counted__in_place_of_v=(READ, "2 * (rows * head_dim + keys * head_dim + rows * keys)"),
        tensor_memory_counted__in_32_bits=(READ, f"({READ} + 4 * rows * keys)"),
        tensor_memory_counted__o=(READ, f"({READ} + 2 * rows * head_dim)"),
        tensor_memory_counted__o_in_32_bits=(READ, f"({READ} + 4 * rows * head_dim)"),
        tensor_memory_counted__both=(READ, f"({READ} + 2 * rows * head_dim + 2 * rows * keys)")),
    *edits("rows and keys are exchanged among the bytes. Q has `rows` rows, and K and V have `keys`.",
        rows_for_keys=(READ, "2 * (rows * head_dim + rows * head_dim + keys * head_dim)"),
        rows_for_keys__all=(READ, "6 * rows * head_dim"), rows_for_keys__all_keys=(READ, "6 * keys * head_dim")),
    *edits("Numbers were counted where bytes should be, or bytes of another size. A number in 16 bits has 2 bytes.",
        bytes_of_a_number=(READ, READ.replace("2 *", "1 *")), bytes_of_a_number__4=(READ, READ.replace("2 *", "4 *"))),
    *edits("The bytes were not counted from Q, K and V: scores have nothing to do with them.",
        bytes_of_scores=(READ, "2 * rows * keys"), bytes_of_scores__twice=(READ, "4 * rows * keys")),
    *edits("A result was rounded to whole cycles. Divide by /, and not by //.",
        rounded=("head_dim) / flops", "head_dim) // flops", POWERS, POWERS.replace(" / ", " // "),
        "keys * head_dim) / bytes_read", "keys * head_dim) // bytes_read"),
        rounded__to_nearest=(RESULT, "return round(products), round(powers), round(shared_memory)"),
        rounded__up=(RESULT, "return -(-products // 1), -(-powers // 1), -(-shared_memory // 1)")),
    *edits("A rate of one chip stands in the formula as a number. Chips differ: take all three rates from `chip`.",
        rate_of_one_chip=(POWERS, "rows * keys / 16"),
        rate_of_one_chip__flops=("head_dim) / flops", "head_dim) / 8192"),
        rate_of_one_chip__bytes=("keys * head_dim) / bytes_read", "keys * head_dim) / 128")),
    *edits("The three rates of chip are (FLOPs, exponentials, bytes), in this order.",
        order_of_the_chip=("flops, exponentials, bytes_read = chip", "flops, bytes_read, exponentials = chip")),
)  # fmt: skip
SHARES = (
    *edits("The share is negative where exponentials take less time than something else. It goes from 0 to 1.",
        negative=(SHARE, "min(enough, even)"), negative__balance=(SHARE, "even"), negative__products=(SHARE, "enough")),
    *edits("The exponentials were balanced against the products alone. A share also costs time: the multiply-add unit "
        "takes `instructions` for each of these exponentials, beside what it does anyway.",
        multiply_adds_free=(SHARE, "max(0.0, enough)"),
        multiply_adds_free__products=(SHARE, "max(0.0, 1 - products / powers)")),
    *edits("`others` is missing. The multiply-add unit scales, compares and adds up every score, whoever computes its "
        "exponential.", others_forgotten=(BUSY, "0")),
    *edits("Scores whose exponential the multiply-add unit computes need `others` too: `instructions` come on top.",
        others_or_instructions=(EACH, "rows * keys * (instructions - others) / 128")),
    *edits("`others` was counted only for the scores whose exponential is moved. Every score needs them.",
        others_of_the_share=(BUSY, "0", EACH, "rows * keys * (instructions + others) / 128")),
    *edits("Shared memory is missing. The tile takes at least as long as its reads, so moving more exponentials gains "
        "nothing.", shared_memory_forgotten=(LEAST, "products")),
    *edits("The products are missing. The tile takes at least as long as they do, so moving more exponentials gains "
        "nothing.", products_forgotten=(LEAST, "shared_memory")),
    *edits("The share is larger than it needs to be: both units were balanced, although the products or shared memory "
        "take longer than either. Take the smallest share that does not lengthen the tile's time.",
        balanced_alone=(SHARE, "max(0.0, even)"), balanced_alone__larger=(SHARE, "max(0.0, enough, even)"),
        balanced_alone__unless_0=(SHARE, "(max(0.0, even) if enough > 0 else 0.0)")),
    *edits("The share is larger than it needs to be: the tile takes as long with a smaller one. Of all the shares with "
        "the least time, return the smallest.",
        largest_of_equals=(SHARE, LARGEST),
        largest_of_equals__unless_0=(SHARE, f"({LARGEST} if {SHARE} > 0 else 0.0)")),
    *edits("0 was returned where the multiply-add unit is busy longer than the products or shared memory. While the "
        "exponentials take longest of all, moving some of them makes the tile faster.",
        given_up_early=(SHARE, f"(0.0 if busy >= least else {SHARE})"),
        given_up_early__products=(SHARE, f"(0.0 if busy >= products else {SHARE})")),
    *edits("The share was limited to one half. The longest of the four times is its only limit.",
        at_most_half=(SHARE, f"min(0.5, {SHARE})")),
    *edits("The times of products and shared memory were added. Units work at the same time, so the longest counts.",
        times_added=(LEAST, "products + shared_memory")),
    *edits("That is the share that stays with the exponential unit. Return the other part.",
        share_that_stays=("return share", "return 1 - share")),
    *edits("The share is given in per cent. It goes from 0 to 1.", per_cent=("return share", "return 100 * share")),
    *edits("The multiply-add unit was taken to start 256 or 64 instructions a cycle. It starts 128, whatever they do.",
        instructions_a_cycle=("/ 128", "/ 256"), instructions_a_cycle__64=("/ 128", "/ 64")),
    *edits("`others` was not counted for each of the rows · keys scores.",
        others_of_the_tile=(BUSY, "(rows + keys) * others / 128"),
        **{f"others_of_the_tile__{n}": (BUSY, f"{n} * others / 128") for n in ("1", "rows", "keys")}),
    *edits("`instructions` or `others` was rounded to a whole number. Both may be fractions, such as 4.5.",
        whole_instructions=(BUSY, "rows * keys * int(others) / 128", EACH, "rows * keys * int(instructions) / 128")),
    *edits("Only the instructions of one score were counted. There are rows · keys scores.",
        one_score=(BUSY, "others / 128", EACH, "instructions / 128")),
    *edits("The balance is wrong: the exponential unit has (1 - share) of the exponentials, and not all of them.",
        exponentials_not_relieved=("(powers - busy) / (powers + each)", "(powers - busy) / each")),
    *edits("The share was rounded down to a whole number.", whole_number=("return share", "return share // 1")),
    *CYCLES,
)  # fmt: skip

EXERCISE = Exercise(
    id="19.1", title="Which unit limits", entries=("forward_cycles", "best_share"), cases=cycle_cases,
    oracle={"forward_cycles": cycles_of, "best_share": told}, contracts=CONTRACTS,
    models=(
        model_of(cycles_of, CYCLES, entry="forward_cycles"),
        model_of(told, SHARES, (cycles_of, share_of), (largest_share,), entry="best_share"),
    ),
    mistakes=(
        Mistake("several_numbers", "best_share returns one number, from 0 to 1.",
            when=lambda case, seen, got: seen.error is not None and "must return one number" in seen.error.text),
        Mistake("few_digits", "The share has few digits: it is rounded, or it was found by trying some shares. Solve "
            "for the share at which two units take equally long, and return all its digits.", every=True,
            when=lambda case, seen, got: len(case.args) == 6 and abs(got - told(*case.args)) <= 0.05
            and abs(10_000 * got - round(10_000 * got)) < 1e-6),
    ),
    hints=(
        "Q Kᵀ makes rows · keys scores, each a sum of head_dim products. P V makes rows · head_dim sums of `keys` "
        "products. Both have as many multiply-adds.",
        "Q has rows · head_dim numbers, K and V have keys · head_dim each. A number has 2 bytes.",
        "Write the time of each unit as a function of the share. Two do not depend on it, one falls, and one grows. "
        "Draw them for head dimension 64: where is the longest of the four shortest?",
        "The falling line meets the growing one where (1 - share) · exponentials = rows · keys · (others + share · "
        "instructions) / 128. Solve for the share.",
        "The falling line need not go below the products or shared memory: 1 - max(products, shared memory) / "
        "exponentials is enough. Take the smaller of both shares, and 0 if it is negative.",
    ),
)  # fmt: skip
