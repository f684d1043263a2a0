"""`/metrics`: the server's state in Prometheus' text format, and for the page as JSON.

Invariant: a figure that is not known is left out, never 0. Energy is what the named rail counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from edge_runtime.decode.memory import peak_rss_bytes
from edge_runtime.power.meter import open_source
from edge_runtime.power.source import PowerUnavailable, Sample, Source
from edge_runtime.serve.worker import Worker

log = logging.getLogger(__name__)

LONGEST_GAP_S = 5.0  # between two readings whose energy is still counted
INTERVAL_S = 0.25
NAME = "bitnest_edge"
# https://prometheus.io/docs/practices/naming: base units; a counter ends with _total, which the
# library adds. (name, field, text)
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Tokens of prompts"),
    ("cached_tokens", "cached_tokens", "Tokens of prompts that were in the cache"),
    ("new_tokens", "new_tokens", "Tokens of answers"),
    ("drafted_tokens", "drafted", "Tokens that were drafted"),
    ("accepted_tokens", "accepted", "Drafted tokens that were accepted"),
    ("cycles", "cycles", "Verifications"),
    ("decode_seconds", "decode_s", "Time in decoding"),
    ("busy_seconds", "busy_s", "Time in which a request ran"),
)
GAUGES = (
    ("waiting_requests", "waiting", "Requests that wait"),
    ("running_requests", "busy", "Requests that run, one at most"),
    ("uptime_seconds", "uptime_s", "Time since the start"),
    ("context_tokens", "context", "Tokens that fit"),
    ("last_tokens_per_second", "tok_s", "Decoding speed of the last answer"),
    ("last_first_token_seconds", "ttft_s", "Time to the first token of the last answer"),
    ("last_acceptance_ratio", "acceptance", "Share of drafted tokens accepted in the last answer"),
    ("temperature_celsius", "temperature_c", "Hottest sensor"),
)


class Power:
    """Readings of a rail, added up; nothing grows with time."""

    def __init__(self, source: str) -> None:
        """source: of `power.meter.open_source`. Raises what that does, but for `auto` without a
        source, which is told once."""
        self.joules = 0.0
        self.latest: Sample | None = None
        self._lock = threading.Lock()
        self._source: Source | None = None
        try:
            self._source, _ = open_source(source, interval_s=INTERVAL_S)
        except PowerUnavailable as error:
            if source != "auto":
                raise
            log.info("no watts and joules in /metrics: %s", error.message)

    @property
    def rail(self) -> str:
        """The rail that is counted; nothing without a source."""
        return "" if self._source is None else self._source.rail

    def start(self) -> None:
        """Begin to read."""
        if self._source is not None:
            self._source.start(self._take)

    def stop(self) -> None:
        """Read no more."""
        if self._source is not None:
            self._source.stop()

    def _take(self, sample: Sample) -> None:
        with self._lock:
            if (before := self.latest) is not None:
                gap = sample.time_s - before.time_s
                if sample.energy_mj is not None and before.energy_mj is not None:
                    self.joules += max(0.0, sample.energy_mj - before.energy_mj) * 1e-3
                elif 0 < gap <= LONGEST_GAP_S:
                    self.joules += (sample.total_mw + before.total_mw) / 2 * 1e-3 * gap
            self.latest = sample


@dataclass(eq=False)  # a collector is known by itself
class State:
    """What both forms are made from."""

    worker: Worker
    power: Power
    model: str
    started_s: float

    def gauges(self) -> dict[str, Any]:
        """What the page shows; keys of what is not known are missing."""
        engine, totals, last = self.worker.engine, self.worker.totals, self.worker.last
        memory = engine.memory()
        found: dict[str, Any] = {
            "model": self.model,
            "backend": engine.backend_name,
            "view": engine.view,
            "context": engine.context,
            "uptime_s": round(time.monotonic() - self.started_s, 1),
            "busy": self.worker.busy,
            "waiting": self.worker.waiting,
            "new_tokens": totals.new_tokens,
            "emitted_tokens": self.worker.emitted,
            "weights_bytes": memory["weights_bytes"],
            "kv_bytes": memory["kv_bytes"],
            "rss_bytes": psutil.Process().memory_info().rss,
            "peak_bytes": peak_rss_bytes(),
            "available_bytes": psutil.virtual_memory().available,
        }
        if last is not None:
            found["tok_s"] = round(last.decode_tok_s, 2)
            found["ttft_s"] = round(last.ttft_s, 4)
            if last.draft.get("drafted"):
                found["acceptance"] = last.draft["acceptance"]
                found["tokens_per_cycle"] = last.draft["tokens_per_cycle"]
        if (sample := self.power.latest) is not None:
            found |= {
                "rail": self.power.rail,
                "watts": round(sample.total_mw * 1e-3, 3),
                "joules": round(self.power.joules, 3),
            }
            if sample.record is not None and sample.record.temperatures_c:
                found["temperature_c"] = max(sample.record.temperatures_c.values())
        return found

    def collect(self) -> Iterator[Metric]:
        """What Prometheus reads; called by its registry."""
        totals, g = self.worker.totals, self.gauges()
        ended = CounterMetricFamily(f"{NAME}_requests", "Requests that ended", labels=["end"])
        for how, count in sorted(totals.requests.items()):
            ended.add_metric([how], count)
        yield ended
        for name, field, text in COUNTERS:
            yield CounterMetricFamily(f"{NAME}_{name}", text, value=getattr(totals, field))
        memory = GaugeMetricFamily(f"{NAME}_memory_bytes", "Memory", labels=["kind"])
        for kind in ("weights", "kv", "rss", "peak", "available"):
            memory.add_metric([kind], g[f"{kind}_bytes"])
        yield memory
        for name, field, text in GAUGES:
            if field in g:
                yield GaugeMetricFamily(f"{NAME}_{name}", text, value=float(g[field]))
        if "watts" in g:
            watts = GaugeMetricFamily(f"{NAME}_power_watts", "Power now", labels=["rail"])
            watts.add_metric([g["rail"]], g["watts"])
            joules = CounterMetricFamily(
                f"{NAME}_energy_joules", "Energy since the start", labels=["rail"]
            )
            joules.add_metric([g["rail"]], g["joules"])
            yield from (watts, joules)

    def prometheus(self) -> bytes:
        """The text format."""
        registry = CollectorRegistry()
        registry.register(cast(Any, self))
        return generate_latest(registry)
