"""Exercise 5.6: greedy generation with a cache, judged on small random decoders.

The driver plays the model: it offers the parts of a decoder as methods, and counts the tokens that are run through it.
The same driver, with the generations below in place of an answer, gives the oracle and the fingerprints.
"""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake

LAYERS, WIDTH, QUERY_HEADS, KEY_HEADS, HEAD_DIM, VOCABULARY = 2, 32, 4, 2, 8, 48
CLEAR = 0.01  # by how much the likeliest token must lead, so that no rounding decides


def on_a_model(functions, weights, prompt, new_tokens):
    """Driver: a decoder made of `weights`, handed to `generate_cached`; returns the tokens and what ran in vain."""
    runs = [0] * len(weights["layers"])

    def norm(x):
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5)

    def turned(x, positions):
        half = x.shape[-1] // 2
        angles = positions[:, None].to(x.dtype) * 50.0 ** (-torch.arange(half, dtype=x.dtype) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )

    class Model:
        layers = len(weights["layers"])

        def embed(self, tokens):
            if tokens.dim() != 1 or tokens.is_floating_point():
                raise ValueError(f"embed takes int64 tokens, [tokens]; it got {list(tokens.shape)}, {tokens.dtype}")
            return weights["embedding"][tokens]

        def project(self, layer, x, positions):
            if x.dim() != 2 or tuple(positions.shape) != (x.shape[0],):
                raise ValueError(
                    f"project takes x [tokens, width] and a position for each token, [tokens]; it was given "
                    f"{list(x.shape)} and {list(positions.shape)}"
                )
            runs[layer] += x.shape[0]
            x, part = norm(x), weights["layers"][layer]
            query, key, value = (
                (x @ part[name]).view(x.shape[0], -1, weights["head_dim"]).transpose(0, 1)
                for name in ("query", "key", "value")
            )
            return turned(query, positions), turned(key, positions), value

        def attend(self, query, key, value):
            group, late = query.shape[0] // key.shape[0], key.shape[1] - query.shape[1]
            if key.shape != value.shape:
                raise ValueError(f"attend was given keys {list(key.shape)} and values {list(value.shape)}")
            if late < 0:
                raise ValueError(f"attend was given {query.shape[1]} queries and only {key.shape[1]} keys")
            key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
            scores = query @ key.transpose(1, 2) / weights["head_dim"] ** 0.5
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + late)
            return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ value

        def finish(self, layer, x, attended):
            part = weights["layers"][layer]
            x = x + attended.transpose(0, 1).reshape(x.shape[0], -1) @ part["output"]
            return x + torch.tanh(norm(x) @ part["up"]) @ part["down"]

        def logits(self, x):
            return norm(x) @ weights["output"]

    tokens = functions["generate_cached"](Model(), prompt, new_tokens)
    if not isinstance(tokens, torch.Tensor):
        raise TypeError(f"generate_cached returned a {type(tokens).__name__}; return a tensor, int64 [new_tokens]")
    # Each token has to run once; the last one need not, and may.
    return {"tokens": tokens, "tokens_run_again": max(0, max(runs) - len(prompt) - new_tokens)}


# ----------------------------------------------------------------------------- generation, and what it is confused with


def uncached(model, prompt, new_tokens, margins=None):
    """The meaning: each step runs over everything. `margins` collects by how much each token led."""
    tokens = prompt
    for _ in range(new_tokens):
        x = model.embed(tokens)
        for layer in range(model.layers):
            x = model.finish(layer, x, model.attend(*model.project(layer, x, torch.arange(len(tokens)))))
        logits = model.logits(x[-1:])[0]
        if margins is not None:
            first, second = logits.topk(2).values.tolist()
            margins.append(first - second)
        tokens = torch.cat([tokens, logits.argmax()[None]])
    return tokens[len(prompt) :]


def with_cache(
    model,
    prompt,
    new_tokens,
    *,
    shift=0,
    restart=False,
    again=False,
    keep=True,
    shared=False,
    row=-1,
    batch_positions=True,
    start=None,
    advance=1,
    asked=True,
):
    """Generation with a cache; the options are slips.

    shift: added to the positions after the prompt. restart: each later token stands at position 0.
    again: the prompt's last token is run a second time, as the first later one. keep: later tokens stay in the cache.
    shared: one cache for all layers. row: whose logits choose the first token. batch_positions: the prompt's tokens
    stand at 0, 1, 2 ...; else all at 0. start: the first later position; None for the prompt's length. advance: from
    each later position to the next. asked: later tokens see the cache; else themselves alone.
    """
    caches = [[] for _ in range(1 if shared else model.layers)]

    def run(tokens, positions, stay):
        x = model.embed(tokens)
        for layer in range(model.layers):
            query, key, value = model.project(layer, x, positions)
            cache = caches[0 if shared else layer]
            held = [*cache, (key, value)] if asked else [(key, value)]
            if stay:
                cache.append((key, value))
            x = model.finish(layer, x, model.attend(query, *(torch.cat(pair, dim=1) for pair in zip(*held))))
        return model.logits(x)

    logits = run(prompt, torch.arange(len(prompt)) * int(batch_positions), True)[row]
    position, found = len(prompt) if start is None else start, []
    if again:
        position, token = position - 1, prompt[-1]
    else:
        token = logits.argmax()
        found.append(token)
    while len(found) < new_tokens:
        place = torch.zeros(1, dtype=torch.int64) if restart else torch.tensor([position + shift])
        token = run(token[None], place, keep)[-1].argmax()
        found.append(token)
        position += advance
    return torch.stack(found)


def everything_into_the_cache(model, prompt, new_tokens):
    """The slip: a cache, and the whole sequence run and stored at every step."""
    caches, tokens = [[] for _ in range(model.layers)], prompt
    for _ in range(new_tokens):
        x, positions = model.embed(tokens), torch.arange(len(tokens))
        for layer, cache in enumerate(caches):
            query, key, value = model.project(layer, x, positions)
            cache.append((key, value))
            x = model.finish(layer, x, model.attend(query, *(torch.cat(pair, dim=1) for pair in zip(*cache))))
        tokens = torch.cat([tokens, model.logits(x[-1:]).argmax(dim=-1)])
    return tokens[len(prompt) :]


def every_row_run_on(model, prompt, new_tokens):
    """The slip: the likeliest token behind each token of the prompt is taken for new, and all of them are run."""
    caches, tokens, position, found = [[] for _ in range(model.layers)], prompt, 0, []
    for _ in range(new_tokens):
        x, positions = model.embed(tokens), torch.arange(position, position + len(tokens))
        for layer, cache in enumerate(caches):
            query, key, value = model.project(layer, x, positions)
            cache.append((key, value))
            x = model.finish(layer, x, model.attend(query, *(torch.cat(pair, dim=1) for pair in zip(*cache))))
        position += len(tokens)
        tokens = model.logits(x).argmax(dim=-1)
        found.append(tokens[-1])
    return torch.stack(found)


def _prompt_and_all(model, prompt, new_tokens):
    return torch.cat([prompt, with_cache(model, prompt, new_tokens)])


def _first_dropped(model, prompt, new_tokens):
    return with_cache(model, prompt, new_tokens + 1)[1:]


def _generated(function, **slips):
    """What a generation gives on a case: the tokens, and none run in vain unless the whole sequence was."""

    def result(weights, prompt, new_tokens):
        return on_a_model({"generate_cached": lambda *args: function(*args, **slips)}, weights, prompt, new_tokens)

    return result


def generation_oracle(weights, prompt, new_tokens):
    return {**_generated(uncached)(weights, prompt, new_tokens), "tokens_run_again": 0}


# ------------------------------------------------------------------------------------------------------------ the cases


def random_weights(draw):
    """A decoder whose attention looks far back and whose output is not its input again."""

    def matrix(inputs, outputs, size=1.0):
        return draw.normal(inputs, outputs, scale=size * inputs**-0.5)

    layers = [
        {
            "query": matrix(WIDTH, QUERY_HEADS * HEAD_DIM, 1.5),
            "key": matrix(WIDTH, KEY_HEADS * HEAD_DIM, 1.5),
            "value": matrix(WIDTH, KEY_HEADS * HEAD_DIM, 2.0),
            "output": matrix(QUERY_HEADS * HEAD_DIM, WIDTH, 2.0),
            "up": matrix(WIDTH, 2 * WIDTH),
            "down": matrix(2 * WIDTH, WIDTH, 1.5),
        }
        for _ in range(LAYERS)
    ]
    return {
        "embedding": draw.normal(VOCABULARY, WIDTH),
        "layers": layers,
        "output": matrix(WIDTH, VOCABULARY, 3.0),
        "head_dim": HEAD_DIM,
    }


def generation_cases(draw):
    cases = []
    for name, prompt_length, new_tokens in (
        ("6 tokens after a prompt of 4", 4, 6),
        ("12 tokens after a prompt of one", 1, 12),
        ("one token after a prompt of 9", 9, 1),
        ("16 tokens after a prompt of 17", 17, 16),
        ("2 tokens after a prompt of 2", 2, 2),
    ):
        while True:  # until no token is chosen by a hair, which a rounding could split either way
            weights, prompt, margins = random_weights(draw), draw.integers(prompt_length, low=0, high=VOCABULARY), []
            _generated(uncached, margins=margins)(weights, prompt, new_tokens)
            if min(margins) > CLEAR:
                break
        cases.append(Case(name, (weights, prompt, new_tokens), driver=on_a_model))
    return cases


EXERCISE = Exercise(
    id="5.6",
    title="Greedy generation with a cache",
    entries=("generate_cached",),
    cases=generation_cases,
    oracle=generation_oracle,
    hints=(
        "One function does both jobs: run some tokens at some positions through all layers, put their keys and values "
        "into the cache, and return the logits of the last one. The prompt is its first call; then come calls with a "
        "single token.",
        "The cache is a list with an entry for each layer: keys and values [KV heads, tokens so far, head_dim]. "
        "`torch.cat([old, new], dim=1)` will do here; a preallocated buffer is better.",
        "The prompt's tokens stand at positions 0 to len(prompt) - 1. At which position does the first new token "
        "stand, when it is run?",
        "At len(prompt). It is run at the second step, whose logits choose the second new token. The last new token "
        "need not be run at all.",
        "`attend(query, key, value)` gets the step's queries and all keys and values of that layer so far, the new "
        "ones at the end.",
    ),
    mistakes=(
        Mistake(
            "positions_restart",
            "After the prompt every token was given position 0. A single token does not stand at the beginning: its "
            "position is the number of tokens before it.",
            result=_generated(with_cache, restart=True),
        ),
        Mistake(
            "positions_count_steps",
            "After the prompt the positions count the steps, and leave out the prompt. A token's position is the "
            "number of tokens before it: the first new token stands at len(prompt).",
            result=(_generated(with_cache, start=1), _generated(with_cache, start=0)),
        ),
        Mistake(
            "position_stands_still",
            "After the prompt every token was given the position len(prompt). That is the first new token's; the next "
            "one stands at len(prompt) + 1.",
            result=_generated(with_cache, advance=0),
        ),
        Mistake(
            "every_row_run_on",
            "A step over the prompt gives logits for each of its tokens, and the likeliest token of every row was run "
            "on. Only the last row's is new: logits(x[-1:]).",
            result=_generated(every_row_run_on),
        ),
        Mistake(
            "cache_not_asked",
            "After the prompt each token saw itself alone. `attend` takes all keys and values of the layer so far, not "
            "only those that `project` has just given.",
            result=_generated(with_cache, asked=False),
        ),
        Mistake(
            "one_token_too_many",
            "One token too many was returned. The prompt's run already chooses the first of new_tokens.",
            result=_generated(lambda model, prompt, new_tokens: with_cache(model, prompt, new_tokens + 1)),
        ),
        Mistake(
            "position_too_late",
            "After the prompt every position is one too large. Positions count from 0: the first new token stands at "
            "len(prompt), not behind it. Was the position taken after the token had been added?",
            result=_generated(with_cache, shift=1),
        ),
        Mistake(
            "position_too_early",
            "After the prompt every position is one too small, and the first new token shares the position of the "
            "prompt's last one. It stands at len(prompt).",
            result=_generated(with_cache, shift=-1),
        ),
        Mistake(
            "last_prompt_token_twice",
            "The prompt's last token was run twice, with the prompt and then by itself, so its key and value stand in "
            "the cache twice. The logits of the prompt's run already choose the first new token.",
            result=_generated(with_cache, again=True),
        ),
        Mistake(
            "last_prompt_token_twice_later",
            "The prompt's last token was run twice, the second time one position later. The logits of the prompt's run "
            "already choose the first new token.",
            result=_generated(with_cache, again=True, shift=1),
        ),
        Mistake(
            "new_tokens_not_kept",
            "Only the prompt is in the cache: each new token sees the prompt and itself, and none of the new tokens "
            "between. Keep their keys and values too.",
            result=_generated(with_cache, keep=False),
        ),
        Mistake(
            "one_cache_for_all_layers",
            "All layers share one cache, so a layer sees the keys of another. Each has its own. "
            "(`[[]] * layers` is one list many times.)",
            result=_generated(with_cache, shared=True),
        ),
        Mistake(
            "first_logits",
            "The first new token was chosen by the logits of the prompt's first token. The last one's say what follows "
            "the prompt: logits(x)[-1].",
            result=_generated(with_cache, row=0),
        ),
        Mistake(
            "prompt_at_one_position",
            "All tokens of the prompt were given position 0. They stand at 0, 1, 2 and so on: "
            "torch.arange(len(prompt)).",
            result=_generated(with_cache, batch_positions=False),
        ),
        Mistake(
            "prompt_returned",
            "The prompt was returned along with what follows it. Return the new tokens alone.",
            result=_generated(_prompt_and_all),
        ),
        Mistake(
            "first_token_dropped",
            "The first new token is missing and one too many stands at the end. It is the one that the prompt's run "
            "chooses: keep it, then run it.",
            result=_generated(_first_dropped),
        ),
        Mistake(
            "everything_into_the_cache",
            "Every step ran the whole sequence and stored it again, so the cache holds earlier tokens many times. "
            "After the prompt run the newest token alone.",
            result=_generated(everything_into_the_cache),
        ),
        Mistake(
            "whole_sequence_again",
            "The tokens are right, and every step ran over the whole sequence: that is generation without a cache. "
            "After the prompt run the newest token alone.",
            result=_generated(uncached),
        ),
    ),
)
