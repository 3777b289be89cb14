"""The client runs where hosts and head nodes do not: on macOS, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

AS_ON_MACOS = """
import importlib, os, pkgutil, select, signal, socket, sys, types
# Taken away before anything else is imported: what only Linux has, and what only training needs.
for module, names in {
    os: "pidfd_open memfd_create sched_getaffinity sched_setaffinity splice eventfd setns unshare posix_fadvise "
        "posix_fallocate getrandom copy_file_range",
    select: "epoll EPOLLIN EPOLLOUT",
    signal: "pidfd_send_signal",
    socket: "SO_PEERCRED AF_NETLINK AF_VSOCK SOCK_CLOEXEC SOCK_NONBLOCK",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
sys.modules["torch"] = None
# What the standard library has on macOS.
sys.modules["_scproxy"] = proxies = types.ModuleType("_scproxy")
proxies._get_proxies = proxies._get_proxy_settings = dict
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        importlib.import_module(found.name)
print("imported")
"""


@pytest.mark.parametrize("packages", ["clusterd.cli clusterd.client clusterd.submission", "clusterd.tui"])
def test_no_module_of_the_client_needs_linux_or_torch(packages: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_MACOS, *packages.split()], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr[-2000:]
