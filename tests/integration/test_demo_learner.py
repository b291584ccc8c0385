"""The mesh is real: a step split over TP, PP, CP and DP processes is the step of one process."""

import multiprocessing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from relax_tq_rdma.demo import model
from relax_tq_rdma.demo.comm import Comm
from relax_tq_rdma.demo.learner import Learner
from relax_tq_rdma.demo.mesh import Mesh
from relax_tq_rdma.demo.rows import MULTIMODAL

pytestmark = pytest.mark.integration
LIMIT = timedelta(seconds=60)
STEPS = 2


def rows():
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(4):
        picture = None
        if index != 2:
            grid = torch.tensor([[1, 4, 6]])
            picture = {"pixel_values": torch.randn(24, 1176, generator=generator), "image_grid_thw": grid}
        length = index % 3 + 1
        made.append(
            {
                "tokens": torch.tensor([72, 105, 33, *([53] * length)]),
                "response_lengths": length,
                "rewards": float(index - 1.5),
                "sample_indices": index,
                "loss_masks": torch.ones(length, dtype=torch.int64),
                "rollout_log_probs": torch.full((length,), -2.3),
                MULTIMODAL: picture,
            }
        )
    return made


def learn(rank, mesh, store_path, results):
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, mesh.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.world, timeout=LIMIT)
    learner = Learner(Comm(mesh, rank, LIMIT), seed=5)
    mine = rows()[mesh.coords(rank).dp :: mesh.dp]
    losses = [learner.step(mine) for _ in range(STEPS)]
    weights = {name: weight.detach().numpy() for name, weight in learner.weights.items()}
    results.put((rank, losses, weights))
    dist.barrier()
    dist.destroy_process_group()


def run(mesh, folder):
    """Losses and the whole model after the last step."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=learn, args=(rank, mesh, str(folder / "store"), results)) for rank in range(mesh.world)
    ]
    for process in processes:
        process.start()
    try:
        answers = [results.get(timeout=60) for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    assert all(losses == answers[0][1] for _, losses, _ in answers), "every rank reports the same loss"
    shards = {}
    for rank, _, weights in sorted(answers, key=lambda answer: answer[0]):
        at = mesh.coords(rank)
        if at.dp == 0 and at.cp == 0:
            shards.setdefault(at.tp, []).append({name: torch.from_numpy(w) for name, w in weights.items()})
    return answers[0][1], model.assemble(shards)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(Mesh(), tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    "mesh",
    [Mesh(tp=2), Mesh(pp=3), Mesh(cp=2, dp=2), Mesh(tp=2, pp=2, cp=2)],
    ids=["tp2", "pp3", "cp2-dp2", "tp2-pp2-cp2"],
)
def test_a_split_step_is_the_whole_step(mesh, alone, tmp_path):
    losses, weights = run(mesh, tmp_path)
    assert losses == pytest.approx(alone[0], rel=1e-4)
    for name, weight in weights.items():
        # Adam divides by the gradient's size: where a gradient is all but zero, the order of a sum may show.
        assert torch.allclose(weight, alone[1][name], atol=2e-3), name
    assert not torch.equal(weights["head.weight"], model.initial_weights(5)["head.weight"])


def test_which_rows_a_dp_rank_holds_does_not_change_a_bit(tmp_path, alone):
    losses, weights = run(Mesh(dp=2), tmp_path)
    assert losses == alone[0]
    assert all(torch.equal(weight, alone[1][name]) for name, weight in weights.items())
