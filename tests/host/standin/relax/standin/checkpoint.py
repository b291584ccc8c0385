"""Weights and optimiser of a rank after a step, so that a restarted job goes on with the same bits."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from relax_tq_rdma.demo import model
from relax_tq_rdma.demo.learner import Learner


def save(args: Namespace, rank: int, step: int, learner: Learner) -> None:
    folder = Path(args.save)
    folder.mkdir(parents=True, exist_ok=True)
    state = {"weights": learner.weights, "optimizer": learner.optimizer.state_dict()}
    partial = folder / f"rank{rank}.part"
    torch.save(state, partial)
    os.replace(partial, folder / f"step{step}_rank{rank}.pt")


def load(args: Namespace, rank: int, learner: Learner) -> None:
    """The state before step ``start_rollout_id``."""
    state = _read(args.load, args.start_rollout_id, rank)
    with torch.no_grad():
        for name, weight in learner.weights.items():
            weight.copy_(state["weights"][name])
    learner.optimizer.load_state_dict(state["optimizer"])


def weights(args: Namespace, rank: int, step: int) -> model.Weights:
    """Of a rank, before ``step``."""
    return _read(args.load, step, rank)["weights"]


def _read(folder: str, step: int, rank: int) -> dict[str, Any]:
    return torch.load(Path(folder) / f"step{step}_rank{rank}.pt", weights_only=True)


def latest(folder: str, world: int) -> int:
    """The last step that all ranks have saved; 0 when there is none."""
    saved: dict[int, int] = {}
    for path in Path(folder).glob("step*_rank*.pt"):
        step = int(path.name[4:].split("_")[0])
        saved[step] = saved.get(step, 0) + 1
    return max((step for step, ranks in saved.items() if ranks == world), default=0)
