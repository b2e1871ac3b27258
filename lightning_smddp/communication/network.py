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


def addresses() -> dict[str, list[str]]:
    """The addresses of each network interface of this machine (Linux); none for one that has no address."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in found:
            with suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name].append(socket.inet_ntoa(answer[20:24]))
    for line in _lines(Path("/proc/net/if_inet6")):
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def _lines(table: Path) -> list[str]:
    if not table.exists():
        return []
    return table.read_text().splitlines()


def describe_interfaces() -> str:
    """``eth0 (10.0.0.1), lo (127.0.0.1, ::1)``, for messages."""
    return ", ".join(f"{name} ({', '.join(found) or 'no address'})" for name, found in sorted(addresses().items()))


def interface_problem(backend: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """What is wrong with the interfaces that ``environment`` names for ``backend``; None if nothing is.

    gloo takes a list of names. NCCL takes a list of prefixes, of names after ``=``, and of what to leave out
    after ``^`` (NCCL's documentation of ``NCCL_SOCKET_IFNAME``).
    """
    for name, variable in _VARIABLES.items():
        value = environment.get(variable, "").strip()
        if name not in backend or not value or value.startswith("^"):
            continue
        by_prefix = name == "nccl" and not value.startswith("=")
        wanted = [part for part in value.removeprefix("=").split(",") if part]
        problem = _choice_problem(wanted, by_prefix)
        if problem is not None:
            return f"{variable}={value}: {problem} The interfaces here are {describe_interfaces()}."
    return None


def _choice_problem(wanted: list[str], by_prefix: bool) -> str | None:
    present = addresses()
    for want in wanted:
        matches = [name for name in present if name == want or (by_prefix and name.startswith(want))]
        if not matches:
            if by_prefix and len(wanted) > 1:
                continue  # NCCL takes the others
            return f"this machine has no interface {want!r}."
        if not any(present[name] for name in matches):
            return f"the interface {want!r} has no address."
    return None


def holder_of(port: int) -> tuple[int, str] | None:
    """Process id and command of who listens on TCP ``port``; None if that cannot be seen (another user's)."""
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in _lines(table)[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            if os.readlink(entry) in inodes:
                process = entry.parts[2]
                command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return int(process), " ".join(command.split())[:120]
    return None
