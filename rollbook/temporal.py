"""The one way to a Temporal frontend: in the clear, over TLS, with a client certificate or an API key."""

from pathlib import Path
from typing import Any

from temporalio.client import Client, TLSConfig

from activities.payloads import MESSAGES
from domain.errors import ConfigError
from domain.services import VARIABLES, Services
from rollbook import traces


async def connect(services: Services) -> Client:
    """A client of the services' frontend and namespace, which continues traces where they are on.

    Raises:
        RPCError, RuntimeError: the frontend is away, or refuses.
        ConfigError: a file of the TLS settings cannot be read.
    """
    return await Client.connect(
        services.temporal_address,
        namespace=services.temporal_namespace,
        data_converter=MESSAGES,
        interceptors=traces.interceptors(),
        **security(services),
    )


def security(services: Services) -> dict[str, Any]:
    """How to talk to the frontend, as arguments of `Client.connect`.

    Raises:
        ConfigError: a file cannot be read.
    """
    files = TLSConfig(
        server_root_ca_cert=_read(services, "temporal_tls_ca"),
        client_cert=_read(services, "temporal_tls_cert"),
        client_private_key=_read(services, "temporal_tls_key"),
    )
    plain = services.temporal_tls or services.temporal_api_key is not None
    return {
        "tls": files if files != TLSConfig() else plain,
        "api_key": services.temporal_api_key,
    }


def _read(services: Services, name: str) -> bytes | None:
    path: Path | None = getattr(services, name)
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{VARIABLES[name]} = {path} cannot be read: {error}") from error
