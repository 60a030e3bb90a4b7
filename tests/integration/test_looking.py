"""Looking at a real run: the queries of docs/sql.md, decoding, the report, the sinks, the reader role."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.rows import dict_row

from rollbook.sinks import prometheus
from tests.short_run import RUN, ShortRun

pytestmark = pytest.mark.timeout(300)

DOCUMENT = Path(__file__).parents[2] / "docs" / "sql.md"
QUESTION = re.compile(
    r"### (?P<question>[^\n]+)\n.*?```sql\n(?P<query>.*?)```\n```text\n(?P<answer>.*?)```",
    re.DOTALL,
)
EMPTY = "(no rows)"
SHOWN = 8


def questions() -> list[tuple[str, str, str]]:
    found = QUESTION.finditer(DOCUMENT.read_text("utf-8"))
    return [(m["question"], m["query"], m["answer"]) for m in found]


BOARD = DOCUMENT.parents[1] / "deploy" / "grafana" / "dashboards" / "rollbook.json"


def test_every_panel_of_the_dashboard_answers_on_a_real_run(short_run: ShortRun) -> None:
    """As Grafana asks: by the role that can only read, its variables filled in."""
    board = json.loads(BOARD.read_text("utf-8"))
    (choice,) = board["templating"]["list"]
    assert ask(short_run.reader_url, choice["query"]) == [{"run_id": RUN}]
    empty = []
    for panel in board["panels"]:
        for target in panel["targets"]:
            if "rawSql" not in target:
                continue
            query = re.sub(
                r"\$__timeFilter\((\w+)\)", r"\1 > now() - interval '1 day'", target["rawSql"]
            )
            rows = ask(short_run.reader_url, query.replace("$run", RUN))
            if not rows:
                empty.append(panel["title"])
            for row in rows if panel["type"] in ("trend", "timeseries") else ():
                plotted = [v for name, v in row.items() if name not in ("time", "step", "version")]
                assert all(v is None or isinstance(v, float | int | Decimal) for v in plotted)
    assert empty == ["Stuck rollouts"]


def test_the_dashboard_asks_prometheus_for_what_is_exported() -> None:
    board = json.loads(BOARD.read_text("utf-8"))
    asked = " ".join(t.get("expr", "") for p in board["panels"] for t in p["targets"])
    names = set(re.findall(r"rollbook_\w+", asked))
    assert names
    assert names <= set(prometheus.QUERIES)


def ask(url: str, query: str) -> list[dict[str, Any]]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        return connection.execute(query.encode()).fetchall()


def answer(url: str, query: str) -> str:
    with psycopg.connect(url) as connection:
        cursor = connection.execute(query.encode())
        names = [column.name for column in cursor.description or ()]
        return written(names, cursor.fetchall())


def written(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    """A plain table, as psql writes it."""
    cells = [["" if v is None else str(v) for v in row] for row in rows[:SHOWN]]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (names, *cells)
    ]
    lines.insert(1, "-+-".join("-" * width for width in widths))
    return "\n".join(lines if rows else [*lines, EMPTY]) + "\n"


def test_every_documented_query_answers_on_a_real_run(short_run: ShortRun) -> None:
    asked = questions()
    assert len(asked) >= 20
    answers = {}
    wrong = []
    for question, query, documented in asked:
        try:
            answers[question] = answer(short_run.reader_url, query)
        except psycopg.Error as error:
            wrong.append(f"{question} {error}")
            continue
        now, said = answers[question].splitlines(), documented.splitlines() or [""]
        if now[0].split() != said[0].split():
            wrong.append(f"{question} documented {said[0]}, now {now[0]}")
        if EMPTY in now and EMPTY not in said:
            wrong.append(f"{question} has no answer any more")
    if os.environ.get("RECORD_ANSWERS") and len(answers) == len(asked):

        def answered(match: "re.Match[str]") -> str:
            start, end = match.start(3) - match.start(), match.end(3) - match.start()
            return match[0][:start] + answers[match[1]] + match[0][end:]

        DOCUMENT.write_text(QUESTION.sub(answered, DOCUMENT.read_text("utf-8")), "utf-8")
        return
    assert wrong == []


def test_the_reader_reads_and_nothing_else(short_run: ShortRun) -> None:
    assert ask(short_run.reader_url, "SELECT state FROM runs") == [{"state": "finished"}]
    with psycopg.connect(short_run.reader_url, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        for forbidden in (
            "UPDATE runs SET state = 'failed', failure = 'x'",
            "DELETE FROM queue",
            "CREATE TABLE ledger.mine(x int)",
            "SELECT * FROM gateway_keys",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(forbidden.encode())


def rollbook(run: ShortRun, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rollbook", *arguments],
        env=run.environment() | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_sql_takes_one_statement_that_only_reads(short_run: ShortRun) -> None:
    assert "36" in rollbook(short_run, "sql", "SELECT trained FROM balance")
    rollbook(short_run, "sql", "COMMIT; DELETE FROM events", code=2)
    rollbook(short_run, "sql", "DELETE FROM events", code=2)
    assert ask(short_run.reader_url, "SELECT count(*) > 0 AS some FROM events") == [{"some": True}]


def test_decode_shows_what_was_asked_and_said(short_run: ShortRun) -> None:
    (row,) = ask(
        short_run.reader_url,
        "SELECT group_id, task_id FROM trained_rollouts WHERE sample = 0 ORDER BY group_id LIMIT 1",
    )
    text = rollbook(short_run, "decode", RUN, str(row["group_id"]), "0")
    assert f"{row['task_id']}=" in text
    assert "v" in text
    assert "has no group 99999" in rollbook(short_run, "decode", RUN, "99999", code=2)


def test_the_report_is_one_page_that_needs_nothing_else(
    short_run: ShortRun, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    rollbook(short_run, "report", RUN, "--out", str(path))
    text = path.read_text("utf-8")
    assert not re.search(r"(?:src|href)=|https?://|@import", text)
    for title in ("Reward", "Lag", "Status", "Waiting", "Lengths", "Throughput", "Mismatch"):
        assert f"<b>{title}</b>" in text
    assert text.count("trained in step 5 at lag") == 24  # six groups of four
    assert "nothing was recorded" not in text
    if kept := os.environ.get("KEEP_REPORT"):
        Path(kept).write_text(text, "utf-8")


def test_step_records_are_copied_once_however_often_one_asks(
    short_run: ShortRun, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    rollbook(short_run, "log", RUN, "--to", f"jsonl:{path}")
    whole = path.read_bytes()
    lines = whole.splitlines()
    path.write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][:20])  # torn by a crash
    rollbook(short_run, "log", RUN, "--to", f"jsonl:{path}", "--follow")
    assert path.read_bytes() == whole
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(6))
    assert all("reward/mean" in record and record["groups"] == 6 for record in records)
    assert "is no sink" in rollbook(short_run, "log", RUN, "--to", "paper:x", code=2)


def test_tensorboard_gets_each_step_once(short_run: ShortRun, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    for _ in range(2):
        rollbook(short_run, "log", RUN, "--to", f"tensorboard:{tmp_path}")
    steps = [
        event.step
        for path in sorted((tmp_path / RUN).glob("events*"))
        for event in loader.EventFileLoader(str(path)).Load()
        if event.HasField("summary")
    ]
    assert steps == list(range(6))


def test_mlflow_gets_each_step_once(short_run: ShortRun, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    database = tmp_path / "mlflow.db"
    for _ in range(2):
        rollbook(short_run, "log", RUN, "--to", f"mlflow:sqlite:///{database}")
    with closing(sqlite3.connect(database)) as connection:
        query = "SELECT step FROM metrics WHERE key = 'reward/mean' ORDER BY step"
        assert [step for (step,) in connection.execute(query)] == list(range(6))


def test_wandb_works_offline(
    short_run: ShortRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    rollbook(short_run, "log", RUN, "--to", "wandb:tests")
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_prometheus_scrapes_the_views(short_run: ShortRun) -> None:
    pytest.importorskip("prometheus_client")
    from rollbook.sinks import prometheus

    server = prometheus.serve(short_run.ledger, host="127.0.0.1", port=0)
    try:
        text = httpx.get(f"http://127.0.0.1:{server.server_port}/metrics", timeout=20).text
    finally:
        server.shutdown()
        server.server_close()
    assert 'rollbook_run{run="reverse3",state="finished"} 1.0' in text
    assert 'rollbook_groups{place="trained",run="reverse3"} 36.0' in text
    assert 'rollbook_step_figure{name="reward/mean",run="reverse3"}' in text
    assert "rollbook_ledger_violations 0.0" in text
