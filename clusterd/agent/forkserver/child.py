"""Turns a forked child of the fork server into a rank and runs the job's code."""

from __future__ import annotations

import atexit
import errno
import faulthandler
import multiprocessing.process
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from clusterd.agent import CODE_ROOT
from clusterd.agent.forkserver import relay
from clusterd.agent.host import processes
from clusterd.agent.log import log_line
from clusterd.process_attributes import SEED_VARIABLE, seed_generators
from clusterd.protocol.forkserver import Spawn

EXIT_CANNOT_START = 126
EXIT_NOT_FOUND = 127

SHOW_THREADS = signal.SIGURG
"""Makes a rank dump its threads into its log. Ignored by default, so harmless to other programs."""


def become(request: Spawn, gate: int, close_inherited: Callable[[], None]) -> NoReturn:
    """Turn this freshly forked process into the rank that `request` describes; never return.

    Waits at `gate` until the parent has written the rank's record: a rank without a record could never be found again.
    If the parent dies before, the gate closes and the child exits.
    """
    code = EXIT_CANNOT_START
    try:
        os.setsid()
        opened = os.read(gate, 1)
        os.close(gate)
        if not opened:
            os._exit(EXIT_CANNOT_START)
        processes.set_mark(request.env[processes.TAG])
        reset_signals()
        close_inherited()
        _redirect(request.log)
        code = _run(request)
    except SystemExit as end:
        code = _exit_code(end)
    except KeyboardInterrupt:
        _print_exception()
        code = 128 + signal.SIGINT
    except BaseException:  # nothing may unwind into the fork server's loop
        _print_exception()
        code = 1
    finally:
        _leave(code)


def reset_signals() -> None:
    """Reset signal handlers and mask to those of a newly started interpreter."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        try:
            if signal.getsignal(number) is not None and number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # the C library keeps some real-time signals for itself
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python itself starts; an exec'ed program gets the default back
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _redirect(log: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if null != 0:
        os.close(null)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)


def _run(request: Spawn) -> int:
    argv, env = request.argv, request.env
    if not settle(request.cwd, request.cores):
        return EXIT_CANNOT_START
    if request.mode != "python":
        if request.streams:
            processes.claim_environment(processes.TAG, env[processes.TAG])
            _relay(request)
        execute(argv, env)
    if not processes.claim_environment(processes.TAG, env[processes.TAG]):
        # A new interpreter starts more slowly, but shows its tag in /proc, by which a stop finds it.
        path = os.pathsep.join(filter(None, [str(CODE_ROOT), str(CODE_ROOT / "vendor"), env.get("PYTHONPATH")]))
        execute([sys.executable, *argv[1:]], {**env, "PYTHONPATH": path})
    os.environ.clear()
    os.environ.update(env)
    _freshen(request.threads)
    faulthandler.register(SHOW_THREADS, file=2)  # needs no interpreter that still listens
    return _run_python(argv[1:])


def _relay(request: Spawn) -> NoReturn:
    """Run the command's tasks below this process, which relays their input and output."""

    def start(env: Mapping[str, str]) -> NoReturn:
        reset_signals()
        execute(request.argv, dict(env))

    tasks = [
        relay.place(request.first_task + local, local, request.all_tasks, request.tasks)
        for local in range(request.tasks)
        if request.all_tasks > 1
    ]
    environments = [{**request.env, **place} for place in tasks or [{}]]
    relay.leave(relay.Relay(request.streams, request.input, labels=bool(tasks)).run(start, environments))


def settle(directory: str, cores: Sequence[int]) -> bool:
    """Change to a directory and pin to the cores, if given; log and return false if that fails."""
    try:
        os.chdir(directory)
        if cores:
            os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        log_line(f"clusterd: cannot start in {directory} on cores {cores}: {error}")
        return False
    return True


def execute(argv: Sequence[str], env: dict[str, str]) -> NoReturn:
    """Execute `argv`; if that fails, log why and exit with a shell's codes (126, 127)."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), env)
    except FileNotFoundError:
        named = "/" in argv[0]
        where = ", or the interpreter that its first line names" if named else f" in PATH={env.get('PATH', '')}"
        if not named and os.path.exists(argv[0]):
            where += f"; the file in this directory is ./{argv[0]}"
        log_line(f"clusterd: {argv[0]}: not found{where}")
        os._exit(EXIT_NOT_FOUND)
    except OSError as error:
        why = {errno.ENOEXEC: ": it has no line #! and is no program", errno.EACCES: ": chmod +x makes a program of it"}
        log_line(f"clusterd: {argv[0]}: {error.strerror}{why.get(error.errno or 0, '')}")
        os._exit(EXIT_CANNOT_START)


def _freshen(threads: int) -> None:
    """Reset per-process state that forks would share: authentication key, random seeds, threads, output streams."""
    tempfile.tempdir = None  # found anew by the job's TMPDIR
    time.tzset()
    multiprocessing.process.current_process().authkey = os.urandom(32)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # undocumented, but spawned workers start there
    seed_generators(os.environ.get(SEED_VARIABLE, ""))
    if threads and (torch := sys.modules.get("torch")):
        torch.set_num_threads(threads)  # OMP_NUM_THREADS was read when the OpenMP library was loaded, in the parent
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]


def _run_python(arguments: Sequence[str]) -> int:
    """Run the arguments of a ``python`` command line: a script, or ``-m`` and a module."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return 0
    script = arguments[0]
    sys.argv = list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    try:
        with open(script, "rb") as source:
            code = compile(source.read(), script, "exec")
    except OSError as error:
        log_line(f"clusterd: can't open file {os.path.abspath(script)!r}: {error.strerror}")
        return 2
    # Not runpy.run_path: it takes the script's module out of sys.modules when the script's last line is done, before
    # its threads and exit handlers are.
    module.__dict__.update(__file__=script, __spec__=None, __cached__=None)
    exec(code, module.__dict__)
    return 0


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    log_line(f"{end.code}")
    return 1


def _print_exception() -> None:
    kind, value, trace = sys.exc_info()
    # The frames of this file are no part of the user's program.
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    if kind is not None and value is not None:
        sys.excepthook(kind, value.with_traceback(trace), trace)


def _leave(code: int) -> NoReturn:
    """Exit as the interpreter would (threads, exit handlers, buffers), without tearing down the parent's modules."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as a normal exit does
        atexit._run_exitfuncs()
    except BaseException:
        _print_exception()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or relay.LOST_OUTPUT
    os._exit(code)
