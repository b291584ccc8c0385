"""The guest's kernel and first file system: built once from Debian's packages, kept with checksums, used whole or not.

The kernel package is downloaded and unpacked, never installed. A build happens beside and is renamed when it is done,
so a build that was cut short is never used; the next one removes what it left.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.softroce import host
from scripts.softroce.host import Unavailable

HERE = Path(__file__).resolve().parent
INIT = HERE / "guest" / "init"

MODULES = (
    "crc32_generic",  # rxe computes its checksums with it and does not name it as a dependency
    "9pnet_virtio",
    "9p",
    "virtio_pci",
    "virtio_net",
    "virtio_rng",
    "overlay",
    "veth",
    "dummy",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
)
_DOWNLOAD_SECONDS = 600
_TOOL_SECONDS = 120
_MANIFEST = "manifest.json"
_PART = "build-"


@dataclass(frozen=True)
class Image:
    """Files of one build."""

    kernel: Path
    initrd: Path
    package: str


def ensure(cache: Path, say: Callable[[str], None]) -> Image:
    """The image, from the cache when it is whole and its inputs are the same, else built now.

    A newer kernel that cannot be had is no reason to do without the one that is there.

    Args:
        cache: folder of images, of which this command has its :func:`~scripts.softroce.host.turn`.
        say: takes one line of progress.

    Raises:
        Unavailable: the kernel package cannot be had, or there is no room for the image.
    """
    package = kernel_package()
    current = cache / "image"
    problem = what_is_wrong(current, package)
    if problem:
        say(f"building the guest: {problem}")
        for leftover in cache.glob(f"{_PART}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            with tempfile.TemporaryDirectory(dir=cache, prefix=_PART) as part:
                made = _build(Path(part), package, say)
                shutil.rmtree(current, ignore_errors=True)
                made.rename(current)
        except (OSError, Unavailable) as exc:
            if what_is_wrong(current, package=""):
                raise (
                    exc if isinstance(exc, Unavailable) else Unavailable(f"the guest cannot be built: {exc}")
                ) from None
            say(f"going on with the kernel that is there: {exc}")
    manifest = json.loads((current / _MANIFEST).read_text())
    return Image(current / "vmlinuz", current / "initrd.gz", manifest["package"])


def what_is_wrong(folder: Path, package: str) -> str:
    """Why the image in ``folder`` cannot be used; empty when it can.

    Args:
        folder: of one image.
        package: the kernel package that a build would take now; empty: not known, the one that was taken will do.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["inputs"] != inputs():
            return "what it is made of has changed"
        if package and manifest["package"] != package:
            return f"there is a newer kernel, {package}"
        broken = [name for name, digest in manifest["files"].items() if _digest(folder / name) != digest]
        return f"{', '.join(broken)} was damaged" if broken else ""
    except FileNotFoundError:
        return "there is none yet"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "the one that is there cannot be read"


def inputs() -> str:
    """Digest of everything but the kernel that decides what the image holds."""
    busybox = host.find("busybox")
    parts = [Path(__file__), INIT, *([Path(busybox)] if busybox else [])]
    return hashlib.sha256("".join(_digest(part) for part in parts).encode()).hexdigest()


def kernel_package() -> str:
    """``name=version`` of the kernel that Debian installs by default; empty when no package list is there."""
    shown = _run(["apt-cache", "show", "--no-all-versions", "linux-image-amd64"], check=False)
    found = re.search(r"^Depends: .*?(linux-image-[0-9]\S*) \(= (\S+)\)", shown, re.MULTILINE)
    return f"{found[1]}={found[2]}" if found else ""


def _build(part: Path, package: str, say: Callable[[str], None]) -> Path:
    try:
        deb = _download(part, package, say)
    except Unavailable:  # package lists are empty on a fresh machine, and name a kernel that is gone on an old one
        say("fetching apt's package lists")
        host.update_package_lists()
        package = kernel_package()
        deb = _download(part, package, say)
    tree, made = part / "kernel", part / "image"
    _run(["dpkg", "-x", str(deb), str(tree)], seconds=_DOWNLOAD_SECONDS)
    made.mkdir()
    shutil.copy(next((tree / "boot").glob("vmlinuz-*")), made / "vmlinuz")
    _make_initrd(part / "initrd", tree, made / "initrd.gz")
    files = {name: _digest(made / name) for name in ("vmlinuz", "initrd.gz")}
    manifest = {"inputs": inputs(), "package": package, "files": files}
    (made / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    return made


def _download(part: Path, package: str, say: Callable[[str], None]) -> Path:
    if not package:
        raise Unavailable("apt knows no package linux-image-amd64: run 'sudo apt-get update' on a Debian system")
    say(f"downloading {package} (70 MB, unpacked here and not installed)")
    _run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package], cwd=part, seconds=_DOWNLOAD_SECONDS)
    deb = next(iter(part.glob("*.deb")), None)
    if deb is None:
        raise Unavailable(f"apt-get download {package} brought nothing: run 'sudo apt-get update' and try again")
    return deb


def _make_initrd(folder: Path, tree: Path, target: Path) -> None:
    for name in ("bin", "modules", "proc", "sys", "dev", "lower", "upper", "new"):
        (folder / name).mkdir(parents=True)
    shutil.copy(INIT, folder / "init")
    (folder / "init").chmod(0o755)
    shutil.copy(host.find("busybox") or "busybox", folder / "bin" / "busybox")
    modules = _modules(tree)
    for module in modules:
        shutil.copy(module, folder / "modules")
    (folder / "modules" / "order").write_text("".join(f"{module.name}\n" for module in modules))
    names = "".join(f"{path.relative_to(folder)}\n" for path in sorted(folder.rglob("*")))
    archive = subprocess.run(
        [host.find("cpio") or "cpio", "--create", "--format=newc", "--quiet", "--owner=0:0"],
        cwd=folder,
        input=names.encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=_TOOL_SECONDS,
    ).stdout
    target.write_bytes(gzip.compress(archive, compresslevel=1, mtime=0))


def _modules(tree: Path) -> list[Path]:
    """The wanted modules with what they depend on, in load order."""
    version = next((tree / "lib" / "modules").iterdir()).name
    _run([host.find("depmod") or "depmod", "-b", str(tree), version])
    order: dict[Path, None] = {}
    for name in MODULES:
        modprobe = [host.find("modprobe") or "modprobe", "-d", str(tree), "-S", version, "--show-depends", name]
        for line in _run(modprobe).splitlines():
            found = re.match(r"insmod (.+\.ko(?:\.[a-z]+)?)", line)  # the path may have spaces, options may follow
            if found:
                order[Path(found[1])] = None
    return list(order)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(command: list[str], *, cwd: Path | None = None, seconds: float = _TOOL_SECONDS, check: bool = True) -> str:
    """Output of a command.

    Raises:
        Unavailable: it is missing or failed, and ``check`` is true.
    """
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as exc:
        if check:
            raise Unavailable(f"the guest cannot be built: {exc}") from None
        return ""
    if check and done.returncode:
        raise Unavailable(f"the guest cannot be built: '{' '.join(command)}' failed: {done.stderr.strip()[-300:]}")
    return done.stdout
