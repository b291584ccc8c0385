"""What every rank has: its place in the mesh and the process group."""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import mpu

from relax_tq_rdma.demo.mesh import Mesh

LOOPBACK = "127.0.0.1"


class TrainRayActor:
    def __init__(self, world_size: int, rank: int) -> None:
        self._world_size, self._rank = world_size, rank
        self._store: dist.TCPStore | None = None

    def open_store(self) -> int:
        """On rank 0: the rendezvous of all ranks, on a free port of this node."""
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = self._make_store(port, master_listen_fd=listener.detach(), is_master=True)
        return port

    def init(
        self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False, *, port: int = 0
    ) -> None:
        self.args, self.role = args, role
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = timedelta(seconds=args.standin_wait_seconds + 30)
        store = self._store or self._make_store(port)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._world_size, timeout=limit)
        self.mesh = Mesh(
            tp=args.tensor_model_parallel_size,
            cp=args.context_parallel_size,
            pp=args.pipeline_model_parallel_size,
            dp=self._world_size
            // (args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size),
        )
        mpu.initialize_model_parallel(self.mesh, self._rank, limit)

    def pid(self) -> int:
        return os.getpid()

    def _make_store(self, port: int, **role: object) -> dist.TCPStore:
        limit = timedelta(seconds=60)
        return dist.TCPStore(LOOPBACK, port, self._world_size, timeout=limit, wait_for_workers=False, **role)
