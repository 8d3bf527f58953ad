"""Wrong answers to exercise 10.1, and unusual right ones."""

from tests.submissions.edits import changed

DELTA = "delta = (probabilities * probability_gradients).sum(dim=-1, keepdim=True)"
RESULT = "return probabilities * (probability_gradients - delta)"
ROW = "return (output.float() * output_gradient.float()).sum(dim=-1)"

WRONG = {
    "delta_missing": changed("10.1", (RESULT, "return probabilities * probability_gradients")),
    "diagonal_alone": changed("10.1", (RESULT, "return probabilities * (1 - probabilities) * probability_gradients")),
    "delta_without_probabilities": changed(
        "10.1", (DELTA, "delta = probability_gradients.sum(dim=-1, keepdim=True)")
    ),
    "delta_averaged": changed("10.1", (DELTA, DELTA.replace(".sum(", ".mean("))),
    "delta_of_columns": changed("10.1", (DELTA, DELTA.replace("dim=-1", "dim=-2"))),
    "delta_of_the_whole_head": changed("10.1", (DELTA, DELTA.replace("dim=-1", "dim=(-2, -1)"))),
    "delta_added": changed("10.1", (RESULT, RESULT.replace(" - ", " + "))),
    "delta_not_weighted": changed("10.1", (RESULT, "return probabilities * probability_gradients - delta")),
    "probabilities_left_out": changed("10.1", (RESULT, "return probability_gradients - delta")),
    "products_in_16_bits": changed("10.1", (ROW, "return (output * output_gradient).float().sum(dim=-1)")),
    "products_in_16_bits__and_sums": changed("10.1", (ROW, "return (output * output_gradient).sum(dim=-1).float()")),
    "delta_averaged__of_the_output": changed("10.1", (ROW, ROW.replace(".sum(", ".mean("))),
    "delta_over_the_queries": changed("10.1", (ROW, ROW.replace("dim=-1", "dim=-2"))),
    "delta_scaled": changed("10.1", (ROW, ROW + " / math.sqrt(output.shape[-1])")),
    "sums_multiplied": changed(
        "10.1", (ROW, "return output.float().sum(dim=-1) * output_gradient.float().sum(dim=-1)")
    ),
    "dimension_kept": changed("10.1", (ROW, ROW.replace("dim=-1", "dim=-1, keepdim=True"))),
    "delta_missing__and_averaged": changed(
        "10.1", (RESULT, "return probabilities * probability_gradients"), (ROW, ROW.replace(".sum(", ".mean("))
    ),
    "blind_rows_nan": changed(
        "10.1", (RESULT, RESULT.replace("probabilities *", "probabilities / probabilities.sum(dim=-1, keepdim=True) *"))
    ),
    "blind_rows_nan__by_a_softmax": changed(
        "10.1", (DELTA, "probabilities = torch.log(probabilities).softmax(dim=-1)\n    " + DELTA)
    ),
}

JACOBIAN = '''# Exercise 10.1 · One number for each query
def softmax_gradient(probabilities, probability_gradients):
    """Each row's Jacobian, written out."""
    diagonal = torch.diag_embed(probabilities)
    jacobian = diagonal - probabilities[..., :, None] * probabilities[..., None, :]
    return torch.einsum("hmjk,hmj->hmk", jacobian, probability_gradients)

def row_delta(output, output_gradient):
    return torch.einsum("hmd,hmd->hm", output.float(), output_gradient.float())
'''

MULTIPLIED_OUT = '''# Exercise 10.1 · One number for each query
def softmax_gradient(probabilities, probability_gradients):
    weighted = probabilities * probability_gradients
    return weighted - probabilities * weighted.sum(-1)[..., None]

def row_delta(output, output_gradient):
    delta = torch.zeros(output.shape[:2])
    for column in range(output.shape[2]):
        delta += output[:, :, column].float() * output_gradient[:, :, column].float()
    return delta
'''

UNUSUAL = {
    "the Jacobian of each row": JACOBIAN,
    "multiplied out, column by column": MULTIPLIED_OUT,
    "in float64": changed(
        "10.1", (ROW, "return (output.double() * output_gradient.double()).sum(dim=-1).float()")
    ),
}


def _by_einsum(letters, of="row_delta"):
    """The course's answer with Δ from an einsum."""
    if of == "row_delta":
        whole = f'torch.einsum("{letters}", output.float(), output_gradient.float())'
        return changed("10.1", ("(output.float() * output_gradient.float()).sum(dim=-1)", whole))
    whole = f'torch.einsum("{letters}", probabilities, probability_gradients)[..., None]'
    return changed("10.1", ("(probabilities * probability_gradients).sum(dim=-1, keepdim=True)", whole))


WRONG |= {
    "letters_differ": _by_einsum("hqd,hkd->hq"),
    "letters_differ__in_the_output": _by_einsum("hkd,hqd->hq"),
    "letters_differ__of_the_heads": _by_einsum("hqd,gqd->hq"),
    "letters_differ__of_both": _by_einsum("hqd,gkd->hq"),
    "letters_differ__of_probabilities": _by_einsum("hqk,hjk->hq", of="softmax_gradient"),
    "letters_differ__of_gradients": _by_einsum("hjk,hqk->hq", of="softmax_gradient"),
    "letters_differ__of_their_heads": _by_einsum("hqk,gqk->hq", of="softmax_gradient"),
    "modified_input__and_returned": changed(
        "10.1", ("return probabilities * (", "return probabilities.mul_("),
    ),
}
UNUSUAL |= {"einsum": _by_einsum("hqd,hqd->hq"), "einsum of P and dP": _by_einsum("hqk,hqk->hq", of="softmax_gradient")}


SUM = "return (output.float() * output_gradient.float()).sum(dim=-1)"
DELTA = "delta = (probabilities * probability_gradients).sum(dim=-1, keepdim=True)"


def _row_delta_by(letters, then=""):
    """The course's answer whose Δ is one contraction of O and dO."""
    return changed("10.1", (SUM, f'return torch.einsum("{letters}", output.float(), output_gradient.float()){then}'))


WRONG |= {
    "heads_or_queries_summed": _row_delta_by("hqd,hqd->q"),
    "heads_or_queries_summed__for_all_heads": _row_delta_by("hqd,hqd->q", ".expand(output.shape[:2]).clone()"),
    "heads_or_queries_summed__of_the_queries": _row_delta_by("hqd,hqd->h"),
    "heads_last": _row_delta_by("hqd,hqd->qh"),
    "heads_summed": changed(
        "10.1", (DELTA, 'delta = torch.einsum("hqk,hqk->q", probabilities, probability_gradients)[:, None]')
    ),
    "heads_summed__for_each_key": changed(
        "10.1", (DELTA, 'delta = torch.einsum("hqk,hqk->k", probabilities, probability_gradients)')
    ),
}
