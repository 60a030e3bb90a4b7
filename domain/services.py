"""The service addresses and credentials, from the environment: read once, validated here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

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
    "temporal_api_key": "ROLLBOOK_TEMPORAL_API_KEY",
    "temporal_tls": "ROLLBOOK_TEMPORAL_TLS",
    "temporal_tls_ca": "ROLLBOOK_TEMPORAL_TLS_CA",
    "temporal_tls_cert": "ROLLBOOK_TEMPORAL_TLS_CERT",
    "temporal_tls_key": "ROLLBOOK_TEMPORAL_TLS_KEY",
    "s3_endpoint": "ROLLBOOK_S3_ENDPOINT",
    "s3_bucket": "ROLLBOOK_S3_BUCKET",
    "s3_access_key": "AWS_ACCESS_KEY_ID",
    "s3_secret_key": "AWS_SECRET_ACCESS_KEY",
    "s3_session_token": "AWS_SESSION_TOKEN",
    "s3_region": "AWS_REGION",
    "engines": "ROLLBOOK_ENGINES",
    "engines_run": "ROLLBOOK_ENGINES_RUN",
    "gateway": "ROLLBOOK_GATEWAY",
}


_PAIRS = (("s3_access_key", "s3_secret_key"), ("temporal_tls_cert", "temporal_tls_key"))


class Services(Section):
    """Addresses and credentials, from the environment. Never logged, never in the ledger."""

    database_url: str
    """`ROLLBOOK_DATABASE_URL`: postgresql://user:password@host:port/database, with libpq's parameters
    behind it: ?sslmode=verify-full&sslrootcert=/path/ca.pem"""
    temporal_address: str
    """`ROLLBOOK_TEMPORAL_ADDRESS`: host:port of the frontend."""
    temporal_namespace: str = "rollbook"
    """`ROLLBOOK_TEMPORAL_NAMESPACE`"""
    temporal_ui: str | None = None
    """`ROLLBOOK_TEMPORAL_UI`: where people look, for messages only."""
    temporal_api_key: str | None = Field(default=None, repr=False)
    """`ROLLBOOK_TEMPORAL_API_KEY`: of Temporal Cloud, or of a proxy that checks it. Implies TLS."""
    temporal_tls: bool = False
    """`ROLLBOOK_TEMPORAL_TLS`: true talks TLS, and trusts the certificates that the machine trusts."""
    temporal_tls_ca: Path | None = None
    """`ROLLBOOK_TEMPORAL_TLS_CA`: PEM file of the authority to trust instead. Implies TLS."""
    temporal_tls_cert: Path | None = None
    """`ROLLBOOK_TEMPORAL_TLS_CERT`: PEM file of our certificate (mTLS). Implies TLS."""
    temporal_tls_key: Path | None = None
    """`ROLLBOOK_TEMPORAL_TLS_KEY`: PEM file of its private key."""
    s3_endpoint: str
    """`ROLLBOOK_S3_ENDPOINT`: http(s)://host:port; of AWS https://s3.REGION.amazonaws.com"""
    s3_bucket: str = "rollbook-data"
    """`ROLLBOOK_S3_BUCKET`"""
    s3_access_key: str | None = Field(default=None, repr=False)
    """`AWS_ACCESS_KEY_ID`; without it boto3's chain of credentials is asked: a profile, a web
    identity, the role of the container or the machine."""
    s3_secret_key: str | None = Field(default=None, repr=False)
    """`AWS_SECRET_ACCESS_KEY`"""
    s3_session_token: str | None = Field(default=None, repr=False)
    """`AWS_SESSION_TOKEN`: belongs to temporary keys."""
    s3_region: str = "us-east-1"
    """`AWS_REGION`"""
    engines: tuple[str, ...] = ()
    """`ROLLBOOK_ENGINES`: base URLs, separated by commas."""
    gateway: str | None = None
    """`ROLLBOOK_GATEWAY`: base URL of the recording gateway, as programs of rollout workers see it."""
    engines_run: str | None = None
    """`ROLLBOOK_ENGINES_RUN`: the one run these engines serve; default: every run of the ledger."""

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        hidden = (
            "s3_access_key",
            "s3_secret_key",
            "s3_session_token",
            "temporal_api_key",
            "database_url",
        )
        return [(k, v) for k, v in super().__repr_args__() if k not in hidden]

    def environment(self) -> dict[str, str]:
        """The variables that give a child process these services.

        What Temporal and the store do without is there too, empty: the child's own environment may
        name a key that belongs elsewhere.
        """
        found: dict[str, str] = {}
        for name, variable in VARIABLES.items():
            value = getattr(self, name)
            if name == "engines":
                value = ",".join(value)
            if value or name.startswith(("temporal_", "s3_")):
                found[variable] = "true" if value is True else str(value or "")
        return found

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
        for pair in _PAIRS:
            given = [name for name in pair if name in found]
            if len(given) == 1:
                absent = next(name for name in pair if name not in found)
                raise ConfigError(
                    f"{VARIABLES[given[0]]} is set without {VARIABLES[absent]}; set both, or neither"
                )
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            wrong = [f"{VARIABLES[str(e['loc'][0])]}: {e['msg']}" for e in error.errors()]
            raise ConfigError("; ".join(wrong)) from None  # its text would hold the values
