"""A drawing that goes by steps: a still version, which stays in the notebook, and a slider while a kernel runs."""

import io


class Stepper:
    """Shows itself in a notebook.

    Args:
        still: the figure that is shown first and kept.
        draw: `draw(step)` gives the figure of one step.
        steps: how many there are.
        interval: milliseconds between two steps when they play.
        width: of the picture, in pixels.
        what: the slider's label, a word.
    """

    def __init__(self, still, draw, steps: int, interval: int = 1200, width: int = 960, what: str = "step"):
        self.still, self.draw, self.steps = still, draw, steps
        self.interval, self.width, self.what = interval, width, what

    def picture(self, step: int) -> bytes:
        """One step as a PNG."""
        buffer = io.BytesIO()
        self.draw(step).savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()

    def widget(self):
        """An ipywidgets box: a play button, a slider and the picture of the step."""
        import ipywidgets

        slider = ipywidgets.IntSlider(value=0, min=0, max=self.steps - 1, description=self.what, readout=False)
        play = ipywidgets.Play(value=0, min=0, max=self.steps - 1, interval=self.interval)
        ipywidgets.jslink((play, "value"), (slider, "value"))
        image = ipywidgets.Image(value=self.picture(0), format="png", width=self.width)
        slider.observe(lambda change: setattr(image, "value", self.picture(change["new"])), names="value")
        return ipywidgets.VBox([ipywidgets.HBox([play, slider]), image])

    def _ipython_display_(self):
        show_with_controls(self.still, self.widget, "A slider through the steps appears here while the notebook runs.")


def show_with_controls(still, make_widget, words: str) -> None:
    """Displays a figure, which stays in the notebook, and below it controls, which live while a kernel runs.

    Args:
        make_widget: gives the controls, an ipywidgets box; where ipywidgets is missing, the figure says it all.
        words: what stands in place of the controls where no kernel runs.
    """
    from IPython.display import display

    display(still)
    try:
        widget = make_widget()
    except ImportError:
        return
    display(bundle_of(widget, words), raw=True)


def bundle_of(widget, words: str) -> dict:
    """What a notebook keeps of a widget; `words` stand where none can be shown."""
    # Not the widget's own bundle: Colab has ipywidgets 7, which has no method for it.
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view, "text/plain": words}
