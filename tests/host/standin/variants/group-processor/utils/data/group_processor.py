"""The host's own way to run the image processor once a group (a branch that is not merged)."""

from __future__ import annotations

from typing import Any

from relax.utils.types import Sample


def get_reusable_group_processor_input(samples: list[Sample]) -> tuple[str, dict[str, Any]] | None:
    """Prompt and media of the group when all members have the same, else ``None``."""
    first = samples[0]
    same = all(s.multimodal_inputs is first.multimodal_inputs and s.prompt == first.prompt for s in samples)
    return (first.prompt, first.multimodal_inputs) if same and first.multimodal_inputs else None


def copy_group_processor_output(
    prompt_ids: list[int], mm: dict[str, Any] | None
) -> tuple[list[int], dict[str, Any] | None]:
    """Ids are copied, tensors are shared."""
    return list(prompt_ids), None if mm is None else dict(mm)
