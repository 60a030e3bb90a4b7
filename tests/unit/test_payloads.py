"""Messages travel as JSON; what pydantic compiles for a type is kept for the whole process."""

from temporalio.api.common.v1 import Payload

from activities.payloads import MESSAGES, Messages
from domain.messages import AttemptIn, GroupIn


def test_a_message_comes_back_as_it_was() -> None:
    message = AttemptIn(run="r", group=1, sample=2, attempt=0)
    converter = Messages()
    sent = converter.to_payloads([message])
    assert sent[0].metadata == {"encoding": b"json/plain"}
    assert converter.from_payloads(sent, [AttemptIn]) == [message]


def test_fields_that_an_older_sender_did_not_know_have_their_defaults() -> None:
    old = Payload(
        metadata={"encoding": b"json/plain"},
        data=b'{"run":"r","group":1,"gen":0,"batch":0,"task":"t","environment":"e","size":2,'
        b'"samples":[[0,0],[1,0]]}',
    )
    converter = Messages()
    (read,) = converter.from_payloads([old], [GroupIn])
    assert (read.samples, read.kept, read.part0_admitted) == (((0, 0), (1, 0)), 0, False)


def test_a_type_is_compiled_once_for_all_workflows() -> None:
    """temporalio makes a converter for every workflow; what has compiled types is one and the same."""
    assert MESSAGES.payload_converter_class is Messages
    one, other = Messages(), Messages()
    assert one is not other
    assert one.converters[b"json/plain"] is other.converters[b"json/plain"]
