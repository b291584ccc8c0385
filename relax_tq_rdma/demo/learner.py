"""The training side of one rank: its shard of the model, gradients over the mesh, one Adam step per batch.

Every sample is a micro-batch of its own and the sums over DP run in the order of the sample index, so the result does
not depend on which DP rank happened to fetch which rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from relax_tq_rdma.demo import model
from relax_tq_rdma.demo.comm import Comm
from relax_tq_rdma.demo.rows import MULTIMODAL, Row

LEARNING_RATE = 0.005


class Learner:
    """Holds the weights of one rank; ``step`` is collective over the whole mesh.

    ``gradient_norm`` is the L2 norm of the whole model's last gradient, the same on every rank.
    """

    def __init__(self, comm: Comm, seed: int) -> None:
        self._comm = comm
        mesh, coords = comm.mesh, comm.coords
        self._layers = model.stage_layers(coords.pp, mesh.pp)
        self._is_first, self._is_last = coords.pp == 0, coords.pp == mesh.pp - 1
        self.weights = model.shard(model.initial_weights(seed), self._layers, coords.tp, mesh.tp)
        self._parameters = [weight.requires_grad_() for weight in self.weights.values()]
        self.optimizer = torch.optim.Adam(self._parameters, lr=LEARNING_RATE)
        self.gradient_norm = 0.0

    def step(self, rows: Sequence[Row]) -> float:
        """Forward and backward over ``rows`` (this DP rank's part, in sample order), then the optimiser step.

        Returns:
            The mean loss over the rows of all DP ranks, the same on every rank.
        """
        losses = torch.zeros(len(rows))
        gradients = torch.zeros(len(rows), sum(parameter.numel() for parameter in self._parameters))
        for i, row in enumerate(rows):
            losses[i], gradients[i] = self._one_sample(row)
        self._add_over_cp(gradients)
        self._comm.share_from_last_stage(losses)
        indices = [int(row["sample_indices"]) for row in rows]
        order, all_losses, all_gradients = self._over_dp(indices, losses, gradients)
        self._apply(sum(all_gradients[i] for i in order) / len(order))
        return sum(float(all_losses[i]) for i in order) / len(order)

    def _one_sample(self, row: Row) -> tuple[float, torch.Tensor]:
        """Loss (0 but on the last stage) and flat gradient of this rank's weights for one sample."""
        received = None if self._is_first else self._receive().requires_grad_()
        produced = model.forward(self.weights, self._layers, self._inputs(row), received, self._tp_sum, self._cp_sum)
        if self._is_last:
            produced = self._loss(produced, row)
            upstream = None
        else:
            self._comm.send(produced.detach(), self._comm.coords.pp + 1)
            upstream = self._receive(from_stage=self._comm.coords.pp + 1)
        wanted = self._parameters if received is None else [*self._parameters, received]
        found = torch.autograd.grad(produced, wanted, upstream, allow_unused=True)
        if received is not None:
            self._comm.send(found[-1], self._comm.coords.pp - 1)
        flat = [
            (torch.zeros_like(parameter) if gradient is None else gradient).reshape(-1)
            for parameter, gradient in zip(self._parameters, found, strict=False)
        ]
        return (produced.item() if self._is_last else 0.0), torch.cat(flat)

    def _inputs(self, row: Row) -> model.Inputs:
        prompt = row["tokens"][: -int(row["response_lengths"])]
        return model.make_inputs(prompt, row[MULTIMODAL], self._comm.coords.cp, self._comm.mesh.cp)

    def _loss(self, logits: torch.Tensor, row: Row) -> torch.Tensor:
        response = row["tokens"][-int(row["response_lengths"]) :] - ord("0")
        behaviour = row["rollout_log_probs"].clone()
        return model.grpo_loss(logits, response, behaviour, float(row["rewards"]), row["loss_masks"].float())

    def _receive(self, from_stage: int | None = None) -> torch.Tensor:
        stage = self._comm.coords.pp - 1 if from_stage is None else from_stage
        return self._comm.receive(torch.empty(model.POSITIONS, model.HIDDEN // self._comm.mesh.tp), stage)

    def _tp_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return _sum_through(tensor, self._comm, "tp")

    def _cp_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return _sum_through(tensor, self._comm, "cp")

    def _add_over_cp(self, gradients: torch.Tensor) -> None:
        """Only the encoder sees a part of the patches; the layers after it see the sum, alike on every CP rank."""
        if not self._is_first or self._comm.mesh.cp == 1:
            return
        encoder = {p.name for p in model.PARAMETERS if p.layer == model.ENCODER_LAYER}
        width = sum(weight.numel() for name, weight in self.weights.items() if name in encoder)
        part = gradients[:, :width].contiguous()  # the encoder's weights come first
        gradients[:, :width] = self._comm.sum_(part, "cp")

    def _over_dp(
        self, indices: list[int], losses: torch.Tensor, gradients: torch.Tensor
    ) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
        parts = self._comm.gather((indices, losses, gradients), "dp")
        all_indices = [index for part in parts for index in part[0]]
        all_losses = [loss for part in parts for loss in part[1]]
        all_gradients = [gradient for part in parts for gradient in part[2]]
        return sorted(range(len(all_indices)), key=all_indices.__getitem__), all_losses, all_gradients

    def _apply(self, flat: Any) -> None:
        at = 0
        for parameter in self._parameters:
            parameter.grad = flat[at : at + parameter.numel()].reshape(parameter.shape).clone()
            at += parameter.numel()
        self.gradient_norm = self._norm()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _norm(self) -> float:
        """What every TP rank holds whole counts once; CP and DP ranks hold the same gradients by now."""
        split = {parameter.name for parameter in model.PARAMETERS if parameter.split is not None}
        mine = [w.grad for name, w in self.weights.items() if name in split or self._comm.coords.tp == 0]
        squares = torch.stack([torch.zeros(()), *(g.square().sum() for g in mine if g is not None)]).sum()
        for axis in ("tp", "pp"):
            squares = self._comm.sum_(squares, axis)
        return float(squares.sqrt())


class _SumThrough(torch.autograd.Function):
    """All-reduce forward, identity backward: what follows is computed alike on every rank of the group."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: Comm, group: str) -> torch.Tensor:
        return comm.sum_(tensor.clone(), group)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return upstream[0], None, None


def _sum_through(tensor: torch.Tensor, comm: Comm, group: str) -> torch.Tensor:
    summed: torch.Tensor = _SumThrough.apply(tensor, comm, group)  # type: ignore[no-untyped-call]
    return summed
