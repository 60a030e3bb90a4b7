"""How messages become payloads of Temporal: as pydantic writes JSON, and reads it into their types."""

from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultPayloadConverter,
    JSONPlainPayloadConverter,
)

_JSON = PydanticJSONPlainPayloadConverter()
"""One for the process: it keeps what pydantic compiles for a type, a millisecond or two each time.
temporalio makes a converter for every workflow, which would compile each message anew."""


class Messages(CompositePayloadConverter):
    """temporalio's own pydantic converter, sharing what it has compiled."""

    def __init__(self) -> None:
        """Nothing is compiled until a message of its type arrives."""
        super().__init__(
            *(
                _JSON if isinstance(converter, JSONPlainPayloadConverter) else converter
                for converter in DefaultPayloadConverter.default_encoding_payload_converters
            )
        )


MESSAGES = DataConverter(payload_converter_class=Messages)
"""The data converter of every client, worker and replayer."""
