"""The newest host's sampler: rows go to DP ranks by sample, so members of one group are trained on different ranks.

The host balances by length over whatever is ready; here a row's rank is its sample index modulo the number of ranks, so
that a run does not depend on which row was ready first.
"""

from __future__ import annotations

from typing import Any, Literal

from transfer_queue import BaseSampler


class IdentityWindowSampler(BaseSampler):
    def __init__(
        self,
        dp_size: int,
        placement: Literal["streaming", "balanced", "sequential"],
        balance_unit_multiplier: int = 1,
    ) -> None:
        super().__init__()
        self.dp_size, self.placement, self.balance_unit_multiplier = dp_size, placement, balance_unit_multiplier

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        partition: Any = None,
        dp_rank: int | None = None,
        batch_index: int | None = None,
        token_budget: int | None = None,
        dp_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """Rows of one request, the same for every rank that repeats it. Only served requests are remembered.

        ``dp_size``: of a role with a layout of its own.
        """
        metas = partition.get_custom_meta(ready_indexes)
        known = [index for index in ready_indexes if "sample_index" in metas.get(index, {})]
        if dp_rank is None or batch_index is None:
            chosen = known[:batch_size] if len(known) >= batch_size else []
            return chosen, chosen
        served = self._states.setdefault(partition_id, {}).setdefault(task_name, {}).setdefault(dp_rank, {})
        if batch_index not in served:
            mine = [index for index in known if metas[index]["sample_index"] % (dp_size or self.dp_size) == dp_rank]
            chosen = self._cut(mine, batch_size, token_budget, metas)
            if not chosen:
                return [], []
            served[batch_index] = chosen
        return served[batch_index], served[batch_index]

    @staticmethod
    def _cut(mine: list[int], batch_size: int, token_budget: int | None, metas: dict[int, Any]) -> list[int]:
        """As many rows as the budget holds, but at least one; without a budget exactly ``batch_size`` or none."""
        if token_budget is None:
            return mine[:batch_size] if len(mine) >= batch_size else []
        chosen: list[int] = []
        tokens = 0
        for index in mine:
            tokens += metas[index]["total_lengths"]
            if chosen and tokens > token_budget:
                break
            chosen.append(index)
        return chosen
