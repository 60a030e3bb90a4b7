"""The three parts of a stack: which of them are embedded, on which ports, at which addresses."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from domain.errors import ConfigError
from domain.services import VARIABLES, Services
from rollbook.stack import ports
from rollbook.stack.postgres import Postgres
from rollbook.stack.seaweed import GRPC_OFFSET, Seaweed, SeaweedPorts, sockets_suit
from rollbook.stack.state import Record
from rollbook.stack.supervise import Supervisor
from rollbook.stack.temporal import Temporal

PARTS = ("postgres", "temporal", "s3")
ADDRESSES = {
    "postgres": VARIABLES["database_url"],
    "temporal": VARIABLES["temporal_address"],
    "s3": VARIABLES["s3_endpoint"],
}
"""The variable that makes a part external."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortWishes:
    """Ports asked for by name: taken as they are, or refused. None: the usual one if it is free."""

    postgres: int | None = field(default=None, metadata={"usual": 5432})
    temporal: int | None = field(default=None, metadata={"usual": 7233})
    temporal_ui: int | None = field(default=None, metadata={"usual": 8233})
    s3: int | None = field(default=None, metadata={"usual": 8333})

    def asked(self) -> dict[str, int]:
        """The ports somebody asked for."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: port for name, port in named.items() if port is not None}


# Those inside SeaweedFS that nobody talks to.
INNER = {"s3_master": 9333, "s3_volume": 9340, "s3_filer": 8888, "s3_admin": 23646}
USUAL = {f.name: f.metadata["usual"] for f in fields(PortWishes)} | INNER


@dataclass(frozen=True, slots=True)
class Parts:
    """The embedded servers, described."""

    state: Path
    record: Record
    ports: Mapping[str, int]
    environ: Mapping[str, str]

    def start(self, supervisor: Supervisor, embedded: tuple[str, ...]) -> None:
        """Start all; making a new database cluster runs beside the other two."""
        if "s3" in embedded:
            self.seaweed().prepare()
            supervisor.start(self.seaweed().command())
        if "temporal" in embedded:
            self.temporal().prepare()
            supervisor.start(self.temporal().command())
        if "postgres" in embedded:
            self.postgres().prepare()
            supervisor.start(self.postgres().command())

    def addresses(self, embedded: tuple[str, ...]) -> dict[str, str]:
        """What to set in the environment to reach them."""
        known = dict.fromkeys(variables_of(embedded), "")
        if "postgres" in embedded:
            known[VARIABLES["database_url"]] = self.postgres().url()
        if "temporal" in embedded:
            known[VARIABLES["temporal_address"]] = self.temporal().address
            known[VARIABLES["temporal_ui"]] = self.temporal().ui
        if "s3" in embedded:
            known[VARIABLES["s3_endpoint"]] = self.seaweed().endpoint
            known[VARIABLES["s3_access_key"]] = self.record.s3_access_key
            known[VARIABLES["s3_secret_key"]] = self.record.s3_secret_key
            known[VARIABLES["s3_region"]] = "us-east-1"
        return known

    def postgres(self) -> Postgres:
        return Postgres(
            state=self.state,
            port=self.ports["postgres"],
            password=self.record.postgres_password,
        )

    def temporal(self) -> Temporal:
        default = Services.model_fields["temporal_namespace"].default
        return Temporal(
            state=self.state,
            port=self.ports["temporal"],
            ui_port=self.ports["temporal_ui"],
            namespace=self.environ.get(VARIABLES["temporal_namespace"]) or default,
        )

    def seaweed(self) -> Seaweed:
        default = Services.model_fields["s3_bucket"].default
        return Seaweed(
            state=self.state,
            ports=SeaweedPorts(
                s3=self.ports["s3"],
                **{
                    name: self.ports[f"s3_{name}"]
                    for name in ("master", "volume", "filer", "admin")
                },
            ),
            access_key=self.record.s3_access_key,
            secret_key=self.record.s3_secret_key,
            bucket=self.environ.get(VARIABLES["s3_bucket"]) or default,
        )


def embedded_in(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The parts that have no external address."""
    return tuple(part for part in PARTS if not environ.get(ADDRESSES[part]))


def variables_of(embedded: tuple[str, ...]) -> list[str]:
    """The variables that embedded parts decide."""
    return [VARIABLES[name] for part in embedded for name in _FIELDS[part]]


def choose_ports(embedded: tuple[str, ...], wishes: PortWishes, record: Record) -> dict[str, int]:
    """A free port for each server: the one asked for, the last one, the usual one, any.

    Raises:
        ConfigError: one that was asked for is taken.
    """
    asked = wishes.asked()
    chosen: dict[str, int] = {}
    for name, usual in USUAL.items():
        if name.split("_")[0] not in embedded:
            continue
        if name in asked:
            chosen[name] = ports.demand(asked[name], option(name))
            if name == "s3" and not sockets_suit(asked[name]):
                raise ConfigError(
                    f"{option(name)} = {asked[name]}: the Unix sockets that SeaweedFS makes for this "
                    "port in /tmp belong to another user or another network namespace; remove "
                    f"/tmp/seaweedfs-*-{asked[name] + GRPC_OFFSET}.sock or choose another port"
                )
            continue
        taken = [*chosen.values(), *asked.values()]
        preferred = record.ports.get(name, usual)
        if name.startswith("s3"):
            chosen[name] = ports.choose(preferred, taken, companion=GRPC_OFFSET, suits=sockets_suit)
        else:
            chosen[name] = ports.choose(preferred, taken)
    return chosen


def moved(chosen: Mapping[str, int], wishes: PortWishes) -> tuple[str, ...]:
    """For people: the ports that are neither asked for nor the usual ones."""
    free = [n for n in chosen if n not in INNER and n not in wishes.asked()]
    return tuple(
        f"{name} listens on port {chosen[name]}, since {USUAL[name]} was taken"
        for name in free
        if chosen[name] != USUAL[name]
    )


def ports_of(services: Services) -> dict[str, int]:
    """The ports in the addresses."""
    addresses = {
        "postgres": services.database_url.rpartition("/")[0],
        "temporal": services.temporal_address,
        "temporal_ui": services.temporal_ui or "",
        "s3": services.s3_endpoint,
    }
    ends = {name: address.rpartition(":")[2] for name, address in addresses.items()}
    return {name: int(end) for name, end in ends.items() if end.isdigit()}


def option(name: str) -> str:
    """The command line's option for a port."""
    return "--" + name.replace("_", "-") + "-port"


_FIELDS = {
    "postgres": ("database_url",),
    "temporal": (
        "temporal_address",
        "temporal_ui",
        "temporal_api_key",
        "temporal_tls",
        "temporal_tls_ca",
        "temporal_tls_cert",
        "temporal_tls_key",
    ),
    "s3": ("s3_endpoint", "s3_access_key", "s3_secret_key", "s3_session_token", "s3_region"),
}
