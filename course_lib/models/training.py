"""Train the tiny byte-level model on random pieces of a text, in as few steps as possible.

The matrices of the blocks, each expert's for itself, are trained with Muon (Jordan et al., 2024), which gets as far in
three steps as AdamW does in five; embedding and norms with AdamW. Both warm up and then decay along a cosine.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from course_lib.hardware.device import default_device, interpreting
from course_lib.kernels.attention.operator import attention as course_attention
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.glue import TORCH, Glue
from course_lib.models.tiny import TINY, tiny_text
from course_lib.models.tokenizer import VOCABULARY, encode
from course_lib.models.torch_attention import torch_attention

STEPS, BATCH = 400, 4  # optimizer steps, and pieces of the text in each
MATRIX_RATE, OTHER_RATE, WARM_UP = 0.02, 4e-3, 20  # learning rates of Muon and of AdamW, steps of the warm-up


def train_tiny_model(
    config: ModelConfig = TINY,
    *,
    steps: int = STEPS,
    seed: int = 0,
    device: torch.device | str | None = None,
    text: str | None = None,
    report: Callable[[int, float], None] | None = None,
    attention: Callable = torch_attention,
    glue: Glue = TORCH,
) -> Decoder:
    """A decoder that has read the text.

    Args:
        config: the model's shape. Its vocabulary must hold all bytes, and each piece is `context` bytes long.
        steps: optimizer steps, each on 4 pieces.
        seed: of weights and pieces. The result is the same on the same machine, PyTorch and number of threads.
        device: "cpu" or "cuda"; the course's device when None.
        text: what to learn, longer than `context`; `tiny_text()` when None.
        report: called after each step with its number, from 1, and the loss in nats a byte.
        attention, glue: as `Decoder` takes them; autograd must pass through them.

    Returns the model in float32, in evaluation mode. Raises a ValueError that names the argument when one is too small.
    """
    if config.vocabulary < VOCABULARY:
        raise ValueError(f"config.vocabulary is {config.vocabulary}; a byte-level model needs at least {VOCABULARY}.")
    data = encode(tiny_text() if text is None else text)
    if len(data) <= config.context:
        raise ValueError(f"text has {len(data)} bytes; with this context at least {config.context + 1} are needed.")
    device = default_device() if device is None else torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(seed)
        model = Decoder(config, attention, glue)
        initialize(model)
    model.to(device).train()
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
    stacks = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 3]
    inside = [[nn.Parameter(matrix) for matrix in stack.detach()] for stack in stacks]  # each expert's, the same memory
    apart = {id(parameter) for parameter in matrices + stacks}
    others = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    matrices += [matrix for stack in inside for matrix in stack]
    optimizers = (
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.0),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98)),
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, steps))
        for optimizer in optimizers
    ]
    for step in range(1, steps + 1):
        loss = next_token_loss(model, random_pieces(data, BATCH, config.context, generator).to(device))
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stack, its_matrices in zip(stacks, inside):
            assert stack.grad is not None
            for matrix, gradient in zip(its_matrices, stack.grad):
                matrix.grad = gradient
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
        if report is not None:
            report(step, loss.item())
    return model.eval()


# Of the tiny model, what the interpreter trains in half a minute: one layer, and 36 programs a step.
INTERPRETED = dataclasses.replace(TINY, layers=1, width=64, query_heads=2, key_heads=1, hidden=128, context=64)
INTERPRETED_STEPS = 40


def loss_curves(
    attentions: Mapping[str, Callable] | None = None,
    *,
    glues: Mapping[str, Glue] | None = None,
    config: ModelConfig | None = None,
    steps: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> dict[str, list[float]]:
    """The losses of one training for each of several attentions or glues: same first weights, same pieces of text.

    Args:
        attentions: name -> attention as `Decoder` takes it, which autograd passes through. PyTorch's and the course's
            own when None.
        glues: instead of attentions, name -> glue as `Decoder` takes it, which autograd passes through.
        config, steps: of the training. When None the tiny model's 400 steps on a GPU; in the interpreter a smaller one
            of 1 layer, 2 heads and 64 tokens, and 40 steps.
        seed, device: as for `train_tiny_model`.

    Returns name -> the loss of each step, in nats a byte. Two right attentions begin alike to the last digits of
    float32. What they differ by in rounding grows with the steps, as it does between any two orders of addition.
    """
    if attentions is not None and glues is not None:
        raise ValueError("attentions and glues were both given; compare one of them at a time.")
    if attentions is None and glues is None:
        attentions = {"PyTorch": torch_attention, "ours": course_attention}
    parts = {name: (torch_attention, glue) for name, glue in (glues or {}).items()}
    parts |= {name: (attention, TORCH) for name, attention in (attentions or {}).items()}
    config = config or (INTERPRETED if interpreting() else TINY)
    steps = steps or (INTERPRETED_STEPS if interpreting() else STEPS)
    curves: dict[str, list[float]] = {}
    for name, (attention, glue) in parts.items():
        curves[name] = []

        def report(step: int, loss: float, losses: list[float] = curves[name]) -> None:
            losses.append(loss)

        train_tiny_model(config, steps=steps, seed=seed, device=device, report=report, attention=attention, glue=glue)
    return curves


def random_pieces(data: torch.Tensor, count: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Pieces of a text, int64 [count, context + 1]: `context` tokens and the one that follows each.

    data: int64 [length], length above `context`.
    """
    starts = torch.randint(0, len(data) - context, (count, 1), generator=generator)
    return data[starts + torch.arange(context + 1)]


def next_token_loss(model: Decoder, pieces: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of each next token, in nats. pieces: int64 [count, length + 1]."""
    return model.loss(pieces[:, :-1], pieces[:, 1:])


def initialize(model: Decoder) -> None:
    """Normal weights of standard deviation 1/√inputs; what is added to the stream starts smaller in deep models."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # a matrix, or one of each expert
            deviation = 1 / math.sqrt(parameter.shape[-1])
            if name.endswith(("output.weight", "down.weight", "down")):
                deviation /= math.sqrt(2 * model.config.layers)
            nn.init.normal_(parameter, std=deviation)


def learning_rate_share(step: int, steps: int) -> float:
    """What part of the full learning rate applies: up in a straight line, then down along a cosine to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - WARM_UP) / max(1, steps - WARM_UP))))
