"""The storage managers: joining a job, naming what failed, overwriting, announcing only what the controller takes."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import zmq
from tensordict import NonTensorStack, TensorDict
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.managers import base
from transfer_queue.storage.managers.mooncake_manager import MooncakeStorageManager
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType, ZMQServerInfo

from relax_tq_rdma import accounting
from relax_tq_rdma.errors import StartError, TransferError
from relax_tq_rdma.payload import StaleReferenceError, open_row
from relax_tq_rdma.payload.format import encode_frame
from relax_tq_rdma.seams.tq_registry import TqRegistry
from relax_tq_rdma.section import KEY
from relax_tq_rdma.staging import job
from relax_tq_rdma.staging.managers import DataplaneMooncakeStorageManager
from relax_tq_rdma.staging.payload_mixin import FIELD
from tests.mooncake import backend_config
from tests.strict_store import StrictStore, use_strict_store

pytestmark = pytest.mark.tq_versions


class Controller:
    """What announcements reach: a ROUTER that answers each as the test says."""

    def __init__(self, answers: Callable[[ZMQMessage], list[ZMQMessage]]) -> None:
        self.heard: list[dict[str, Any]] = []
        self._answers = answers
        self._ended = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.info = ZMQServerInfo(
            role=Role.CONTROLLER, id="controller", ip="127.0.0.1", ports={"request_handle_socket": port}
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5)
        self._context.term()

    def _serve(self) -> None:
        while not self._ended.is_set():
            if not self._socket.poll(50):
                continue
            identity, *frames = self._socket.recv_multipart(copy=False)
            message = ZMQMessage.deserialize(frames)
            self.heard.append(message.body)
            for answer in self._answers(message):
                self._socket.send_multipart([identity, *answer.serialize()])
        self._socket.close(linger=0)


def answer(kind: Any, **body: Any) -> ZMQMessage:
    return ZMQMessage.create(request_type=kind, sender_id="controller", body=body)


def accept(message: ZMQMessage) -> list[ZMQMessage]:
    return [answer(ZMQRequestType.NOTIFY_DATA_UPDATE_ACK, success=True)]


Make = Callable[..., Any]


@pytest.fixture
def make_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make(store, answers=accept, config=None, **settings)``: a Mooncake manager on a fake store and controller."""
    monkeypatch.setenv("RTQ_SEGMENT_MB", "64")
    monkeypatch.setenv("MC_STORE_MEMCPY", "0")
    monkeypatch.setattr(base.StorageManager, "_connect_to_controller", lambda self: None)
    seam, ends = TqRegistry(), []
    seam.apply()
    master = socket.create_server(("127.0.0.1", 0))

    def make(
        store: StrictStore, *, answers: Any = accept, config: dict[str, Any] | None = None, **settings: Any
    ) -> Any:
        use_strict_store(monkeypatch, store)
        controller = Controller(answers)
        ends.append(controller.close)
        config = config or backend_config(f"127.0.0.1:{master.getsockname()[1]}", settings=settings)
        manager = base.StorageManagerFactory.create("MooncakeStore", controller.info, config)
        ends.append(manager.close)
        manager.controller_of_test = controller
        return manager

    yield make
    for end in reversed(ends):
        end()
    master.close()
    seam.remove()
    accounting.configure("off")


def meta_of(rows: int, fields: list[str], partition: str = "train_3") -> BatchMeta:
    schema = {field: {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False} for field in fields}
    return BatchMeta(global_indexes=list(range(rows)), partition_ids=[partition] * rows, field_schema=schema)


def batch(rows: int = 3) -> TensorDict:
    pictures = NonTensorStack(*[{"pixel_values": torch.ones(4) * i} if i else None for i in range(rows)])
    return TensorDict({"tokens": torch.arange(rows * 2).reshape(rows, 2), "pictures": pictures}, batch_size=rows)


# --- a batch ----------------------------------------------------------------------------------------------------------


def test_a_batch_goes_in_and_out_and_away(make_manager: Make) -> None:
    store = StrictStore()
    manager = make_manager(store)
    meta = meta_of(3, ["tokens", "pictures"])
    asyncio.run(manager.put_data(batch(), meta))
    [heard] = manager.controller_of_test.heard
    assert (heard["partition_id"], heard["global_indexes"]) == ("train_3", [0, 1, 2])
    generations = {
        value["generation"] for per_field in heard["custom_backend_meta"].values() for value in per_field.values()
    }
    assert len(generations) == 1
    got = asyncio.run(manager.get_data(meta))
    assert torch.equal(torch.stack(list(got["tokens"].unbind())), batch()["tokens"])
    assert [row and row["pixel_values"].tolist() for row in got["pictures"]] == [None, [1.0] * 4, [2.0] * 4]
    asyncio.run(manager.clear_data(meta))
    assert store.stored() == []


def test_what_failed_is_named_with_partition_field_and_rows(make_manager: Make) -> None:
    store = StrictStore()
    manager = make_manager(store)
    meta = meta_of(3, ["tokens", "pictures"])
    asyncio.run(manager.put_data(batch(), meta))
    for key in [key for key in store.stored() if key.endswith(("1@pictures", "2@pictures"))]:
        del store.data[key]
    expected = r"get of partition train_3: field pictures \(rows 1, 2\): lost: .*restart the job"
    with pytest.raises(TransferError, match=expected):
        asyncio.run(manager.get_data(meta))


def test_a_batch_that_is_not_stored_whole_is_not_announced(make_manager: Make) -> None:
    store = StrictStore()
    manager = make_manager(store)
    asyncio.run(manager.put_data(batch(1), meta_of(1, ["tokens", "pictures"], "other")))  # mounts
    store.plan = [lambda codes: [-600] * len(codes)]
    with pytest.raises(TransferError, match=r"put of partition train_3: field .*invalid parameters \(-600\)"):
        asyncio.run(manager.put_data(batch(), meta_of(3, ["tokens", "pictures"])))
    assert [heard["partition_id"] for heard in manager.controller_of_test.heard] == ["other"]
    assert len(store.stored()) == 2


def test_an_overwrite_is_announced_before_the_old_values_go(make_manager: Make) -> None:
    store = StrictStore()
    stored_at: list[int] = []

    def answers(message: ZMQMessage) -> list[ZMQMessage]:
        stored_at.append(len(store.stored()))
        return accept(message)

    manager = make_manager(store, answers=answers)
    meta = meta_of(3, ["tokens", "pictures"])
    asyncio.run(manager.put_data(batch(), meta))
    asyncio.run(manager.put_data(TensorDict({"tokens": torch.full((3, 5), 9)}, batch_size=3), meta))
    assert stored_at == [6, 9]
    assert len(store.stored()) == 6
    got = asyncio.run(manager.get_data(meta.select_fields(["tokens"])))
    assert {tuple(row.tolist()) for row in got["tokens"].unbind()} == {(9,) * 5}


def test_a_failed_overwrite_leaves_the_old_values(make_manager: Make) -> None:
    store = StrictStore()
    manager = make_manager(store)
    meta = meta_of(3, ["tokens", "pictures"])
    asyncio.run(manager.put_data(batch(), meta))
    store.plan = [lambda codes: [0, -600, 0]]
    with pytest.raises(TransferError):
        asyncio.run(manager.put_data(TensorDict({"tokens": torch.zeros(3, 5)}, batch_size=3), meta))
    assert len(store.stored()) == 6
    got = asyncio.run(manager.get_data(meta))
    assert torch.equal(torch.stack(list(got["tokens"].unbind())), batch()["tokens"])


# --- rows that refer to others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [64, 1 << 60])
def test_a_forged_reference_costs_no_memory(make_manager: Make, claimed: int) -> None:
    store = StrictStore()
    manager = make_manager(store, normalize_multimodal=True, dedup_multimodal=True)
    meta, picture = meta_of(2, [FIELD]), {"pixel_values": torch.ones(1000)}
    rows = NonTensorStack(picture, copy.deepcopy(picture))
    asyncio.run(manager.put_data(TensorDict({FIELD: rows}, batch_size=2), meta))
    source, referrer = sorted(store.stored())
    row = open_row(memoryview(store.data[referrer]))
    assert row.reference is not None
    lie = msgspec.structs.replace(row.reference, nbytes=claimed)
    store.data[referrer] = encode_frame(row.header.put, row.header.ord, 0, entries=None, ref=lie)
    meta._custom_backend_meta[1][FIELD]["encoded_size"] = len(store.data[referrer])
    found = len(store.data[source])
    with pytest.raises(
        StaleReferenceError, match=rf"index 0 a value of {found} bytes is there, .* \({claimed} bytes\)"
    ):
        asyncio.run(manager.get_data(meta.select_samples([1])))


# --- announcements ----------------------------------------------------------------------------------------------------


def test_a_controller_that_refuses_fails_the_put(make_manager: Make) -> None:
    """Upstream takes any acknowledgement for success (contract §13, item 8)."""
    refuse = [answer(ZMQRequestType.NOTIFY_DATA_UPDATE_ACK, success=False)]
    manager = make_manager(StrictStore(), answers=lambda message: refuse)
    with pytest.raises(TransferError, match=r"put of partition train_3: stored, but the .* controller refused"):
        asyncio.run(manager.put_data(batch(), meta_of(3, ["tokens", "pictures"])))


def test_a_controller_that_reports_an_error_fails_the_put(make_manager: Make) -> None:
    broken = [answer(ZMQRequestType.REQUEST_ERROR, success=False, message="KeyError: 5")]
    manager = make_manager(StrictStore(), answers=lambda message: broken)
    with pytest.raises(TransferError, match=r"refused to record it \(KeyError: 5\)"):
        asyncio.run(manager.put_data(batch(), meta_of(3, ["tokens", "pictures"])))


def test_a_controller_that_says_nothing_fails_the_put_in_time(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "TQ_DATA_UPDATE_RESPONSE_TIMEOUT", 1)
    other = answer(ZMQRequestType.GET_META_RESPONSE, metadata=None)
    manager = make_manager(StrictStore(), answers=lambda message: [other] * 3)
    with pytest.raises(TransferError, match=r"did not confirm it within 1 s .*no consumer may ever see it"):
        asyncio.run(manager.put_data(batch(), meta_of(3, ["tokens", "pictures"])))
    manager.controller_of_test._answers = accept
    asyncio.run(
        manager.put_data(batch(), meta_of(3, ["tokens", "pictures"]))
    )  # a late answer is not taken for this one


# --- joining ----------------------------------------------------------------------------------------------------------


def test_without_the_plugins_section_the_manager_is_upstreams_own(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MC_STORE_MEMCPY")
    config = {key: value for key, value in backend_config("127.0.0.1:1").items() if key != KEY}
    manager = make_manager(StrictStore(), config=config)
    assert type(manager) is MooncakeStorageManager
    assert type(manager.storage_client).__name__ == "MooncakeStoreClient"
    assert "MC_STORE_MEMCPY" not in os.environ
    assert accounting.ledger() is None


def test_joining_guards_the_process(make_manager: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_STORE_MEMCPY")
    manager = make_manager(StrictStore())
    assert isinstance(manager, DataplaneMooncakeStorageManager)
    assert os.environ["MC_STORE_MEMCPY"] == "0"


def test_a_hazard_of_this_process_keeps_it_out(make_manager: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_STORE_MEMCPY", "1")
    monkeypatch.setattr(job, "installed_mooncake_version", lambda: "0.3.10.post2")
    store = StrictStore()
    with pytest.raises(StartError, match=r"MC_STORE_MEMCPY=1 is set"):
        make_manager(store)
    assert store.setup_arguments == ()


def test_another_plugin_version_is_noted_once_a_process(make_manager: Make, caplog: pytest.LogCaptureFixture) -> None:
    job._noted.clear()
    with caplog.at_level(logging.WARNING):
        make_manager(StrictStore())
        make_manager(StrictStore())
    notes = [record for record in caplog.records if "the job was started with 0" in record.getMessage()]
    assert len(notes) == 1
    assert "install the same version on every node" in notes[0].getMessage()


def test_closing_a_manager_leaves_the_store(make_manager: Make) -> None:
    store = StrictStore()
    manager = make_manager(store)
    manager.close()
    manager.close()
    assert store.closed == 1


def test_a_forked_child_refuses_the_parents_manager(make_manager: Make) -> None:
    manager = make_manager(StrictStore())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(manager.get_data(meta_of(1, ["tokens"])))
        except TransferError as exc:
            code = 0 if "forked child" in str(exc) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- a put that fails or is cancelled leaves nothing ----------------------------------------------------------------


def test_a_put_that_is_cancelled_while_it_stores_leaves_nothing(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StrictStore()
    manager = make_manager(store)
    meta = meta_of(3, ["tokens", "pictures"])
    asyncio.run(manager.put_data(batch(), meta))
    announced, kept = copy.deepcopy(meta._custom_backend_meta), set(store.stored())
    slow = store.batch_upsert_from

    def slowly(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.4)
        return slow(*arguments, **more)

    monkeypatch.setattr(store, "batch_upsert_from", slowly)

    async def cancelled() -> None:
        put = asyncio.create_task(manager.put_data(batch(), meta))
        await asyncio.sleep(0.2)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put

    asyncio.run(cancelled())  # its end waits for the executor
    assert set(store.stored()) == kept
    assert meta._custom_backend_meta == announced
    asyncio.run(manager.clear_data(meta))
    assert store.stored() == []


def test_a_put_that_the_controller_refuses_leaves_nothing(make_manager: Make) -> None:
    store = StrictStore()
    refuse = [answer(ZMQRequestType.NOTIFY_DATA_UPDATE_ACK, success=False, message="no")]
    manager = make_manager(store, answers=lambda message: refuse)
    meta = meta_of(3, ["tokens", "pictures"])
    with pytest.raises(TransferError, match="refused to record it"):
        asyncio.run(manager.put_data(batch(), meta))
    assert store.stored() == []
    assert meta._custom_backend_meta == [{}, {}, {}]
