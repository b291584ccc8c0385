"""The driver's controller: data system first, then the services, then a watch over them."""

from __future__ import annotations

import logging
import os
import threading
import time
from argparse import Namespace
from typing import Any

import transfer_queue as tq
from omegaconf import OmegaConf

import relax.utils
from relax.core.service import Service
from relax.standin import checkpoint, record
from relax.standin.line import NEW, WITH
from relax.utils.async_utils import stop_async_loop
from relax.utils.utils import compute_dp_size

logger = logging.getLogger(__name__)


class Controller:
    def __init__(self, config: Namespace, runtime_env: dict[str, Any] | None = None) -> None:
        self.config = config
        self.runtime_env = runtime_env or {}
        self.serve_dict: dict[str, Service] = {}
        self._runs: dict[str, Any] = {}
        self._finished = threading.Event()
        self._failure: BaseException | None = None
        self._initialize_data_system()
        self.register_all_serve()
        self._start_health_check()

    # --- data system --------------------------------------------------------------------------------------------------

    def _initialize_data_system(self) -> None:
        config = self.config
        conf = OmegaConf.create(
            {
                "controller": {"sampler": self._sampler(), "polling_mode": config.polling_mode},
                "backend": self._resolve_tq_backend() if "pr256" in WITH else {"SimpleStorage": self._storage()},
            },
            flags={"allow_objects": True},
        )
        config.tq_config = tq.init(conf=conf) or conf

    def _storage(self) -> dict[str, int]:
        config = self.config
        storage: dict[str, int] = {"num_data_storage_units": config.num_data_storage_units}
        if not NEW:
            rows = config.rollout_batch_size * config.n_samples_per_prompt
            storage["total_storage_size"] = rows * (config.max_staleness + 1)
        return storage

    if "pr256" in WITH:

        def _resolve_tq_backend(self) -> dict[str, Any]:
            from relax.utils.tq.config import build_simple_storage_config, validate_config

            problems = validate_config(self.config)
            if problems:
                raise ValueError("; ".join(problems))
            return build_simple_storage_config(
                self._storage().get("total_storage_size"), self.config.num_data_storage_units
            )

        def _close_data_system(self) -> None:
            tq.close()

    def _sampler(self) -> Any:
        config = self.config
        if NEW:
            from relax.utils.data.identity_window_sampler import IdentityWindowSampler

            placement = "streaming" if config.use_dynamic_batch_size else "sequential"
            return IdentityWindowSampler(dp_size=compute_dp_size(config), placement=placement)
        if config.balance_data:
            return tq.SeqlenBalancedSampler(
                n_samples_per_prompt=config.n_samples_per_prompt, dp_size=compute_dp_size(config)
            )
        return tq.GRPOGroupNSampler(n_samples_per_prompt=config.n_samples_per_prompt)

    # --- services -----------------------------------------------------------------------------------------------------

    def register_all_serve(self) -> None:
        """Deploy every role at once, then start their loops."""
        import ray

        from relax.components.actor import Actor
        from relax.components.rollout import Rollout

        config = self.config
        roles: list[tuple[str, type, int]] = [("rollout", Rollout, 0), ("actor", Actor, config.world_size)]
        if config.fully_async and not config.hybrid:
            from relax.components.actor_fwd import ActorFwd
            from relax.components.advantages import Advantages

            roles.append(("advantages", Advantages, 0))
            if not config.true_on_policy_mode:
                roles.append(("actor_fwd", ActorFwd, 1))
        for role, cls, num_gpus in roles:
            self.serve_dict[role] = Service(cls, role, None, config, num_gpus, runtime_env=self.runtime_env)
        self.rollout_manager = ray.get(self.serve_dict["rollout"].handle.get_rollout_manager.remote())
        for role in self.serve_dict:
            self._run(role)
        if NEW:
            relax.utils.report_train_start(config)

    def _run(self, role: str) -> None:
        handle = self.serve_dict[role].handle
        if role == "actor":
            forward = self.serve_dict.get("actor_fwd")
            self._runs[role] = handle.run.remote(self.rollout_manager, forward.handle if forward else None)
        else:
            self._runs[role] = handle.run.remote()

    # --- watch --------------------------------------------------------------------------------------------------------

    def _start_health_check(self) -> None:
        self._health = threading.Thread(target=self._health_loop, name="health-check", daemon=True)
        self._health.start()

    def _health_loop(self) -> None:
        import ray

        while self._runs and not self._finished.is_set():
            by_ref = {ref: role for role, ref in self._runs.items()}
            done, _ = ray.wait(list(by_ref), num_returns=1, timeout=self.config.health_check_interval)
            for ref in done:
                role = by_ref[ref]
                try:
                    ray.get(ref)
                    del self._runs[role]
                except Exception as exc:
                    self._failed(role, exc)
                    return
        self._finished.set()

    def _failed(self, role: str, exc: BaseException) -> None:
        """Start anew, with a watch of its own, or end the job."""
        record.write(self.config, "failure", role=role, error=type(exc).__name__)
        if self.config.use_fault_tolerance:
            try:
                self._global_restart()
                return
            except BaseException as again:
                exc = again
        self._failure = exc
        self._finished.set()

    def _global_restart(self) -> None:
        """On the health-check thread: everything down, Ray too, then the constructor once more in this process."""
        import ray

        for service in self.serve_dict.values():
            service.stop()
        tq.close()
        stop_async_loop()
        ray.shutdown()
        time.sleep(1)
        start_ray(self.runtime_env)
        if self.config.save:
            step = checkpoint.latest(self.config.save, self.config.world_size)
            if step:
                self.config.load, self.config.start_rollout_id = self.config.save, step
        record.write(self.config, "restart", step=self.config.start_rollout_id)
        self.__init__(self.config, self.runtime_env)  # type: ignore[misc]

    def training_loop(self) -> None:
        """Wait for the end of the job.

        Raises:
            Exception: the failure of a role, where the job does not recover from it.
        """
        while not self._finished.is_set():  # a restarted job has an event of its own
            time.sleep(0.1)
        if self._failure is not None:
            raise self._failure

    def shutdown(self) -> None:
        """Stops what the services started; the data system is left to the end of the process."""
        import ray

        self._finished.set()
        try:
            ray.get(self.rollout_manager.dispose.remote(), timeout=5)
        except Exception as exc:
            logger.warning("the rollout manager was not disposed of: %s", type(exc).__name__)


def start_ray(runtime_env: dict[str, Any]) -> None:
    """Join the Ray of ``RAY_ADDRESS``, or start one on loopback."""
    import ray

    if os.environ.get("RAY_ADDRESS"):
        ray.init(runtime_env=runtime_env, log_to_driver=False)
        return
    ray.init(
        address="local",
        runtime_env=runtime_env,
        log_to_driver=False,
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=128 << 20,
        _node_ip_address="127.0.0.1",
    )
