"""A workflow's current details as people read them."""

_HELD = "\N{NO-BREAK SPACE}"


def readable(metadata: object) -> str:
    """The answer of `__temporal_workflow_metadata`, its unbreakable spaces as others."""
    return str(metadata).replace(f"{_HELD} |", " |").replace(_HELD, " ")
