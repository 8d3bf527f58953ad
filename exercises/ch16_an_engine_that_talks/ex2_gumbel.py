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

FIRST, SECOND, ONES, BLOCKS = 0x85EBCA6B, 0xC2B2AE35, 0xFFFFFFFF, (64, 128, 256, 512, 1024, 2048, 4096)


def mix(word):
    word = word & ONES
    word = ((word ^ (word >> 16)) * FIRST) & ONES
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


def drawn(draw, *, rows, vocabulary, temperatures=MIXED, values=ORDINARY, dtype=torch.float32, layout=contiguous,
          high=2**31):  # fmt: skip
    temperature = torch.tensor([draw.choice(temperatures) for _ in range(rows)])
    seeds, positions = draw.integers(rows, low=0, high=high), draw.integers(rows, low=0, high=4000)
    return apart(layout(draw, values(draw, rows, vocabulary).to(dtype)), temperature, seeds, positions)


def given_bits(draw, word, logit, others=0.0):
    token, positions = draw.integers(12, low=1, high=67), draw.integers(12, low=0, high=4000)
    logits = others + draw.normal(12, 67)
    logits[torch.arange(12), token] = logit
    return apart(logits, torch.ones(12), positions, positions, token, word)


def sample_cases(draw):
    halves = torch.bfloat16 if draw.bfloat16 else torch.float16

    def case(name, rows, vocabulary, metered=False, **more):
        return Case(name, drawn(draw, rows=rows, vocabulary=vocabulary, **more), metered=metered)

    logits, *rest = drawn(draw, rows=3, vocabulary=40)
    return [
        case("24 rows of 50 tokens", 24, 50),
        case("12 rows of 1,000 tokens at temperature 1", 12, 1000, metered=True, temperatures=(1.0,)),
        case("4 rows of 5,003 tokens", 4, 5003, metered=True, temperatures=HOT),
        case("3 rows of 9,000 tokens, the last ones are likely", 3, 9000, temperatures=(1.0,), values=last_likely),
        case("temperature 0, with ties among 9,000 tokens", 2, 9000, temperatures=GREEDY, values=tied),
        Case("a token that is unlikely, and whose 32 bits are all 1", given_bits(draw, ONES, -40.0)),
        Case("a token that may not be drawn, and whose 32 bits are all 1", given_bits(draw, ONES, -math.inf)),
        Case("a token that alone may be drawn, and whose 32 bits are all 0", given_bits(draw, 0, 1.0, -math.inf)),
        case(f"16 rows in 16 bits, {str(halves)[6:]}", 16, 257, dtype=halves),
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
        "high": (Level(2**31, ""), Level(2**32, "seeds up to 2³² - 1")),
    },
    valid=lambda rows, vocabulary, **_: vocabulary * rows < 9000, most=8,
    says={"rows": "at least one row", "vocabulary": "any vocabulary from 1", "layout": "Rows may lie any",
          "temperatures": "each 0, or from 0.01 to 100", "values": "A logit may be -inf",
          "dtype": "float32, float16 or bfloat16", "high": "each from 0 to 2³² - 1"},
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


def by_block(name, *pieces):
    return {f"{name}__{block}": tuple(piece.replace("BLOCK", str(block)) for piece in pieces) for block in BLOCKS}


SEED, PLACE, JOINED, NOISE = "seeds[row]", "positions[row]", "word ^ token", "-torch.log(-torch.log(u))"
WORD, U = f"mix(mix({SEED}) ^ {PLACE})", "((bits >> 9).float() + 0.5) / 2**23"
SCORE, TOKENS = "given / temperature + noise", "torch.arange(vocabulary)"
CHOICE, CHOSEN = f"torch.where(temperature > 0, {SCORE}, given)", "compared.argmax(-1)"
CHANGES = (
    *edits("u must stay strictly between 0 and 1, and yours reaches an end. Where a token's 32 bits are 1, u = 1 makes "
        "its noise +inf: it is drawn whatever its logit is. Where they are 0, u = 0 makes it -inf: it is never drawn. "
        "float32 has 24 binary digits, so keep 23 bits: (floor(bits / 2⁹) + 1/2) / 2²³.",
        u_reaches_an_end=(U, "(bits.float() + 0.5) / 2**32"), u_reaches_an_end__0=(U, "(bits >> 9).float() / 2**23"),
        u_reaches_an_end__both=(U, "bits.float() / (2**32 - 1)")),
    *edits("u does not run from 0 to 1. Shift the bits by 9, as uint32; 23 are left, so divide by 2²³.",
        u_of_another_range=(U, "((bits >> 8).float() + 0.5) / 2**23"),
        u_of_another_range__half=(U, "((bits >> 9).float() + 0.5) / 2**24"),
        u_of_another_range__signed=(U, "((bits - (bits >> 31 << 32) >> 9).float() + 0.5) / 2**23")),
    *edits("All rows drew with row 0's seed or position. Load each row's own, at seeds + row and positions + row.",
        seed_of_row_0=(SEED, "seeds[0 * row]"), position_of_row_0=(PLACE, "positions[0 * row]"),
        seed_of_row_0__and_position=(SEED, "seeds[0 * row]", PLACE, "positions[0 * row]")),
    *edits("The seed or the position has no part in the noise. The bits are mix(mix(mix(seed) ^ position) ^ token).",
        position_ignored=(WORD, f"mix({SEED})"), position_ignored__mixed=(WORD, f"mix(mix({SEED}))"),
        seed_ignored=(WORD, f"mix({PLACE})"), seed_ignored__mixed=(WORD, f"mix(mix({PLACE}))")),
    *edits("The noise depends on the row's place in the batch, so a request draws another token when others come or "
        "go. It must depend on the seed, the position and the token alone.", row_in_the_noise=(SEED, "row"),
        row_in_the_noise__position=(PLACE, "row"), row_in_the_noise__added=(SEED, f"({SEED} + row)"),
        row_in_the_noise__flat=(JOINED, "word ^ (row * vocabulary + token)")),
    *edits("The hash is not mix(mix(mix(seed) ^ position) ^ token). Begin with the seed, join the next word "
        "by ^ and not by a sum, and mix each time.", other_hash=(WORD, f"mix(mix({PLACE}) ^ {SEED})"),
        other_hash__joined=(WORD, f"mix({SEED} ^ {PLACE})"), other_hash__less=(WORD, f"mix({SEED}) ^ {PLACE}"),
        other_hash__sum=(WORD, f"mix(mix({SEED}) + {PLACE})"), other_hash__sum_of_token=(JOINED, "word + token"),
        other_hash__sums=(WORD, f"mix(mix({SEED}) + {PLACE})", JOINED, "word + token")),
    *edits("All blocks of a row have the same noise. The hash needs the token's index in the row, start + "
        "tl.arange(0, BLOCK).", **by_block("noise_of_the_block", JOINED, "word ^ token % BLOCK")),
    *edits("The likeliest token was taken although the temperature is above 0. Does each token get noise of its own?",
        no_noise=(SCORE, "given"), no_noise__one_for_the_row=(f"mix({JOINED})", "mix(word)[:, :1]"),
        no_noise__not_mixed=(f"mix({JOINED})", JOINED)),
    *edits("The temperature changes nothing: (logit + noise) / temperature is largest where logit + noise is. Divide "
        "the logits alone, before the noise is added.", temperature_ignored=(SCORE, "given + noise")),
    *edits("The temperature is in the wrong place. Divide the logits alone by it: logit / temperature + noise.",
        temperature_misplaced=(SCORE, "given * temperature + noise"),
        temperature_misplaced__both=(SCORE, "given / temperature + noise * temperature")),
    *edits("All rows were drawn at the temperature of row 0. Load each row's own, at temperatures + row.",
        temperature_of_row_0=("temperatures[row]", "temperatures[0 * row]")),
    *edits("The noise is not -log(-log(u)): a sign or a logarithm is missing, or 1 - u is used instead of u.",
        other_noise=(NOISE, "torch.log(-torch.log(u))"), other_noise__one_logarithm=(NOISE, "-torch.log(u)"),
        other_noise__log=(NOISE, "torch.log(u)"), other_noise__end=(NOISE, "-torch.log(-torch.log(1 - u))")),
    *edits("At temperature 0 the first of the largest logits is taken. Nothing is divided there, and no noise is "
        "added, because it would decide among equal logits.", divided_by_0=("temperature > 0", "temperature >= 0"),
        greedy_with_noise=(CHOICE, "given / torch.where(temperature > 0, temperature, 1.0) + noise"),
        **{f"greedy_with_noise__{power}": (CHOICE, f"given / temperature.clamp(min=1e-{power}) + noise")
        for power in (3, 4, 5, 6, 8, 10)}),
    *edits("At temperature 0 the first of equal logits is taken, and yours is a later one. A block displaces the best "
        "so far only if its score is larger.", later_tie=(CHOSEN, "of_last_block(compared, 1)"),
        **by_block("later_tie", CHOSEN, "of_last_block(compared, BLOCK)")),
    *edits("Only the last block of a row counted. Keep the best score and its token, and replace both only where a "
        "block's score is larger.", **by_block("last_block_only", CHOSEN,
        "compared.masked_fill(token < (vocabulary - 1) // BLOCK * BLOCK, -math.inf).argmax(-1)")),
    *edits("Only the first block of a row counted. Go on in steps of BLOCK until the vocabulary ends.",
        **by_block("first_block_only", CHOSEN, "compared[:, :BLOCK].argmax(-1)")),
    *edits("The token's place in its block was returned. Add the block's start.",
        **by_block("place_in_the_block", CHOSEN, "compared.argmax(-1) % BLOCK")),
    *edits("Rows whose scores are all below 0 got token 0. The best score so far begins at -inf.",
        best_begins_at_0=(CHOSEN, "compared.masked_fill(compared <= 0, -math.inf).argmax(-1)")),
    *edits("Lanes past the end of the vocabulary took part, with the logit 0. Load them with other=float('-inf').",
        **by_block("lanes_behind_the_end", TOKENS, "torch.arange(-(-vocabulary // BLOCK) * BLOCK)", "-math.inf", "0."),
        **by_block("lanes_behind_the_end__most", TOKENS, "torch.arange(-(-vocabulary // (b := min(BLOCK, 2 ** "
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
