"""Exercise 5.1: what generation computes with and without a cache."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract


def pairs(length: int) -> int:
    """Scores of a causal run over `length` tokens: query i meets i + 1 keys."""
    return length * (length + 1) // 2


def generation_work(prompt_length, new_tokens):
    """Keys computed without and with a cache, and scores without and with one."""
    steps, first = new_tokens, prompt_length
    if not steps:
        return 0, 0, 0, 0
    lengths = range(first, first + steps)  # tokens known as each step begins
    without, scores = sum(lengths), sum(map(pairs, lengths))
    stored = first + steps - 1
    later = range(first + 1, stored + 1)  # keys that each later query meets
    asked = pairs(first) + sum(later)
    return without, stored, scores, asked


def work_cases(draw):
    prompt, new = draw.integer(3, 900), draw.integer(3, 900)
    return [
        Case("100 tokens after a prompt of one", (1, 100)),
        Case("one token after a prompt of 7", (7, 1)),
        Case("two tokens after a prompt of 4", (4, 2)),
        Case("no new token", (12, 0)),
        Case(f"{new} tokens after a prompt of {prompt}", (prompt, new)),
        Case("1,000 tokens after a prompt of 30,000", (30_000, 1000)),
    ]


SCORES, SQUARES = "sum(map(pairs, lengths))", "sum(n * n for n in lengths)"
ASKED = "pairs(first) + sum(later)"
CHANGES = (
    *edits("The prompt is missing. The first step runs over all of it, and without a cache so does every later one.",
        prompt_ignored=("new_tokens, prompt_length", "new_tokens, 1")),
    *edits("One token too many is counted in every step. The first step runs over the prompt alone, and the last "
        "token generated is never run, because no token is wanted after it.",
        last_token_run=("new_tokens, prompt_length", "new_tokens, prompt_length + 1")),
    *edits("Without a cache one token too many is counted in every step. The first step runs over the prompt alone, "
        "and the last token generated is never run over.",
        last_token_run__without=("range(first, first + steps)", "range(first + 1, first + 1 + steps)")),
    *edits("There is one step too many. The run over the prompt already ends with a new token, so new_tokens steps "
        "are enough, the first one included.", one_step_too_many=("lengths =", "steps += 1\nlengths ="),
        one_step_too_many__none_for_none=("= new_tokens", "= new_tokens + 1")),
    *edits("With a cache one token too many is counted: prompt and new tokens together. The last token generated is "
        "never run, so it has no key and no scores.", last_token_stored=("first + steps - 1", "first + steps")),
    *edits("With a cache one key too many is counted: prompt_length + new_tokens. The last token generated is never "
        "run, so it has no key.", last_key_stored=("return without", "stored += 1\nreturn without")),
    *edits("With a cache only the new tokens are counted. The prompt's keys and values are computed too, once, in the "
        "first step. The last new token's are not.", prompt_free=("return without", "stored = steps\nreturn without"),
        prompt_free__decode_alone=("return without", "stored = steps - 1\nreturn without"),
        prompt_free__nor_scored=(ASKED, "without", "return without", "stored = steps\nreturn without")),
    *edits("With a cache the first step is counted as one query. It runs over the whole prompt, and each of the "
        "prompt's tokens is a query: prompt_length (prompt_length + 1) / 2 scores.",
        prefill_not_scored=(ASKED, "without")),
    *edits("The scores are counted as n² for a run over n tokens. A query is compared only with the keys up to its "
        "own position: n (n + 1) / 2.", not_causal__in_both=(SCORES, SQUARES, ASKED, "stored * stored"),
        not_causal=(SCORES, SQUARES, "pairs(first)", "first * first")),
    *edits("The scores are counted as n (n - 1) / 2 for a run over n tokens. The query at position i is compared with "
        "its own key as well, i + 1 in all: n (n + 1) / 2.",
        own_key_forgotten_in_all=(SCORES, "sum(map(pairs, lengths)) - sum(lengths)", ASKED,
            "pairs(first) + sum(later) - stored")),
    *edits("With a cache the scores of every step are counted for all queries so far. Only the newest token is a "
        "query after the first step: each query is compared with its keys once.",
        asked_anew_in_every_step=(ASKED, "scores")),
    *edits("Without a cache the keys of the last step alone are counted. Every step computes the keys of all its "
        "tokens: add the steps up.", last_step_alone=("sum(lengths)", "lengths[-1]")),
    *edits("With a cache the prompt's keys are counted twice. They are computed in the first step, and stay.",
        prompt_counted_twice=("return without", "stored += prompt_length\nreturn without")),
    *edits("Without a cache the scores are counted as n² for a run over n tokens. A query is compared only with the "
        "keys up to its own position: n (n + 1) / 2.", not_causal_without=(SCORES, SQUARES)),
    *edits("With a cache the prompt's scores are counted as n². A query is compared only with the keys up to its own "
        "position, in the first step too: n (n + 1) / 2.", not_causal_with=("pairs(first)", "first * first")),
    *edits("Without a cache the scores of the newest query alone are counted. The whole sequence runs again, and with "
        "it every earlier query.", newest_query_only=(SCORES, "sum(lengths)"),
        newest_query_only__with_too=(SCORES, "sum(lengths)", ASKED, "without")),
    *edits("With a cache the later queries are compared with the prompt's keys only. The cache grows: each is also "
        "compared with the keys of the new tokens before it, and with its own.",
        new_keys_forgotten=("sum(later)", "len(later) * first")),
    *edits("With a cache the newest query is compared only with the keys that were stored before it. It is compared "
        "with its own key as well.", own_key_forgotten=(ASKED, "pairs(first) + sum(later) - len(later)")),
    *edits("The values are counted along with the keys. The first two results count keys only; there are as many "
        "values.", values_counted=("return without", "without, stored = 2 * without, 2 * stored\nreturn without")),
    *edits("With no new token there is no step, and nothing is computed: four zeros. Your formula counts one.",
        no_step=("if not steps:", "if False:", "sum(later)", "(sum(later) if steps else -first)"),
        no_step__the_prompt=("0, 0, 0, 0", "0, prompt_length, 0, pairs(prompt_length)")),
    *edits("The four numbers stand in another order. First come the keys, without and with a cache, then the scores.",
        order=("stored, scores, asked", "scores, stored, asked")),
)  # fmt: skip

CONTRACT = Contract(
    lambda draw, *, prompt_length, new_tokens: (prompt_length, new_tokens),
    choices={"prompt_length": (1, 2, 37, 2048), "new_tokens": (0, 1, 3, 200)},
    says={"prompt_length": "prompt_length is at least 1", "new_tokens": "new_tokens may be 0"},
    most=8,
)


EXERCISE = Exercise(
    id="5.1",
    title="Work with and without a cache",
    entries=("generation_work",),
    cases=work_cases,
    oracle=generation_work,
    contracts=(CONTRACT,),
    models=(model_of(generation_work, CHANGES),),
    hints=(
        "How many tokens are known when each step begins? prompt_length, then prompt_length + 1, and so on: "
        "new_tokens numbers, of which the last is prompt_length + new_tokens - 1.",
        "Without a cache a step over n tokens computes n keys and n values, and n (n + 1) / 2 scores: the first query "
        "is compared with one key, the last with n.",
        "With a cache each of these tokens is run once, so there are as many keys as tokens in the last step. For the "
        "scores it does not matter which step a query belongs to: the query at position i is compared with i + 1 "
        "keys.",
        "`lengths = range(prompt_length, prompt_length + new_tokens)`; the results are `sum(lengths)`, `lengths[-1]`, "
        "`sum(n * (n + 1) // 2 for n in lengths)`, and `n * (n + 1) // 2` of the last length. Without a step, zeros.",
    ),
)
