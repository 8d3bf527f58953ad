"""A decoder with experts: each token passes those that its router chose, by PyTorch's operations or by the kernels."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.kernels.experts.arrange import arrange
from course_lib.kernels.experts.combine import combine
from course_lib.kernels.experts.route import route
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.glue import FUSED, TORCH
from course_lib.models.kinds import KINDS
from course_lib.models.layers import Experts
from course_lib.models.plugged import experts_of_functions
from course_lib.models.training import initialize, train_tiny_model
from course_lib.serving.generation import complete
from course_lib.serving.packed import PackedDecoder
from course_lib.serving.single import SingleDecoder

SMALL = ModelConfig(vocabulary=256, layers=2, width=24, query_heads=2, key_heads=1, head_dim=16, hidden=10, context=32)
EXPERTS = dataclasses.replace(SMALL, experts=5, chosen=2)


def model_of(config=EXPERTS):
    torch.manual_seed(0)
    model = Decoder(config)
    initialize(model)
    return model


def test_a_block_is_the_weighted_sum_of_its_two_best_experts():
    torch.manual_seed(0)
    block, x = Experts(6, 7, 5, 2).double(), torch.randn(2, 3, 6).double()
    found = block(x)
    for row, result in zip(x.view(-1, 6), found.view(-1, 6)):
        scores = F.softmax(block.router.weight @ row, dim=0)
        wanted, best = torch.zeros(6).double(), scores.topk(2)
        for score, expert in zip(best.values / best.values.sum(), best.indices):
            gate, up = (block.gate_up[expert] @ row).chunk(2)
            wanted += score * (block.down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(result, wanted)


@pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter")
def test_the_kernels_give_the_same_loss_and_the_same_gradients():
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(1))
    found = []
    for glue in (TORCH, dataclasses.replace(TORCH, experts=FUSED.experts)):
        model = model_of()
        model.glue = glue
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    for plain, ours in zip(*found, strict=True):
        assert plain.abs().max() > 0
        assert (plain - ours).abs().max() <= 100 * torch.finfo(torch.float32).eps * plain.abs().max()


def test_another_glue_is_what_runs():
    model = model_of()
    model.glue = dataclasses.replace(TORCH, experts=lambda x, *_: torch.zeros_like(x))
    dense = model_of(SMALL)
    dense.load_state_dict(model.state_dict(), strict=False)
    dense.glue = dataclasses.replace(TORCH, gated=lambda gate, up: torch.zeros_like(gate))
    tokens = torch.arange(7)[None]
    assert torch.equal(model(tokens), dense(tokens))


@pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter")
def test_functions_as_a_learner_writes_them_run_it():
    """The course's own, with the signatures of chapter 18; places without a slot hold NaN."""
    made = []

    def arranged(experts, count, block):
        made.append(arrange(experts, count, block))
        tiles = int(made[-1].first_tiles[-1])
        return made[-1].slots[: tiles * block], made[-1].tile_experts[:tiles]

    def product(x, weights, slots, tile_experts, k, block_n, block_k):
        rows = [x[min(slot // k, len(x) - 1)] @ weights[tile_experts[place // 16]].mT for place, slot in
                enumerate(slots.tolist())]  # fmt: skip
        return torch.stack(rows).where((slots < len(x) * k)[:, None], torch.nan)

    def combined(rows, slots, weights):
        padded = rows.new_full((len(made[-1].slots) - len(rows), rows.shape[1]), torch.nan)
        return combine(torch.cat([rows, padded]), made[-1], weights)

    model, tokens = model_of().requires_grad_(False), torch.arange(7)[None]
    wanted = model(tokens)
    model.glue = experts_of_functions(route, arranged, product, combined)
    torch.testing.assert_close(model(tokens), wanted)
    assert len(made) == 2
    model.glue = experts_of_functions(lambda *given: route(*given[:2], "softmax"), arranged, product, combined)
    assert (model(tokens) - wanted).abs().max() > 1e-3


def test_it_writes_the_same_with_a_cache_and_without():
    model = model_of().eval()
    assert complete(model, "Alice", 6) == complete(model, "Alice", 6, cached=False)


def test_training_moves_every_expert_and_the_router():
    before = model_of()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = train_tiny_model(EXPERTS, steps=3, device="cpu", text="Alice was beginning to get very tired. " * 9)
    for (name, was), now in zip(before.named_parameters(), model.parameters(), strict=True):
        moved = (now - was).flatten(1).abs().amax(1) if was.dim() == 3 else (now - was).abs().max()
        assert (moved > 1e-5).all(), name


def test_the_kind_has_as_many_numbers_as_its_docstring_says():
    assert (KINDS["experts"].parameters, KINDS["experts"].active_parameters) == (470_880, 249_696)
    assert KINDS["GQA"].parameters == 394_080


def test_those_who_know_one_block_a_layer_refuse():
    keys = torch.zeros(2, 1, 1, 16, 16)
    for who in (lambda model: SingleDecoder(model, 16), lambda model: PackedDecoder(model, keys, keys, 16)):
        with pytest.raises(ValueError, match="config.experts is 5"):
            who(model_of())
