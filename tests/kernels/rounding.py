"""What float32 leaves undecided of a result: plain PyTorch as it rounds here, and as it rounds elsewhere.

A kernel may err twice as much as plain PyTorch in the same dtype. Of one plain result that is a lottery: where large
scores cancel, it may happen to hit the last digit, and another processor's order of additions would not.
"""

import math

import torch

from course_lib.checker.judge.disturbed import Disturbed

DRAWS = 8  # of which all are lucky in one element once in a few thousand, and in a whole tensor never


def rounded_otherwise(function, *args, **options):
    """What a plain function makes, and what it would make if sums were added in other orders: a list of results."""
    results = [function(*args, **options)]
    for seed in range(DRAWS):
        with torch.no_grad(), Disturbed(seed):
            results.append(function(*args, **options))
    return results


def largest_error(results, exact):
    """How far the finite elements of some results are off from the exact ones, at most."""
    finite = exact != -math.inf
    errors = [torch.where(finite, result.double() - exact, 0.0).abs().nan_to_num(nan=0.0).max() for result in results]
    return float(max(errors))
