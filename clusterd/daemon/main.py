"""Entry point of the daemon: wiring, start and clean end."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from clusterd import __version__
from clusterd import config as configuration
from clusterd.config import Config, HostOptions
from clusterd.core import events as e
from clusterd.core.policies import POLICIES
from clusterd.core.scheduler import Scheduler
from clusterd.daemon.access import Access, Peer
from clusterd.daemon.api.accounts import Accounts
from clusterd.daemon.api.daemon import DaemonVerbs
from clusterd.daemon.api.host_check import HostChecks
from clusterd.daemon.api.hosts import JoinVerbs
from clusterd.daemon.api.jobs import JobVerbs
from clusterd.daemon.api.performance import PerformanceVerbs
from clusterd.daemon.api.retention import BackupVerbs
from clusterd.daemon.api.server import Server
from clusterd.daemon.api.terminals import Terminals
from clusterd.daemon.api.usage import UsageVerbs
from clusterd.daemon.api.watch import Feed
from clusterd.daemon.api.workdirs import WorkdirVerbs
from clusterd.daemon.execution.datasets import DataSets
from clusterd.daemon.execution.executor import Executor
from clusterd.daemon.execution.launching import LaunchRequests
from clusterd.daemon.execution.model_description import ModelInspector
from clusterd.daemon.hosts.account_links import LinkCallbacks
from clusterd.daemon.hosts.host_key_enrolment import HostKeyEnrolment
from clusterd.daemon.hosts.joined import JoinedHosts
from clusterd.daemon.hosts.local import local_hosts
from clusterd.daemon.hosts.registry import JOINED, LOCAL, HostRegistry
from clusterd.daemon.hosts.reports import HostUp
from clusterd.daemon.journal.engine import Engine, JournalHistory
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.journal.newest_event import BACKUP_OF, NewestEvent
from clusterd.daemon.journal.timers import Timers
from clusterd.daemon.notifications import Notifier
from clusterd.daemon.process import notify_systemd, only_instance, set_up_log
from clusterd.daemon.profiling.performance_models import PerformanceModels
from clusterd.daemon.profiling.profiler import Profiler
from clusterd.daemon.profiling.submission_classifier import SubmissionClassifier
from clusterd.daemon.rights import Rights
from clusterd.daemon.settings import LiveSettings, refuse_unknown
from clusterd.daemon.storage.archive import Archive
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.daemon.storage.backups import Backups
from clusterd.daemon.storage.idle_jobs import IdleJobs
from clusterd.daemon.storage.log_tails import LogTails
from clusterd.daemon.storage.snapshot_replicas import SnapshotReplicas
from clusterd.daemon.storage.usage import UsageStore
from clusterd.daemon.unexpected import guarded
from clusterd.daemon.web.pages import Pages
from clusterd.errors import ClusterError, first_of
from clusterd.process_attributes import make_files_private
from clusterd.protocol.agent import Progress, StateSnapshotTaken, Usage
from clusterd.protocol.proof import proof
from clusterd.protocol.rank import FromRank
from clusterd.ssh.connection import Dialer
from clusterd.ssh.embedded import EmbeddedHost
from clusterd.ssh.host import HostLink, LinkState
from clusterd.ssh.hostkeys import HostKeys
from clusterd.ssh.joined import JoinedDialer
from clusterd.ssh.login_key import LoginKey
from clusterd.ssh.resolve import Route
from clusterd.trusted_paths import UnsafePath
from clusterd.types import HostId

log = logging.getLogger(__name__)

WATCHDOG_S = 10.0
HEARTBEAT_MIN_S = 20.0
"""Shortest silence of an agent that counts as a hang, whatever `host_lost_after` is: hosts are busy at times."""
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
        self._config = config
        self._config_file = config_file
        self._local = local
        self._devices = devices
        self._restored = restored
        self._embedded: dict[int, EmbeddedHost] = {}

    async def run(self, ready: anyio.Event | None = None) -> None:
        """Serve until a stop is requested; ranks on hosts go on."""
        config = self._config
        async with AsyncExitStack() as stack:
            journal = Journal(config.state_dir / "journal.db")
            stack.callback(journal.close)
            newest_event = NewestEvent(config.state_dir)
            stack.callback(newest_event.close)
            if self._restored:
                await journal.keep_fact(BACKUP_OF, "")
            else:
                await newest_event.check(journal)
            scheduler = Scheduler(POLICIES[config.policy](), host_lost_after_s=config.host_lost_after_s)
            feed = Feed()
            engine = Engine(journal, scheduler, lambda events, decisions: handled(events, decisions))
            started_s = time.monotonic()
            replayed = engine.restore()
            feed.number = journal.last_event_id()
            if replayed:
                log.info("replayed %d events in %.2f s", replayed, time.monotonic() - started_s)
            cluster = journal.fact("cluster", uuid.uuid4().hex[:12])
            # Clusters of earlier versions have jobs under agents that were made for all clusters of a user.
            agents_of = journal.fact("agents_of", "" if scheduler.state.epoch else cluster)
            epoch = max(scheduler.state.epoch + 1, int(time.time()) if self._restored else 0)
            agent_key = journal.fact("agent_key", secrets.token_hex(32))
            if self._restored:
                await journal.keep_fact("restored", str(epoch))
            history = JournalHistory(engine, epoch, restored=int(journal.fact("restored", "0")))
            leader = {
                "daemon_id": cluster, "cluster": agents_of, "epoch": epoch, "key": agent_key, "history": history,
                "lost_after_s": max(config.host_lost_after_s, HEARTBEAT_MIN_S),
            }  # fmt: skip
            stop = anyio.Event()
            tasks = await stack.enter_async_context(anyio.create_task_group())
            timers = Timers(engine)
            dialer = Dialer(HostKeys(config.state_dir / "known_hosts"))
            invite = HostKeyEnrolment(dialer, Path(config.ssh_config).expanduser() if config.ssh_config else None)

            dialers: defaultdict[HostId, JoinedDialer] = defaultdict(JoinedDialer)

            def make_link(hosts: HostRegistry, host: HostId, address: str) -> HostLink:
                if address.startswith(JOINED):
                    # Who runs the host's command gets the key of this host alone.
                    of_host = {**leader, "key": proof(agent_key, "joined", address)}
                    return _joined_link(hosts, joined, host, dialers[host], of_host)
                return self._link(hosts, host, address, dialer, invite, leader)

            login_key = LoginKey(config.state_dir / "login_key")

            def make_account_link(host: HostId, address: str, account: str, callbacks: LinkCallbacks) -> HostLink:
                of_account = {**leader, "key": proof(agent_key, "account", account)}
                return self._account_link(host, address, account, callbacks, dialer, invite, login_key, of_account)

            hosts = HostRegistry(engine, journal, config, tasks, make_link, make_account_link)
            joined = JoinedHosts(engine, hosts, dialers, tasks, config.host_lost_after_s)
            archive = Archive(config.state_dir, journal)
            is_hidden = "own" in (config.visibility, config.web.visibility if config.web is not None else "all")
            archived = ArchivedJobs(engine, config.archive_jobs_after_s, is_hidden)
            await archived.load()
            await archive.keep_secrets_of({job.id for job in scheduler.state.jobs.values() if not job.state.is_final})
            key = journal.fact("data_key", secrets.token_hex(16))
            datasets = DataSets(engine, hosts, key)
            keeper = SnapshotReplicas(engine, hosts, key)
            hosts.reports.subscribe(
                StateSnapshotTaken, lambda host, report: tasks.start_soon(guarded, keeper.on_taken, host, report)
            )
            hosts.reports.subscribe(HostUp, keeper.on_up)
            launches = LaunchRequests(engine, hosts, archive, datasets)
            describer = ModelInspector(engine, hosts, archive, datasets, launches)
            hosts.reports.subscribe(
                HostUp, lambda host, report: tasks.start_soon(guarded, describer.end_abandoned, host, report)
            )
            executor = Executor(engine, hosts, archive, timers, tasks, launches, describer, keeper)

            learned = PerformanceModels(engine, config.state_dir / "measurements.db")
            profiler = Profiler(engine, learned, SubmissionClassifier(engine, archived), trials=config.trials)
            hosts.reports.subscribe(Progress, profiler.on_progress)
            hosts.reports.subscribe(FromRank, profiler.on_rank_message)
            launches.wants_probe, launches.proven = learned.wants_probe, learned.proven

            notifier = Notifier(config.notify, scheduler.state) if config.notify is not None else None

            def handled(events: Any, decisions: Any) -> None:
                newest_event.write(*engine.newest())
                feed.add(events, decisions, scheduler.side_effects)
                if notifier is not None:
                    notifier.handled(decisions, events)
                executor.carry_out(decisions)
                profiler.handled(events)
                for event in events:
                    if isinstance(event, e.HostConnected | e.AccountConnected):
                        tasks.start_soon(guarded, datasets.host_is_up, event.host)

            settings = LiveSettings(config, self._config_file, self._load)
            accounts = Accounts(settings, engine.scheduler.state, hosts, login_key)
            pages = Pages(config.web, lambda: scheduler.state, archived) if config.web is not None else None
            where = pages.row if pages is not None else lambda: None
            workdirs = WorkdirVerbs(archive, journal, scheduler.state, config.workdir_bytes_max)
            about_daemon = DaemonVerbs(settings, engine, archived, feed, stop, where)
            rights, status = Rights(settings, scheduler.state), about_daemon.status_row
            api = JobVerbs(config, engine, hosts, archive, workdirs, archived, feed, invite, accounts, rights, status)
            speed = PerformanceVerbs(
                engine,
                learned,
                profiler.forget,
                config.state_dir / "measurements.db",
                api.admit,
                describer.describe_unsubmitted,
            )
            terminals = Terminals(engine, hosts, archive, feed)
            usage = UsageStore(config.state_dir / "usage.db", scheduler.state)
            stack.callback(usage.close)
            hosts.reports.subscribe(Usage, usage.on_usage)
            backups = Backups(config.state_dir, self._config_file, engine, journal, dialer, invite)
            checks = HostChecks(engine, hosts, accounts)
            joining = JoinVerbs(config, joined, cluster)
            used = UsageVerbs(usage, scheduler.state, archived)
            served = (about_daemon, api, accounts, speed, terminals, checks, BackupVerbs(backups), used, joining)
            verbs = {verb: method for each in served for verb, method in each.verbs.items()}

            def gone(peer: Peer) -> None:
                joined.gone(peer.connection)
                workdirs.gone(peer.connection)
                speed.drop_partial(peer.connection)

            access = Access(
                lambda: scheduler.state,
                config.visibility,
                lambda: settings().operators,
                lambda: settings().readers,
                lambda: archived.names,
            )
            server = Server(
                config.socket,
                config.socket_group,
                access,
                verbs,
                {**api.streams, **terminals.streams, **joining.streams},
                gone,
                archived.recall_named,
            )
            listener = await server.listen()
            stack.callback(server.withdraw)
            tasks.start_soon(engine.run)
            tenants, limits = dict(config.tenants), configuration.device_limits(config)
            await engine.post(e.DaemonStarted(at_s=time.time(), epoch=epoch, tenants=tenants, device_limits=limits))
            tasks.start_soon(timers.run)
            tasks.start_soon(profiler.run)
            tasks.start_soon(terminals.run)
            tasks.start_soon(guarded, usage.run)
            tasks.start_soon(guarded, archived.run)
            tasks.start_soon(guarded, workdirs.run)
            if config.idle_after_s:
                tasks.start_soon(guarded, IdleJobs(engine, usage.busy, config.idle_after_s, config.reclaim_idle_s).run)
            tasks.start_soon(guarded, LogTails(engine, hosts, archive).run)
            tasks.start_soon(guarded, backups.run)
            if notifier is not None:
                tasks.start_soon(notifier.run)
            inside = config.state_dir / "local"
            await stack.enter_async_context(
                local_hosts(hosts, scheduler.state, inside, self._local, self._devices, self._embedded)
            )
            await joined.restore()
            if self._restored:  # people may have started jobs since the backup
                for account in sorted({job.spec.account for job in scheduler.state.jobs.values()} - {""}):
                    await hosts.log_in(account)
            tasks.start_soon(server.serve, listener)
            if pages is not None:
                tasks.start_soon(pages.serve, verbs)
            tasks.start_soon(_watchdog)
            tasks.start_soon(_signals, stop, about_daemon)
            notify_systemd(f"READY=1\nSTATUS=serving {config.socket}")
            log.info(
                "clusterd %s serves %s (pid %d, state in %s)", __version__, config.socket, os.getpid(), config.state_dir
            )
            if ready is not None:
                ready.set()
            await stop.wait()
            notify_systemd("STOPPING=1")
            log.info("stopping; jobs keep running: %s", ", ".join(scheduler.state.active) or "none")
            with anyio.move_on_after(5.0):
                await engine.snapshot()
            tasks.cancel_scope.cancel()

    def _link(
        self,
        hosts: HostRegistry,
        host: HostId,
        address: str,
        dialer: Dialer,
        invite: HostKeyEnrolment,
        leader: dict[str, Any],
    ) -> HostLink:
        async def route() -> Route:
            if address.startswith(LOCAL):
                return self._embedded[int(address.removeprefix(LOCAL))].route
            return await invite.route(address)

        async def up(hello: dict[str, Any]) -> None:
            await hosts.on_up(host, hello, await _ip_address((await route()).host))

        return HostLink(
            host,
            route,
            dialer,
            on_state=lambda state: hosts.on_state(host, state),
            on_up=up,
            on_event=lambda message: hosts.on_event(host, message),
            home_source=lambda: hosts.agent_home(host),
            **leader,
        )

    def _account_link(
        self,
        host: HostId,
        address: str,
        account: str,
        callbacks: LinkCallbacks,
        dialer: Dialer,
        invite: HostKeyEnrolment,
        login_key: LoginKey,
        leader: dict[str, Any],
    ) -> HostLink:
        becomes = self._config.become == "sudo"

        async def route() -> Route:
            found = await invite.route(address)
            return found if becomes else login_key.route(found, account)

        def home() -> str:
            given = self._config.hosts.get(host, HostOptions()).agent_home or ""
            return given if not given or given.startswith("~") else f"{given}/{account}"

        return HostLink(
            host,
            route,
            dialer,
            on_state=callbacks.on_state,
            on_up=callbacks.on_up,
            on_event=callbacks.on_event,
            home_source=home,
            become=account if becomes else "",
            **leader,
        )


def _joined_link(
    hosts: HostRegistry, joined: JoinedHosts, host: HostId, dialer: JoinedDialer, leader: dict[str, Any]
) -> HostLink:
    async def route() -> Route:
        return Route(name=host, host="", port=0, user="")  # never dialed

    def on_state(state: LinkState) -> None:
        hosts.on_state(host, state)
        if state.name == "closed":
            joined.closed(host)

    return HostLink(
        host,
        route,
        dialer,
        on_state=on_state,
        on_up=lambda hello: hosts.on_up(host, hello, ""),
        on_event=lambda message: hosts.on_event(host, message),
        home_source=lambda: hosts.agent_home(host),
        **leader,
    )


async def _ip_address(host: str) -> str:
    """IPv4 address of a host name; the name itself where only a jump host can resolve it."""
    try:
        found = await anyio.getaddrinfo(host, None, family=socket.AF_INET)
    except OSError:
        return host
    return str(found[0][4][0])


async def _signals(stop: anyio.Event, about_daemon: DaemonVerbs) -> None:
    heeded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    with anyio.open_signal_receiver(*heeded) as signals:
        async for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                stop.set()
            elif number == signal.SIGHUP:
                try:
                    log.info("SIGHUP: settings are read again: %s", await about_daemon.read_again())
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
