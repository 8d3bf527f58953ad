"""The small model on the fused kernels of a GPU: what it says, and what it learns."""

import copy

import torch

from course_lib.models.decoder import Decoder
from course_lib.models.glue import FUSED, TORCH
from course_lib.models.tiny import TINY
from course_lib.models.training import initialize, loss_curves


def test_the_logits_err_no_more_than_those_of_pytorchs_operations():
    torch.manual_seed(0)
    model = Decoder(TINY)
    initialize(model)
    model.cuda().requires_grad_(False)
    tokens = torch.randint(256, (3, 200), device="cuda")
    wanted = copy.deepcopy(model).double()(tokens)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model.to(dtype)
        errors = []
        for model.glue in (TORCH, FUSED):
            errors.append((model(tokens) - wanted).norm() / wanted.norm())
        assert errors[1] <= 2 * errors[0] + torch.finfo(dtype).eps


def test_it_learns_what_the_model_of_pytorchs_operations_learns():
    curves = loss_curves(glues={"PyTorch": TORCH, "fused": FUSED}, steps=60)
    pairs = list(zip(curves["PyTorch"], curves["fused"]))
    assert all(abs(theirs - ours) < 1e-3 for theirs, ours in pairs[:5])
    assert all(abs(theirs - ours) < 0.1 for theirs, ours in pairs)
    assert curves["fused"][-1] < curves["fused"][0] - 1
