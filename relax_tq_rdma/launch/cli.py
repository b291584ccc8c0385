"""Entry of ``relax-tq-rdma train -- ...``: what ``python -m relax.entrypoints.train ...`` does, with our flags.

Exit codes: those of the host, 2 for wrong flags of ours, 1 when the data plane does not start.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from relax_tq_rdma.errors import UsageError
from relax_tq_rdma.install import install
from relax_tq_rdma.seams import relax_entry
from relax_tq_rdma.seams.base import require
from relax_tq_rdma.seams.relax_arguments import RelaxArguments

USAGE = """\
usage: relax-tq-rdma train -- ARGUMENTS OF RELAX AND FLAGS OF THE PLUGIN

Run a Relax job with the plugin, where python -m relax.entrypoints.train ARGUMENTS would run it without. The flags are
those of relax-tq-rdma doctor --explain-flags; with none of them the job runs as without the plugin. After the --,
--help is the host's, with the plugin's group in it. How to do the same from an entry point of your own: docs/relax.md.
Exit code: the host's; 1 also where the data plane does not start as asked, 2 also for wrong flags of the plugin.
"""


def run(argv: list[str]) -> int:
    """Run the job. The host may end this process by itself.

    Raises:
        UsageError: no arguments, an unknown flag of the plugin's, or flags that cannot go together.
        StartError: there is no Relax here, or it does not fit.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    arguments = argv[1:] if argv[:1] == ["--"] else argv
    if not arguments:
        raise UsageError("no arguments for Relax: relax-tq-rdma train -- ARGUMENTS (see relax-tq-rdma train --help)")
    _as_python_m_would()
    parser = RelaxArguments()
    require((parser,))
    with _imports_of_the_host():
        args = parser.parse(arguments)
    install(args)
    with _imports_of_the_host():
        relax_entry.start(args)
    return 0


@contextmanager
def _imports_of_the_host() -> Iterator[None]:
    """What the host cannot import is told as it would tell it: our own command line takes it for a lack of ours."""
    try:
        yield
    except ImportError:
        traceback.print_exc()
        raise SystemExit(1) from None


def _as_python_m_would() -> None:
    """The working folder on the path, and the entry point's file as the name of the program: Ray looks at it."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    sys.argv[0] = relax_entry.file()
