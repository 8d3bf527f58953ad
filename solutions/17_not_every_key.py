# %% [markdown]
# # 17 · Not every key: windows, sinks and chosen keys

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

# %% [markdown]
# **A sink, over splits, and its gradient.** A learned sink is one logit $s$ for each head. It joins the denominator of
# the softmax and has no value, so a row may give a part of its weight to nothing. With the keys' scores $x_j$ the lse
# and the output of a row are
#
# $$L = \log\Big(e^{s} + \sum_j e^{x_j}\Big), \qquad O = \sum_j e^{x_j - L}\, v_j.$$
#
# If the keys are split, each split hands over its own log-sum-exp and its average, without the sink. The merge adds
# the sink, once. The sink takes the share $p = e^{s - L}$ of a row. Its gradient follows from that: if $s$ grows by a
# little $\epsilon$, then $O$ loses $\epsilon\, p\, O$. So $\partial\,\text{loss} / \partial s = -\sum p \cdot
# \text{rowsum}(O \circ dO)$, summed over the rows. Your merge must be right for sinks of $\pm 10^4$ too, which a
# training run that goes astray does produce.


# %%
# Exercise 17.4 · A sink, over splits, and its gradient
def merge(outputs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the keys of all splits and one sink for each head.

    outputs: float32 [splits, rows, heads, head_dim], splits from 1 on: each split's average of its values by its own
        softmax. Where a split saw no key, no one has written its output: it may hold anything, NaN too.
    lses: float32 [splits, rows, heads], natural logarithms of any size to ±20,000: a split's log-sum-exp without the
        sink, -inf where it saw no key.
    sinks: float32 [heads], natural units, of any size to ±10⁴, or -inf: that head has no sink.
    Returns: output [rows, heads, head_dim] and lse [rows, heads], float32. lse includes the sink. Where no split saw a
    key, the output is 0, and lse is the sink: -inf where there is none. No argument is changed. All tensors are
    contiguous.
    """
    # BEGIN SOLUTION
    outputs = torch.where((lses == -math.inf)[..., None], 0.0, outputs)
    largest = torch.maximum(lses.amax(dim=0), sinks)
    reference = torch.where(largest == -math.inf, 0.0, largest)
    weights = torch.exp(lses - reference)
    total = weights.sum(dim=0) + torch.exp(sinks - reference)
    divisor = torch.where(total == 0, 1.0, total)
    output = (weights[..., None] * outputs).sum(dim=0) / divisor[..., None]
    return output, largest + torch.log(divisor)
    # END SOLUTION


def sink_gradient(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, output_gradient: torch.Tensor
) -> torch.Tensor:
    """The gradient of the loss by each head's sink.

    output, output_gradient: O and dO [rows, heads, head_dim], float32, float16 or bfloat16, and both the same.
    lse: float32 [rows, heads], as `merge` returns it: the sink is included. In a row that saw no key, O is 0 and lse
        is the sink.
    sinks: float32 [heads], as above. A head without a sink gets 0.
    Returns: [heads], float32, computed in float32. No argument is changed. All tensors are contiguous.
    """
    # BEGIN SOLUTION
    share = torch.where(sinks == -math.inf, 0.0, torch.exp(sinks - lse))
    return -(share * (output.float() * output_gradient.float()).sum(dim=-1)).sum(dim=0)
    # END SOLUTION


# %%
best_merge, best_sink_gradient = check("17.4", merge, sink_gradient).best
