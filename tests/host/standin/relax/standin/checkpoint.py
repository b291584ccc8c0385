"""Weights and optimiser of a rank after a step, so that a restarted job goes on with the same bits."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import torch

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
    state = torch.load(Path(args.load) / f"step{args.start_rollout_id}_rank{rank}.pt", weights_only=True)
    with torch.no_grad():
        for name, weight in learner.weights.items():
            weight.copy_(state["weights"][name])
    learner.optimizer.load_state_dict(state["optimizer"])


def latest(folder: str, world: int) -> int:
    """The last step that all ranks have saved; 0 when there is none."""
    saved: dict[int, int] = {}
    for path in Path(folder).glob("step*_rank*.pt"):
        step = int(path.name[4:].split("_")[0])
        saved[step] = saved.get(step, 0) + 1
    return max((step for step, ranks in saved.items() if ranks == world), default=0)
