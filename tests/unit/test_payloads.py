"""Messages travel as JSON; what pydantic compiles for a type is kept for the whole process."""

from temporalio.api.common.v1 import Payload

from activities.payloads import MESSAGES
from domain.messages import AttemptIn, GroupIn


def test_a_message_comes_back_as_it_was() -> None:
    message = AttemptIn(run="r", group=1, sample=2, attempt=0)
    converter = MESSAGES.payload_converter_class()
    sent = converter.to_payloads([message])
    assert sent[0].metadata == {"encoding": b"json/plain"}
    assert converter.from_payloads(sent, [AttemptIn]) == [message]


def test_fields_that_an_older_sender_did_not_know_have_their_defaults() -> None:
    old = Payload(
        metadata={"encoding": b"json/plain"},
        data=b'{"run":"r","group":1,"gen":0,"batch":0,"task":"t","environment":"e","size":2,'
        b'"samples":[[0,0],[1,0]]}',
    )
    converter = MESSAGES.payload_converter_class()
    (read,) = converter.from_payloads([old], [GroupIn])
    assert (read.samples, read.kept, read.part0_admitted) == (((0, 0), (1, 0)), 0, False)


def test_a_type_is_compiled_once_for_all_workflows() -> None:
    """temporalio makes a converter for every workflow."""

    def adapter_of(type_hint: type) -> object:
        converter = MESSAGES.payload_converter_class()
        json = converter.converters[b"json/plain"]  # type: ignore[attr-defined]
        return json._type_adapter(type_hint)

    assert adapter_of(GroupIn) is adapter_of(GroupIn)
