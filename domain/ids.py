"""Names and seeds that several processes must derive alike."""

from hashlib import blake2b


def group_workflow_id(run: str, batch: int, group: int, gen: int) -> str:
    """Temporal workflow id of one generation of a group; unique for ever."""
    return f"run/{run}/b{batch:06d}/g{group}~{gen}"


def attempt_activity_id(sample: int, attempt: int) -> str:
    """Temporal activity id of one attempt, within its group's workflow."""
    return f"s{sample}.a{attempt}"


def publish_workflow_id(run: str, version: int) -> str:
    """Temporal workflow id of the publication of one policy version."""
    return f"run/{run}/publish/v{version:08d}"


def policy_name(run: str, version: int) -> str:
    """The name engines know a policy by. It never names other weights."""
    return f"{run}@{version}"


def policy_version(name: str) -> tuple[str, int]:
    """Inverse of `policy_name`.

    Raises:
        ValueError: the name is not of the form RUN@VERSION.
    """
    run, at, version = name.rpartition("@")
    if not at or not run or not version.isdecimal():
        raise ValueError(f"policy name {name!r} is not of the form RUN@VERSION")
    return run, int(version)


def fold(*parts: int | str) -> int:
    """A 63-bit number from the parts: one independent random stream per distinct tuple."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def sampling_seed(seed: int, group: int, sample: int, attempt: int, segment: int) -> int:
    """Seed of one sampling request: an attempt that is tried again draws other tokens."""
    return fold("sample", seed, group, sample, attempt, segment)
