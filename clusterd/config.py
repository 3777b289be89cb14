"""Configuration of the daemon: directories, its TOML file and options of hosts.

Precedence of a value: flag, environment (``CLUSTERD_*``), the given or found file, default.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from clusterd.errors import ConfigError, UsageError
from clusterd.toml import check_keys, data_folders, read_toml
from clusterd.trusted_paths import UnsafePath, check_file
from clusterd.types import Limits, Tenant
from clusterd.units import parse_duration_s, parse_size

Number = TypeVar("Number", int, float)

LOG_LEVELS = ("debug", "info", "warning", "error")

ACCOUNTS = ("own", "shared")
BECOME = ("ssh", "sudo")
VISIBILITY = ("own", "names", "all")

ACCOUNT_NAME = re.compile(r"[a-z_][a-z0-9_.-]{0,31}\$?")
"""Names that useradd accepts: they are put on command lines."""

TABLES = ("hosts", "tenants", "users", "limits", "datasets", "notify", "web")
"""Settings with their own table in the file; all others belong to ``[daemon]``."""

SPELLED = {
    "host_lost_after_s": "host_lost_after", "workdir_bytes_max": "workdir_max", "idle_after_s": "idle_after",
    "reclaim_idle_s": "reclaim_idle", "archive_jobs_after_s": "archive_jobs_after",
}  # fmt: skip
"""Keys in the file of settings whose value may have a unit; all others have the field's name."""

DEVICES_MAX = 1024
"""CPU devices of one host; each is an object in memory and in the journal."""

CORES_MAX = 1 << 16

SOCKET_PATH_BYTES_MAX = 100
"""The kernel's limit is 108 bytes; the rest is reserved for a suffix."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Options of one host: ``[hosts.NAME]``."""

    cpu_devices: int | None = None  # CPU devices to offer; default: 0 on a host with GPUs, else by cores
    cores_per_device: int = 4  # of a CPU device, if `cpu_devices` is not given
    agent_home: str | None = None  # directory of the agent's state
    exclude_devices: tuple[int, ...] = ()  # numbers of devices that are not offered
    labels: tuple[str, ...] = ()  # for constraints of jobs: "nvlink", "rack=a"


NOTIFICATIONS = (
    "job finished",
    "job failed",
    "job cancelled",
    "job queued again",
    "job idle",
    "host lost",
    "host back",
)


@dataclass(frozen=True, slots=True)
class Notify:
    """Receivers of notifications: ``[notify]``."""

    command: tuple[str, ...] = ()  # argv; reads each notification as a JSON object from standard input; empty: none
    on: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()  # services, as apprise spells them
    users: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # further ones, for jobs of this user


@dataclass(frozen=True, slots=True)
class User:
    """Settings of one user: ``[users.NAME]``."""

    account: str = ""  # on the hosts, where it has another name
    limits: Limits = field(default_factory=Limits)  # in the place of everybody's


@dataclass(frozen=True, slots=True)
class Web:
    """Read-only pages over HTTP on this machine: ``[web]``."""

    port: int  # of 127.0.0.1
    visibility: str = "own"  # of jobs to visitors, who have no name: "own", "names" or "all", never more than to users


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's settings."""

    state_dir: Path
    socket: Path
    socket_group: str | None = None  # group that may connect besides the owner
    operators: tuple[str, ...] = ()  # users, and groups as "@group", that may act on all jobs, besides the daemon's own
    readers: tuple[str, ...] = ()  # users that may look, and change and submit nothing
    visibility: str = "all"  # of other users' jobs: "own", "names" or "all"
    accounts: str | None = None  # of jobs: "own": that of each user; "shared": the daemon's; None: nobody else's jobs
    become: str = "ssh"  # way to people's own accounts on hosts: "ssh" or "sudo"
    policy: str = "default"
    host_lost_after_s: float = 120.0
    workdir_bytes_max: int = 256 << 20
    idle_after_s: float = 3600.0  # devices that do nothing for this long are told of; 0: never
    reclaim_idle_s: float | None = None  # shells whose devices do nothing for this long are ended; None: never
    archive_jobs_after_s: float = 30 * 86400.0  # jobs that are over for so long leave the daemon's memory
    ssh_config: str | None = None  # instead of ~/.ssh/config
    log_level: str = "info"
    trials: bool = True  # jobs may run a few steps under other plans, to measure their speed
    hosts: Mapping[str, HostOptions] = field(default_factory=dict)
    datasets: Mapping[str, str] = field(default_factory=dict)  # for all jobs, in the form of a job file
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)  # of everybody
    users: Mapping[str, User] = field(default_factory=dict)
    notify: Notify | None = None
    web: Web | None = None


def limits_of(config: Config, user: str) -> Limits:
    """Limits of a user."""
    return config.users[user].limits if user in config.users else config.limits


def device_limits(config: Config) -> dict[str, int]:
    """Devices that the jobs of each user may hold at a time; under "" those of everybody who is not named."""
    limits = {"": config.limits, **{name: user.limits for name, user in config.users.items()}}
    return {name: limit.devices for name, limit in limits.items() if limit.devices is not None}


def python_path() -> str:
    """PYTHONPATH with which a new interpreter imports this clusterd, also one unpacked from the one-file executable."""
    here = str(Path(__file__).parent.parent)
    return os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))


def state_dir(system: bool = False) -> Path:
    """Directory of the daemon's journal and files."""
    if given := os.environ.get("CLUSTERD_STATE_DIR"):
        return Path(given).absolute()
    if system:
        return Path("/var/lib/clusterd")
    import platformdirs  # imported only if needed: the command line starts faster without

    return Path(platformdirs.user_state_dir("clusterd"))


def socket_path(system: bool = False) -> Path:
    """Path of the daemon's socket."""
    if given := os.environ.get("CLUSTERD_SOCKET"):
        if "://" in given:
            raise UsageError(f"CLUSTERD_SOCKET is {given!r}, and takes a path: for another machine set CLUSTERD_HOST")
        return Path(given).absolute()
    if given := os.environ.get("CLUSTERD_STATE_DIR"):
        return Path(given).absolute() / "clusterd.sock"
    if system:
        return Path("/run/clusterd/clusterd.sock")
    runtime = runtime_directory()
    return runtime / "clusterd" / "clusterd.sock" if runtime is not None else state_dir() / "clusterd.sock"


def runtime_directory() -> Path | None:
    """The user's directory for sockets; None if there is none.

    The same in a session and without one: cron and `su` set no variable, or leave that of the other user.
    """
    places = (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}")
    return next((Path(place) for place in places if place and _is_mine(place)), None)


def _is_mine(directory: str) -> bool:
    try:
        return os.path.isabs(directory) and os.stat(directory).st_uid == os.getuid()
    except OSError:
        return False


def client_socket(system: bool = False) -> Path:
    """Path of the socket that commands connect to: the daemon's, or one that leads to another machine's daemon.

    Raises:
        UsageError, DaemonAbsent: as `clusterd.remote.forwarded_socket`.
    """
    if (url := os.environ.get("CLUSTERD_HOST")) and not system:
        from clusterd.remote import forwarded_socket  # imported only if needed: the command line starts faster without

        return forwarded_socket(url)
    return socket_path(system)


ENVIRONMENT = {"state_dir": ("CLUSTERD_STATE_DIR",), "socket": ("CLUSTERD_SOCKET", "CLUSTERD_STATE_DIR")}
"""Variables that override the file: clients read them too, but never the file."""


def _directory(daemon: Mapping[str, Any], key: str, file: Path | None) -> Path | None:
    """Path under a key, None if a variable overrides it; a relative path is relative to the file."""
    value = _text(daemon, key)
    if value is None:
        return None
    if "\0" in value:
        raise ValueError(f"{key} is {value!r}; it must be a path")
    path = Path(value).expanduser()
    return None if any(map(os.environ.get, ENVIRONMENT[key])) else file.absolute().parent / path if file else path


def load(file: Path | None = None, *, system: bool = False) -> Config:
    """Load the daemon's settings from `file`, else from the usual file if it exists.

    Raises:
        ConfigError: unreadable, unknown keys or invalid values; names file and key.
    """
    chosen = file or usual_file(system)
    if chosen is None:
        return of_values({}, None, system=system)
    made = of_values(read_toml(chosen), chosen, system=system)
    command = made.notify.command[:1] if made.notify is not None else ()
    try:
        for path in (chosen, made.ssh_config, *map(shutil.which, command)):  # all say what the daemon executes
            if path is not None:
                with contextlib.suppress(FileNotFoundError):
                    check_file(os.path.expanduser(path))
    except UnsafePath as error:
        raise ConfigError(f"{chosen}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}: it must be a file of this account or of root") from None
    return made


def of_values(values: Mapping[str, Any], file: Path | None, *, system: bool = False) -> Config:
    """Settings of the values of a file.

    Raises:
        ConfigError: unknown keys or invalid values; names file and key.
    """
    where = str(file)
    daemon = _table(values, "daemon", where)
    known = {SPELLED.get(f.name, f.name) for f in fields(Config)} - set(TABLES)
    check_keys(daemon, known, f"{where}: [daemon]")
    check_keys(values, {"daemon", *TABLES}, where)
    datasets = data_folders(_table(values, "datasets", where), f"{where}: [datasets]")
    hosts: dict[str, HostOptions] = {}
    for name, table in _table(values, "hosts", where).items():
        hosts[name] = host_options(table, f"{where}: [hosts.{name}]")
    tenants = {
        name: _tenant(table, f"{where}: [tenants.{name}]") for name, table in _table(values, "tenants", where).items()
    }
    limits = _limits(_table(values, "limits", where), Limits(), f"{where}: [limits]")
    users = {
        name: _user(table, limits, f"{where}: [users.{name}]") for name, table in _table(values, "users", where).items()
    }
    try:
        made = Config(
            state_dir=_directory(daemon, "state_dir", file) or state_dir(system),
            socket=_directory(daemon, "socket", file) or socket_path(system),
            socket_group=_text(daemon, "socket_group"),
            operators=_names(daemon.get("operators", []), "operators"),
            readers=_names(daemon.get("readers", []), "readers"),
            visibility=_one_of(daemon.get("visibility", "all"), VISIBILITY, "visibility"),
            accounts=_one_of(daemon["accounts"], ACCOUNTS, "accounts") if "accounts" in daemon else None,
            become=_one_of(daemon.get("become", "ssh"), BECOME, "become"),
            policy=str(daemon.get("policy", "default")),
            host_lost_after_s=_parsed(daemon, "host_lost_after", 120.0, parse_duration_s),
            workdir_bytes_max=_parsed(daemon, "workdir_max", 256 << 20, parse_size),
            idle_after_s=_parsed(daemon, "idle_after", 3600.0, parse_duration_s),
            reclaim_idle_s=_parsed(daemon, "reclaim_idle", 0.0, parse_duration_s) if "reclaim_idle" in daemon else None,
            archive_jobs_after_s=_parsed(daemon, "archive_jobs_after", 30 * 86400.0, parse_duration_s),
            ssh_config=_path(daemon, "ssh_config"),
            trials=_yes_or_no(daemon.get("trials", True), "trials"),
            log_level=_one_of(daemon.get("log_level", "info"), LOG_LEVELS, "log_level"),
            hosts=hosts,
            datasets=datasets,
            tenants=tenants,
            limits=limits,
            users=users,
            notify=_notify(values["notify"], f"{where}: [notify]") if "notify" in values else None,
            web=_web(values["web"], f"{where}: [web]") if "web" in values else None,
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{where}: [daemon]: {error}") from None
    except RuntimeError:
        raise ConfigError(
            f"{where}: [daemon]: a path begins with the home of a user who has none: write it out"
        ) from None
    for key, value in (
        ("host_lost_after", made.host_lost_after_s),
        ("workdir_max", made.workdir_bytes_max),
        ("archive_jobs_after", made.archive_jobs_after_s),
    ):
        if not 0 < value < 1 << 63:  # sent over the wire
            raise ConfigError(f"{where}: [daemon]: {key} is {daemon[key]!r}; it must be above 0, and fit 64 bits")
    if not 0 <= made.idle_after_s < 1 << 63:
        raise ConfigError(f"{where}: [daemon]: idle_after is {daemon['idle_after']!r}; it must be a time; 0: never")
    if made.reclaim_idle_s is not None and not 0 < made.idle_after_s < made.reclaim_idle_s < 1 << 63:
        raise ConfigError(
            f"{where}: [daemon]: reclaim_idle is {daemon['reclaim_idle']!r}; it must be longer than idle_after "
            f"({made.idle_after_s:g} s), when people are warned"
        )
    if made.web is not None and VISIBILITY.index(made.web.visibility) > VISIBILITY.index(made.visibility):
        raise ConfigError(
            f"{where}: [web]: visibility is {made.web.visibility!r}, and users see {made.visibility!r}: "
            "visitors of the pages, who are anonymous, must not see more"
        )
    if len(os.fsencode(made.socket)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"the socket's path is too long for the system ({made.socket}): set CLUSTERD_SOCKET to a shorter one"
        )
    return made


def _user(table: Any, everybody: Limits, where: str) -> User:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r}; it must be a table")
    limits = {key: value for key, value in table.items() if key != "account"}
    account = table.get("account", "")
    if not isinstance(account, str) or ("account" in table and not ACCOUNT_NAME.fullmatch(account)):
        raise ConfigError(f"{where}: account is {account!r}; it must be the name of an account on the hosts")
    return User(account, _limits(limits, everybody, where))


def _limits(table: Mapping[str, Any], otherwise: Limits, where: str) -> Limits:
    check_keys(table, {f.name for f in fields(Limits)}, where)
    for key, value in table.items():
        least = -(1 << 31) if key == "priority" else 0
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise ConfigError(f"{where}: {key} is {value!r}; it must be a whole number from {least} to {(1 << 31) - 1}")
    return replace(otherwise, **table)


def _tenant(table: Any, where: str) -> Tenant:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r}; it must be a table")
    check_keys(table, {f.name for f in fields(Tenant)}, where)
    quota, share = table.get("quota"), table.get("share", 1.0)
    if quota is not None and (not isinstance(quota, int) or isinstance(quota, bool) or not 0 <= quota < 1 << 63):
        raise ConfigError(f"{where}: quota is {quota!r}; it must be a number of devices")
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= sys.float_info.max:
        raise ConfigError(f"{where}: share is {share!r}; it must be a number above 0")
    try:
        members = _names(table["members"], "members") if "members" in table else None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Tenant(quota, float(share), members)


def _notify(table: Any, where: str) -> Notify:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r}; it must be a table")
    check_keys(table, {f.name for f in fields(Notify)}, where)
    command, on = table.get("command"), table.get("on", [kind for kind in NOTIFICATIONS if kind != "job cancelled"])
    if command is not None and (
        not isinstance(command, list)
        or not command
        or not command[0]
        or not all(isinstance(part, str) and "\0" not in part for part in command)
    ):
        raise ConfigError(f'{where}: command is {command!r}; it must be a command, as in ["notify-lab", "--chat"]')
    urls = _urls(table.get("urls", []), f"{where}: urls")
    users = table.get("users", {})
    if not isinstance(users, dict):
        raise ConfigError(f'{where}: users is {users!r}; it must be a table, as in ann = ["mailto://..."]')
    by_user = {user: _urls(some, f"{where}: users.{user}") for user, some in users.items()}
    if command is None and not urls and not by_user:
        raise ConfigError(f"{where} has nobody to tell: give a command, or urls")
    if not isinstance(on, list) or not set(map(str, on)) <= set(NOTIFICATIONS):
        raise ConfigError(f"{where}: on is {on!r}; it must be a list of some of {', '.join(NOTIFICATIONS)}")
    argv = (os.path.expanduser(command[0]), *command[1:]) if command else ()
    return Notify(argv, tuple(on), urls, by_user)


def _web(table: Any, where: str) -> Web:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r}; it must be a table")
    check_keys(table, {f.name for f in fields(Web)}, where)
    port, visibility = table.get("port"), table.get("visibility", "own")
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise ConfigError(f"{where}: port is {port!r}; it must be a whole number from 1 to 65535")
    if visibility not in VISIBILITY:
        raise ConfigError(f"{where}: visibility is {visibility!r}; it must be one of {', '.join(VISIBILITY)}")
    return Web(port, visibility)


def _urls(given: Any, where: str) -> tuple[str, ...]:
    """URLs of services; they hold passwords, so no message repeats them."""
    if not isinstance(given, list) or not all(isinstance(url, str) and "://" in url for url in given):
        raise ConfigError(f'{where} must be a list of URLs as apprise spells them, as in ["mailto://..."]')
    return tuple(given)


def host_options(table: Any, where: str) -> HostOptions:
    """Validate the options of one host.

    Raises:
        ConfigError: an invalid value; names `where` and key.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r}; it must be a table")
    check_keys(table, {f.name for f in fields(HostOptions)}, where)
    for key, least, most in (("cpu_devices", 0, DEVICES_MAX), ("cores_per_device", 1, CORES_MAX)):
        value = table.get(key, least)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{where}: {key} is {value!r}; it must be a whole number from {least} to {most}")
    home = table.get("agent_home", "")
    if not isinstance(home, str) or not home.isprintable():
        raise ConfigError(f"{where}: agent_home is {home!r}; it must be a path")
    labels = table.get("labels", [])
    if not isinstance(labels, list | tuple) or not all(isinstance(label, str) and is_label(label) for label in labels):
        raise ConfigError(f'{where}: labels is {labels!r}; it must be a list of words, as in ["nvlink", "rack=a"]')
    excluded = table.get("exclude_devices", [])
    if not isinstance(excluded, list | tuple) or not all(type(number) is int and number >= 0 for number in excluded):
        raise ConfigError(f"{where}: exclude_devices is {excluded!r}; it must be a list of numbers, as in [3]")
    return HostOptions(**{**table, "labels": tuple(dict.fromkeys(labels)), "exclude_devices": tuple(excluded)})


def is_label(text: str) -> bool:
    """True for a label of a host: a word that a list with commas can hold."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=/:-]*", text) is not None


def _names(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f'{name} is {value!r}; it must be a list of names, as in ["ann", "bob"]')
    return tuple(value)


def _text(table: Mapping[str, Any], name: str) -> str | None:
    value = table.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; put it in quotes")
    return value


def _path(table: Mapping[str, Any], name: str) -> str | None:
    value = _text(table, name)
    if value is not None and not value.isprintable():
        raise ValueError(f"{name} is {value!r}; it must be a path")
    return value


def _parsed(table: Mapping[str, Any], name: str, default: Any, parse: Callable[[Any], Number]) -> Number:
    try:
        return parse(table.get(name, default))
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from None


def _one_of(value: Any, known: tuple[str, ...], name: str) -> str:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    return str(value)


def _yes_or_no(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")
    return value


def _table(values: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {name} is {table!r}; it must be a table, [{name}]")
    return table


def usual_file(system: bool) -> Path | None:
    """Path of the default configuration file; None if it does not exist."""
    if given := os.environ.get("CLUSTERD_CONFIG"):
        return Path(given)
    if system:
        usual = Path("/etc/clusterd/clusterd.toml")
    else:
        import platformdirs

        usual = Path(platformdirs.user_config_dir("clusterd")) / "clusterd.toml"
    try:
        return usual if usual.exists() else None
    except OSError:
        return usual  # not permitted: reading it reports the error
