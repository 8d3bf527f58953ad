"""Exercise 5.6: greedy generation with a cache, judged on small random decoders.

The driver plays the model: it offers the parts of a decoder as methods, and counts the tokens that are run through it.
The same driver, with the generations below in place of an answer, gives the oracle and the model.
"""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of

WIDTH, QUERY_HEADS, KEY_HEADS, HEAD_DIM, VOCABULARY = 32, 4, 2, 8, 48
LONG = 70  # tokens of a long prompt: more than 64
CLEAR = 0.01  # by how much the likeliest token must lead, so that no rounding decides
BY_A_HAIR = 0.001  # a lead that two right programs may round away: logits of ±10 in float32, after four layers


def on_a_model(functions, weights, prompt, new_tokens, calls=1):
    """Driver: a decoder made of `weights`, handed to `generate_cached`; returns the tokens and how many ran in vain."""
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

    told, model = [], Model()
    for _ in range(calls):
        told.append(functions["generate_cached"](model, prompt.clone(), new_tokens))
        if not isinstance(told[-1], torch.Tensor):
            kind = type(told[-1]).__name__
            raise TypeError(f"generate_cached returned a {kind}; return a tensor, int64 [new_tokens]")
    # Each token has to run once, but for the last: no token is wanted after it.
    in_vain = max(0, max(runs) - calls * (len(prompt) + new_tokens - 1))
    return {"tokens": told[0] if calls == 1 else torch.cat(told), "tokens_run_in_vain": in_vain}


# ----------------------------------------------------------------------------- generation, and what it is confused with


def lead(logits):
    """By how much the likeliest token leads, in the row where it leads least."""
    first, second = logits.topk(2).values.unbind(dim=-1)
    return float((first - second).min())


def uncached(model, prompt, new_tokens, margins=None):
    """The meaning: each step runs over everything. `margins` collects by how much each token led."""
    tokens = prompt
    for _ in range(new_tokens):
        x = model.embed(tokens)
        for layer in range(model.layers):
            x = model.finish(layer, x, model.attend(*model.project(layer, x, torch.arange(len(tokens)))))
        logits = model.logits(x[-1:])
        if margins is not None:
            margins.append(lead(logits))
        tokens = torch.cat([tokens, logits.argmax(dim=-1)])
    return tokens[len(prompt) :]


def with_cache(model, prompt, new_tokens, leads):
    """Generation with a cache. `leads` collects by how much the tokens led that were chosen."""
    caches = [[] for _ in range(model.layers)]
    tokens, places = prompt, torch.arange(len(prompt))
    found = []
    for _ in range(new_tokens):
        x = model.embed(tokens)
        for layer in range(model.layers):
            query, key, value = model.project(layer, x, places)
            cache = caches[layer]
            held = [*cache, (key, value)]
            cache.append(held[-1])
            keys = torch.cat([key for key, _ in held], dim=1)
            values = torch.cat([value for _, value in held], dim=1)
            x = model.finish(layer, x, model.attend(query, keys, values))
        logits = model.logits(x)
        leads.append(lead(logits[-1:]))
        chosen = logits.argmax(dim=-1)
        found.append(chosen[-1])
        tokens, places = found[-1][None], torch.tensor([len(prompt) + len(found) - 1])
    return torch.stack(found)


def generated(weights, prompt, new_tokens, calls=1):
    """What the driver tells of a generation with a cache; None where a rounding may decide."""
    leads: list[float] = []
    functions = {"generate_cached": lambda *call: with_cache(*call, leads)}
    told = on_a_model(functions, weights, prompt, new_tokens, calls)
    return told if min(leads) > BY_A_HAIR else None


def generation_oracle(weights, prompt, new_tokens, calls=1, margins=None):
    """The tokens of a generation without a cache, and none run in vain."""
    told = on_a_model(
        {"generate_cached": lambda *call: uncached(*call, margins=margins)}, weights, prompt, new_tokens, calls
    )
    return {**told, "tokens_run_in_vain": 0}


def _calls_differ(case, seen, got):
    """Whether the same call gave one thing first and another later."""
    calls = case.args[3]
    if got is None or calls == 1 or len(got["tokens"]) % calls:
        return False
    told = got["tokens"].view(calls, -1)
    return not bool((told == told[0]).all())


DRAWS = ("multinomial", "exponential_", "bernoulli", "rand", "rand_like", "randint", "uniform_")  # by chance


def _run_in_vain(case, seen, got):
    """Whether the tokens are right, and were more work than they need be."""
    if got is None or not got["tokens_run_in_vain"]:
        return False
    return torch.equal(got["tokens"], generation_oracle(*case.args)["tokens"])


def with_empty_slots(keys, values, room):
    """Keys and values in a buffer with this room, whose empty slots hold zeros."""
    return (torch.nn.functional.pad(part, (0, 0, 0, max(0, room - part.shape[1]))) for part in (keys, values))


LAST, KEPT, ATTENDED = "logits[-1:]", "cache.append(held[-1])", "model.attend(query, keys, values)"
PLACE = "len(prompt) + len(found) - 1"
NEWEST = f"tokens, places = found[-1][None], torch.tensor([{PLACE}])"
EVERYTHING = "tokens, places = torch.cat([prompt, torch.stack(found)]), torch.arange(len(prompt) + len(found))"
TWICE = (
    *("range(new_tokens)", "range(new_tokens + 1)", "torch.stack(found)", "torch.stack(found[1:])"),
    *("found[-1][None]", "(found[-1][None] if len(found) > 1 else prompt[-1:])"),
)
ROOMS = {  # with room for one token less, which is never run; in the prompt's run too
    "": "(len(prompt) + new_tokens) * (len(held) > 1)",
    "__always": "len(prompt) + new_tokens",
    "__one_less": "(len(prompt) + new_tokens - 1) * (len(held) > 1)",
    "__one_less_always": "len(prompt) + new_tokens - 1",
}
CHANGES = (
    *edits(
        "The last new token was run through the model. No token is wanted after it: with the "
        "prompt's run there are new_tokens runs in all.",
        last_token_run=("range(new_tokens)", "range(new_tokens + 1)", "torch.stack(found)", "torch.stack(found[:-1])"),
    ),
    *edits(
        "The least likely token was taken: argmin where argmax belongs.",
        least_likely_taken=("model.logits(x)", "-model.logits(x)"),
    ),
    *edits(
        "The logits were taken of the embedding, which went through no layer. Take those of x after the last layer.",
        logits_of_the_embedding=("model.logits(x)", "model.logits(model.embed(tokens))"),
    ),
    *edits(
        "The text ends where token 0 is chosen. No token ends it here: new_tokens are asked for.",
        stopped_at_zero=("found.append(chosen[-1])", "found.append(chosen[-1])\nif found[-1] == 0:\n    break"),
    ),
    *edits(
        "The likeliest token was looked for in x, which has `width` numbers. `logits` makes one for each token of it.",
        likeliest_of_x=("model.logits(x)", "x"),
    ),
    *edits(
        "The last layer is not run: there are model.layers of them.",
        last_layer_left_out=("for layer in range(model.layers)", "for layer in range(model.layers - 1)"),
    ),
    *edits(
        "Every layer is finished by layer 0: finish takes the layer's own number.",
        finished_by_first_layer=("model.finish(layer", "model.finish(0"),
    ),
    *edits(
        "The prompt's last token is never run, and the first new token follows the one before it. Run the whole prompt "
        "first.",
        last_prompt_token_left_out=(
            "found = []",
            "found = []\ntokens, places = (part[: max(1, len(prompt) - 1)] for part in (prompt, places))",
        ),
    ),
    *edits(
        "The cache holds the keys twice, and no values. Keep both: (key, value).",
        keys_kept_as_values=("append(held[-1])", "append((key, key))"),
    ),
    *edits(
        "The prompt was returned along with what follows it. Return the new tokens alone.",
        prompt_returned=("torch.stack(found)", "torch.cat([prompt, torch.stack(found)])"),
    ),
    *edits(
        "One token too many was returned. The prompt's run already chooses the first of new_tokens.",
        one_token_too_many=("range(new_tokens)", "range(new_tokens + 1)"),
        one_token_too_many__for_one=("range(new_tokens)", "range(max(new_tokens, 2))"),
    ),
    *edits(
        "The first new token is missing and one too many stands at the end. It is the one that the prompt's run "
        "chooses: keep it, then run it.",
        first_token_dropped=(
            "range(new_tokens)",
            "range(new_tokens + 1)",
            "torch.stack(found)",
            "torch.stack(found[1:])",
        ),
    ),
    *edits(
        "The first new token was chosen by the logits of the prompt's first token. The last token's logits say "
        "what follows the prompt: logits(x)[-1].",
        first_logits=("chosen[-1]", "chosen[-1 if found else 0]", LAST, "logits"),
    ),
    *edits(
        "All layers share one cache, so a layer sees the keys of another. Each has its own. (`[[]] * layers` is "
        "one list many times.)",
        one_cache_for_all_layers=("caches[layer]", "caches[0]"),
    ),
    *edits(
        "After the prompt each token was given its own value alone. `attend` takes all keys and all values of the "
        "layer so far, not only those that `project` has just given.",
        cache_not_asked=("[*cache, (key, value)]", "[(key, value)]"),
    ),
    *edits(
        "Only the prompt is in the cache: each new token sees the prompt and itself, and none of the new tokens "
        "between. Keep their keys and values too.",
        new_tokens_not_kept=(KEPT, f"if not found:\n    {KEPT}"),
    ),
    *edits(
        "A run over a single token leaves nothing in the cache: no new token's key and value is kept, nor those of a "
        "prompt of one. Every run adds to the cache.",
        new_tokens_not_kept__of_one=(KEPT, f"if len(tokens) > 1:\n    {KEPT}"),
    ),
    *edits(
        "`attend` was given the whole buffer. An empty slot holds a key of zeros, so it has a score of 0, which "
        "the softmax turns into a weight. Hand over only the slots in use.",
        **{
            f"empty_slots_seen{which}": (ATTENDED, f"model.attend(query, *with_empty_slots(keys, values, {room}))")
            for which, room in ROOMS.items()
        },
    ),
    *edits(
        "The new keys stand in front of the old ones, and the values behind them, so a key no longer belongs "
        "to its value. Put both at the end.",
        key_and_value_apart=("[key for key, _ in held]", "[key for key, _ in reversed(held)]"),
    ),
    *edits(
        "The new values stand in front of the old ones, and the keys behind them, so a key no longer belongs "
        "to its value. Put both at the end.",
        key_and_value_apart__value=("[value for _, value in held]", "[value for _, value in reversed(held)]"),
    ),
    *edits(
        "Every step ran the whole sequence and stored it again, so the cache holds earlier tokens many times. "
        "After the prompt run the newest token alone.",
        everything_into_the_cache=(NEWEST, EVERYTHING),
    ),
    *edits(
        "Every step ran over the whole sequence: that is generation without a cache. "
        "After the prompt run the newest token alone.",
        whole_sequence_again=(NEWEST, f"{EVERYTHING}\ncaches[:] = [[] for _ in caches]"),
    ),
    *edits(
        "A step over the prompt gives logits for each of its tokens, and the likeliest token of every row was run"
        " on. Only the last row's is new: logits(x[-1:]).",
        every_row_run_on=(NEWEST, "tokens, places = chosen, places + len(places)", LAST, "logits"),
    ),
    *edits(
        "The prompt's last token was run twice, with the prompt and then by itself, so its key and value stand in"
        " the cache twice. The logits of the prompt's run already choose the first new token.",
        last_prompt_token_twice=(*TWICE, PLACE, "len(prompt) + len(found) - 2"),
    ),
    *edits(
        "The prompt's last token was run twice, the second time one position later. The logits of the prompt's "
        "run already choose the first new token.",
        last_prompt_token_twice_later=TWICE,
    ),
    *edits(
        "All tokens of the prompt were given position 0. They stand at 0, 1, 2 and so on: torch.arange(len(prompt)).",
        prompt_at_one_position=("torch.arange(len(prompt))", "torch.zeros(len(prompt), dtype=torch.int64)"),
    ),
    *edits(
        "After the prompt every token was given position 0. A single token does not stand at the beginning: its "
        "position is the number of tokens before it.",
        positions_restart=(PLACE, "0"),
    ),
    *edits(
        "After the prompt the positions count the steps, and leave out the prompt. A token's position is the "
        "number of tokens before it: the first new token stands at len(prompt).",
        positions_count_steps=(PLACE, "len(found)"),
        positions_count_steps__from_zero=(PLACE, "len(found) - 1"),
    ),
    *edits(
        "After the prompt every token was given the position len(prompt). That is the first new token's; the next"
        " one stands at len(prompt) + 1.",
        position_stands_still=(PLACE, "len(prompt)"),
    ),
    *edits(
        "After the prompt every position is one too large. Positions count from 0: the first new token stands at "
        "len(prompt), not after it. Was the position taken after the token had been added?",
        position_too_late=(PLACE, "len(prompt) + len(found)"),
    ),
    *edits(
        "After the prompt every position is one too small, and the first new token shares the position of the "
        "prompt's last one. It stands at len(prompt).",
        position_too_early=(PLACE, "len(prompt) + len(found) - 2"),
    ),
)


# ------------------------------------------------------------------------------------------------------------ the cases


def random_weights(draw, layers):
    """A decoder whose attention looks far back and whose output is not its input again."""

    def matrix(inputs, outputs, size=1.0):
        return draw.normal(inputs, outputs, scale=size * inputs**-0.5)

    parts = [
        {
            "query": matrix(WIDTH, QUERY_HEADS * HEAD_DIM, 1.5),
            "key": matrix(WIDTH, KEY_HEADS * HEAD_DIM, 1.5),
            "value": matrix(WIDTH, KEY_HEADS * HEAD_DIM, 2.0),
            "output": matrix(QUERY_HEADS * HEAD_DIM, WIDTH, 2.0),
            "up": matrix(WIDTH, 2 * WIDTH),
            "down": matrix(2 * WIDTH, WIDTH, 1.5),
        }
        for _ in range(layers)
    ]
    return {
        "embedding": draw.normal(VOCABULARY, WIDTH),
        "layers": parts,
        "output": matrix(WIDTH, VOCABULARY, 3.0),
        "head_dim": HEAD_DIM,
    }


def exchanged(weights, prompt, token):
    """The same decoder and prompt with another name for this token, 0, and its name for the token of that name."""
    names = torch.arange(VOCABULARY)
    names[[0, token]] = names[[token, 0]]
    return {**weights, "embedding": weights["embedding"][names], "output": weights["output"][:, names]}, names[prompt]


def generation_cases(draw):
    """Token 0 is chosen early in one: it is a token as any other."""
    cases = []
    for name, prompt_length, new_tokens, calls, layers in (
        ("6 tokens after a prompt of 4", 4, 6, 1, 2),
        ("12 tokens after a prompt of one", 1, 12, 1, 2),
        ("5 tokens after a prompt of 3, called twice", 3, 5, 2, 2),
        ("one token after a prompt of 9", 9, 1, 1, 2),
        ("16 tokens after a prompt of 17", 17, 16, 1, 2),
        ("2 tokens after a prompt of 2", 2, 2, 1, 2),
        ("5 tokens after a prompt of 4, four layers", 4, 5, 1, 4),
        ("2 tokens after a prompt of 130", 130, 2, 1, 2),
        ("6 tokens after a prompt of 70, the third of them 0", LONG, 6, 1, 2),
    ):
        while True:  # until no token is chosen by a hair, which a rounding could split either way
            weights, prompt = random_weights(draw, layers), draw.integers(prompt_length, low=0, high=VOCABULARY)
            margins: list[float] = []
            tokens = generation_oracle(weights, prompt, new_tokens, margins=margins)["tokens"]
            if min(margins) > CLEAR:
                break
        if prompt_length == LONG:
            weights, prompt = exchanged(weights, prompt, int(tokens[2]))
        cases.append(Case(name, (weights, prompt, new_tokens, calls), driver=on_a_model))
    return cases


EXERCISE = Exercise(
    id="5.6",
    title="Greedy generation with a cache",
    entries=("generate_cached",),
    cases=generation_cases,
    oracle=generation_oracle,
    # A text each time: no other roundings are tried, and where one may decide the model says nothing.
    models=(
        model_of(generated, CHANGES, (with_cache,), (with_empty_slots,), most_pairs=150, draws=0, may_be_silent=True),
    ),
    hints=(
        "One function can do both prefill and decode: it runs some tokens at some positions through all layers, puts "
        "their keys and values into the cache, and returns the logits of the last one. Call it with the prompt first, "
        "then with single tokens.",
        "The cache is a list with an entry for each layer: keys and values [KV heads, tokens so far, head_dim]. "
        "`torch.cat([old, new], dim=1)` will do here; a preallocated buffer is better.",
        "The prompt's tokens stand at positions 0 to len(prompt) - 1. At which position does the first new token "
        "stand, when it is run?",
        "At len(prompt). It is run in the second step, and that step's logits choose the second new token. The last "
        "new token need not be run.",
        "`attend(query, key, value)` gets the step's queries and all keys and values of that layer so far, the new "
        "ones at the end.",
    ),
    mistakes=(
        Mistake(
            "drawn_by_chance",
            "The tokens are drawn at random. Greedy generation takes the likeliest one each time: argmax.",
            when=lambda case, seen, got: any(name in seen.operations for name in DRAWS),
            first=True,
        ),
        Mistake(
            "fixed_capacity",
            "A long prompt does not fit: the cache has room for a fixed number of tokens. It "
            "needs room for the prompt and the new tokens, however many they are.",
            when=lambda case, seen, got: len(case.args[1]) + case.args[2] > 64 and seen.error is not None,
            every=True,
        ),
        Mistake(
            "run_in_vain",
            "The tokens are right, but more tokens are run than need be. After the prompt a step runs the newest token "
            "alone, and the last new token is not run.",
            when=_run_in_vain,
            every=True,
        ),
        Mistake(
            "state_kept",
            "The same call, made twice, gave two results: something of the first is still there at the second. A list "
            "or dict as a default argument is made once for all calls; make the cache inside the function.",
            when=_calls_differ,
            first=True,
        ),
    ),
)
