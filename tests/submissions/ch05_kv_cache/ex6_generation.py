"""Wrong answers to exercise 5.6, and unusual right ones."""

from tests.submissions.edits import changed, edited

HEADER = """# Exercise 5.6 · Greedy generation with a cache
def generate_cached(model, prompt, new_tokens):
    cache = [[None, None] for _ in range(model.layers)]

    def run(tokens, positions):
        x = model.embed(tokens)
        for layer in range(model.layers):
            query, *pair = model.project(layer, x, positions)
            for place, new in enumerate(pair):
                old = cache[layer][place]
                cache[layer][place] = new if old is None else torch.cat([old, new], dim=1)
            x = model.finish(layer, x, model.attend(query, *cache[layer]))
        return model.logits(x)

"""


def generated(body):
    return HEADER + body


GOOD = """    token = run(prompt, torch.arange(len(prompt)))[-1:].argmax(-1)
    result = [token]
    for step in range(1, new_tokens):
        token = run(token, torch.tensor([len(prompt) + step - 1]))[-1:].argmax(-1)
        result.append(token)
    return torch.cat(result)
"""


LATER = "torch.tensor([len(prompt) + step - 1])"


TWICE = """    run(prompt, torch.arange(len(prompt)))
    token, result = prompt[-1:], []
    for step in range(new_tokens):
        token = run(token, torch.tensor([len(prompt) + step - 1]))[-1:].argmax(-1)
        result.append(token)
    return torch.cat(result)
"""


WRONG = {
    "state_kept__on_the_model": changed(
        "5.6",
        (
            "    cache = [None] * model.layers",
            "    if not hasattr(model, 'cache'):\n        model.cache = [None] * model.layers\n    cache = model.cache",
        ),
    ),
    "drawn_by_chance": changed(
        "5.6",
        ("model.logits(x[-1:]).argmax(dim=-1)", "torch.softmax(model.logits(x[-1]), dim=-1).multinomial(1)"),
    ),
    "run_in_vain": changed(
        "5.6",
        (
            "        found.append(run(found[-1], len(prompt) + len(found) - 1))",
            "        cache[:] = [(key[:, :-1], value[:, :-1]) for key, value in cache]\n"
            "        known = torch.cat([prompt, *found])\n"
            "        found.append(run(known[-2:], len(known) - 2))",
        ),
    ),
    "stopped_at_zero": changed(
        "5.6", ("while len(found) < new_tokens:", "while len(found) < new_tokens and found[-1].item() != 0:")
    ),
    "likeliest_of_x": changed("5.6", ("model.logits(x[-1:])", "x[-1:]")),
    "last_layer_left_out": changed("5.6", ("range(model.layers):", "range(model.layers - 1):")),
    "finished_by_first_layer": changed("5.6", ("model.finish(layer,", "model.finish(0,")),
    "last_prompt_token_left_out": changed("5.6", ("run(prompt, 0)", "run(prompt[: max(1, len(prompt) - 1)], 0)")),
    "keys_kept_as_values__and_position_too_late": changed(
        "5.6",
        ('len(prompt) + len(found) - 1', 'len(prompt) + len(found)'),
        ('cache[layer] = key, value', 'cache[layer] = key, key'),
    ),
    "last_token_run": generated("""    tokens, known = prompt, 0
    found = []
    logits = run(prompt, torch.arange(len(prompt)))
    position = len(prompt)
    for _ in range(new_tokens):
        found.append(int(logits[-1].argmax()))
        logits = run(torch.tensor(found[-1:]), torch.tensor([position]))
        position += 1
    return torch.tensor(found)
"""),
    "positions_restart": generated(GOOD.replace(LATER, "torch.arange(1)")),
    "positions_count_steps": generated(GOOD.replace(LATER, "torch.tensor([step])")),
    "positions_count_steps__from_zero": generated(GOOD.replace(LATER, "torch.tensor([step - 1])")),
    "position_stands_still": generated(GOOD.replace(LATER, "torch.tensor([len(prompt)])")),
    "every_row_run_on": generated("""    tokens, position, result = prompt, 0, []
    for step in range(new_tokens):
        logits = run(tokens, torch.arange(position, position + len(tokens)))
        position += len(tokens)
        tokens = logits.argmax(-1)
        result.append(tokens[-1:])
    return torch.cat(result)
"""),
    "cache_not_asked": generated(GOOD).replace("model.attend(query, *cache[layer])", "model.attend(query, *pair)"),
    "one_token_too_many": generated(GOOD.replace("range(1, new_tokens)", "range(1, new_tokens + 1)")),
    "position_too_late": generated(GOOD.replace(LATER, "torch.tensor([len(prompt) + step])")),
    "position_too_early": generated(GOOD.replace(LATER, "torch.tensor([len(prompt) + step - 2])")),
    "last_prompt_token_twice": generated(TWICE),
    "last_prompt_token_twice_later": generated(TWICE.replace("+ step - 1", "+ step")),
    "new_tokens_not_kept": generated(GOOD).replace(
        "cache[layer][place] = new if old is None else torch.cat([old, new], dim=1)\n"
        "            x = model.finish(layer, x, model.attend(query, *cache[layer]))",
        "if old is None:\n                    cache[layer][place] = new\n"
        "                else:\n                    pair[place] = torch.cat([old, new], dim=1)\n"
        "            x = model.finish(layer, x, model.attend(query, *pair))",
    ),
    "one_cache_for_all_layers": generated(GOOD).replace(
        "[[None, None] for _ in range(model.layers)]", "[[None, None]] * model.layers"
    ),
    "first_logits": generated(GOOD.replace("len(prompt)))[-1:]", "len(prompt)))[:1]")),
    "prompt_at_one_position": generated(
        GOOD.replace("torch.arange(len(prompt))", "torch.zeros(len(prompt), dtype=torch.int64)")
    ),
    "prompt_returned": generated(GOOD.replace("torch.cat(result)", "torch.cat([prompt, *result])")),
    "first_token_dropped": generated("""    token = run(prompt, torch.arange(len(prompt)))[-1:].argmax(-1)
    result = []
    for position in range(len(prompt), len(prompt) + new_tokens):
        token = run(token, torch.tensor([position]))[-1:].argmax(-1)
        result.append(token)
    return torch.cat(result)
"""),
    "everything_into_the_cache": generated("""    tokens = prompt
    for _ in range(new_tokens):
        logits = run(tokens, torch.arange(len(tokens)))
        tokens = torch.cat([tokens, logits[-1:].argmax(-1)])
    return tokens[len(prompt):]
"""),
    "whole_sequence_again": """# Exercise 5.6 · Greedy generation with a cache
def generate_cached(model, prompt, new_tokens):
    tokens = prompt
    for _ in range(new_tokens):
        positions = torch.arange(len(tokens))
        x = model.embed(tokens)
        for layer in range(model.layers):
            x = model.finish(layer, x, model.attend(*model.project(layer, x, positions)))
        tokens = torch.cat([tokens, model.logits(x)[-1:].argmax(-1)])
    return tokens[len(prompt):]
""",
    "empty_slots_seen": """# Exercise 5.6 · Greedy generation with a cache
def generate_cached(model, prompt, new_tokens):
    capacity = len(prompt) + new_tokens
    keys, values = [None] * model.layers, [None] * model.layers
    tokens, start, found = prompt, 0, []
    while len(found) < new_tokens:
        positions = torch.arange(start, start + len(tokens))
        x = model.embed(tokens)
        for layer in range(model.layers):
            q, k, v = model.project(layer, x, positions)
            if keys[layer] is None:
                keys[layer] = k.new_zeros(k.shape[0], capacity, k.shape[2])
                values[layer] = torch.zeros_like(keys[layer])
            keys[layer][:, positions] = k
            values[layer][:, positions] = v
            if start == 0:
                attended = model.attend(q, k, v)
            else:
                attended = model.attend(q, keys[layer], values[layer])
            x = model.finish(layer, x, attended)
        start += len(tokens)
        tokens = model.logits(x[-1:]).argmax(dim=-1)
        found.append(tokens)
    return torch.cat(found)
""",
    "new_tokens_not_kept__of_one": """# Exercise 5.6 · Greedy generation with a cache
def generate_cached(model, prompt, new_tokens):
    cache = [None] * model.layers

    def run(tokens, first):
        positions = torch.arange(first, first + len(tokens))
        x = model.embed(tokens)
        for layer in range(model.layers):
            query, key, value = model.project(layer, x, positions)
            if cache[layer] is not None:
                key = torch.cat([cache[layer][0], key], dim=1)
                value = torch.cat([cache[layer][1], value], dim=1)
            if len(tokens) > 1:
                cache[layer] = key, value
            x = model.finish(layer, x, model.attend(query, key, value))
        return model.logits(x[-1:]).argmax(dim=-1)

    found = [run(prompt, 0)]
    while len(found) < new_tokens:
        found.append(run(found[-1], len(prompt) + len(found) - 1))
    return torch.cat(found)
""",
    "key_and_value_apart": changed(
        "5.6", ("torch.cat([cache[layer][0], key], dim=1)", "torch.cat([key, cache[layer][0]], dim=1)")
    ),
    "key_and_value_apart__and_position_too_late": changed(
        "5.6",
        ("len(prompt) + len(found) - 1", "len(prompt) + len(found)"),
        ("torch.cat([cache[layer][0], key], dim=1)", "torch.cat([key, cache[layer][0]], dim=1)"),
    ),
    "one_token_too_many__for_one": generated(
        GOOD.replace("for step in range(1, new_tokens)", "for step in range(1, max(2, new_tokens))")
    ),
}


WRONG |= {
    "state_kept": generated(GOOD)
    .replace("new_tokens):\n    cache =", "new_tokens, cache=[]):\n    cache +=", 1)
    .replace("[[None, None] for _ in range(model.layers)]", "[[None, None] for _ in range(model.layers - len(cache))]"),
    "one_cache_for_all_layers__and_positions_restart": generated(GOOD.replace(LATER, "torch.arange(1)")).replace(
        "[[None, None] for _ in range(model.layers)]", "[[None, None]] * model.layers"
    ),
}


UNUSUAL = {
    "the prompt's last token alone": generated("""    if len(prompt) > 1:
        run(prompt[:-1], torch.arange(len(prompt) - 1))
    token, result = prompt[-1:], []
    for step in range(new_tokens):
        token = run(token, torch.tensor([len(prompt) + step - 1]))[-1:].argmax(-1)
        result.append(token)
    return torch.cat(result)
"""),
    "token by token from the start": generated("""    for position, token in enumerate(prompt):
        logits = run(token[None], torch.tensor([position]))
    result = torch.zeros(new_tokens, dtype=torch.int64)
    for step in range(new_tokens):
        result[step] = logits[0].argmax()
        if step + 1 < new_tokens:
            logits = run(result[step : step + 1], torch.tensor([len(prompt) + step]))
    return result
"""),
    "preallocated buffers": """# Exercise 5.6 · Greedy generation with a cache
class Cache:
    def __init__(self, capacity):
        self.capacity, self.buffers, self.length = capacity, {}, 0

    def add(self, layer, *pair):
        for place, new in enumerate(pair):
            if (layer, place) not in self.buffers:
                self.buffers[layer, place] = new.new_empty(new.shape[0], self.capacity, new.shape[2])
            self.buffers[layer, place][:, self.length : self.length + new.shape[1]] = new
        end = self.length + pair[0].shape[1]
        return self.buffers[layer, 0][:, :end], self.buffers[layer, 1][:, :end]

def generate_cached(model, prompt, new_tokens):
    cache = Cache(len(prompt) + new_tokens - 1)
    tokens, output = prompt, []
    while True:
        x = model.embed(tokens)
        positions = torch.arange(cache.length, cache.length + len(tokens))
        for layer in range(model.layers):
            query, key, value = model.project(layer, x, positions)
            x = model.finish(layer, x, model.attend(query, *cache.add(layer, key, value)))
        cache.length += len(tokens)
        tokens = model.logits(x[-1:]).argmax(dim=-1)
        output.append(tokens)
        if len(output) == new_tokens:
            return torch.cat(output)
""",
    "the newest key and value in front of the others": changed(
        "5.6",
        ("torch.cat([cache[layer][0], key], dim=1)", "torch.cat([key, cache[layer][0]], dim=1)"),
        ("torch.cat([cache[layer][1], value], dim=1)", "torch.cat([value, cache[layer][1]], dim=1)"),
    ),
}


WRONG |= {
    "fixed_capacity": edited(
        UNUSUAL["preallocated buffers"], ("Cache(len(prompt) + new_tokens - 1)", "Cache(128)")
    ),
}


# The card vouched for the tokens, half of which were wrong; see `test_sentences.py`.
WRONG["last_token_run__and_position_too_late"] = changed(
    "5.6",
    ("len(prompt) + len(found) - 1", "len(prompt) + len(found)"),
    ("    return torch.cat(found)", "    run(found[-1], len(prompt) + len(found))\n    return torch.cat(found)"),
)
