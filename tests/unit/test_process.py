import os
import subprocess
import sys

import msgspec
import pytest

from relax_tq_rdma.transport import process
from relax_tq_rdma.transport.process import ProcessId, own_id


@pytest.fixture
def sleeper():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def test_a_process_is_known_by_pid_and_start_time(sleeper):
    found = ProcessId.of(sleeper.pid)
    assert found is not None
    assert found.alive()
    assert found != own_id()
    assert own_id() == ProcessId.of(os.getpid())
    other_start = msgspec.structs.replace(found, start_ticks=found.start_ticks + 1)
    assert not other_start.alive()


def test_the_same_pid_with_another_start_time_is_not_ended(sleeper):
    found = ProcessId.of(sleeper.pid)
    stranger = msgspec.structs.replace(found, start_ticks=found.start_ticks - 1)
    assert stranger.end(1.0)
    assert sleeper.poll() is None


def test_another_boot_or_container_is_not_ended(sleeper):
    found = ProcessId.of(sleeper.pid)
    elsewhere = msgspec.structs.replace(found, boot="another-boot:pid:[1]")
    assert not elsewhere.of_this_boot
    assert elsewhere.end(1.0)
    assert sleeper.poll() is None


def test_end_asks_first(sleeper):
    assert ProcessId.of(sleeper.pid).end(5.0)
    assert sleeper.wait(5) == -15


def test_end_kills_what_does_not_listen():
    code = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    assert ProcessId.of(child.pid).end(0.2)
    assert child.wait(5) == -9
    child.stdout.close()


def test_a_zombie_has_ended(sleeper):
    found = ProcessId.of(sleeper.pid)
    sleeper.kill()
    assert found.wait(5.0)  # not reaped yet
    assert ProcessId.of(sleeper.pid) is None


def test_no_such_process():
    assert ProcessId.of(2**22 + 5) is None


def test_a_command_with_brackets_and_blanks_does_not_confuse(tmp_path):
    odd = tmp_path / "a) R (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "60"])
    try:
        assert ProcessId.of(child.pid).alive()
    finally:
        child.kill()
        child.wait()


def test_a_child_imports_what_this_process_would(monkeypatch, tmp_path):
    (tmp_path / "only_on_this_path.py").write_text("value = 7")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = subprocess.run(
        [*process.module_command("only_on_this_path")[:1], "-c", "import only_on_this_path as m; print(m.value)"],
        env=process.module_environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "7\n"


@pytest.mark.parametrize(
    "module",
    ["relax_tq_rdma.transport.master_supervisor", "relax_tq_rdma.transport.master", "relax_tq_rdma.transport.peer"],
)
def test_children_import_nothing_heavy(module):
    code = (
        f"import sys, {module}; "
        "print([m for m in ('torch', 'ray', 'transfer_queue', 'mooncake', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
