"""Wrong answers to exercise 18.5, and unusual right ones."""

from tests.submissions.edits import changed

SORT = "choosing.sort(descending=True, stable=True).indices[:, :k]"
SUM = "scores if bias is None else scores + bias"
DIVIDE = 'if kind == "renormalised":'
GATHER = "scores.gather(-1, experts)"
LAST = "scale * weights / torch.where(total > 0, total, 1.0)"
STEP = "bias + rate * (load.mean() - load).sign().float()"
RECENTRED = "moved - moved.mean()"


def wrong(*replacements):
    return changed("18.5", *replacements)


def one_by_one(mark):
    """A search for the largest, expert after expert, that sets what was chosen to `mark`."""
    return wrong((
        f"    experts = {SORT}\n",
        "    left, found = choosing.clone(), []\n"
        "    for _ in range(k):\n"
        "        found.append(left.argmax(dim=-1, keepdim=True))\n"
        f"        left.scatter_(-1, found[-1], {mark})\n"
        "    experts = torch.cat(found, dim=-1)\n",
    ))  # fmt: skip


WRONG = {
    # sglang#35160: raw logits as weights where the model does not renormalise.
    "raw_logits": wrong((GATHER, "(numbers if kind == 'softmax' else scores).gather(-1, experts)")),
    # mlxcel#391, lmdeploy#3030, and for k = 1 megatron#894.
    "softmax_of_the_chosen": wrong((DIVIDE, 'if kind != "sigmoid":')),
    "softmax_of_the_chosen__late": wrong(
        (f"    weights = {GATHER}\n", "    weights = (scores if kind == 'sigmoid' else numbers).gather(-1, experts)\n"
         "    if kind != 'sigmoid':\n        weights = weights.softmax(dim=-1)\n")
    ),
    "not_renormalised": wrong((DIVIDE, 'if kind == "normalised":')),
    "sum_over_all": wrong(("total = weights.sum(", "total = scores.sum(")),
    "sigmoid_not_normalised": wrong((LAST, "scale * weights")),
    "scale_missing": wrong((LAST, LAST.replace("scale * ", ""))),
    "scale_missing__cancels": wrong(
        ("        total = weights", "        weights = scale * weights\n        total = weights"),
        (LAST, LAST.replace("scale * ", "")),
    ),
    # vLLM-metax#284: wrong only where the bias is large enough to show, at 128 experts.
    "bias_in_the_weights": wrong((GATHER, "(choosing if kind == 'sigmoid' else scores).gather(-1, experts)")),
    "bias_in_the_weights__scores": wrong(
        (
            "        choosing = " + SUM,
            "        scores = scores if bias is None else scores + bias\n        choosing = scores",
        )
    ),
    "bias_in_the_weights__and_0_for_sums_below_0": wrong(
        (GATHER, "(choosing if kind == 'sigmoid' else scores).gather(-1, experts)"),
        (LAST, "scale * torch.where(total > 0, weights / total, 0)"),
    ),
    # Whoever takes topk's values takes what chooses; equal numbers are then in another order, too.
    "weights_of_the_choice": wrong(
        (SORT, "choosing.topk(k, dim=-1).indices"), (GATHER, "choosing.gather(-1, experts)")
    ),
    "one_sigmoid_of_0": wrong(
        (LAST, "scale * torch.where((weights > 0).all(dim=-1, keepdim=True), weights / total, 0.0)")
    ),
    "bias_in_the_sum": wrong(("total = weights.sum(", "total = choosing.gather(-1, experts).sum(")),
    "bias_ignored": wrong((SUM, "scores")),
    "bias_subtracted": wrong((SUM, SUM.replace("+", "-"))),
    "bias_on_the_logits": wrong((SUM, "scores if bias is None else (numbers + bias).sigmoid()")),
    "bias_on_the_logits__raw": wrong((SUM, "numbers if bias is None else numbers + bias")),
    # vllm#31478: the search begins at -1, or at 0, and a sum may be smaller.
    "negative_sums": wrong((SUM, "scores if bias is None else (scores + bias).relu()")),
    "negative_sums__marked_0": one_by_one("0.0 if kind == 'sigmoid' else -math.inf"),
    "negative_sums__marked_minus_1": one_by_one("-1.0 if kind == 'sigmoid' else -math.inf"),
    "chosen_twice": one_by_one("-1e4"),
    "ties_by_topk": wrong((SORT, "choosing.topk(k, dim=-1).indices")),
    "larger_number_first": wrong((SORT, "choosing.sort(dim=-1, stable=True).indices.flip(-1)[:, :k]")),
    "smallest_chosen": wrong((SORT, SORT.replace("descending=True, ", ""))),
    "order_of_numbers": wrong((SORT, SORT + ".sort(dim=-1).values")),
    "weights_in_another_order": wrong((GATHER, "scores.sort(dim=-1, descending=True).values[:, :k]")),
    "chosen_by_rounded": wrong(("scores, choosing = numbers.softmax(dim=-1), numbers",
                                "scores = numbers.softmax(dim=-1)\n        choosing = scores")),
    "chosen_by_logits": wrong(("    choosing = " + SUM, "    choosing = numbers if bias is None else scores + bias")),
    "softmax_for_sigmoid": wrong(("numbers.sigmoid()", "numbers.softmax(-1)")),
    "softmax_over_tokens": wrong(("numbers.softmax(dim=-1)", "numbers.softmax(dim=0)")),
    "softmax_overflows": wrong(
        ("numbers.softmax(dim=-1)", "numbers.exp() / numbers.exp().sum(-1, keepdim=True)"),
    ),
    "sigmoid_overflows": wrong(("numbers.sigmoid()", "numbers.exp() / (numbers.exp() + 1)")),
    "sum_of_0": wrong((LAST, "scale * weights / total")),
    "shared_where_0": wrong((LAST, "torch.where(total > 0, scale * weights / total, scale / k)")),
    "sum_with_a_floor": wrong((LAST, "scale * weights / (total + 1e-20)")),
    "sum_with_a_floor__clamped": wrong((LAST, "scale * weights / total.clamp(min=1e-9)")),
    # OpenMythos#41: probabilities are rounded to bfloat16 before they are renormalised.
    "rounded_early": wrong((GATHER, GATHER + ".bfloat16().float()")),
    "rounded_early__own_dtype": wrong(("numbers = logits.float()", "numbers = logits"),
                                      ("return experts, weights", "return experts, weights.float()")),
    "rounded_early__logits": wrong(("logits.float()", "logits.half().float()")),
    "sign_turned": wrong((STEP, STEP.replace("bias +", "bias -"))),
    "not_the_sign": wrong((STEP, STEP.replace(".sign()", ""))),
    "not_recentred": wrong((RECENTRED, "moved")),
    # torchtitan#1506 takes the mean off the step, which is the same only where the biases' mean is 0.
    "recentred_wrongly": wrong((RECENTRED, "bias + (moved - bias) - (moved - bias).mean()")),
    "recentred_wrongly__before": wrong((RECENTRED, "moved - bias.mean()")),
    "not_the_mean": wrong((STEP, STEP.replace("load.mean()", "load.median()"))),
    "not_the_mean__one": wrong((STEP, STEP.replace("load.mean()", "1"))),
    "mean_rounded": wrong((STEP, STEP.replace("load.mean()", "load.sum() // len(load)"))),
    "equal_moved": wrong((STEP, "bias + torch.where(load < load.mean(), rate, -rate).float()")),
    "loads_rounded": wrong(("load.double()", "load.float()")),
    "loads_wrap": wrong(("load.double()", "load.int().double()")),
    "logits_cut": wrong(("logits.float()", "logits.float().clamp(-80, 80)")),
    "sums_rounded__own": wrong((SUM, "scores if bias is None else scores + bias.to(logits.dtype)")),
    "sums_rounded": wrong((SUM, "scores if bias is None else scores + bias.half()")),
    "softmax_of_sigmoids": wrong((LAST, "scale * weights.softmax(dim=-1)")),
    "scale_in_the_scores": wrong((SUM, "scores if bias is None else scores + scale * bias")),
    "bias_replaced": wrong((STEP, STEP.replace("bias + ", ""))),
}
UNUSUAL = {
    "one largest after another": """# Exercise 18.5 · The router
def route(logits, k, kind, bias=None, scale=1.0):
    x = logits.to(torch.float32)
    if kind == "sigmoid":
        score = torch.sigmoid(x)
        key = score.clone()
        if bias is not None:
            key += bias
    else:
        e = torch.exp(x - x.max(dim=1, keepdim=True).values)
        score = e / e.sum(1, keepdim=True)
        key = x.clone()
    number = torch.arange(x.shape[1]).expand_as(x)
    experts, weights = [], []
    for _ in range(k):
        best = key.amax(1, keepdim=True)
        first = torch.where(key == best, number, x.shape[1]).amin(1, keepdim=True)
        experts.append(first)
        weights.append(score.gather(1, first))
        key.scatter_(1, first, float("-inf"))
    experts, weights = torch.cat(experts, 1), torch.cat(weights, 1)
    if kind == "softmax":
        return experts, weights
    total = weights.sum(1, keepdim=True)
    share = weights / total
    if kind == "sigmoid":
        share = torch.nan_to_num(share) * scale
    return experts, share

def balanced(bias, load, rate):
    n = len(load)
    fewer, more = load * n < load.sum(), load * n > load.sum()
    new = bias.clone()
    new[fewer] += rate
    new[more] -= rate
    return new - new.sum() / n
""",
    "softmax of the chosen where that is the same": """# Exercise 18.5 · The router
def route(logits, k, kind, bias=None, scale=1.0):
    logits = logits.float()
    if kind == "sigmoid":
        s = 1 / (1 + torch.exp(-logits))
        c = s + (torch.zeros(logits.shape[1]) if bias is None else bias)
        e = torch.argsort(-c, dim=1, stable=True)[:, :k]
        w = torch.take_along_dim(s, e, 1)
        t = w.sum(1, keepdim=True)
        t[t == 0] = 1
        return e, w * (scale / t)
    e = torch.argsort(-logits, dim=1, stable=True)[:, :k]
    picked = torch.take_along_dim(logits, e, 1)
    if kind == "renormalised":
        return e, torch.softmax(picked, 1)
    return e, torch.exp(picked - torch.logsumexp(logits, 1, keepdim=True))

def balanced(bias, load, rate):
    exact = load.sum().item()
    step = torch.tensor([(exact > one * len(load)) - (exact < one * len(load)) for one in load.tolist()])
    new = bias + rate * step
    return new - torch.mean(new)
""",
    "token by token, in Python": """# Exercise 18.5 · The router
def route(logits, k, kind, bias=None, scale=1.0):
    rows, weights = [], []
    for row in logits.float():
        scores = row.sigmoid() if kind == "sigmoid" else row.softmax(0)
        key = row if kind != "sigmoid" else scores if bias is None else scores + bias
        order = sorted(range(len(row)), key=lambda e: (-key[e].item(), e))[:k]
        chosen = scores[order]
        if kind != "softmax" and float(chosen.sum()) > 0:
            chosen = chosen / chosen.sum()
        rows.append(torch.tensor(order))
        weights.append(chosen * scale if kind == "sigmoid" else chosen)
    return torch.stack(rows), torch.stack(weights)

def balanced(bias, load, rate):
    mean = load.double().mean()
    moved = bias + torch.where(load < mean, rate, torch.where(load > mean, -rate, 0.0))
    return moved.sub(moved.mean())
""",
    "in float64": """# Exercise 18.5 · The router
def route(logits, k, kind, bias=None, scale=1.0):
    if kind == "sigmoid":
        scores = logits.float().sigmoid()
        key = scores if bias is None else scores + bias
        scores = scores.double()
    else:
        scores, key = logits.double().softmax(1), logits
    experts = torch.sort(key, dim=1, descending=True, stable=True)[1].narrow(1, 0, k)
    weights = scores.gather(1, experts)
    if kind != "softmax":
        total = weights.sum(1, keepdim=True)
        weights = weights / total.masked_fill(total == 0, 1) * (scale if kind == "sigmoid" else 1)
    return experts.clone(), weights.float()

def balanced(bias, load, rate):
    moved = bias.double() + rate * torch.sign(load.sum() - load * len(load))
    return (moved - moved.mean()).float()
""",
}
