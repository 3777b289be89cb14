"""Limits, figures and devices of tests on real GPUs, on a machine that may have no more than torch and pytest.

`make test-gpu` runs them. With `GPU_STAND_IN=1` their bodies run on a CPU that is taken for a GPU.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aims
import own_process
import pytest
import torch
from figures import Figures

from clusterd.agent.host.gpu_probe import Probe

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("tests/train", "examples/gpt", "examples/hf")]

STAND_IN = bool(os.environ.get("GPU_STAND_IN"))
TEST_S = 100.0
"""Time limit of one test: a hung collective must not cost the others their turn."""
GPU_S = 540.0
TOTAL_S = float(os.environ.get("GPU_TOTAL_S", "2700" if STAND_IN else str(GPU_S)))
"""Time limit of all tests; those that have no time left fail. A CPU takes longer than the GPU that it stands in for."""

SHARES_S = {
    "test_driver": 25.0,
    "test_ranks": 165.0,
    "test_end_to_end": 235.0,
    "test_calibration": 85.0,
    "test_copies": 30.0,
    "test_several_gpus": 300.0,
}
"""Files in the order in which they run, with the time limit of each: whether a rank computes what it should comes
before how fast it is, and no file takes the time of the next ones."""

_BEGAN_S = time.monotonic()
_began_files_s: dict[str, float] = {}


@pytest.fixture(scope="session")
def up_to_cuda() -> Callable[[str], None]:
    """Ends a test before its first CUDA call on a machine without a GPU, with what it has done until there."""

    def check(done: str) -> None:
        if torch.cuda.device_count() == 0 and not STAND_IN:
            pytest.skip(f"dry run, no GPU here: {done}; the next step calls CUDA")

    return check


@pytest.fixture(scope="session")
def needs_driver() -> Callable[[str], None]:
    """Ends a test before what no stand-in for a GPU can do."""

    def check(done: str) -> None:
        if torch.cuda.device_count() == 0:
            pytest.skip(f"no GPU here: {done}; the next step asks the driver")

    return check


@pytest.fixture(scope="session")
def kind() -> str:
    """Kind of device that takes the part of the GPU."""
    return "cpu" if STAND_IN else "cuda"


@pytest.fixture
def before_context(up_to_cuda: Callable[[str], None]) -> Callable[[], None]:
    """Called by tests in a process of their own that create their CUDA context later."""

    def prepare() -> None:
        up_to_cuda("a process of the test's own has torch and clusterd imported")
        if STAND_IN:
            from stand_in import use_stand_in

            use_stand_in(pin_bytes=1 << 18)

    return prepare


@pytest.fixture
def gpu(before_context: Callable[[], None]) -> Callable[[], Any]:
    """Returns the accelerator; called by tests in a process of their own, in which it creates the CUDA context."""
    from clusterd.train.process import accelerator

    def select() -> Any:
        before_context()
        return accelerator.of(torch.device("cpu") if STAND_IN else accelerator.select(0))

    return select


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the files in the order of their value, where these tests are run and not merely collected."""
    if _is_run(config):
        order = list(SHARES_S)
        items.sort(key=lambda item: order.index(item.path.stem))


def _is_run(config: pytest.Config) -> bool:
    return config.rootpath == Path(__file__).parent


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the aims beside what was measured."""
    if not _is_run(config):
        return
    terminalreporter.section("aims on an H100" + ("; not measured on a stand-in" if STAND_IN else ""))
    measured = {} if STAND_IN or not _made else _made[0].measured
    for line in aims.table(measured):
        terminalreporter.write_line(line)


_made: list[Figures] = []


@pytest.fixture(scope="session")
def figures() -> Figures:
    """Takes the figures that tests measure; on a dry run nothing is written."""
    path, card = os.environ.get("GPU_FIGURES", ""), "CPU as a stand-in"
    if not STAND_IN:
        found, _ = Probe().gpus()
        card = found[0]["name"] if found else ""
    _made.append(Figures(Path(path) if path and card else None, card, torch.__version__))
    return _made[0]


@pytest.fixture(autouse=True)
def limited(request: pytest.FixtureRequest) -> Iterator[None]:
    seconds = _limit_s(request.node)

    def stop(*_: object) -> None:
        pytest.fail(f"not over after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests marked so in a process of their own."""
    if pyfuncitem.get_closest_marker("own_process") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    # A second before the alarm, which would not end the process.
    own_process.run(lambda: pyfuncitem.obj(**arguments), max(_limit_s(pyfuncitem) - 1.0, 1.0))
    return True


def _limit_s(test: pytest.Item) -> float:
    """Seconds that a test may take: its limit, or what is left of that of its file, or of all tests."""
    marker = test.get_closest_marker("time_limit")
    left_s = TOTAL_S - (time.monotonic() - _BEGAN_S)
    if left_s < 1.0:
        pytest.fail(f"not run: the {TOTAL_S:.0f} s of all tests are over", pytrace=False)
    file = test.path.stem
    share_s = SHARES_S[file] * TOTAL_S / GPU_S
    of_file_s = share_s - (time.monotonic() - _began_files_s.setdefault(file, time.monotonic()))
    if of_file_s < 1.0:
        pytest.fail(f"not run: the {share_s:.0f} s of {file} are over", pytrace=False)
    return min(marker.args[0] if marker is not None else TEST_S, left_s, of_file_s)
