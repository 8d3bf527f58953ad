# %% [markdown]
# # 16 · An engine that talks

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, progress, solution

import math

import torch
import triton
import triton.language as tl

device = default_device()

# %% [markdown]
# **Which guesses may stay?** A cheap model guesses the next k tokens and draws each from its own probabilities q. The
# large model then computes its probabilities p for all k + 1 places in one step. Go through the guesses in order.
# Accept a guessed token x with the chance min(1, p(x) / q(x)). If q gives it 0.5 and p only 0.3, it stays six times in
# ten. At the first refusal, draw another token in its place from max(p - q, 0), scaled so that the chances add up to 1,
# and stop. If all k are accepted, draw one more token from p's last row.
#
# What is appended then has exactly the law of p, as if the large model had drawn every token itself. Your function is
# judged by this law and not by luck: the check calls it for every draft and on a fine grid of uniforms, and adds up the
# chances of all answers. It also tells you the *total variation*, half the sum of |chance - p| over the tokens.


# %%
# Exercise 16.4 · Accept or refuse
def accept(
    draft_tokens: torch.Tensor,
    draft_probabilities: torch.Tensor,
    target_probabilities: torch.Tensor,
    uniforms: torch.Tensor,
) -> list[int]:
    """The tokens that one step of speculative sampling appends.

    draft_tokens: int64 [k], the guesses; k may be 0. Token i was drawn from row i of draft_probabilities, so its
        probability there is above 0.
    draft_probabilities: q, float32 [k, vocabulary]. A row adds up to 1. It may be 1 on a single token, as where the
        guess was copied from the prompt, or be equal to p's row.
    target_probabilities: p, float32 [k + 1, vocabulary]. Row i is for the place of guess i, the last for the token
        behind all guesses. It may be 0 where q is not.
    uniforms: float32 [k + 1], independent, each between 0 and 1: uniforms[i] for the decision on guess i, the last for
        the draw of the token that you append at the end.
    Returns: a list of 1 to k + 1 tokens: the guesses that are accepted, then the one that is drawn. If q drew the
    guesses, they have the law of p, and as many guesses are accepted as the rule above accepts. Which uniforms lead to
    which token is up to you. No argument is changed.
    """
    # BEGIN SOLUTION
    tokens = []
    weights = target_probabilities[-1]
    for place, token in enumerate(draft_tokens.tolist()):
        p, q = target_probabilities[place], draft_probabilities[place]
        if uniforms[place] >= p[token] / q[token]:
            weights = (p - q).clamp(min=0)
            break
        tokens.append(token)
    edges = weights.cumsum(0)
    tokens.append(int((uniforms[-1] * edges[-1] > edges[:-1]).sum()))
    return tokens
    # END SOLUTION


# %%
best_accept = check("16.4", accept).best
