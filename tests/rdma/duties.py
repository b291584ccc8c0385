"""What a process of the agents can be asked to do. Each process is one job's driver, producer, consumer or actor.

Arguments and values are plain data. State is the process's own: it was forked for one purpose and ends after it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.rdma.counters import packets

_AGENT_METHODS = ("probe", "listen", "dial", "peers")
_TASK = "rdma-tests"
SABOTAGE = "RTQ_RDMA_SABOTAGE"
"""``tcp``: every member's engine is set up with TCP while everything above it believes in RDMA. Then the tests of the
wire must fail; nothing else would tell."""

_state: dict[str, Any] = {}


def at_end() -> None:
    """The connection is closed: end what would outlive this process."""
    if "master" in _state:
        _state["master"].kill()


def preload() -> None:
    """Import what the duties need: 20 times slower under emulation than anything else they do."""
    import mooncake.store  # noqa: F401
    import torch

    import tests.rdma.payloads
    import tests.rdma.plain_port  # noqa: F401
    from relax_tq_rdma.seams.tq_registry import TqRegistry

    torch.set_num_threads(1)
    if os.environ.get(SABOTAGE) == "tcp":
        _claim_rdma_and_use_tcp()
    report = TqRegistry().check()
    assert report.ok, report.text
    TqRegistry().apply()


# --- actors -----------------------------------------------------------------------------------------------------------


def as_agent(method: str, arguments: list[Any]) -> Any:
    """What a ``NodeAgent`` of the start path does on its node."""
    from relax_tq_rdma.transport.agents import NodeAgent

    assert method in _AGENT_METHODS
    agent = _state.setdefault("agent", NodeAgent())
    return getattr(agent, method)(*arguments)


def serve_controller() -> dict[str, Any]:
    from relax_tq_rdma.seams import tq_bare

    _state["controller"], server = tq_bare.controller()
    return {"id": server.id, "ip": server.ip, "ports": dict(server.ports)}


def serve_storage_unit() -> dict[str, Any]:
    from relax_tq_rdma.seams import tq_bare

    _state["unit"], server = tq_bare.storage_unit()
    return {"id": server.id, "ip": server.ip, "ports": dict(server.ports)}


def store_controller_config(conf: dict[str, Any]) -> None:
    _state["controller"].store_config(conf)


def controller_config() -> Any:
    controller = _state.get("controller")
    return controller.get_config() if controller is not None else None


# --- driver -----------------------------------------------------------------------------------------------------------


def start(flags: list[str], nodes: list[dict[str, Any]], cluster: str) -> dict[str, Any]:
    """Start a job as its driver: the product's own start path over plain processes.

    Returns:
        ``line`` (the start line), ``decision``, ``fallbacks``, ``said`` (all lines), ``conf`` (to join with), ``job``.
    """
    from relax_tq_rdma import accounting
    from relax_tq_rdma.seams import tq_state
    from relax_tq_rdma.settings import Settings
    from relax_tq_rdma.transport.start import start_job
    from tests.rdma.nodes import TestNode
    from tests.rdma.plain_port import PlainPort, plain_conf

    settings, job, said = Settings.from_flags(flags), secrets.token_hex(8), list[str]()
    port = PlainPort(settings, job, [TestNode(**node) for node in nodes], cluster)

    def say(line: str) -> None:
        said.append(line)
        print(line, flush=True)

    accounting.configure(settings.accounting, job=job)
    with port, tq_state.expected_bootstrap():
        started = start_job(settings, {}, port, job=job, emit=say, on_fallback=accounting.record_fallback)
    _state.update(port=port, started=started)
    return {
        "line": started.line,
        "job": job,
        "master": started.master,
        "decision": msgspec.to_builtins(started.decision),
        "fallbacks": [msgspec.to_builtins(one) for one in started.decision.fallbacks],
        "said": said,
        "conf": plain_conf(started.conf),
    }


def start_or_exit(flags: list[str], nodes: list[dict[str, Any]], cluster: str) -> None:
    """As a job's command does it: a start that fails is told on stderr and ends the process with its exit code."""
    from relax_tq_rdma.errors import DataplaneError, UsageError

    try:
        start(flags, nodes, cluster)
    except DataplaneError as exc:
        print(f"relax-tq-rdma: error: {exc}", file=sys.stderr, flush=True)
        os._exit(2 if isinstance(exc, UsageError) else 1)
    os._exit(0)


def close_job(limit: float = 30.0) -> str:
    """Close the job; returns what could not be removed."""
    from relax_tq_rdma.transport.start import close_job as close

    return close(_state.pop("started"), _state.pop("port"), limit=limit)


def fallback_counts() -> dict[str, int]:
    """``dataplane_fallback_total`` of this process, by its labels."""
    from relax_tq_rdma import accounting

    ledger = accounting.ledger()
    counters = ledger.totals().counters if ledger is not None else {}
    return {f"{name} {','.join(labels)}": value for (name, labels), value in counters.items() if "fallback" in name}


def master_page(word: str) -> list[str]:
    """Lines of the job-owned master's metrics that begin with a word."""
    import urllib.request

    address = _state["port"]._master.metrics_address
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as page:
        return [line for line in page.read().decode().splitlines() if line.startswith(word)]


def serve_master(address: str, flags: dict[str, Any]) -> str:
    """A master that no job owns, with flags of the test's choice; it ends with this process."""
    from tests.mooncake import MooncakeMaster

    log = Path(os.environ.get("RTQ_RDMA_RESULTS", "/tmp")) / "master.log"
    _state["master"] = MooncakeMaster(log, rpc_address=address, **flags)
    return f"{address}:{_state['master'].rpc_port}"


def accept_and_say_nothing(address: str) -> int:
    """Listen, take every connection, and never answer; returns the port."""
    import socket

    server = _state["silent"] = socket.create_server((address, 0), backlog=64)
    return int(server.getsockname()[1])


# --- producer and consumer --------------------------------------------------------------------------------------------


def join(conf: dict[str, Any]) -> str:
    """Join a running job; returns the class of the storage manager."""
    from tests.rdma import plain_port

    _state["client"] = plain_port.join(plain_port.conf_of(conf))
    return type(_state["client"].storage_manager).__name__


def leave() -> None:
    """Close this process's client: its segment and its registrations go with it."""
    _state["kept"] = None
    gc.collect()
    client = _state.pop("client")
    client.close()


def put(partition: str, spec: dict[str, Any]) -> list[int]:
    """Put a payload; returns the global index of each row."""
    from tests.rdma.payloads import as_batch, make

    meta = _client().put(data=as_batch(make(spec)), partition_id=partition)
    return list(meta.global_indexes)


def get(partition: str, spec: dict[str, Any], indexes: list[int], keep: str = "") -> dict[str, Any]:
    """Get a payload and compare it with what was put, byte for byte.

    Returns:
        ``wrong`` (field and row of what differs), ``digests`` of all rows, ``packets`` that the node's RDMA devices
        received meanwhile.
    """
    from tests.payload_cases import strict
    from tests.rdma.payloads import digest, make

    expected = make(spec)
    before = packets()
    data = _fetch(partition, sorted(expected), indexes)
    received = packets() - before
    wrong, digests = [], {}
    for field, rows in expected.items():
        got = data[field]
        for at, (want, row) in enumerate(zip(rows, got, strict=True)):
            digests[f"{field}[{at}]"] = digest(row)
            if not strict(want, row):
                wrong.append(f"{field}[{at}]")
    if keep:
        _state.setdefault("kept", {})[keep] = data
    return {"wrong": wrong, "digests": digests, "packets": received}


def check_kept(keep: str, spec: dict[str, Any]) -> list[str]:
    """Compare once more what an earlier get kept; returns what differs now."""
    from tests.payload_cases import strict
    from tests.rdma.payloads import make

    kept = _state["kept"][keep]
    return [
        f"{field}[{at}]"
        for field, rows in make(spec).items()
        for at, (want, row) in enumerate(zip(rows, kept[field], strict=True))
        if not strict(want, row)
    ]


def drop_kept(keep: str) -> None:
    _state["kept"].pop(keep)
    gc.collect()


def clear(partition: str) -> None:
    _client().clear_partition(partition)


def protocol() -> str:
    """What this member's engine was set up with."""
    return str(_manager().storage_client.protocol)


def staging() -> dict[str, Any]:
    """Counts of this process's staging; rungs by name."""
    counts = _manager().storage_client.staging_counts()
    plain = {
        name: getattr(counts, name)
        for name in ("capacity", "held", "peak", "retired", "misses", "registrations", "retired_regions", "allocations")
    }
    return {**plain, "rungs": {f"{way} {rung}": moved.values for (way, rung), moved in counts.rungs.items()}}


def registered() -> int:
    """Memory regions that the engine of this process was asked to register, counted at the native store."""
    return int(_state["registrations"])


def count_registrations() -> None:
    """Count calls of ``register_buffer`` from now on, at the native store itself."""
    _state["registrations"] = 0
    native = _native()

    def counted(pointer: int, size: int, inner: Callable[[int, int], int] = native.register_buffer) -> int:
        _state["registrations"] += 1
        return inner(pointer, size)

    _replace("register_buffer", counted)


def fail_next(call: str, code: int, times: int) -> None:
    """Let the next calls of the native store report ``code`` for every value without doing anything."""
    native = _native()
    inner = getattr(native.behind if isinstance(native, _Before) else native, call)
    left = [times]
    _state["calls"] = 0

    def failing(keys: Any, *more: Any, **named: Any) -> Any:
        _state["calls"] += 1
        if left[0] > 0:
            left[0] -= 1
            return [code] * len(keys)
        return inner(keys, *more, **named)

    _replace(call, failing)


def calls() -> int:
    """Calls of the store since :func:`fail_next`."""
    return int(_state["calls"])


def poison_spare_memory() -> int:
    """Overwrite every byte of the staging pool that nobody holds; returns how many."""
    pool = _manager().storage_client._staging._pool
    leases = []
    while (lent := pool.lend(2**20)) is not None:
        lent.fill_(0xA5)
        leases.append(lent)
    with pool.borrow(2**20, 5.0) as piece:
        piece.memory.fill_(0xA5)
    return len(leases) * 2**20


def retired_spans() -> list[list[int]]:
    """First and last address of all memory of this process that is out of use for good."""
    client = _manager().storage_client
    pool, regions = client._staging._pool, client._transfer.regions
    spans = [[lent.data_ptr(), lent.data_ptr() + lent.numel() - 1] for lent in pool._retired] if pool else []
    return spans + [[first, end - 1] for (first, end), region in regions._regions.items() if region.closed]


def kept_spans(keep: str) -> list[list[int]]:
    """First and last address of every tensor that an earlier get kept."""
    import torch

    rows = [row for column in _state["kept"][keep].values() for row in column]
    tensors = [value for row in rows for value in (row.values() if isinstance(row, dict) else [row])]
    return [
        [one.data_ptr(), one.data_ptr() + one.nbytes - 1]
        for one in tensors
        if isinstance(one, torch.Tensor) and one.nbytes
    ]


def fast_path(partition: str) -> dict[str, Any]:
    """What the accounting says of one step: path and bytes of each field."""
    from relax_tq_rdma import accounting

    ledger = accounting.ledger()
    assert ledger is not None, "the job keeps no account"
    summary = ledger.step(partition)
    assert summary is not None, f"nothing was counted for {partition}"
    accounting.assert_fast_path(summary)
    return {f"{flow.direction} {flow.field} {flow.path}": flow.bytes for flow in summary.fields}


def doctor(flags: list[str]) -> dict[str, Any]:
    """``relax-tq-rdma doctor --json`` in this process: exit code and what it printed."""
    import io
    import json

    from relax_tq_rdma.doctor.cli import run

    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run(["--json", *flags])
    return {"code": code, "said": json.loads(out.getvalue())}


# --- the process and its node -----------------------------------------------------------------------------------------


def received_packets() -> int:
    """By all RDMA devices of this node, since they are there."""
    return packets()


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def shell(command: str, limit: float = 30.0) -> str:
    """Run a command on this node (tests of broken links and devices); returns its output.

    Raises:
        RuntimeError: it failed.
    """
    import subprocess

    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise RuntimeError(f"'{command}' failed: {done.stderr.strip()}")
    return done.stdout


def processes(words: list[str]) -> list[str]:
    """Command lines of this node's processes that hold one of the words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if any(word in line for word in words):
                    found.append(line)
    return found


def memory_regions() -> int:
    """Memory regions registered with the RDMA devices of this node, as the kernel counts them."""
    import json
    import subprocess

    shown = subprocess.run(
        ["rdma", "-j", "resource", "show"], capture_output=True, text=True, timeout=20, check=True
    ).stdout
    return sum(int(device.get("mr", 0)) for device in json.loads(shown or "[]"))


def _claim_rdma_and_use_tcp() -> None:
    from relax_tq_rdma.seams import tq_bare

    def wrap(native: Any) -> Any:
        class OnTcp(native):  # type: ignore[misc]
            def setup(self, *arguments: Any) -> Any:
                first = ["tcp" if value == "rdma" else value for value in arguments[:5]]
                return super().setup(*first, "", *arguments[6:])

            def allocate_and_mount_segment(self, size: int, protocol: str, *more: Any) -> Any:
                return super().allocate_and_mount_segment(size, "tcp", *more)

        return OnTcp

    tq_bare.replace_mooncake_store(wrap)


# --- inside -----------------------------------------------------------------------------------------------------------


def _client() -> Any:
    if "client" not in _state:
        from transfer_queue import interface

        return interface._TQ_CLIENT  # the driver's own
    return _state["client"]


def _manager() -> Any:
    return _client().storage_manager


def _native() -> Any:
    return _manager().storage_client._store._native


def _replace(name: str, function: Callable[..., Any]) -> None:
    """Put a function before one of the native store's, for this process."""
    store = _manager().storage_client._store
    if not isinstance(store._native, _Before):
        store._native = _Before(store._native)
    setattr(store._native, name, function)


class _Before:
    """The native store with some calls replaced."""

    def __init__(self, native: Any) -> None:
        self.behind = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def _fetch(partition: str, fields: list[str], indexes: list[int]) -> dict[str, list[Any]]:
    client = _client()
    ends = time.monotonic() + 60
    while not client.check_production_status(data_fields=fields, partition_id=partition):
        assert time.monotonic() < ends, "the rows were put and never reported ready"
        time.sleep(0.05)
    meta = client.get_meta(
        data_fields=fields,
        batch_size=len(indexes),
        partition_id=partition,
        mode="force_fetch",
        task_name=_TASK,
    )
    data = client.get_data(meta)
    order = [list(meta.global_indexes).index(index) for index in indexes]
    columns = {field: _rows(data[field]) for field in fields}
    return {field: [rows[at] for at in order] for field, rows in columns.items()}


def _rows(column: Any) -> list[Any]:
    import torch

    return list(column.unbind()) if isinstance(column, torch.Tensor) else column.tolist()


def _duties() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in list(globals().items()):
        if callable(value) and getattr(value, "__module__", "") == __name__ and not name.startswith("_"):
            yield name, value


DUTIES: dict[str, Callable[..., Any]] = dict(_duties())
