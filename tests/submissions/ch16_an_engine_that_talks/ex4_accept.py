"""Wrong answers to exercise 16.4, and unusual right ones."""

from tests.submissions.edits import changed

REFUSED, RESIDUAL = "uniforms[place] >= p[token] / q[token]", "weights = (p - q).clamp(min=0)"
DRAWN = "tokens.append(int((uniforms[-1] * edges[-1] > edges[:-1]).sum()))"
BONUS, HEAD = "weights = target_probabilities[-1]", "def accept("
SAMPLE = "int((uniforms[place] > p.cumsum(0)[:-1]).sum())"
VECTORISED = """# Exercise 16.4 · Accept or refuse
def accept(draft_tokens, draft_probabilities, target_probabilities, uniforms):
    k = len(draft_tokens)
    rows = torch.arange(k)
    ratio = target_probabilities[rows, draft_tokens] / draft_probabilities[rows, draft_tokens]
    accepted = uniforms[:k] < ratio
    count = int(accepted.long().cumprod(0).sum())
    weights = target_probabilities[count].clone()
    if count < k:
        weights -= draft_probabilities[count]
    weights = weights.clamp(min=0)
    edges = weights.cumsum(0) / weights.sum()
    new = int(torch.searchsorted(edges, uniforms[k]))
    return torch.cat([draft_tokens[:count], torch.tensor([new])])
"""
GOES_ON = """# Exercise 16.4 · Accept or refuse
def accept(draft_tokens, draft_probabilities, target_probabilities, uniforms):
    tokens = []
    refused = False
    for place, token in enumerate(draft_tokens.tolist()):
        p, q = target_probabilities[place], draft_probabilities[place]
        if uniforms[place] < p[token] / q[token]:
            tokens.append(token)
        else:
            refused = True
            residual = (p - q).clamp(min=0)
            tokens.append(int(torch.searchsorted(residual.cumsum(0) / residual.sum(), uniforms[-1])))
    if not refused:
        tokens.append(int(torch.searchsorted(target_probabilities[-1].cumsum(0), uniforms[-1])))
    return tokens
"""


def accepting(condition):
    return changed("16.4", (REFUSED, f"not ({condition})"))


def drawing(weights):
    return changed("16.4", (RESIDUAL, f"weights = {weights}"))


WRONG = {
    # The residual.
    "residual_is_p": drawing("p"),
    "other_token_at_the_end__p_without_the_refused": drawing("p.clone().index_fill_(0, draft_tokens[place], 0)"),
    "residual_of_q__reversed": drawing("(q - p).clamp(min=0)"),
    "residual_of_q__absolute": drawing("(p - q).abs()"),
    "residual_of_q": drawing("q"),
    "residual_not_normalised": changed("16.4", ("uniforms[-1] * edges[-1]", "uniforms[-1]")),
    "residual_not_normalised__none": changed(
        "16.4", (DRAWN, "tokens.append(int(torch.searchsorted(edges, uniforms[-1])))")
    ),
    "residual_not_normalised__the_first": changed(
        "16.4", (DRAWN, "tokens.append(int((edges > uniforms[-1]).long().argmax()))")
    ),
    "residual_of_another_row": drawing("(target_probabilities[0] - draft_probabilities[0]).clamp(min=0)"),
    "residual_of_another_row__behind_all": drawing("(target_probabilities[-1] - q).clamp(min=0)"),
    "row_behind": changed("16.4", ("target_probabilities[place]", "target_probabilities[place + 1]")),
    "row_behind__in_the_residual": drawing("(target_probabilities[place + 1] - q).clamp(min=0)"),
    "row_behind__in_the_ratio": accepting("uniforms[place] < target_probabilities[place + 1][token] / q[token]"),
    "first_row_for_all": changed(
        "16.4", ("p, q = target_probabilities[place], draft_probabilities[place]",
                 "p, q = target_probabilities[0], draft_probabilities[0]")
    ),
    # The decision. Samples compared: ml-explore/mlx-swift-lm#459, mlxcel#902.
    "samples_compared": changed("16.4", (REFUSED, f"{SAMPLE} != token"), (RESIDUAL, "weights = p")),
    "samples_compared__the_sample_is_taken": changed(
        "16.4", (f"if {REFUSED}:\n", f"if {SAMPLE} != token:\n            return [*tokens, {SAMPLE}]\n")
    ),
    "samples_compared__residual": accepting(f"{SAMPLE} == token"),
    "only_where_p_is_more": accepting("p[token] >= q[token]"),
    "only_the_likeliest": accepting("token == p.argmax()"),
    "ratio_upside_down": accepting("uniforms[place] < q[token] / p[token]"),
    "compared_the_wrong_way": accepting("uniforms[place] > p[token] / q[token]"),
    "not_divided_by_q": accepting("uniforms[place] < p[token]"),
    "never_refused": accepting("True"),
    "never_accepted": accepting("False"),
    "too_few_accepted__at_most_0.9": accepting("uniforms[place] < min(0.9, float(p[token] / q[token]))"),
    "too_few_accepted__between_q_and_2q": accepting(
        "uniforms[place] < (0.9 if q[token] <= p[token] <= 2 * q[token] else p[token] / q[token])"
    ),
    "too_few_accepted__never_divided_by_0": accepting("uniforms[place] < p[token] / (q[token] + 0.02)"),
    "too_few_accepted__equal_rows": accepting("uniforms[place] < p[token] / q[token] and not torch.equal(p, q)"),
    "too_many_accepted": accepting("q[token] == 1 or uniforms[place] < p[token] / q[token]"),
    "other_token_at_the_end": drawing("(p - q).clamp(min=0) if q[token] < 1 else p"),
    "other_token_at_the_end__uniform_stretched": changed(
        "16.4", (RESIDUAL, f"ratio = p[token] / q[token]\n            {RESIDUAL}\n"
                           "            uniforms = [(uniforms[place] - ratio) / (1 - ratio)]")
    ),
    "no_answer": changed("16.4", ("    tokens = []", "    if len(uniforms) == 1:\n        return []\n    tokens = []")),
    "one_uniform_for_all": accepting("uniforms[0] < p[token] / q[token]"),
    "uniform_used_twice": changed(
        "16.4", ("uniforms[-1] *", "uniforms[min(len(tokens), max(len(uniforms) - 2, 0))] *")
    ),
    "uniform_used_twice__after_a_refusal": changed("16.4", ("uniforms[-1] *", "uniforms[len(tokens)] *")),
    "uniform_used_twice__the_first": changed("16.4", ("uniforms[-1] *", "uniforms[0] *")),
    # The end.
    "no_answer__goes_on_after_a_refusal": GOES_ON,
    "all_accepted_counted": VECTORISED.replace(".cumprod(0)", ""),
    "bonus_missing": changed(
        "16.4", (DRAWN, f"if len(tokens) < len(draft_tokens):\n        {DRAWN}")
    ),
    "bonus_of_another_row": changed(
        "16.4", (BONUS, "weights = target_probabilities[max(len(draft_tokens) - 1, 0)]")
    ),
    "not_replaced": changed("16.4", (RESIDUAL, "return tokens")),
    "refused_one_kept": changed("16.4", (RESIDUAL, f"{RESIDUAL}\n            tokens.append(token)")),
    "accepted_ones_missing": changed("16.4", ("    return tokens", "    return tokens[-1:]")),
    "not_drawn": changed("16.4", ("int((uniforms[-1] * edges[-1] > edges[:-1]).sum())", "int(weights.argmax())")),
    "not_drawn__after_a_refusal": changed(
        "16.4", (RESIDUAL, "return [*tokens, int((p - q).argmax())]")
    ),
    "bonus_of_another_row__less_q": changed(
        "16.4", (BONUS, "weights = (target_probabilities[-1] - draft_probabilities[-1:].sum(0)).clamp(min=0)")
    ),
    "softmax_of_probabilities": changed(
        "16.4", ("    tokens = []", "    draft_probabilities, target_probabilities = draft_probabilities.softmax(-1), "
                                    "target_probabilities.softmax(-1)\n    tokens = []")
    ),
    "bonus_outside": changed("16.4", (BONUS, "weights = target_probabilities[len(draft_tokens) + 1]")),
    "random_numbers": accepting("torch.rand(()) < p[token] / q[token]"),
    "modified_input": changed("16.4", (RESIDUAL, "weights = target_probabilities[place].sub_(q).clamp_(min=0)")),
}

UNUSUAL = {
    "decided at once, a tensor returned": VECTORISED,
    "accepted from the other end": accepting("uniforms[place] > 1 - p[token] / q[token]"),
    "drawn from the last token on": changed(
        "16.4", (DRAWN, "tokens.append(int((uniforms[-1] * edges[-1] < edges).long().argmax()))"),
        ("edges = weights.cumsum(0)", "weights = weights.flip(0)\n    edges = weights.cumsum(0)"),
        ("    return tokens", "    tokens[-1] = len(weights) - 1 - tokens[-1]\n    return tokens"),
    ),
    "the next uniform draws": changed(
        "16.4", ("uniforms[-1] *", "uniforms[len(tokens) + (len(tokens) < len(draft_tokens))] *")
    ),
    "the uniforms from the other end": changed(
        "16.4", ("uniforms[place]", "uniforms[place + 1]"), ("uniforms[-1]", "uniforms[0]")
    ),
    "in plain Python": """# Exercise 16.4 · Accept or refuse
def accept(draft_tokens, draft_probabilities, target_probabilities, uniforms):
    def pick(weights, uniform):
        left = uniform * sum(weights)
        for token, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return token
        return max(range(len(weights)), key=weights.__getitem__)

    q, p, u = draft_probabilities.tolist(), target_probabilities.tolist(), uniforms.tolist()
    kept = []
    for x, qs, ps, uniform in zip(draft_tokens.tolist(), q, p, u):
        if uniform * qs[x] > ps[x]:
            return kept + [pick([max(b - a, 0.0) for a, b in zip(qs, ps)], u[-1])]
        kept.append(x)
    return kept + [pick(p[-1], u[-1])]
""",
    "residuals of all rows, 0 / 0 among them": changed(
        "16.4", (RESIDUAL, "weights = residuals[place]"),
        ("    tokens = []", "    residuals = (target_probabilities[:-1] - draft_probabilities).clamp(min=0)\n"
                            "    residuals = residuals / residuals.sum(-1, keepdim=True)\n    tokens = []"),
    ),
}
