"""Declarations of keys: how files and command lines give a field of a job or a setting of the daemon, and its meaning.

`clusterd.types.JobSpec` and `clusterd.config.Config` annotate their fields with these. Files and their schemas, options
of commands, ``KEY=VALUE``, validation, words of edits, rows and docs/job_file.md are made from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import time
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

from clusterd.errors import ConfigError
from clusterd.job_signals import parse_limit_signal
from clusterd.plans.plan import Plan, PlanError
from clusterd.units import (
    duration,
    local_time,
    parse_capability,
    parse_duration_s,
    parse_gpus_or_part,
    parse_size,
    parse_time_s,
    size,
)

NAME_LENGTH_MAX = 63

RETRIES_MAX = 1000

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=/:-]*")

CONTAINER_RUNTIMES = ("docker", "podman", "apptainer")

NONE = ("", "none", "any", "unlimited", "infinite")
"""Texts that take a limit, a list or a choice away."""


class WrongType(ValueError):
    """A value in a file is of another type than its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Type and unit of a key's value. What cannot be converted raises ValueError with what would be right."""

    expected: str  # as refusals say it: "it must be a whole number"
    accepts: type | tuple[type, ...]  # in a TOML file
    convert: Callable[[Any], Any] = lambda value: value  # of an accepted value
    parse: Callable[[str], Any] | None = None  # of a text on a command line; None: as `convert`
    words: Callable[[Any], str] = str
    problem: Callable[[Any], str] = lambda _: ""  # end of a sentence about a value that no job may have
    removable: bool = True  # one of `NONE` stands for its default
    separator: str = ""  # between the items of a list in a text; an option may be repeated; empty: no list
    metavar: str = ""
    item: Any = str  # of a list or table; a tuple: one of these texts
    schema: Mapping[str, Any] = field(default_factory=dict)  # limits of a value, or of the items, for editors
    shape: Any = None  # for editors, where it is not `accepts`
    choices: tuple[str, ...] = ()

    def read(self, value: Any) -> Any:
        """Value of one in a file.

        Raises:
            ValueError: what is wrong with it.
        """
        accepted = (self.accepts,) if isinstance(self.accepts, type) else self.accepts
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
            raise WrongType(f"{value!r}; {self.expected}")
        return self.convert(value)

    def read_text(self, text: str) -> Any:
        """Value of a text on a command line.

        Raises:
            ValueError: what is wrong with it.
        """
        if self.separator:
            return self.convert([self.parse(each) if self.parse else each for each in text.split(self.separator)])
        return (self.parse or self.convert)(text)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("it must be a whole number") from None


def _count(text: str) -> int:
    if (count := _whole(text)) < 0:
        raise ValueError("it must not be negative")
    return count


def _yes_or_no(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text == "true"


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise WrongType(f"a number of {len(str(value))} digits; write a smaller one") from None


def _no_time(value_s: float) -> str:
    if math.isfinite(value_s) and value_s >= 0:
        return ""
    return f"is {value_s:g} s: it must be a time, as in 90s or 12h; leave it out for no limit"


def checked_name(name: str) -> str:
    """Return a valid name of a job.

    Raises:
        ValueError: it is none.
    """
    if re.fullmatch(r"[0-9]+", name):
        raise ValueError(f"the name {name!r} would be taken for the id of a job: add a letter")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or len(name) > NAME_LENGTH_MAX:
        first = "" if re.match("[A-Za-z0-9]?$|[A-Za-z0-9]", name) else "begin with a letter or digit, and "
        raise ValueError(
            f"the name {name!r} must {first}be letters, digits, '.', '_' and '-', {NAME_LENGTH_MAX} at most"
        )
    return name


def _capability(text: str) -> str:
    parse_capability(text)
    return text


def _limit_signal(text: str) -> str:
    parse_limit_signal(text)
    return text


def _container(given: str) -> str:
    """Runtime and image of ``docker:IMAGE``; a path to a ``.sif`` file is one of Apptainer."""
    runtime, _, image = given.partition(":")
    if given.endswith(".sif") and runtime not in CONTAINER_RUNTIMES:
        return f"apptainer:{given}"
    if given and (runtime not in CONTAINER_RUNTIMES or not image):
        known = ", ".join(f"{name}:IMAGE" for name in CONTAINER_RUNTIMES)
        raise WrongType(f"{given!r}; it must be {known}, or a path to a .sif file")
    return given


def _plan(given: str | dict[str, Any]) -> Plan:
    try:
        return Plan.parse(given) if isinstance(given, str) else Plan.from_dict(given)
    except TypeError as error:
        raise PlanError(str(error)) from None


def is_label(text: object) -> bool:
    """True for a label of a host: a word that a list with commas can hold."""
    return isinstance(text, str) and LABEL.fullmatch(text) is not None


def text_table(table: Mapping[str, Any]) -> dict[str, str]:
    """Check that all values are text.

    Raises:
        ValueError: naming the key.
    """
    for key, value in table.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} is {value!r}; put the value in quotes")
    return dict(table)


def data_folders(table: Mapping[str, Any]) -> dict[str, str]:
    """Validate data sets: ``NAME = "HOST:/folder"``, or ``"/folder"`` on every host; commas separate several.

    Raises:
        ValueError: names the key.
    """
    found = text_table(table)
    for name, places in found.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise ValueError(f"{name!r} is no name for a data set: letters, digits, '.', '_' and '-'")
        for place in places.split(","):
            if not re.fullmatch(r"([^:/\s]+:)?/[^\0\n]*", place.strip()):
                raise ValueError(f'{name} is {place!r}; write "HOST:/folder", or "/folder" on every host')
    return found


def _problem(check: Callable[[Any], object]) -> Callable[[Any], str]:
    """End of the sentence about a value that `check` refuses."""

    def found(value: Any) -> str:
        try:
            check(value)
        except ValueError as error:
            return f": {error}"
        return ""

    return found


def _listed(noun: str, valid: Callable[[Any], bool] = lambda item: isinstance(item, str)) -> Value:
    """List of items, each of which is a `noun`: its name, and how to write it."""

    def read(items: Iterable[Any]) -> tuple[Any, ...]:
        for item in items:
            if not valid(item):
                raise ValueError(f"{item!r} is no {noun}")
        return tuple(items)

    return Value(
        expected="it must be a list", accepts=list, convert=read, problem=_problem(read), separator=",",
        words=lambda items: " ".join(map(str, items)) or "none",
    )  # fmt: skip


def _numbers(noun: str, least: int, most: int) -> Value:
    listed = _listed(noun, lambda item: isinstance(item, int) and not isinstance(item, bool) and least <= item <= most)
    return replace(listed, parse=_count, item=int, schema={"ge": least, "le": most})


TEXT = Value(expected="it must be text", accepts=str, metavar="TEXT")


def one_of(names: Iterable[str], expected: str = "") -> Value:
    """One of some texts."""
    known = tuple(names)
    refusal = f"it must be {expected or 'one of ' + ', '.join(known)}"
    member = limited(replace(TEXT, convert=lambda text: known[known.index(text)]), lambda text: text in known, refusal)
    return replace(member, removable=False, choices=tuple(map(str, known)))


def limited(value: Value, is_right: Callable[[Any], object], expected: str, **others: Any) -> Value:
    """The type with a condition on what a file has, which the same refusal names."""

    def convert(given: Any) -> Any:
        if not is_right(given):
            raise WrongType(f"{given!r}; {expected}")
        return value.convert(given)

    return replace(value, convert=convert, expected=expected, **others)


def whole(least: int, most: int | None = None, expected: str = "") -> Value:
    """Whole number in a range."""
    expected = expected or (f"{least} or more" if most is None else f"{least} to {most}")
    return replace(
        COUNT, parse=_whole, removable=False, schema={"ge": least},
        problem=lambda n: f"is {n}; it must be {expected}" if n < least or (most is not None and n > most) else "",
    )  # fmt: skip


NAME = Value(
    expected="it must be text", accepts=str, convert=checked_name, removable=False, metavar="NAME",
    schema={"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$", "max_length": NAME_LENGTH_MAX},
)  # fmt: skip
WHOLE = Value(expected="it must be a whole number", accepts=int, parse=_whole, removable=False, metavar="N")
COUNT = Value(
    expected="it must be a whole number", accepts=int, parse=_count, metavar="N", schema={"ge": 0},
    problem=lambda count: f"is {count}; it must not be negative" if count < 0 else "",
)  # fmt: skip
RETRIES = replace(whole(0, RETRIES_MAX), parse=_count, removable=True)
YES_OR_NO = Value(
    expected="it must be true or false", accepts=bool, parse=_yes_or_no, removable=False,
    words=lambda yes: str(yes).lower(),
)  # fmt: skip
NUMBER = Value(
    expected="it must be a number", accepts=(int, float), convert=_float, metavar="X",
    problem=lambda x: "" if math.isfinite(x) else f"is {x:g}; it must be a number that a loss can reach",
)  # fmt: skip
DURATION = Value(
    expected="it must be a time, as in 90s or 12h", accepts=(int, float, str, time), shape=int | float | str,
    schema={"examples": ["90s", "12h", "1h30m"]}, convert=parse_duration_s, words=duration, problem=_no_time,
    metavar="TIME",
)  # fmt: skip
POINT_IN_TIME = Value(
    expected='it must be a time, as in "mon 9:00"', accepts=str, convert=parse_time_s, words=local_time, metavar="TIME",
    problem=lambda at_s: "" if math.isfinite(at_s) else f"is {at_s:g}; it must be a time",
)  # fmt: skip
LIMIT_SIGNAL = Value(
    expected="it must be a signal, as in USR1@2m", accepts=str, convert=_limit_signal, metavar="[B:]NAME[@TIME]",
    problem=_problem(lambda text: text and parse_limit_signal(text)),
)  # fmt: skip
OUTPUT = limited(
    TEXT, lambda text: re.fullmatch(r"([^%\0]|%\d{0,2}[AaJjNntsux%])+", text),
    "it must be a path, in which %x, %j, %A, %a, %u and %N are filled in, and %% is a percent sign",
)  # fmt: skip
SIZE = Value(
    expected="it must be a size, as in 16GiB", accepts=(int, float, str), schema={"examples": ["64GiB"]},
    convert=parse_size, words=size, problem=COUNT.problem, metavar="SIZE",
)  # fmt: skip
GPUS = Value(
    expected="it must be a number, or as in a100:2 or 0.5", accepts=(int, float, str), convert=parse_gpus_or_part,
    removable=False, metavar="[TYPE:]N",
)  # fmt: skip
CAPABILITY = replace(TEXT, convert=_capability, problem=_problem(parse_capability), metavar="CONDITION")
CONTAINER = replace(TEXT, convert=_container, metavar="RUNTIME:IMAGE")
PLAN = Value(expected='write it as "dp=2,tp=2" or { dp = 2, tp = 2 }', accepts=(str, dict), convert=_plan)
PLANS = Value(expected="it must be a list", accepts=list, convert=lambda plans: tuple(map(PLAN.read, plans)))
TEXTS = _listed("text; put it in quotes")
PATHS = replace(TEXTS, separator="\0")  # which may have commas
JOBS = replace(TEXTS, metavar="JOB[:any|failed|corr]")
LABELS = _listed('label of a host; write it as in ["nvlink", "rack=a"]', is_label)
CODES = _numbers("exit code of a failed job; write it as in [75, 85]", 1, 255)
PORTS = _numbers("port; write them as in [6006, 8888]", 1, 65535)
NAMES = limited(
    Value(expected="", accepts=list, convert=tuple), lambda names: all(isinstance(name, str) for name in names),
    'it must be a list of names, as in ["ann", "bob"]',
)  # fmt: skip


def within(least: int, most: int, expected: str = "") -> Value:
    """Whole number in a range that files are held to."""
    expected = expected or f"it must be a whole number from {least} to {most}"
    # Editors compare in floating point: beyond 32 bits the upper limit is left to us.
    schema = {"ge": least, **({"le": most} if most < 1 << 31 else {})}
    return limited(replace(WHOLE, schema=schema), lambda number: least <= number <= most, expected)


PATH = limited(TEXT, str.isprintable, "it must be a path")
TABLE = Value(expected="it must be a table", accepts=dict, convert=text_table)
ENV = limited(TABLE, lambda _: True, "it must be a table; clean_env = true is for none of the login's variables")
SECRETS = replace(TABLE, schema={"pattern": "^(env|file):"})
DATASETS = replace(TABLE, convert=data_folders)
_ON_NAN = one_of(("report", "stop"), '"report" or "stop"')
ON_NAN = replace(
    _ON_NAN, convert=lambda text: _ON_NAN.convert(text) == "stop", words=lambda stops: "stop" if stops else "report"
)


class Edit(Enum):
    """States of a submitted job in which a key may change."""

    NEVER = "no"
    QUEUED = "queued"  # while no attempt has started
    RUNNING = "always"  # until the job is over: it is read again at each decision


@dataclass(frozen=True, slots=True)
class Key:
    """Key of a file as people give it; its field and its initial value come from the field that it annotates."""

    value: Value
    doc: str  # sentences
    default: str = ""  # in words, where the field's does not say it
    name: str = ""  # with its section, as in "limits.time"; default: that of the field
    kinds: tuple[str, ...] = ()  # kinds of job that have it; empty: all
    edit: Edit = Edit.NEVER
    option: str = ""  # of commands that submit a job
    sbatch: str = ""  # option of Slurm of the same meaning and form
    row: str = ""  # field of the job's row
    field: str = ""
    initial: Any = None

    @property
    def section(self) -> str:
        """Table of a job file that has the key; empty: it is at the top."""
        return self.name.rpartition(".")[0]

    @property
    def short(self) -> str:
        """The key within its section."""
        return self.name.rpartition(".")[2]

    def of(self, spec: Any) -> Any:
        """Value in a specification."""
        return getattr(spec.resources if self.section == RESOURCES else spec, self.field)

    def words(self, value: Any) -> str:
        """The value for people."""
        return self.default if self.default and value == self.initial else self.value.words(value)


RESOURCES = "resources"


@cache
def keys_of(declared: type, prefix: str = "") -> tuple[Key, ...]:
    """Keys that annotate the fields of a dataclass, in their order; those of its resources come last.

    The annotations must have no function of their own: evaluated late, it would not find the names of its module.
    """
    found: list[Key] = []
    hints = get_type_hints(declared, include_extras=True)
    for each in fields(declared):
        initial = each.default_factory() if each.default_factory is not MISSING else each.default
        found += (
            replace(key, field=each.name, name=prefix + (key.name or each.name), initial=initial)
            for key in getattr(hints[each.name], "__metadata__", ())
        )
    if RESOURCES in hints:
        found += keys_of(hints[RESOURCES], f"{RESOURCES}.")
    return tuple(found)


def read_values(given: Iterable[tuple[Key, Any]], at: Callable[[Key], str], *, texts: bool = False) -> dict[str, Any]:
    """Values by key; `texts`: they are of a command line, else of a file.

    Raises:
        ConfigError: names the place of the key.
    """
    found: dict[str, Any] = {}
    for key, value in given:
        try:
            found[key.name] = (key.value.read_text if texts and isinstance(value, str) else key.value.read)(value)
        except WrongType as error:
            raise ConfigError(f"{at(key)} is {error}") from None
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{at(key)}: {error}") from None
    return found
