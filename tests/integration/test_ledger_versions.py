"""Publication: served only when every live engine has it, kept while pinned, never another's bytes."""

import pytest

from domain.errors import DigestMismatch, LedgerError
from storage import runs, versions
from storage.database import Ledger
from storage.versions import Route
from tests.rehearsal import ENGINE, Rehearsal, configuration, digest


def uploaded(ledger: Ledger, **sections: object) -> Rehearsal:
    """Version 0 is served by one engine, version 1 uploaded."""
    run = Rehearsal(ledger, configuration(**sections)).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    run.planned()
    run.apply()
    ledger.call(
        versions.record_weights, "r1", run.epoch, 1, manifest_key="k1", bytes=1, probe={"t": 1}
    )
    return run


def test_a_version_is_served_when_every_live_engine_has_it(ledger: Ledger) -> None:
    run = uploaded(ledger)
    other = "http://engine-1"
    ledger.call(versions.see_engine, "r1", other, 5, 8, 3600.0)
    assert ledger.call(versions.publish, "r1", run.epoch, 1)
    assert ledger.call(versions.publish, "r1", run.epoch, 1)
    assert len(run.commands("publish")) == 2  # of versions 0 and 1, each once
    sha = digest(("step", 0))
    assert ledger.call(versions.acknowledge, "r1", ENGINE, 1, 1, sha)
    assert not ledger.call(versions.mark_served, "r1", 1)
    assert ledger.call(versions.served, "r1") == 0
    assert ledger.call(versions.acknowledge, "r1", other, 5, 1, sha)
    assert ledger.call(versions.acknowledge, "r1", other, 5, 1, sha)
    assert ledger.call(versions.mark_served, "r1", 1)
    assert ledger.call(versions.mark_served, "r1", 1)
    assert ledger.call(versions.served, "r1") == 1
    assert ledger.call(versions.routable, "r1") == [
        Route(ENGINE, 1, 1),
        Route(other, 5, 1),
        Route(ENGINE, 1, 0),
    ]


def test_an_engine_that_falls_silent_is_not_waited_for(ledger: Ledger) -> None:
    run = uploaded(ledger)
    ledger.call(versions.see_engine, "r1", "http://slow", 1, 8, -1.0)
    ledger.call(versions.publish, "r1", run.epoch, 1)
    ledger.call(versions.acknowledge, "r1", ENGINE, 1, 1, digest(("step", 0)))
    assert ledger.call(versions.mark_served, "r1", 1)


def test_nothing_is_served_without_an_engine(ledger: Ledger) -> None:
    run = uploaded(ledger)
    ledger.call(versions.publish, "r1", run.epoch, 1)
    run.do("UPDATE engines SET alive_until = now() - interval '1 s'")
    assert not ledger.call(versions.mark_served, "r1", 1)


def test_a_restarted_engine_loses_its_acknowledgements(ledger: Ledger) -> None:
    run = uploaded(ledger)
    ledger.call(versions.publish, "r1", run.epoch, 1)
    ledger.call(versions.see_engine, "r1", ENGINE, 2, 8, 3600.0)
    assert ledger.call(versions.routable, "r1") == []
    assert not ledger.call(versions.acknowledge, "r1", ENGINE, 1, 1, digest(("step", 0)))
    assert ledger.call(versions.wanted, "r1") == [0, 1]


def test_other_weights_under_a_used_name_are_refused(ledger: Ledger) -> None:
    run = uploaded(ledger)
    ledger.call(versions.publish, "r1", run.epoch, 1)
    with pytest.raises(DigestMismatch, match="restart that engine"):
        ledger.call(versions.acknowledge, "r1", ENGINE, 1, 1, digest("other"))


def test_weights_say_where_they_are_and_what_they_hash_to(ledger: Ledger) -> None:
    run = uploaded(ledger)
    found = ledger.call(versions.weights, "r1", 1)
    assert (found.manifest_key, found.sha256, found.probe) == ("k1", digest(("step", 0)), {"t": 1})
    ledger.call(versions.record_weights, "r1", run.epoch, 1, manifest_key="k2", bytes=1, probe=None)
    assert ledger.call(versions.weights, "r1", 1).manifest_key == "k1"
    with pytest.raises(LedgerError, match="r1@7 is not in the ledger"):
        ledger.call(versions.state, "r1", 7)


def test_a_version_that_was_not_uploaded_is_not_published(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    run.planned()
    run.apply()
    with pytest.raises(LedgerError, match="computed"):
        ledger.call(versions.publish, "r1", run.epoch, 1)
    with pytest.raises(LedgerError, match="not uploaded yet"):
        ledger.call(versions.weights, "r1", 1)


def test_pinned_versions_stay_and_others_retire_after_their_engines_unload(ledger: Ledger) -> None:
    run = uploaded(ledger)
    run.start(2)  # pins version 0
    run.serve(1)
    assert ledger.call(versions.retire, "r1") == []
    assert ledger.call(versions.state, "r1", 0) == "served"
    assert ledger.call(versions.wanted, "r1") == [0, 1]
    run.end(2, 0)
    run.end(2, 1)
    run.admit(2)
    assert ledger.call(versions.retire, "r1") == [0]
    assert ledger.call(versions.retire, "r1") == [0]  # until it is unloaded
    assert ledger.call(versions.wanted, "r1") == [1]
    ledger.call(versions.unloaded, "r1", ENGINE, 0)
    ledger.call(versions.retire, "r1")
    assert ledger.call(versions.state, "r1", 0) == "retired"


def test_a_version_on_its_way_out_is_not_unloaded_under_a_rollout(ledger: Ledger) -> None:
    run = uploaded(ledger)
    run.start(2)
    run.serve(1)
    run.do("UPDATE policy_versions SET state = 'draining' WHERE version = 0")
    assert ledger.call(versions.retire, "r1") == []
    assert ledger.call(versions.wanted, "r1") == [0, 1]


def test_a_publish_without_a_slot_is_held_and_names_who_holds_it(ledger: Ledger) -> None:
    run = uploaded(ledger)
    ledger.call(versions.see_engine, "r1", ENGINE, 1, 1, 3600.0)
    run.start(2)
    assert not ledger.call(versions.publish, "r1", run.epoch, 1)
    assert run.value("SELECT publish_held_by FROM waiting") == "g2 s0.a0, g2 s1.a0"
    run.end(2, 0)
    assert not ledger.call(versions.publish, "r1", run.epoch, 1)
    run.end(2, 1)
    run.admit(2)
    assert ledger.call(versions.publish, "r1", run.epoch, 1)
    assert run.value("SELECT publish_held_by FROM waiting") is None


def test_the_oldest_pinned_rollouts_can_make_room(ledger: Ledger) -> None:
    run = uploaded(ledger, sampling={"on_resident_limit": "cancel"})
    ledger.call(versions.see_engine, "r1", ENGINE, 1, 1, 3600.0)
    run.start(2)
    assert not ledger.call(versions.publish, "r1", run.epoch, 1)
    causes = run.rows("SELECT DISTINCT cancel_cause FROM attempts WHERE group_id = 2")
    assert causes == [{"cancel_cause": "resident_limit"}]
    assert len(run.commands("cancel_sample")) == 2


def test_a_closed_run_keeps_its_versions(ledger: Ledger) -> None:
    run = uploaded(ledger)
    ledger.call(runs.close, "r1", run.epoch, "closed")
    assert ledger.call(versions.served, "r1") == 0


def test_the_publication_of_a_run_that_was_closed_is_over(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    for group in (0, 1):
        run.complete(group)
    run.planned()
    run.record_weights(run.apply())
    assert ledger.call(versions.publish, "r1", run.epoch, 1)
    run.do("UPDATE engines SET alive_until = now()")
    assert not ledger.call(versions.mark_served, "r1", 1)  # an engine may come
    ledger.call(runs.close, "r1", run.epoch, "closed")
    assert ledger.call(versions.mark_served, "r1", 1)  # nobody waits for it any more
    assert ledger.call(versions.state, "r1", 1) == "loading"
    run.take_over()
    assert ledger.call(versions.publish, "r1", run.epoch, 1)  # its next trainer asks again
    assert not ledger.call(versions.mark_served, "r1", 1)
