"""Choices of the local stack that need no server."""

import importlib.util
import json
import os
import socket
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from domain.errors import ConfigError
from rollbook.stack import parts, ports, postgres, seaweed, temporal
from rollbook.stack.parts import PortWishes
from rollbook.stack.state import Record, StateFolder


def test_a_taken_port_is_replaced_or_refused_by_name() -> None:
    with socket.create_server((ports.LOOPBACK, 0)) as server:
        taken = server.getsockname()[1]
        chosen = parts.choose_ports(
            ("postgres",), PortWishes(), replace(Record.fresh(), ports={"postgres": taken})
        )
        assert chosen["postgres"] != taken
        assert "postgres listens on port" in parts.moved(chosen, PortWishes())[0]
        with pytest.raises(ConfigError, match=rf"--postgres-port = {taken} is taken"):
            parts.choose_ports(("postgres",), PortWishes(postgres=taken), Record.fresh())


def test_ports_are_distinct_and_leave_room_for_their_companions() -> None:
    chosen = parts.choose_ports(parts.PARTS, PortWishes(), Record.fresh())
    companions = [port + 10000 for name, port in chosen.items() if name.startswith("s3")]
    together = [*chosen.values(), *companions]
    assert len(set(together)) == len(together)
    assert max(together) < 65536


def test_a_port_asked_for_is_not_given_to_another() -> None:
    wanted = ports.free_port()
    record = replace(Record.fresh(), ports={"postgres": wanted})
    chosen = parts.choose_ports(parts.PARTS, PortWishes(s3=wanted), record)
    assert chosen["s3"] == wanted
    assert chosen["postgres"] != wanted


def test_a_port_whose_sockets_belong_to_others_is_not_given_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seaweed, "SOCKETS", str(tmp_path / "{server}-{port}.sock"))
    port = ports.free_port()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / f"filer-{port + seaweed.GRPC_OFFSET}.sock"))
        server.listen()
        assert not seaweed.sockets_suit(port)
        with pytest.raises(ConfigError, match=f"--s3-port = {port}"):
            parts.choose_ports(("s3",), PortWishes(s3=port), Record.fresh())
    assert seaweed.sockets_suit(port)  # what a killed server left is replaced
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not seaweed.sockets_suit(port)
    assert seaweed.sockets_suit(port + 1)


def test_without_a_place_for_its_sockets_the_store_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seaweed, "SOCKETS", str(tmp_path / "gone" / "{server}-{port}.sock"))
    chosen = parts.choose_ports(parts.PARTS, PortWishes(), Record.fresh())
    described = parts.Parts(tmp_path, Record.fresh(), chosen, {})
    with pytest.raises(ConfigError, match="chmod 1777"):
        described.seaweed().prepare()


def test_an_address_makes_its_part_external() -> None:
    assert parts.embedded_in({}) == parts.PARTS
    assert parts.embedded_in({"ROLLBOOK_TEMPORAL_ADDRESS": "there:7233"}) == ("postgres", "s3")
    assert parts.embedded_in({"ROLLBOOK_TEMPORAL_ADDRESS": ""}) == parts.PARTS


@pytest.mark.parametrize(
    ("find", "variable"),
    [
        (postgres.binaries, "ROLLBOOK_DATABASE_URL"),
        (temporal.binary, "ROLLBOOK_TEMPORAL_ADDRESS"),
        (seaweed.binary, "ROLLBOOK_S3_ENDPOINT"),
    ],
)
def test_a_missing_wheel_is_named_with_the_way_out(
    find: object, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert callable(find)
    with pytest.raises(ConfigError, match=rf"pip install 'rollbook\[local\]', or .*{variable}"):
        find()


def test_secrets_are_made_once_and_kept(tmp_path: Path) -> None:
    first, second = StateFolder(tmp_path / "s"), StateFolder(tmp_path / "s")
    record = first.record()
    first.remember_ports(record, {"s3": 1234})
    assert second.record() == replace(record, ports={"s3": 1234})
    assert record.postgres_password not in repr(record)
    assert (tmp_path / "s" / "stack.json").stat().st_mode & 0o777 == 0o600


def test_damaged_secrets_are_refused(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    (tmp_path / "stack.json").write_text(json.dumps({"what": 1}))
    with pytest.raises(ConfigError, match=r"stack\.json is damaged"):
        folder.record()


def test_only_one_holds_a_folder(tmp_path: Path) -> None:
    first, second = StateFolder(tmp_path), StateFolder(tmp_path)
    assert first.hold() is True
    assert second.hold() is False
    first.release()
    assert second.hold() is True
    second.release()


def test_a_cluster_without_a_version_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no PostgreSQL cluster"):
        postgres.check_major(tmp_path)
