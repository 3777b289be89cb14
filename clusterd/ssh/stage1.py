"""First program on a host, sent as source text: finds a Python, unpacks the agent's code once, executes `attach`.

Never imported on the head. The code is compared with its digest each time before it runs. Python 3.6 parses this, so
that an old one can say what is missing, or find a newer one.
Speaks in lines: ``clusterd-need`` asks for the code; ``clusterd-failed {json}`` ends. What else a login's start-up
files print comes before the first such line and is skipped by the reader.
"""

import io
import json
import marshal
import os
import shutil
import sys
import tempfile
import zipfile
from typing import Any  # noqa: F401  # in a type comment

from clusterd.trusted_paths import UnsafePath, content_digest, private_directory  # sent along, see `bootstrap`


def reply(status, **fields):  # type: (str, object) -> None
    sys.stdout.buffer.write(f"clusterd-{status} {json.dumps(fields)}\n".encode())
    sys.stdout.buffer.flush()


def find_newer():  # type: () -> str | None
    places = os.environ.get("PATH", os.defpath).split(os.pathsep)
    places += [
        os.path.expanduser("~/.local/bin"),
        "/usr/local/bin",
        "/opt/conda/bin",
        os.path.expanduser("~/miniconda3/bin"),
    ]
    for minor in range(19, 9, -1):
        found = shutil.which(f"python3.{minor}", path=os.pathsep.join(places))
        if found:
            return found
    return None


def is_intact(target, sha256):  # type: (str, str) -> bool
    """True if a directory holds exactly the code of this digest; what Python compiled of it is left out."""
    files = []
    for folder, folders, names in os.walk(target):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
            drop_truncated(os.path.join(folder, "__pycache__"))
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                files.append((os.path.relpath(path, target), file.read()))
    return content_digest(files) == sha256


def drop_truncated(folder):  # type: (str) -> None
    """Remove what Python compiled and a full disk cut off: each later start would end with "marshal data too short".

    What does not end with a block of the disk is whole, and not read: reading all takes longer than the start.
    """
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.endswith(f"{sys.implementation.cache_tag}.pyc") and os.path.getsize(path) % 512 == 0:
            try:
                with open(path, "rb") as file:
                    file.seek(16)
                    marshal.load(file)
            except (EOFError, ValueError, TypeError):
                os.unlink(path)


def unpack(data, target, sha256):  # type: (bytes, str, str) -> bool
    """Put the code into its directory, which is this account's; false if it arrived damaged."""
    beside = tempfile.mkdtemp(prefix=".agent-", dir=os.path.dirname(target))
    code = os.path.join(beside, "code")
    os.mkdir(code, 0o700)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(code)
        if not is_intact(code, sha256):
            return False
        try:
            os.rename(code, target)  # in the place of an empty directory
        except OSError:
            if is_intact(target, sha256):  # another host with the same home, or another connection, was faster
                return True
            os.rename(target, os.path.join(beside, "damaged"))
            os.rename(code, target)
        return True
    except zipfile.BadZipFile:
        return False
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def piped(key):  # type: (str) -> int
    """Read end of a pipe that holds the cluster's key, as arguments and environments can be read by others."""
    source, sink = os.pipe()
    os.write(sink, key.encode())
    os.close(sink)
    os.set_inheritable(source, True)
    return source


def main(given, source):  # type: (dict[str, Any], str) -> None
    if "key" in given:
        given["key_fd"] = piped(given.pop("key"))
    if sys.version_info < (3, 10):  # noqa: UP036  # it runs on the host's Python
        newer = find_newer()
        if newer is None:
            have = f"{sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})"
            reply(
                "failed",
                kind="python",
                message=f"its python3 is {have}; clusterd needs Python 3.10 or newer in the PATH there",
            )
            return
        again = (
            "import json, sys\nS = sys.argv.pop()\nG = json.loads(sys.argv.pop())\n"
            "exec(compile(S, 'clusterd', 'exec'))\nmain(G, S)"
        )
        os.execv(newer, [newer, "-E", "-c", again, json.dumps(given), source])
    os.environ["CLUSTERD_AGENT_OF"] = given["cluster"]
    home = given["agent_home"] if given["former"] is None else given["former"]
    if home:
        os.environ["CLUSTERD_AGENT_HOME"] = os.path.join(os.path.expanduser(home), given["cluster"])
    if given["agent_home"]:
        cache = os.path.expanduser(given["agent_home"])
    else:
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "clusterd")
    target = os.path.join(cache, "agent-" + given["sha256"][:16])
    try:
        private_directory(target)
        if not is_intact(target, given["sha256"]):
            reply("need")
            data = sys.stdin.buffer.read(given["bytes"])
            if not unpack(data, target, given["sha256"]):
                reply("failed", kind="transfer", message=f"the agent's code arrived damaged ({len(data)} bytes)")
                return
    except UnsafePath as error:
        message = f"{error}; or set agent_home of the host to a place of its own accounts"
        reply("failed", kind="unsafe", message=message)
        return
    except OSError as error:
        message = f"cannot keep the agent's code in {target}: {error}: set agent_home of the host to another place"
        reply("failed", kind="disk", message=message)
        return
    living = [] if given["former"] is None else ["living"]
    key = ["--key-fd", str(given["key_fd"])]
    os.execv(sys.executable, [sys.executable, "-E", target, "attach"] + living + key)  # noqa: RUF005  # Python 3.6 parses it
