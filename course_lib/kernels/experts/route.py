"""The router of a mixture of experts: which k experts a token goes to, and how much each of them counts.

    kind            chosen by          weights of the k chosen                            models
    softmax         logits             softmax over all experts, as it is                 OLMoE
    renormalised    logits             the same, divided by their sum                     Mixtral, Qwen3
    sigmoid         σ(logits) + bias   σ(logits), divided by their sum, times scale       DeepSeek-V3

A softmax over the k chosen alone is the second kind, never the first. FLOPs: 2 · width · experts a token for the
logits, which come from a product before this; here a few for each logit. At 128 experts and 2048 numbers a token that
is half a megaFLOP, where eight experts with 768 hidden numbers do 75.

Without a bias the order of the scores is that of the logits. So the logits choose: of a softmax in float32, all that
lie more than 104 below the largest are 0 and no longer differ. Weights of the sigmoid kind are a softmax of
log σ(logits), which is the same quotient, and stays one where every σ is too small for a number.

The bias has no gradient. `balanced` moves it after each step, towards experts with less work than others, so that no
second loss pulls at the weights.

Sources: Shazeer et al., Outrageously Large Neural Networks, arXiv 1701.06538; DeepSeek-AI, DeepSeek-V3, arXiv
2412.19437; Wang et al., Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664.
"""

import torch
import torch.nn.functional as F

from course_lib.kernels.common.checks import FLOAT_DTYPES, check_dimensions

ROUTERS = ("softmax", "renormalised", "sigmoid")


def route(
    logits: torch.Tensor, k: int, kind: str, bias: torch.Tensor | None = None, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts int64 [tokens, k], weights float32 [tokens, k]) of each token, the largest score first.

    Of equal scores the smaller expert comes first. Gradients of the weights reach the logits.

    Args:
        logits: [tokens, experts], floating point; float64 gives float64 weights. Tokens may be 0.
        k: experts of a token, from 1 to all.
        kind: "softmax", "renormalised" or "sigmoid", as above.
        bias: [experts], added to the scores that choose and to nothing else; with "sigmoid" alone, or None.
        scale: factor of the weights, with "sigmoid" alone.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_router(logits, k, kind, bias, scale)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    choosing = wide if bias is None else torch.sigmoid(wide) + bias  # [tokens, experts]
    experts = choosing.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    if kind == "sigmoid":
        return experts, torch.softmax(F.logsigmoid(wide).gather(-1, experts), dim=-1) * scale
    weights = torch.softmax(wide, dim=-1).gather(-1, experts)
    return experts, weights if kind == "softmax" else weights / weights.sum(dim=-1, keepdim=True)


def balanced(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """A router's bias after a step: rate more for experts with less than the mean load, rate less for those with more.

    Then all of it is moved so that its mean is 0: what is added to every score chooses nothing.

    Args:
        bias: [experts], floating point.
        load: [experts], how many choices of the step fell on each expert: of all of them, as they were made with this
            bias.
        rate: above 0, as 0.001.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_dimensions("bias", bias, "[experts]")
    if load.shape != bias.shape:
        raise ValueError(f"load has shape {tuple(load.shape)}; it must be that of bias, {tuple(bias.shape)}.")
    if not rate > 0:
        raise ValueError(f"rate is {rate!r}; it must be above 0.")
    moved = bias + rate * torch.sign(load.sum() - load * load.numel())  # whole numbers, so equal is equal
    return moved - moved.mean()


def check_router(logits, k, kind, bias, scale) -> None:
    check_dimensions("logits", logits, "[tokens, experts]", empty_allowed=True)
    if logits.dtype not in (*FLOAT_DTYPES, torch.float64):
        raise ValueError(f"logits has dtype {logits.dtype}; it must be floating point.")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k is {k!r}; it must be an int from 1 to {logits.shape[1]}, the number of experts.")
    if kind not in ROUTERS:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(ROUTERS)}.")
    if kind != "sigmoid" and (bias is not None or scale != 1.0):
        name, given = ("scale", scale) if bias is None else ("bias", "given")
        raise ValueError(f"{name} is {given} and kind is {kind!r}; bias and scale belong to 'sigmoid'.")
    if bias is not None and (bias.shape != logits.shape[1:] or not bias.is_floating_point()):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}; it must be {list(logits.shape[1:])}, one "
            "floating-point number for each expert."
        )
