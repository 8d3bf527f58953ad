"""Exercise 5.1: what generation computes with and without a cache."""

from __future__ import annotations

from course_lib.checker import Case, Exercise
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.model import Model, Slip


def pairs(length: int) -> int:
    """Scores of a causal run over `length` tokens: query i meets i + 1 keys."""
    return length * (length + 1) // 2


def work_oracle(prompt_length, new_tokens):
    if new_tokens == 0:
        return 0, 0, 0, 0
    lengths = range(prompt_length, prompt_length + new_tokens)  # tokens known as each step begins
    return sum(lengths), lengths[-1], sum(map(pairs, lengths)), pairs(lengths[-1])


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


def counted(s, prompt_length, new_tokens):
    """A model's `compute`: the work as it is counted with these slips."""
    steps = new_tokens + (1 if s("one_step_too_many__none_for_none") else 0)
    if not steps:
        if s("no_step__the_prompt"):
            return 0, prompt_length, 0, pairs(prompt_length)
        if not s("no_step"):
            return 0, 0, 0, 0
    steps += 1 if s("one_step_too_many") else 0
    first = (1 if s("prompt_ignored") else prompt_length) + (1 if s("last_token_run") else 0)
    lengths = range(first, first + steps)  # tokens that each step is taken to run over
    stored = first + steps - 1 + (1 if s("last_token_stored") else 0)
    if s("last_token_run__without"):
        lengths = range(first + 1, first + 1 + steps)
    without, scores = sum(lengths), sum(map(pairs, lengths))
    if s("last_step_alone"):
        without = lengths[-1]
    if s("not_causal", "not_causal__in_both", "not_causal_without"):
        scores = sum(length * length for length in lengths)
    if s("own_key_forgotten_in_all"):
        scores -= without
    if s("newest_query_only", "newest_query_only__with_too"):
        scores = without
    later = range(first + 1, stored + 1)  # keys that each later query meets
    asked = pairs(first) + sum(later) if steps else pairs(stored)
    if s("not_causal", "not_causal_with"):
        asked = first * first + sum(later)
    if s("new_keys_forgotten"):
        asked = pairs(first) + len(later) * first
    if s("not_causal__in_both"):
        asked = stored * stored
    if s("asked_anew_in_every_step"):
        asked = scores
    if s("own_key_forgotten"):
        asked -= len(later)
    if s("own_key_forgotten_in_all"):
        asked -= stored
    if s("prefill_not_scored", "prompt_free__nor_scored", "newest_query_only__with_too"):
        asked = without
    if s("prompt_free", "prompt_free__nor_scored"):
        stored = steps
    if s("prompt_free__decode_alone"):
        stored = steps - 1
    if s("last_key_stored"):
        stored += 1
    if s("prompt_counted_twice"):
        stored += prompt_length
    if s("values_counted"):
        without, stored = 2 * without, 2 * stored
    return (without, scores, stored, asked) if s("order") else (without, stored, scores, asked)


SLIPS = (
    Slip(
        "prompt_ignored",
        "The prompt is missing. The first step runs over all of it, and without a cache so does every later one.",
    ),
    Slip(
        "last_token_run",
        "One token too many is counted in every step. The first step runs over the prompt alone, and the last token "
        "generated is never run, because no token is wanted after it.",
    ),
    Slip(
        "last_token_run__without",
        "Without a cache one token too many is counted in every step. The first step runs over the prompt alone, and "
        "the last token generated is never run over.",
    ),
    *(
        Slip(
            name,
            "There is one step too many. The run over the prompt already ends with a new token, so new_tokens "
            "steps are enough, the first one included.",
        )
        for name in ("one_step_too_many", "one_step_too_many__none_for_none")
    ),
    Slip(
        "last_token_stored",
        "With a cache one token too many is counted: prompt and new tokens together. The last token generated is "
        "never run, so it has no key and no scores.",
    ),
    Slip(
        "last_key_stored",
        "With a cache one key too many is counted: prompt_length + new_tokens. The last token generated is never run, "
        "so it has no key.",
    ),
    *(
        Slip(
            name,
            "With a cache only the new tokens are counted. The prompt's keys and values are computed too, once, "
            "in the first step. The last new token's are not.",
        )
        for name in ("prompt_free", "prompt_free__decode_alone", "prompt_free__nor_scored")
    ),
    Slip(
        "prefill_not_scored",
        "With a cache the first step is counted as one query. It runs over the whole prompt, and each of the "
        "prompt's tokens is a query: prompt_length (prompt_length + 1) / 2 scores.",
    ),
    *(
        Slip(
            name,
            "The scores are counted as n² for a run over n tokens. A query is compared only with the keys up to its "
            "own position: n (n + 1) / 2.",
        )
        for name in ("not_causal__in_both", "not_causal")
    ),
    Slip(
        "own_key_forgotten_in_all",
        "The scores are counted as n (n - 1) / 2 for a run over n tokens. The query at position i is compared with its "
        "own key as well, i + 1 in all: n (n + 1) / 2.",
    ),
    Slip(
        "asked_anew_in_every_step",
        "With a cache the scores of every step are counted for all queries so far. Only the newest token is a query "
        "after the first step: each query is compared with its keys once.",
    ),
    Slip(
        "last_step_alone",
        "Without a cache the keys of the last step alone are counted. Every step computes the keys of all its tokens: "
        "add the steps up.",
    ),
    Slip(
        "prompt_counted_twice",
        "With a cache the prompt's keys are counted twice. They are computed in the first step, and stay.",
    ),
    Slip(
        "not_causal_without",
        "Without a cache the scores are counted as n² for a run over n tokens. A query is compared only with the keys "
        "up to its own position: n (n + 1) / 2.",
    ),
    Slip(
        "not_causal_with",
        "With a cache the prompt's scores are counted as n². A query is compared only with the keys up to its own "
        "position, in the first step too: n (n + 1) / 2.",
    ),
    *(
        Slip(
            name,
            "Without a cache the scores of the newest query alone are counted. The whole sequence runs again, and"
            " with it every earlier query.",
        )
        for name in ("newest_query_only", "newest_query_only__with_too")
    ),
    Slip(
        "new_keys_forgotten",
        "With a cache the later queries are compared with the prompt's keys only. The cache grows: each is also "
        "compared with the keys of the new tokens before it, and with its own.",
    ),
    Slip(
        "own_key_forgotten",
        "With a cache the newest query is compared only with the keys that were stored before it. It is compared with "
        "its own key as well.",
    ),
    Slip(
        "values_counted",
        "The values are counted along with the keys. The first two results count keys only; there are as many values.",
    ),
    *(
        Slip(
            name,
            "With no new token there is no step, and nothing is computed: four zeros. Your formula counts one.",
        )
        for name in ("no_step", "no_step__the_prompt")
    ),
    Slip(
        "order",
        "The four numbers stand in another order. First come the keys, without and with a cache, then the scores.",
    ),
)

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
    oracle=work_oracle,
    contracts=(CONTRACT,),
    models=(Model(counted, SLIPS),),
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
