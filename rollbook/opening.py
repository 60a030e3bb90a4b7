"""How processes that outlive an outage open the ledger: it may be away when they start."""

import asyncio
import logging

import psycopg

from domain.services import Services
from storage.database import Ledger, check_schema

RETRY_S = 1.0

logger = logging.getLogger(__name__)


async def open_ledger(services: Services, *, application: str, patience_s: float) -> Ledger:
    """Wait for the ledger, for ever and saying so, and open it.

    Args:
        services: where it is.
        application: shown in pg_stat_activity.
        patience_s: as for `Ledger.open`.

    Raises:
        SchemaMismatch: it belongs to another version of this code.
    """
    while True:
        try:
            await asyncio.to_thread(check_schema, services.database_url)
            return await asyncio.to_thread(
                Ledger.open, services.database_url, application=application, patience_s=patience_s
            )
        except psycopg.OperationalError as error:
            logger.warning("the ledger: %s", error)
            await asyncio.sleep(RETRY_S)
