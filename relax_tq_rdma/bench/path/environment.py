"""What a run ran on, and how long it will take."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from relax_tq_rdma.bench.path.options import Options
from relax_tq_rdma.bench.path.payload import MIB
from relax_tq_rdma.bench.path.stage import UNITS, segment_mib
from relax_tq_rdma.errors import StartError
from relax_tq_rdma.transport.hazards import installed_mooncake_version
from relax_tq_rdma.transport.host_checks import available_memory
from relax_tq_rdma.transport.sysfs import Tree
from relax_tq_rdma.version import __version__
from relax_tq_rdma.words import count, duration

_PACKAGES = ("TransferQueue", "torch", "tensordict", "numpy")
CONTROLLER = "TransferQueue's own controller and storage units, each in a plain process, without Ray"
_START_SECONDS, _STEP_SECONDS = 12.0, 0.1
_JOIN_SECONDS = {"mooncake": 2.0, "simple": 1.0}
_PROCESSES_MIB = 2048
FEWEST_REPEATS = 3
_SLOWEST_GBS = {"mooncake": 0.35, "simple": 0.7}
"""Put, get and check of a batch, in 1e9 bytes a second: a guess for the estimate only."""


def describe(options: Options) -> dict[str, Any]:
    """Versions, machine and the settings that all cases share."""
    return {
        "versions": {
            "relax-tq-rdma": __version__,
            "mooncake": installed_mooncake_version(),
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "machine": platform.platform(),
        "mc_store_memcpy": options.memcpy,
        "controller": CONTROLLER,
        "storage_units": UNITS,
        "mooncake": "protocol tcp on loopback; a master for each case; only the producer mounts a segment",
        "segment_mib": segment_mib(options),
        "pool_mib": options.pool,
        "repeats": options.repeats,
        "retained_batches": options.keep,
        "warnings": warnings(options),
    }


def warnings(options: Options) -> list[str]:
    """What keeps the figures from being taken at their word; one sentence each."""
    if options.repeats >= FEWEST_REPEATS:
        return []
    return [
        f"{count(options.repeats, 'repeat')}: a median of fewer than {FEWEST_REPEATS} is no median, and no ratio of "
        "this run proves anything: use --repeats 7 or more"
    ]


def estimate(options: Options) -> str:
    """How long it will take on an idle machine, in words: to start, and then."""
    rounds = options.repeats + options.keep + 1
    moved_gb = sum(options.tiers) * MIB * rounds / 1e9
    start, run = _START_SECONDS, 0.0
    for case in options.cases:
        start += _JOIN_SECONDS[case.backend]
        run += moved_gb / _SLOWEST_GBS[case.backend] + rounds * len(options.tiers) * _STEP_SECONDS
    tiers = ", ".join(map(str, options.tiers))
    return (
        f"{count(len(options.cases), 'case')}, {count(rounds, 'round')} of each on {tiers} MiB: "
        f"about {duration(start)} to start, then about {duration(run)} on an idle machine"
    )


def check_memory(options: Options) -> None:
    """Refuse what would bring the machine to swap, or to its knees.

    Raises:
        StartError: with what is needed, what there is, and how to need less.
    """
    need, (free, _) = _need_mib(options) * MIB, available_memory(Tree(Path("/")))
    if free is not None and need > free:
        raise StartError(
            f"the run may need {need / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are available: choose a "
            f"smaller --tier than {max(options.tiers)}, fewer cases with --case, or less --retain or --pool-mib"
        )


def _need_mib(options: Options) -> int:
    """At most: the payload with what is made of it, segments, storage units, what the consumer keeps, pools."""
    mooncake = sum(case.backend == "mooncake" for case in options.cases)
    staged = sum(case.asks("host_staging") for case in options.cases)
    batches = 4 + mooncake + 2 + len(options.cases) * (options.keep + 1)
    return max(options.tiers) * batches + 2 * staged * options.pool + _PROCESSES_MIB
