"""The Mooncake client against a store that is as strict as an RDMA engine."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transfer_queue.storage.clients import mooncake_client as upstream

from relax_tq_rdma.errors import StartError, TransferError
from relax_tq_rdma.payload import decode_row, plan_column
from relax_tq_rdma.section import KEY
from relax_tq_rdma.staging import client as client_module
from relax_tq_rdma.staging import retry
from relax_tq_rdma.staging.client import DataplaneMooncakeStoreClient
from relax_tq_rdma.staging.columns import as_column
from relax_tq_rdma.staging.errors import StoreFault
from relax_tq_rdma.transport.memory import MIB
from tests.mooncake import backend_config
from tests.strict_store import StrictStore

MakeClient = Callable[..., Any]


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def fail(code: int, *positions: int) -> Callable[[list[int]], list[int]]:
    return lambda codes: [code if i in positions else found for i, found in enumerate(codes)]


# --- values -----------------------------------------------------------------------------------------------------------

TENSORS = {
    "dense": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "row of a matrix": torch.arange(12).reshape(3, 4)[1],
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "every third": torch.arange(10.0)[::3],
    "expanded": torch.ones(1, 4).expand(3, 4),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "with gradient": torch.ones(3, requires_grad=True) * 2,
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative view": torch.tensor([1 + 2j]).conj().imag,
    "scalar": torch.tensor(0.5),
    "scalar of one": torch.tensor([0.5]),
    "bool": torch.tensor([True, False]),
    "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "fp8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "no elements": torch.empty(0, 3),
    "no elements, scalar dims": torch.empty(2, 0, dtype=torch.int64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_with_its_dtype_shape_and_bytes(make_client: MakeClient, name: str) -> None:
    store = StrictStore()
    client = make_client(store)
    value = TENSORS[name]
    metas = client.put(["0@x"], [value])
    [got] = client.get(["0@x"], custom_backend_meta=metas)
    assert (got.dtype, got.shape) == (value.dtype, value.shape)
    assert bits(got) == bits(value)
    assert not got.requires_grad
    assert store.refused == []


@pytest.mark.parametrize(
    "value", [None, 1, True, "text", b"\0bytes", {"a": torch.ones(2), "b": [1, None]}, [torch.zeros(3), {"c": 2.5}], {}]
)
def test_anything_else_comes_back_equal(make_client: MakeClient, value: Any) -> None:
    client = make_client(StrictStore())
    [got] = client.get(["0@x"], custom_backend_meta=client.put(["0@x"], [value]))
    assert type(got) is type(value)
    assert repr(got) == repr(value)


def test_a_numpy_row_comes_back(make_client: MakeClient) -> None:
    client = make_client(StrictStore())
    value = np.arange(6, dtype=np.int16)[::-1]
    [got] = client.get(["0@x"], custom_backend_meta=client.put(["0@x"], [value]))
    np.testing.assert_array_equal(got, value)
    assert got.dtype == value.dtype


def test_a_column_that_mixes_tensors_with_other_things(make_client: MakeClient) -> None:
    """Upstream looks at the column's schema only, and cannot read such a column back."""
    client = make_client(StrictStore())
    keys, values = ["0@x", "1@x", "2@x"], [torch.ones(2), None, {"a": 1}]
    got = client.get(keys, shapes=[None] * 3, dtypes=[None] * 3, custom_backend_meta=client.put(keys, values))
    assert torch.equal(got[0], values[0])
    assert got[1:] == values[1:]


def test_many_values_in_several_batches_keep_their_order(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "BATCH_SIZE_LIMIT", 3)
    store = StrictStore()
    client = make_client(store)
    keys = [f"{i}@x" for i in range(20)]
    values = [torch.full((4,), i) if i % 3 else {"i": i} for i in range(20)]
    got = client.get(keys, custom_backend_meta=client.put(keys, values))
    assert [int(v[0]) if isinstance(v, torch.Tensor) else v["i"] for v in got] == list(range(20))
    assert max(map(len, store.calls_of("put"))) == 3
    assert store.regions == {}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
)
def test_a_tensor_without_plain_bytes_is_refused_by_name(
    make_client: MakeClient, value: torch.Tensor, kind: str
) -> None:
    store = StrictStore()
    with pytest.raises(StoreFault, match=rf"field x \(row 0\): a {kind} tensor"):
        make_client(store).put(["0@x"], [value])
    assert store.calls_of("put") == []


# --- memory -----------------------------------------------------------------------------------------------------------


def test_rows_that_share_memory_are_registered_once(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream registers the same memory twice, which the engine refuses and upstream does not see."""
    monkeypatch.setattr(upstream, "BATCH_SIZE_LIMIT", 2)
    store = StrictStore()
    client = make_client(store)
    shared, base = torch.arange(8.0), torch.arange(100.0)
    values = [shared, shared, shared, base[:10], base[5:15], base[90:]]
    keys = [f"{i}@x" for i in range(6)]
    got = client.get(keys, custom_backend_meta=client.put(keys, values))
    assert all(map(torch.equal, got, values))
    assert store.refused == []
    assert store.regions == {}


def test_two_puts_of_one_tensor_at_the_same_time(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    both_in = threading.Barrier(2, timeout=10)
    inner = store.batch_upsert_from

    def put(*arguments: Any, **more: Any) -> list[int]:
        if not any("/segment/" in key for key in arguments[0]):
            both_in.wait()
        return inner(*arguments, **more)

    client.put(["9@x"], [torch.ones(1)])  # mounts
    store.batch_upsert_from = put  # type: ignore[method-assign]
    base = torch.arange(1000.0)
    rows = {"0@x": base[:600], "1@x": base[400:]}
    metas: dict[str, Any] = {}
    threads = [threading.Thread(target=lambda k=k: metas.update({k: client.put([k], [rows[k]])[0]})) for k in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    got = client.get(list(rows), custom_backend_meta=[metas[key] for key in rows])
    assert all(map(torch.equal, got, rows.values()))
    assert store.refused == []
    assert store.regions == {}


def test_a_failed_registration_stops_the_put_and_keeps_the_memory(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    client.put(["0@x"], [torch.ones(4)])
    store.register_buffer = lambda pointer, size: -600  # type: ignore[method-assign]
    with pytest.raises(StoreFault, match=r"field x \(row 1\): 16 bytes of memory cannot be registered.*\(-600\)"):
        client.put(["1@x"], [torch.ones(4)])
    assert len(store.stored()) == 1


def test_memory_that_cannot_be_unregistered_is_not_used_again(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    store = StrictStore()
    client = make_client(store)
    client.put(["9@x"], [torch.ones(1)])  # mounts
    unregister, row = store.unregister_buffer, torch.arange(4.0)
    store.unregister_buffer = lambda pointer: -600  # type: ignore[method-assign]
    client.put(["0@x"], [row])
    assert "cannot be unregistered" in caplog.text
    store.unregister_buffer = unregister  # type: ignore[method-assign]
    [got] = client.get(["1@x"], custom_backend_meta=client.put(["1@x"], [row]))  # goes through a copy
    assert torch.equal(got, row)
    assert store.refused == []
    assert list(store.regions) == [row.data_ptr()]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_second_put_of_a_key_writes_a_new_object(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    first, second = client.put(["0@x"], [b"aaaa"]), client.put(["0@x"], [b"bbbbbbbb"])
    assert len(set(store.stored())) == 2
    assert all(key.startswith("job1/") and key.endswith("/0@x") for key in store.stored())
    assert client.get(["0@x"], custom_backend_meta=first) == [b"aaaa"]
    assert client.get(["0@x"], custom_backend_meta=second) == [b"bbbbbbbb"]


def test_a_key_twice_in_one_batch_is_refused_before_any_byte_moves(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    with pytest.raises(StoreFault, match=r"field x \(row 1\): put twice in one batch"):
        client.put(["0@x", "1@x", "1@x"], [1, 2, 3])
    assert store.calls == []


def test_clear_removes_exactly_what_was_put(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    old, new = client.put(["0@x"], [1]), client.put(["0@x"], [2])
    empty = client.put(["1@x"], [torch.empty(0)])
    client.clear(["0@x", "1@x", "2@x"], custom_backend_meta=[old[0], empty[0], None])
    assert client.get(["0@x"], custom_backend_meta=new) == [2]
    client.clear(["0@x"], custom_backend_meta=old)  # gone already: fine
    client.clear(["0@x"], custom_backend_meta=new)
    assert store.stored() == []


def test_a_removal_that_fails_is_not_passed_over(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    metas = client.put(["0@x"], [1])
    store.batch_remove = lambda keys, force: [-900] * len(keys)  # type: ignore[method-assign]
    with pytest.raises(StoreFault, match=r"field x \(row 0\): not removed.*master at .* is dead or unreachable"):
        client.clear(["0@x"], custom_backend_meta=metas)


def test_a_value_that_was_put_without_the_plugin_is_named(make_client: MakeClient) -> None:
    client = make_client(StrictStore())
    with pytest.raises(StoreFault, match=r"field x \(row 3\): never put, or put by a process in which the plugin is"):
        client.get(["3@x"], custom_backend_meta=[None])


# --- results ----------------------------------------------------------------------------------------------------------


def test_only_what_failed_is_put_again(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    client.put(["9@x"], [0])  # mounts
    store.calls, store.plan = [], [fail(-800, 1), fail(-703, 0)]
    keys = ["0@x", "1@x", "2@x"]
    assert client.get(keys, custom_backend_meta=client.put(keys, [1, 2, 3])) == [1, 2, 3]
    assert [len(call) for call in store.calls_of("put")] == [3, 1, 1]


@pytest.mark.parametrize("plan", [[lambda codes: codes[:1]], [fail(-800, 0, 1), lambda codes: codes[:1]]])
def test_an_answer_that_is_too_short_is_no_success(make_client: MakeClient, plan: list[Any]) -> None:
    """Upstream checks the first answer's length, not that of a retry."""
    store = StrictStore()
    client = make_client(store)
    client.put(["9@x"], [0])
    store.plan = list(plan)
    with pytest.raises(StoreFault, match="answered for 1 of 2 values"):
        client.put(["0@x", "1@x"], [1, 2])
    metas = client.put(["0@x", "1@x"], [1, 2])
    store.plan = list(plan)
    with pytest.raises(StoreFault, match="answered for 1 of 2 values"):
        client.get(["0@x", "1@x"], custom_backend_meta=metas)


def test_a_wrong_byte_count_is_no_success(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    metas = client.put(["0@x", "1@x"], [torch.ones(4), torch.ones(4)])
    store.plan = [lambda codes: [codes[0], codes[1] - 4]]
    with pytest.raises(StoreFault, match=r"field x \(row 1\): the store holds 12 bytes where 16 were put"):
        client.get(["0@x", "1@x"], custom_backend_meta=metas)
    assert len(store.calls_of("get")) == 1


def test_a_read_that_the_engine_gave_up_after_its_own_wait_is_not_asked_for_again(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails at once is."""
    monkeypatch.setattr(retry, "READ_SECONDS", 0.2)
    store = StrictStore()
    client = make_client(store)
    metas = client.put(["0@x"], [torch.ones(4)])

    def silent_peer(codes: list[int]) -> list[int]:
        threading.Event().wait(0.3)  # the fixture takes the sleep out of time.sleep
        return [-800]

    store.plan = [silent_peer]
    with pytest.raises(StoreFault, match="field x"):
        client.get(["0@x"], custom_backend_meta=metas)
    assert len(store.calls_of("get")) == 1


def test_a_lost_value_is_called_lost_and_not_asked_for_again(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    metas = client.put(["0@x", "1@x"], [1, 2])
    del store.data[next(key for key in store.stored() if key.endswith("1@x"))]
    with pytest.raises(StoreFault, match=r"field x \(row 1\): lost: the store no longer has what was put"):
        client.get(["0@x", "1@x"], custom_backend_meta=metas)
    assert len(store.calls_of("get")) == 1


def test_a_holder_that_does_not_answer(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    metas = client.put(["0@x"], [1])
    store.plan = [fail(-800, 0)] * 10
    with pytest.raises(StoreFault, match=r"lost: the process that holds it is dead, frozen or unreachable.*\(-800\)"):
        client.get(["0@x"], custom_backend_meta=metas)
    assert len(store.calls_of("get")) == 4


def test_a_dead_master_is_named_with_the_remedy(make_client: MakeClient, master: str) -> None:
    store = StrictStore()
    client = make_client(store)
    client.put(["9@x"], [0])
    store.calls, store.plan = [], [lambda codes: [-900] * len(codes)] * 10
    with pytest.raises(StoreFault, match=rf"master at {master} is dead or unreachable.*restart the job; a running job"):
        client.put(["0@x"], [1])
    assert len(store.calls_of("put")) == 2


def test_a_wrong_request_is_not_repeated(make_client: MakeClient) -> None:
    store = StrictStore([fail(-600, 0)])
    with pytest.raises(StoreFault, match=r"invalid parameters \(-600\)"):
        make_client(store).put(["0@x"], [1])
    assert len(store.calls_of("put")) == 1


def test_a_failed_put_leaves_nothing_behind(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "BATCH_SIZE_LIMIT", 2)
    store = StrictStore()
    client = make_client(store)
    client.put(["9@y"], [0])  # mounts
    store.plan = [lambda codes: codes, fail(-600, 1)]
    with pytest.raises(StoreFault):
        client.put([f"{i}@x" for i in range(8)], list(range(8)))
    assert [key for key in store.stored() if key.endswith("@x")] == []
    assert store.regions == {}


def test_a_fault_survives_the_way_between_processes() -> None:
    fault = StoreFault("lost", "restart", ["3@a", "4@a", "3@b"], code=-704, settled=False)
    again = pickle.loads(pickle.dumps(fault))  # noqa: S301  own bytes
    assert str(again) == str(fault) == "field a (rows 3, 4), field b (row 3): lost: restart"
    assert (again.keys, again.code, again.settled) == (fault.keys, -704, False)


# --- room -------------------------------------------------------------------------------------------------------------


def test_a_consumer_mounts_nothing_and_a_producer_once(make_client: MakeClient) -> None:
    store = StrictStore()
    store.mounts = [MIB]  # some producer's
    client = make_client(store)
    assert store.setup_arguments[2] == 0
    client.put(["0@x"], [torch.zeros(1000)])
    assert store.mounts == [MIB]
    for i in range(3):
        metas = client.put(["1@x"], [torch.full((5 * MIB,), i)])
        client.clear(["1@x"], custom_backend_meta=metas)
    assert store.mounts == [MIB, 64 * MIB]


def test_the_first_value_of_a_job_mounts_a_little_and_the_rest_when_that_is_full(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RTQ_SEGMENT_MB", "256")
    store = StrictStore()
    client = make_client(store)
    client.put(["0@x"], [1])
    assert store.mounts == [64 * MIB]
    store.data["somebody's"] = bytes(64 * MIB)
    client.put(["1@x"], [2])
    assert store.mounts == [64 * MIB, 256 * MIB]


def test_a_wheel_that_cannot_mount_later_mounts_at_set_up(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store, lazy=False)
    client.put(["0@x"], [torch.zeros(5 * MIB)])
    assert store.setup_arguments[2] == 64 * MIB
    assert store.mounts == [64 * MIB]


def test_a_full_store_makes_a_put_wait(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    held = client.put(["0@x"], [torch.zeros(10 * MIB)])
    timer = threading.Timer(1.0, client.clear, (["0@x"],), {"custom_backend_meta": held})
    timer.start()
    started = time.monotonic()
    metas = client.put(["1@x"], [torch.ones(10 * MIB)])
    assert 0.9 < time.monotonic() - started < 3
    [got] = client.get(["1@x"], custom_backend_meta=metas)
    assert got.sum() == 10 * MIB
    timer.join()


def test_a_store_that_stays_full_is_one_error_with_the_numbers(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    client.put(["0@x"], [torch.zeros(10 * MIB)])
    started = time.monotonic()
    with pytest.raises(StoreFault, match=r"row 1\): no room for 40 MiB: .*this process's segment has 64 MiB.*RTQ_SEG"):
        client.put(["1@x"], [torch.zeros(10 * MIB)])
    assert 2.9 < time.monotonic() - started < 6
    assert len(store.stored()) == 1


def test_a_value_that_can_never_fit_fails_at_once(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    started = time.monotonic()
    with pytest.raises(StoreFault, match=r"row 1\): a value of 80 MiB can never fit: a segment holds 64 MiB"):
        client.put(["0@x", "1@x"], [torch.zeros(1), torch.zeros(20 * MIB)])
    assert time.monotonic() - started < 1
    assert len(store.calls_of("put")) == 1
    assert store.stored() == []


def test_a_segment_the_master_has_dropped_is_noticed_by_the_next_put(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    client.put(["0@x"], [1])
    store.data.clear()  # the master called this process dead; the engine has mounted again, without a word
    with pytest.raises(StoreFault, match="dropped this process's segment"):
        client.put(["1@x"], [2])
    assert store.stored() == []


# --- time and processes -----------------------------------------------------------------------------------------------


def test_a_call_that_never_returns_is_left_in_time(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_STORE_CALL_SECONDS", "0.5")
    store = StrictStore()
    client = make_client(store)
    metas = client.put(["0@x"], [torch.ones(4)])
    stuck = threading.Event()
    inner = store.batch_get_into

    def get(*arguments: Any) -> list[int]:
        stuck.wait(20)
        return inner(*arguments)

    store.batch_get_into = get  # type: ignore[method-assign]
    started = time.monotonic()
    with pytest.raises(StoreFault, match=r"row 0\): batch_get_into did not return within .*frozen or unreachable"):
        client.get(["0@x"], custom_backend_meta=metas)
    assert time.monotonic() - started < 5
    assert len(store.regions) == 1  # the engine may still write there, so it stays registered and alive
    client.close()
    assert store.closed == 0
    stuck.set()


def test_close_happens_once_and_use_afterwards_is_refused(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    threads = [threading.Thread(target=client.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.closed == 1
    with pytest.raises(StoreFault, match="connection to the Mooncake store is closed"):
        client.put(["0@x"], [1])


def test_a_forked_child_refuses_the_parents_store(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    metas = client.put(["0@x"], [1])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            client.get(["0@x"], custom_backend_meta=metas)
        except TransferError as exc:
            client.close()
            code = 0 if "forked child" in str(exc) and store.closed == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.get(["0@x"], custom_backend_meta=metas) == [1]


def test_a_forked_child_does_not_set_up_a_store_of_its_own(make_client: MakeClient) -> None:
    """Native set-up hangs there (measured): a DataLoader worker is such a child."""
    make_client(StrictStore())
    child = os.fork()
    if child == 0:
        code, store = 1, StrictStore()
        try:
            make_client(store)
        except StartError as exc:
            code = 0 if "multiprocessing_context='spawn'" in str(exc) and store.setup_arguments == () else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("settings", [{}, {"host_staging": True, "host_staging_mb": 32}])
def test_memory_is_the_hosts_whatever_the_callers_default_device_is(make_client: MakeClient, settings: Any) -> None:
    """A trainer may run under ``torch.set_default_device("cuda")``."""
    client = make_client(StrictStore(), settings=settings)
    tensors = [torch.arange(float(size)) for size in (3, 40_000, 500_000, 500_000)]
    rows = plan_column([{"x": tensors[1]}, {"x": tensors[0]}])
    keys, values = [f"{n}@x" for n in range(7)], [*tensors, *rows.planned(), {"a": 1}]
    with torch.device("meta"):
        got = client.get(keys, custom_backend_meta=client.put(keys, values))
        column = as_column(got[2:4])
        decoded = [decode_row(row.memory)["x"] for row in got[4:6]]
    assert all(map(torch.equal, got[:4], tensors))
    assert all(map(torch.equal, column.unbind(), tensors[2:]))
    assert all(map(torch.equal, decoded, [tensors[1], tensors[0]]))
    assert got[6] == {"a": 1}


# --- close ------------------------------------------------------------------------------------------------------------


class _Busy:
    """A put that another thread is in, held up inside the store."""

    def __init__(self, make_client: MakeClient) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.store = StrictStore()
        self.client = make_client(self.store)
        self.client.put(["9@x"], [0])
        self.store.plan = [self._wait]
        self.ended: list[Any] = []
        self._thread = threading.Thread(target=self._put, daemon=True)
        self._thread.start()
        assert self.began.wait(10)

    def join(self) -> Any:
        self.go_on.set()
        self._thread.join(10)
        return self.ended[0]

    def _put(self) -> None:
        try:
            self.ended.append(self.client.put(["0@x"], [torch.ones(3)]))
        except StoreFault as fault:
            self.ended.append(fault)

    def _wait(self, codes: list[int]) -> list[int]:
        self.began.set()
        assert self.go_on.wait(10)
        return codes


def test_close_waits_for_what_other_threads_do(make_client: MakeClient) -> None:
    """The native store crashes the process when it is closed under a running call."""
    busy = _Busy(make_client)
    closing = threading.Thread(target=busy.client.close)
    closing.start()
    time.sleep(0.2)
    assert (busy.store.closed, busy.ended) == (0, [])
    assert isinstance(busy.join(), list)
    closing.join(10)
    assert busy.store.closed == 1
    with pytest.raises(StoreFault, match="connection to the Mooncake store is closed: init TransferQueue again"):
        busy.client.get(["9@x"], custom_backend_meta=[{"generation": "g", "packed_size": 1}])


def test_close_does_not_wait_for_ever_and_then_leaves_the_store_alone(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CLOSE_SECONDS", 0.2)
    busy = _Busy(make_client)
    busy.client.close()
    assert busy.store.closed == 0
    busy.join()
    busy.client.close()
    assert busy.store.closed == 0


def test_a_put_that_waits_for_room_fails_when_the_store_is_closed(make_client: MakeClient) -> None:
    store = StrictStore()
    client = make_client(store)
    client.put(["9@x"], [torch.ones(17 * MIB, dtype=torch.uint8)])
    store.plan = [fail(-200, 0)] * 10_000
    faults: list[str] = []

    def put() -> None:
        with pytest.raises(StoreFault) as caught:
            client.put(["0@x"], [torch.ones(17 * MIB, dtype=torch.uint8)])
        faults.append(str(caught.value))

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    time.sleep(0.3)
    client.close()
    thread.join(10)
    assert store.closed == 1
    assert "field x (row 0): the connection to the Mooncake store is closed" in faults[0]


# --- set-up -----------------------------------------------------------------------------------------------------------


def test_without_the_plugins_section_it_is_upstreams_own_object(make_client: MakeClient, master: str) -> None:
    store = StrictStore()
    config = {key: value for key, value in backend_config(master).items() if key != KEY}
    client = make_client(store, config=config)
    assert type(client) is upstream.MooncakeStoreClient
    assert store.setup_arguments[2] == 4096 * MIB


def test_a_master_that_nobody_runs_is_a_sentence(make_client: MakeClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    store = StrictStore()
    with pytest.raises(StartError, match=rf"mooncake_master {nobody} cannot be reached \(Connection refused\)"):
        make_client(store, config=backend_config(nobody))
    assert store.setup_arguments == ()


def test_a_set_up_that_fails_is_a_sentence(make_client: MakeClient) -> None:
    with pytest.raises(StartError, match=r"cannot join the Mooncake store of .* -1\): run relax-tq-rdma doctor"):
        make_client(StrictStore(setup_code=-1))


def test_mooncake_that_cannot_be_imported_is_a_sentence(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.setattr(upstream, "MOONCAKE_STORE_IMPORTED", False)
    monkeypatch.setitem(__import__("sys").modules, "mooncake.store", None)
    with pytest.raises(StartError, match="this process cannot use Mooncake"):
        DataplaneMooncakeStoreClient(backend_config(master))


def test_the_announced_address_of_this_node_wins(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_LOCAL_HOSTNAME", "127.0.0.9")
    store = StrictStore()
    make_client(store)
    assert store.setup_arguments[0] == "127.0.0.9"


# --- GDR: TransferQueue's own path, here only what the plugin adds to it ----------------------------------------------


def test_chunks_of_the_gdr_path_are_read_by_it_and_cleared(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StrictStore()
    client = make_client(store)
    client.put(["9@x"], [0])
    monkeypatch.setattr(client, "_gdr_staging", SimpleNamespace(size=8, device=-1, close=lambda store: None))
    client.use_gdr = True

    def put_gdr(keys: list[str], tensors: list[torch.Tensor]) -> list[Any]:
        store.data.update({f"{keys[1]}:c{i}": b"x" for i in range(3)} | {keys[0]: b"x"})
        return [None, {"n_chunks": 3}]

    monkeypatch.setattr(
        upstream.MooncakeStoreClient, "_put_tensors_gdr", lambda self, keys, tensors: put_gdr(keys, tensors)
    )
    asked: list[Any] = []

    def get_gdr(self: Any, keys: Any, shapes: Any, dtypes: Any, indexes: Any, metas: Any) -> Any:
        asked.extend(meta.get("n_chunks") for meta in metas)
        return [torch.zeros(shape) for shape in shapes], indexes

    monkeypatch.setattr(upstream.MooncakeStoreClient, "_get_tensors_gdr", get_gdr)
    keys = ["0@x", "1@x"]
    metas = client.put(keys, [torch.ones(2), torch.ones(5)])
    assert [got.shape for got in client.get(keys, custom_backend_meta=metas)] == [(2,), (5,)]
    assert asked == [None, 3]
    monkeypatch.setattr(client, "_gdr_staging", None)
    with pytest.raises(StoreFault, match=r"row 1\): put in chunks by a GPU process"):
        client.get(keys, custom_backend_meta=metas)
    client.clear(keys, custom_backend_meta=metas)
    assert [key for key in store.stored() if not key.endswith("9@x")] == []


def test_an_encoded_row_is_never_cut(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that refers to it tells a reader its size and not its pieces, so on the GDR path it would not be found."""
    store = StrictStore()
    client = make_client(store)
    client.put(["9@x"], [0])
    monkeypatch.setattr(client, "_gdr_staging", SimpleNamespace(size=1024, device=-1, close=lambda store: None))
    client.use_gdr = True
    by_gdr: list[int] = []

    def put_gdr(self: Any, keys: Any, tensors: list[torch.Tensor]) -> list[Any]:
        by_gdr.extend(tensor.nbytes for tensor in tensors)
        return [None] * len(tensors)

    monkeypatch.setattr(upstream.MooncakeStoreClient, "_put_tensors_gdr", put_gdr)
    column = plan_column([{"x": torch.ones(1000)}, {"x": torch.ones(10)}])
    small, large = column.nbytes(1), column.nbytes(0)
    metas = client.put(["0@x", "1@x"], column.planned())
    assert (by_gdr, small < 1024 < large) == ([small], True)
    [row] = client.get(["0@x"], custom_backend_meta=[{"generation": metas[0]["generation"], "encoded_size": large}])
    assert torch.equal(decode_row(row.memory)["x"], torch.ones(1000))
