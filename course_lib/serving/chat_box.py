"""A conversation in a notebook: a line to write in, the answers as they stream, and how fast they came.

    model, tokenizer = load()
    chat_box(Conversation(new_engine(model, tokenizer)))

The answer is made in a thread, so that the notebook stays usable meanwhile and *Stop* can stop it.
"""

from __future__ import annotations

import html
import threading

import ipywidgets as widgets

from course_lib.serving.conversation import Conversation

# JupyterLab's own colours, which follow its theme; where there are none, those that the page has.
STYLE = (
    "white-space: pre-wrap; line-height: 1.45; padding: 6px 10px; border-radius: 6px; margin: 3px 0; "
    "color: var(--jp-content-font-color1, inherit); "
)
QUESTION = STYLE + "background: var(--jp-layout-color2, #8882); margin-left: 15%;"
ANSWER = STYLE + "border: 1px solid var(--jp-border-color2, #8886); margin-right: 15%;"
NOTE = "font-size: 85%; color: var(--jp-content-font-color2, #888);"


def chat_box(talk: Conversation, *, new_tokens: int = 256) -> widgets.VBox:
    """A box that asks and shows the answers of `talk`. Each answer has at most `new_tokens` tokens."""
    said = widgets.VBox()
    line = widgets.Text(placeholder="Ask something, and press Enter", continuous_update=False,
                        layout=widgets.Layout(flex="1 1 auto"))  # fmt: skip
    stop = widgets.Button(description="Stop", disabled=True, layout=widgets.Layout(width="80px"))
    note = widgets.HTML()
    stopping = threading.Event()

    def answer(question: str) -> None:
        bubble, text = widgets.HTML(_bubble("…", ANSWER)), ""
        said.children = (*said.children, widgets.HTML(_bubble(question, QUESTION)), bubble)
        pieces = None
        try:
            pieces = talk.say(question, new_tokens=new_tokens)
            for piece in pieces:
                text += piece
                bubble.value = _bubble(text, ANSWER)
                if stopping.is_set():
                    break
            note.value = f'<span style="{NOTE}">{html.escape(str(talk.times))}</span>'
        except (ValueError, RuntimeError) as error:
            note.value = f'<span style="{NOTE}">{html.escape(str(error))}</span>'
        finally:
            if pieces is not None:
                pieces.close()
            bubble.value = _bubble(text, ANSWER)
            line.disabled, stop.disabled = False, True

    def ask(_) -> None:
        question = line.value.strip()
        if not question or line.disabled:
            return
        line.value, line.disabled, stop.disabled = "", True, False
        stopping.clear()
        box.thread = threading.Thread(target=answer, args=(question,), daemon=True)
        box.thread.start()

    line.observe(ask, "value")
    stop.on_click(lambda _: stopping.set())
    box = widgets.VBox([said, widgets.HBox([line, stop]), note], layout=widgets.Layout(max_width="820px"))
    return box


def _bubble(text: str, style: str) -> str:
    return f'<div style="{style}">{html.escape(text)}</div>'
