"""Modal dialogs: text, confirmation, prompt, choice. Escape always leaves without an effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.suggester import SuggestFromList
from textual.widgets import Input, OptionList, SelectionList, Static
from textual.widgets.option_list import Option

from clusterd.tui.model.lines import Line, plain, printable
from clusterd.tui.model.state_styles import style
from clusterd.tui.widgets.painting import PlainTextTitles
from clusterd.tui.widgets.text_pane import TextPane

R = TypeVar("R")


def rich_text(runs: Line) -> Text:
    """A line as Rich text, for Textual's own widgets."""
    return Text.assemble(*((printable(text), style(name)) for text, name in runs))


class Box(PlainTextTitles, Vertical):
    """Frame of a dialog."""


class Dialog(ModalScreen[R]):
    """A centred modal box."""

    SCOPED_CSS = False
    CSS = """
    Dialog { align: center middle; background: $background 60%; }
    .dialog {
        width: 90%; max-width: 100; height: auto; max-height: 95%; border: round $accent; padding: 0 1;
        background: $surface; border-title-style: bold;
    }
    .dialog Static { width: 1fr; height: auto; }
    .dialog TextPane { border-top: none; height: auto; max-height: 80vh; }
    .dialog OptionList { height: auto; border: none; padding: 0; background: $surface; }
    .dialog Input { border: tall $accent; }
    .dialog .wrong { color: $text-error; }
    .dialog .hint { color: $foreground 70%; height: 1; }
    .-ascii .dialog { border: ascii $accent; }
    .-ascii .dialog TextPane { border-top: none; }
    .-ascii .dialog Input { border: ascii $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "leave", show=False)]

    def __init__(self, title: str, hint: str) -> None:
        super().__init__()
        self._title = title
        self._hint = hint

    def compose(self) -> ComposeResult:
        """Title, content and key hint."""
        box = Box(*self.content(), Static(self._hint, classes="hint", markup=False), classes="dialog")
        box.border_title = self._title
        yield box

    def content(self) -> Sequence[Static | TextPane | Input | OptionList]:
        """Widgets of the dialog."""
        return []

    def action_leave(self) -> None:
        """Dismiss without an answer."""
        self.dismiss(None)


class TextDialog(Dialog[None]):
    """Text to read."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,enter", "leave", "close", show=False)]

    def __init__(self, title: str, lines: list[Line], hang: int = 2) -> None:
        super().__init__(title, "esc closes")
        self._lines = lines
        self._hang = hang

    def content(self) -> Sequence[TextPane]:
        self.pane = TextPane("dialog-text", self._hang)
        self.pane.styles.height = min(max(len(self._lines) + 2, 3), 30)
        return [self.pane]

    def on_mount(self) -> None:
        self.pane.show(self._lines)
        self.pane.focus()

    @property
    def text(self) -> str:
        """The text shown."""
        return "\n".join(map(plain, self._lines))


class ConfirmDialog(Dialog[str]):
    """A question answered only by its own keys; enter does nothing, so that nobody confirms by habit."""

    def __init__(self, title: str, lines: list[Line], keys: dict[str, str]) -> None:
        """`keys`: the effect of each key; the key is the answer."""
        super().__init__(title, "   ".join(f"{key} {effect}" for key, effect in keys.items()) + "   esc closes")
        self._lines = lines
        self._keys = keys

    def content(self) -> Sequence[Static]:
        return [Static(rich_text(runs)) for runs in self._lines]

    def on_key(self, event: events.Key) -> None:
        """Answer with one of the keys; `n` always declines."""
        if event.key in self._keys or event.key == "n":
            event.stop()
            event.prevent_default()
            self.dismiss(event.key if event.key in self._keys else None)


class PromptDialog(Dialog[R]):
    """One line of input; the answer is its parsed value."""

    def __init__(
        self, title: str, lines: list[Line], value: str, read: Callable[[str], R], suggestions: Sequence[str] = ()
    ) -> None:
        """`read` parses the input; the message of its OSError, RuntimeError or ValueError is shown below it."""
        super().__init__(title, "enter confirms   esc closes" + ("   down, up: suggestions" if suggestions else ""))
        self._lines = lines
        self._value = value
        self._read = read
        self._suggestions = suggestions
        self._among = list(suggestions)

    def content(self) -> Sequence[Static | Input]:
        suggester = SuggestFromList(self._suggestions, case_sensitive=True) if self._suggestions else None
        self._input = Input(self._value, suggester=suggester, select_on_focus=False)
        self._wrong = Static("", classes="wrong", markup=False)
        return [*(Static(rich_text(runs)) for runs in self._lines), self._input, self._wrong]

    def on_mount(self) -> None:
        self._input.focus()

    def on_key(self, event: events.Key) -> None:
        """Down and up cycle through the suggestions that contain the typed text."""
        if event.key not in ("down", "up") or not self._suggestions:
            return
        event.stop()
        step = 1 if event.key == "down" else -1
        if self._input.value in self._among:
            at = self._among.index(self._input.value) + step
        else:
            self._among = [text for text in self._suggestions if self._input.value in text] or list(self._suggestions)
            at = 0 if step > 0 else -1
        self._input.value = self._among[at % len(self._among)]
        self._input.cursor_position = len(self._input.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Dismiss with the parsed value, or show the error."""
        event.stop()
        try:
            answer = self._read(event.value.strip())
        except OSError as error:
            self._wrong.update(error.strerror or str(error))
        except (RuntimeError, ValueError) as error:  # RuntimeError: `~name` of an unknown user
            self._wrong.update(str(error))
        else:
            self.dismiss(answer)


class Options(OptionList):
    """Textual's option list with the keys j and k."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "down", show=False),
        Binding("k", "cursor_up", "up", show=False),
    ]


class ChoiceDialog(Dialog[str]):
    """Choice of one option."""

    def __init__(
        self,
        title: str,
        options: Sequence[tuple[str, Line]],
        current: str = "",
        hint: str = "enter chooses   esc closes",
    ) -> None:
        """`options`: answer and displayed line of each."""
        super().__init__(title, hint)
        self._options = options
        self._current = current

    def content(self) -> Sequence[OptionList]:
        self.list = Options(*(Option(rich_text(shown), id=key) for key, shown in self._options))
        self.list.styles.max_height = "60vh"
        return [self.list]

    def on_mount(self) -> None:
        keys = [key for key, _ in self._options]
        self.list.highlighted = keys.index(self._current) if self._current in keys else (0 if keys else None)
        self.list.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option.id)


class MultiChoiceDialog(Dialog[list[str]]):
    """Choice of several options."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "done", "done", show=False, priority=True)]

    def __init__(self, title: str, options: Sequence[tuple[str, str]], selected: Sequence[str]) -> None:
        super().__init__(title, "space selects   enter confirms   esc closes")
        self._options = options
        self._selected = selected

    def content(self) -> Sequence[OptionList]:
        self._list: SelectionList[str] = SelectionList(
            *((shown, key, key in self._selected) for key, shown in self._options)
        )
        self._list.styles.max_height = "60vh"
        return [self._list]

    def on_mount(self) -> None:
        self._list.focus()

    def action_done(self) -> None:
        """Dismiss with the selection; an empty one changes nothing."""
        chosen = [key for key, _ in self._options if key in self._list.selected]
        self.dismiss(chosen or None)
