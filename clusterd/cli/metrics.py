"""``clusterd metrics``: metrics in the Prometheus text format."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import click

from clusterd.cli.common.output import note
from clusterd.client import Client
from clusterd.daemon.web.metrics import CONTENT_TYPE, USAGE_MINUTES, prometheus_text
from clusterd.errors import ClusterError


@click.command()
@click.option(
    "--serve",
    "port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Serve them at http://127.0.0.1:PORT/metrics.",
)
def metrics(port: int | None) -> None:
    """Print metrics of hosts, devices and jobs for Prometheus, or serve them on this machine.

    \b
    For the textfile collector of the node exporter, with cron:
    * * * * * clusterd metrics > F.tmp && mv F.tmp /var/lib/node_exporter/clusterd.prom
    """
    if port is not None:
        _serve(port)
        return
    sys.stdout.write(_text())


def _text() -> str:
    """All metrics in the Prometheus text format."""
    with Client() as cluster:
        status, hosts, jobs = cluster.call("status"), cluster.call("hosts"), cluster.call("jobs", all=True)
        usage, forecasts = cluster.call("usage", minutes=USAGE_MINUTES), cluster.call("forecasts")
    return prometheus_text(status, hosts, jobs, usage, forecasts)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics; 503 while the daemon is away."""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "metrics are at /metrics")
            return
        try:
            body = _text().encode()
        except ClusterError as error:
            self.send_error(503, "no metrics", str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: Prometheus asks every few seconds."""


def _serve(port: int) -> None:
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    except OSError as error:
        raise ClusterError(f"cannot serve on port {port} of 127.0.0.1: {error.strerror}") from None
    note(f"serving http://127.0.0.1:{port}/metrics; Ctrl-C ends it")
    with server:
        server.serve_forever()
