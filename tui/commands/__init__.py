"""Key commands: on the cluster and on the view."""
