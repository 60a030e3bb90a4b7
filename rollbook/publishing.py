"""Which version is published when, and what the ledger keeps of a loop's weights."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from domain.errors import ConfigError, EngineRefused
from domain.services import Services
from rollbook.publishers import Desk, EnginePublisher, First, Publisher
from storage import manifests, pushes, versions
from storage.database import Tx, canonical
from storage.objects import digest
from trainer import folders

_HEALTH_S = 3.0


def check_engines(publisher: Publisher, services: Services) -> None:
    """Refuse a publisher of one's own that has nothing to push to.

    Raises:
        ConfigError: no engine is configured; the built-in one takes weights from the store only.
    """
    if not services.engines and not isinstance(publisher, EnginePublisher):
        raise ConfigError(
            f"{type(publisher).__name__} pushes to engines of its own, but none is configured: set "
            "ROLLBOOK_ENGINES (Services.engines), or use an EnginePublisher"
        )


def upload_model(desk: Desk) -> str:
    """Store the description of the run's model, without weights; returns its manifest's key."""
    config = desk.config
    assert config.model.path is not None
    files = folders.description_files(desk.model, config.model.dtype)
    name = folders.files_digest(files)
    stored = desk.waits.outlast(
        lambda: manifests.upload(desk.store, f"models/{name}", files, kind="model", sha256=name)
    )
    return stored.manifest_key


def first_version(desk: Desk, publisher: Publisher, weights: object) -> First:
    """Version 0 as the ledger will name it."""
    if isinstance(publisher, EnginePublisher):
        return publisher.first(weights)
    return First(pushes.KEY, None, None, digest_of(desk.config.name, publisher, weights, 0))


def digest_of(
    run: str, publisher: Publisher, weights: object, version: int, given: bytes | None = None
) -> bytes:
    """What the ledger keeps of a version's weights: 32 bytes.

    A publisher that can digest weights does; otherwise it is what the loop gives. Without either
    the digest only names the version, and a replay is not compared.

    Raises:
        ConfigError: the given digest is no sha256, or not that of the published weights.
    """
    if given is not None and len(given) != 32:
        raise ConfigError(f"digest has {len(given)} bytes; it must be a sha256 of 32")
    take = getattr(publisher, "digest", None)
    own = None if take is None else bytes(take(weights))
    if given is not None and own not in (None, given):
        assert own is not None
        raise ConfigError(
            f"digest = {given.hex()[:16]}… is not that of state.weights ({own.hex()[:16]}…); the "
            "publisher computes it, so leave it out"
        )
    return given or own or bytes.fromhex(digest(canonical([run, version])))


def publish_if_due(
    desk: Desk, publisher: Publisher, version: int, weights: Callable[[], object]
) -> None:
    """Publish when the served version is `sync_every` or more behind, or the engines hold another.

    Raises:
        EngineRefused: the push did not take.
        EngineUnavailable: no engine served it in time.
    """
    run, own = desk.config.name, not isinstance(publisher, EnginePublisher)
    served = desk.ledger.call(versions.served, run)
    behind = served is None or version - served >= desk.config.schedule.sync_every
    if not behind and publisher.version == served and not (own and _nobody_serves(desk, served)):
        return
    publisher.load(weights(), version)
    if (held := publisher.version) != version:
        raise EngineRefused(
            f"the push of version {version} did not take: the engines still report {held}. See "
            f"{type(publisher).__name__}.load"
        )
    if own:
        engines = {url: _incarnation(url) for url in desk.engines}

        def record(tx: Tx) -> None:
            pushes.record(tx, run, desk.epoch, version, engines=engines)

        desk.ledger.call(record)


def _nobody_serves(desk: Desk, version: int | None) -> bool:
    """Whether the engines lost what was pushed: they restarted."""
    routes = desk.ledger.call(versions.routable, desk.config.name)
    return not any(route.version == version for route in routes)


def _incarnation(url: str) -> int:
    """Which life of its process an engine is in; 1 for engines that do not say.

    Raises:
        EngineRefused: nothing healthy answers.
    """
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_HEALTH_S) as answer:
            body = answer.read()
    except (urllib.error.URLError, TimeoutError) as error:
        raise EngineRefused(
            f"engine {url} was pushed to, but {url}/health fails: {error}"
        ) from error
    try:
        return int(json.loads(body)["incarnation"])
    except (ValueError, KeyError, TypeError):
        return 1


def model_of(publisher: Publisher, model: str | Path | None) -> tuple[Path, str]:
    """Model folder and dtype of a run.

    Raises:
        ConfigError: neither the publisher nor the caller names the folder, or both do.
    """
    if isinstance(publisher, EnginePublisher):
        if model is not None:
            raise ConfigError(f"model = {model!r}: the EnginePublisher names the model already")
        return publisher.model, publisher.dtype
    if not isinstance(publisher, Publisher):
        raise ConfigError(
            f"weights = {publisher!r} is no Publisher: it needs `version` and `load(weights, version)`"
        )
    if model is None:
        raise ConfigError(
            f"{type(publisher).__name__} does not say which model it serves: pass model=FOLDER "
            "(config.json and tokenizer), which the rollout workers read"
        )
    return folders.existing(Path(model), key="model"), "float32"
