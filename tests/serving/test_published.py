"""A published model answers with a chapter's functions in it, and says what PyTorch's attention says.

The model here is a small random one with SmolLM2's heads, in a folder as Hugging Face keeps it: nothing is fetched.
"""

import functools

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from course_lib import builder, default_device
from course_lib.checker.specification import catalog
from course_lib.hardware.graphs import captured_on_cpu
from course_lib.hardware.meter.traffic import repair_interpreter
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.loading.checkpoint import Checkpoint
from course_lib.models.loading.folder import write_folder
from course_lib.models.loading.pretrained import load
from course_lib.models.loading.tokenizer import Tokenizer
from course_lib.models.plugged import decode_in_splits, each_member, paged_step_of_heads
from course_lib.models.training import initialize
from course_lib.serving import published
from course_lib.serving.caches.new import new_cache
from course_lib.serving.caches.sequences import SequencePages, SequenceRows, SteppedPages
from course_lib.serving.captured import CapturedDecoder
from course_lib.serving.memory import WholeRuns

CONFIG = ModelConfig(
    vocabulary=257, layers=2, width=48, query_heads=9, key_heads=3, head_dim=64, hidden=64, context=256, tied=True
)
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
LIBRARY = {"new_cache": new_cache, "SequenceRows": SequenceRows, "SequencePages": SequencePages,
           "SteppedPages": SteppedPages, "each_member": each_member, "decode_in_splits": decode_in_splits,
           "paged_step_of_heads": paged_step_of_heads, "WholeRuns": WholeRuns, "CapturedDecoder": CapturedDecoder,
           "captured_on_cpu": captured_on_cpu, "page_size": 8, "on_gpu": False}  # fmt: skip
QUESTION = "Why?"
ANSWERS = {  # the names that a chapter's cells gave to what `check(...).best` returned
    "05": {"best_append": "5.3", "best_step": "5.5"},
    "06": {"BestPageAllocator": "6.2", "best_slot_mapping": "6.3", "best_append": "6.4", "best_paged_decode": "6.5"},
    "07": {"best_grouped_decode": "7.5"},
    "08": {"best_split_attention": "8.2", "best_combine_splits": "8.3"},
    "14": {"best_paged_step": "14.4"},
}


@pytest.fixture(autouse=True, scope="module")
def as_in_a_notebook():
    repair_interpreter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "NEW_TOKENS", 8)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    initialize(model)
    for weight in model.parameters():
        weight.data *= 1 + 4 * (weight.dim() == 2)  # so that attention decides what is said
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    tokens = tokenizers.Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    readers = {name: lambda tensor=tensor: tensor for name, tensor in model.state_dict().items()}
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(tokens, TEMPLATE, {"eos_token": "<end>"}, [256])
    write_folder(Checkpoint("random", CONFIG, readers, tokenizer), path, torch.float32)
    return path


@pytest.fixture(scope="module")
def wanted(folder):
    """The answer with PyTorch's attention everywhere."""
    model, tokenizer = load(folder, dtype=torch.float32)
    prompt = tokenizer.conversation([{"role": "user", "content": QUESTION}]).to(model.device)[None]
    cache = new_cache(model, 1, prompt.shape[1] + published.NEW_TOKENS)
    return "".join(published.answer(model, tokenizer, cache, prompt))


def finale(chapter, names):
    """Run the cell of a chapter's finale that asks the model, as a learner who has set REAL_MODEL."""
    (path,) = (path for path in builder.chapters() if path.stem.startswith(chapter))
    (cell,) = (cell.text for cell in builder.read_cells(path) if "REAL_MODEL = False" in cell.text)
    exec(cell.replace("REAL_MODEL = False", "REAL_MODEL = True"), names)


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("chapter", ANSWERS)
def test_a_chapters_functions_give_pytorchs_answer(chapter, layers, folder, wanted, monkeypatch, capsys):
    ask = functools.partial(published.ask_published_model, layers=layers, question=QUESTION, source=folder)

    def store(key, value, key_pages, value_pages, slots):
        key_pages[slots // 8, :, slots % 8], value_pages[slots // 8, :, slots % 8] = key, value

    answers = {name: catalog.reference(exercise)[0] for name, exercise in ANSWERS[chapter].items()}
    monkeypatch.setattr("course_lib.serving.published.ask_published_model", ask)
    finale(chapter, LIBRARY | answers | {"store": store, "device": default_device()})
    told = capsys.readouterr().out
    assert wanted in told and "a second" in told
    if chapter == "14":
        assert "of 8 runs of the model were replayed" in told
    else:
        assert f"run {'all' if layers == 2 else '1 of'} 2 layers" in told


def test_the_chapters_functions_are_what_runs(folder, wanted, capsys):
    """A decode that gives zeros says something else, in one layer already."""

    def make(model, tokens):
        return new_cache(model, 1, tokens, decode=lambda query, *cache: torch.zeros_like(query))

    published.ask_published_model(True, make, question=QUESTION, source=folder)
    assert wanted not in capsys.readouterr().out


def test_an_answer_ends_where_the_model_ends_it(folder):
    model, tokenizer = load(folder, dtype=torch.float32)
    prompt = tokenizer.encode(QUESTION).to(model.device)[None]
    tokenizer.stops = frozenset(range(CONFIG.vocabulary))
    assert list(published.answer(model, tokenizer, new_cache(model, 1, 64), prompt)) == []


def test_nothing_is_fetched_where_it_is_not_wanted(monkeypatch, capsys):
    monkeypatch.setattr(published, "load", lambda *arguments, **options: pytest.fail("loaded"))
    published.ask_published_model(False, lambda model, tokens: pytest.fail("made"))
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and "REAL_MODEL = True" in told and "93 MB" in told


def test_a_sequence_of_a_cache_for_several_is_streamed_alone(folder):
    model, _ = load(folder, dtype=torch.float32)
    prompts = torch.zeros(2, 3, dtype=torch.int64, device=model.device)
    cache = SequenceRows(CONFIG, 2, 8, append=None, step=None)
    with pytest.raises(ValueError, match="the prompt of one new sequence"):
        list(published.stream(model, prompts, 2, cache=cache))
