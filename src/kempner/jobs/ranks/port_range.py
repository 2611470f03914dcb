"""The ports for our listening sockets: any free one, or one of KEMPNER_PORTS=15000-20000, the range
that a site's firewall opens between its nodes. Uses only the standard library, for Ray's parts.

Jobs on the same host share the range: each takes the first free port, starting from a random one.
A port with an old connection in TIME_WAIT (for a minute after its end) counts as free: that needs
SO_REUSEADDR, with which the kernel gives a port to two sockets as long as neither listens. So a
process locks a port of the range until it listens on it. The lock is the abstract Unix socket
"kempner-port-15000", which, like the ports, belongs to the network namespace, and ends with the
process.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping

from kempner.jobs.system.front_door import BadPortRange, NoFreePort

PORTS_VARIABLE = "KEMPNER_PORTS"
FIRST_USER_PORT, LAST_USER_PORT = 1024, 65535
FEWEST = 2  # ports: run.sh takes one for itself and one for its program
# All ranks may connect at once. The kernel limits it to net.core.somaxconn, by default 4096.
BACKLOG = 4096


def allowed_ports(env: Mapping[str, str] = os.environ) -> range | None:
    """Return the range; None if any port may be used. Raises BadPortRange."""
    text = env.get(PORTS_VARIABLE, "")
    if not text:
        return None
    found = re.fullmatch(r"([1-9][0-9]{3,4})-([1-9][0-9]{3,4})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    allowed = range(first, last + 1)
    if not FIRST_USER_PORT <= first <= last <= LAST_USER_PORT or len(allowed) < FEWEST:
        raise BadPortRange(
            errno.EINVAL,
            f"{PORTS_VARIABLE}={text}: must be the first and the last port of a range of at least "
            f"{FEWEST}, from {FIRST_USER_PORT} to {LAST_USER_PORT}, such as 15000-20000",
        )
    return allowed


class ReservedPort:
    """A port that is bound but not listened on: until close(), neither the kernel nor the kit gives
    it to others, but a program that binds it with SO_REUSEADDR, as TCPStore does, gets it. Raises
    NoFreePort, BadPortRange."""

    def __init__(self) -> None:
        allowed = allowed_ports()
        if allowed is None:
            self._held = [_bound("", 0, socket.AF_INET)]
        else:
            self._held = list(next(_free(allowed, "", socket.AF_INET)))
        self.port = int(self._held[0].getsockname()[1])

    def close(self) -> None:
        for each in self._held:
            each.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen_in_range(host: str = "") -> socket.socket:
    """Return a listening socket; without `host`, on all of this machine's addresses. Raises
    NoFreePort, BadPortRange, OSError."""
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    allowed = allowed_ports()
    if allowed is None:
        server = _bound(host, 0, family)
        server.listen(BACKLOG)
        return server
    for server, lock in _free(allowed, host, family):
        with lock:
            try:
                server.listen(BACKLOG)
            except OSError as error:  # another program was faster
                server.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return server
    raise AssertionError("_free ends by NoFreePort")


def _free(
    allowed: range, host: str, family: socket.AddressFamily
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield bound sockets, each with its port's lock. Raises NoFreePort after the last one."""
    # From a random port: jobs that start together would try the same ports in the same order.
    begin = secrets.randbelow(len(allowed))
    for i in range(len(allowed)):
        port = allowed[(begin + i) % len(allowed)]
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0kempner-port-{port}")
            server = _bound(host, port, family)
        except OSError as error:
            lock.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            continue
        yield server, lock
    raise NoFreePort(
        errno.EADDRINUSE,
        f"{PORTS_VARIABLE}={allowed[0]}-{allowed[-1]}: none of these {len(allowed)} ports is free "
        f"on {socket.gethostname()}; give a wider range",
    )


def _bound(host: str, port: int, family: socket.AddressFamily) -> socket.socket:
    server = socket.socket(family)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Without a host, one socket takes both IPv6 and IPv4.
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(host)))
        server.bind((host, port))
    except BaseException:
        server.close()
        raise
    return server


def store_server() -> tuple[int, int | None]:
    """Return a port for a serving TCPStore and its `master_listen_fd`, which the store closes; 0
    and None if the store may choose the port."""
    if allowed_ports() is None:
        return 0, None
    server = listen_in_range()
    return int(server.getsockname()[1]), server.detach()
