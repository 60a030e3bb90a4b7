"""Checks of services that somebody else runs: each by a real operation, before anything starts."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import psycopg

from domain.errors import ConfigError
from domain.services import VARIABLES, Services
from rollbook.stack.parts import PARTS
from storage.objects import ObjectStore

_OLDEST_POSTGRES = 15
_PATIENCE_S = 10.0


def check(services: Services, parts: Iterable[str] = PARTS) -> None:
    """Log in to each part and use it, in parallel.

    Raises:
        ConfigError: names the variable of the part that does not work, and why; all of them.
    """
    checks = {"postgres": check_postgres, "temporal": check_temporal, "s3": check_store}
    with ThreadPoolExecutor(len(checks)) as pool:
        tried = [pool.submit(checks[part], services) for part in parts]
    problems = [str(error) for one in tried if (error := one.exception()) is not None]
    unforeseen = [e for one in tried if (e := one.exception()) and not isinstance(e, ConfigError)]
    if unforeseen:
        raise unforeseen[0]
    if problems:
        raise ConfigError("\n".join(problems))


def check_postgres(services: Services) -> None:
    """Log in, and see that schemas may be made."""
    variable = VARIABLES["database_url"]
    try:
        with psycopg.connect(services.database_url, connect_timeout=int(_PATIENCE_S)) as tx:
            row = tx.execute(
                "SELECT current_setting('server_version_num')::int / 10000, current_database(),"
                " has_database_privilege(current_database(), 'CREATE')"
            ).fetchone()
    except psycopg.ProgrammingError as error:
        raise ConfigError(
            f"{variable} is no address ({error}); write postgresql://user:password@host:port/database"
        ) from error
    except psycopg.Error as error:
        raise ConfigError(
            f"{variable}: no connection to the database: {str(error).strip()}; check the address "
            "and the password"
        ) from error
    assert row is not None
    version, database, may_create = row
    if version < _OLDEST_POSTGRES:
        raise ConfigError(
            f"{variable}: the server is PostgreSQL {version}; the ledger needs {_OLDEST_POSTGRES} or newer"
        )
    if not may_create:
        raise ConfigError(
            f"{variable}: this user may not make a schema in database {database!r}; grant it with "
            f'GRANT CREATE ON DATABASE "{database}"'
        )


def check_temporal(services: Services) -> None:
    """Connect, and ask the frontend for its namespace; one that is missing is made later."""
    asyncio.run(_check_temporal(services))


async def _check_temporal(services: Services) -> None:
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
    from temporalio.service import RPCError, RPCStatusCode

    from rollbook import temporal

    address, namespace = services.temporal_address, services.temporal_namespace
    variable = VARIABLES["temporal_address"]
    try:
        async with asyncio.timeout(_PATIENCE_S):
            client = await temporal.connect(services)
            await client.workflow_service.describe_namespace(
                DescribeNamespaceRequest(namespace=namespace)
            )
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise ConfigError(f"{variable} = {address}: the server refuses: {error}") from error
    except (RuntimeError, ValueError, TimeoutError) as error:
        why = str(error) or f"no answer within {_PATIENCE_S:g} s"
        raise ConfigError(
            f"{variable} = {address}: no connection to Temporal: {why}; check host:port, and "
            f"whether it talks TLS ({VARIABLES['temporal_tls']})"
        ) from error


def check_store(services: Services) -> None:
    """Make the bucket if needed, and put, twice, an object that may be created only once."""
    # Few tries: a wrong address should be told at once.
    ObjectStore(services, attempts=3).prepare()
