"""Steps of one token each, packed and captured: the tokens of the plain step, whoever comes and goes."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_lib.hardware.device import interpreting
from course_lib.hardware.graphs import captured_on_cpu
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_reference
from course_lib.kernels.fused.rope_parts import turned_halves
from course_lib.kernels.fused.swiglu import swiglu_reference
from course_lib.kernels.products import dispatch, workspace
from course_lib.kernels.products.tiles import MOST_ROWS, few_rows_tiles
from course_lib.kernels.sampling.reference import sample_reference
from course_lib.serving import fast_step, packed
from course_lib.serving.caches.ragged import RaggedPages, Run
from course_lib.serving.fast_step import FastStep, FastSteps, batch_sizes, column_sizes
from course_lib.serving.packed import PackedDecoder, joined
from course_lib.serving.requests import Sampling
from tests.serving.talkers import CONFIG, random_model
from tests.serving.test_captured import by_calling

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
PAGE_SIZE, PAGES = 4, 24
NORMED = dataclasses.replace(CONFIG, normed_heads=True)
TIED_AND_STRETCHED = dataclasses.replace(CONFIG, tied=True, rotary_divisors=(1.0,) * 4 + (8.0,) * 4)


def model_of(config=CONFIG):
    model = random_model(config)
    if config.normed_heads:
        for block in model.blocks:
            for norm in (block.attention.query_norm, block.attention.key_norm):
                nn.init.uniform_(norm.weight, 0.5, 2.0)
    return model


class Texts:
    """Sequences with pages of their own, that a model has read but for their newest token."""

    def __init__(self, model, prompts, kernels=False):
        self.cache = RaggedPages(model.config, PAGES, PAGE_SIZE, kernels=kernels)
        self.texts, self.model = [list(prompt) for prompt in prompts], model
        free = list(range(PAGES - 1))
        self.pages = [[free.pop(7 * n % len(free)) for _ in range(7)] for n in range(len(prompts))]
        for text, pages in zip(self.texts, self.pages):
            if len(text) > 1:
                self.cache.take([Run(0, len(text) - 1, pages)])
                model.hidden(torch.tensor([text[:-1]]), self.cache)

    def runs(self, who):
        """Of the newest tokens, with the pages that they need and no more."""
        return [
            Run(len(self.texts[n]) - 1, 1, self.pages[n][: -(-len(self.texts[n]) // PAGE_SIZE)]) for n in who
        ]  # fmt: skip

    def plain_logits(self, who):
        self.cache.take(self.runs(who))
        return self.model(torch.tensor([[self.texts[n][-1] for n in who]]), self.cache)[0]

    def add(self, who, tokens):
        for n, token in zip(who, tokens):
            self.texts[n].append(token)


def chosen_plainly(texts, who, samplings):
    columns = {name: torch.tensor([getattr(one, name) for one in samplings], dtype=dtype)
               for name, dtype in fast_step.OPTIONS.items()}  # fmt: skip
    seeds = torch.tensor([one.seed for one in samplings])
    positions = torch.tensor([len(texts.texts[n]) for n in who])
    return sample_reference(texts.plain_logits(who), **columns, seeds=seeds, positions=positions).tolist()


PROMPTS = ([5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2])
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.5, seed=2**40)
FILTERED = Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=3)
WHO = [(0, 1, 2), (0, 1, 2), (2, 0), (1,), (0, 1, 2), (0,)]  # the second text waits, and so on


def in_pytorch(monkeypatch):
    """Every kernel replaced by PyTorch's operations, which a recorder on the CPU knows."""

    def rope_append(qkv, cosine, sine, keys, values, positions, slots, validate, dependent):
        key_heads = keys.shape[1]
        heads = qkv.unflatten(-1, (-1, keys.shape[3])).transpose(0, 1)  # [heads, tokens, head_dim]
        turned = turned_halves(heads[:-key_heads], cosine[positions], sine[positions]).transpose(0, 1)
        places = slots // PAGE_SIZE, slice(None), slots % PAGE_SIZE  # -1 is the last place of a page that nobody has
        keys[places], values[places] = turned[:, -key_heads:], heads[-key_heads:].transpose(0, 1)
        return turned[:, :-key_heads]

    def attend(query, keys, values, tables, lengths, *, output, workspace, validate, dependent):
        group = query.shape[1] // keys.shape[1]
        keys, values = (
            pool[tables].transpose(1, 2).flatten(2, 3).repeat_interleave(group, 1) for pool in (keys, values)
        )
        scores = (keys @ query[..., None])[..., 0] / math.sqrt(query.shape[2])
        seen = torch.arange(keys.shape[2]) < lengths[:, None]
        weights = scores.masked_fill(~seen[:, None], -1e30).softmax(-1)
        return output.copy_((weights[:, :, None] @ values)[:, :, 0])

    def normalise(x, residual, weight, epsilon, dependent):
        return add_rms_norm_reference(x, residual, weight, epsilon)

    monkeypatch.setattr(packed, "rope_append_to_pages", rope_append)
    for module in (packed, dispatch):
        monkeypatch.setattr(module, "add_rms_norm_forward", normalise)
    monkeypatch.setattr(dispatch, "swiglu_forward", swiglu_reference)
    monkeypatch.setattr(fast_step, "paged_decode_attention", attend)
    monkeypatch.setattr(fast_step, "sample", lambda logits, **_: logits.argmax(dim=-1))
    monkeypatch.setattr(dispatch, "by_few_rows", lambda *_: False)


def test_recorded_steps_bake_nothing_in(monkeypatch):
    """Batches and pages of other sizes than those of the capture, through the recorder that stands for a graph."""
    in_pytorch(monkeypatch)
    model = model_of()
    ours, plain = Texts(model, PROMPTS), Texts(model, PROMPTS)
    steps = FastSteps(model, ours.cache, batches=(1, 2, 4), columns=(2, 6), capture=captured_on_cpu)
    for who in WHO * 3:
        write(steps, ours, plain, who, [GREEDY] * len(who))


def write(steps, ours, plain, who, samplings):
    """One token more for each of these texts, the same in both."""
    runs = ours.runs(who)
    assert steps.takes(runs)
    chosen = steps(runs, [ours.texts[n][-1] for n in who], samplings)
    assert chosen == chosen_plainly(plain, who, samplings)
    ours.add(who, chosen), plain.add(who, chosen)


@pytest.mark.parametrize("config", [CONFIG, NORMED, TIED_AND_STRETCHED], ids=["plain", "QK-norm", "tied, stretched"])
def test_the_kernels_choose_what_the_plain_step_chooses(config):
    """Texts that wait and come back, rows behind the batch, pages that begin, greedy texts beside drawn ones."""
    model = model_of(config)
    ours, plain = Texts(model, PROMPTS), Texts(model, PROMPTS)
    steps = FastSteps(model, ours.cache, batches=(1, 4), columns=(6,), capture=by_calling)
    for who in WHO:
        write(steps, ours, plain, who, [(GREEDY, DRAWN, FILTERED)[n] for n in who])


def test_logits_are_those_of_the_plain_step():
    model = model_of()
    ours, plain = Texts(model, PROMPTS), Texts(model, PROMPTS)
    found = []
    sampled = fast_step.sample
    try:
        fast_step.sample = lambda logits, **options: found.append(logits) or sampled(logits, **options)
        steps = FastSteps(model, ours.cache, batches=(4,), columns=(7,), capture=by_calling)
        steps(ours.runs((0, 1, 2)), [text[-1] for text in ours.texts], [GREEDY] * 3)
    finally:
        fast_step.sample = sampled
    torch.testing.assert_close(found[-1][:3], plain.plain_logits((0, 1, 2)))


def test_nothing_is_stored_but_the_step_s_own_tokens():
    model = model_of()
    ours = Texts(model, PROMPTS)
    before = [pool.clone() for pool in ours.cache.memory]
    steps = FastSteps(model, ours.cache, batches=(4,), columns=(7,), capture=by_calling)
    assert all(map(torch.equal, ours.cache.memory, before)), "capturing stored something"
    runs = ours.runs((0, 2))
    steps(runs, [1, 2], [GREEDY] * 2)
    slots = [run.pages[run.begin // PAGE_SIZE] * PAGE_SIZE + run.begin % PAGE_SIZE for run in runs]
    for pool, first in zip(ours.cache.memory, before):
        changed = (pool != first).any(dim=(0, 2, 4)).flatten()  # [pages · page_size]
        assert changed.nonzero().flatten().tolist() == sorted(slots)


def test_a_step_that_was_expected_is_the_step_itself(monkeypatch):
    """Where the recorder keeps one memory for all results, as a graph does; and one that comes otherwise."""
    in_pytorch(monkeypatch)
    model = model_of()
    ours, plain = Texts(model, PROMPTS), Texts(model, PROMPTS)
    steps = FastSteps(model, ours.cache, batches=(4,), columns=(6,), capture=captured_on_cpu)
    for who in [(0, 1, 2)] * 4 + [(2, 0)] * 3:
        runs, ahead = ours.runs(who), next_of(ours, who)
        chosen = steps(runs, [ours.texts[n][-1] for n in who], [GREEDY] * len(who), ahead)
        assert chosen == chosen_plainly(plain, who, [GREEDY] * len(who))
        ours.add(who, chosen), plain.add(who, chosen)
    assert (steps.replayed, steps.expected) == (7, 5)
    other = [token + 1 for token in chosen]
    ours.texts[2][-1], ours.texts[0][-1] = plain.texts[2][-1], plain.texts[0][-1] = other
    assert steps(ours.runs(who), other, [GREEDY] * 2) == chosen_plainly(plain, who, [GREEDY] * 2)
    assert steps.expected == 5, "another token than was expected"


def next_of(texts, who):
    return [Run(len(texts.texts[n]), 1, texts.pages[n][: -(-(len(texts.texts[n]) + 1) // PAGE_SIZE)]) for n in who]


def test_logits_that_are_no_numbers_are_told_and_are_nobody_else_s():
    model = model_of()
    model.embedding.weight[66] = torch.nan
    ours, plain = Texts(model, PROMPTS), Texts(model, PROMPTS)
    steps = FastSteps(model, ours.cache, batches=(4,), columns=(7,), capture=by_calling)
    chosen = steps(ours.runs((0, 1, 2)), [7, 66, 2], [GREEDY] * 3)
    assert chosen[1] == -1 and chosen[::2] == chosen_plainly(plain, (0, 1, 2), [GREEDY] * 3)[::2]


def test_what_a_graph_does_not_hold_is_not_taken():
    model = model_of()
    ours = Texts(model, PROMPTS)
    steps = FastSteps(model, ours.cache, batches=(2,), columns=(2,), capture=by_calling)
    assert steps.takes(ours.runs((0, 1))) and not steps.takes([])
    assert not steps.takes(ours.runs((0, 1, 1))) and not steps.takes([Run(20, 1, range(6))])
    assert not steps.takes([Run(0, 2, (1,))])


def test_graphs_are_captured_when_they_are_needed_or_beforehand(monkeypatch):
    in_pytorch(monkeypatch)
    sizes, made = [], FastStep.__init__
    monkeypatch.setattr(FastStep, "__init__", lambda self, *given: sizes.append(given[3:]) or made(self, *given))
    model = model_of()
    ours = Texts(model, PROMPTS)
    steps = FastSteps(model, ours.cache, batches=(1, 4), columns=(1, 7), capture=captured_on_cpu)
    assert sizes == [(1, 1)]
    for _ in range(2):
        steps(ours.runs((0, 2)), [1, 2], [GREEDY] * 2)
    assert sizes[1:] == [(4, 7)]
    steps.prepare()
    assert sizes[2:] == [(1, 7), (4, 1)]


def test_packed_weights_are_the_model_s_own_and_packed_once():
    model = model_of()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    tokens = torch.tensor([[1, 2, 3]])
    logits = model(tokens)
    matrices = [joined(*of) for of in (parts(model), parts(model))]
    assert matrices[0].data_ptr() == matrices[1].data_ptr() and torch.equal(*matrices)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert torch.equal(model(tokens), logits)
    matrices[0].zero_()
    assert not any(linear.weight.any() for linear in parts(model))


def parts(model):
    attention = model.blocks[0].attention
    return attention.query, attention.key, attention.value


def test_a_plain_step_of_more_rows_than_texts_run_finds_room_for_its_products(monkeypatch):
    """As the tiles of an H100 need it: a prompt of 20 tokens was refused in an engine for 8 texts at a time."""
    monkeypatch.setattr(workspace, "architecture_of", lambda _: 90)
    monkeypatch.setattr(workspace, "multiprocessor_count", lambda _: 132)
    model = model_of(dataclasses.replace(CONFIG, width=512, hidden=1024))
    weights = PackedDecoder(model, *RaggedPages(model.config, PAGES, PAGE_SIZE, kernels=True).memory, 256)
    matrices = [weights.head, *(one for one in weights.layers[0] if isinstance(one, torch.Tensor))]
    for rows in range(1, MOST_ROWS + 1):
        for outer, inner in (matrix.shape for matrix in matrices):
            needed = workspace.sizes_of(rows, outer, few_rows_tiles(rows, outer, inner, torch.float32, 90, 132))
            workspace.check_workspace(weights._workspace, needed, torch.device("cpu"))


def test_memory_that_moved_is_refused():
    model = model_of()
    ours = Texts(model, PROMPTS)
    steps = FastSteps(model, ours.cache, batches=(1,), columns=(7,), capture=by_calling)
    model.blocks[1].feed_forward.up.weight = nn.Parameter(model.blocks[1].feed_forward.up.weight.clone())
    with pytest.raises(RuntimeError, match="replaced or moved"):
        steps(ours.runs((0,)), [1], [GREEDY])


@pytest.mark.parametrize("options, words", [({"batches": ()}, "batches is"), ({"columns": (2, 0)}, "columns is")])
def test_sizes_that_make_no_sense_are_named(options, words):
    model = model_of()
    with pytest.raises(ValueError, match=words):
        FastSteps(model, RaggedPages(model.config, PAGES, PAGE_SIZE, kernels=True), capture=by_calling, **options)


def test_sizes_of_graphs_reach_the_largest_step():
    assert [batch_sizes(most) for most in (1, 2, 6, 64)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32, 64]]
    assert column_sizes(1) == [1] and column_sizes(128) == [128]
    assert column_sizes(8192) == [128, 512, 2048, 8192] and column_sizes(8193)[-2:] == [8192, 8193]


@pytest.mark.parametrize(
    "rows, dtype, arch, ours",
    [
        (0, torch.bfloat16, 90, False),  # the logits of a step that is a piece of one prompt
        (1, torch.bfloat16, 90, True),
        (64, torch.bfloat16, 90, True),
        (65, torch.bfloat16, 90, False),
        (1, torch.float32, 90, False),
        (1, torch.float16, 75, False),
        (1, torch.float32, None, True),
    ],
)
def test_a_product_s_kernel_is_chosen_by_its_rows(rows, dtype, arch, ours):
    assert dispatch.by_few_rows(rows, dtype, arch) is ours


@pytest.mark.parametrize("rows", [3, 20])
def test_a_product_is_the_same_by_either(rows):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 24, generator=generator) for size in (rows, 12))
    torch.testing.assert_close(dispatch.product(x, weight, 0.1), x @ weight.T)
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    torch.testing.assert_close(dispatch.product(x, weight, 0.1, gated=True), F.silu(gate) * up)
    stream, gain, behind = (torch.randn(size, generator=generator) for size in ((rows, 12), (12,), (5, 12)))
    normalised, summed = dispatch.product_before_norm(x, weight, stream, gain, 0.1)
    torch.testing.assert_close(summed, stream + x @ weight.T)
    exact = F.rms_norm(summed, (12,), gain, 0.1) @ behind.T
    torch.testing.assert_close(dispatch.product(normalised, behind, 0.1), exact)
