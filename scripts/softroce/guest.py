"""One guest: a qemu process that boots the image under software emulation and never outlives this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.softroce import host
from scripts.softroce.image import HERE, Image

PR_SET_PDEATHSIG = 1
_BOOT_SECONDS = 120.0
"""From power-on to the first line of start.sh; 6 to 13 s on an idle machine."""


@dataclass(frozen=True)
class Place:
    """Which of how many guests this is; ``wires``: Unix sockets that join two of them, one for each network."""

    node: int
    nodes: int
    wires: tuple[Path, ...]


class Guest:
    """A running guest. A context manager: on the way out the qemu process is gone, whatever happens.

    Args:
        image: what to boot.
        place: which guest this is.
        share: folder that the guest can write to; it gets ``start.sh``, ``console.log`` (all that the guest says from
            power-on), ``output.log``, ``rc`` and ``dmesg.log``.
        command: run in the repository's root, as root of the guest.
        environment: of the command, besides PATH and HOME.
        show: takes each line of the guest's console.
    """

    def __init__(
        self,
        image: Image,
        place: Place,
        share: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        show: Callable[[str], None],
    ) -> None:
        self.share, self._show = share, show
        self.booted = threading.Event()
        (share / "start.sh").write_text(_start_script(place, command, environment))
        self._qemu = subprocess.Popen(
            _qemu_command(image, place, share),
            cwd=share,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_dies_with(os.getpid()),
        )
        self._began = time.monotonic()
        self._reader = threading.Thread(target=self._read_console, daemon=True)
        self._reader.start()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._qemu.poll() is None:
            self._qemu.kill()
        self._qemu.wait()
        self._reader.join(5)

    @property
    def is_running(self) -> bool:
        return self._qemu.poll() is None

    @property
    def rc(self) -> int | None:
        """Exit status of the command; ``None``: the guest has not got, or did not get, that far."""
        try:
            return int((self.share / "rc").read_text())
        except (OSError, ValueError):
            return None

    @property
    def is_stuck(self) -> bool:
        """Whether it should have booted by now and has not."""
        return not self.booted.is_set() and time.monotonic() - self._began > _BOOT_SECONDS

    def _read_console(self) -> None:
        assert self._qemu.stdout is not None
        with open(self.share / "console.log", "wb", buffering=0) as log:
            for raw in self._qemu.stdout:
                with contextlib.suppress(OSError):  # a full disk must not block the guest
                    log.write(raw)
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                if line.endswith(_BOOTED):  # the firmware has left control characters before it
                    self.booted.set()
                elif self.booted.is_set() or line.startswith(("guest:", "qemu-system")):
                    self._show(line)


_BOOTED = "softroce: booted"


def _qemu_command(image: Image, place: Place, share: Path) -> list[str]:
    """To be run in the shared folder: in an option a path would end at a comma, and one of a socket has 107 bytes."""
    cards = []
    server = "on" if place.node == 0 else "off"
    for at, wire in enumerate(place.wires if place.nodes > 1 else ()):
        mac = f"52:54:00:77:{at:02x}:{place.node + 1:02x}"
        path = os.path.relpath(wire, share)
        cards += ["-netdev", f"stream,id=wire{at},server={server},addr.type=unix,addr.path={path}"]
        cards += ["-device", f"virtio-net-pci,netdev=wire{at},mac={mac}"]
    return [
        host.find("qemu-system-x86_64") or "qemu-system-x86_64",
        *("-name", f"softroce{place.node}"),
        *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", f"{host.GUEST_MEMORY_MIB}M"),
        *("-nodefaults", "-nographic", "-serial", "stdio", "-no-reboot"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
        *("-append", "console=ttyS0 quiet loglevel=3 panic=-1"),
        *("-device", "virtio-rng-pci"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        *("-virtfs", "local,path=.,mount_tag=share,security_model=none"),
        *cards,
    ]


def _start_script(place: Place, command: Sequence[str], environment: Mapping[str, str]) -> str:
    quoted = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join(
        [
            "stty -onlcr </dev/console",
            f"echo {shlex.quote(_BOOTED)}",
            "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run/home TMPDIR=/run/tmp",
            *quoted,
            "share=/run/softroce",
            f"cd {shlex.quote(str(host.ROOT))} || exit",
            f". {shlex.quote(str(HERE / 'guest' / 'network.sh'))} {place.node} {place.nodes}",
            f"{shlex.join(command)} 2>&1 </dev/null | tee $share/output.log",
            "echo ${PIPESTATUS[0]} >$share/rc.part && mv $share/rc.part $share/rc",
            "dmesg >$share/dmesg.log",
            "",
        ]
    )


def _dies_with(parent: int) -> Callable[[], None]:
    """For the child between fork and exec: the kernel kills it when this process is gone, however it went."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def run() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return run
