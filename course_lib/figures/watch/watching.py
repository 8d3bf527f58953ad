"""`watch`: a function's kernels, logged in the interpreter and shown with sliders over programs and accesses."""

import base64
import functools
import html
import inspect
import io
import uuid
from collections.abc import Callable

import torch

from course_lib.figures.stepping import bundle_of
from course_lib.figures.watch.moment import Moments
from course_lib.figures.watch.picture import MOST_ELEMENTS, Picture
from course_lib.figures.watch.words import named, outside_in_words, race_in_words, told
from course_lib.hardware.meter.access_log import log_accesses
from course_lib.hardware.meter.accesses import AccessLog, LaunchSeen

SLIDERS = "Sliders over the programs and their accesses appear here while the notebook runs."
PIXELS = 1000  # of the picture's width


def watch(function: Callable, *arguments, program: int | tuple[int, ...] | None = None, **named_arguments):
    """Run `function(*arguments)` in Triton's interpreter and show what each program of its kernels reads and writes.

    Args:
        function: launches one or more kernels. It gets copies of the tensors, so that yours stay as they are.
        arguments, named_arguments: what it is called with; tensors of up to 16,384 elements.
        program: the one to begin with, its number or numbers; otherwise the first that reaches outside of a tensor or
            meets another on an element, and where none does, the first.

    Returns:
        Something that a notebook shows: the tensors as grids of cells, with sliders while the notebook runs.

    Raises:
        TypeError: `function` is a kernel, or is nothing that can be called.
        ValueError: a tensor is too large, `program` was not run, or the function's source is not to be found.
        MeterUnavailable: the function cannot be run in the interpreter here; the text says why.
    """
    if hasattr(function, "fn") or not callable(function):
        what = "the kernel itself" if hasattr(function, "fn") else f"of type {type(function).__name__}"
        raise TypeError(
            "watch takes the function that launches a kernel, and what it is called with, as in watch(vector_add, x, "
            f"y). {getattr(function, '__name__', function)!r} is {what}."
        )
    for name, value in _by_name(function, arguments, named_arguments):
        if isinstance(value, torch.Tensor) and value.numel() > MOST_ELEMENTS:
            raise ValueError(
                f"watch draws tensors of up to {MOST_ELEMENTS:,} elements; {name} has {value.numel():,}. Give the "
                "function smaller ones: a few programs show what a thousand do."
            )
    watched = Watched(log_accesses(function, *arguments, **named_arguments))
    if program is not None:
        watched.begin_with(program)
    return watched


class Watched:
    """A log that shows itself in a notebook, and in words elsewhere."""

    def __init__(self, log: AccessLog):
        self.log = log
        # What has no load or store has nothing to show.
        self.launches = [Moments(launch) for launch in log.launches if launch.accesses]
        self.launch = self._first_interesting()
        self.program = self.launches[self.launch].first_interesting() if self.launches else None

    def _first_interesting(self) -> int:
        """The launch in which something is wrong; the first where there is none."""
        for number, moments in enumerate(self.launches):
            if any(map(any, moments.most_outside)) or any(moments.races) or moments.launch.reaches_unknown():
                return number
        return len(self.launches) - 1 if self.log.stopped and self.launches else 0

    def begin_with(self, program: int | tuple[int, ...]) -> None:
        """Show that program first, of the first launch that has it."""
        numbers = (program,) if isinstance(program, int) else tuple(program)
        wanted = (*numbers, 0, 0, 0)[:3]
        for number, moments in enumerate(self.launches):
            if wanted in moments.programs:
                self.launch, self.program = number, wanted
                return
        seen = " and ".join(_programs(moments.launch) for moments in self.launches) or "none"
        raise ValueError(f"program {program} made no load or store; those that did: {seen}.")

    @functools.lru_cache(maxsize=8)  # noqa: B019, a notebook keeps few of them
    def _picture(self, launch: int) -> Picture:
        # What ended the call ended its last launch.
        is_last = self.launches[launch].launch is self.log.launches[-1]
        return Picture(self.launches[launch], self.log.stopped if is_last else None)

    @property
    def still(self):
        """The program to begin with, once it has made all its loads and stores; a figure. None where there is none."""
        if self.program is None:
            return None
        return self._picture(self.launch).draw(self.program, len(self.launches[self.launch].of(self.program)))

    def picture(self, launch: int, program: int, step: int) -> bytes:
        """One moment as a PNG; the program by its place among those that were seen."""
        buffer = io.BytesIO()
        figure = self._picture(launch).draw(self.launches[launch].programs[program], step)
        figure.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()

    def widget(self):
        """An ipywidgets box: sliders over programs and over a program's accesses, and the picture of the moment."""
        import ipywidgets

        launches = [
            (f"{number}: {moments.launch.kernel}", number - 1) for number, moments in enumerate(self.launches, 1)
        ]
        launch = ipywidgets.Dropdown(options=launches, value=self.launch, description="launch")
        program = ipywidgets.IntSlider(min=0, description="program", readout=False)
        step = ipywidgets.IntSlider(min=0, max=0, description="step")
        image = ipywidgets.Image(format="png", width=PIXELS)
        changing = False

        def show(change=None) -> None:
            if not changing:
                image.value = self.picture(launch.value, program.value, step.value)

        def choose(chosen: int | None = None) -> None:
            """Another program, or the one `chosen` of another launch: the ends of the sliders move with it."""
            nonlocal changing
            changing = True
            moments = self.launches[launch.value]
            program.max = len(moments.programs) - 1
            program.value = program.value if chosen is None else chosen
            at_the_end = step.value == step.max
            step.max = len(moments.of(moments.programs[program.value]))
            step.value = step.max if at_the_end else min(step.value, step.max)
            changing = False
            show()

        choose(self.launches[self.launch].programs.index(self.program))
        launch.observe(lambda change: choose(0), names="value")
        program.observe(lambda change: changing or choose(), names="value")
        step.observe(show, names="value")
        sliders = [launch] * (len(self.launches) > 1) + [program] * (program.max > 0) + [step]
        return ipywidgets.VBox([ipywidgets.HBox(sliders), image])

    def _ipython_display_(self):
        from IPython.display import display

        if self.program is None:
            print(self)
            return
        name = f"watched-{uuid.uuid4().hex[:12]}"
        display({"text/html": self._still_named(name), "text/plain": str(self)}, raw=True)
        try:
            import ipywidgets

            widget = self.widget()
        except ImportError:  # without ipywidgets the still version says it all
            return
        # Where the widget is alive, the still picture above it would only be seen twice.
        style = ipywidgets.HTML(f"<style>.{name} {{ display: none }}</style>", layout={"display": "none"})
        widget.children = (style, *widget.children)
        display(bundle_of(widget, SLIDERS), raw=True)

    def _still_named(self, name: str) -> str:
        """The still picture as HTML of that class."""
        picture, size = self.still._repr_png_()
        source = base64.b64encode(picture).decode()
        return (
            f'<div class="{name}"><img alt="{html.escape(str(self))}" style="max-width:100%" width="{size["width"]}" '
            f'src="data:image/png;base64,{source}"></div>'
        )

    def __str__(self) -> str:
        lines = [_summary(moments) for moments in self.launches]
        if not lines:
            launched = ", ".join(launch.kernel for launch in self.log.launches)
            lines = [
                f"{launched} made no load or store." if launched else
                f"{self.log.function} launched no Triton kernel, so there is nothing to draw."
            ]  # fmt: skip
        if self.log.stopped:
            lines.append(f"Stopped: {self.log.stopped}")
        return "\n".join(lines)

    __repr__ = __str__


def _summary(moments: Moments) -> str:
    """A launch in words: its size, its bytes, what is wrong, and what its first program does."""
    launch, moved = moments.launch, moments.all_bytes
    lines = [
        f"{launch.kernel}: {_programs(launch)}; {moved.read:,} B read, {moved.written:,} B written, "
        f"{moved.distinct:,} B distinct"
    ]
    lines += outside_in_words(moments)
    for tensor, races in {tensor.memory: (tensor, races)
                          for tensor, races in zip(launch.tensors, moments.races) if races}.values():  # fmt: skip
        place, race = next(iter(races.items()))
        words = race_in_words(race, launch.grid, len(races), "atomic" in moments.kinds).replace("\n", " ")
        lines.append(f"A race at element {place} of {tensor.parameter}. {words}")
    program = moments.first_interesting()
    if program is not None:
        accesses = moments.of(program)
        lines.append(f"Program {named(program, launch.grid)}:")
        lines += [f"  line {access.line}: {told(access, launch.tensors)}" for access in accesses[:20]]
        lines += [f"  and {len(accesses) - 20:,} more"] * (len(accesses) > 20)
    return "\n".join(lines)


def _programs(launch: LaunchSeen) -> str:
    seen = launch.programs()
    one, last = named(seen[0], launch.grid), named(seen[-1], launch.grid)
    return f"program {one}" if len(seen) == 1 else f"{len(seen):,} programs, {one} to {last}"


def _by_name(function: Callable, arguments: tuple, named_arguments: dict):
    """The arguments with their parameters' names; where they do not fit, calling the function will tell."""
    try:
        return inspect.signature(function).bind(*arguments, **named_arguments).arguments.items()
    except (TypeError, ValueError):
        return [(f"argument {number}", value) for number, value in enumerate(arguments, 1)]
