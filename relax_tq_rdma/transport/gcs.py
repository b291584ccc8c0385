"""Ray's control service (GCS). Where it is gone every call to Ray blocks, and after a minute Ray aborts the caller."""

from __future__ import annotations

from relax_tq_rdma.transport import address

ANSWER_SECONDS = 2.0


def why_silent() -> str:
    """Why the control service of the cluster this process is connected to cannot be called; empty when it can."""
    import ray

    if not ray.is_initialized():
        return "this process is not connected to Ray"
    # What this process was told when it connected: no call is made for it.
    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    return address.dial(address.HostPort(host.strip("[]"), int(port)), ANSWER_SECONDS)
