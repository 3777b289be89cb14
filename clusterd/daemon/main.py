"""Entry point of the daemon: wiring, start and clean end."""

from __future__ import annotations

import argparse
import gc
import inspect
import logging
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio

from clusterd import __version__
from clusterd import config as configuration
from clusterd.config import Config
from clusterd.core import events as e
from clusterd.core.policies import POLICIES
from clusterd.core.scheduler import Scheduler
from clusterd.daemon.access import Access, Peer
from clusterd.daemon.api.daemon import Accounts, DaemonVerbs
from clusterd.daemon.api.files import BackupVerbs, FileVerbs, RetentionVerbs
from clusterd.daemon.api.host_check import HostChecks
from clusterd.daemon.api.hosts import ClaimVerbs, HostVerbs, JoinVerbs
from clusterd.daemon.api.job_logs import JobLogs
from clusterd.daemon.api.jobs import JobVerbs
from clusterd.daemon.api.migration import MigrationVerbs
from clusterd.daemon.api.performance import PerformanceVerbs
from clusterd.daemon.api.queue import QueueVerbs
from clusterd.daemon.api.server import Server, verbs_of
from clusterd.daemon.api.terminals import Terminals
from clusterd.daemon.api.usage import CalendarVerbs, UsageVerbs
from clusterd.daemon.api.watch import Feed
from clusterd.daemon.api.workdirs import WorkdirVerbs
from clusterd.daemon.execution.datasets import DataSets
from clusterd.daemon.execution.executor import Executor
from clusterd.daemon.execution.launching import LaunchRequests
from clusterd.daemon.execution.migration import Migrations
from clusterd.daemon.execution.model_description import ModelInspector
from clusterd.daemon.forecasts.forecaster import Forecaster
from clusterd.daemon.forecasts.outcomes import OutcomeStore
from clusterd.daemon.hosts.host_key_enrolment import HostKeyEnrolment
from clusterd.daemon.hosts.joined import JoinedHosts
from clusterd.daemon.hosts.link_factory import LinkFactory, local_hosts
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.hosts.reports import HostUp
from clusterd.daemon.journal.engine import Engine, Timers
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.journal.leadership import BACKUP_OF, NewestEvent, take_the_lead
from clusterd.daemon.notifications import Notifier
from clusterd.daemon.process import guarded, notify_systemd, only_instance, set_up_log
from clusterd.daemon.profiling.performance_models import PerformanceModels
from clusterd.daemon.profiling.profiler import Profiler
from clusterd.daemon.profiling.submission_classifier import SubmissionClassifier
from clusterd.daemon.rights import Rights
from clusterd.daemon.settings import LiveSettings, refuse_unknown
from clusterd.daemon.storage.archive import Archive, LogTails
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.daemon.storage.backups import Backups
from clusterd.daemon.storage.snapshot_replicas import SnapshotReplicas
from clusterd.daemon.storage.usage import IdleJobs, OutsideProcesses, SharedDeviceMemory, UsageStore, post_observed
from clusterd.daemon.web.pages import Pages
from clusterd.errors import ClusterError, first_of
from clusterd.process_attributes import collect_seldom, make_files_private
from clusterd.protocol.agent import Progress, StateSnapshotTaken, Usage
from clusterd.protocol.rank import FromRank
from clusterd.ssh.connection import Dialer
from clusterd.ssh.embedded import EmbeddedHost
from clusterd.ssh.hostkeys import HostKeys, LoginKey
from clusterd.trusted_paths import UnsafePath

log = logging.getLogger(__name__)

WATCHDOG_S = 10.0
OPEN_FILES = 65536


class Daemon:
    """One serving daemon."""

    def __init__(
        self,
        config: Config,
        local: int = 0,
        devices: int | None = None,
        config_file: Path | None = None,
        *,
        restored: bool = False,
        load: Callable[[], Config] | None = None,
    ) -> None:
        """`restored`: hosts may have been led by daemons that are newer than the state; `load`: reads the settings."""
        self._load = load or (lambda: config)
        self._config, self._config_file, self._local = config, config_file, local
        self._devices, self._restored = devices, restored

    async def run(self, ready: anyio.Event | None = None) -> None:
        """Serve until a stop is requested; ranks on hosts go on.

        Each part is made of parts above it. Handlers of a batch, and of a report, are called in the order of their
        subscription.
        """
        config, stop = self._config, anyio.Event()
        async with AsyncExitStack() as stack:
            # --- journal and scheduler
            journal = Journal(config.state_dir / "journal.db")
            stack.callback(journal.close)
            newest_event = NewestEvent(config.state_dir)
            stack.callback(newest_event.close)
            if self._restored:
                await journal.keep_fact(BACKUP_OF, "")
            else:
                await newest_event.check(journal)
            scheduler = Scheduler(POLICIES[config.policy](), host_lost_after_s=config.host_lost_after_s)
            engine = Engine(journal, scheduler)
            _replay(engine)
            state = scheduler.state
            leader = await take_the_lead(engine, self._restored)
            data_key = journal.fact("data_key", secrets.token_hex(16))
            timers = Timers(engine)
            feed = Feed()
            feed.number = journal.last_event_id()
            settings = LiveSettings(config, self._config_file, self._load)
            tasks = await stack.enter_async_context(anyio.create_task_group())

            # --- hosts
            dialer = Dialer(HostKeys(config.state_dir / "known_hosts"))
            embedded: dict[int, EmbeddedHost] = {}
            ssh_config = Path(config.ssh_config).expanduser() if config.ssh_config else None
            enrolment = HostKeyEnrolment(dialer, ssh_config, embedded)
            login_key = LoginKey(config.state_dir / "login_key")
            links = LinkFactory(config, engine, leader, dialer, enrolment, login_key, embedded)
            hosts = HostRegistry(engine, journal, config, tasks, links.make)
            joined = JoinedHosts(engine, hosts, links.joined_dialers, tasks, config.host_lost_after_s)

            # --- storage and profiling
            archive = Archive(config.state_dir, journal)
            is_hidden = "own" in (config.visibility, config.web.visibility if config.web is not None else "all")
            archived_jobs = ArchivedJobs(engine, config.archive_jobs_after_s, is_hidden)
            await archived_jobs.load()
            await archive.keep_secrets_of({job.id for job in state.jobs.values() if not job.state.is_final})
            replicas = SnapshotReplicas(engine, hosts, data_key)
            usage = UsageStore(config.state_dir / "usage.db", state, outside=hosts.outside_processes)
            stack.callback(usage.close)
            idle_jobs = IdleJobs(engine, usage.busy, config.idle_after_s, config.reclaim_idle_s, config.reclaim)
            shared_memory = SharedDeviceMemory(engine, usage.latest)
            log_tails = LogTails(engine, hosts, archive)
            backups = Backups(config.state_dir, self._config_file, engine, journal, dialer, enrolment)
            measurements = config.state_dir / "measurements.db"
            models = PerformanceModels(engine, measurements)
            classifier = SubmissionClassifier(engine, archived_jobs)
            profiler = Profiler(engine, models, classifier, trials=config.trials)
            outcomes = OutcomeStore(config.state_dir / "forecasts.db")
            stack.callback(outcomes.close)
            forecaster = Forecaster(engine, outcomes)
            notifier = Notifier(config.notify, state) if config.notify is not None else None

            # --- execution
            datasets = DataSets(engine, hosts, data_key, tasks)
            launches = LaunchRequests(engine, hosts, archive, datasets, models)
            inspector = ModelInspector(engine, hosts, archive, datasets, launches)
            migrations = Migrations(engine, hosts, launches)
            executor = Executor(engine, hosts, archive, timers, tasks, launches, migrations, inspector, replicas)

            # --- handlers of batches and of agents' reports
            engine.subscribe(lambda *_: newest_event.write(*engine.newest()))
            engine.subscribe(
                lambda events, decisions: feed.add(events, decisions, forecaster.with_news(scheduler.side_effects))
            )
            engine.subscribe(forecaster.handled)
            if notifier is not None:
                engine.subscribe(notifier.handled)
            engine.subscribe(lambda _, decisions: executor.carry_out(decisions))
            engine.subscribe(lambda events, _: profiler.handled(events))
            engine.subscribe(lambda events, _: datasets.handled(events))
            hosts.reports.subscribe(StateSnapshotTaken, partial(tasks.start_soon, guarded, replicas.on_taken))
            hosts.reports.subscribe(HostUp, replicas.on_up)
            hosts.reports.subscribe(HostUp, partial(tasks.start_soon, guarded, inspector.end_abandoned))
            hosts.reports.subscribe(Progress, profiler.on_progress)
            hosts.reports.subscribe(FromRank, profiler.on_rank_message)
            hosts.reports.subscribe(Usage, usage.on_usage)

            # --- verbs of the socket
            accounts = Accounts(settings, state, hosts, login_key)
            rights = Rights(settings, state)
            pages = Pages(config.web, lambda: scheduler.state, archived_jobs) if config.web is not None else None
            pages_row = pages.row if pages is not None else lambda: None
            workdirs = WorkdirVerbs(archive, journal, state, config.workdir_bytes_max)
            daemon = DaemonVerbs(settings, engine, archived_jobs, feed, stop, pages_row)
            jobs = JobVerbs(
                config, engine, hosts, archive, workdirs, archived_jobs, feed, accounts, rights, forecaster,
                daemon.status_row,
            )  # fmt: skip
            performance = PerformanceVerbs(
                engine, models, profiler.forget, measurements, jobs.admit, inspector.describe_unsubmitted
            )
            terminals = Terminals(engine, hosts, archive, feed)
            groups: tuple[object, ...] = (
                daemon,
                accounts,
                jobs,
                QueueVerbs(engine, hosts, archived_jobs, jobs.submit, rights),
                MigrationVerbs(engine, hosts, feed),
                JobLogs(engine, hosts, archive, feed),
                terminals,
                workdirs,
                FileVerbs(engine, hosts),
                RetentionVerbs(engine, hosts, archive, workdirs),
                BackupVerbs(backups),
                HostVerbs(engine, hosts, enrolment, forecaster),
                HostChecks(engine, hosts, accounts),
                JoinVerbs(config, joined, leader.daemon_id),
                ClaimVerbs(engine, rights, forecaster),
                CalendarVerbs(lambda: scheduler.state, forecaster.of, joined.ends_s),
                UsageVerbs(usage, state, archived_jobs, outcomes),
                performance,
            )
            served = {verb: getattr(group, verb) for group in groups for verb in verbs_of(type(group))}
            streams = {verb: method for verb, method in served.items() if inspect.isasyncgenfunction(method)}
            verbs = {verb: method for verb, method in served.items() if verb not in streams}

            def on_gone(peer: Peer) -> None:
                joined.gone(peer.connection)
                workdirs.gone(peer.connection)
                performance.drop_partial(peer.connection)

            access = Access(
                lambda: scheduler.state,
                config.visibility,
                lambda: settings().operators,
                lambda: settings().readers,
                lambda: archived_jobs.names,
            )
            socket = config.socket
            server = Server(socket, config.socket_group, access, verbs, streams, on_gone, archived_jobs.recall_named)

            # --- start
            listener = await server.listen()
            stack.callback(server.withdraw)
            link = config.state_dir / configuration.SERVED
            link.unlink(missing_ok=True)
            if socket.parent != config.state_dir:
                link.symlink_to(socket)
            tasks.start_soon(engine.run)
            agreed = configuration.agreements(config)
            await engine.post(e.DaemonStarted(at_s=time.time(), epoch=leader.epoch, **agreed))
            for run in (timers.run, profiler.run, terminals.run):
                tasks.start_soon(run)
            for run in (usage.run, archived_jobs.run, workdirs.run, log_tails.run, backups.run, forecaster.run):
                tasks.start_soon(guarded, run)
            tasks.start_soon(guarded, post_observed, engine, shared_memory.observe)
            if config.idle_after_s:
                tasks.start_soon(guarded, post_observed, engine, idle_jobs.observe)
            if notifier is not None:
                tasks.start_soon(notifier.run)
                after_s = {"": config.outside_queue_after_s}
                after_s |= {name: each.outside_queue_after_s for name, each in config.hosts.items()}
                if any(after_s.values()):
                    outside = hosts.outside_processes
                    tasks.start_soon(OutsideProcesses(outside, notifier.tell, after_s, config.outside_queue_exempt).run)
            local_dir = config.state_dir / "local"
            await stack.enter_async_context(local_hosts(hosts, state, local_dir, self._local, self._devices, embedded))
            await joined.restore()
            if self._restored:  # people may have started jobs since the backup
                for account in sorted({job.spec.account for job in state.jobs.values()} - {""}):
                    await hosts.log_in(account)
            tasks.start_soon(server.serve, listener)
            if pages is not None:
                tasks.start_soon(pages.serve, verbs)
            tasks.start_soon(_watchdog)
            tasks.start_soon(_signals, stop, daemon)
            notify_systemd(f"READY=1\nSTATUS=serving {socket}")
            log.info("clusterd %s serves %s (pid %d, state in %s)", __version__, socket, os.getpid(), config.state_dir)
            if ready is not None:
                ready.set()

            # --- stop
            await stop.wait()
            notify_systemd("STOPPING=1")
            log.info("stopping; jobs keep running: %s", ", ".join(state.active) or "none")
            with anyio.move_on_after(5.0):
                await engine.snapshot()
            tasks.cancel_scope.cancel()


def _replay(engine: Engine) -> None:
    started_s = time.monotonic()
    if replayed := engine.restore():
        log.info("replayed %d events in %.2f s", replayed, time.monotonic() - started_s)
    gc.freeze()  # collections leave out what was restored


async def _signals(stop: anyio.Event, daemon: DaemonVerbs) -> None:
    heeded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    with anyio.open_signal_receiver(*heeded) as signals:
        async for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                stop.set()
            elif number == signal.SIGHUP:
                try:
                    log.info("SIGHUP: settings are read again: %s", await daemon.read_again())
                except ClusterError as error:
                    log.error("SIGHUP: settings stay as they are: %s", error)
            else:  # as scripts send them that turn logs over
                log.info("%s means nothing here: the log turns itself over; jobs keep running", number.name)


async def _watchdog() -> None:
    """Notify systemd's watchdog at half its interval, as its manual asks."""
    interval_s = float(os.environ.get("WATCHDOG_USEC", 0)) / 2e6 or WATCHDOG_S
    while True:
        notify_systemd("WATCHDOG=1")
        await anyio.sleep(interval_s)


def _raise_open_files() -> None:
    """Raise the limit of open files: each `run` and `wait` is one, and embedded hosts inherit the limit."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


SWITCH_S = 0.001
"""Time after which a thread that computes, such as a scheduling pass, lets the event loop go on."""


def main(argv: list[str]) -> int:
    """Parse the options that `clusterd start` passes on, and serve."""
    parser = argparse.ArgumentParser(prog="clusterd.daemon")
    parser.add_argument("--local", type=int, default=0)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--system", action="store_true")
    parser.add_argument("--restored", action="store_true")
    parser.add_argument("--foreground", action="store_true")
    options = parser.parse_args(argv)
    try:
        config = configuration.load(options.config, system=options.system)
        file = options.config or configuration.usual_file(options.system)
        refuse_unknown(config, str(file))
        _raise_open_files()
        make_files_private()
        sys.setswitchinterval(SWITCH_S)
        collect_seldom()
        with only_instance(config.state_dir):
            set_up_log(config.state_dir / "daemon.log", config.log_level, options.foreground)
            try:
                load = partial(configuration.load, options.config, system=options.system)
                daemon = Daemon(config, options.local, options.devices, file, restored=options.restored, load=load)
                anyio.run(daemon.run)
            except* (ClusterError, UnsafePath) as errors:
                raise first_of(errors) from None
            except* Exception as errors:
                log.exception("the daemon ends by a bug of its own")
                first = first_of(errors)
                raise ClusterError(
                    f"the daemon ended by a bug of its own: {type(first).__name__}: {first}: "
                    f"{config.state_dir}/daemon.log says where; jobs keep running"
                ) from None
    except UnsafePath as error:
        print(f"clusterd: {error}", file=sys.stderr)
        return 1
    except ClusterError as error:
        print(f"clusterd: {error}", file=sys.stderr)
        return error.exit_code
    return 0
