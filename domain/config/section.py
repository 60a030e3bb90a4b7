"""What every table of the run configuration is, and the kinds of values that several have."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
EnvironmentName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]
Args = dict[str, JsonValue]


class Section(BaseModel):
    """A table of the TOML file. Frozen; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)
