from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

from edge_agent.core.errors import ConfigError, DataError, UnknownName
from edge_agent.data import partition

TRAIN = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 6000))
TEST = np.random.default_rng(2).permutation(np.repeat(np.arange(10), 1000))
"""As many labels of each class as Fashion-MNIST and MNIST-like sets have."""


def distinct(rows):
    return len(np.unique(np.concatenate(rows)))


# --- FedPAC ----------------------------------------------------------------------------------------------------------


def test_fedpac_gives_172_of_three_classes_and_12_of_seven():
    """600: 20 % = 120 even, 12 of each; 480 of three, 160 of each; the groups follow each other client by client."""
    groups = [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]]
    for client, rows in enumerate(partition.fedpac(TRAIN, 20)):
        counts = np.bincount(TRAIN[rows], minlength=10)
        assert sorted(counts.tolist()) == [12] * 7 + [172] * 3
        assert sorted(np.flatnonzero(counts == 172)) == sorted(groups[client % 5])


@pytest.mark.parametrize(
    "labels, clients, draws, different",
    [(TRAIN, 20, 12_000, 12_000), (TEST, 20, 12_000, 9_228), (TRAIN, 100, 60_000, 51_528), (TEST, 100, 60_000, 9_444)],
)
def test_fedpac_shares_as_many_samples_as_the_papers_code_does(labels, clients, draws, different):
    rows = partition.fedpac(labels, clients)
    assert sum(map(len, rows)) == draws
    assert distinct(rows) == different


def papers_own(labels, users, size, share=0.2):
    """The algorithm of FedPAC's published code, written down once more from its loop, with a stable sort."""
    groups = [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]]
    per_label = len(labels) // 10
    order = np.argsort(labels, kind="stable")
    iid = int(size * share)
    used = [0] * 10
    result = []
    for user in range(users):
        mine = []
        for wanted, total in ((list(range(10)), iid), (groups[user % 5], size - iid)):
            each = total // len(wanted)
            for place, label in enumerate(wanted, 1):
                count = each if place < len(wanted) else total - each * (len(wanted) - 1)
                start = label * per_label + used[label]
                if used[label] + count > per_label:
                    start = label * per_label
                    used[label] = 0
                mine += order[start : start + count].tolist()
                used[label] += count
        result.append(mine)
    return result


@pytest.mark.parametrize("clients, size", [(20, 600), (37, 607), (100, 600), (3, 33)])
def test_fedpac_takes_the_rows_that_the_papers_loop_takes(clients, size):
    assert [rows.tolist() for rows in partition.fedpac(TEST, clients, size=size)] == papers_own(TEST, clients, size)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.75, 1.0])
def test_fedpac_takes_them_with_any_share_of_even_samples(share):
    rows = partition.fedpac(TEST, 20, size=600, iid_share=share)
    assert [mine.tolist() for mine in rows] == papers_own(TEST, 20, 600, share)
    classes = {len(np.unique(TEST[mine])) for mine in rows}
    assert classes == ({3} if share == 0 else {10})


def test_fedpac_pointers_may_start_later_as_for_cifar():
    first = partition.fedpac(TRAIN, 1, first=2000)[0]
    of_class_0 = np.flatnonzero(TRAIN == 0)
    assert first[:12].tolist() == of_class_0[2000:2012].tolist()


def test_fedpac_needs_enough_of_each_class():
    labels = np.repeat(np.arange(10), 171)
    with pytest.raises(DataError, match=r"takes 172 of class 0, the pool has 171; lower --size"):
        partition.fedpac(labels, 5)
    assert len(partition.fedpac(np.repeat(np.arange(10), 172), 1)) == 1


@pytest.mark.parametrize("classes", [9, 11])
def test_fedpac_is_made_for_ten_classes(classes):
    with pytest.raises(DataError, match="made for ten; use dirichlet"):
        partition.fedpac(np.repeat(np.arange(classes), 500), 5)


# --- Dirichlet -------------------------------------------------------------------------------------------------------


@given(st.floats(0.05, 50), st.integers(1, 12), st.integers(0, 99))
def test_dirichlet_gives_everything_away_and_everybody_enough(alpha, clients, seed):
    labels = TEST[:3000]
    try:
        rows = partition.dirichlet(labels, clients, alpha, np.random.default_rng(seed), min_size=10)
    except DataError:
        assert alpha < 0.2
        return
    assert sorted(np.concatenate(rows).tolist()) == list(range(3000))
    assert min(map(len, rows)) >= 10


def test_dirichlet_of_a_large_alpha_is_nearly_equal():
    rows = partition.dirichlet(TRAIN, 20, 1e6, np.random.default_rng(0))
    assert max(abs(len(mine) - 3000) for mine in rows) <= 20
    counts = np.stack([np.bincount(TRAIN[mine], minlength=10) for mine in rows])
    assert abs(counts - 300).max() <= 6


def test_dirichlet_of_a_small_alpha_gives_few_classes_to_each():
    few, many = (partition.dirichlet(TRAIN, 20, alpha, np.random.default_rng(0)) for alpha in (0.05, 100.0))
    share = [np.mean([np.bincount(TRAIN[mine]).max() / len(mine) for mine in rows]) for rows in (few, many)]
    assert share[0] > 0.5 > 0.2 > share[1]


class Shares:
    """A generator whose Dirichlet draws were written down before."""

    def __init__(self, *draws):
        self.draws = list(draws)

    def dirichlet(self, alphas):
        return np.array(self.draws.pop(0))


def cut_sizes(counts, *draws):
    cuts = partition._draw_cuts(np.array(counts), len(draws[0]), 1.0, Shares(*draws))
    return None if cuts is None else [np.diff(cut).tolist() for cut in cuts]


def test_dirichlet_passes_over_who_holds_a_fair_share():
    """12 samples, two clients, a fair share is 6. After class 0 client 0 holds 8, so all of classes 1 and 2 go to 1."""
    assert cut_sizes([8, 2, 2], [1.0, 0.0], [0.9, 0.1], [0.5, 0.5]) == [[8, 0], [0, 2], [0, 2]]


def test_dirichlet_cuts_where_the_running_share_rounds_down():
    """0.75 of 6 is 4.5: four; then nobody holds six yet, and half of six is three."""
    assert cut_sizes([6, 6], [0.75, 0.25], [0.5, 0.5]) == [[4, 2], [3, 3]]


def test_dirichlet_draws_again_where_a_class_finds_no_taker():
    """Client 0 holds all that is fair, and the whole of class 1 wants to go to it: there is nothing to divide by."""
    assert cut_sizes([6, 6], [1.0, 0.0], [1.0, 0.0]) is None


def test_dirichlet_that_cannot_be_says_alpha_minimum_and_what_helps():
    labels = np.repeat([0, 1], 100)
    with pytest.raises(
        DataError, match=r"alpha 0.001 with 15 clients .*fewer than 10.*client \d+ with \d\); raise --alpha"
    ):
        partition.dirichlet(labels, 15, 0.001, np.random.default_rng(0))


@pytest.mark.parametrize("rule", ["dirichlet", "iid"])
def test_too_few_samples_are_told_with_how_many_it_takes(rule):
    labels = np.zeros(39, np.int64)
    rng = np.random.default_rng(0)
    with pytest.raises(DataError, match="39 samples for 4 clients of at least 10; 40 are needed"):
        if rule == "iid":
            partition.iid(labels, 4, rng, size=10)
        else:
            partition.dirichlet(labels, 4, 1.0, rng)


# --- the others ------------------------------------------------------------------------------------------------------


def test_pathological_gives_two_classes_each_and_four_clients_a_class():
    pool = np.concatenate([TRAIN, TEST])
    rows = partition.pathological(pool, 20, np.random.default_rng(0))
    classes = [sorted(set(pool[mine].tolist())) for mine in rows]
    assert classes == [[2 * (client // 4), 2 * (client // 4) + 1] for client in range(20)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(70_000))
    counts = np.stack([np.bincount(pool[mine], minlength=10) for mine in rows])
    for label in range(10):
        taken = counts[:, label][counts[:, label] > 0]
        assert len(taken) == 4
        assert taken[:3].min() >= 175
        assert taken[:3].max() < 1750


def test_pathological_says_whom_it_leaves_with_too_little():
    """Two clients share the 16 samples of each class: at most one of the two can have ten."""
    with pytest.raises(DataError, match=r"gets \d samples, expected at least 10 \([4-8] of 8 clients fall short\)"):
        partition.pathological(np.repeat(np.arange(4), 16), 8, np.random.default_rng(0), classes_each=1)


def plain_fedrir_counts(labels, clients, alpha, rng, least):
    """FedRIR's split as its code makes it, one sample count at a time in plain lists: client -> class -> samples."""
    totals = [int((labels == label).sum()) for label in range(int(labels.max()) + 1)]
    while True:
        counts = [[0] * len(totals) for _ in range(clients)]
        for label, total in enumerate(totals):
            shares = rng.dirichlet([alpha] * clients).tolist()
            for client in range(clients):
                if sum(counts[client]) >= sum(totals) / clients:
                    shares[client] = 0.0
            before = 0
            running = 0.0
            for client in range(clients):
                running += shares[client]
                end = total if client == clients - 1 else int(running / sum(shares) * total)
                counts[client][label] = end - before
                before = end
        if min(map(sum, counts)) >= least:
            return counts


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_the_rule_of_fedrir_is_the_authors_generator(alpha):
    """Every client has 400 of the 70,000 samples; who gets how many is worked out again by a plain loop."""
    pool = np.concatenate([TRAIN, TEST])
    rows = partition.fedrir_dirichlet(pool, 20, alpha, np.random.default_rng(7))
    counts = np.stack([np.bincount(pool[mine], minlength=10) for mine in rows])
    expected = plain_fedrir_counts(pool, 20, alpha, np.random.default_rng(7), 400)
    assert np.abs(counts - np.array(expected)).max() <= 1, "sums of shares are rounded in another order"
    assert counts.sum(axis=1).min() >= 400
    assert sorted(np.concatenate(rows).tolist()) == list(range(70_000))


def test_the_least_of_fedrirs_rule_is_half_an_equal_share_of_few_samples():
    rows = partition.fedrir_dirichlet(TEST[:1000], 4, 1.0, np.random.default_rng(0))
    assert min(map(len, rows)) >= 125
    assert min(map(len, partition.fedrir_dirichlet(TEST[:1000], 4, 1.0, np.random.default_rng(0), min_size=230))) >= 230


@given(st.integers(1, 300))
def test_a_random_split_has_the_sizes_of_scikit_learns(samples):
    rows = np.arange(samples) + 5
    train, test = partition.split_at_random(rows, 0.25, np.random.default_rng(samples))
    assert sorted([*train.tolist(), *test.tolist()]) == rows.tolist()
    if samples > 1:
        expected, _ = train_test_split(rows, train_size=0.75, random_state=0)
        assert len(train) == len(expected)


def test_a_random_split_is_not_one_by_class():
    labels = np.repeat([0, 1], 200)
    _, test = partition.split_at_random(np.arange(400), 0.25, np.random.default_rng(1))
    assert np.bincount(labels[test]).tolist() != [50, 50]


def test_iid_is_a_random_cut_into_equal_parts():
    rows = partition.iid(TEST, 7, np.random.default_rng(0))
    assert sorted(np.concatenate(rows).tolist()) == list(range(10_000))
    assert {len(mine) for mine in rows} == {1428, 1429}
    sized = partition.iid(TEST, 7, np.random.default_rng(0), size=50)
    assert [len(mine) for mine in sized] == [50] * 7
    assert distinct(sized) == 350


def test_test_samples_follow_the_training_samples_class_by_class():
    """Class 0: 30 and 10 training samples share 8 test samples as 6 and 2; class 1 is client 1's; class 2 nobody's."""
    train_labels = np.array([0] * 40 + [1] * 5 + [2] * 5)
    test_labels = np.array([0] * 8 + [1] * 3 + [2] * 4)
    train = [np.arange(30), np.arange(30, 45)]
    first, second = partition.alike(train, train_labels, test_labels, np.random.default_rng(0))
    assert np.bincount(test_labels[first], minlength=3).tolist() == [6, 0, 0]
    assert np.bincount(test_labels[second], minlength=3).tolist() == [2, 3, 0]
    assert distinct([first, second]) == 11


@given(st.integers(1, 9), st.integers(0, 99))
def test_no_test_sample_goes_to_two_clients(clients, seed):
    rng = np.random.default_rng(seed)
    train = partition.dirichlet(TRAIN[:2000], clients, 1.0, rng, min_size=1)
    dealt = partition.alike(train, TRAIN[:2000], TEST[:500], rng)
    together = np.concatenate(dealt)
    assert len(together) == len(np.unique(together)) == 500


def test_the_same_seed_gives_the_same_rows():
    for make in (
        lambda rng: partition.dirichlet(TEST, 5, 0.5, rng),
        lambda rng: partition.pathological(TEST, 10, rng),
        lambda rng: partition.iid(TEST, 5, rng),
    ):
        first, again, other = (make(np.random.default_rng(seed)) for seed in (3, 3, 4))
        assert [mine.tolist() for mine in first] == [mine.tolist() for mine in again]
        assert [mine.tolist() for mine in first] != [mine.tolist() for mine in other]


def test_an_unknown_rule_names_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'dirichlet'"):
        partition.check_rule("dirichelt")


# --- the file --------------------------------------------------------------------------------------------------------

POOL = partition.Pool.of(np.array([0, 1, 0, 1]), np.array([1, 0]))


def made(rows=((0, 1), (2, 3)), tests=((0,), (1,)), rule="iid"):
    shares = {f"c{n}": (np.array(a), np.array(b)) for n, (a, b) in enumerate(zip(rows, tests, strict=True))}
    return partition.divided(rule, {"seed": 0}, POOL, shares)


def test_a_division_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "partition.json"
    division = made()
    division.write(path)
    again = partition.Division.read(path)
    assert again == division
    assert again.sha256 == division.sha256
    assert again.clients["c1"].train == (2, 3)


def test_the_hash_is_of_rows_and_pool_and_of_nothing_else():
    assert made().sha256 == made(rule="dirichlet").sha256
    assert made().sha256 != made(rows=((1, 0), (2, 3))).sha256
    assert made().sha256 != made(tests=((1,), (0,))).sha256
    other = partition.divided("iid", {}, partition.Pool.of(np.array([0, 1, 1, 1]), np.array([1, 0])), {})
    assert other.pool.labels_sha256 != POOL.labels_sha256


def test_pools_are_told_apart_by_where_training_ends():
    """The same labels in the same order, cut at another place."""
    one, other = (partition.Pool.of(np.zeros(n, np.int64), np.zeros(6 - n, np.int64)) for n in (4, 2))
    assert one.labels_sha256 != other.labels_sha256


@pytest.mark.parametrize(
    "change, kind, words",
    [
        (lambda c: c["clients"]["c0"].update(train=[1, 0]), DataError, "rows have the hash"),
        (lambda c: c.pop("sha256"), DataError, "the file states None"),
        (lambda c: c.update(format=2), ConfigError, "format = 2"),
        (lambda c: c.update(rows=3), ConfigError, "rows: unknown key"),
        (lambda c: c["clients"].update({"../x": c["clients"].pop("c0")}), ConfigError, "clients"),
        (lambda c: c["clients"]["c0"].update(train=[]), ConfigError, "train"),
        (lambda c: c["clients"]["c0"].update(train=[-1]), ConfigError, "train"),
        (lambda c: c.update(clients={}), ConfigError, "clients"),
    ],
)
def test_a_changed_file_is_refused(tmp_path, change, kind, words):
    path = tmp_path / "partition.json"
    made().write(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(kind, match=words):
        partition.Division.read(path)


@pytest.mark.parametrize(
    "rows, tests",
    [(((0, 0), (2,)), ((), ())), (((0,), (4,)), ((), ())), (((0,), (1,)), ((2,), ())), (((0,),), ((0, 0),))],
)
def test_rows_that_are_not_there_or_twice_are_refused(tmp_path, rows, tests):
    path = tmp_path / "partition.json"
    made(rows, tests).write(path)
    with pytest.raises(DataError, match="has a row twice, or one that the pool does not have"):
        partition.Division.read(path)


def test_without_a_test_part_a_row_cannot_train_and_test(tmp_path):
    pool = partition.Pool.of(np.zeros(4, np.int64), None)
    path = tmp_path / "partition.json"
    partition.divided("iid", {}, pool, {"c0": (np.array([0, 1]), np.array([1]))}).write(path)
    with pytest.raises(DataError, match="'c0' has a row twice"):
        partition.Division.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": NaN}', "\x00"])
def test_a_damaged_file_is_refused(tmp_path, text):
    path = tmp_path / "partition.json"
    path.write_text(text)
    with pytest.raises((DataError, ConfigError)):
        partition.Division.read(path)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        partition.Division.read(tmp_path / "none.json")


def test_a_division_of_other_data_is_refused():
    other = partition.Pool.of(np.array([0, 1, 0, 1]), None)
    with pytest.raises(DataError, match=r"made for 4 training and 2 test samples.*the data are 4 training samples"):
        made().check_pool(other, "partition.json")


# --- differences in size ---------------------------------------------------------------------------------------------


def test_sizes_follow_dirichlet_and_everybody_has_all_classes_alike():
    """Sizes are a Dirichlet draw: by its known variance a share's deviation is sqrt((1/n)(1-1/n)/(n a + 1))."""
    sizes = []
    for seed in range(200):
        rows = partition.quantity(TRAIN[:6000], 5, 2.0, np.random.default_rng(seed), min_size=1)
        assert distinct(rows) == sum(map(len, rows)) == 6000
        sizes += [len(mine) / 6000 for mine in rows]
    assert np.std(sizes) == pytest.approx(np.sqrt(0.2 * 0.8 / 11), rel=0.1)
    largest = max(rows, key=len)
    assert np.bincount(TRAIN[largest]) / len(largest) == pytest.approx(np.full(10, 0.1), abs=0.03)


def test_sizes_have_a_least_one_and_what_cannot_be_is_told():
    rows = partition.quantity(TRAIN[:1000], 10, 0.5, np.random.default_rng(0), min_size=20)
    assert min(map(len, rows)) >= 20
    with pytest.raises(DataError, match=r"100 samples for 10 clients of at least 11; 110 are needed"):
        partition.quantity(TRAIN[:100], 10, 1.0, np.random.default_rng(0), min_size=11)
    with pytest.raises(DataError, match=r"alpha 0.01 with 10 clients .*raise --alpha"):
        partition.quantity(TRAIN[:1000], 10, 0.01, np.random.default_rng(0), min_size=50)


def test_fedpac_does_not_give_one_client_a_sample_twice():
    """180 of each class and clients of 600: the second one's dominant part would start where its even part began."""
    labels = np.repeat(np.arange(10), 180)
    with pytest.raises(DataError, match=r"client 1 of 600 samples would get some of 1800 twice.*lower --size"):
        partition.fedpac(labels, 5)
    assert all(len(set(rows)) == 300 for rows in map(np.ndarray.tolist, partition.fedpac(labels, 5, size=300)))


def test_more_classes_for_each_client_than_there_are_is_refused():
    with pytest.raises(DataError, match="11 classes for each client, the data have 10"):
        partition.pathological(TRAIN, 5, np.random.default_rng(0), classes_each=11)


def test_a_damaged_file_is_no_partition(tmp_path):
    (tmp_path / "p.json").write_text('{"format": 1, "rule"')
    with pytest.raises(DataError, match=r"damaged.*copy the partition again"):
        partition.Division.read(tmp_path / "p.json")
