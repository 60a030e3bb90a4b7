"""Names that cross Temporal as strings, because their callers must not import each other.

The relay starts and signals workflows, which import it; the workflow worker starts attempts without
importing what plays them (tokenizers, the object store).
"""

from typing import Any, get_type_hints

from temporalio import activity, workflow

from activities.attempt import Attempts
from domain.messages import AttemptIn, AttemptRef
from workflows.group import GroupWorkflow
from workflows.publish import PublishWorkflow


def test_workflows_have_the_names_the_relay_uses() -> None:
    for of, name in ((GroupWorkflow, "GroupWorkflow"), (PublishWorkflow, "PublishWorkflow")):
        definition: Any = workflow._Definition.must_from_class(of)
        assert definition.name == name


def test_signals_and_queries_have_the_names_the_steward_uses() -> None:
    definition: Any = workflow._Definition.must_from_class(GroupWorkflow)
    expected = {"cancel_sample", "close_group", "deadline_reached", "stuck"}
    assert set(definition.signals) == expected
    assert "state" in definition.queries


def test_the_attempt_has_the_name_and_types_the_workflow_uses() -> None:
    definition: Any = activity._Definition.must_from_callable(Attempts.run_attempt)
    assert definition.name == "run_attempt"
    hints = get_type_hints(Attempts.run_attempt)
    assert (hints["i"], hints["return"]) == (AttemptIn, AttemptRef)
