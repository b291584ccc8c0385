"""What is measured: one case is one way of a batch from producer to consumer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Backend = Literal["mooncake", "simple"]
Form = Literal["values", "dicts", "jagged"]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One way.

    Attributes:
        form: ``values`` is the store's raw binding on one buffer; ``dicts`` one dict of tensors a row, as the host has
            them; ``jagged`` one nested tensor a key.
        settings: of the plugin; ``None`` means TransferQueue's own manager and client, without the plugin.
        needs_copies: only makes sense where a group's rows are equal.
    """

    name: str
    backend: Backend
    form: Form = "dicts"
    settings: dict[str, Any] | None = None
    needs_copies: bool = False

    def asks(self, layer: str) -> bool:
        """Whether a setting of the plugin is on."""
        return bool((self.settings or {}).get(layer))


_L2 = {"normalize_multimodal": True}
_L3B = {**_L2, "dedup_multimodal": True}
_SHARE = {**_L3B, "dedup_share_view": True}
_L5 = {"host_staging": True}

CASES: tuple[Case, ...] = (
    Case(name="engine", backend="mooncake", form="values"),
    Case(name="mooncake_dict", backend="mooncake"),
    Case(name="mooncake_jagged", backend="mooncake", form="jagged"),
    Case(name="mooncake_l2", backend="mooncake", settings=_L2),
    Case(name="mooncake_l2_l5", backend="mooncake", settings={**_L2, **_L5}),
    Case(name="mooncake_l2_l3b", backend="mooncake", settings=_L3B, needs_copies=True),
    Case(name="mooncake_l2_l3b_share", backend="mooncake", settings=_SHARE, needs_copies=True),
    Case(name="mooncake_l2_l3b_l5", backend="mooncake", settings={**_L3B, **_L5}, needs_copies=True),
    Case(name="mooncake_l2_l3b_share_l5", backend="mooncake", settings={**_SHARE, **_L5}, needs_copies=True),
    Case(name="simple_dict", backend="simple"),
    Case(name="simple_l2", backend="simple", settings=_L2),
    Case(name="simple_l2_l3b", backend="simple", settings=_L3B, needs_copies=True),
    Case(name="simple_l2_l3b_share", backend="simple", settings=_SHARE, needs_copies=True),
)
NAMES = tuple(case.name for case in CASES)


def chosen(names: Sequence[str], backends: Sequence[str], copies: int) -> list[Case]:
    """The cases to run, in the order of :data:`CASES`; no names means all that fit."""
    return [
        case
        for case in CASES
        if (not names or case.name in names)
        and (not backends or case.backend in backends)
        and (copies > 1 or not case.needs_copies)
    ]
