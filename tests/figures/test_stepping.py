"""A figure with controls below it: what a notebook is given to show."""

import types

import pytest

from course_lib.figures.stepping import show_with_controls

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, in order."""
    things = []
    monkeypatch.setattr("IPython.display.display", lambda thing, raw=False: things.append(thing))
    return things


def test_the_controls_stand_below_the_figure(shown):
    """Colab's ipywidgets 7 gives a widget a `model_id`, and none of the methods that version 8 shows itself by."""
    show_with_controls("figure", lambda: types.SimpleNamespace(model_id="abc"), "A slider appears here.")
    figure, controls = shown
    assert figure == "figure" and controls["text/plain"] == "A slider appears here."
    assert controls[VIEW] == {"version_major": 2, "version_minor": 0, "model_id": "abc"}


def test_what_is_shown_is_what_the_widget_itself_would_show(shown):
    ipywidgets = pytest.importorskip("ipywidgets", minversion="8")
    box = ipywidgets.VBox([])
    show_with_controls("figure", lambda: box, "A slider appears here.")
    assert shown[1][VIEW] == dict(box._repr_mimebundle_())[VIEW]


def test_without_ipywidgets_the_figure_stands_alone(shown):
    def make():
        raise ImportError

    show_with_controls("figure", make, "A slider appears here.")
    assert shown == ["figure"]
