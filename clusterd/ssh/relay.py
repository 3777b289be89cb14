"""Program on the head node for a host that dials in, sent as source text: bridges its ssh to the daemon's socket.

Never imported; Python 3.6 parses it. The first line that it prints is ``clusterd-relay ok``, or ``clusterd-relay
failed`` and a message.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable  # noqa: F401  # in a type comment


def reply(text):  # type: (str) -> None
    sys.stdout.write(f"clusterd-relay {text}\n")
    sys.stdout.flush()


def copy(read, write):  # type: (Callable[[int], bytes], Callable[[bytes], object]) -> None
    try:
        while True:
            data = read(1 << 16)
            if not data:
                break
            write(data)
    except OSError:
        pass
    os._exit(0)  # either end is gone: so is the bridge


def write_all(data):  # type: (bytes) -> None
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def main(path, find):  # type: (str, str) -> None
    if not path:
        found = subprocess.run(["sh", "-c", find], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        path = found.stdout.decode(errors="surrogateescape").strip()
        if found.returncode or not path:
            reply("failed no daemon has a socket there for this user: name it, as in ssh://HEAD/PATH/OF.sock")
            return
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError as error:
        reply(f"failed {path}: {error.strerror or error}")
        return
    reply("ok")
    threading.Thread(target=copy, args=(connection.recv, write_all), daemon=True).start()
    copy(lambda count: os.read(0, count), connection.sendall)
