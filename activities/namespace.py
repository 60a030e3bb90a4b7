"""Temporal's namespace and rollbook's search attributes, made sure of again and again.

A development server that lost its database has neither, and one with an existing database ignores
`--search-attribute`. So this runs at every boot and every minute; all of it is idempotent.

Temporal Cloud has both made by its owner and shows an application neither: there, what is missing is
told by the refusal of the first workflow.
"""

import logging
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import (
    AddSearchAttributesRequest,
    ListSearchAttributesRequest,
)
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError, RPCStatusCode

from domain.errors import ConfigError

logger = logging.getLogger(__name__)

RUN = SearchAttributeKey.for_keyword("RollbookRun")
STAGE = SearchAttributeKey.for_keyword("RollbookStage")
ENVIRONMENT = SearchAttributeKey.for_keyword("RollbookEnv")
CAUSES = SearchAttributeKey.for_keyword_list("RollbookCauses")
BATCH = SearchAttributeKey.for_int("RollbookBatch")
SUBMITTED_VERSION = SearchAttributeKey.for_int("RollbookSubmittedVersion")
RESUBMISSIONS = SearchAttributeKey.for_int("RollbookResubmissions")
DUE = SearchAttributeKey.for_datetime("RollbookDue")

# SQL visibility has three columns of type Int, and all three are taken.
SEARCH_ATTRIBUTES = (
    RUN,
    STAGE,
    ENVIRONMENT,
    CAUSES,
    BATCH,
    SUBMITTED_VERSION,
    RESUBMISSIONS,
    DUE,
)

_NOT_OURS = frozenset({RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNIMPLEMENTED})

RETENTION = timedelta(days=30)
"""How long Temporal remembers closed workflows. What must last stands in the ledger."""


async def ensure(client: Client) -> None:
    """Register the client's namespace and rollbook's search attributes where they are missing.

    Raises:
        RPCError: Temporal is away, or a search attribute exists with another type.
    """
    await _ensure_namespace(client)
    await _ensure_search_attributes(client)


async def _ensure_namespace(client: Client) -> None:
    service = client.workflow_service
    try:
        await service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        await _register_namespace(client)


async def _register_namespace(client: Client) -> None:
    retention = Duration()
    retention.FromTimedelta(RETENTION)
    try:
        await client.workflow_service.register_namespace(
            RegisterNamespaceRequest(
                namespace=client.namespace, workflow_execution_retention_period=retention
            )
        )
    except RPCError as error:
        if error.status is not RPCStatusCode.ALREADY_EXISTS:  # another worker was faster
            raise


async def _ensure_search_attributes(client: Client) -> None:
    service = client.operator_service
    try:
        listed = await service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
    except RPCError as error:
        if error.status not in _NOT_OURS:
            raise
        logger.info(
            "namespace %s does not show its search attributes (%s); docs/cluster.md lists those it "
            "must have",
            client.namespace,
            error.status.name,
        )
        return
    missing = {
        key.name: IndexedValueType.ValueType(key.indexed_value_type)
        for key in SEARCH_ATTRIBUTES
        if key.name not in listed.custom_attributes
    }
    if not missing:
        return
    try:
        await service.add_search_attributes(
            AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
        )
    except RPCError as error:
        if error.status in _NOT_OURS:
            raise ConfigError(
                f"namespace {client.namespace!r} lacks the search attributes "
                f"{', '.join(sorted(missing))}, and this identity may not add them; docs/cluster.md "
                "says how its owner does"
            ) from error
        if error.status is not RPCStatusCode.ALREADY_EXISTS:
            raise
