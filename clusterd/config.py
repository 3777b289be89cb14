"""Configuration of the daemon: directories, its TOML file and options of hosts.

Precedence of a value: flag, environment (``CLUSTERD_*``), the given or found file, default.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from clusterd import keys as k
from clusterd.errors import ConfigError, UsageError
from clusterd.keys import Key, data_folders
from clusterd.toml import check_keys, read_toml, refuse_mistakes
from clusterd.trusted_paths import UnsafePath, check_file
from clusterd.types import Limits, Reclaim, Tenant

Setting = TypeVar("Setting")

LOG_LEVELS = ("debug", "info", "warning", "error")

ACCOUNTS = ("own", "shared")
BECOME = ("ssh", "sudo")
VISIBILITY = ("own", "names", "all")

ACCOUNT_NAME = re.compile(r"[a-z_][a-z0-9_.-]{0,31}\$?")
"""Names that useradd accepts: they are put on command lines."""

TABLES = ("hosts", "tenants", "users", "limits", "datasets", "notify", "web")
"""Settings with their own table in the file; all others belong to ``[daemon]``."""

DEVICES_MAX = 1024
"""CPU devices of one host; each is an object in memory and in the journal."""

CORES_MAX = 1 << 16

SOCKET_PATH_BYTES_MAX = 100
"""The kernel's limit is 108 bytes; the rest is reserved for a suffix."""

NOTIFICATIONS = (
    "job finished",
    "job failed",
    "job cancelled",
    "job queued again",
    "job idle",
    "job over its share",
    "job not saved",
    "budget",
    "booking released",
    "outside the queue",
    "host lost",
    "host back",
)


def _listed(is_right: Callable[[Any], object], expected: str, **others: Any) -> k.Value:
    items = k.Value(expected="", accepts=(list, tuple), convert=lambda items: tuple(dict.fromkeys(items)), shape=list)
    return k.limited(items, lambda given: all(map(is_right, given)), expected, **others)


def _urls(given: Any) -> tuple[str, ...]:
    """URLs of services; they hold passwords, so no message repeats them."""
    if not isinstance(given, list) or not all(isinstance(url, str) and "://" in url for url in given):
        raise ValueError('must be a list of URLs as apprise spells them, as in ["mailto://..."]')
    return tuple(given)


def _urls_by_user(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    found = {}
    for user, urls in given.items():
        try:
            found[user] = _urls(urls)
        except ValueError as error:
            raise ValueError(f"users.{user} {error}") from None
    return found


def _above_zero(value: k.Value) -> k.Value:
    """The type for what is sent over the wire, and not 0."""

    def convert(given: Any) -> Any:
        if not 0 < (found := value.convert(given)) < 1 << 63:
            raise k.WrongType(f"{given!r}; it must be above 0, and fit 64 bits")
        return found

    return replace(value, convert=convert)


def _weights(given: dict[str, Any]) -> dict[str, float]:
    for name, weight in given.items():
        if not name or isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e9:
            raise ValueError(f"{name!r} is {weight!r}; it must be the part of a type's name, and a number above 0")
    return {name: float(weight) for name, weight in given.items()}


_WEIGHTS = k.Value(
    expected="it must be a table, as in { a100 = 2.0, cpu = 0.1 }",
    accepts=dict,
    convert=_weights,
    item=float,
    schema={"gt": 0},
)
_QUOTED = replace(k.TEXT, expected="put it in quotes")
_DIRECTORY = k.limited(_QUOTED, lambda text: "\0" not in text, "it must be a path")
_ARGV = k.limited(
    k.Value(expected="", accepts=list, convert=lambda argv: (os.path.expanduser(argv[0]), *argv[1:])),
    lambda argv: argv and argv[0] and all(isinstance(part, str) and "\0" not in part for part in argv),
    'it must be a command, as in ["notify-lab", "--chat"]',
)
_NUMBERS = _listed(
    lambda n: type(n) is int and n >= 0, "it must be a list of numbers, as in [3]", item=int, schema={"ge": 0}
)
_LABELS = _listed(
    k.is_label, 'it must be a list of words, as in ["nvlink", "rack=a"]', schema={"pattern": f"^{k.LABEL.pattern}$"}
)
_EVENTS = _listed(
    lambda kind: kind in NOTIFICATIONS, f"it must be a list of some of {', '.join(NOTIFICATIONS)}", item=NOTIFICATIONS
)
_ACCOUNT = k.limited(
    k.TEXT, ACCOUNT_NAME.fullmatch, "it must be the name of an account on the hosts",
    schema={"pattern": f"^{ACCOUNT_NAME.pattern}$"},
)  # fmt: skip
_URL = k.Value(
    expected="it must be a list of URLs", accepts=object, convert=_urls, shape=list, schema={"pattern": "://"}
)
URLS_BY_USER = k.Value(expected='it must be a table, as in ann = ["mailto://..."]', accepts=dict, convert=_urls_by_user)


# fmt: off
@dataclass(frozen=True, slots=True)
class HostOptions:
    """Options of one host: ``[hosts.NAME]``."""

    cpu_devices: Annotated[int | None, Key(k.within(0, DEVICES_MAX), "CPU devices to offer.",
                                           "0 on a host with GPUs, else by cores")] = None
    cores_per_device: Annotated[int, Key(k.within(1, CORES_MAX), "Cores of a CPU device, if cpu_devices is not "
                                         "given.")] = 4
    agent_home: Annotated[str | None, Key(k.PATH, "Directory of agents' state.", "below the home directory")] = None
    exclude_devices: Annotated[tuple[int, ...], Key(_NUMBERS, "Numbers of devices that are never offered.",
                                                    "none")] = ()
    labels: Annotated[tuple[str, ...], Key(_LABELS, "For constraints of jobs.", "none")] = ()
    outside_queue_after_s: Annotated[float | None, Key(k.DURATION, "As of [daemon], for this host; 0: never.",
                                                       "as there", name="outside_queue_after")] = None


@dataclass(frozen=True, slots=True)
class Notify:
    """Receivers of notifications: ``[notify]``."""

    command: Annotated[tuple[str, ...], Key(_ARGV, "Program that reads each notification as a JSON object from "
                                            "standard input.", "none")] = ()
    on: Annotated[tuple[str, ...], Key(_EVENTS, "Events to report.", 'all but "job cancelled"')] = ()
    urls: Annotated[tuple[str, ...], Key(_URL, "Services as apprise spells them.", "none")] = ()
    users: Annotated[Mapping[str, tuple[str, ...]], Key(URLS_BY_USER, "Further services, for this user's jobs.",
                                                        "none")] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class User:
    """Settings of one user: ``[users.NAME]``, which has limits, too."""

    account: Annotated[str, Key(_ACCOUNT, "Name of the account on the hosts, where it is another one.",
                                "the user's name")] = ""
    limits: Limits = field(default_factory=Limits)  # in the place of everybody's


@dataclass(frozen=True, slots=True)
class Web:
    """Read-only pages over HTTP on this machine: ``[web]``."""

    port: Annotated[int, Key(k.within(1, 65535), "Port of 127.0.0.1.")]
    visibility: Annotated[str, Key(k.one_of(VISIBILITY), "What visitors, who are anonymous, see of jobs; never more "
                                   "than users do.")] = "own"


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's settings."""

    state_dir: Annotated[Path, Key(_DIRECTORY, "Directory of the journal, logs and measurements, on a local disk.",
                                   "see configuration.md")]
    socket: Annotated[Path, Key(_DIRECTORY, "Path of the socket; clients need CLUSTERD_SOCKET set to it.",
                                "see configuration.md")]
    socket_group: Annotated[str | None, Key(_QUOTED, "Group that may connect too.", "none")] = None
    operators: Annotated[tuple[str, ...], Key(k.NAMES, 'Users and "@groups" that may act on everybody\'s jobs.',
                                              "the daemon's own user")] = ()
    readers: Annotated[tuple[str, ...], Key(k.NAMES, 'Users and "@groups" that may look, and change and submit '
                                            "nothing.", "none")] = ()
    visibility: Annotated[str, Key(k.one_of(VISIBILITY), "What users see of other users' jobs.")] = "all"
    accounts: Annotated[str | None, Key(k.one_of(ACCOUNTS), "Account of jobs: that of each user, or the daemon's.",
                                        "only the daemon's own user may submit")] = None
    become: Annotated[str, Key(k.one_of(BECOME), "Way to people's own accounts: with the cluster's key, or by "
                               "sudo.")] = "ssh"
    policy: Annotated[str, Key(k.TEXT, "Policy of the scheduler.")] = "default"
    host_lost_after_s: Annotated[float, Key(_above_zero(k.DURATION), "A host without contact for this long is lost; "
                                            "its jobs are requeued.", name="host_lost_after")] = 120.0
    workdir_bytes_max: Annotated[int, Key(_above_zero(k.SIZE), "Largest working directory of a job.",
                                          name="workdir_max")] = 256 << 20
    idle_after_s: Annotated[float, Key(k.DURATION, "Warn of jobs whose devices do nothing for this long; 0: never.",
                                       name="idle_after")] = 3600.0
    reclaim_idle_s: Annotated[float | None, Key(k.DURATION, "Reclaim devices that do nothing for this long.",
                                                "never", name="reclaim_idle")] = None
    reclaim: Annotated[Reclaim, Key(k.one_of(Reclaim), "From whom: shells, which end; elastic jobs too, which "
                                    "shrink; or all, which are suspended, or end.")] = Reclaim.SHELLS
    outside_queue_after_s: Annotated[float | None, Key(
        _above_zero(k.DURATION), "Notify people whose processes hold a GPU outside the queue for this long.", "never",
        name="outside_queue_after")] = None
    outside_queue_exempt: Annotated[tuple[str, ...], Key(k.NAMES, "Users who are not notified of that.", "none")] = ()
    fair_share_half_life_s: Annotated[float, Key(
        k.DURATION, "Device-hours count half after this long, for fair shares; 0: what is held counts alone.",
        name="fair_share_half_life")] = 7 * 86400.0
    device_weights: Annotated[Mapping[str, float], Key(
        _WEIGHTS, "Weights of types of devices in fair shares and budgets, by part of their names.", "1 each"
        )] = field(default_factory=dict)
    archive_jobs_after_s: Annotated[float, Key(
        _above_zero(k.DURATION), "Jobs that are over for this long leave the daemon's memory; commands find them.",
        name="archive_jobs_after")] = 30 * 86400.0
    ssh_config: Annotated[str | None, Key(replace(k.PATH, expected="put it in quotes"),
                                          "OpenSSH configuration in the place of ~/.ssh/config.", "none")] = None
    log_level: Annotated[str, Key(k.one_of(LOG_LEVELS), "Level of the log.")] = "info"
    trials: Annotated[bool, Key(k.YES_OR_NO, "Jobs may run a few steps under other plans, to measure their "
                                "speed.")] = True
    hosts: Mapping[str, HostOptions] = field(default_factory=dict)
    datasets: Mapping[str, str] = field(default_factory=dict)  # for all jobs, in the form of a job file
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)  # of everybody
    users: Mapping[str, User] = field(default_factory=dict)
    notify: Notify | None = None
    web: Web | None = None
# fmt: on


SPELLED = {key.field: key.name for kind in (Config, HostOptions) for key in k.keys_of(kind) if key.field != key.name}
"""Keys in the file of settings whose value may have a unit; all others have the field's name."""


def agreements(config: Config) -> dict[str, Any]:
    """Quotas, limits, fair shares and budgets for the core: fields of the events that carry them."""
    limits = {"": config.limits, **{name: user.limits for name, user in config.users.items()}}
    return {
        "tenants": dict(config.tenants),
        "device_limits": {name: limit.devices for name, limit in limits.items() if limit.devices is not None},
        "half_life_s": config.fair_share_half_life_s,
        "budgets": {name: limit.device_hours for name, limit in limits.items() if limit.device_hours is not None},
        "device_weights": dict(config.device_weights),
    }


def limits_of(config: Config, user: str) -> Limits:
    """Limits of a user."""
    return config.users[user].limits if user in config.users else config.limits


def python_path() -> str:
    """PYTHONPATH with which a new interpreter imports this clusterd, also one unpacked from the one-file executable."""
    here = str(Path(__file__).parent.parent)
    return os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))


SERVED = "served.sock"
"""Link in a daemon's state directory to its socket."""


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


def served_socket(system: bool = False) -> Path:
    """Path of the socket of the daemon that runs: where it would be made from here, or where that daemon made it.

    A login without a runtime directory, or with another one, finds the latter by a link in the state directory.
    """
    path = socket_path(system)
    if os.environ.get("CLUSTERD_SOCKET") or system or path.exists():
        return path
    link = state_dir() / SERVED
    return link.resolve() if link.exists() else path


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
    return served_socket(system)


ENVIRONMENT = {"state_dir": ("CLUSTERD_STATE_DIR",), "socket": ("CLUSTERD_SOCKET", "CLUSTERD_STATE_DIR")}
"""Variables that override the file: clients read them too, but never the file."""


def _directory(given: str | None, key: str, file: Path | None) -> Path | None:
    """Path under a key, None if a variable overrides it; a relative path is relative to the file."""
    if given is None:
        return None
    path = Path(given).expanduser()
    return None if any(map(os.environ.get, ENVIRONMENT[key])) else file.absolute().parent / path if file else path


def load(file: Path | None = None, *, system: bool = False) -> Config:
    """Load the daemon's settings from `file`, else from the usual file if it exists.

    Raises:
        ConfigError: unreadable, unknown keys or invalid values; names file, line and key of each.
    """
    chosen = file or usual_file(system)
    if chosen is None:
        return of_values({}, None, system=system)
    values = read_toml(chosen)
    refuse_mistakes(chosen, values, lambda some: of_values(some, chosen, system=system))
    made = of_values(values, chosen, system=system)
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
    check_keys(values, {"daemon", *TABLES}, where)
    daemon = _table(values, "daemon", where)
    found = _read(Config, daemon, f"{where}: [daemon]")
    try:
        paths = {key: _directory(found.get(key), key, file) for key in ENVIRONMENT}
        datasets = data_folders(_table(values, "datasets", where))
    except RuntimeError:
        raise ConfigError(
            f"{where}: [daemon]: a path begins with the home of a user who has none: write it out"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{where}: [datasets]: {error}") from None
    limits = Limits(**_read(Limits, _table(values, "limits", where), f"{where}: [limits]"))
    made = Config(
        **{
            **found,
            "state_dir": paths["state_dir"] or state_dir(system),
            "socket": paths["socket"] or socket_path(system),
            "hosts": _named(values, "hosts", where, host_options),
            "datasets": datasets,
            "tenants": _named(values, "tenants", where, lambda table, at: Tenant(**_read(Tenant, table, at))),
            "limits": limits,
            "users": _named(values, "users", where, lambda table, at: _user(table, limits, at)),
            "notify": _notify(values["notify"], f"{where}: [notify]") if "notify" in values else None,
            "web": Web(**_read(Web, values["web"], f"{where}: [web]")) if "web" in values else None,
        }
    )
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


def _read(kind: type, table: Any, where: str, more: Iterable[str] = ()) -> dict[str, Any]:
    """Fields of the settings in a table, which may have `more` keys.

    Raises:
        ConfigError: it is no table, an unknown key or a wrong value; names it and `where`.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r}; it must be a table")
    keys = {key.name: key for key in k.keys_of(kind)}
    check_keys(table, {*keys, *more}, where)
    for name, key in keys.items():
        if name not in table and key.initial is MISSING and not key.default:
            raise ConfigError(f"{where}: {name} is missing; {key.value.expected}")
    given = [(key, table[name]) for name, key in keys.items() if name in table]
    found = k.read_values(given, lambda key: f"{where}: {key.name}")
    return {keys[name].field: value for name, value in found.items()}


def _named(values: Mapping[str, Any], name: str, where: str, read: Callable[[Any, str], Setting]) -> dict[str, Setting]:
    """Settings of each table below a table, by its name."""
    return {each: read(table, f"{where}: [{name}.{each}]") for each, table in _table(values, name, where).items()}


def _user(table: Any, everybody: Limits, where: str) -> User:
    limits = {key.name for key in k.keys_of(Limits)}
    found = _read(User, table, where, limits)
    own = {key: value for key, value in table.items() if key in limits}
    return User(**found, limits=replace(everybody, **_read(Limits, own, where)))


def _notify(table: Any, where: str) -> Notify:
    made = Notify(
        **{"on": tuple(kind for kind in NOTIFICATIONS if kind != "job cancelled"), **_read(Notify, table, where)}
    )
    if not (made.command or made.urls or made.users):
        raise ConfigError(f"{where} has nobody to tell: give a command, or urls")
    return made


def host_options(table: Any, where: str) -> HostOptions:
    """Validate the options of one host.

    Raises:
        ConfigError: an invalid value; names `where` and key.
    """
    return HostOptions(**_read(HostOptions, table, where))


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
