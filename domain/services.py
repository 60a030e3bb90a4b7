"""The service addresses and credentials, from the environment: read once, validated here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from domain.config import Section
from domain.errors import ConfigError

VLLM_PYTHON = "ROLLBOOK_VLLM_PYTHON"
"""Names the interpreter of the environment that has vLLM, on the machine that runs the engine."""


def vllm_python(environ: Mapping[str, str]) -> Path | None:
    """The interpreter that starts vLLM servers; None: the environment names none."""
    return Path(environ[VLLM_PYTHON]) if environ.get(VLLM_PYTHON) else None


VARIABLES = {
    "database_url": "ROLLBOOK_DATABASE_URL",
    "temporal_address": "ROLLBOOK_TEMPORAL_ADDRESS",
    "temporal_namespace": "ROLLBOOK_TEMPORAL_NAMESPACE",
    "temporal_ui": "ROLLBOOK_TEMPORAL_UI",
    "s3_endpoint": "ROLLBOOK_S3_ENDPOINT",
    "s3_bucket": "ROLLBOOK_S3_BUCKET",
    "s3_access_key": "AWS_ACCESS_KEY_ID",
    "s3_secret_key": "AWS_SECRET_ACCESS_KEY",
    "s3_region": "AWS_REGION",
    "engines": "ROLLBOOK_ENGINES",
    "engines_run": "ROLLBOOK_ENGINES_RUN",
    "gateway": "ROLLBOOK_GATEWAY",
}


class Services(Section):
    """Addresses and credentials, from the environment. Never logged, never in the ledger."""

    database_url: str
    """`ROLLBOOK_DATABASE_URL`: postgresql://user:password@host:port/database"""
    temporal_address: str
    """`ROLLBOOK_TEMPORAL_ADDRESS`: host:port of the frontend."""
    temporal_namespace: str = "rollbook"
    """`ROLLBOOK_TEMPORAL_NAMESPACE`"""
    temporal_ui: str | None = None
    """`ROLLBOOK_TEMPORAL_UI`: where people look, for messages only."""
    s3_endpoint: str
    """`ROLLBOOK_S3_ENDPOINT`"""
    s3_bucket: str = "rollbook-data"
    """`ROLLBOOK_S3_BUCKET`"""
    s3_access_key: str = Field(repr=False)
    """`AWS_ACCESS_KEY_ID`"""
    s3_secret_key: str = Field(repr=False)
    """`AWS_SECRET_ACCESS_KEY`"""
    s3_region: str = "us-east-1"
    """`AWS_REGION`"""
    engines: tuple[str, ...] = ()
    """`ROLLBOOK_ENGINES`: base URLs, separated by commas."""
    gateway: str | None = None
    """`ROLLBOOK_GATEWAY`: base URL of the recording gateway, as programs of rollout workers see it."""
    engines_run: str | None = None
    """`ROLLBOOK_ENGINES_RUN`: the one run these engines serve; default: every run of the ledger."""

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        hidden = ("s3_access_key", "s3_secret_key", "database_url")
        return [(k, v) for k, v in super().__repr_args__() if k not in hidden]

    def environment(self) -> dict[str, str]:
        """The variables that give a child process these services."""
        values = {VARIABLES[name]: getattr(self, name) for name in VARIABLES if name != "engines"}
        values["ROLLBOOK_ENGINES"] = ",".join(self.engines)
        return {name: value for name, value in values.items() if value}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables of VARIABLES.

        Raises:
            ConfigError: names the variables that are missing or wrong.
        """
        found: dict[str, Any] = {
            field: environ[name] for field, name in VARIABLES.items() if environ.get(name)
        }
        if "engines" in found:
            found["engines"] = tuple(u.strip() for u in found["engines"].split(",") if u.strip())
        missing = [
            VARIABLES[name]
            for name, field in cls.model_fields.items()
            if field.is_required() and name not in found
        ]
        if missing:
            raise ConfigError(
                f"no address for {', '.join(missing)}; set them, or let `rollbook up` start the "
                "services"
            )
        return cls.model_validate(found)
