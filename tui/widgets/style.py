"""Where things stand on the screen.

Containers are hidden and what is in them is not: else each would be drawn line by line under what covers it. The job
screen is not, because what is hidden is not told of a new size. What windows look like stands with them: it is read
when the first is opened.
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
.-short #fleet-detail, .-short #queue-side, .-short #decisions-detail, .-short #events-detail { display: none; }
.board .zoomed { width: 1fr; height: 1fr; }
.board .out { display: none; }
Toast { max-width: 90%; }
.-ascii Table, .-ascii TextPane, .-ascii LogPane { border-top: ascii $foreground 40%; }
.-ascii Table:focus, .-ascii TextPane:focus, .-ascii LogPane:focus { border-top: ascii $accent; }
.-ascii Toast { border-left: ascii $accent; }
.-ascii * { scrollbar-size-vertical: 0; }
"""
