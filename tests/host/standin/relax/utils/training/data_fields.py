"""Which columns a consumer asks for."""

from __future__ import annotations

from argparse import Namespace

from relax.standin.line import NEW


def build_data_fields(args: Namespace, *, consumer: str = "actor") -> list[str]:
    """Fields of a whole rollout: of the trainer in colocate, of ``advantages`` in fully-async."""
    fields = ["tokens", "total_lengths", "response_lengths", "loss_masks", "rollout_log_probs", "rewards"]
    fields += ["sample_indices", "sample_index_mask_sums", "group_index"] if NEW else ["raw_reward"]
    if consumer == "actor":
        fields += ["raw_reward"] if NEW else ["sample_indices"]
        if args.multimodal_keys is not None:
            fields.append("multimodal_train_inputs")
        if args.use_rollout_routing_replay:
            fields.append("rollout_routed_experts")
    elif not args.true_on_policy_mode:
        fields.append("log_probs")
    return fields
