"""Exercise 5.1: what generation computes with and without a cache."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake


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


def _slip(change):
    """A fingerprint: the right work (without, with, scores without, scores with), changed where there is a step."""

    def result(prompt_length, new_tokens):
        lengths = range(prompt_length, prompt_length + new_tokens)
        return change(lengths, *work_oracle(prompt_length, new_tokens)) if new_tokens else (0, 0, 0, 0)

    return result


def _squares(lengths):
    return sum(length * length for length in lengths)


def _a_step_too_many(prompt_length, new_tokens):
    """The closed form, without the case of no step."""
    last = prompt_length + new_tokens - 1
    without, _, scores, _ = work_oracle(prompt_length, new_tokens)
    return without, last, scores, pairs(last)


EXERCISE = Exercise(
    id="5.1",
    title="Work with and without a cache",
    entries=("generation_work",),
    cases=work_cases,
    oracle=work_oracle,
    hints=(
        "Write down how many tokens are known when each step begins: prompt_length, prompt_length + 1, and so on, "
        "new_tokens numbers in all. The last of them is prompt_length + new_tokens - 1.",
        "Without a cache a step over n tokens computes n keys and values, and n (n + 1) / 2 scores: the first query "
        "meets one key, the last one n.",
        "With a cache each of these tokens is run over once. So keys and values are as many as the last step's tokens. "
        "And the scores? The query at position i meets i + 1 keys, whichever step it belongs to.",
        "`lengths = range(prompt_length, prompt_length + new_tokens)`; the results are `sum(lengths)`, `lengths[-1]`, "
        "`sum(n * (n + 1) // 2 for n in lengths)`, and `n * (n + 1) // 2` of the last length. Without a step, zeros.",
    ),
    mistakes=(
        Mistake(
            "last_token_run",
            "One token too many is counted in every step. The first step runs over the prompt alone, and the last "
            "token generated is never run over: nothing is asked after it.",
            result=_slip(lambda lengths, *right: work_oracle(lengths[0] + 1, len(lengths))),
        ),
        Mistake(
            "last_token_stored",
            "With a cache one token too many is counted: prompt and new tokens together. The last token generated is "
            "never run over, so it leaves no key, and its query meets none.",
            result=_slip(lambda lengths, *right: (right[0], lengths[-1] + 1, right[2], pairs(lengths[-1] + 1))),
        ),
        Mistake(
            "one_step_too_many",
            "There is one step too many. The run over the prompt already ends with a new token, so new_tokens steps "
            "are enough, the first one included.",
            result=(
                lambda prompt_length, new_tokens: work_oracle(prompt_length, new_tokens + 1),
                _slip(lambda lengths, *right: work_oracle(lengths[0], len(lengths) + 1)),
            ),
        ),
        Mistake(
            "values_counted",
            "The values were counted along with the keys. The first two results are keys alone; there are as many "
            "values.",
            result=_slip(lambda lengths, without, cached, *scores: (2 * without, 2 * cached, *scores)),
        ),
        Mistake(
            "order",
            "The four numbers are right, in another order. First the keys, without and with a cache, then the scores.",
            result=_slip(lambda lengths, without, cached, scores, asked: (without, scores, cached, asked)),
        ),
        Mistake(
            "prompt_ignored",
            "The prompt is missing. The first step runs over all of it, and without a cache so does every later one.",
            result=_slip(lambda lengths, *right: work_oracle(1, len(lengths))),
        ),
        Mistake(
            "prompt_free",
            "With a cache only the new tokens are counted. The prompt's keys and values are computed too, once, in the "
            "first step. The last new token's are not.",
            result=(
                *(
                    _slip(lambda lengths, *right, less=less: (right[0], len(lengths) - less, *right[2:]))
                    for less in (0, 1)
                ),
                _slip(lambda lengths, *right: (right[0], len(lengths), right[2], sum(lengths))),  # nor its scores
            ),
        ),
        Mistake(
            "not_causal",
            "The scores are counted as n² for a run over n tokens. A query meets only the keys up to its own position: "
            "n (n + 1) / 2.",
            result=_slip(
                lambda lengths, without, cached, *scores: (
                    without,
                    cached,
                    _squares(lengths),
                    lengths[0] ** 2 + sum(lengths[1:]),
                )
            ),
        ),
        Mistake(
            "not_causal_without",
            "Without a cache the scores are counted as n² for a run over n tokens. A query meets only the keys up to "
            "its own position: n (n + 1) / 2.",
            result=_slip(lambda lengths, without, cached, _, scores: (without, cached, _squares(lengths), scores)),
        ),
        Mistake(
            "not_causal_with",
            "With a cache the prompt's scores are counted as n². A query meets only the keys up to its own position, "
            "in the first step too: n (n + 1) / 2.",
            result=_slip(lambda lengths, *right: (*right[:3], lengths[0] ** 2 + sum(lengths[1:]))),
        ),
        Mistake(
            "newest_query_only",
            "Without a cache the scores of the newest query alone are counted. The whole sequence runs again, and with "
            "it every earlier query.",
            result=(
                _slip(lambda lengths, without, cached, _, scores: (without, cached, without, scores)),
                _slip(lambda lengths, without, cached, *scores: (without, cached, without, without)),
            ),
        ),
        Mistake(
            "new_keys_forgotten",
            "With a cache the later queries are taken to meet the prompt's keys only. The cache grows: each meets the "
            "keys of the new tokens before it, and its own.",
            result=_slip(lambda lengths, *right: (*right[:3], pairs(lengths[0]) + (len(lengths) - 1) * lengths[0])),
        ),
        Mistake(
            "own_key_forgotten",
            "With a cache the newest query is taken to meet only the keys that were stored before it. It meets its own "
            "key as well.",
            result=_slip(lambda lengths, *right: (*right[:3], right[3] - (len(lengths) - 1))),
        ),
        Mistake(
            "prefill_not_scored",
            "With a cache the first step is counted as one query. It runs over the whole prompt, and each of the "
            "prompt's tokens is a query: prompt_length (prompt_length + 1) / 2 scores.",
            result=_slip(lambda lengths, *right: (*right[:3], sum(lengths))),
        ),
        Mistake(
            "no_step",
            "With no new token there is no step, and nothing is computed: four zeros. The closed form counts one.",
            result=_a_step_too_many,
        ),
    ),
)
