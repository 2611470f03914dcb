"""The ports that our own sockets listen on: any free one, or one of KEMPNER_PORTS=15000-20000, the
range that the firewall of a site opens between its nodes. The standard library alone: Ray's parts
use it, too.

Jobs that share a host share the range: the first port that is free, from a random one on, is taken
by binding it, and nobody of ours takes one that is bound already, whether it listens yet or not.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from collections.abc import Mapping

VARIABLE = "KEMPNER_PORTS"
LEAST, LAST = 1024, 65535
BACKLOG = 4096


class BadPortRange(OSError):
    """`strerror` says what is wrong, and what to write."""


def allowed_ports(env: Mapping[str, str] = os.environ) -> range | None:
    """None: any. Raises BadPortRange."""
    text = env.get(VARIABLE, "")
    if not text:
        return None
    found = re.fullmatch(r"([1-9][0-9]{3,4})-([1-9][0-9]{3,4})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not LEAST <= first <= last <= LAST:
        raise BadPortRange(
            errno.EINVAL,
            f"{VARIABLE}={text}: must be the first and the last port of a range, from {LEAST} to "
            f"{LAST}, such as 15000-20000",
        )
    return range(first, last + 1)


def bind_allowed(server: socket.socket, host: str = "") -> int:
    """Bind a new socket; returns its port. Raises OSError where no port of the range is free."""
    allowed = allowed_ports()
    if allowed is None:
        server.bind((host, 0))
        return int(server.getsockname()[1])
    # With SO_REUSEADDR two sockets may have one port for as long as none of them listens.
    reuse = server.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    begin = secrets.randbelow(len(allowed))
    for i in range(len(allowed)):
        port = allowed[(begin + i) % len(allowed)]
        try:
            server.bind((host, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            continue
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        return port
    raise OSError(
        errno.EADDRINUSE,
        f"{VARIABLE}={allowed[0]}-{allowed[-1]}: none of these ports is free on "
        f"{socket.gethostname()}; give a wider range",
    )


def free_port() -> int:
    """One that is free on this host now."""
    with socket.socket() as probe:
        return bind_allowed(probe)


def new_server(host: str = "") -> socket.socket:
    """A socket that is bound, and does not listen yet; without `host` on all of this machine's
    addresses."""
    dual = not host and socket.has_dualstack_ipv6()
    server = socket.socket(socket.AF_INET6 if dual or ":" in host else socket.AF_INET)
    try:
        if server.family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not dual))
        bind_allowed(server, host)
    except BaseException:
        server.close()
        raise
    return server


def store_server() -> tuple[int, int | None]:
    """A port for a TCPStore that serves, and its `master_listen_fd`, which the store closes; 0 and
    None where it may choose itself."""
    if allowed_ports() is None:
        return 0, None
    server = new_server()
    return int(server.getsockname()[1]), server.detach()
