from __future__ import annotations

import itertools
import json
import math
import time
from typing import get_args

import pydantic
import pytest
from form_digest import fields_digest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.core.errors import MessageError, ProtocolMismatch
from edge_agent.core.formats import printable
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.wire.messages import codec, down, up
from edge_agent.wire.messages import fields as fields_module
from edge_agent.wire.messages.fields import ConditionName

DIGEST = "a" * 64
BLOB = fields_module.BlobRef(digest=DIGEST, size_bytes=100, chunk_bytes=64)
TASKS = [
    Task(class_names=("a", "b")),
    Task(input=ImageInput(channels=1, height=28, width=28, mean=(0.1307,), std=(0.3081,)), class_names=("0",)),
    Task(
        input=WindowInput(), class_names=("walk", "läuft"), encoder="cnn1d", encoder_params={"width": 8, "x": [1, None]}
    ),
]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
starts = st.from_regex(r"[A-Za-z0-9-]{0,32}", fullmatch=True)
metric_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
counts = st.integers(0, 1_000_000)
shares = st.none() | st.floats(0, 1)
ranges = st.lists(st.tuples(counts, counts), max_size=fields_module.MAX_RANGES).map(tuple)
names = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,20}", fullmatch=True)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text | st.floats(allow_nan=False, allow_infinity=False)
)
blobs = st.builds(
    fields_module.BlobRef,
    digest=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    size_bytes=st.integers(1, 1 << 33),
    chunk_bytes=st.integers(64, 1 << 20),
)
task_blobs = st.builds(
    fields_module.BlobRef,
    digest=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    size_bytes=st.integers(1, fields_module.MAX_TASK_BYTES),
    chunk_bytes=st.integers(64, 1 << 20),
)
FIELDS = {
    "boot": starts,
    "federation": st.just("") | st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    "accused": st.lists(names, max_size=64).map(tuple),
    "connection": counts,
    "takeover": counts,
    "is_copy": st.booleans(),
    "entries": counts,
    "newest_run": counts,
    "host": text,
    "process": counts,
    "serving_s": st.none() | st.floats(0, 1e9),
    "seq": counts,
    "software": text,
    "tier": st.sampled_from(["train", "head"]),
    "samples": counts,
    "bundle_id": text,
    "fingerprint": text,
    "precision": st.sampled_from(["", "fp32", "int8"]),
    "answers": starts,
    "by_chunks": st.booleans(),
    "way": st.sampled_from(["", "chunks", "stored"]),
    "whole": st.booleans(),
    "urls": st.lists(st.from_regex(r"https?://[!-~]{1,60}", fullmatch=True), min_size=1, max_size=4).map(tuple),
    "question": starts,
    "code": st.sampled_from(["", "data", "bundle-damaged"]),
    "whom": starts,
    "rolled_back": text,
    "kept": text,
    "channel": names,
    "compare": st.booleans(),
    "activate_in_s": st.floats(0, fields_module.MAX_WAIT_S),
    "activate_within_s": st.none() | st.floats(1e-3, fields_module.MAX_WAIT_S),
    "about": text,
    "one_class": st.booleans(),
    "standby": st.booleans(),
    "support": counts,
    "facts": st.dictionaries(text, scalars, max_size=8),
    "digest": st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    "ranges": ranges,
    "missing": ranges,
    "run": st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}", fullmatch=True),
    "round": counts,
    "rounds": counts,
    "blob": blobs,
    "bundle": st.none() | blobs,
    "blobs": st.lists(blobs, max_size=4).map(tuple),
    "metrics": st.dictionaries(metric_names, st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=8),
    "head": text,
    "acc_local": shares,
    "acc_global": shares,
    "acc_personal": shares,
    "local_model": text,
    "better_alone": st.booleans(),
    "rss_mb": st.floats(0, 1e6),
    "torch_loaded": st.booleans(),
    "error": text,
    "message": text,
    "remedy": text,
    "condition": st.sampled_from(get_args(ConditionName)),
    "epoch": counts,
    "lease_s": st.floats(1e-3, 1e6),
    "heartbeat_s": st.floats(0, 300),
    "time": text,
    "purpose": st.sampled_from(get_args(fields_module.Purpose)),
    "release": counts,
    "seed": st.integers(0, 2**63 - 1),
    "method": names,
    "params": st.dictionaries(text, scalars, max_size=5),
    "task": st.sampled_from(TASKS),
    "given": st.sampled_from(TASKS) | task_blobs,
    "deadline_s": st.floats(1e-3, 1e6),
    "evaluate": st.booleans(),
    "reason": text,
    "until": text,
    "credits": st.integers(1, 4096),
    "direct": st.booleans(),
    "work": st.floats(0, 1, exclude_min=True),
    "broadcast": st.booleans(),
    "before": counts,
    "again_s": st.floats(0.1, 3600),
    "accepted": st.booleans(),
    "csr": st.from_regex(r"[A-Za-z0-9+/]{1,40}={0,2}", fullmatch=True),
    "signature": st.from_regex(r"[A-Za-z0-9+/]{1,40}={0,2}", fullmatch=True),
    "certificate": st.just("") | st.from_regex(r"[A-Za-z0-9+/]{1,40}={0,2}", fullmatch=True),
    "serial": st.from_regex(r"[0-9a-f]{0,40}", fullmatch=True),
    "method_sha256": st.just("") | st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    "session": st.just("") | st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    "partition": st.just("") | st.from_regex(r"[0-9]{1,4}-of-[0-9]{1,4}", fullmatch=True),
    "refused": text,
    "privacy": st.none()
    | st.builds(
        down.Noise,
        clip=st.floats(1e-3, 1e6),
        clip_statistics=st.floats(1e-3, 1e6),
        noise=st.just(0.0) | st.floats(1e-6, 1e6),
    ),
}
DIRECTIONS = [(kind, codec.parse_from_agent) for kind in get_args(up.FromAgent)] + [
    (kind, codec.parse_from_coordinator) for kind in get_args(down.FromCoordinator)
]
DIRECTIONS.append((down.Present, codec.parse_between_coordinators))


def content_of(message: fields_module.Control) -> dict[str, object]:
    """What travels, read as plain JSON, without the checksum."""
    content = json.loads(codec.encode(message))
    del content["crc"]
    return content


def a_message(kind: type[fields_module.Control]) -> st.SearchStrategy[fields_module.Control]:
    known = {name: field for name, field in kind.model_fields.items() if name not in {"v", "type"}}
    fields = {field.alias or name: FIELDS[name] for name, field in known.items()}
    if kind is down.Install:
        fields["bundle_id"] = FIELDS["digest"]
    if kind is down.Job:  # exchanges of a secure sum have a session, what is none of its jobs has none
        masked = {
            "purpose": st.sampled_from(("train", *fields_module.EXCHANGES)),
            "session": FIELDS["federation"].filter(bool),
        }
        others = [purpose for purpose in get_args(fields_module.Purpose) if purpose not in fields_module.EXCHANGES]
        fields = fields | {"purpose": st.sampled_from(others), "session": st.just("")}
        return st.builds(kind, **fields) | st.builds(kind, **fields | masked)
    return st.builds(kind, **fields)


def read_or_refused(parse, payload: bytes) -> bool:
    """True where a message was read, or refused in few words; any other error is let through."""
    try:
        return isinstance(parse(payload), fields_module.Control)
    except (MessageError, ProtocolMismatch) as error:
        return len(str(error)) < 3000


@pytest.mark.parametrize("kind, parse", DIRECTIONS, ids=lambda value: getattr(value, "__name__", ""))
@settings(max_examples=30)
@given(data=st.data())
def test_every_message_makes_the_round_trip(kind, parse, data):
    message = data.draw(a_message(kind))
    payload = codec.encode(message)
    assert parse(payload) == message
    assert len(payload) <= fields_module.MAX_MESSAGE_BYTES
    assert (content_of(message)["v"], content_of(message)["type"]) == (fields_module.PROTOCOL, message.type)


class Later(down.Receipt):
    """A message of which version 5 has one field more."""

    colour: str = pydantic.Field(default_factory=lambda: "red", json_schema_extra={"since": 5})


def test_a_message_to_an_older_side_is_of_its_version():
    receipt = Later(run="r-1", digest=DIGEST, accepted=True)
    older, newer = (json.loads(codec.unsealed(codec.encode(receipt, protocol))) for protocol in (4, 5))
    assert (older["v"], newer["v"]) == (4, 5)
    assert set(newer) - set(older) == {"colour"}
    assert codec.parse_from_coordinator(codec.encode(receipt, 3)).accepted


def test_fields_at_their_default_do_not_travel():
    assert content_of(up.Heartbeat()) == {"v": 4, "type": "heartbeat"}
    assert content_of(down.Ack(run="r-1", digest=DIGEST, missing=((0, 3),))) == {
        "v": 4,
        "type": "ack",
        "run": "r-1",
        "digest": DIGEST,
        "missing": [[0, 3]],
    }


def test_each_side_refuses_what_only_it_may_say():
    from_agent = {kind.__name__ for kind in get_args(up.FromAgent)}
    from_coordinator = {kind.__name__ for kind in get_args(down.FromCoordinator)}
    assert not from_agent & from_coordinator
    with pytest.raises(MessageError, match="'bye' is not one of"):
        codec.parse_from_coordinator(codec.encode(up.Bye()))
    with pytest.raises(MessageError, match="'who' is not one of"):
        codec.parse_from_agent(codec.encode(down.Who()))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_with_our_own_error(payload):
    for parse in (codec.parse_from_agent, codec.parse_from_coordinator):
        with pytest.raises((MessageError, ProtocolMismatch)):
            parse(payload)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.data())
def test_any_json_in_any_field_is_accepted_or_refused_with_our_own_error(data):
    kind, parse = data.draw(st.sampled_from(DIRECTIONS))
    content = content_of(data.draw(a_message(kind)))
    field = data.draw(st.sampled_from([*kind.model_fields, "surplus"]))
    payload = json.dumps({**content, field: data.draw(json_values)}).encode()
    assert read_or_refused(parse, payload)


@pytest.mark.parametrize(
    "message", [up.Heartbeat(run="r-1", round=12), down.Ack(run="r-1", digest=DIGEST, missing=((5, 31),))]
)
def test_no_flipped_bit_goes_unnoticed(message):
    payload = codec.encode(message)
    parse = codec.parse_from_agent if isinstance(message, up.Heartbeat) else codec.parse_from_coordinator
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MessageError):
            parse(bytes(damaged))


@given(st.data())
def test_a_message_of_another_hand_that_is_damaged_is_accepted_or_refused_with_our_own_error(data):
    kind, parse = data.draw(st.sampled_from(DIRECTIONS))
    payload = bytearray(json.dumps(content_of(data.draw(a_message(kind)))).encode())
    place = data.draw(st.integers(0, len(payload) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "insert", "double"]))
    if how == "flip":
        payload[place] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del payload[place:]
    elif how == "insert":
        payload[place:place] = data.draw(st.binary(min_size=1, max_size=4))
    else:
        payload[place:place] = payload[:place]
    assert read_or_refused(parse, bytes(payload))


def update_with(metrics: str) -> bytes:
    blob = f'{{"digest":"{DIGEST}","size_bytes":100,"chunk_bytes":64}}'
    return f'{{"v":3,"type":"update","run":"r","round":1,"blob":{blob},"samples":5,"metrics":{metrics}}}'.encode()


def test_finite_and_absent_metrics_are_read():
    assert codec.parse_from_agent(update_with('{"a":0.5,"b":null}')).metrics == {"a": 0.5, "b": None}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_metrics_that_are_not_finite_are_refused_because_no_journal_could_hold_them(value):
    with pytest.raises(MessageError):
        codec.parse_from_agent(update_with(f'{{"loss":{value}}}'))
    with pytest.raises(MessageError):
        codec.parse_from_agent(
            f'{{"v":3,"type":"hello","software":"x","tier":"head","samples":1,"facts":{{"a":{value}}}}}'.encode()
        )


def test_a_message_that_json_cannot_hold_is_refused_where_it_is_made():
    job = down.Job(
        run="r",
        round=1,
        rounds=1,
        seed=1,
        method="m",
        params={"x": math.nan},
        task=TASKS[0],
        blobs=(BLOB,),
        deadline_s=1,
    )
    with pytest.raises(MessageError, match="Job cannot be written as JSON"):
        codec.encode(job)
    with pytest.raises(MessageError, match=r"Job of \d+ bytes, at most 49152 are read"):
        codec.encode(job.model_copy(update={"params": {"x": "y" * fields_module.MAX_MESSAGE_BYTES}}))


HOSTILE = {
    "nothing": b"",
    "not UTF-8": b'{"v":3,"type":"bye","boot":"\xff"}',
    "UTF-16": '{"v":3,"type":"bye"}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + b'{"v":3,"type":"bye"}',
    "a list": b'[{"v":3,"type":"bye"}]',
    "a number": b"1",
    "two objects": b'{"v":3,"type":"bye"}{"v":3,"type":"bye"}',
    "a version twice": b'{"v":99,"type":"bye","v":3}',
    "a type twice": b'{"v":3,"type":"bye","type":"heartbeat"}',
    "a nested key twice": update_with('{"a":1,"a":2}'),
    "a key twice by way of an escape": b'{"v":3,"type":"bye","boot":"x","bo\\u006ft":"y"}',
    "half a surrogate pair": b'{"v":3,"type":"bye","boot":"\\ud800"}',
    "no version": b'{"type":"bye"}',
    "no type": b'{"v":3}',
    "a list as type": b'{"v":3,"type":["bye"]}',
    "an unknown key": b'{"v":3,"type":"bye","sudo":true}',
    "a version that is true": b'{"v":true,"type":"bye"}',
    "a version with a point": b'{"v":3.0,"type":"bye"}',
    "a version as text": b'{"v":"2","type":"bye"}',
    "deep lists": b'{"v":3,"type":"bye","boot":' + b"[" * 40_000,
    "deep closed lists": b'{"v":3,"type":"bye","boot":' + b"[" * 500 + b"]" * 500 + b"}",
    "deep objects": b'{"v":' * 9000,
    "5000 digits": b'{"v":3,"type":"bye","seq":' + b"9" * 5000 + b"}",
    "a negative count": b'{"v":3,"type":"bye","seq":-1}',
    "a digest with a line break": b'{"v":3,"type":"have","digest":"' + b"a" * 64 + b'\\n"}',
    "a run that climbs": b'{"v":3,"type":"report","run":"../x","samples":1}',
    "65 ranges": json.dumps({"v": 3, "type": "want", "digest": DIGEST, "ranges": [[0, 1]] * 65}).encode(),
    "a range of three": json.dumps({"v": 3, "type": "want", "digest": DIGEST, "ranges": [[0, 1, 2]]}).encode(),
    "65 metrics": update_with(json.dumps({f"m{n}": 1.0 for n in range(65)})),
    "too large by one byte": b'{"v":3,"type":"bye"}'.ljust(fields_module.MAX_MESSAGE_BYTES + 1),
    "a blob of 16 GiB": update_with("{}").replace(b'"size_bytes":100', b'"size_bytes":17179869184'),
    "an empty blob": update_with("{}").replace(b'"size_bytes":100', b'"size_bytes":0'),
    "an accuracy above one": b'{"v":3,"type":"report","run":"r","samples":1,"acc_personal":1.5}',
}


STRAYS = {
    "line break": "ok\nFORGED line",
    "escape": "\x1b]0;owned\x07",
    "right to left": "a\u202eb",
    "path": "../../etc/passwd",
    "space": "a b",
    "long": "a" * 40_000,
}
FAULT = {"error": "X", "message": "m"}
PLAIN = {"software": "x", "tier": "train", "samples": 1}
PLACES = {
    "boot of a hello": lambda evil: {"type": "hello", **PLAIN, "boot": evil},
    "boot of a heartbeat": lambda evil: {"type": "heartbeat", "boot": evil},
    "boot of a fault": lambda evil: {"type": "fault", **FAULT, "boot": evil},
    "boot of an update": lambda evil: json.loads(update_with("{}")) | {"boot": evil},
    "answers of a hello": lambda evil: {"type": "hello", **PLAIN, "answers": evil},
    "run of a fault": lambda evil: {"type": "fault", **FAULT, "run": evil},
    "run of a heartbeat": lambda evil: {"type": "heartbeat", "run": evil},
    "metric of an update": lambda evil: json.loads(update_with(json.dumps({evil: 1.0}))),
    "metric of a report": lambda evil: {"type": "report", "run": "r", "samples": 1, "metrics": {evil: 1.0}},
    "unknown key": lambda evil: {"type": "bye", evil: 1},
}


@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_names_with_stray_characters_are_refused_and_not_repeated_as_they_are(place, stray):
    payload = json.dumps({"v": 3, **place(stray)}).encode()
    with pytest.raises(MessageError) as caught:
        codec.parse_from_agent(payload)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


FREE = {
    "fingerprint": ({"type": "report", "run": "r", "samples": 1}, 64),
    "head": ({"type": "report", "run": "r", "samples": 1}, 64),
    "software": ({"type": "hello", **PLAIN}, 40),
    "message": ({"type": "fault", **FAULT}, 2000),
    "remedy": ({"type": "fault", **FAULT}, 500),
    "error": ({"type": "fault", **FAULT}, 64),
}


@pytest.mark.parametrize("field", FREE)
def test_words_of_a_peer_are_bounded_and_made_printable(field):
    fields, limit = FREE[field]
    evil = "a\nb\x1b[31m\u202e\u2028c"
    message = codec.parse_from_agent(json.dumps({"v": 3, **fields, field: evil}).encode())
    assert getattr(message, field) == "a b [31m  c"
    with pytest.raises(MessageError):
        codec.parse_from_agent(json.dumps({"v": 3, **fields, field: "a" * (limit + 1)}).encode())


@pytest.mark.parametrize("facts", [{"k" * 65: 1}, {"rss": "v" * 257}], ids=["name", "value"])
def test_facts_are_bounded(facts):
    with pytest.raises(MessageError):
        codec.parse_from_agent(json.dumps({"v": 3, "type": "hello", **PLAIN, "facts": facts}).encode())


@pytest.mark.parametrize("place", ["class_names", "encoder"])
@pytest.mark.parametrize("evil", ["a\nb", "\x1b[2J", "a\u202eb", "a" * 201])
def test_a_task_whose_names_could_steer_a_terminal_is_refused(place, evil):
    task = {"class_names": ["läuft", "ice\u00a0cream", "氷"], "encoder": "small_cnn"}
    assert Task.model_validate(task).class_names[1] == "ice\u00a0cream"
    task[place] = ["a", evil] if place == "class_names" else evil
    with pytest.raises(MessageError) as caught:
        codec.parse_from_coordinator(json.dumps({"v": 3, "type": "task", "task": task}).encode())
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("run", ["../x", "a\nb", "run 1"])
def test_a_job_of_no_possible_run_is_not_named(run):
    assert codec.named_job(codec.sealed(json.dumps({"v": 3, "type": "job", "run": run, "round": 1}).encode())) is None


def test_a_job_of_a_newer_coordinator_is_named_unless_a_bit_of_it_was_flipped_on_the_way():
    """Whoever names a damaged job as one that failed is left out of the round, which may wait for it for ever."""
    sent = codec.sealed(b'{"v":3,"type":"job","run":"run-0001","round":1,"new":true}')
    assert codec.named_job(sent) == ("run-0001", 1, None, "")
    for place, bit in itertools.product(range(len(sent)), range(8)):
        damaged = sent[:place] + bytes([sent[place] ^ 1 << bit]) + sent[place + 1 :]
        assert codec.named_job(damaged) is None, damaged


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_hostile_messages_are_refused_shortly(payload):
    began = time.process_time()
    with pytest.raises(MessageError) as caught:
        codec.parse_from_agent(payload)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - began < 1  # in truth some milliseconds


def test_the_largest_message_is_read():
    padded = b'{"v":4,"type":"bye"}'.ljust(fields_module.MAX_MESSAGE_BYTES)
    assert codec.parse_from_agent(padded) == up.Bye()


def test_a_newer_peer_is_refused_with_both_versions_and_what_to_upgrade():
    with pytest.raises(ProtocolMismatch, match=r"protocol 99, this side up to 4; upgrade this side"):
        codec.parse_from_agent(b'{"v":99,"type":"something-new","whatever":[]}')


def test_an_older_peer_is_refused_with_both_versions_and_what_to_upgrade():
    with pytest.raises(ProtocolMismatch, match=r"protocol 2, this side from 3; upgrade the peer"):
        codec.parse_from_coordinator(b'{"v":2,"type":"announce"}')


def test_mistakes_in_a_message_are_told_by_field_with_the_nearest_name():
    with pytest.raises(MessageError, match=r"Bye: boott: unknown key; did you mean 'boot'\?"):
        codec.parse_from_agent(b'{"v":3,"type":"bye","boott":"x"}')


def test_a_new_field_or_purpose_of_a_message_raises_the_protocol_number():
    """A peer of the version before then says what to upgrade, not that a key is unknown."""
    kinds = {*get_args(up.FromAgent), *get_args(down.FromCoordinator), down.Present} - {down.Located, down.UploadUrls}
    known = (4, "c95f23284aaa1d92")
    digest = fields_digest(
        *kinds, without=("Want.by_chunks", "UpdateManifest.way", "UpdateManifest.way ['', 'chunks', 'stored']")
    )
    assert (fields_module.PROTOCOL, digest) == known, "raise wire.messages.PROTOCOL for changed messages"


def test_a_field_that_only_answers_a_negotiated_message_is_not_on_the_wire_otherwise():
    """A coordinator that knows no URLs of blobs never gets it: the agent sends it after `Located` or `UploadUrls`."""
    sent = codec.encode(up.Want(digest=DIGEST, ranges=((0, 1),), direct=True))
    assert b"by_chunks" not in sent
    blob = fields_module.BlobRef(digest=DIGEST, size_bytes=1, chunk_bytes=64)
    assert b"way" not in codec.encode(up.UpdateManifest(run="run-0001", round=1, blob=blob, samples=1))


def test_every_text_of_a_peer_is_made_printable_or_held_to_a_pattern():
    """A field that is new and plain text would reach terminals and logs as it comes."""
    kinds = (*get_args(up.FromAgent), *get_args(down.FromCoordinator), down.Present, fields_module.BlobRef)
    plain = [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, field in kind.model_fields.items()
        if field.annotation is str
        and name != "type"
        and not any(
            getattr(rule, "pattern", None) or getattr(rule, "func", None) is printable for rule in field.metadata
        )
    ]
    assert plain == []


@pytest.mark.parametrize(
    "character", [*map(chr, range(32)), "\x7f", "\x85", "\x9b", "\u2028", "\u202e", "\u2066", "\ufeff"]
)
def test_no_control_escape_or_bidi_character_passes_as_text(character):
    parsed = codec.parse_from_agent(
        codec.encode(up.Fault.model_construct(v=3, type="fault", error="X", message=f"a{character}b"))
    )
    assert parsed.message == "a b"
