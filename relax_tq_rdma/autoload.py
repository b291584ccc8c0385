"""Import this module and the process is ready: for those who cannot start their job with ``relax-tq-rdma train``.

As the value of the host's ``RELAX_TELEMETRY_HOOK`` it gives the driver the plugin's flags; as the one line of a
``.pth`` file it also makes every worker ready, whoever started Ray (``docs/relax.md``). A failure is a line on stderr:
neither Python nor the host would tell more of it.
"""

from __future__ import annotations

import sys


def _load() -> None:
    from relax_tq_rdma.install import install
    from relax_tq_rdma.seams.relax_arguments import RelaxArguments
    from relax_tq_rdma.seams.taken import TakenSeams

    install()
    # Whether there is a host is not asked: when a .pth file is read, the path is not complete yet.
    TakenSeams().take_when_imported(RelaxArguments(then=install))


try:
    _load()
except Exception as exc:
    sys.relax_tq_rdma_hook_failed = f"{type(exc).__name__}: {exc}"  # type: ignore[attr-defined]
    print(f"[dataplane] ERROR relax-tq-rdma was not loaded ({type(exc).__name__}: {exc})", file=sys.stderr, flush=True)
