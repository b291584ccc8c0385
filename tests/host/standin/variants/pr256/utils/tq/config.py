"""Backend section of the TransferQueue config."""

from __future__ import annotations

from argparse import Namespace


def validate_config(args: Namespace) -> list[str]:
    """What is wrong with the flags, in words."""
    return [] if args.tq_rdma_mode in ("off", "auto") else ["--tq-rdma-mode required: this stand-in has no RDMA"]


def build_simple_storage_config(total_storage_size: int | None, num_data_storage_units: int) -> dict[str, object]:
    storage: dict[str, object] = {"num_data_storage_units": num_data_storage_units}
    if total_storage_size is not None:
        storage["total_storage_size"] = total_storage_size
    return {"storage_backend": "SimpleStorage", "SimpleStorage": storage}
