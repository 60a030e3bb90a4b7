"""Whoever watches a run sees that its ledger is away, and sees the run again when it is back."""

from io import StringIO

from psycopg import conninfo
from rich.console import Console

from rollbook.progress import Progress
from storage.database import Ledger
from tests.outage import Proxy
from tests.rehearsal import Rehearsal, configuration


def test_a_ledger_that_is_away_is_told_of_once_and_ends_nothing(
    ledger: Ledger, ledger_url: str
) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    place = conninfo.conninfo_to_dict(ledger_url)
    shown = StringIO()
    with Proxy(str(place["host"]), int(str(place["port"]))) as proxy:
        url = conninfo.make_conninfo(ledger_url, host="127.0.0.1", port=proxy.port)
        watched = Ledger.open(url, pool=1, patience_s=60)
        progress = Progress(configuration(), watched, Console(file=shown), json=False)
        progress.refresh()
        proxy.cut()
        progress.refresh()
        run.planned()
        run.apply()
        proxy.mend()
        while not progress.steps:
            progress.refresh()
        watched.close()
    assert shown.getvalue().count("the ledger does not answer, the run waits for it") == 1
    assert "step 0" in shown.getvalue()
