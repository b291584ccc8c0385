"""A column whose rows lie side by side, as one jagged tensor without a copy (RFC §4.6, L5b).

Upstream copies the rows of each get a second time, into a nested tensor: half the time of such a get (measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from relax_tq_rdma.payload.encode import ordinary_memory


def jagged_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The rows as one ``torch.jagged`` nested tensor over the memory they lie in.

    Args:
        tensors: dense CPU tensors of at least one dimension.

    Returns:
        What ``torch.nested.as_nested_tensor(tensors, layout=torch.jagged)`` returns, over values whose storage is these
        rows' bytes and no more; ``None`` when the rows do not lie side by side in one storage, or differ in dtype or in
        a dimension after the first.
    """
    if not tensors or not all(map(_is_plain, tensors)):
        return None
    first = tensors[0]
    if any(row.dtype != first.dtype or row.shape[1:] != first.shape[1:] for row in tensors):
        return None
    storage = first.untyped_storage()
    if any(row.untyped_storage().data_ptr() != storage.data_ptr() for row in tensors):
        return None
    if any(row.storage_offset() + row.numel() != after.storage_offset() for row, after in pairwise(tensors)):
        return None
    nbytes = sum(row.nbytes for row in tensors)
    if not nbytes:
        return None
    start = first.storage_offset() * first.itemsize
    whole = ordinary_memory(0).set_(storage)
    values = torch.from_numpy(whole.numpy()[start : start + nbytes]).view(first.dtype).view(-1, *first.shape[1:])
    lengths = [row.shape[0] for row in tensors]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device="cpu")
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )
    return nested


def _is_plain(row: torch.Tensor) -> bool:
    return (
        not row.is_nested
        and row.layout is torch.strided
        and row.is_cpu
        and row.dim() >= 1
        and row.is_contiguous()
        and not (row.requires_grad or row.is_conj() or row.is_neg())
    )
