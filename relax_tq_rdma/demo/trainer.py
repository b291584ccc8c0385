"""One trainer rank: a process of the cohort. Runs as a Ray actor; all ranks are driven in step by the job."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from relax_tq_rdma.demo.accounting_lines import LineCatcher
from relax_tq_rdma.demo.comm import Comm
from relax_tq_rdma.demo.digest import row_digest
from relax_tq_rdma.demo.fetch import Fetcher
from relax_tq_rdma.demo.learner import Learner
from relax_tq_rdma.demo.mesh import Mesh
from relax_tq_rdma.demo.model import Weights

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Trained:
    """One step of one rank. ``digests`` maps sample index to the digest of the row as this rank received it;
    ``weights`` is this rank's shard after the step, ``lines`` are the accounting's, none when it is off."""

    rank: int
    loss: float
    digests: dict[int, bytes]
    weights: Weights
    get_s: float
    fanout_s: float
    lines: list[str]


class Trainer:
    """``open_store`` on rank 0, then ``join`` on all ranks at once, then ``train(step)`` on all ranks at once.

    ``limit_s`` bounds every wait: for peers, for rows, for a collective.
    """

    def __init__(self, rank: int, mesh: Mesh, seed: int, limit_s: float) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self._rank = rank
        self._mesh = mesh
        self._seed = seed
        self._limit_s = limit_s
        self._store: Any = None
        self._lines = LineCatcher()

    def open_store(self) -> tuple[str, int]:
        """Open the rendezvous store of all ranks on a free port of this node; returns its address and port."""
        import ray

        address = ray.util.get_node_ip_address().strip("[]")
        # Handing over a bound socket keeps the port ours and the store off other interfaces.
        listener = socket.create_server((address, 0), family=_family(address))
        port = listener.getsockname()[1]
        self._store = self._make_store(address, port, master_listen_fd=listener.detach(), is_master=True)
        return address, port

    def join(self, address: str, port: int, tq_config: Any, with_plugin: bool, batch_size: int, per_rank: bool) -> None:
        """Form the process groups and attach to the job's data system."""
        from relax_tq_rdma.demo.data_system import attach

        if address == LOOPBACK:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo takes whatever the host's name resolves to
        # A peer that waits in a collective must outlive the fetcher's own wait, which ends with a clear message.
        limit = timedelta(seconds=self._limit_s + 60)
        store = self._store or self._make_store(address, port)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._mesh.world, timeout=limit)
        self._comm = Comm(self._mesh, self._rank, limit)
        self._client = attach(tq_config, with_plugin)
        self._lines.attach()
        self._fetcher = Fetcher(self._client, self._comm, batch_size, per_rank, self._limit_s)
        self._learner = Learner(self._comm, self._seed)

    def train(self, step: int) -> Trained:
        """Fetch the rows of ``step``, train on them, and clear the partition once every rank is done with it."""
        fetched = self._fetcher.fetch(step)
        loss = self._learner.step(fetched.rows)
        digests = {int(row["sample_indices"]): row_digest(row) for row in fetched.rows}
        self._comm.barrier()
        if self._rank == 0:
            self._client.clear_partition(f"train_{step}")
        weights = {name: weight.detach().clone() for name, weight in self._learner.weights.items()}
        return Trained(
            rank=self._rank,
            loss=loss,
            digests=digests,
            weights=weights,
            get_s=fetched.get_s,
            fanout_s=fetched.fanout_s,
            lines=self._lines.take(),
        )

    def leave(self) -> None:
        """Close the client."""
        from relax_tq_rdma.demo.data_system import leave

        leave()

    def _make_store(self, address: str, port: int, **role: Any) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]  # public, but missing from torch.distributed.__all__
            address,
            port,
            self._mesh.world,
            timeout=timedelta(seconds=self._limit_s),
            wait_for_workers=False,
            **role,
        )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
