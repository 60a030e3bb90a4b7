"""Services as clusters have them: Temporal behind TLS and a client certificate, keys from boto3's chain."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from domain.errors import ConfigError
from domain.services import Services
from rollbook import temporal
from rollbook.commands.database import reader_url
from rollbook.stack import external
from storage.objects import ObjectStore


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, a server of 127.0.0.1 and a client that it signed."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / name

    def make(self) -> None:
        self._openssl(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem"
        )
        for name, subject in (("server", "/CN=127.0.0.1"), ("client", "/CN=rollbook")):
            self._openssl(
                f"req -newkey rsa:2048 -nodes -subj {subject} -keyout {name}.key -out {name}.csr"
            )
            self.path("names").write_text("subjectAltName=IP:127.0.0.1\n")
            self._openssl(
                f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
                f"-extfile names -out {name}.pem"
            )

    def _openssl(self, arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments.split()], cwd=self.folder, check=True, capture_output=True
        )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.make()
    return made


@asynccontextmanager
async def behind_tls(address: str, certificates: Certificates) -> AsyncIterator[str]:
    """A proxy that ends TLS, asks for a certificate, and passes bytes on to a plain frontend."""
    context = ssl.create_default_context(
        ssl.Purpose.CLIENT_AUTH, cafile=certificates.path("ca.pem")
    )
    context.load_cert_chain(certificates.path("server.pem"), certificates.path("server.key"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(
            pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True
        )

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_temporal_behind_mutual_tls(services: Services, certificates: Certificates) -> None:
    trusted = {
        "ROLLBOOK_TEMPORAL_TLS_CA": str(certificates.path("ca.pem")),
        "ROLLBOOK_TEMPORAL_TLS_CERT": str(certificates.path("client.pem")),
        "ROLLBOOK_TEMPORAL_TLS_KEY": str(certificates.path("client.key")),
    }
    async with behind_tls(services.temporal_address, certificates) as address:
        there = {**services.environment(), "ROLLBOOK_TEMPORAL_ADDRESS": address}
        secure = Services.from_environment({**there, **trusted})
        assert Services.from_environment(secure.environment()) == secure
        client = await temporal.connect(secure)
        assert client.namespace == services.temporal_namespace
        await asyncio.to_thread(external.check_temporal, secure)
        for less in ({}, {"ROLLBOOK_TEMPORAL_TLS": "true"}):  # in the clear; no certificate
            refused = Services.from_environment({**there, **less})
            with pytest.raises(
                ConfigError, match=r"ROLLBOOK_TEMPORAL_ADDRESS.*ROLLBOOK_TEMPORAL_TLS"
            ):
                await asyncio.to_thread(external.check_temporal, refused)


def test_an_api_key_implies_tls_and_is_told_to_nobody(services: Services) -> None:
    known = {**services.environment(), "ROLLBOOK_TEMPORAL_API_KEY": "hidden"}
    found = Services.from_environment(known)
    assert temporal.security(found) == {"tls": True, "api_key": "hidden"}
    assert "hidden" not in repr(found)
    assert temporal.security(services) == {"tls": False, "api_key": None}


def test_half_a_pair_and_files_that_are_not_there_are_named(services: Services) -> None:
    known = services.environment()
    with pytest.raises(ConfigError, match=r"TLS_CERT is set without ROLLBOOK_TEMPORAL_TLS_KEY"):
        Services.from_environment({**known, "ROLLBOOK_TEMPORAL_TLS_CERT": "/c.pem"})
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY is set without AWS_ACCESS_KEY_ID"):
        Services.from_environment({**known, "AWS_ACCESS_KEY_ID": ""})
    with pytest.raises(ConfigError, match="ROLLBOOK_TEMPORAL_TLS: "):
        Services.from_environment({**known, "ROLLBOOK_TEMPORAL_TLS": "perhaps"})
    absent = Services.from_environment({**known, "ROLLBOOK_TEMPORAL_TLS_CA": "/not/there.pem"})
    with pytest.raises(ConfigError, match=r"TLS_CA = /not/there.pem cannot be read"):
        temporal.security(absent)


def test_without_keys_boto3s_chain_of_credentials_is_asked(
    s3_services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    profile = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    environ = {k: v for k, v in s3_services.environment().items() if "_KEY" not in k}
    keyless = Services.from_environment(environ)
    assert keyless.s3_access_key is None
    with pytest.raises(ConfigError, match=r"no credentials; set AWS_ACCESS_KEY_ID"):
        ObjectStore(keyless, attempts=1).prepare()
    profile.write_text(
        f"[default]\naws_access_key_id = {s3_services.s3_access_key}\n"
        f"aws_secret_access_key = {s3_services.s3_secret_key}\n"
    )
    ObjectStore(keyless).prepare()


def test_sslmode_is_honoured_and_handed_on_to_the_reader(services: Services) -> None:
    """The embedded server has no TLS, so demanding it must fail, and not fall back."""
    demanding = services.model_copy(
        update={"database_url": services.database_url + "?sslmode=require"}
    )
    with pytest.raises(ConfigError, match="server does not support SSL"):
        external.check_postgres(demanding)
    url = reader_url(
        "postgresql://u:p@h:6432/db?sslmode=verify-full&sslrootcert=/ca.pem", "r", "a/b"
    )
    assert url == "postgresql://r:a%2Fb@h:6432/db?sslmode=verify-full&sslrootcert=%2Fca.pem"
