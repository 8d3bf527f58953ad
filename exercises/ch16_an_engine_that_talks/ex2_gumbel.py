"""Exercise 16.2: a token drawn in one pass over the logits, by Gumbel noise from a hash."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves, ReadByKernels
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import edits, model_of
from course_lib.checker.specification.layouts import beyond_32_bits, contiguous, unit_last
from exercises.topics.evidence import FAR_END, FIXED_SIZE
from exercises.topics.pointers import load
from exercises.topics.pytorch_operations import ARITHMETIC
from exercises.topics.vector_inputs import spread

FIRST, SECOND, ONES, BLOCKS = 0x85EBCA6B, 0xC2B2AE35, 0xFFFFFFFF, (128, 256, 512, 1024, 2048, 4096)


def mix(word):
    word = ((word & ONES ^ (word & ONES) >> 16) * FIRST) & ONES
    word = ((word ^ (word >> 13)) * SECOND) & ONES
    return word ^ (word >> 16)


def unmixed(word):
    word = ((word ^ (word >> 16)) * pow(SECOND, -1, 2**32)) & ONES
    word = ((word ^ (word >> 13) ^ (word >> 26)) * pow(FIRST, -1, 2**32)) & ONES
    return word ^ (word >> 16)


def scores_of(logits, temperatures, seeds, positions):
    bits = mix(mix(mix(seeds) ^ positions)[:, None] ^ torch.arange(logits.shape[1], device=logits.device))
    noise = -torch.log(-torch.log(((bits >> 9).double() + 0.5) / 2**23))
    temperature = temperatures.double()[:, None]
    return torch.where(temperature > 0, logits / torch.where(temperature > 0, temperature, 1) + noise, logits.double())


def apart(logits, temperatures, seeds, positions, token=None, word=0):
    """The arguments, with other positions where rounding could exchange a row's two largest scores.

    A rounding of float32 is off by 2⁻²⁴ of the number. A score is at most S + 17, where S is the largest |logit| /
    temperature, and takes no more than 8 roundings of such numbers in any form (by a reciprocal, with logarithms in
    base 2, less the largest). So two scores err by 2⁻²⁰ (S + 17) against each other; twice that is kept free.
    token: of each row, its hash is to be `word`.
    """
    size = torch.where(logits.isinf(), 0, logits.double()).abs().amax(-1) / temperatures.clamp(min=0.01)
    for _ in range(200):
        if token is not None:
            seeds = unmixed(unmixed(unmixed(torch.full_like(positions, word)) ^ token) ^ positions)
        best = scores_of(logits, temperatures, seeds, positions).topk(min(2, logits.shape[1]), -1).values
        close = (temperatures > 0) & (best[:, 0] - best[:, -1] < 2**-19 * (size + 17)) & (logits.shape[1] > 1)
        if not close.any():
            return logits, temperatures, seeds, positions
        positions = positions + close
    raise AssertionError("these logits leave no choice to the noise")


def some_forbidden(draw, *shape):
    logits = draw.normal(*shape).masked_fill(draw.integers(*shape, low=0, high=4) > 0, -math.inf)
    logits[:, -1], logits[0, :-1] = 1.0, -math.inf
    return logits


def tied(draw, *shape):
    return -draw.integers(*shape, low=0, high=3).float()


def last_likely(draw, rows, vocabulary):
    return draw.normal(rows, vocabulary) + 30 * (torch.arange(vocabulary) > vocabulary - 50)


ORDINARY, MIXED, GREEDY, HOT = spread(2.0), (0.0, 0.5, 1.0, 1.7, 4.0), (0.0,), (20.0, 100.0)


def drawn(draw, *, rows, vocabulary, temperatures=MIXED, values=ORDINARY, dtype=torch.float32, layout=contiguous):
    temperature = torch.tensor(temperatures).roll(draw.integer(0, 9)).repeat(rows)[:rows]
    seeds, positions = draw.integers(2, rows, low=0, high=2**32 - 200)
    return apart(layout(draw, values(draw, rows, vocabulary).to(dtype)), temperature, seeds, positions)


def given_bits(draw, word, logit, others=0.0, temperature=1.0):
    token, positions = draw.integers(12, low=1, high=67), draw.integers(12, low=0, high=2**32 - 200)
    logits = others + draw.normal(12, 67).argsort(-1)
    logits[torch.arange(12), token] = logit
    return apart(logits, torch.full((12,), temperature), positions, positions, token, word)


def sample_cases(draw):
    half, near = (torch.bfloat16, -1e3) if draw.bfloat16 else (torch.float16, -8e3)  # numbers 4 apart

    def case(name, rows, vocabulary, metered=False, **more):
        return Case(name, drawn(draw, rows=rows, vocabulary=vocabulary, **more), metered=metered)

    logits, *rest = drawn(draw, rows=3, vocabulary=40)
    return [
        case("24 rows of 50 tokens", 24, 50),
        case("12 rows of 1,000 tokens at temperature 1", 12, 1000, metered=True, temperatures=(1.0,)),
        case("4 rows of 5,003 tokens at temperature 100", 4, 5003, True, temperatures=(100.0,), values=spread(300.0)),
        case("3 rows of 9,000 tokens, the last ones are likely", 3, 9000, temperatures=(1.0,), values=last_likely),
        case("temperatures 0 and 0.01, with ties among 9,000 tokens", 2, 9000, temperatures=(0.0, 0.01), values=tied),
        Case("a token that is unlikely, and whose 32 bits are all 1", given_bits(draw, ONES, -40.0)),
        Case("one that may not be drawn, and whose bits are all 1", given_bits(draw, ONES, -math.inf, -65e3, 0.01)),
        Case("a token that alone may be drawn, and whose 32 bits are all 0", given_bits(draw, 0, 1.0, -math.inf)),
        case(f"16 rows in {str(half)[6:]}", 16, 257, dtype=half, temperatures=(1.7, 3.0), values=spread(4.0, near)),
        case(f"150 rows, {FAR_END}", 150, 3),
        case(f"140,000 tokens, {FAR_END}", 1, 140_000, temperatures=(1.0,), values=last_likely),
        *beyond_32_bits(draw, "rows", [logits], *rest),
    ]


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 7, 24), "vocabulary": (1, 2, 31, 128, 257, 1025, 2500),
        "temperatures": (Level(MIXED, ""), Level(GREEDY, "temperature 0"), Level((0.01, 0.05), "near 0.01"),
                         Level(HOT, "temperatures up to 100")),
        "values": (Level(ORDINARY, ""), Level(spread(300.0), "logits near 300"), Level(tied, "equal logits"),
                   Level(spread(1.0, -60.0), "logits near -60"), Level(some_forbidden, "many logits of -inf")),
        "dtype": (torch.float32, torch.float16), "layout": unit_last("logits"),
    },
    valid=lambda rows, vocabulary, **_: vocabulary * rows < 9000, most=8,
    says={"rows": "at least one row", "vocabulary": "any vocabulary from 1", "layout": "Rows may lie any", "dtype":
          "float32, float16 or bfloat16", "temperatures": "from 0.01 to 100", "values": "A logit may be -inf"},
)  # fmt: skip


def of_last_block(numbers, block):
    """What is chosen where a later block's equal score displaces an earlier one's."""
    begin = (numbers == numbers.amax(-1, keepdim=True)).cumsum(-1).argmax(-1, keepdim=True) // block * block
    return numbers.masked_fill(torch.arange(numbers.shape[1]) < begin, -math.inf).argmax(-1)


def draws(logits, temperatures, seeds, positions):
    rows, vocabulary = logits.shape
    row, token = torch.arange(rows)[:, None], torch.arange(vocabulary)
    temperature = temperatures[row]
    word = mix(mix(seeds[row]) ^ positions[row])
    bits = mix(word ^ token)
    u = ((bits >> 9).float() + 0.5) / 2**23
    noise = -torch.log(-torch.log(u))
    given = load(logits, row * logits.stride(0) + token, token < vocabulary, -math.inf).float()
    scores = torch.where(temperature > 0, given / temperature + noise, given)
    compared = torch.where(scores.isnan(), -math.inf, scores)
    return compared.argmax(-1)


def each(name, *pieces, of=BLOCKS):
    return {f"{name}__{number}": tuple(piece.replace("NUMBER", str(number)) for piece in pieces) for number in of}


SEED, PLACE, JOINED, NOISE = "seeds[row]", "positions[row]", "word ^ token", "-torch.log(-torch.log(u))"
WORD, U, LIMIT = f"mix(mix({SEED}) ^ {PLACE})", "((bits >> 9).float() + 0.5) / 2**23", "temperature > 0"
SCORE, TOKENS, OWN = "given / temperature + noise", "torch.arange(vocabulary)", "temperatures[row]"
CHOICE, CHOSEN = f"torch.where(temperature > 0, {SCORE}, given)", "compared.argmax(-1)"
CHANGES = (
    *edits("u must stay strictly between 0 and 1, and yours reaches an end. u = 1 makes the noise +inf: the token is "
        "drawn whatever its logit is. u = 0 makes it -inf: the token is never drawn. float32 has 24 binary digits, so "
        "keep 23 bits: (floor(bits / 2⁹) + 1/2) / 2²³.", u_reaches_an_end=(U, "(bits.float() + 0.5) / 2**32"),
        u_reaches_an_end__0=(U, "(bits >> 9).float() / 2**23"),
        u_reaches_an_end__both=(U, "bits.float() / (2**32 - 1)")),
    *edits("u does not run from 0 to 1. Shift the bits by 9, as uint32; 23 are left, so divide by 2²³.",
        u_of_another_range=(U, "((bits >> 8).float() + 0.5) / 2**23"),
        u_of_another_range__half=(U, "((bits >> 9).float() + 0.5) / 2**24"),
        u_of_another_range__signed=(U, "((bits - (bits >> 31 << 32) >> 9).float() + 0.5) / 2**23")),
    *edits("All rows drew with row 0's seed, position or temperature. Load each row's own, as at seeds + row.",
        row_0_for_all=(SEED, "seeds[0 * row]"), row_0_for_all__position=(PLACE, "positions[0 * row]"),
        row_0_for_all__temperature=(OWN, "temperatures[0 * row]"),
        row_0_for_all__seed_and_position=(SEED, "seeds[0 * row]", PLACE, "positions[0 * row]")),
    *edits("The top bit of the seed or of the position was lost. Both are words of 32 bits, without a sign.",
        top_bit_lost=(SEED, f"{SEED} % 2**31"), top_bit_lost__position=(PLACE, f"{PLACE} % 2**31"),
        top_bit_lost__both=(SEED, f"{SEED} % 2**31", PLACE, f"{PLACE} % 2**31")),
    *edits("The seed or the position has no part in the noise. The bits are mix(mix(mix(seed) ^ position) ^ token).",
        position_ignored=(WORD, f"mix({SEED})"), position_ignored__mixed=(WORD, f"mix(mix({SEED}))"),
        seed_ignored=(WORD, f"mix({PLACE})"), seed_ignored__mixed=(WORD, f"mix(mix({PLACE}))")),
    *edits("The noise depends on the row's place in the batch. It must depend on the seed, the position and the token "
        "alone.", row_in_the_noise=(SEED, "row"), row_in_the_noise__position=(PLACE, "row"),
        row_in_the_noise__added=(SEED, f"({SEED} + row)"),
        row_in_the_noise__flat=(JOINED, "word ^ (row * vocabulary + token)")),
    *edits("The hash is not mix(mix(mix(seed) ^ position) ^ token). Begin with the seed, join the next word "
        "by ^ and not by a sum, and mix each time.", other_hash=(WORD, f"mix(mix({PLACE}) ^ {SEED})"),
        other_hash__joined=(WORD, f"mix({SEED} ^ {PLACE})"), other_hash__less=(WORD, f"mix({SEED}) ^ {PLACE}"),
        other_hash__sum=(WORD, f"mix(mix({SEED}) + {PLACE})"), other_hash__sum_of_token=(JOINED, "word + token"),
        other_hash__sums=(WORD, f"mix(mix({SEED}) + {PLACE})", JOINED, "word + token")),
    *edits("All blocks of a row have the same noise. The hash needs the token's index in the row, start + "
        "tl.arange(0, BLOCK).", **each("noise_of_the_block", JOINED, "word ^ token % NUMBER")),
    *edits("The likeliest token was taken although the temperature is above 0. Does each token get noise of its own?",
        no_noise=(SCORE, "given"), no_noise__one_for_the_row=(f"mix({JOINED})", "mix(word)[:, :1]"),
        no_noise__not_mixed=(f"mix({JOINED})", JOINED)),
    *edits("The temperature is in the wrong place, or changes nothing. Divide the logits alone, before the noise.",
        temperature_misplaced__nowhere=(SCORE, "given + noise"),
        temperature_misplaced=(SCORE, "given * temperature + noise")),
    *edits("Temperatures were limited. Each from 0.01 to 100 counts as it is, and 0 alone has no noise.",
        **each("temperature_limited", OWN, f"{OWN}.clamp(max=NUMBER)", of=(2, 10, 50)),
        **each("temperature_limited__low", LIMIT, "temperature > NUMBER", of=(0.015, 0.05)), alone=True),
    *edits("The scores were rounded to the 16 bits of the logits. Convert them first, and compute in float32.",
        rounded_to_16_bits=(SCORE, "(given / temperature).to(logits.dtype) + noise"),
        rounded_to_16_bits__scores=(SCORE, f"({SCORE}).to(logits.dtype).float()"), alone=True),
    *edits("The noise is not -log(-log(u)): a sign or a logarithm is missing, or 1 - u is used instead of u.",
        other_noise=(NOISE, "torch.log(-torch.log(u))"), other_noise__one_logarithm=(NOISE, "-torch.log(u)"),
        other_noise__log=(NOISE, "torch.log(u)"), other_noise__end=(NOISE, "-torch.log(-torch.log(1 - u))")),
    *edits("At temperature 0 the first of the largest logits is taken. There, divide nothing and add no noise.",
        **each("greedy_with_noise", CHOICE, "given / temperature.clamp(min=1e-NUMBER) + noise", of=(3, 5, 6, 8)),
        greedy_with_noise=(CHOICE, "given / torch.where(temperature > 0, temperature, 1.0) + noise"),
        divided_by_0=(LIMIT, "temperature >= 0")),
    *edits("At temperature 0 a later one of equal logits was taken. Replace the best score only by a larger one.",
        **each("later_tie", CHOSEN, "of_last_block(compared, NUMBER)", of=(1, *BLOCKS))),
    *edits("Only the last block of a row counted. Replace the best score and its token only by a larger one.",
        **each("last_block_only", CHOSEN,
        "compared.masked_fill(token < (vocabulary - 1) // NUMBER * NUMBER, -math.inf).argmax(-1)")),
    *edits("Only the first block of a row counted. Go on in steps of BLOCK until the vocabulary ends.",
        **each("first_block_only", CHOSEN, "compared[:, :NUMBER].argmax(-1)")),
    *edits("The token's place in its block was returned. Add the block's start.",
        **each("place_in_the_block", CHOSEN, "compared.argmax(-1) % NUMBER")),
    *edits("Rows whose scores are all far below 0 got token 0. The best score so far begins at -inf, at no number.",
        **each("best_begins", CHOSEN, "compared.where(compared > NUMBER, -math.inf).argmax(-1)", of=(0, -1e4, -1e6))),
    *edits("Logits were cut off from below. They reach down to -66,000, and one of -inf is never drawn.",
        **each("logits_cut_off", "inf).float()", "inf).float().clamp(min=NUMBER)", of=(-1e4, -6e4)), alone=True),
    *edits("Lanes past the end of the vocabulary took part, with the logit 0. Load them with other=float('-inf').",
        **each("lanes_behind_the_end", TOKENS, "torch.arange(-(-vocabulary // NUMBER) * NUMBER)", "-math.inf", "0."),
        **each("lanes_behind_the_end__most", TOKENS, "torch.arange(-(-vocabulary // (b := min(NUMBER, 2 ** "
        "math.ceil(math.log2(vocabulary))))) * b)", "-math.inf", "0."),
        lanes_behind_the_end=(TOKENS, "torch.arange(2 ** math.ceil(math.log2(vocabulary)))", "-math.inf", "0.")),
    *edits("Rows are read as if they followed each other without a gap. Row r begins at r times logits.stride(0).",
        row_stride_ignored=("logits.stride(0)", "vocabulary")),
)  # fmt: skip

EXERCISE = Exercise(
    id="16.2", title="A draw without a softmax", entries=("sample",), cases=sample_cases, contracts=(CONTRACT,),
    oracle=lambda *given: scores_of(*given).argmax(-1), needs=TRITON, inputs_belong_together=True,
    models=(model_of(draws, CHANGES, (mix,), (of_last_block,), draws=0),),
    requirements=(
        LaunchesTriton(),
        Forbids((*ARITHMETIC, "argmax", "topk", "sort", "_softmax", "multinomial", "exponential", "gather")),
        Moves(lambda logits, *rest: logits.numel() * logits.element_size(), slack=1.6),
        ReadByKernels((0,)),
    ),
    hints=(
        "One program draws the token of one row, in a loop over blocks. It keeps the best score so far, which begins "
        "at -inf, and its token. The row's part of the hash is made once: row_word = mix(mix(seed) ^ position).",
        "In a block: token = start + tl.arange(0, BLOCK), bits = mix(row_word ^ token), and u = ((bits >> 9).to(tl."
        "float32) + 0.5) / 8388608.0. Load lanes past the row's end as -inf, so that they are never drawn.",
        "score, place = tl.max(scores, axis=0, return_indices=True) gives the first of equals in a block. Replace the "
        "best only if score > best. At temperature 0 the scores are the logits.",
    ),
    mistakes=(FIXED_SIZE, Mistake("noise_is_nan", "All scores of a row were NaN. log(u) is negative, and its own "
        "logarithm is NaN: the inner minus of -log(-log(u)) is missing.",
        when=lambda case, seen, got: seen.error is not None and "All-NaN" in seen.error.text)),
)  # fmt: skip
