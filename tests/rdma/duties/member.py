"""Producer and consumer: a TransferQueue client of the job, with the plugin's storage manager."""

from __future__ import annotations

import gc
import time
from typing import Any

from tests.rdma.counters import packets
from tests.rdma.duties.state import STATE, client, manager

_TASK = "rdma-tests"


def join(conf: dict[str, Any]) -> str:
    """Join a running job; returns the class of the storage manager."""
    from tests.rdma import plain_port

    STATE["client"] = plain_port.join(plain_port.conf_of(conf))
    return type(STATE["client"].storage_manager).__name__


def leave() -> None:
    """Close this process's client: its segment and its registrations go with it."""
    STATE["kept"] = None
    gc.collect()
    STATE.pop("client").close()


def put(partition: str, spec: dict[str, Any]) -> list[int]:
    """Put a payload; returns the global index of each row."""
    from tests.rdma.payloads import as_batch, make

    meta = client().put(data=as_batch(make(spec)), partition_id=partition)
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
        STATE.setdefault("kept", {})[keep] = data
    return {"wrong": wrong, "digests": digests, "packets": received}


def check_kept(keep: str, spec: dict[str, Any]) -> list[str]:
    """Compare once more what an earlier get kept; returns what differs now."""
    from tests.payload_cases import strict
    from tests.rdma.payloads import make

    kept = STATE["kept"][keep]
    return [
        f"{field}[{at}]"
        for field, rows in make(spec).items()
        for at, (want, row) in enumerate(zip(rows, kept[field], strict=True))
        if not strict(want, row)
    ]


def drop_kept(keep: str) -> None:
    STATE["kept"].pop(keep)
    gc.collect()


def clear(partition: str) -> None:
    client().clear_partition(partition)


def protocol() -> str:
    """What this member's engine was set up with."""
    return str(manager().storage_client.protocol)


def staging() -> dict[str, Any]:
    """Counts of this process's staging; rungs by name."""
    counts = manager().storage_client.staging_counts()
    plain = {
        name: getattr(counts, name)
        for name in ("capacity", "held", "peak", "retired", "misses", "registrations", "retired_regions", "allocations")
    }
    return {**plain, "rungs": {f"{way} {rung}": moved.values for (way, rung), moved in counts.rungs.items()}}


def fast_path(partition: str) -> dict[str, Any]:
    """What the accounting says of one step: path and bytes of each field."""
    from relax_tq_rdma import accounting

    ledger = accounting.ledger()
    assert ledger is not None, "the job keeps no account"
    summary = ledger.step(partition)
    assert summary is not None, f"nothing was counted for {partition}"
    accounting.assert_fast_path(summary)
    return {f"{flow.direction} {flow.field} {flow.path}": flow.bytes for flow in summary.fields}


def _fetch(partition: str, fields: list[str], indexes: list[int]) -> dict[str, list[Any]]:
    tq = client()
    ends = time.monotonic() + 60
    while not tq.check_production_status(data_fields=fields, partition_id=partition):
        assert time.monotonic() < ends, "the rows were put and never reported ready"
        time.sleep(0.05)
    meta = tq.get_meta(
        data_fields=fields,
        batch_size=len(indexes),
        partition_id=partition,
        mode="force_fetch",
        task_name=_TASK,
    )
    data = tq.get_data(meta)
    order = [list(meta.global_indexes).index(index) for index in indexes]
    columns = {field: _rows(data[field]) for field in fields}
    return {field: [rows[at] for at in order] for field, rows in columns.items()}


def _rows(column: Any) -> list[Any]:
    import torch

    return list(column.unbind()) if isinstance(column, torch.Tensor) else column.tolist()
