"""The node's Prometheus endpoint: one process serves the sum of all snapshots of the job on its node (design §8).

Who serves is decided by a lock that the kernel frees with its holder, so another process takes over when it dies. The
metrics live in a registry of their own and are built from the snapshots at each scrape: nothing is ever registered
twice, and counters of dead processes stay in the sum while their gauges vanish (FC-48).
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from relax_tq_rdma.accounting import names, snapshot
from relax_tq_rdma.accounting.names import METRICS, Metric
from relax_tq_rdma.accounting.notes import reason, say_once
from relax_tq_rdma.accounting.records import Histogram, Totals
from relax_tq_rdma.errors import UsageError
from relax_tq_rdma.transport.address import parse

DEFAULT_HOST = "127.0.0.1"


class Endpoint:
    """Serves ``address`` (``port`` or ``host:port``) for the job in ``folder``, or stands by until it is free."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._address = _parse(address)
        self._lock: int | None = None
        self._server: Any = None

    @property
    def serving(self) -> bool:
        return self._server is not None

    def keep_up(self) -> None:
        """Serve if nobody of this job does. Cheap, meant to be called again and again; never raises."""
        if self._address is None or self._server is not None:
            return
        host, port = self._address
        try:
            if self._lock is None:
                self._lock = _try_hold(self._folder / f"serve-{host}:{port}.lock")
            if self._lock is not None:
                self._server = _serve(host, port, NodeCollector(self._folder))
        except ImportError:
            say_once("prometheus", "metrics are not served: install prometheus-client, or unset RTQ_METRICS_PORT")
            self._address = None
        except OSError as exc:
            say_once(
                f"port {port}",
                f"metrics are not served while port {port} of {host} cannot be used ({reason(exc)}): "
                "free it, or set RTQ_METRICS_PORT to another one",
            )

    def close(self) -> None:
        """Stop serving and let another process take over."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self.abandon()

    def abandon(self) -> None:
        """Drop what a forked child inherited, without a word to the parent's clients."""
        if self._server is not None:
            self._server.socket.close()
        if self._lock is not None:
            os.close(self._lock)
        self._server = self._lock = None


class NodeCollector:
    """A prometheus_client collector over the snapshots of one job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._labels = _FieldLabels(folder / snapshot.LABELS)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        try:
            view = snapshot.read_node(self._folder)
        except OSError as exc:
            say_once("scrape", f"metric snapshots cannot be read from {self._folder}: {reason(exc)}")
            return
        totals = self._labels.bound(view.totals)
        for metric in METRICS.values():
            if metric.kind == "counter":
                yield _counter(metric, totals)
            elif metric.kind == "histogram":
                yield _histogram(metric, totals)
            elif not metric.labels:
                yield GaugeMetricFamily(metric.name, metric.help, value=float(view.gauges.get(metric.name, 0)))
        info = GaugeMetricFamily(names.BACKEND_INFO.name, names.BACKEND_INFO.help, labels=names.BACKEND_INFO.labels)
        for backend in view.backends:
            info.add_metric(backend, 1)
        yield info

    def describe(self) -> list[Any]:
        """Nothing to check at registration: the registry holds only this collector."""
        return []


class _FieldLabels:
    """Bounds the ``field`` label over all processes. A name once shown stays shown, also by the next server."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shown: list[str] = []
        self._lock = threading.Lock()

    def bound(self, totals: Totals) -> Totals:
        """Fields beyond the first :data:`~relax_tq_rdma.accounting.names.FIELD_LIMIT` become ``other``."""
        with self._lock:
            self._learn({labels[0] for name, labels in totals.counters if "field" in METRICS[name].labels})
        bounded = Totals(counters={}, histograms=totals.histograms)
        for (name, labels), value in totals.counters.items():
            if "field" in METRICS[name].labels and labels[0] not in self._shown:
                labels = (names.OTHER, *labels[1:])
            bounded.counters[name, labels] = bounded.counters.get((name, labels), 0) + value
        return bounded

    def _learn(self, seen: set[str]) -> None:
        self._load()
        new = [name for name in sorted(seen) if name not in self._shown][: names.FIELD_LIMIT - len(self._shown)]
        if new:
            self._shown += new
            self._save()

    def _load(self) -> None:
        if not self._shown and self._path.exists():
            try:
                self._shown = msgspec.json.decode(self._path.read_bytes(), type=list[str])[: names.FIELD_LIMIT]
            except (OSError, msgspec.MsgspecError) as exc:
                say_once("labels", f"{self._path} cannot be read and is written anew: {reason(exc)}")

    def _save(self) -> None:
        try:
            snapshot.write_json(self._path, self._shown)
        except OSError as exc:
            say_once("labels", f"{self._path} cannot be written: {reason(exc)}")


def _counter(metric: Metric, totals: Totals) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for (name, labels), value in totals.counters.items():
        if name == metric.name:
            family.add_metric(labels, float(value))
    return family


def _histogram(metric: Metric, totals: Totals) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for (name, labels), histogram in totals.histograms.items():
        if name == metric.name:
            family.add_metric(labels, _buckets(histogram), histogram.sum_ns / 1e9)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative, as the exposition format wants them."""
    counts, running = [], 0
    for bound, n in zip((*names.BUCKETS_S, "+Inf"), histogram.buckets, strict=True):
        running += n
        counts.append((str(bound), float(running)))
    return counts


def _serve(host: str, port: int, collector: NodeCollector) -> Any:
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    server, _ = start_http_server(port, addr=host, registry=registry)
    return server


def _try_hold(path: Path) -> int | None:
    """Take the lock file for as long as this process lives; ``None`` when a sibling holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if snapshot.try_lock(fd, fcntl.LOCK_EX):
        return fd
    os.close(fd)
    return None


def _parse(address: str) -> tuple[str, int] | None:
    if not address:
        return None
    try:
        found = parse(address if ":" in address else f"{DEFAULT_HOST}:{address}")
    except UsageError:
        say_once("address", f"metrics are not served: RTQ_METRICS_PORT={address!r} is neither a port nor address:port")
        return None
    return found.host, found.port
