"""The small models' weights are those that their recipes make, and no others are taken for them."""

import pytest
import torch

from course_lib.models import trained
from course_lib.models.kinds import KINDS, loss_on, text_parts
from course_lib.models.tiny import tiny_text
from course_lib.models.trained import RECIPES, file_of, told_of, trained_model

ANOTHER_SEED = 0.08  # nats: the most by which one moves a model's loss, by what kinds.py says of its own


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of data that is empty."""
    monkeypatch.setattr(trained, "DATA", tmp_path)
    trained._read.cache_clear()
    yield tmp_path
    trained._read.cache_clear()


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_is_of_its_recipe_small_and_loses_what_was_recorded(name):
    model = trained_model(name, device="cpu")
    assert model.config == RECIPES[name].config and not model.training and model.embedding.weight.dtype == torch.float32
    assert file_of(name).stat().st_size < 1_000_000
    # The four digits that are written down; what another order of additions moves is a hundred times less.
    assert loss_on(model, text_parts()[1]) == pytest.approx(float(told_of(name)["loss"]), abs=2e-4)


def test_two_who_ask_get_a_model_each():
    one, other = (trained_model("GQA", device="cpu") for _ in range(2))
    with torch.no_grad():
        one.embedding.weight.zero_()
    assert other.embedding.weight.abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8 heads", "MLA"])
def test_the_recipe_makes_such_a_model_again(name):
    """Another processor adds in another order, and after 150 steps that is as good as another seed."""
    assert loss_on(RECIPES[name].train(), text_parts()[1]) == pytest.approx(
        float(told_of(name)["loss"]), abs=ANOTHER_SEED
    )


def test_no_kind_has_read_the_last_tenth():
    seen, unseen = text_parts()
    assert {RECIPES[name].text for name in KINDS} == {seen} and RECIPES["tiny"].text == seen + unseen == tiny_text()
    assert len(unseen) > 3000


def test_what_is_made_is_read_back(folder, monkeypatch, capsys):
    recipe = trained.Recipe(RECIPES["8 heads"].config, steps=2)
    monkeypatch.setitem(RECIPES, "8 heads", recipe)
    trained.make("8 heads")
    assert "8_heads.safetensors" in capsys.readouterr().out
    assert trained_model("8 heads", device="cpu").config == recipe.config


def test_a_model_that_is_missing_damaged_or_of_another_recipe_is_refused_in_words(folder, monkeypatch):
    with pytest.raises(RuntimeError, match="gqa.safetensors cannot be read.*`make weights` trains"):
        trained_model("GQA")
    file_of("GQA").write_bytes(b"no weights")
    with pytest.raises(RuntimeError, match="cannot be read"):
        trained_model("GQA")
    monkeypatch.setitem(RECIPES, "GQA", trained.Recipe(RECIPES["8 heads"].config, steps=1))
    trained.make("GQA")
    monkeypatch.setitem(RECIPES, "GQA", trained.Recipe(RECIPES["8 heads"].config, steps=2))
    with pytest.raises(RuntimeError, match="another recipe"):
        trained_model("GQA")


def test_a_model_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="no model 'MLB'; there are: tiny, 8 heads, full heads, GQA, heads of 64"):
        trained_model("MLB")
