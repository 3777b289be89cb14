"""``clusterd metrics``: metrics in the Prometheus text format."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import click

from clusterd.cli.common.output import note
from clusterd.client import Client
from clusterd.errors import ClusterError
from clusterd.types import HostState, JobState

Sample = tuple[dict[str, Any], float]


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
        usage = cluster.call("usage", minutes=2)
    lines: list[str] = []
    for name, help_text, samples in _families(status, hosts, jobs, usage):
        lines.append(f"# HELP clusterd_{name} {help_text}\n# TYPE clusterd_{name} gauge\n")
        lines += [f"clusterd_{name}{_labels(labels)} {value:.17g}\n" for labels, value in samples]
    return "".join(lines)


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
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
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


def _families(
    status: dict[str, Any], hosts: list[dict[str, Any]], jobs: list[dict[str, Any]], usage: dict[str, Any]
) -> Iterator[tuple[str, str, list[Sample]]]:
    yield "start_time_seconds", "When the daemon started, in Unix time.", [({}, status["started_s"])]
    states = [state.value for state in HostState]
    yield (
        "host_state",
        "1 for the current state of a host.",
        [({"host": h["name"], "state": state}, h["state"] == state) for h in hosts for state in states],
    )
    yield "host_drained", "1 if a host is drained.", [({"host": h["name"]}, bool(h["drained"])) for h in hosts]
    yield "devices", "Devices by use.", list(_devices(hosts))
    known = [h for h in hosts if h["cpu_cores"] is not None]
    for name, key, help_text in (
        ("cpu_cores", "cpu_cores", "CPU cores of a host."),
        ("cpu_cores_used", "cores_used", "CPU cores allocated to jobs."),
        ("memory_bytes", "memory_bytes", "Memory of a host."),
        ("memory_used_bytes", "memory_used_bytes", "Memory allocated to jobs."),
    ):
        yield name, help_text, [({"host": h["name"]}, h[key]) for h in known]
    newest = {device: minutes[-1] for device, minutes in usage["devices"].items() if minutes}
    for name, key, help_text in (
        ("device_busy_ratio", "busy", "Share of the last minute in which a device worked."),
        ("device_memory_used_bytes", "memory_bytes", "Memory in use on a GPU."),
        ("device_power_watts", "power_w", "Power draw of a GPU."),
        ("device_temperature_celsius", "temperature_c", "Temperature of a GPU."),
    ):
        samples = [({"host": d.rpartition(":")[0], "device": d}, minute[key]) for d, minute in newest.items()]
        yield name, help_text, [(labels, value) for labels, value in samples if value is not None]
    yield from _gpu_errors(hosts)
    counted = Counter(job["state"] for job in jobs)
    yield "jobs", "Jobs by state.", [({"state": state.value}, counted[state.value]) for state in JobState]
    running = [job for job in jobs if job["state"] == "running"]
    for name, key, help_text in (
        ("job_step", "step", "Training steps completed by a running job."),
        ("job_loss", "loss", "Loss of a running job's latest step."),
        ("job_step_seconds", "step_time_s", "Step time of a running job."),
    ):
        labelled = [({k: job[k] for k in ("id", "name", "user", "tenant")}, job[key]) for job in running]
        yield name, help_text, [(labels, value) for labels, value in labelled if value is not None]


def _gpu_errors(hosts: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[Sample]]]:
    gpus = [
        ({"host": host["name"], "gpu": gpu["uuid"]}, gpu)
        for host in hosts
        for gpu in host["link"].get("facts", {}).get("gpus", ())
    ]
    ecc = [
        ({**labels, "corrected": corrected}, gpu[f"ecc_{kind}"])
        for labels, gpu in gpus
        for kind, corrected in (("corrected", "true"), ("uncorrected", "false"))
        if gpu.get(f"ecc_{kind}") is not None
    ]
    yield "gpu_ecc_errors", "ECC errors of a GPU since its driver was loaded.", ecc
    xids = [({**labels, "xid": xid}, count) for labels, gpu in gpus for xid, count in gpu.get("xids", {}).items()]
    yield "gpu_xid_errors", "XIDs of a GPU since boot, or since its host's agent started.", xids


def _devices(hosts: list[dict[str, Any]]) -> Iterator[Sample]:
    """Device counts by host, kind and use: leased, foreign or free."""
    for host in hosts:
        counted = Counter(
            (d["kind"], "leased" if d["job"] is not None else "foreign" if d["foreign"] else "free")
            for d in host["devices"]
        )
        for kind in sorted({kind for kind, _ in counted}):
            for use in ("leased", "foreign", "free"):
                yield {"host": host["name"], "kind": kind, "use": use}, counted[kind, use]


def _labels(labels: dict[str, Any]) -> str:
    escaped = {k: str(v).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    return "{" + ",".join(f'{k}="{v}"' for k, v in escaped.items()) + "}" if labels else ""
