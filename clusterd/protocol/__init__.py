"""Messages between client, daemon, agent, fork server and rank, and the frames that carry them.

Each message of a protocol is defined once, as a frozen dataclass: `requests` and `launch` hold what the daemon asks of
agents, `agent` and `rank` what agents and ranks report, `control` what agents and ranks exchange, `forkserver` what
agents and fork servers do. `messages` checks a received map against its class, `calls` matches replies with requests,
`frames` cuts bytes into maps. Runs on hosts: standard library and msgpack only, Python 3.10.
"""

from clusterd.protocol.frames import FRAME_BYTES_MAX as FRAME_BYTES_MAX
from clusterd.protocol.frames import REQUEST_BYTES_MAX as REQUEST_BYTES_MAX
from clusterd.protocol.frames import VERSION as VERSION
from clusterd.protocol.frames import Decoder as Decoder
from clusterd.protocol.frames import Message as Message
from clusterd.protocol.frames import ProtocolError as ProtocolError
from clusterd.protocol.frames import Reader as Reader
from clusterd.protocol.frames import decode as decode
from clusterd.protocol.frames import encode as encode
from clusterd.protocol.frames import encode_around as encode_around
from clusterd.protocol.frames import pack as pack
from clusterd.protocol.frames import read as read
from clusterd.protocol.frames import read_length as read_length
