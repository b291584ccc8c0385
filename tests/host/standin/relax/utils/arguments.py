"""The host's command line: Megatron's parser, the host's groups, and a validation that completes the namespace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import yaml

from relax.standin.line import NEW, WITH
from relax_tq_rdma.demo.model import POSITIONS

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
DEFAULT_ROLLOUT = "relax.engine.rollout.sglang_rollout.generate_rollout"

if NEW:
    # The public releases are older than what the newest host asks for.
    _MIN_TQ_VERSION = "0.1.10"
    _TQ_UPGRADE_CMD = "pip install -U TransferQueue"

    def check_transfer_queue_version() -> None:
        """Raises ``ImportError`` when TransferQueue is absent, ``RuntimeError`` when it is too old."""
        from packaging.version import Version

        try:
            installed = metadata.version("transferqueue")
        except metadata.PackageNotFoundError:
            raise ImportError(f"transferqueue is not installed: {_TQ_UPGRADE_CMD}") from None
        if Version(installed) < Version(_MIN_TQ_VERSION):
            raise RuntimeError(f"transferqueue {installed} is older than {_MIN_TQ_VERSION}: {_TQ_UPGRADE_CMD}")


def get_slime_extra_args_provider(add_custom_arguments: Provider | None = None) -> Provider:
    """The host's groups as one function over a parser; custom arguments come first."""

    def add_slime_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        def add_serve_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.add_argument("--fully-async", action="store_true", default=False)
            parser.add_argument("--hybrid", action="store_true", default=False)
            parser.add_argument("--colocate", action="store_true", default=False)
            return parser

        def add_transfer_queue_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.add_argument("--num-data-storage-units", type=int, default=1)
            parser.add_argument("--per-rank-fetch", action="store_true", default=False)
            parser.add_argument("--max-staleness", type=int, default=0)
            parser.add_argument("--polling-mode", type=bool, default=True)
            parser.add_argument("--num-iters-per-train-update", type=int, default=1)
            if "pr256" in WITH:
                parser.add_argument("--tq-rdma-mode", choices=["off", "auto", "required"], default="off")
                parser.add_argument("--tq-rdma-device", default="")
            return parser

        def add_cluster_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.add_argument("--actor-num-nodes", type=int, default=1)
            parser.add_argument("--actor-num-gpus-per-node", type=int, default=1)
            parser.add_argument("--offload", action="store_true", default=False)
            parser.add_argument("--offload-train", action="store_true", default=False)
            parser.add_argument("--offload-rollout", action="store_true", default=False)
            return parser

        def add_train_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.add_argument("--train-env-vars", type=json.loads, default={})
            parser.add_argument("--use-dynamic-batch-size", action="store_true", default=False)
            parser.add_argument("--max-tokens-per-gpu", type=int, default=4096)
            parser.add_argument("--use-routing-replay", action="store_true", default=False)
            parser.add_argument("--use-rollout-routing-replay", action="store_true", default=False)
            parser.add_argument("--custom-megatron-before-train-step-hook-path", default=None)
            return parser

        def add_rollout_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.add_argument("--rollout-function-path", default=DEFAULT_ROLLOUT)
            parser.add_argument("--eval-function-path", default=None)
            parser.add_argument("--eval-interval", type=int, default=None)
            parser.add_argument("--n-samples-per-eval-prompt", type=int, default=1)
            parser.add_argument("--custom-generate-function-path", default=None)
            parser.add_argument("--custom-convert-samples-to-train-data-path", default=None)
            parser.add_argument("--partial-rollout", action="store_true", default=False)
            parser.add_argument("--over-sampling-batch-size", type=int, default=None)
            parser.add_argument("--rollout-max-response-len", type=int, default=POSITIONS)
            parser.add_argument("--mm-processor-pool-size", type=int, default=0)
            parser.add_argument("--use-agentic-rollout", action="store_true", default=False)
            return parser

        def add_fault_tolerance_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.add_argument("--use-fault-tolerance", action="store_true", default=False)
            parser.add_argument("--health-check-interval", type=float, default=0.5)
            return parser

        def add_data_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.add_argument("--num-rollout", type=int, default=2)
            parser.add_argument("--start-rollout-id", type=int, default=0)
            parser.add_argument("--rollout-batch-size", type=int, default=None)
            parser.add_argument("--n-samples-per-prompt", type=int, default=4)
            parser.add_argument("--multimodal-keys", type=json.loads, default=None)
            default = "relax.engine.rollout.data_source.RolloutDataSourceWithBuffer"
            parser.add_argument("--data-source-path", default=default)
            parser.add_argument("--balance-data", action="store_true", default=False)
            return parser

        def add_standin_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            """What only the stand-in has."""
            parser.add_argument("--standin-results", default=None, help="JSON lines: one record a step and role")
            parser.add_argument("--standin-image-max-tokens", type=int, default=64)
            parser.add_argument("--standin-token-seconds", type=float, default=0.0)
            parser.add_argument("--standin-wait-seconds", type=float, default=120.0, help="limit of every wait")
            return parser

        if add_custom_arguments is not None:
            parser = add_custom_arguments(parser)
        for add in (
            add_serve_arguments,
            add_transfer_queue_arguments,
            add_cluster_arguments,
            add_train_arguments,
            add_rollout_arguments,
            add_fault_tolerance_arguments,
            add_data_arguments,
            add_standin_arguments,
        ):
            parser = add(parser)
        parser.add_argument("--custom-config-path", default=None)
        return parser

    return add_slime_arguments


def _pre_parse_mode() -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--debug-rollout-only", action="store_true", default=False)
    parser.add_argument("--debug-train-only", action="store_true", default=False)
    return parser.parse_known_args()[0]


def _sglang_parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--sglang-server-concurrency", type=int, default=512)
    return parser.parse_known_args()[0]


def _parse(add_custom_arguments: Provider | None) -> argparse.Namespace:
    from relax.backends.megatron.arguments import megatron_parse_args, megatron_validate_args

    merged = [_pre_parse_mode(), _sglang_parse_args()]
    args = megatron_parse_args(extra_args_provider=get_slime_extra_args_provider(add_custom_arguments))
    for part in merged:
        for name, value in vars(part).items():
            setattr(args, name, value)
    slime_validate_args(args)
    if not args.debug_rollout_only:
        args = megatron_validate_args(args)
    if NEW and args.fully_async:
        check_transfer_queue_version()
    return args


def parse_args(add_custom_arguments: Provider | None = None) -> argparse.Namespace:
    """Parse and validate ``sys.argv``."""
    return _parse_args_impl(add_custom_arguments) if NEW else _parse(add_custom_arguments)


if NEW:

    def _parse_args_impl(
        add_custom_arguments: Provider | None = None, *, model_source: Any = None
    ) -> argparse.Namespace:
        return _parse(add_custom_arguments)


def slime_validate_args(args: argparse.Namespace) -> None:
    """Complete and check in place."""
    if args.fully_async and args.colocate:
        raise ValueError("--fully-async and --colocate exclude each other; --hybrid is both")
    if args.hybrid:
        args.fully_async = args.colocate = True
    if args.offload:
        args.offload_train = args.offload_rollout = True
    del args.offload

    if args.rollout_batch_size is None:
        if args.global_batch_size is None:
            raise ValueError("--rollout-batch-size or --global-batch-size is needed")
        args.rollout_batch_size = args.global_batch_size // args.n_samples_per_prompt
    rows = args.rollout_batch_size * args.n_samples_per_prompt
    if args.global_batch_size is None:
        args.global_batch_size = rows
    if rows % args.global_batch_size:
        raise ValueError(f"{rows} rows a rollout are not a multiple of --global-batch-size {args.global_batch_size}")
    args.true_on_policy_mode = args.fully_async and not args.hybrid and rows == args.global_batch_size

    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    if args.over_sampling_batch_size < args.rollout_batch_size:
        raise ValueError("--over-sampling-batch-size is below --rollout-batch-size")
    if args.partial_rollout and args.use_rollout_routing_replay:
        raise ValueError("--partial-rollout and --use-rollout-routing-replay exclude each other")
    args.use_routing_replay = args.use_routing_replay or args.use_rollout_routing_replay
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.use_agentic_rollout:
        args.rollout_function_path = args.eval_function_path = "relax.agentic.rollout.generate_rollout"
    if args.custom_config_path:
        _apply_custom_config(args)


def _apply_custom_config(args: argparse.Namespace) -> None:
    """Every top-level key of the YAML file becomes an attribute, also one that no flag knows."""
    with open(args.custom_config_path) as file:
        for name, value in (yaml.safe_load(file) or {}).items():
            if hasattr(args, name):
                print(f"custom config overrides {name}", file=sys.stderr)
            setattr(args, name, value)
