"""The compatibility matrix (RFC §4.7 and design §4) as data: one rule per row, pure, no imports beyond the settings.

``doctor --explain-flags`` prints it and ``docs/reference/compatibility.md`` is generated from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from relax_tq_rdma.errors import UsageError
from relax_tq_rdma.settings import Settings

Verdict = Literal["reject", "warn", "note", "adjust"]
"""``reject``: the job does not start; ``warn``: it starts, but read this; ``note``: a fact; ``adjust``: a value is
ignored."""


@dataclass(frozen=True)
class HostFacts:
    """What the host knows at start. ``None`` means unknown; a rule that needs the fact then stays silent."""

    fully_async: bool | None = None
    hybrid: bool | None = None
    multimodal: bool | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None
    num_data_storage_units: int | None = None
    per_rank_fetch: bool = False
    rollout_routed_experts: bool = False
    samples_per_prompt: int | None = None
    custom_generate: bool = False
    """Pictures do not pass the host's own generate function: a function of the user, or agentic rollout."""
    own_data_plane: bool = False
    """The host decides the backend and attaches its workers by itself, so that the plugin stands aside."""
    own_group_processor: bool = False
    """The host shares the processor's output within a group by itself."""

    @property
    def colocate(self) -> bool:
        """Relax's own ``args.colocate`` is also set by hybrid, so it is derived from the other two (contract §1)."""
        return self.fully_async is False and not self.hybrid

    @property
    def cohort(self) -> int | None:
        """Ranks that read the same rows, TP x PP x CP: how often per-rank fetch reads each of them (RFC §4.5)."""
        sizes = (self.tensor_parallel, self.pipeline_parallel, self.context_parallel)
        return None if None in sizes else math.prod(size for size in sizes if size is not None)


def in_force(settings: Settings, host: HostFacts) -> Settings:
    """What is left of the settings where the host does not use the plugin, or does part of its work by itself."""
    if host.colocate:
        return Settings()
    if host.own_group_processor:
        settings = msgspec.structs.replace(settings, group_share_processor=False)
    if host.own_data_plane:
        return Settings(group_share_processor=settings.group_share_processor)
    return settings


@dataclass(frozen=True)
class Rule:
    """One row of the matrix. ``way_out`` is what the user can type instead; every reject has one.

    ``applies`` is ``None`` for a row that flags alone cannot decide: the probe does, see ``transport.decision``.
    """

    verdict: Verdict
    flags: tuple[str, ...]
    applies: Callable[[Settings, HostFacts], bool] | None
    message: str
    way_out: str
    reference: str


@dataclass(frozen=True)
class Finding:
    """A rule that applies to a job."""

    verdict: Verdict
    flags: tuple[str, ...]
    message: str
    way_out: str
    reference: str

    @property
    def text(self) -> str:
        return f"{self.message}: {self.way_out}" if self.way_out else self.message


def per_rank_wanted(settings: Settings, host: HostFacts) -> bool:
    """Whether this job asks for per-rank fetch of the multimodal field (design §4, RFC §4.5)."""
    if settings.per_rank_fetch in ("on", "off"):
        return settings.per_rank_fetch == "on"
    automatic = settings.per_rank_fetch == "auto" and settings.wants_mooncake and settings.host_staging
    return host.per_rank_fetch or (automatic and host.multimodal is not False)


_DEFAULT = Settings()


def _no_effect(flag: str, setting: str, without: str, idle: Callable[[Settings], bool], reference: str) -> Rule:
    """A flag that only tunes what is not switched on. Given with its default value it cannot be told from not given."""
    return Rule(
        "adjust",
        (flag, without.split()[0]),
        lambda s, h: getattr(s, setting) != getattr(_DEFAULT, setting) and idle(s),
        f"{flag} has no effect without {without}",
        f"add {without} or drop {flag}",
        reference,
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "reject",
        ("--tq-dedup-multimodal", "--tq-normalize-multimodal"),
        lambda s, h: s.dedup_multimodal and not s.normalize_multimodal,
        "--tq-dedup-multimodal needs --tq-normalize-multimodal: put-side dedup works on normalised rows",
        "add --tq-normalize-multimodal or drop --tq-dedup-multimodal",
        "RFC §4.7",
    ),
    Rule(
        "reject",
        ("--tq-transport", "--tq-storage-backend"),
        lambda s, h: s.transport == "rdma" and not s.wants_mooncake,
        "--tq-transport rdma has no meaning with --tq-storage-backend simple",
        "add --tq-storage-backend mooncake or drop --tq-transport rdma",
        "RFC §4.7",
    ),
    Rule(
        "reject",
        ("--tq-use-gdr", "--tq-transport"),
        lambda s, h: s.use_gdr and s.transport == "tcp",
        "--tq-use-gdr cannot work with --tq-transport tcp: GPU memory is only read and written by an RDMA device",
        "add --tq-transport rdma or drop --tq-use-gdr",
        "design §4; upstream mooncake_client.py raises",
    ),
    Rule(
        "reject",
        ("--tq-storage-backend", "--tq-mooncake-master-address", "--tq-mooncake-auto-init"),
        lambda s, h: s.wants_mooncake and not s.mooncake_master_address and s.mooncake_auto_init == "never",
        "--tq-storage-backend mooncake needs a master, and neither --tq-mooncake-master-address nor "
        "--tq-mooncake-auto-init job-owned is given",
        "add --tq-mooncake-master-address HOST:PORT or --tq-mooncake-auto-init job-owned",
        "RFC §4.2.4",
    ),
    Rule(
        "reject",
        ("--tq-mooncake-master-address", "--tq-mooncake-auto-init"),
        lambda s, h: bool(s.mooncake_master_address) and s.mooncake_auto_init == "job-owned",
        "--tq-mooncake-master-address names a running master while --tq-mooncake-auto-init job-owned starts another",
        "drop one of the two flags",
        "RFC §4.2.4",
    ),
    Rule(
        "reject",
        ("--tq-rdma-mode", "--tq-storage-backend"),
        lambda s, h: s.rdma_mode == "required" and not s.wants_mooncake,
        "--tq-rdma-mode required cannot be met with --tq-storage-backend simple",
        "add --tq-storage-backend mooncake --tq-transport rdma or drop --tq-rdma-mode required",
        "RFC §4.2.1",
    ),
    Rule(
        "reject",
        ("--tq-rdma-mode", "--tq-transport", "--tq-storage-backend"),
        None,
        "--tq-rdma-mode required and the probe fails on any node: the job exits with 1 and names nodes and checks",
        "mend the named check, or use --tq-rdma-mode auto to degrade instead",
        "RFC §4.7",
    ),
    Rule(
        "warn",
        ("--tq-use-gdr", "--tq-normalize-multimodal"),
        lambda s, h: s.use_gdr and s.transport == "rdma" and not s.normalize_multimodal,
        "--tq-use-gdr without --tq-normalize-multimodal does nothing for the largest field: it is not a tensor",
        "add --tq-normalize-multimodal",
        "RFC §4.7, F2",
    ),
    Rule(
        "adjust",
        ("--tq-rdma-mode", "--tq-transport"),
        lambda s, h: s.wants_mooncake and s.transport == "rdma" and s.rdma_mode == "off",
        "--tq-rdma-mode off: --tq-transport rdma is ignored, the job uses Mooncake over TCP",
        "add --tq-rdma-mode auto (degrade if need be) or required",
        "RFC §4.7",
    ),
    Rule(
        "note",
        ("--tq-rdma-mode", "--tq-transport"),
        lambda s, h: s.wants_mooncake and s.transport == "tcp" and s.rdma_mode != "off",
        "--tq-rdma-mode with --tq-transport tcp: Mooncake over TCP with the probe's other checks, no RDMA is tried",
        "add --tq-transport rdma to use RDMA",
        "design §4",
    ),
    Rule(
        "adjust",
        ("--tq-rdma-mode", "--tq-storage-backend"),
        lambda s, h: s.rdma_mode == "auto" and not s.wants_mooncake,
        "--tq-rdma-mode auto is ignored with --tq-storage-backend simple",
        "add --tq-storage-backend mooncake",
        "RFC §4.2.1",
    ),
    Rule(
        "adjust",
        ("--tq-rdma-device", "--tq-transport"),
        lambda s, h: bool(s.rdma_devices) and not s.wants_rdma and not (s.transport == "rdma" and not s.wants_mooncake),
        "--tq-rdma-device is ignored: this job does not ask for RDMA",
        "add --tq-storage-backend mooncake --tq-transport rdma --tq-rdma-mode auto",
        "RFC §4.2.1",
    ),
    *(
        _no_effect(
            f"--tq-{setting.replace('_', '-')}",
            setting,
            "--tq-storage-backend mooncake",
            lambda s: not s.wants_mooncake,
            "RFC §4.2.1",
        )
        for setting in ("mooncake_auto_init", "mooncake_master_address", "mooncake_metadata_server", "fallback_backend")
    ),
    Rule(
        "adjust",
        ("--tq-host-staging", "--tq-storage-backend"),
        lambda s, h: s.host_staging and not s.wants_mooncake,
        "--tq-host-staging is ignored with --tq-storage-backend simple: the pool only serves Mooncake",
        "add --tq-storage-backend mooncake",
        "RFC §4.7",
    ),
    Rule(
        "warn",
        ("--tq-batch-bytes-budget", "--tq-normalize-multimodal"),
        lambda s, h: s.batch_bytes_budget > 0 and not s.normalize_multimodal,
        "--tq-batch-bytes-budget without --tq-normalize-multimodal has next to no effect",
        "add --tq-normalize-multimodal",
        "RFC §4.7",
    ),
    _no_effect(
        "--tq-batch-bytes-budget",
        "batch_bytes_budget",
        "--tq-storage-backend mooncake",
        lambda s: not s.wants_mooncake,
        "RFC §4.6",
    ),
    _no_effect(
        "--tq-host-staging-mb", "host_staging_mb", "--tq-host-staging", lambda s: not s.host_staging, "RFC §4.6"
    ),
    _no_effect("--tq-gdr-staging-mb", "gdr_staging_mb", "--tq-use-gdr", lambda s: not s.use_gdr, "RFC §4.2.1"),
    _no_effect(
        "--tq-dedup-share-view",
        "dedup_share_view",
        "--tq-dedup-multimodal",
        lambda s: not s.dedup_multimodal,
        "RFC §4.4",
    ),
    Rule(
        "reject",
        ("--tq-per-rank-fetch", "--tq-host-staging", "--tq-allow-unstaged-per-rank-fetch"),
        lambda s, h: (
            s.wants_mooncake
            and per_rank_wanted(s, h)
            and h.multimodal is not False
            and not s.host_staging
            and not s.allow_unstaged_per_rank_fetch
        ),
        "per-rank fetch of multimodal data with Mooncake but without --tq-host-staging pays every fixed read cost "
        "TP x PP x CP times and may lose",
        "add --tq-host-staging, or confirm with --tq-allow-unstaged-per-rank-fetch, or use --tq-per-rank-fetch off",
        "RFC §4.7, §4.6",
    ),
    Rule(
        "warn",
        ("--tq-per-rank-fetch", "--tq-host-staging", "--tq-allow-unstaged-per-rank-fetch"),
        lambda s, h: (
            s.wants_mooncake
            and per_rank_wanted(s, h)
            and h.multimodal is not False
            and not s.host_staging
            and s.allow_unstaged_per_rank_fetch
        ),
        "per-rank fetch runs without host staging, as confirmed: every fixed read cost is paid TP x PP x CP times",
        "add --tq-host-staging",
        "RFC §4.7, §4.6",
    ),
    Rule(
        "warn",
        ("--tq-per-rank-fetch", "--num-data-storage-units"),
        lambda s, h: (
            not s.wants_mooncake
            and per_rank_wanted(s, h)
            and h.tensor_parallel is not None
            and h.num_data_storage_units is not None
            and h.num_data_storage_units < h.tensor_parallel
        ),
        "per-rank fetch with fewer storage units than TP ranks: the ranks queue at the same units",
        "raise --num-data-storage-units to at least the TP size",
        "RFC §4.5",
    ),
    Rule(
        "adjust",
        ("--tq-allow-unstaged-per-rank-fetch", "--tq-per-rank-fetch"),
        lambda s, h: (
            s.allow_unstaged_per_rank_fetch and (not s.wants_mooncake or s.host_staging or s.per_rank_fetch == "off")
        ),
        "--tq-allow-unstaged-per-rank-fetch has no effect: nothing here needs that confirmation",
        "drop it",
        "RFC §4.7",
    ),
    Rule(
        "adjust",
        ("--tq-per-rank-fetch",),
        lambda s, h: per_rank_wanted(s, h) and h.rollout_routed_experts,
        "per-rank fetch is off: the host cannot combine it with rollout_routed_experts",
        "",
        "RFC §4.5",
    ),
    Rule(
        "note",
        ("--tq-per-rank-fetch", "--tq-dedup-multimodal"),
        lambda s, h: s.dedup_multimodal and s.normalize_multimodal and per_rank_wanted(s, h),
        "per-rank fetch with dedup: a reference into another DP shard is fetched by index, once a process",
        "",
        "RFC §4.7 R5, replaced by design §6",
    ),
    Rule(
        "adjust",
        (),
        lambda s, h: h.colocate and not s.touches_nothing,
        "in colocate mode rollout and trainer take turns on the same GPUs: the plugin is a no-op there, and its flags "
        "have no effect",
        "use fully-async or hybrid mode",
        "RFC §4.7",
    ),
    Rule(
        "adjust",
        (),
        lambda s, h: h.own_data_plane and not h.colocate,
        "this Relax brings an RDMA data plane of its own: relax-tq-rdma stands aside, and of its flags only those that "
        "this Relax has too and --rollout-group-share-processor have an effect",
        "use a Relax without it for the others",
        "docs/relax.md",
    ),
    Rule(
        "adjust",
        ("--rollout-group-share-processor",),
        lambda s, h: h.own_group_processor and s.group_share_processor and not h.colocate,
        "--rollout-group-share-processor has no effect: this Relax shares the processor's output in a group by itself",
        "drop it",
        "docs/relax.md",
    ),
    Rule(
        "adjust",
        ("--rollout-group-share-processor",),
        lambda s, h: s.group_share_processor and (h.custom_generate or h.samples_per_prompt == 1),
        "--rollout-group-share-processor has no effect with a custom generate function, with agentic rollout, or with "
        "one sample a prompt: there is no run of the image processor to share",
        "drop it",
        "RFC §4.4",
    ),
)


def findings(settings: Settings, host: HostFacts | None = None) -> list[Finding]:
    """All rules that apply, rejects first, otherwise in the order of :data:`RULES`."""
    facts = host or HostFacts()
    if facts.own_data_plane:  # flags that this host has too follow its rules, not ours
        settings = Settings(group_share_processor=settings.group_share_processor)
    hits = [
        Finding(rule.verdict, rule.flags, rule.message, rule.way_out, rule.reference)
        for rule in RULES
        if rule.applies is not None and rule.applies(settings, facts)
    ]
    return sorted(hits, key=lambda f: f.verdict != "reject")


def warnings_after_fallback(settings: Settings, host: HostFacts | None = None) -> list[str]:
    """What a job should have been warned of, had it asked for SimpleStorage in the first place."""
    on_simple = msgspec.structs.replace(settings, storage_backend="simple")
    known = findings(settings, host)
    return [f.text for f in findings(on_simple, host) if f.verdict == "warn" and f not in known]


def check(settings: Settings, host: HostFacts | None = None) -> list[Finding]:
    """Validate a job's flags before anything starts.

    Returns:
        The findings that do not stop the job (warn, note, adjust).

    Raises:
        UsageError: at least one rule rejects; the message names the flags and the way out, one line a rule.
    """
    hits = findings(settings, host)
    rejects = [f.text for f in hits if f.verdict == "reject"]
    if rejects:
        raise UsageError("\n".join(rejects))
    return hits
