"""What accounting costs: ``relax-tq-rdma bench accounting``.

Moves one dict payload through real TransferQueue (SimpleStorage, local Ray) again and again, with accounting off and on
``summary`` in turn, so that drift hits both alike. ``overhead_percent`` compares the medians; ``noise_percent`` is by
how much two halves of the rounds without accounting differ, and an overhead below it says nothing. So the cost is also
measured directly: the time in accounting code on the very batches that were moved (``direct_ms``, ``direct_percent``).
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import relax_tq_rdma
from relax_tq_rdma import Settings, accounting
from relax_tq_rdma.usage import Parser, positive

SCHEMA = 1
DESCRIPTION = """\
Measure what --dataplane-accounting summary costs on a real TransferQueue, which this starts with a Ray of its own. An
overhead below the noise says nothing; so the time in accounting code is measured directly, too. Exit code: 0 measured,
2 wrong usage."""
ROWS = 64
PATCH_VALUES = 1176  # one patch of a Qwen2-VL image: 3 channels x 2 frames x 14 x 14


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print the result.

    Raises:
        UsageError: a wrong flag or value.
    """
    parser = Parser(prog="relax-tq-rdma bench accounting", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--mib", type=positive, default=256, metavar="MIB", help="payload in MiB (default: 256)")
    parser.add_argument(
        "--repeats", type=positive, default=9, metavar="N", help="measured rounds of each mode (default: 9)"
    )
    args = parser.parse_args(argv)
    result = bench(args.mib, args.repeats)
    if args.json:
        print(json.dumps(result))
    else:
        off, summary = result["off"], result["summary"]
        print(f"payload {result['payload_bytes']:,} bytes in {ROWS} rows, {args.repeats} rounds of each mode")
        print(f"put + get   off      {off['median_s']:.4f} s  ({off['min_s']:.4f} - {off['max_s']:.4f})")
        print(f"put + get   summary  {summary['median_s']:.4f} s  ({summary['min_s']:.4f} - {summary['max_s']:.4f})")
        print(f"overhead of the medians  {result['overhead_percent']:+.2f} %, noise {result['noise_percent']:.2f} %")
        print(f"time in accounting code  {result['direct_ms']:.3f} ms = {result['direct_percent']:.3f} % of put + get")
    return 0


def bench(mib: int, repeats: int) -> dict[str, Any]:
    """Measure; see the module. Times are seconds of one put + get of the whole payload."""
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")  # read when it is imported

    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    relax_tq_rdma.install(Settings(accounting="summary"))
    # "local": a cluster of its own, also where another one is up
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}))
        try:
            return _rounds(tq.get_client(), _payload(mib), repeats)
        finally:
            tq.close()
    finally:
        accounting.configure("off")
        ray.shutdown()
        relax_tq_rdma.uninstall()


def _rounds(client: Any, payload: Any, repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"off": [], "summary": []}
    direct: list[float] = []
    for n in range(-1, repeats):  # round -1 warms up
        order = ("off", "summary") if n % 2 else ("summary", "off")
        for mode in order:
            _switch(mode)
            seconds, got = _move(client, payload, f"bench_{n}_{mode}")
            if n >= 0:
                times[mode].append(seconds)
                if mode == "summary":
                    direct.append(_direct(payload, got))
            del got
            gc.collect()
    off, summary = statistics.median(times["off"]), statistics.median(times["summary"])
    return {
        "schema": SCHEMA,
        "payload_bytes": sum(stats.bytes for stats in accounting.measure(payload).fields),
        "rows": ROWS,
        "repeats": repeats,
        "off": _spread(times["off"]),
        "summary": _spread(times["summary"]),
        "overhead_percent": (summary / off - 1) * 100,
        "noise_percent": _noise(times["off"]) / off * 100,
        "direct_ms": statistics.median(direct) * 1e3,
        "direct_percent": statistics.median(direct) / off * 100,
        "cpus": os.cpu_count(),
        "versions": {name: metadata.version(name) for name in ("relax-tq-rdma", "TransferQueue", "torch", "ray")},
    }


def _switch(mode: str) -> None:
    if mode == "off":
        accounting.configure("off")
    else:
        accounting.configure("summary", job=f"bench-{os.getpid()}", sink=lambda line: None)
        accounting.record_alloc(0.0)  # a process starts its publisher once, not once a step
    time.sleep(0.1)


def _move(client: Any, payload: Any, partition: str) -> tuple[float, Any]:
    began = time.perf_counter()
    client.put(data=payload, partition_id=partition)
    put_s = time.perf_counter() - began
    meta = client.get_meta(data_fields=list(payload.keys()), batch_size=ROWS, partition_id=partition, task_name="bench")
    began = time.perf_counter()
    got = client.get_data(meta)
    get_s = time.perf_counter() - began
    client.clear_partition(partition)
    return put_s + get_s, got


def _direct(payload: Any, got: Any) -> float:
    """Seconds of accounting code for one put + get: measure both batches and book them."""
    from relax_tq_rdma.accounting.ledger import Ledger

    ledger = Ledger()

    began = time.perf_counter()
    ledger.end(ledger.begin("put", "direct"), "ok", accounting.measure(payload))
    ledger.end(ledger.begin("get", "direct"), "ok", accounting.measure(got))
    return time.perf_counter() - began


def _payload(mib: int) -> Any:
    """``ROWS`` dicts of two tensors each, all separate, as the host's image processor makes them."""
    import torch
    from tensordict import TensorDict

    patches = max(1, mib * 2**20 // (ROWS * PATCH_VALUES * 4))
    samples = [
        {"pixel_values": torch.rand(patches, PATCH_VALUES), "image_grid_thw": torch.tensor([[1, 1, patches]])}
        for _ in range(ROWS)
    ]
    return TensorDict({"multimodal_train_inputs": samples, "tokens": torch.zeros(ROWS, 512)}, batch_size=ROWS)


def _noise(seconds: list[float]) -> float:
    """Difference of the medians of every second round and of the others; nothing was changed between them."""
    return abs(statistics.median(seconds[::2]) - statistics.median(seconds[1::2] or seconds))


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
