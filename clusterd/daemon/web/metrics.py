"""Metrics of hosts, devices and jobs in the Prometheus text format, from the rows that clients get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from clusterd.types import HostState, JobState

Sample = tuple[dict[str, Any], float]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

USAGE_MINUTES = 2
"""Minutes of `usage` to ask for: the newest complete one of each device."""


def prometheus_text(
    status: dict[str, Any],
    hosts: list[dict[str, Any]],
    jobs: list[dict[str, Any]],
    usage: dict[str, Any],
    forecasts: list[dict[str, Any]],
) -> str:
    """All metrics, from the answers of these verbs."""
    lines: list[str] = []
    for name, help_text, samples in [*_families(status, hosts, jobs, usage), *_calibration(forecasts)]:
        lines.append(f"# HELP clusterd_{name} {help_text}\n# TYPE clusterd_{name} gauge\n")
        lines += [f"clusterd_{name}{labels_text(labels)} {value:.17g}\n" for labels, value in samples]
    return "".join(lines)


def _families(
    status: dict[str, Any],
    hosts: list[dict[str, Any]],
    jobs: list[dict[str, Any]],
    usage: dict[str, Any],
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
    counted = Counter(status["jobs"])  # `jobs` has the newest of those that are over
    yield "jobs", "Jobs by state.", [({"state": state.value}, counted[state.value]) for state in JobState]
    running = [job for job in jobs if job["state"] == "running"]
    for name, key, help_text in (
        ("job_step", "step", "Training steps completed by a running job."),
        ("job_loss", "loss", "Loss of a running job's latest step."),
        ("job_step_seconds", "step_time_s", "Step time of a running job."),
    ):
        labelled = [({k: job[k] for k in ("id", "name", "user", "tenant")}, job[key]) for job in running]
        yield name, help_text, [(labels, value) for labels, value in labelled if value is not None]


def _calibration(forecasts: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[Sample]]]:
    labelled = [({key: row[key] for key in ("what", "kind", "horizon")}, row) for row in forecasts]
    yield "forecasts", "Past forecasts with an outcome.", [(labels, row["count"]) for labels, row in labelled]
    for share in (50, 90):
        samples = [(labels, row[f"within{share}"]) for labels, row in labelled]
        yield f"forecasts_within_{share}_ratio", f"Share of outcomes within the {share}% interval.", samples
    for name, key, help_text in (
        ("forecast_width_seconds", "width90_s", "Median width of the 90% interval."),
        ("forecast_pinball_seconds", "pinball_s", "Mean pinball loss of five quantiles."),
    ):
        yield name, help_text, [(labels, row[key]) for labels, row in labelled if row[key] is not None]


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


def labels_text(labels: dict[str, Any]) -> str:
    """Labels of a sample, escaped."""
    escaped = {k: str(v).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    return "{" + ",".join(f'{k}="{v}"' for k, v in escaped.items()) + "}" if labels else ""
