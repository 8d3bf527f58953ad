"""Shards of decoders: logits, generation and gradients of the whole model, in float64, on two and on four ranks."""

import dataclasses
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from course_lib.hardware.ranks import Ranks
from course_lib.models.config import Latent, ModelConfig, with_latent
from course_lib.models.decoder import Decoder
from course_lib.models.parallel import shard, shard_config
from course_lib.models.training import initialize
from course_lib.serving.generation import generate

SMALL = ModelConfig(vocabulary=50, layers=2, width=24, query_heads=8, key_heads=4, head_dim=6, hidden=16, context=32)
CONFIGS = {
    "GQA": SMALL,
    "2 KV heads": dataclasses.replace(SMALL, key_heads=2),  # on four ranks each in two of them
    "1 KV head, QK-norm, tied": dataclasses.replace(SMALL, key_heads=1, normed_heads=True, tied=True),
    "window and sinks": dataclasses.replace(SMALL, sliding_window=3, sinks=True),
    "experts": dataclasses.replace(SMALL, experts=5, chosen=2, hidden=8),
    "latent": with_latent(SMALL, Latent(latent_dim=8, rope_dim=4, nope_dim=6, value_dim=5)),
}
SIZES = (2, 4)
TOKENS = torch.randint(50, (2, 10), generator=torch.Generator().manual_seed(1))
ONE = Ranks(0, 1, torch.device("cpu"))


def model_of(name):
    torch.manual_seed(0)
    model = Decoder(CONFIGS[name]).double()
    initialize(model)
    for weight in model.parameters():
        if weight.dim() == 1:  # norms and sinks, which begin alike for all heads
            weight.data += 0.3 * torch.randn_like(weight)
    return model


class Meeting:
    """Where threads leave what each has for all. One of them runs at a time: the interpreter of kernels needs that."""

    def __init__(self, size):
        self.barrier, self.turn, self.left = threading.Barrier(size, timeout=60), threading.Lock(), [None] * size

    def all(self, rank, one):
        """What each rank has brought, in their order."""
        self.left[rank] = one
        self.wait()
        brought = list(self.left)
        self.wait()  # nobody leaves the next one before all have read this one
        return brought

    def wait(self):
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


@dataclasses.dataclass(frozen=True)
class Thread(Ranks):
    """A rank that is a thread of this process: it costs no start of another."""

    meeting: Meeting

    def sum(self, x):
        return functools.reduce(torch.add, self.meeting.all(self.rank, x.detach().clone())).clone()

    def agree(self, **what):
        told = self.meeting.all(self.rank, what)
        if any(one != told[0] for one in told):
            raise ValueError(f"the ranks disagree: {told}")


def on_threads(function, size, *arguments):
    """What `function(ranks, *arguments)` returns on each rank, as `run_on_ranks` has it."""
    meeting = Meeting(size)

    def run(rank):
        with meeting.turn:
            try:
                return function(Thread(rank, size, torch.device("cpu"), meeting), *arguments)
            except BaseException:
                meeting.barrier.abort()
                raise

    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(run, rank) for rank in range(size)]
    for error in [one.exception() for one in running]:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [one.result() for one in running]


def what_a_shard_does(ranks, model):
    """(logits, generated tokens, loss, gradients, and what they were before they were summed) of this rank's shard."""
    part = shard(model, ranks)
    with torch.no_grad():
        logits = part(TOKENS)
        written = generate(part, TOKENS[:, :4], 4)
    loss = part.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    loss.backward()
    before = {key: weight.grad.clone() for key, weight in part.named_parameters()}
    part.sum_gradients()
    return logits, written, loss, {key: weight.grad for key, weight in part.named_parameters()}, before


@functools.cache
def found_by_ranks(size, name):
    return on_threads(what_a_shard_does, size, model_of(name))


def close(found, wanted):
    """RMSNorm and rotation are computed in float32, so a last bit of it may differ."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", SIZES)
def test_a_shard_is_the_whole_model_with_and_without_a_cache(size, name):
    model = model_of(name)
    with torch.no_grad():
        logits, written = model(TOKENS), generate(model, TOKENS[:, :4], 4)
    ranks = found_by_ranks(size, name)
    for its_logits, its_written, *_ in ranks:
        close(its_logits, logits)
        assert torch.equal(its_logits, ranks[0][0]), "ranks choose by the same bits"
        assert torch.equal(its_written, written)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_the_whole_model_s(size, name):
    """Those of heads and hidden numbers, of what is whole, and of KV heads that several ranks keep."""
    model = model_of(name)
    loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    loss.backward()
    of_gradients = Decoder(model.config).double()
    of_gradients.load_state_dict({key: weight.grad for key, weight in model.named_parameters()})
    for rank, (_, _, its_loss, found, _) in enumerate(found_by_ranks(size, name)):
        wanted = dict(shard(of_gradients, Ranks(rank, size, ONE.device)).named_parameters())
        close(its_loss, loss)
        assert found.keys() == wanted.keys()
        for key, gradient in found.items():
            assert gradient.abs().max() > 0
            close(gradient, wanted[key].detach())


def summed_by(size, name):
    """Of the first block: whose gradients `sum_gradients` changed, on any rank."""
    return {
        key.removeprefix("blocks.0.").removesuffix(".weight")
        for *_, found, before in found_by_ranks(size, name)
        for key, gradient in found.items()
        if not torch.equal(gradient, before[key]) and not key.startswith("blocks.1.")
    }


def test_only_gradients_that_ranks_have_in_part_are_summed():
    key_and_value, head_norms = {"attention.key", "attention.value"}, {"attention.query_norm", "attention.key_norm"}
    router = {"feed_forward.router"}
    latent = {"attention.compress", "attention.rotary_key", "attention.latent_norm"}
    found = {(size, name): summed_by(size, name) for size in SIZES for name in CONFIGS}
    assert found == {
        (2, "GQA"): set(), (4, "GQA"): set(), (2, "2 KV heads"): set(), (4, "2 KV heads"): key_and_value,
        (2, "1 KV head, QK-norm, tied"): key_and_value | head_norms,
        (4, "1 KV head, QK-norm, tied"): key_and_value | head_norms,
        (2, "window and sinks"): set(), (4, "window and sinks"): set(),
        (2, "experts"): router, (4, "experts"): router, (2, "latent"): latent, (4, "latent"): latent,
    }  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_s_memory_is_its_share(name):
    """Each weight lies in memory of its own, which is no larger than it, and the model keeps its own."""
    model = model_of(name)
    part = shard(model, Ranks(1, 4, ONE.device))
    assert sum(weight.numel() for weight in part.parameters()) == part.config.parameters
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in part.parameters())
    for weight in part.parameters():
        weight.data.zero_()
    assert all(weight.any() for weight in model.parameters())


def test_one_rank_has_the_whole_model_and_keeps_what_it_is_asked_for():
    model = model_of("GQA").eval().requires_grad_(False)
    part = shard(model, ONE)
    assert torch.equal(part(TOKENS), model(TOKENS)) and part.config == model.config
    assert not part.training and not any(weight.requires_grad for weight in part.parameters())


@pytest.mark.parametrize(
    "changes, size, words",
    [
        ({"query_heads": 6, "key_heads": 3, "hidden": 12}, 4, "query_heads is 6.* to 1, 3, 6 ranks"),
        ({"hidden": 18}, 4, "hidden is 18.* to 1, 2 ranks"),
        ({"query_heads": 12, "key_heads": 3, "hidden": 12}, 4, "key_heads is 3.* to 1, 3, 6, 12 ranks"),
        ({}, 16, "query_heads is 8.* to 1, 2, 4, 8 ranks"),
    ],
)
def test_sizes_that_cannot_be_shared_out_are_told_with_those_that_can(changes, size, words):
    with pytest.raises(ValueError, match=words):
        shard_config(dataclasses.replace(SMALL, **changes), size)


def test_a_shard_is_not_shared_out_again():
    with pytest.raises(ValueError, match="a shard"):
        shard(shard(model_of("GQA"), Ranks(0, 2, ONE.device)), Ranks(0, 2, ONE.device))
