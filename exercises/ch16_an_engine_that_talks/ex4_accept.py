"""Exercise 16.4: accept or refuse, judged by the exact law of what is appended."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.topics.evidence import raised

# All ratios p/q and all cumulative residuals are multiples of 1/steps. A right answer changes only there, so a point
# between each two of them, all equally likely, gives the exact law. Not the middle: edges of wrong answers lie there.


# The driver is sent to the worker by its source alone, so it stands by itself.
def law_of(functions, draft_probabilities, target_probabilities, steps):
    """The law of the answers to drafts that are drawn from q: of all drafts, at a point of each of the uniforms' steps.

    An answer is a row of tokens, with `none` behind its last. One that is not possible has no token.
    """
    q, p = draft_probabilities, target_probabilities
    (k, none), changed = q.shape, 0
    drafts = torch.arange(none**k)[:, None] // none ** torch.arange(k) % none
    chances = q.double().gather(1, drafts.T).prod(0)
    drafts, chances = drafts[chances > 0], chances[chances > 0]
    grid = (torch.arange(steps ** (k + 1))[:, None] // steps ** torch.arange(k + 1) % steps + 0.4) / steps
    drafts, uniforms = drafts.repeat_interleave(len(grid), 0), grid.repeat(len(drafts), 1)
    if "all at once" in functions:  # the judge's own
        answers = functions["all at once"](drafts, q, p, uniforms)
    else:
        accept, rows = getattr(functions["accept"], "__wrapped__", functions["accept"]), []
        with torch.utils._python_dispatch._disable_current_modes():  # what observes PyTorch takes 8 times as long
            for draft, uniform in zip(drafts, uniforms):
                row = [int(token) for token in accept(draft, q, p, uniform)]
                row = [token if 0 <= token < none else none for token in row] if len(row) <= k + 1 else []
                rows.append(row + [none] * (k + 1 - len(row)))
            for at in range(0, len(drafts), len(drafts) // 64 + 1):  # the same arguments once more
                changed += len({tuple(map(int, accept(drafts[at], q, p, uniforms[at]))) for _ in range(2)}) - 1
        answers = torch.tensor(rows)
    answers = answers.where(((answers[:, 1:] == none) | (answers[:, :-1] == drafts)).all(1)[:, None], none)
    place = (answers * (none + 1) ** torch.arange(k, -1, -1)).sum(1)
    chances = (chances / len(grid)).repeat_interleave(len(grid))
    law = torch.zeros((none + 1) ** (k + 1), dtype=torch.float64).scatter_add_(0, place, chances)
    first = law.view(none + 1, -1).sum(1)[:none]
    counts = torch.zeros(k + 2, dtype=torch.float64).scatter_add_(0, (answers < none).sum(1), chances)
    shares, apart = ", ".join(f"{share:.4g}" for share in first.tolist()), float((first - p[0]).abs().sum()) / 2
    return {
        "chances of each first token": f"{shares} (total variation from p: {apart:.2f})",
        f"chance of 0 to {k + 1} tokens": counts,
        "calls that answer otherwise if repeated": torch.tensor(float(changed)),
        "chance of each answer": law.view([none + 1] * (k + 1)),
    }


def drawn(weights, uniform):
    edges = weights.cumsum(1) / weights.sum(1, keepdim=True)
    return (uniform[:, None] > edges[:, :-1]).sum(1)


def answered(drafts, q, p, uniforms):
    k, none = q.shape
    place = torch.arange(k)
    accepted = uniforms[:, :k] < p[place, drafts] / q[place, drafts]
    count = accepted.long().cumprod(1).sum(1)[:, None]
    residual = (p[:k] - q).clamp(min=0)
    weights = torch.cat([residual, p[k:]])[count[:, 0]]
    new = drawn(weights, uniforms[:, k])[:, None]
    place = torch.arange(k + 1)
    padded = torch.cat([drafts, torch.full_like(count, none)], 1)
    return torch.where(place < count, padded, torch.where(place == count, new, none))


def told(q, p, steps):
    return law_of({"all at once": answered}, q, p, steps)


# q and p of a row, in sixteenths: with these, all decisions change at multiples of 1/4.
HALVED = (8, 8, 0, 0), (4, 4, 6, 2)
LIKELIER = (2, 2, 4, 8), (8, 4, 2, 2)
COPIED = (0, 0, 16, 0), (6, 2, 8, 0)
IMPOSSIBLE = (8, 8, 0, 0), (0, 8, 4, 4)
COPIED_IN_VAIN = (0, 16, 0, 0), (4, 0, 8, 4)
EQUAL = (4, 4, 8, 0), (4, 4, 8, 0)
LAST = (4, 8, 0, 4)


def made(draw, *rows, last=LAST, spare=0, whole=16, steps=4):
    """q, p and the steps: rows in an order of the vocabulary that is drawn, with `spare` tokens that have no chance."""
    order = draw.permutation(len(last) + spare)
    q, p = ([torch.tensor([*row, *[0] * spare])[order] / whole for row in part] for part in (
        [row[0] for row in rows], [*(row[1] for row in rows), last]))  # fmt: skip
    return torch.stack(q) if q else torch.zeros(0, len(order)), torch.stack(p), steps


def accept_cases(draw):
    def case(name, *rows, **options):
        return Case(name, made(draw, *rows, **options), driver=law_of)

    return [
        case("one guess, four tokens", ((4, 10, 4, 2), (7, 6, 4, 3)), last=(2, 4, 6, 8), whole=20, steps=20),
        case("one guess, two tokens may replace it", HALVED),
        case("one guess, copied: q is 1 on it", COPIED),
        case("one guess that p never makes", COPIED_IN_VAIN),
        case("two guesses", LIKELIER, HALVED),
        case("two guesses, p equal to q", EQUAL, EQUAL),
        case("three guesses, copied", COPIED, COPIED, COPIED),
        case("no guess"),
    ]


REFUSED, LIKELY = Level(HALVED, "half of the guesses refused"), Level(LIKELIER, "likely guesses refused")
CONTRACT = Contract(
    lambda draw, *, first, second, spare: made(draw, first, second, spare=spare),
    choices={
        "first": (REFUSED, LIKELY, Level(IMPOSSIBLE, "a guess with p = 0")),
        "second": (Level(COPIED, "a guess with q = 1"), Level(EQUAL, "p equal to q"), LIKELY),
        "spare": (Level(0, "4 tokens"), Level(2, "6 tokens")),
    },
    says={"first": "It may be 0 where q is not", "second": "be equal to p's row"},
    driver=law_of,
    most=3,
)


def beyond(case, seen, got):
    """By how much k + 1 tokens are too likely, k or more, …, 1 or more, and 0 or more; NaN where nothing is known."""
    if not isinstance(got, dict) or seen.modified_inputs:
        return torch.full((2,), torch.nan)
    number = f"chance of 0 to {len(case.args[0]) + 1} tokens"
    return (got[number] - told(*case.args)[number]).flip(0).cumsum(0)


RATIO = "uniforms[:, :k] < p[place, drafts] / q[place, drafts]"
RESIDUAL, LAST_ROW, COUNT = "(p[:k] - q).clamp(min=0)", "p[k:]", "accepted.long().cumprod(1).sum(1)"
EDGES, USED = "weights.cumsum(1) / weights.sum(1, keepdim=True)", "drawn(weights, uniforms[:, k])"
ANSWER = "torch.where(place < count, padded, torch.where(place == count, new, none))"
SAMPLED = "(drawn(p[:k].repeat(len(drafts), 1), uniforms[:, :k].flatten()).view(drafts.shape) == drafts)"
SAMPLES = (
    "A guess is accepted where a sample from p is the same token. That refuses far too many: accept the guess x with "
    "the chance min(1, p(x) / q(x)), and draw from max(p - q, 0) otherwise."
)
CHANGES = (
    *edits("All guesses are accepted, or none. Accept the guess x if its uniform is below p(x) / q(x), and only then.",
        never_refused=(RATIO, "uniforms[:, :k] < 2"), never_accepted=(RATIO, "uniforms[:, :k] > 2")),
    *edits("The guess x is accepted with the chance q(x) / p(x). It is p(x) / q(x): what q drew too often is refused "
        "now and then.", ratio_upside_down=(RATIO, RATIO.replace("p[place, drafts] / q[place, drafts]",
        "(q[place, drafts] / p[place, drafts])"))),
    *edits("A guess is accepted where its uniform is above p(x) / q(x). It should be below, or above 1 - p(x) / q(x).",
        compared_the_wrong_way=(RATIO, RATIO.replace("<", ">"))),
    *edits("The guess x is accepted with the chance p(x). It was drawn with the chance q(x) in the first place, so "
        "divide by that.", not_divided_by_q=(RATIO, "uniforms[:, :k] < p[place, drafts]")),
    *edits("The guess x is accepted only where p(x) is at least q(x). Where p(x) is less, it is accepted with the "
        "chance p(x) / q(x).", only_where_p_is_more=(RATIO, "p[place, drafts] >= q[place, drafts]")),
    *edits("A guess is accepted only if it is p's likeliest token. That is the greedy rule; here accept the guess x "
        "with the chance min(1, p(x) / q(x)).", only_the_likeliest=(RATIO, "p[:k].argmax(1) == drafts")),
    *edits(SAMPLES, samples_compared=(RATIO, SAMPLED, RESIDUAL, "p[:k]"), samples_compared__residual=(RATIO, SAMPLED),
        samples_compared__the_sample_is_taken=(RATIO, SAMPLED, RESIDUAL, "p[:k]", USED,
        "drawn(weights, uniforms.gather(1, count)[:, 0])")),
    *edits("p is taken from the row after the guess. Row i of p is for the place of guess i: it is computed from what "
        "stands before that.", row_behind=("p[place, drafts]", "p[place + 1, drafts]",
        RESIDUAL, "(p[1:] - q).clamp(min=0)"), row_behind__in_the_ratio=("p[place, drafts]", "p[place + 1, drafts]"),
        row_behind__in_the_residual=(RESIDUAL, "(p[1:] - q).clamp(min=0)")),
    *edits("Row 0 was taken for every guess. Guess i is judged by row i of p and of q.",
        first_row_for_all=("p[place, drafts] / q[place, drafts]", "p[0 * place, drafts] / q[0 * place, drafts]",
        RESIDUAL, "(p[:1] - q[:1]).clamp(min=0).expand(k, -1)")),
    *edits("The refused token is replaced from the residual of row 0, or of the last row. Take p and q at the place "
        "that was refused.", residual_of_another_row=(RESIDUAL, "(p[:1] - q[:1]).clamp(min=0).expand(k, -1)"),
        residual_of_another_row__last=(RESIDUAL, "(p[k - 1 : k] - q[k - 1 :]).clamp(min=0).expand(k, -1)"),
        residual_of_another_row__behind_all=(RESIDUAL, "(p[k:] - q).clamp(min=0)")),
    *edits("Every guess was decided with the same uniform, so that they are accepted or refused together. uniforms[i] "
        "decides on guess i.", one_uniform_for_all=(RATIO, RATIO.replace("[:, :k]", "[:, :1]"))),
    *edits("The token at the end is drawn with a uniform that has already decided on a guess. After a refusal only its "
        "larger values are left, so some tokens are never drawn. The last uniform is for this draw.",
        uniform_used_twice=(USED, "drawn(weights, uniforms.gather(1, count.clamp(max=max(k - 1, 0)))[:, 0])"),
        uniform_used_twice__the_first=(USED, "drawn(weights, uniforms[:, 0])"),
        uniform_used_twice__after_a_refusal=(USED, "drawn(weights, uniforms.gather(1, count)[:, 0])")),
    *edits("A refused token is replaced by a draw from p. Tokens to which p gives more are then drawn too rarely. "
        "Draw from max(p - q, 0): what q lacks of p.", residual_is_p=(RESIDUAL, "p[:k]")),
    *edits("A refused token is drawn from q, q - p or |p - q|. Where q is above p, nothing is missing: take "
        "max(p - q, 0).", residual_of_q=(RESIDUAL, "q"), residual_of_q__reversed=(RESIDUAL, "(q - p[:k]).clamp(min=0)"),
        residual_of_q__absolute=(RESIDUAL, "(p[:k] - q).abs()")),
    *edits("The residual max(p - q, 0) adds up to less than 1 and was not normalised. Where the uniform is above its "
        "sum, it draws a token that has no share of it, or none at all. Divide by the sum.",
        residual_not_normalised=(EDGES, "weights.cumsum(1)"),
        residual_not_normalised__the_first=(EDGES, "weights.cumsum(1).masked_fill(uniform[:, None] > "
        "weights.sum(1, keepdim=True), 2)"), residual_not_normalised__none=("(uniform[:, None] > edges[:, :-1]).sum(1)",
        "(uniform[:, None] > weights.cumsum(1)).sum(1)")),
    *edits("The token at the end is the likeliest one and not drawn. Draw it, with the last uniform.",
        not_drawn=(USED, "weights.argmax(1)"),
        not_drawn__after_a_refusal=(USED, f"torch.where(count[:, 0] < k, weights.argmax(1), {USED})"),
        not_drawn__behind_all_guesses=(USED, f"torch.where(count[:, 0] == k, weights.argmax(1), {USED})")),
    *edits("A refused token is not replaced. Draw another one in its place from max(p - q, 0), so that every call "
        "appends one token at least.", not_replaced=(ANSWER, f"torch.where((place < count) | (count == k), {ANSWER}, "
        "none)")),
    *edits("Where all guesses are accepted, no token follows them. The step has computed p after the last guess too: "
        "draw one more from p's last row.", bonus_missing=(ANSWER, f"torch.where(place < k, {ANSWER}, none)"),
        bonus_missing__only_where_there_are_guesses=(ANSWER, f"torch.where(place < max(k, 1), {ANSWER}, none)")),
    *edits("The token after all guesses is drawn from another row, or less q. Draw it from p's last row, number k.",
        bonus_of_another_row=(LAST_ROW, "p[max(k - 1, 0)][None]"),
        bonus_of_another_row__less_q=(LAST_ROW, "(p[k:] - q[-1:].sum(0)).clamp(min=0)")),
    *edits("All accepted guesses were counted, and not only those before the first refusal. A refused guess is then "
        "appended in their place. Stop at the first refusal: a running product of the decisions does it.",
        all_accepted_counted=(COUNT, "accepted.long().sum(1)"), all_accepted_counted__nothing_left=(COUNT,
        "accepted.long().sum(1)", "(uniform[:, None] > edges[:, :-1])", "~(uniform[:, None] <= edges)")),
    *edits("The refused guess is appended, and its replacement after it. The new token takes the place of the refused "
        "one.", refused_one_kept=(ANSWER, "torch.where((place < count) | (place == count) & (count < k), padded, "
        "torch.where(place == count + (count < k).long(), new, none))")),
    *edits("Only the new token is returned. Return the accepted guesses before it too.",
        accepted_ones_missing=(ANSWER, "torch.where(place == 0, new, none)")),
    *edits("A softmax was taken of the probabilities. They are probabilities already, and each row adds up to 1.",
        softmax_of_probabilities=("place = torch.arange(k)", "place, p, q = torch.arange(k), p.softmax(1), "
        "q.softmax(1)"), softmax_of_probabilities__p=("place = torch.arange(k)",
        "place, p = torch.arange(k), p.softmax(1)")),
)  # fmt: skip


EXERCISE = Exercise(
    id="16.4", title="Accept or refuse", entries=("accept",), cases=accept_cases, oracle=told, contracts=(CONTRACT,),
    models=(model_of(told, CHANGES, (drawn, answered)),),
    hints=(
        "Go through the guesses in a loop. Compare uniforms[i] with p[i, token] / q[i, token]. At the first refusal "
        "leave the loop: what follows was guessed from a text that is not written.",
        "Two cases end a step, and both draw one token. After a refusal at place i its weights are (p[i] - "
        "q[i]).clamp(min=0). If all guesses were accepted, they are p[k]. Choose the weights, then draw once.",
        "To draw from weights: edges = weights.cumsum(0) / weights.sum(). The token is the number of edges that are "
        "below the last uniform, (uniforms[-1] > edges[:-1]).sum().",
        "Compute the residual only where a guess was refused. Where p equals q it is 0 everywhere, and dividing by its "
        "sum gives NaN; but there no guess is refused.",
    ),
    mistakes=(
        Mistake("bonus_outside", "An index is out of range. q has k rows, p has k + 1; k may be 0, a list empty.",
            when=raised("IndexError")),
        Mistake("random_numbers", "The same arguments give different answers. Take chance from `uniforms` only.",
            when=lambda case, seen, got: isinstance(got, dict) and got["calls that answer otherwise if repeated"] > 0),
        Mistake("no_answer", "Some calls give no answer: no token, more than k + 1, or tokens after one that is not "
            "the guess at its place. Stop at the first refusal. k may be 0.",
            when=lambda case, seen, got: beyond(case, seen, got)[-2] < -1e-6),
        Mistake("too_few_accepted", "Fewer guesses are accepted than the rule accepts. Where p(x) is q(x) or more, the "
            "guess x is always accepted.", when=lambda case, seen, got: beyond(case, seen, got).min() < -1e-6),
        Mistake("too_many_accepted", "More guesses are accepted than the rule accepts. The chance is p(x) / q(x), also "
            "of a copied guess: 0 where p(x) is 0.", when=lambda case, seen, got: beyond(case, seen, got).max() > 1e-6),
        Mistake("other_token_at_the_end", "As many guesses are accepted as should be, but the token at the end is not "
            "drawn so. Its weights are max(p - q, 0) in the refused guess's row, copied or not, or p's last row. Its "
            "uniform must have decided on no guess.", every=True,
            when=lambda case, seen, got: beyond(case, seen, got).abs().max() < 1e-6),
    ),
)  # fmt: skip
