"""Every signed form covers the bytes that versions before it covered, and a proof counts for its own content alone.

The proofs below were made by the code before the forms had one definition: an older peer makes and checks the same.
"""

from __future__ import annotations

import base64
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from coordinator.state.command_keys import CommandKeys
from edge_agent.bundle.trust import Envelope
from edge_agent.identity import signed_request
from edge_agent.identity.enrolment_port import CertificateRequest
from edge_agent.identity.keys import token_key
from edge_agent.identity.signed_request import (
    ANNOUNCEMENT,
    CERTIFICATE_REQUEST,
    COMMAND,
    ENROLMENT_ANSWER,
    METADATA,
    TOKEN_REQUEST,
    answer_bytes,
    canonical,
    command_bytes,
    request_bytes,
)

SECRET = "A" * 22
MASTER = bytes(range(32))
OWNER = ec.derive_private_key(20_261_125, ec.SECP256R1())
ANSWER = {"signature": "x", "certificate": "QQ==", "authority": "Qg==", "commands": "{}"}
ANSWER_CONTENT = (
    b'headwater certificate answer 1\nhome\nporch\n{"authority": "Qg==", "certificate": "QQ==", "commands": "{}"}'
)
METADATA_CONTENT = {"version": 3, "_type": "targets", "expires": "2027-01-01T00:00:00Z", "federation": "home"}


def certificate(key) -> bytes:
    """The DER of a certificate of ``key``, signed by ``key`` itself."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "porch")])
    begin = datetime(2026, 11, 25, tzinfo=timezone.utc)
    built = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, begin + timedelta(days=1))
    kind = hashes.SHA256() if isinstance(key, ec.EllipticCurvePrivateKey) else None
    return built.sign(key, kind).public_bytes(Encoding.DER)


def test_request_of_a_token_has_the_bytes_of_older_versions():
    content = request_bytes("home", "porch", "Q1NS", "")
    assert content == b"headwater certificate request 1\nhome\nporch\n\nQ1NS"
    proof = TOKEN_REQUEST.sign(token_key(SECRET), content)
    assert base64.b64encode(proof) == (
        b"JzCRQaDEoDeEcLqGaizABCBqVXgwfqEWEyGCEgY3QvlyJhL5960t6r/qDoPkyJaCo08dFhLqh965UiRvHv0mAw=="
    )
    assert TOKEN_REQUEST.is_valid(token_key(SECRET).public_key().public_bytes_raw(), proof, content)


@pytest.mark.parametrize(
    "csr, proof",
    [
        ("Q1NS", "MEUCIA+zv+vWGuEBtwZjccyjzfZxhz120z3j9cpk7janrvgOAiEA2Hc4FKVa2fQcxBLOOB4sfLrU6v2qxG0tf8j2ZQFs2c0="),
        ("", "MEYCIQDE5TeFzRUwi/0zKD/yY1ZZK1+EZH43kiNu3BxyQeeSkQIhAKwfzYOmUlu2leNHJcjpy5UtkwVQRP+dRNO3MO4Z+b/V"),
    ],
)
def test_renewal_and_question_of_an_older_device_are_valid(csr, proof):
    request = CertificateRequest(federation="home", name="porch", csr=csr, serial="ab12", signature=proof)
    assert request.signed() == f"headwater certificate request 1\nhome\nporch\nab12\n{csr}".encode()
    assert CERTIFICATE_REQUEST.is_valid(certificate(OWNER), base64.b64decode(proof), request.signed())
    assert not CERTIFICATE_REQUEST.is_valid(certificate(OWNER), base64.b64decode(proof), request.signed() + b"\n")


def test_answer_of_an_older_authority_is_valid():
    content = answer_bytes("home", "porch", ANSWER)
    assert content == ANSWER_CONTENT
    proof = "MEQCIERAPe7cb66cVAqOvVBYn3cJh11GRF212HOKDaOpYcxAAiA8Yo8IMEqXtyj+CUcbwpQfzEdX4f6w7QIGrn6NAyzrgg=="
    assert ENROLMENT_ANSWER.is_valid(certificate(OWNER), base64.b64decode(proof), content)
    assert not ENROLMENT_ANSWER.is_valid(
        certificate(OWNER), base64.b64decode(proof), answer_bytes("home", "hall", ANSWER)
    )


def test_command_and_announcement_have_the_bytes_of_older_versions():
    keys = CommandKeys(MASTER, "home")
    agent = keys.of_agent("porch")
    mac = "a1f0c45fea42c31b737445ce8badc21c6fa859dae8044adf1b1e8ffe316b6c5c"
    payload = b'{"type":"who","v":1}'
    assert keys.proven("porch", payload) == b'{"type":"who","v":1,"mac":"%s"}' % mac.encode()
    assert COMMAND.is_valid(agent.key, bytes.fromhex(mac), b"porch\0" + payload)
    assert command_bytes("porch", payload) == b"porch\0" + payload
    signature = (
        "76349dfcc55703887ec0d3d9bdc9d803e103a0746eb027bfc3b09eeac9db401f"
        "be992b4f114242357c37a3f47c804a415f91f4ecfc17464670ce9d417f3dbe05"
    )
    payload = b'{"type":"announce","v":1}'
    assert keys.signed(payload) == b'{"type":"announce","v":1,"sig":"%s"}' % signature.encode()
    assert ANNOUNCEMENT.is_valid(agent.public_key, bytes.fromhex(signature), payload)


def test_release_has_the_bytes_of_older_versions():
    content = {**METADATA_CONTENT, "name": "ü"}
    assert canonical(content) == (
        '{"_type":"targets","expires":"2027-01-01T00:00:00Z","federation":"home","name":"ü","version":3}'.encode()
    )
    key = Ed25519PrivateKey.from_private_bytes(MASTER)
    (signature,) = Envelope(signatures=(), signed=content).with_signature(key).signatures
    assert signature.sig == (
        "1940d9b2ccb9f20d1759f569057a4b9bdcb50631801402c33b689964e82e3a65"
        "0c3488d38e45865b0bd54442fe5fcfcd718003814619b8bc96f8ffe8e2f26a05"
    )
    assert METADATA.is_valid(key.public_key().public_bytes_raw(), bytes.fromhex(signature.sig), canonical(content))


def test_a_proof_of_one_form_counts_in_no_other():
    key = token_key(SECRET)
    public_key = key.public_key().public_bytes_raw()
    contents = [
        request_bytes("home", "porch", "Q1NS", ""),
        answer_bytes("home", "porch", ANSWER),
        command_bytes("porch", b"{}"),
        canonical(METADATA_CONTENT),
    ]
    for signed in contents:
        proof = TOKEN_REQUEST.sign(key, signed)
        assert [METADATA.is_valid(public_key, proof, content) for content in contents] == [
            content == signed for content in contents
        ]


def test_what_is_no_key_has_signed_nothing():
    content = b"content"
    assert not TOKEN_REQUEST.is_valid(b"short", bytes(64), content)
    assert not CERTIFICATE_REQUEST.is_valid(b"no certificate", bytes(64), content)
    other_kind = Ed25519PrivateKey.from_private_bytes(MASTER)
    assert not CERTIFICATE_REQUEST.is_valid(certificate(other_kind), other_kind.sign(content), content)
    assert not COMMAND.is_valid(MASTER, b"", content)


def test_the_table_names_every_form():
    forms = {
        name
        for name, value in vars(signed_request).items()
        if isinstance(value, (signed_request.MacForm, signed_request.Ed25519Form, signed_request.EcdsaForm))
    }
    named = {line.split("`")[1] for line in str(signed_request.__doc__).splitlines() if line.startswith("`")}
    assert forms == {name for name in named if name.isupper()}
