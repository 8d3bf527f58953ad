"""The rule that balances a router's experts, for exercise 18.5: its inputs, its meaning and its slips."""

from __future__ import annotations

import torch

from course_lib.checker import edits
from course_lib.checker.specification.contract import Contract, Level


def balance_of(bias, load, rate):
    load = load.double()
    difference = load.mean() - load
    moved = bias + rate * difference.sign().to(bias.dtype)
    return moved - moved.mean()


def to_balance(draw, *, experts, loads, mean, rate):
    load = {
        "any": lambda: draw.integers(experts, low=0, high=1000),
        "equal": lambda: torch.full((experts,), 37),
        "some equal the mean": lambda: 50 + torch.cat(
            [torch.tensor([-7, 7] * (experts // 3)), torch.zeros(experts - experts // 3 * 2)]).long(),
        "one full expert": lambda: (torch.arange(experts) == experts // 2) * 4096,
        "large": lambda: 2**40 - draw.integers(experts, low=0, high=3),
        "of all sizes": lambda: 2 ** draw.integers(experts, low=0, high=41) - draw.integers(experts, low=0, high=2),
        "a mean between two loads": lambda: 20 + (torch.arange(experts) > 0).long(),
    }[loads]()  # fmt: skip
    return draw.normal(experts, scale=0.1, shift=mean), load[draw.permutation(experts)], rate


BALANCES = Contract(
    to_balance,
    choices={
        "experts": (1, 2, 8, 65), "mean": (0.0, -2.0), "rate": (0.0, 0.001, 0.1),
        "loads": tuple(Level(one, f"loads: {one}") for one in (
            "any", "equal", "some equal the mean", "one full expert", "large", "of all sizes",
            "a mean between two loads")),
    },
    says={"experts": "at least 1", "mean": "its mean may be any number", "rate": "0 or more", "loads": "from 0 to 2⁴⁰"},
    entry="balanced", most=14,
)  # fmt: skip

DIFFERENCE, MOVED = "load.mean() - load", "moved - moved.mean()"
IN_BALANCE = (
    *edits("The sign is the wrong way round: an expert with more tokens than the mean got a larger bias, and will get "
        "still more.", sign_turned=("bias + rate", "bias - rate")),
    *edits("The step grows with the difference from the mean. Only its sign counts.",
        not_the_sign=("difference.sign()", "difference"),
        not_the_sign__cut=("difference.sign()", "difference.clamp(-1, 1)"),
        not_the_sign__tanh=("difference.sign()", "difference.tanh()"),
        not_the_sign__share=("difference.sign()", "(difference / load.mean())"),
        not_the_sign__of_all=("difference.sign()", "(difference / load.sum())")),
    *edits("The mean of the new biases is not subtracted.", not_recentred=(MOVED, "moved + 0")),
    *edits("The mean was taken off the wrong numbers. Subtract the mean of the new biases, after the step, from all.",
        recentred_wrongly=(MOVED, "moved - bias.mean()"),
        recentred_wrongly__step=(MOVED, "moved - (moved - bias).mean()"),
        recentred_wrongly__sum=(MOVED, "moved - moved.sum()"), recentred_wrongly__plus=(MOVED, "moved + moved.mean()"),
        recentred_wrongly__largest=(MOVED, "moved - moved.max()"),
        recentred_wrongly__one_less=(MOVED, "moved - moved.sum() / max(1, len(moved) - 1)"),
        recentred_wrongly__softmax=(MOVED, "moved.softmax(0)"),
        recentred_wrongly__median=(MOVED, "moved - moved.median()")),
    *edits("The loads were compared with something else than their mean.",
        not_the_mean=(DIFFERENCE, "load.median() - load"), not_the_mean__one=(DIFFERENCE, "1 - load"),
        not_the_mean__share=(DIFFERENCE, "1 / len(load) - load"),
        not_the_mean__largest=(DIFFERENCE, "load.max() - load"),
        not_the_mean__half=(DIFFERENCE, "(load.max() + load.min()) / 2 - load"),
        not_the_mean__0=(DIFFERENCE, "0 - load"), not_the_mean__sum=(DIFFERENCE, "load.sum() - load"),
        not_the_mean__smallest=(DIFFERENCE, "load.min() - load"),
        not_the_mean__not_empty=(DIFFERENCE, "load[load > 0].mean() - load")),
    *edits("The mean of the loads was rounded to a whole number. It may lie between two loads.",
        mean_rounded=(DIFFERENCE, "load.mean().floor() - load"),
        mean_rounded__up=(DIFFERENCE, "load.mean().round() - load"),
        mean_rounded__ceil=(DIFFERENCE, "load.mean().ceil() - load")),
    *edits("An expert whose load equals the mean was moved. It keeps its bias, until the mean is subtracted.",
        equal_moved=("difference.sign()", "torch.where(difference > 0, 1.0, -1.0)"),
        equal_moved__up=("difference.sign()", "torch.where(difference >= 0, 1.0, -1.0)")),
    *edits("Only experts on one side of the mean were moved. Move those below it up and those above it down.",
        one_side=("difference.sign()", "difference.sign().clamp(min=0)"),
        one_side__down=("difference.sign()", "difference.sign().clamp(max=0)")),
    *edits("The loads were rounded to float32, which holds whole numbers up to 2²⁴ alone. Compare exact numbers, or "
        "float64.", loads_rounded=("load.double()", "load.float()"),
        loads_rounded__mean=(DIFFERENCE, "load.float().mean() - load")),
    *edits("The loads went through int32, which ends at 2³¹ - 1.", loads_wrap=("load.double()", "load.int().double()")),
    *edits("The old bias is lost. The step is added to it.", bias_replaced=("bias + rate", "rate")),
    *edits("The rate is missing, or counts twice. The step is rate · sign.",
        rate_wrong=("rate * difference", "1 * difference"),
        rate_wrong__twice=("rate * difference", "2 * rate * difference"),
        rate_wrong__squared=("rate * difference", "rate * rate * difference")),
)  # fmt: skip
