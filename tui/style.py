"""Where things stand on the screen.

Containers are hidden and what is in them is not: else each would be drawn line by line under what covers it. The job
screen is not, because what is hidden is not told of a new size.
"""

CSS = """
Screen { layers: base; }
#head { height: 2; }
#banner { height: auto; max-height: 3; display: none; color: $text-error; text-style: bold; padding: 0 1; }
#banner.shown { display: block; }
#body { height: 1fr; }
#body, .board, #queue-side { visibility: hidden; }
#job, Table, TextPane, LogPane { visibility: visible; }
#foot { height: 1; }
#playback { height: 1; display: none; }
#playback.shown { display: block; }
#filter { height: 1; border: none; padding: 0 1; display: none; }
#filter.shown { display: block; }
.board { display: none; height: 1fr; width: 1fr; }
.board.current { display: block; }
Table, TextPane, LogPane {
    border-top: solid $foreground 40%; border-title-color: $foreground; border-title-style: bold;
    scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; overflow-x: hidden;
}
Table:focus, TextPane:focus, LogPane:focus { border-top: heavy $accent; border-title-style: bold reverse; }
#fleet-table { height: 2fr; }
#fleet-detail { height: 1fr; min-height: 6; }
#queue-table { height: 1fr; }
#queue-side { height: 1fr; layout: horizontal; }
#queue-side > * { width: 1fr; height: 1fr; }
.-wide #queue.current { layout: horizontal; }
.-wide #queue-table { width: 3fr; height: 1fr; margin-right: 1; }
#queue-detail { margin-right: 1; }
.-wide #queue-detail { margin-right: 0; }
.-wide #queue-side { width: 2fr; height: 1fr; layout: vertical; }
#decisions-table, #events-table { height: 3fr; }
#decisions-detail, #events-detail { height: 1fr; min-height: 5; }
.board .zoomed { width: 1fr; height: 1fr; }
.board .out { display: none; }
ModalScreen { align: center middle; background: $background 60%; }
.dialog {
    width: 90%; max-width: 100; height: auto; max-height: 95%; border: round $accent; padding: 0 1;
    background: $surface; border-title-style: bold;
}
.dialog Static { width: 1fr; height: auto; }
.dialog TextPane { border-top: none; height: auto; max-height: 80vh; }
.dialog OptionList { height: auto; border: none; padding: 0; background: $surface; }
.dialog Input { border: tall $accent; }
.dialog .wrong { color: $text-error; }
.hint { color: $foreground 70%; height: 1; }
LogScreen { align: left top; background: $background; }
LogScreen LogPane { height: 1fr; }
LogScreen #search { display: none; }
Jump { background: $background 0%; }
Jump > .label { width: auto; height: 1; text-style: bold reverse; color: $warning; layer: labels; }
Toast { max-width: 90%; }
.-ascii Table, .-ascii TextPane, .-ascii LogPane { border-top: ascii $foreground 40%; }
.-ascii Table:focus, .-ascii TextPane:focus, .-ascii LogPane:focus { border-top: ascii $accent; }
.-ascii .dialog { border: ascii $accent; }
.-ascii .dialog TextPane { border-top: none; }
.-ascii .dialog Input { border: ascii $accent; }
.-ascii Toast { border-left: ascii $accent; }
.-ascii * { scrollbar-size-vertical: 0; }
"""
