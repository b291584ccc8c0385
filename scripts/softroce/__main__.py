"""Run a command or the RDMA tests in guests with soft-RoCE.

    python -m scripts.softroce fast [pytest arguments]      one guest, the fast set
    python -m scripts.softroce full [pytest arguments]      two guests on one wire, every test
    python -m scripts.softroce exec [--nodes N] COMMAND...  a command, in each of N guests
    python -m scripts.softroce build                        the guest's image only

Exit status: of the command, in the first guest; 1 when it did not come to an end or nothing was proven; 77 when no
guest can run here.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from scripts.softroce import host, image, results
from scripts.softroce.guest import Guest, Place

CACHE = host.ROOT / ".cache" / "softroce"
UNAVAILABLE = 77
"""Exit status by which other test runners, too, tell a skip from a success."""

DEADLINES = {"fast": 900.0, "full": 2700.0, "exec": 1800.0}
_QUIET_SECONDS = 30.0
_LINGER_SECONDS = 30.0
"""How long a guest may take to power off after its command has ended, and the others after the first guest's."""

_began = time.monotonic()
_owners = host.command_processes()
"""When one of them is gone, so are the guests."""


def say(text: str) -> None:
    print(f"[softroce {time.monotonic() - _began:4.0f} s] {text}", flush=True)


def main() -> int:
    arguments = _parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        with host.turn(CACHE, say):
            return _do(arguments)
    except host.Unavailable as exc:
        say(f"cannot run here: {exc}")
        return UNAVAILABLE
    except OSError as exc:
        say(f"FAILED: {exc}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _do(arguments: argparse.Namespace) -> int:
    nodes = 2 if arguments.what == "full" else getattr(arguments, "nodes", 1)
    host.require(nodes)
    built = image.ensure(CACHE, say)
    if arguments.what == "build":
        say(f"the guest is ready: {built.package}")
        return 0
    if arguments.what == "exec":
        rc, _ = _run(built, nodes, [arguments.command] * nodes, DEADLINES["exec"])
        return 1 if rc is None else rc
    return _test(built, arguments.what, nodes, arguments.pytest)


def _test(built: image.Image, what: str, nodes: int, extra: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", "tests/rdma", "--tb=short", "-v", "-p", "pytest_timeout"]
    pytest += ["--junitxml=/run/softroce/junit.xml", *(["-m", "rdma and not two_nodes"] if what == "fast" else [])]
    agent = [sys.executable, "-m", "tests.rdma.agent"]
    for folder in ("relax_tq_rdma", "tests/rdma"):  # the guest cannot write its byte code, and is slow to make it
        compileall.compile_dir(host.ROOT / folder, quiet=2)
    beside = f'{shlex.join(agent)} >"$RTQ_RDMA_RESULTS/agent.log" 2>&1 & exec "$@"'  # it imports meanwhile
    first = ["bash", "-c", beside, "bash", *pytest, *extra]
    rc, share = _run(built, nodes, [first, *[agent] * (nodes - 1)], DEADLINES[what])
    found = results.read(share, rc, wire=not extra)
    say(f"tests in the guest: {found}")
    say(f"logs and results: {share.relative_to(host.ROOT)}")
    if found.problem:
        say(f"FAILED: {found.problem}")
        return 1
    return 0


def _run(built: image.Image, nodes: int, commands: list[list[str]], limit: float) -> tuple[int | None, Path]:
    """Run one command a guest until the first guest's has ended; returns its exit status and that guest's folder."""
    run = CACHE / "run"
    if run.exists():
        shutil.rmtree(run)
    ends = time.monotonic() + limit
    environment = {
        **{name: value for name, value in os.environ.items() if name.startswith("RTQ_RDMA_")},
        "RTQ_RDMA_RESULTS": "/run/softroce",
        "RTQ_RDMA_NODES": str(nodes),
        "RTQ_RDMA_TOKEN": secrets.token_hex(16),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # each of them is slow to import under emulation
        "COLUMNS": "120",
        # What a process of a job takes, so that several fit into a guest.
        "RTQ_SEGMENT_MB": "128",
        "RTQ_LOCAL_BUFFER_MB": "32",
    }
    last = [time.monotonic()]

    def show(node: int, line: str) -> None:
        last[0] = time.monotonic()
        print(f"node{node}| {line}" if nodes > 1 else line, flush=True)

    with contextlib.ExitStack() as stack:
        guests = []
        for node, command in enumerate(commands):
            share = run / f"node{node}"
            share.mkdir(parents=True)
            place = Place(node, nodes, (run / "control", run / "data"))
            _await_wires(place)
            own = {**environment, "RTQ_RDMA_NODE": str(node)}
            say(f"booting guest {node + 1} of {nodes} under software emulation (at most {limit:.0f} s for all of it)")
            guests.append(
                stack.enter_context(Guest(built, place, share, command, own, lambda line, node=node: show(node, line)))
            )
        ended = None
        while True:
            now = time.monotonic()
            if guests[0].rc is not None or not guests[0].is_running:
                ended = ended or now
            problem = _problem(guests, ends)
            if problem or (ended and now - ended > _LINGER_SECONDS):
                say(problem or "a guest did not power off by itself")
                break
            if not guests[0].is_running:
                break  # the other guests only serve the first
            if now - last[0] > _QUIET_SECONDS:
                last[0] = now
                say(f"still running, {ends - now:.0f} s left")
            time.sleep(0.2)
        return guests[0].rc, run / "node0"


def _problem(guests: list[Guest], ends: float) -> str:
    if time.monotonic() > ends:
        return "the time is over: the guest is switched off"
    if not all(host.is_running(owner) for owner in _owners):
        return "the command that started this is gone: the guest is switched off"
    for guest in guests:
        log = (guest.share / "console.log").relative_to(host.ROOT)
        if guest.is_stuck:
            return f"a guest did not boot: see {log}"
        if not guest.is_running and guest.rc is None:
            return f"a guest has ended before its command: see {log}"
    return ""


def _await_wires(place: Place) -> None:
    """The first guest's qemu makes the sockets; the others connect to them."""
    ends = time.monotonic() + 10
    while place.node and not all(wire.exists() for wire in place.wires):
        if time.monotonic() > ends:
            raise host.Unavailable("qemu made no network sockets: see its messages above")
        time.sleep(0.05)


def _stop(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.softroce", description=__doc__.partition("\n")[0])
    sub = parser.add_subparsers(dest="what", required=True)
    for name, text in (("fast", "one guest, the fast set"), ("full", "two guests, every test")):
        sub.add_parser(name, help=text, add_help=False)
    execute = sub.add_parser("exec", help="a command in each of N guests")
    execute.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    execute.add_argument("command", nargs=argparse.REMAINDER)
    sub.add_parser("build", help="the guest's image only")
    arguments, more = parser.parse_known_args()
    if more and arguments.what not in ("fast", "full"):
        parser.error(f"unknown arguments: {' '.join(more)}")
    if arguments.what == "exec" and not arguments.command:
        parser.error("exec: a command is missing")
    arguments.pytest = more
    return arguments


if __name__ == "__main__":
    os.chdir(host.ROOT)
    sys.exit(main())
