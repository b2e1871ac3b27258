"""This machine's network, for messages: interfaces, their addresses, and who holds a port."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # netdevice(7)
_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
_LISTEN = "0A"  # the state of a row of /proc/net/tcp
_COMMAND_LENGTH = 120  # characters of a command, in messages


def addresses() -> dict[str, list[str]]:
    """The addresses of each network interface of this machine (Linux); none for one that has no address."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in found:
            # A `struct ifreq` of netdevice(7): the name in 16 bytes with a 0 at the end, then a `sockaddr_in`, whose
            # IPv4 address comes behind 2 bytes of family and 2 of port.
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                found[name].append(socket.inet_ntoa(answer[20:24]))
    # A line of that table: 32 hexadecimal digits, four numbers, the interface.
    for line in _lines(Path("/proc/net/if_inet6")):
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        found.setdefault(name, []).append(str(address))
    return found


def _lines(table: Path) -> list[str]:
    if not table.exists():
        return []
    return table.read_text().splitlines()


def describe_interfaces() -> str:
    """``eth0 (10.0.0.1), lo (127.0.0.1, ::1)``, for messages."""
    texts = []
    for name, found in sorted(addresses().items()):
        listed = ", ".join(found) or "no address"
        texts.append(f"{name} ({listed})")
    return ", ".join(texts)


def interface_problem(backend: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """What is wrong with the interfaces that ``environment`` names for ``backend``; None if nothing is.

    gloo takes a list of names. NCCL takes a list of prefixes, of names after ``=``, and of what to leave out
    after ``^`` (NCCL's documentation of ``NCCL_SOCKET_IFNAME``).
    """
    for name, variable in _VARIABLES.items():
        value = environment.get(variable, "").strip()
        if name not in backend or not value:
            continue
        if value.startswith("^"):
            continue
        by_prefix = name == "nccl" and not value.startswith("=")
        names = value.removeprefix("=").split(",")
        wanted = [part for part in names if part]
        problem = _choice_problem(wanted, by_prefix)
        if problem is not None:
            return f"{variable}={value}: {problem} The interfaces here are {describe_interfaces()}."
    return None


def _choice_problem(wanted: list[str], by_prefix: bool) -> str | None:
    present = addresses()
    for want in wanted:
        if by_prefix:
            matches = [name for name in present if name.startswith(want)]
        else:
            matches = [name for name in present if name == want]
        if not matches:
            if by_prefix and len(wanted) > 1:
                continue  # NCCL takes the others
            return f"this machine has no interface {want!r}."
        if not any(present[name] for name in matches):
            return f"the interface {want!r} has no address."
    return None


def holder_of(port: int) -> tuple[int, str] | None:
    """Process id and command of who listens on TCP ``port``; None if that cannot be seen (another user's)."""
    sockets = _listening_sockets(port)
    if not sockets:
        return None
    # The kernel tells a socket's inode, not its process: that is the one with a descriptor of this inode.
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            if os.readlink(entry) in sockets:
                process = int(entry.parts[2])
                arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                text = b" ".join(arguments).decode(errors="replace")
                command = " ".join(text.split())  # the last argument ends with a 0, too
                return process, command[:_COMMAND_LENGTH]
    return None


def _listening_sockets(port: int) -> set[str]:
    """The sockets that listen on TCP ``port`` in this network namespace, as links of descriptors name them."""
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in _lines(table)[1:]:  # behind the names of the columns
            fields = line.split()
            local_address, state, inode = fields[1], fields[3], fields[9]
            _, _, hexadecimal_port = local_address.rpartition(":")
            if state == _LISTEN and int(hexadecimal_port, 16) == port:
                found.add(f"socket:[{inode}]")
    return found
