"""Masks cancel in the sum and in nothing else: against plain sums, statistics, and a server that asks for too much."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from edge_agent.core.errors import CodecError, PrivacyRefused, SharesWrong, TrainingFailed
from edge_agent.privacy.secure_sum.device import Participant
from edge_agent.privacy.secure_sum.fixed_point import FixedPoint
from edge_agent.privacy.secure_sum.keys import (
    PRIME,
    PublicKeys,
    at_zero,
    derived,
    joined,
    outlier,
    pair_seed,
    split,
    stream,
    threshold,
)
from edge_agent.privacy.secure_sum.server import unmasked

CONTEXT = b"federation run-1 round 3"


def seeded(seed):
    """Repeatable random bytes, for tests alone."""
    rng = np.random.default_rng(seed)
    return lambda size: rng.bytes(size)


class Round:
    """All clients of one round, in one process; ``shareless`` ones drop out before phase 1."""

    def __init__(self, clients, seed=0, context=CONTEXT, shareless=()):
        self.names = [f"c{i:02d}" for i in range(clients)]
        self.clients = {name: Participant(name, context, seeded([seed, i])) for i, name in enumerate(self.names)}
        self.context = context
        self.keys = {name: one.keys() for name, one in self.clients.items()}
        self.sealed = {name: one.shares(self.keys) for name, one in self.clients.items() if name not in shareless}
        for name in self.sealed:
            self.clients[name].receive(self.for_client(name))

    def for_client(self, name):
        return {sender: boxes[name] for sender, boxes in self.sealed.items() if sender != name}

    def sum(self, numbers, dropped=(), silent=()):
        """The sum of integers by client; ``silent`` ones deliver and do not answer at the end."""
        masked = {name: self.clients[name].masked(numbers[name]) for name in self.sealed if name not in dropped}
        answers = {name: self.clients[name].unmask(masked) for name in masked if name not in silent}
        return unmasked(masked, self.keys, answers, self.context)


def integers(names, size=50, seed=1):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 2**64, size, dtype=np.uint64) for name in names}


@pytest.mark.parametrize("clients, dropped", [(3, 0), (4, 1), (10, 0), (10, 1), (10, 3), (20, 6)])
def test_secure_sum_is_the_plain_sum_with_up_to_thirty_percent_dropouts(clients, dropped):
    one = Round(clients)
    numbers = integers(one.names)
    gone = one.names[1 : 1 + dropped]  # in the middle: masks of both signs
    expected = np.zeros(50, np.uint64)
    for name in one.names:
        if name not in gone:
            expected += numbers[name]
    assert (one.sum(numbers, dropped=gone) == expected).all()


def test_clients_that_deliver_and_are_gone_before_the_end_count():
    one = Round(10)
    numbers = integers(one.names)
    total = one.sum(numbers, dropped=("c04",), silent=("c00", "c09"))
    expected = sum((numbers[name] for name in one.names if name != "c04"), np.zeros(50, np.uint64))
    assert (total == expected).all()


def test_clients_that_send_no_shares_are_in_no_mask():
    one = Round(10, shareless=("c02", "c09"))
    numbers = integers(one.names)
    here = [name for name in one.names if name not in {"c02", "c05", "c09"}]
    expected = sum((numbers[name] for name in here), np.zeros(50, np.uint64))
    assert (one.sum(numbers, dropped=("c05",)) == expected).all()
    with pytest.raises(PrivacyRefused, match="7 of 11 clients have sent shares, it takes 8"):
        Round(11, shareless=("c00", "c01", "c02", "c03"))


def test_asked_again_a_client_says_the_same_or_nothing():
    """Two encryptions under one key and nonce, two vectors under one mask, two answers: each would tell too much."""
    one = Round(5)
    numbers = integers([f"c{i:02d}" for i in range(5)])
    first = one.clients["c00"]
    sealed = one.sealed["c00"]
    assert first.shares(dict(reversed(one.keys.items()))) == sealed
    with pytest.raises(PrivacyRefused, match="shares for other keys"):
        first.shares({**one.keys, "c01": Participant("c01", CONTEXT).keys()})
    with pytest.raises(PrivacyRefused, match="other shares were received"):
        first.receive({name: box for name, box in one.for_client("c00").items() if name != "c04"})
    first.masked(numbers["c00"])
    with pytest.raises(PrivacyRefused, match="reveal the difference"):
        first.masked(numbers["c00"])
    assert first.unmask(one.names) == first.unmask(one.names)
    with pytest.raises(PrivacyRefused, match="asked for before"):
        first.unmask(one.names[:4])
    with pytest.raises(PrivacyRefused, match="no mask could be removed"):
        Participant("c00", CONTEXT).masked(numbers["c00"])


def test_a_single_masked_vector_is_uniform_whatever_it_holds():
    """Chi-square over the bytes of vectors of zeros, each client's own, and over the sum of all but one."""
    one = Round(4)
    zeros = np.zeros(40_000, np.uint64)
    masked = {name: client.masked(zeros) for name, client in one.clients.items()}
    for vector in (*masked.values(), masked["c00"] + masked["c01"] + masked["c02"]):
        counts = np.bincount(vector.view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
    plain = np.bincount(np.arange(40_000, dtype=np.uint64).view(np.uint8), minlength=256)
    assert stats.chisquare(plain).pvalue < 1e-12, "the test would notice a vector without masks"


def test_a_vector_that_comes_late_stays_hidden_after_its_mask_key_was_given_up():
    """The double mask: with the keys of all pairs the vector is still noise, because its own seed is not revealed."""
    one = Round(6)
    zeros = np.zeros(20_000, np.uint64)
    masked = {name: one.clients[name].masked(zeros) for name in one.names}
    late = masked.pop("c02")
    answers = {name: one.clients[name].unmask(masked) for name in masked}
    assert (unmasked(masked, one.keys, answers, CONTEXT) == 0).all()
    for other in masked:  # now without the masks of all pairs, as if the server had every mask key
        mask = stream(pair_seed(one.clients["c02"]._mask_key, one.keys[other].mask, CONTEXT), len(late))
        late = late - mask if other > "c02" else late + mask
    assert stats.chisquare(np.bincount(late.view(np.uint8), minlength=256)).pvalue > 1e-4
    assert (late - stream(one.clients["c02"]._seed, len(late)) == 0).all(), "nothing but its own mask is left"
    with pytest.raises(PrivacyRefused, match="asked for before"):
        one.clients["c00"].unmask([*masked, "c02"])


def test_no_answer_has_both_shares_of_a_client():
    one = Round(5)
    numbers = integers(one.names)
    for name in one.names[:4]:
        one.clients[name].masked(numbers[name])
    answer = one.clients["c00"].unmask(one.names[:4])
    assert set(answer) == set(one.names)
    assert {len(share) for share in answer.values()} == {66}, "one share each, of the seed or of the key"


def test_a_server_that_splits_the_clients_never_gets_both_secrets_of_one():
    """Whatever it tells to whom, each client answers once, and twice the threshold is more than all."""
    for clients in range(3, 300):
        assert 2 * threshold(clients) > clients
        assert clients - threshold(clients) >= math.floor(0.3 * clients), "30 % may drop out"


@pytest.mark.parametrize("delivered, reason", [
    (["c00", "c01"], "it takes 4"),
    (["c00", "c01", "c02", "mallory"], "has sent no shares"),
])  # fmt: skip
def test_unmasking_for_too_few_or_strange_clients_is_refused(delivered, reason):
    one = Round(5)
    with pytest.raises(PrivacyRefused, match=reason):
        one.clients["c00"].unmask(delivered)


def test_keys_that_the_server_made_up_are_refused_where_a_client_can_see_it():
    one = Round(4)
    other = Round(4, seed=9)
    fresh = Participant("c00", CONTEXT, seeded([0, 0]))
    with pytest.raises(PrivacyRefused, match="are not its own"):
        fresh.shares(other.keys)
    with pytest.raises(PrivacyRefused, match="occurs twice"):
        fresh.shares({**one.keys, "c01": one.keys["c02"]})
    with pytest.raises(PrivacyRefused, match="hides nobody"):
        fresh.shares({name: one.keys[name] for name in ("c00", "c01")})


def shared(clients, context=CONTEXT):
    """A round whose clients have sent shares and received none."""
    names = [f"c{i:02d}" for i in range(clients)]
    everyone = {name: Participant(name, context) for name in names}
    keys = {name: one.keys() for name, one in everyone.items()}
    sealed = {name: one.shares(keys) for name, one in everyone.items()}
    return everyone["c00"], {sender: boxes["c00"] for sender, boxes in sealed.items() if sender != "c00"}


@pytest.mark.parametrize("change", [
    lambda boxes: {**boxes, "c01": boxes["c02"]},
    lambda boxes: {**boxes, "c01": boxes["c01"][:-1] + bytes([boxes["c01"][-1] ^ 1])},
    lambda boxes: {**boxes, "c01": b""},
])  # fmt: skip
def test_shares_that_were_swapped_or_changed_are_noticed(change):
    first, boxes = shared(4)
    with pytest.raises(SharesWrong, match=r"^c01: no shares for 'c00'"):
        first.receive(change(boxes))
    with pytest.raises(PrivacyRefused, match="is not of this round"):
        first.receive({**boxes, "mallory": boxes["c01"]})
    first.receive(boxes)


def test_shares_of_another_round_do_not_open():
    (first, _) = shared(4)
    (_, other) = shared(4, context=b"federation run-1 round 4")
    with pytest.raises(SharesWrong, match=r"^c01, c02, c03: no shares") as told:
        first.receive(other)
    assert told.value.clients == ("c01", "c02", "c03")


def test_a_wrong_share_of_a_mask_key_is_found_before_a_sum_comes_out():
    one = Round(4)
    numbers = integers(one.names)
    masked = {name: one.clients[name].masked(numbers[name]) for name in one.names[:3]}
    answers = {name: one.clients[name].unmask(masked) for name in masked}
    answers["c01"] = {**answers["c01"], "c03": bytes(65) + b"\x07"}
    with pytest.raises(CodecError):
        unmasked(masked, one.keys, answers, CONTEXT)
    with pytest.raises(TrainingFailed, match="it takes 3"):
        unmasked(masked, one.keys, {"c00": answers["c00"]}, CONTEXT)


def moved(share):
    """By one, in the field: what comes out at 0 is another number, of 32 bytes in the case of a factor of 1."""
    return ((int.from_bytes(share, "big") + 1) % PRIME).to_bytes(66, "big")


@pytest.mark.parametrize("liar", ["c00", "c03", "c06"])
@pytest.mark.parametrize("about", ["c00", "c04", "c05"])
def test_one_wrong_share_of_a_seed_or_key_is_found_and_the_sum_comes_out(liar, about):
    one = Round(7)
    numbers = integers(one.names)
    masked = {name: one.clients[name].masked(numbers[name]) for name in one.names if name != "c05"}
    answers = {name: one.clients[name].unmask(masked) for name in masked}
    expected = unmasked(masked, one.keys, answers, CONTEXT)
    blamed = []
    answers[liar] = {**answers[liar], about: moved(answers[liar][about])}
    assert (unmasked(masked, one.keys, answers, CONTEXT, blamed.append) == expected).all()
    assert blamed == ([] if liar == "c06" else [liar])  # 5 of 7 are needed, and those of the first are taken


def test_a_share_moved_so_that_a_seed_is_off_by_one_is_found():
    """What comes out are 32 bytes as well, and without the hash the sum was noise that nobody noticed."""
    one = Round(4)
    masked = {name: one.clients[name].masked(integers(one.names)[name]) for name in one.names}
    answers = {name: one.clients[name].unmask(masked) for name in masked}
    expected = unmasked(masked, one.keys, answers, CONTEXT)
    blamed = []
    step = pow(at_zero((1, 2, 3))[0], -1, PRIME)
    share = (int.from_bytes(answers["c00"]["c01"], "big") + step) % PRIME
    answers["c00"] = {**answers["c00"], "c01": share.to_bytes(66, "big")}
    assert (unmasked(masked, one.keys, answers, CONTEXT, blamed.append) == expected).all()
    assert blamed == ["c00"]
    del answers["c03"]
    with pytest.raises(CodecError, match="one of c00, c01, c02 has revealed a wrong one"):
        unmasked(masked, one.keys, answers, CONTEXT)


def test_outlier_is_the_point_that_brute_force_finds():
    """Each point is left out in turn, and Lagrange's formula is worked out anew."""
    secret = bytes(range(32))
    shares = dict(enumerate(split(secret, 4, 9, seeded(4)), 1))
    points = (2, 3, 5, 7, 9)
    for wrong in points:
        given = {point: moved(shares[point]) if point == wrong else shares[point] for point in points}
        rest = [point for point in points if point != wrong]
        assert joined(at_zero(rest), [given[point] for point in rest]) == secret
        assert outlier(given, lambda found: found == secret) == wrong
    two = {point: moved(shares[point]) if point < 5 else shares[point] for point in points}
    assert outlier(two, lambda found: found == secret) is None


def test_any_shares_of_the_least_number_give_the_secret_and_fewer_give_another():
    secret = bytes(range(32))
    shares = split(secret, 3, 5, seeded(4))
    for points in itertools.combinations(range(1, 6), 3):
        assert joined(at_zero(points), [shares[point - 1] for point in points]) == secret
    with pytest.raises(CodecError):  # a random number of 521 bits is hardly ever one of 256
        joined(at_zero((1, 2)), shares[:2])


def test_shares_are_values_of_a_polynomial_worked_out_by_hand():
    """Secret 5, coefficient 7: 12, 19, 26; with the entropy of the one coefficient fixed."""
    shares = split(b"\x05", 2, 3, lambda size: (7).to_bytes(size, "big"))
    assert [int.from_bytes(share, "big") for share in shares] == [12, 19, 26]
    assert int.from_bytes(joined(at_zero((1, 3)), [shares[0], shares[2]]), "big") == 5
    assert pow(3, PRIME - 1, PRIME) == 1


def test_key_stream_and_derivation_are_those_of_the_standards():
    """RFC 8439, 2.4.2 keystream of an all-zero key, nonce and counter (A.1, vector 1); RFC 5869, A.3 without a salt."""
    first = stream(bytes(32), 2).astype("<u8").tobytes()
    assert first.hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    okm = derived(bytes.fromhex("0b" * 22), b"")
    assert okm.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


@pytest.mark.parametrize("clients, dropped", [(10, 0), (10, 1), (10, 3)])
def test_weighted_mean_of_floats_differs_by_no_more_than_the_fixed_point_bound(clients, dropped):
    one = Round(clients)
    point = FixedPoint(24)
    rng = np.random.default_rng(5)
    values = {name: rng.normal(size=2000) * 3 for name in one.names}
    weights = {name: float(rng.integers(1, 500)) for name in one.names}
    numbers = {n: point.encode(np.append(values[n] * weights[n], weights[n]), clients) for n in one.names}
    gone = one.names[4 : 4 + dropped]
    total = point.decode(one.sum(numbers, dropped=gone))
    here = [name for name in one.names if name not in gone]
    plain = sum(values[name] * weights[name] for name in here)
    assert total[-1] == sum(weights[name] for name in here)
    assert np.abs(total[:-1] - plain).max() <= len(here) * 2.0**-25
    mean = plain / total[-1]
    bound = len(here) * 2.0**-25 / total[-1]
    assert np.abs(total[:-1] / total[-1] - mean).max() <= bound * (1 + 1e-6)


@pytest.mark.parametrize("number", [math.nan, math.inf, 2.0**38])
def test_numbers_that_the_sum_cannot_hold_are_refused(number):
    with pytest.raises(TrainingFailed, match="holds up to"):
        FixedPoint(24).encode(np.array([0.0, number]), 10)


def test_the_largest_numbers_of_all_clients_do_not_wrap_around():
    point = FixedPoint(24)
    clients = 7
    total = np.zeros(2, np.uint64)
    for _ in range(clients):
        total += point.encode(np.array([1.0, -1.0]) * point.bound(clients), clients)
    assert np.allclose(point.decode(total), np.array([2.0**38, -(2.0**38)]), rtol=1e-9)


def test_public_keys_are_of_the_round_alone():
    names = [Participant("a", CONTEXT).keys() for _ in range(2)]
    assert names[0] != names[1]
    assert isinstance(names[0], PublicKeys)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(32)])
def test_public_keys_that_are_none_are_refused(key):
    """32 zero bytes are a point of small order: every secret with it would be known."""
    one = Round(3)
    fresh = Participant("c00", CONTEXT, seeded([0, 0]))
    with pytest.raises(CodecError, match="public key"):
        fresh.shares({**one.keys, "c01": PublicKeys(key, one.keys["c01"].mask, bytes(32))})
