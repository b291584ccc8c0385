"""The guest runner without a guest: what counts as passed, when an image is used, and what ends with the command."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.softroce import __main__, guest, host, image, results
from scripts.softroce.guest import Guest, Place

ROOT = Path(__file__).resolve().parents[2]
JUNIT = '<testsuites><testsuite tests="{tests}" failures="{failed}" errors="0" skipped="{skipped}"/></testsuites>'


def share(
    tmp_path: Path, *, tests: int = 5, failed: int = 0, skipped: int = 1, packets: tuple[int, ...] = (0, 900)
) -> Path:
    (tmp_path / "junit.xml").write_text(JUNIT.format(tests=tests, failed=failed, skipped=skipped))
    lines = [json.dumps({"rung": "rdma", "bytes": 1, "packets": each}) for each in packets]
    (tmp_path / results.WIRE_LOG).write_text("\n".join(lines))
    return tmp_path


def test_a_run_that_passed_says_so_with_its_packets(tmp_path: Path) -> None:
    found = results.read(share(tmp_path), 0, wire=True)
    assert found.problem == ""
    assert str(found) == "4 passed, 0 failed, 1 skipped; RDMA counters grew in 1 transfers, by 900 packets"


@pytest.mark.parametrize(
    ("rc", "content", "problem"),
    [
        (None, {}, "pytest did not end in the guest"),
        (1, {"failed": 2}, "2 tests failed"),
        (5, {}, "pytest ended with exit status 5"),
        (0, {"tests": 3, "skipped": 3}, "no test ran"),
        (0, {"packets": (0, 0)}, "no RDMA counter grew, so nothing was proven"),
        (0, {"packets": ()}, "no RDMA counter grew, so nothing was proven"),
    ],
)
def test_nothing_passes_by_accident(tmp_path: Path, rc: int | None, content: dict[str, int], problem: str) -> None:
    assert results.read(share(tmp_path, **content), rc, wire=True).problem == problem


def test_a_line_that_was_cut_short_is_no_transfer(tmp_path: Path) -> None:
    with (share(tmp_path) / results.WIRE_LOG).open("a") as log:
        log.write('\n{"rung": "rdma", "by')
    assert (results.read(tmp_path, 0, wire=True).grown, results.read(tmp_path, 0, wire=True).packets) == (1, 900)


def test_a_guest_that_left_nothing_has_failed(tmp_path: Path) -> None:
    assert results.read(tmp_path, 0, wire=True).problem == "pytest left no results in the guest"


def test_a_chosen_test_need_not_move_bytes(tmp_path: Path) -> None:
    assert results.read(share(tmp_path, packets=()), 0, wire=False).problem == ""


def whole_image(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    files = {"vmlinuz": b"kernel", "initrd.gz": b"files"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    digests = {name: image._digest(folder / name) for name in files}
    manifest = {"inputs": image.inputs(), "package": "linux-image-1=1", "files": digests}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def built(tmp_path: Path) -> Path:
    return whole_image(tmp_path)


@pytest.mark.parametrize("package", ["linux-image-1=1", ""])
def test_a_whole_image_is_used_again(built: Path, package: str) -> None:
    assert image.what_is_wrong(built, package) == ""


def test_an_image_is_built_again_when_it_or_its_inputs_changed(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert image.what_is_wrong(built, "linux-image-2=1") == "there is a newer kernel, linux-image-2=1"
    with monkeypatch.context() as patch:
        patch.setattr(image, "inputs", lambda: "other")
        assert image.what_is_wrong(built, "") == "what it is made of has changed"
    (built / "vmlinuz").write_bytes(b"half a ker")
    assert image.what_is_wrong(built, "") == "vmlinuz was damaged"
    (built / "vmlinuz").unlink()
    assert image.what_is_wrong(built, "") != ""
    (built / "manifest.json").write_text('{"inputs": ')
    assert image.what_is_wrong(built, "") == "the one that is there cannot be read"
    assert image.what_is_wrong(tmp_path_factory.mktemp("empty"), "") == "there is none yet"


def test_a_newer_kernel_that_cannot_be_had_leaves_the_old_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(part: Path, package: str, say: object) -> Path:
        raise image.Unavailable("no network")

    whole_image(tmp_path / "image")
    monkeypatch.setattr(image, "kernel_package", lambda: "linux-image-2=2")
    monkeypatch.setattr(image, "_build", fail)
    said: list[str] = []
    assert image.ensure(tmp_path, said.append).package == "linux-image-1=1"
    assert said[-1] == "going on with the kernel that is there: no network"
    (tmp_path / "image" / "vmlinuz").write_bytes(b"half a ker")
    with pytest.raises(image.Unavailable, match="no network"):
        image.ensure(tmp_path, said.append)


def test_a_build_that_fails_leaves_no_image_and_the_next_one_removes_its_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(part: Path, package: str, say: object) -> Path:
        (part / "half").touch()
        raise image.Unavailable("no network")

    (tmp_path / "build-of-a-killed-run").mkdir()
    monkeypatch.setattr(image, "kernel_package", lambda: "linux-image-1=1")
    monkeypatch.setattr(image, "_build", fail)
    with pytest.raises(image.Unavailable, match="no network"):
        image.ensure(tmp_path, lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(part: Path, package: str, say: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(part / "vmlinuz"))

    monkeypatch.setattr(image, "kernel_package", lambda: "linux-image-1=1")
    monkeypatch.setattr(image, "_build", fail)
    with pytest.raises(image.Unavailable, match=r"the guest cannot be built: .*No space left on device.*vmlinuz"):
        image.ensure(tmp_path, lambda line: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "listed", ["", "linux-image-1=1"], ids=["no package lists", "lists name a kernel that is gone"]
)
def test_a_kernel_that_cannot_be_had_is_asked_for_once_more_with_fresh_lists(
    listed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[list[str]] = []

    def run(command: list[str], **more: object) -> str:
        done.append(command)
        if "download" in command and command[-1] != "linux-image-2=2":
            raise image.Unavailable("404  Not Found")
        if "dpkg" in command:
            raise image.Unavailable("far enough")
        if "download" in command:
            (tmp_path / "linux-image-2.deb").touch()
        return ""

    monkeypatch.setattr(image, "_run", run)
    monkeypatch.setattr(host, "update_package_lists", lambda: done.append(["update"]))
    monkeypatch.setattr(image, "kernel_package", lambda: "linux-image-2=2")
    with pytest.raises(image.Unavailable, match="far enough"):
        image._build(tmp_path, listed, lambda line: None)
    asked = [command[-1] for command in done if command[-1] == "update" or "download" in command]
    assert asked == [*([listed] if listed else []), "update", "linux-image-2=2"]


def test_modules_are_found_in_a_folder_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "a clone, of mine"
    folder = tree / "lib" / "modules" / "6.1.0-1-amd64"
    folder.mkdir(parents=True)
    shown = {
        "rdma_rxe": f"insmod {folder}/ib_core.ko \ninsmod {folder}/rdma_rxe.ko \n",
        "overlay": f"builtin overlay\ninsmod {folder}/ib_core.ko\ninsmod {folder}/overlay.ko.xz metacopy=on\n",
    }
    monkeypatch.setattr(image, "MODULES", tuple(shown))
    monkeypatch.setattr(image, "_run", lambda command: shown.get(command[-1], ""))
    assert image._modules(tree) == [folder / name for name in ("ib_core.ko", "rdma_rxe.ko", "overlay.ko.xz")]


def test_one_command_at_a_time_has_the_guests_of_a_clone(tmp_path: Path) -> None:
    other = (
        "import sys; from pathlib import Path; from scripts.softroce import host\n"
        "with host.turn(Path(sys.argv[1]), print): print('mine', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", other, str(tmp_path / "cache")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "mine\n"
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        process.kill()  # however it ends, the turn passes on

    with host.turn(tmp_path / "cache", say):
        assert said == ["another run uses the guests of this folder: waiting for its end"]
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_folder_that_cannot_be_written_to_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()  # also root may not make a folder of it
    with (
        pytest.raises(host.Unavailable, match=r"the guest's folder cannot be written to: .*cache"),
        host.turn(tmp_path / "cache", print),
    ):
        pass


def test_a_machine_that_cannot_run_a_guest_is_a_skip_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "missing_packages", lambda: ["qemu-system-x86"])
    monkeypatch.setattr(host, "install_packages", lambda packages: False)
    monkeypatch.setattr(host, "available_memory_mib", lambda: 8192)
    with pytest.raises(host.Unavailable, match="sudo apt-get install -y qemu-system-x86"):
        host.require(1)
    monkeypatch.setattr(host, "available_memory_mib", lambda: 4096)
    with pytest.raises(host.Unavailable, match="need 4608 MiB of memory, 4096 MiB are available"):
        host.require(1)


def test_a_guest_ends_with_the_process_that_started_it_however_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of the runner, with a process that does nothing in the place of qemu."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    runner = """
import sys, time
from pathlib import Path
from scripts.softroce import guest
from scripts.softroce.image import Image
guest._qemu_command = lambda *a: ["sleep", "300"]
one = guest.Guest(Image(Path(), Path(), ""), guest.Place(0, 1, ()), Path(sys.argv[1]), ["true"], {}, print)
print(one._qemu.pid, flush=True)
time.sleep(300)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", runner, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.kill(pid, 0)
    process.kill()
    process.wait()
    process.stdout.close()
    ends = time.monotonic() + 10
    while _is_alive(pid):
        assert time.monotonic() < ends, "the guest outlived its runner"
        time.sleep(0.05)


def test_leaving_the_block_switches_the_guest_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "_qemu_command", lambda *arguments: ["sleep", "300"])
    running = Guest(None, Place(0, 1, ()), tmp_path, ["true"], {}, print)  # type: ignore[arg-type]
    with contextlib.suppress(SystemExit), running:
        assert running.is_running
        assert running.rc is None
        sys.exit(128 + signal.SIGTERM)
    assert not running.is_running


def test_no_path_of_the_clone_is_in_an_option_that_a_comma_or_its_length_would_break(tmp_path: Path) -> None:
    run = tmp_path / "a, b" / ("deep" * 40) / "run"
    place = Place(1, 2, (run / "control", run / "data"))
    options = guest._qemu_command(image.Image(run / "vmlinuz", run / "initrd.gz", ""), place, run / "node1")
    assert [one for one in options if "a, b" in one] == [str(run / "vmlinuz"), str(run / "initrd.gz")]
    assert "local,path=.,mount_tag=share,security_model=none" in options
    wires = [one.rpartition("addr.path=")[2] for one in options if "addr.path=" in one]
    assert wires == ["../control", "../data"]


def test_a_guest_runs_in_its_folder_and_all_that_it_says_is_kept_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guest, "_qemu_command", lambda *a: ["bash", "-c", "echo a panic; pwd; echo 'guest: failed'"])
    with Guest(None, Place(0, 1, ()), tmp_path, ["true"], {}, print) as running:  # type: ignore[arg-type]
        running._qemu.wait(10)
    assert (tmp_path / "console.log").read_text().splitlines() == ["a panic", str(tmp_path), "guest: failed"]
    assert capsys.readouterr().out == "guest: failed\n"  # what people see before it has booted


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line tool with a shell in the place of qemu; its command is what the list holds."""
    qemu: list[str] = []
    monkeypatch.setattr(__main__, "CACHE", tmp_path / ".cache")
    monkeypatch.setattr(host, "ROOT", tmp_path)
    monkeypatch.setattr(__main__, "_owners", [])
    monkeypatch.setattr(host, "require", lambda nodes: None)
    monkeypatch.setattr(image, "ensure", lambda cache, say: image.Image(Path(), Path(), ""))
    monkeypatch.setattr(guest, "_qemu_command", lambda *arguments: ["bash", "-c", *qemu])
    return qemu


@pytest.mark.parametrize(
    ("qemu", "status", "said"),
    [
        ("echo 3 >rc", 3, ""),
        ("echo 0 >rc", 0, ""),
        ("echo qemu-system-x86_64: no such option", 1, "a guest has ended before its command: see .cache/run/node0/"),
    ],
)
def test_a_command_that_did_not_come_to_an_end_is_no_success(
    qemu: str,
    status: int,
    said: str,
    runner: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner.append(qemu)
    monkeypatch.setattr(sys, "argv", ["softroce", "exec", "true"])
    assert __main__.main() == status
    assert said in capsys.readouterr().out


def test_what_the_shell_has_left_of_a_run_on_real_nodes_does_not_reach_the_guest(
    runner: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.append("echo 0 >rc")
    for name, value in {"RESULTS": "/elsewhere", "TOKEN": "a secret", "SABOTAGE": "tcp"}.items():
        monkeypatch.setenv(f"RTQ_RDMA_{name}", value)
    monkeypatch.setattr(sys, "argv", ["softroce", "exec", "true"])
    assert __main__.main() == 0
    started = (tmp_path / ".cache" / "run" / "node0" / "start.sh").read_text()
    assert "RTQ_RDMA_RESULTS=/run/softroce\n" in started
    assert "a secret" not in started
    assert "RTQ_RDMA_SABOTAGE=tcp\n" in started  # this one is meant for it


@pytest.mark.parametrize(("folder", "call"), [(".", "scripts/test.sh"), ("scripts", "./test.sh")])
def test_the_command_above_is_known_and_its_end_is_noticed(tmp_path: Path, folder: str, call: str) -> None:
    """As ``make`` -> ``scripts/test.sh`` -> runner; here a script of that name, killed the hard way."""
    script = tmp_path / "scripts" / "test.sh"
    script.parent.mkdir()
    watch = "from scripts.softroce import host; print(host.command_processes(), flush=True); open(0).read()"
    script.write_text(f'cd {ROOT}; {sys.executable} -c "{watch}"; true\n')
    process = subprocess.Popen(
        ["bash", call], cwd=tmp_path / folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    ((pid, started),) = json.loads(process.stdout.readline().replace("(", "[").replace(")", "]"))
    assert pid == process.pid
    assert host.is_running((pid, started))
    process.kill()
    process.wait()
    assert not host.is_running((pid, started))
    process.stdin.close()
    process.stdout.close()


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
