"""Wrong answers to exercise 13.4, and unusual right ones."""

from tests.submissions.edits import changed, edited

RESCALED = "running_sum * torch.exp(running_max - new_max)"
WEIGHT = "weight = torch.where(counts, 1 / number, 0.0)"
LOSSES = "losses = running_max + torch.log(running_sum) - logits.gather(1, safe).float()"
SCATTER = "logits.scatter_add_(1, safe, -weight.to(logits.dtype))"
TILE = "tile.copy_(torch.exp(tile.float() - running_max) / running_sum * weight)"
RETURNED = "return torch.where(counts, losses, 0.0).sum() / number"

WHOLE = """# Exercise 13.4 · The loss in chunks
def cross_entropy_in_place(logits, targets, chunk, ignore_index):
    p = logits.float()
    p = p - p.amax(1, keepdim=True)
    total = p.exp().sum(1, keepdim=True)
    counts = (targets != ignore_index)[:, None]
    safe = torch.where(counts, targets[:, None], 0)
    loss = torch.where(counts, total.log() - p.gather(1, safe), 0.0).sum() / counts.sum()
    weight = torch.where(counts, 1 / counts.sum(), 0.0)
    gradient = (p.exp() / total * weight).scatter_add(1, safe, -weight)
    logits.copy_(gradient)
    return loss
"""

ROW_BY_ROW = """# Exercise 13.4 · The loss in chunks
def cross_entropy_in_place(logits, targets, chunk, ignore_index):
    keep = [int(t) != ignore_index for t in targets]
    number, total = sum(keep), torch.zeros((), device=logits.device)
    for row, target, counts in zip(logits, targets.tolist(), keep):
        if not counts:
            row.zero_()
            continue
        top = row.amax().float()
        parts = row.split(chunk)
        s = sum((part.float() - top).exp().sum() for part in parts)
        total += top + s.log() - row[target].float()
        for part in parts:
            part.copy_((part.float() - top).exp() / s / number)
        row[target] -= 1 / number
    return total / number if number else total / 0
"""

IN_EACH_CHUNK = """# Exercise 13.4 · The loss in chunks
def cross_entropy_in_place(logits, targets, chunk, ignore_index):
    rows, vocabulary = logits.shape
    logsum = torch.full((rows, 1), -math.inf, device=logits.device)
    picked = torch.zeros(rows, 1, device=logits.device)
    counts = (targets != ignore_index)[:, None]
    for start in range(0, vocabulary, chunk):
        tile = logits[:, start : start + chunk].float()
        top = tile.amax(1, keepdim=True)
        logsum = torch.logaddexp(logsum, top + (tile - top).exp().sum(1, keepdim=True).log())
        place = targets[:, None] - start
        here = counts & (place >= 0) & (place < tile.shape[1])
        picked += torch.where(here, tile.gather(1, place.clamp(0, tile.shape[1] - 1)), 0.0)
    loss = torch.where(counts, logsum - picked, 0.0).sum() / counts.sum()
    weight = torch.where(counts, 1 / counts.sum(), 0.0)
    for start in range(0, vocabulary, chunk):
        tile = logits[:, start : start + chunk]
        column = start + torch.arange(tile.shape[1], device=logits.device)
        hit = (column == targets[:, None]).float()
        tile.copy_(((tile.float() - logsum).exp() - hit) * weight)
    return loss
"""

WRONG = {
    "sum_not_rescaled": changed("13.4", (RESCALED, "running_sum")),
    "one_chunk_alone": changed("13.4", (f"{RESCALED} + torch", "torch")),
    "one_chunk_alone__first": changed(
        "13.4", ("for tile in chunks:\n        wide", "for tile in chunks[:1]:\n        wide")
    ),
    "tail_left_out": changed(
        "13.4",
        (
            "for tile in chunks:\n        wide",
            "for tile in chunks[: max(vocabulary // chunk, 1)]:\n        wide",
        ),
    ),
    # The loss is right, and the gradient of the last chunk is missing.
    "tail_without_gradient": changed(
        "13.4", ("chunks:\n        tile.copy_", "chunks[: max(vocabulary // chunk, 1)]:\n        tile.copy_")
    ),
    "tail_without_gradient__even_if_alone": changed(
        "13.4", ("chunks:\n        tile.copy_", "chunks[: vocabulary // chunk]:\n        tile.copy_")
    ),
    "tail_without_gradient__full_or_not": changed(
        "13.4", ("chunks:\n        tile.copy_", "chunks[:-1]:\n        tile.copy_")
    ),
    "tail_without_gradient__nor_target": edited(
        IN_EACH_CHUNK,
        ("chunk):\n        tile = logits[:, start : start + chunk]\n        column",
         "chunk):\n        if start + chunk > vocabulary:\n            break\n"
         "        tile = logits[:, start : start + chunk]\n        column"),
    ),
    "no_maximum": changed(
        "13.4",
        ("torch.maximum(running_max, wide.amax(dim=1, keepdim=True))", "torch.zeros_like(running_sum)"),
        ("torch.full((rows, 1), -math.inf, device=logits.device)", "torch.zeros(rows, 1, device=logits.device)"),
    ),
    "maximum_of_the_chunk": changed(
        "13.4", ("torch.maximum(running_max, wide.amax(dim=1, keepdim=True))", "wide.amax(dim=1, keepdim=True)")
    ),
    # ROCm/TransformerEngine#336: the loss was divided by all tokens, ignored ones too.
    "mean_over_all_rows": changed("13.4", ("number = counts.sum()", "number = rows")),
    "mean_over_all_rows__of_the_loss": changed("13.4", (RETURNED, RETURNED.replace("number", "rows"))),
    "gradient_over_all_rows": changed("13.4", (WEIGHT, "weight = torch.where(counts, 1 / rows, 0.0)")),
    "gradient_over_all_rows__softmax": changed("13.4", (TILE, TILE.replace("weight", "counts / rows"))),
    "gradient_over_all_rows__target": changed("13.4", (SCATTER, SCATTER.replace("-weight", "(-(counts / rows))"))),
    "sum_for_mean": changed("13.4", (RETURNED, RETURNED.replace(" / number", ""))),
    "gradient_of_the_sum": changed("13.4", (WEIGHT, "weight = torch.where(counts, 1.0, 0.0)")),
    # NVIDIA-NeMo/Automodel#3804: the means of the chunks were added up.
    "mean_for_each_chunk": changed("13.4", (RETURNED, f"{RETURNED} * len(chunks)")),
    "ignored_in_the_loss": changed("13.4", (RETURNED, "return losses.sum() / number")),
    "ignored_in_the_gradient": changed("13.4", (WEIGHT, "weight = (1 / number).expand(rows, 1)")),
    "ignored_in_the_gradient__target": changed(
        "13.4", (SCATTER, SCATTER.replace("-weight", "(-1 / number).expand(rows, 1)"))
    ),
    # The text's own subject: a row's weight stands at the target alone.
    "ignored_keep_softmax": changed("13.4", (TILE, TILE.replace("* weight", "/ number"))),
    "ignored_keep_softmax__guarded": changed("13.4", (TILE, TILE.replace("* weight", "/ number.clamp(min=1)"))),
    "ignored_keep_softmax__undivided": changed(
        "13.4", (TILE, TILE.replace("weight", "torch.where(counts, 1 / number, 1.0)"))
    ),
    "ignored_keep_logits": changed(
        "13.4", (TILE, "new = torch.exp(tile.float() - running_max) / running_sum * weight\n"
                       "        tile.copy_(torch.where(counts, new, tile.float()))")
    ),
    "fixed_index__negatives": changed("13.4", ("(targets != ignore_index)", "(targets >= 0)")),
    "fixed_index__above_0": changed("13.4", ("(targets != ignore_index)", "(targets > 0)")),
    "fixed_index": changed("13.4", ("(targets != ignore_index)", "(targets != -100)")),
    "target_not_subtracted": changed("13.4", (SCATTER, "pass")),
    "whole_one_subtracted": changed("13.4", (SCATTER, "logits.scatter_add_(1, safe, -counts.to(logits.dtype))")),
    "sign_of_the_gradient": changed("13.4", (SCATTER, f"{SCATTER}\n    logits.neg_()")),
    "sign_of_the_loss": changed("13.4", (RETURNED, RETURNED.replace("return ", "return -"))),
    "target_missing": changed("13.4", (" - logits.gather(1, safe).float()", "")),
    "target_read_late": changed("13.4", (f"    {LOSSES}\n", ""), (SCATTER, f"{SCATTER}\n    {LOSSES}")),
    "target_read_late__softmax": changed("13.4", (f"    {LOSSES}\n", ""), (SCATTER, f"{LOSSES}\n    {SCATTER}")),
    "nan_replaced": changed("13.4", (RETURNED, RETURNED.replace("number", "number.clamp(min=1)"))),
    "nan_gradient": changed("13.4", (WEIGHT, "weight = counts / number")),
    "nothing_written": changed("13.4", ("        tile.copy_(", "        tile.clone().copy_("), (SCATTER, "pass")),
    "rescaled_backwards": changed(
        "13.4", (RESCALED, "running_sum * torch.exp(new_max - running_max)")
    ),
    "softmax_of_the_chunk": changed(
        "13.4", (TILE, "own = torch.exp(tile.float() - tile.float().amax(1, keepdim=True))\n"
                       "        tile.copy_(own / own.sum(1, keepdim=True) * weight)")
    ),
    "softmax_of_the_chunk__maximum": changed(
        "13.4", (TILE, TILE.replace("- running_max", "- tile.float().amax(1, keepdim=True)"))
    ),
    "no_maximum_in_the_gradient": changed("13.4", (TILE, TILE.replace(" - running_max", ""))),
    "not_divided_by_the_sum": changed("13.4", (TILE, TILE.replace(" / running_sum", ""))),
    "computed_in_16_bits": changed(
        "13.4", ("device=logits.device)", "device=logits.device, dtype=logits.dtype)"),
        ("wide = tile.float()", "wide = tile"),
    ),
    "ignored_as_index": changed("13.4", ("torch.where(counts, targets[:, None], 0)", "targets[:, None]")),
    "sum_not_rescaled__and_the_target_read_late": changed(
        "13.4", (RESCALED, "running_sum"), (f"    {LOSSES}\n", ""), (SCATTER, f"{SCATTER}\n    {LOSSES}")
    ),
    "whole_copy": WHOLE,
    "forbidden_operation": """# Exercise 13.4 · The loss in chunks
def cross_entropy_in_place(logits, targets, chunk, ignore_index):
    counts = targets != ignore_index
    safe = torch.where(counts, targets, 0)[:, None]
    loss, number = torch.zeros((), device=logits.device), counts.sum()
    for row, t, c in zip(logits, safe, counts):
        p = torch.log_softmax(row.float(), 0)
        loss = loss - torch.where(c, p[t[0]], 0.0) / number
        row.copy_(torch.where(c, p.exp() / number, 0.0))
    logits.scatter_add_(1, safe, torch.where(counts, -1 / number, 0.0)[:, None].to(logits.dtype))
    return loss if number > 0 else loss / 0
""",
    "mean_over_all_rows__and_the_target": changed(
        "13.4", ("number = counts.sum()", "number = rows"), (" - logits.gather(1, safe).float()", "")
    ),
}

UNUSUAL = {
    "row by row": ROW_BY_ROW,
    "the target found in its chunk, logaddexp": IN_EACH_CHUNK,
    "exponentials in base 2": changed(
        "13.4",
        (
            "torch.exp(tile.float() - running_max)",
            "torch.exp2((tile.float() - running_max) * 1.4426950408889634)",
        ),
    ),
}
