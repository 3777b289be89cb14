"""The verbs of the client socket."""
