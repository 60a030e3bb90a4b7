"""A Prometheus endpoint over the ledger's views: asked when it is scraped, nothing is kept."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from storage.database import Ledger, Tx

Row = dict[str, Any]

QUERIES = {
    "rollbook_run": (
        "A run and its state",
        "SELECT run_id AS run, state, 1 AS value FROM ledger.runs",
    ),
    "rollbook_step": (
        "Steps applied",
        "SELECT run_id AS run, next_step AS value FROM ledger.runs",
    ),
    "rollbook_version": (
        "The trainer's policy version",
        "SELECT run_id AS run, version AS value FROM ledger.runs",
    ),
    "rollbook_served_version": (
        "The newest version that engines serve",
        "SELECT run_id AS run, version AS value FROM ledger.served",
    ),
    "rollbook_groups": (
        "Groups by place",
        "SELECT b.run_id AS run, p.key AS place, p.value::float8 AS value FROM ledger.balance b, "
        "jsonb_each_text(to_jsonb(b) - 'run_id' - 'drawn' - 'owed') p",
    ),
    "rollbook_attempts_live": (
        "Live attempts by state",
        "SELECT run_id AS run, state, count(*) AS value FROM ledger.attempts "
        "WHERE state IN ('submitted', 'running') GROUP BY 1, 2",
    ),
    "rollbook_stuck_rollouts": (
        "Rollouts without progress for groups.stuck_after",
        "SELECT run_id AS run, count(*) AS value FROM ledger.stuck_rollouts GROUP BY 1",
    ),
    "rollbook_resubmissions": (
        "Attempts that were sampled again, by cause",
        "SELECT run_id AS run, cause::text, n AS value FROM ledger.resubmissions",
    ),
    "rollbook_wasted_tokens": (
        "Tokens of resubmitted attempts, by cause",
        "SELECT run_id AS run, cause::text, coalesce(wasted_tokens, 0) AS value "
        "FROM ledger.resubmissions",
    ),
    "rollbook_slack": (
        "Places left before the trainer must hold; below zero it holds",
        "SELECT run_id AS run, share::text, slack AS value FROM ledger.waiting "
        "WHERE slack IS NOT NULL",
    ),
    "rollbook_undelivered_commands": (
        "Commands of the ledger that Temporal has not got",
        "SELECT run_id AS run, count(*) AS value FROM ledger.outbox WHERE done_at IS NULL GROUP BY 1",
    ),
    "rollbook_engines_alive": (
        "Engines that were seen lately",
        "SELECT run_id AS run, count(*) FILTER (WHERE alive_until > now()) AS value "
        "FROM ledger.engines GROUP BY 1",
    ),
    "rollbook_trainer_lease_seconds": (
        "Seconds left of the trainer's lease; below zero nobody trains the run",
        "SELECT run_id AS run, extract(epoch FROM trainer_lease_until - now()) AS value "
        "FROM ledger.runs WHERE trainer_lease_until IS NOT NULL",
    ),
    "rollbook_last_step_age_seconds": (
        "Seconds since the newest step",
        "SELECT run_id AS run, extract(epoch FROM now() - max(applied_at)) AS value "
        "FROM ledger.steps WHERE applied_at IS NOT NULL GROUP BY 1",
    ),
    "rollbook_quarantined_tasks": (
        "Tasks that are not drawn because they keep failing",
        "SELECT run_id AS run, count(*) AS value FROM ledger.quarantine "
        "WHERE released_at IS NULL GROUP BY 1",
    ),
    "rollbook_step_figure": (
        "Figures of the newest step's record",
        "SELECT s.run_id AS run, m.key AS name, (m.value #>> '{}')::float8 AS value "
        "FROM ledger.runs r JOIN ledger.steps s ON (s.run_id, s.step) = (r.run_id, r.next_step - 1), "
        "jsonb_each(s.metrics) m WHERE jsonb_typeof(m.value) = 'number'",
    ),
    "rollbook_ledger_violations": (
        "Broken rules of the ledger; always zero",
        "SELECT count(*) AS value FROM ledger.ledger_violations",
    ),
}
"""Metric name -> help and query; every column but `value` is a label."""


class LedgerCollector(Collector):
    """One read-only transaction a scrape."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, in one snapshot."""
        found = self._ledger.call(_read)
        for name, (told, _) in QUERIES.items():
            rows = found[name]
            labels = [column for column in (rows[0] if rows else {}) if column != "value"]
            family = GaugeMetricFamily(name, told, labels=labels)
            for row in rows:
                family.add_metric([str(row[label]) for label in labels], float(row["value"]))
            yield family


def serve(ledger: Ledger, *, host: str, port: int) -> Any:
    """Answer /metrics in a thread; the server, to be shut down."""
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger))
    server, _ = start_http_server(port, addr=host, registry=registry)
    return server


def _read(tx: Tx) -> Mapping[str, list[Row]]:
    tx.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
    return {name: tx.execute(query.encode()).fetchall() for name, (_, query) in QUERIES.items()}
