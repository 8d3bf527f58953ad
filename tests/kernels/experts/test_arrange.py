"""An arrangement against the plain one: every choice once, in tiles of one expert, and every place written."""

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.experts.arrange import arrange, arrange_reference

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


def choices(tokens: int, k: int, count: int, seed=0, missing=False) -> torch.Tensor:
    """Distinct experts for each token, some of them -1 with `missing`."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(tokens, count, generator=generator).argsort(dim=1)[:, :k]
    return experts.where(torch.rand(tokens, k, generator=generator) < 0.7, -1) if missing else experts


def assert_right(experts, count, block):
    found = arrange(experts, count, block)
    slots, tile_experts = arrange_reference(experts, count, block)
    assert torch.equal(found.slots[: len(slots)], slots) and (found.slots[len(slots) :] == found.sentinel).all()
    assert torch.equal(found.tile_experts[: len(tile_experts)], tile_experts)
    assert (found.tile_experts[len(tile_experts) :] == -1).all()
    assert found.slots.numel() == found.tile_experts.numel() * block and found.sentinel == experts.numel()
    starts = [int((tile_experts < expert).sum()) for expert in range(count + 1)]
    assert found.first_tiles.tolist() == starts
    for slot, place in enumerate(found.places.flatten().tolist()):
        served = 0 <= experts.flatten()[slot] < count
        assert found.slots[place] == slot if served else place == -1
    return found


@pytest.mark.parametrize("tokens, k, count", [(1, 1, 1), (1, 8, 64), (37, 3, 5), (50, 1, 9), (64, 2, 2)])
@pytest.mark.parametrize("block", [1, 16, 128])
@pytest.mark.parametrize("missing", [False, True])
def test_every_choice_has_a_place_in_a_tile_of_its_expert(tokens, k, count, block, missing):
    found = assert_right(choices(tokens, k, count, missing=missing), count, block)
    assert tokens == 0 or found.block == block


def test_an_expert_with_all_tokens_and_others_with_none():
    found = assert_right(torch.full((32, 1), 3), 6, 16)
    assert found.tile_experts.tolist() == [3, 3, -1, -1, -1, -1, -1][: len(found.tile_experts)]


@pytest.mark.parametrize("spread", [[1] * 8, [17] * 8, [1, 1, 1, 1, 1, 1, 1, 129]])
def test_there_is_room_for_the_worst_that_can_come(spread):
    """A token more than fills a tile, for every expert."""
    assert_right(torch.repeat_interleave(torch.arange(8), torch.tensor(spread))[:, None], 8, 16)


def test_no_tokens_and_nothing_served():
    assert assert_right(torch.zeros(0, 2, dtype=torch.int64), 4, 16).slots.numel() == 0
    assert (assert_right(torch.full((5, 2), -1), 4, 16).tile_experts == -1).all()


def test_a_number_that_is_no_expert_is_not_served():
    assert_right(torch.tensor([[0, 4], [7, 3], [-5, 1]], dtype=torch.int32), 4, 16)


def test_many_choices_take_several_rounds_and_any_strides():
    """Of 5000 choices 4096 at once; a router hands on the first columns of a sort."""
    wide = torch.rand(1000, 7, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    assert_right(wide[:, :5], 6, 64)
    assert_right(wide.t()[2:4, ::3], 7, 16)


def test_every_place_is_written_once_and_nothing_else():
    experts = choices(37, 3, 5, missing=True)
    report = metered(arrange, experts, 5, 16)
    assert not report.out_of_bounds and report.contended_bytes == 0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"experts": torch.zeros(4, dtype=torch.int64)}, ["experts has shape (4,)", "[tokens, k]"]),
        ({"experts": torch.zeros(4, 2)}, ["experts has dtype torch.float32", "torch.int64"]),
        ({"experts": torch.zeros(4, 0, dtype=torch.int64)}, ["experts has shape (4, 0)", "at least one choice"]),
        ({"count": 0}, ["count is 0"]),
        ({"block": True}, ["block is True"]),
    ],
)
def test_a_bad_argument_is_refused_with_what_is_allowed(change, words):
    with pytest.raises(ValueError) as refusal:
        arrange(**{"experts": torch.zeros(4, 2, dtype=torch.int64), "count": 3, "block": 16} | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
