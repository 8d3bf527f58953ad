"""What sampling means, by sorting: the kept tokens, their exact probabilities, and the token that the noise chooses.

The filters of a row, in this order (that of transformers and vLLM for top-k and top-p):

    temperature  p = softmax(logits / temperature); below LEAST_TEMPERATURE: the largest alone, the first of equals
    top-k        the k first, in the order of p, and of equals the smaller token first; 0 or k >= vocabulary: all
    top-p        of those, renormalised: the first ones, until they weigh top_p together; the first always; 1: all
    min-p        of those: each with p >= min_p · the largest p; 0: all

Each filter keeps a beginning of one order. What a row keeps is therefore a beginning, too: the shortest of the three.
"""

import torch

from course_lib.kernels.sampling.noise import noise_reference

LEAST_TEMPERATURE = 1e-5  # logits / temperature would soon overflow; whoever asks for less means the largest
REFUSED = -1  # the token of a row that has no answer


def refused(logits, temperature, top_k, top_p, min_p) -> torch.Tensor:
    """bool [rows]: the logits hold NaN or +inf, or nothing but -inf; or an option is outside what it may be."""
    largest = logits.amax(dim=-1)  # NaN if there is one
    good = (largest > -torch.inf) & (largest < torch.inf) & (temperature >= 0) & (temperature < torch.inf)
    return ~(good & (top_k >= 0) & (top_p >= 0) & (top_p <= 1) & (min_p >= 0) & (min_p <= 1))


def distribution_reference(logits, temperature, top_k, top_p, min_p) -> torch.Tensor:
    """The probabilities after the filters, float64 [rows, vocabulary]; NaN in a row that is refused.

    logits [rows, vocabulary]; the options are tensors [rows].
    """
    ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    temperature, top_k, top_p, min_p = (option[:, None] for option in (temperature, top_k, top_p, min_p))
    bad = refused(logits, *(option[:, 0] for option in (temperature, top_k, top_p, min_p)))
    rank = torch.arange(logits.shape[1], device=logits.device)
    greedy = temperature < LEAST_TEMPERATURE
    weights = torch.exp((ordered - ordered[:, :1]) / torch.where(greedy, 1, temperature).double())  # the first is 1
    weights = torch.where(greedy & (rank > 0), 0, weights)
    weights = torch.where((top_k > 0) & (rank >= top_k), 0, weights)
    before = weights.cumsum(dim=-1).roll(1, dims=-1)  # of all that stand before a token
    within = (before < top_p.double() * weights.sum(dim=-1, keepdim=True)) | (rank == 0) | (top_p == 1)
    weights = torch.where(within & (weights >= min_p), weights, 0)
    weights = torch.where(bad[:, None], torch.nan, weights)
    return torch.zeros_like(weights).scatter(1, tokens, weights / weights.sum(dim=-1, keepdim=True))


def sample_reference(logits, temperature, top_k, top_p, min_p, seeds, positions) -> torch.Tensor:
    """int64 [rows]: a draw from that distribution by the noise of (seed, position, token); REFUSED where it is NaN."""
    distribution = distribution_reference(logits, temperature, top_k, top_p, min_p)
    chances = torch.log(distribution) - torch.log(noise_reference(seeds, positions, logits.shape[1]))
    return torch.where(distribution.isnan().any(dim=-1), REFUSED, chances.argmax(dim=-1))
