"""One steward leads, and keeps house."""

import asyncio
import secrets
from datetime import UTC, date, datetime, timedelta

import psycopg
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client

from activities import namespace
from activities.payloads import MESSAGES
from storage import housekeeping, outbox
from tests.steward_scene import (
    Scene,
    holders,
    patiently,
    running,
    undelivered,
    until,
)


async def test_another_steward_leads_when_the_leader_loses_its_lock(scene: Scene) -> None:
    scene.run.hand_over()
    async with asyncio.TaskGroup() as tasks:
        stewards = [tasks.create_task(scene.steward().run()) for _ in range(2)]
        await until(lambda: undelivered(scene.run) == 0)
        assert len(holders(scene.url)) == 1
        with psycopg.connect(scene.url, autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(%s)", (holders(scene.url)[0],))
        scene.run.do("UPDATE outbox SET done_at = NULL WHERE kind = 'start_group'")
        await until(lambda: undelivered(scene.run) == 0)
        await until(lambda: len(holders(scene.url)) == 1)
        for steward in stewards:
            steward.cancel()
    for group in range(4):
        await scene.handle(group).terminate()


async def test_a_wiped_temporal_is_refilled_from_the_ledger(scene: Scene) -> None:
    from temporalio.testing import WorkflowEnvironment  # its server is this test's own

    from rollbook.stack import ports, temporal

    port = ports.choose(0)

    async def serve() -> WorkflowEnvironment:
        return await WorkflowEnvironment.start_local(
            port=port,
            namespace="rollbook",
            data_converter=MESSAGES,
            dev_server_existing_path=str(temporal.binary()),
            dev_server_log_level="error",
        )

    scene.run.hand_over()
    first = await serve()
    async with asyncio.TaskGroup() as tasks:
        steward = tasks.create_task(scene.steward(client=first.client).run())
        async with scene.workers(first.client):
            await until(lambda: running(scene.run) == 8)
        await first.shutdown()
        second = await serve()
        scene.rollouts.gate.set()
        async with scene.workers(second.client):
            await until(lambda: set(scene.run.states().values()) == {"queue"}, seconds=60)
        steward.cancel()
    await second.shutdown()
    assert scene.run.value("SELECT count(*) FROM attempts WHERE counts_as_failure") == 0


async def test_old_commands_go_and_coming_days_get_partitions(scene: Scene) -> None:
    scene.run.do("UPDATE outbox SET done_at = now() - interval '2 hours'")
    assert scene.ledger.call(outbox.purge, older_s=3600) > 0
    today = datetime.now(UTC).date()
    assert scene.ledger.call(housekeeping.add_event_partitions, today) == 3
    assert scene.ledger.call(housekeeping.add_event_partitions, today) == 0
    # The default partition holds rows of today, so today's would be refused: it is left as it is.
    assert scene.ledger.call(housekeeping.add_event_partitions, today - timedelta(days=1)) == 0
    assert scene.ledger.call(housekeeping.add_event_partitions, date(2031, 5, 6), days=1) == 1


async def test_the_namespace_and_its_search_attributes_are_made_once(temporal_address: str) -> None:
    client = await Client.connect(temporal_address, namespace=f"n{secrets.token_hex(4)}")
    for _ in range(3):
        await patiently(lambda: namespace.ensure(client))
    listed = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    assert {key.name for key in namespace.SEARCH_ATTRIBUTES} <= set(listed.custom_attributes)
