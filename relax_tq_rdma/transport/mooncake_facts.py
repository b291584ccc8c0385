"""What the installed Mooncake is, found out in a child process.

Importing Mooncake loads native libraries: it can fail for want of a system library, crash, or hang. None of that may
happen to the process that asks, so a child does it, under a deadline.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping

import msgspec

_CODE = """
import json, pathlib, sys
if sys.path[0] == "":
    del sys.path[0]  # the caller's folder, which is not on the caller's own path
from importlib.metadata import PathDistribution
facts = {}
try:
    import mooncake.store as store
    facts["lazy_mount"] = hasattr(store.MooncakeDistributedStore, "allocate_and_mount_segment")
    site = pathlib.Path(store.__file__).resolve().parent.parent
    for info in site.glob("mooncake_transfer_engine*.dist-info"):
        found = PathDistribution(info)
        facts["version"], facts["distribution"] = found.version, found.metadata["Name"]
except Exception as error:
    facts["error"] = f"{type(error).__name__}: {error}"
    facts["module"] = getattr(error, "name", None) or ""
print("\\nrtq-facts " + json.dumps(facts))
"""

_PACKAGES = {
    "libibverbs": "libibverbs1",
    "librdmacm": "librdmacm1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
    "liburing": "liburing2",
    "libstdc++": "libstdc++6",
}
"""Debian package of each system library a wheel loads."""

_INSTALL = "install mooncake-transfer-engine (CUDA) or mooncake-transfer-engine-non-cuda with pip"


class MooncakeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """``problem`` and ``fix`` are empty when it imports. ``lazy_mount``: a segment can be mounted after set-up."""

    version: str = ""
    distribution: str = ""
    lazy_mount: bool = False
    problem: str = ""
    fix: str = ""

    @property
    def release(self) -> tuple[int, ...]:
        """Leading numbers of the version: ``0.3.10.post2`` is ``(0, 3, 10)``; empty when unknown."""
        match = re.match(r"\d+(?:\.\d+)*", self.version)
        return tuple(int(part) for part in match[0].split(".")) if match else ()

    @property
    def has_cuda(self) -> bool:
        return "non-cuda" not in self.distribution


def inspect_mooncake(limit: float, *, first_path: str = "", environ: Mapping[str, str] | None = None) -> MooncakeFacts:
    """Import Mooncake in a child and report.

    Args:
        limit: seconds the child may take.
        first_path: folder to import from first (another unpacked wheel); empty: as this process would.
        environ: the child's environment, this process' own by default.
    """
    # The child sees this process' import path: Ray's working_dir and the like may have changed it.
    entries = [entry or os.getcwd() for entry in sys.path]
    path = os.pathsep.join([first_path, *entries] if first_path else entries)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE],
            env={**(os.environ if environ is None else environ), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return MooncakeFacts(problem=f"import did not finish within {limit:g} s", fix="look for a hung disk or mount")
    except OSError as exc:
        return MooncakeFacts(problem=f"{sys.executable} cannot be started ({exc.strerror})", fix="check the Python")
    line = next((li for li in done.stdout.decode(errors="replace").splitlines() if li.startswith("rtq-facts ")), "")
    if not line:
        return MooncakeFacts(problem=_ended(done.returncode, done.stderr), fix=f"reinstall Mooncake: {_INSTALL}")
    facts = json.loads(line.removeprefix("rtq-facts "))
    if "error" in facts:
        problem, fix = explain_import_error(facts["error"], facts["module"])
        return MooncakeFacts(problem=problem, fix=fix)
    return msgspec.convert(facts, MooncakeFacts)


def explain_import_error(error: str, module: str = "") -> tuple[str, str]:
    """What an import error means to the user, and the way out."""
    library = re.search(r"([\w+.-]+\.so[\w.]*): cannot open shared object file", error)
    if library:
        stem = library[1].partition(".so")[0]
        if stem.startswith(("libcud", "libnv")):
            fix = "install the CUDA runtime, or the mooncake-transfer-engine-non-cuda wheel"
        elif stem in _PACKAGES:
            fix = f"install {_PACKAGES[stem]} (apt-get install {_PACKAGES[stem]})"
        else:
            fix = f"install the system package that ships {library[1]}"
        return f"{library[1]} missing", fix
    if error.startswith("ModuleNotFoundError"):
        if module in ("mooncake", "mooncake.store"):
            where = "is not installed" if module == "mooncake" else "is installed without its store module"
            return f"Mooncake {where} for {sys.executable}", _INSTALL
        return f"Mooncake needs the Python module {module}", f"install {module} with pip"
    return f"import fails: {' '.join(error.split())[:200]}", f"reinstall Mooncake: {_INSTALL}"


def _ended(code: int, stderr: bytes) -> str:
    if code < 0:
        try:
            return f"import crashed with {signal.Signals(-code).name}"
        except ValueError:
            return f"import crashed with signal {-code}"
    last = stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    return f"import ended the process with code {code} ({last[0][:160]})"
