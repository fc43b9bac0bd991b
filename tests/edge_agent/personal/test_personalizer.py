"""A personal head from Python, without torch: fit, predict, evaluate, save, load, and mistakes."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from edge_agent import Personalizer
from edge_agent.core.errors import DataError, UnknownName, UsageError
from edge_agent.data import load


@pytest.fixture
def opened(make_bundle, tmp_path):
    return Personalizer.open(make_bundle().path, cache=tmp_path / "cache")


def test_it_says_in_one_line_what_it_has(opened):
    assert "10 classes, no head yet, fp32)" in repr(opened)
    opened.fit(*samples(), head="prototype")
    assert "head prototype" in repr(opened)
    assert len(repr(opened)) < 100


def samples(seed=0):
    """Images whose brightness is their class, of three."""
    rng = np.random.default_rng(seed)
    labels = np.arange(60) % 3
    return (labels[:, None, None, None] * 100 + rng.integers(0, 30, (60, 8, 8, 3))).astype(np.uint8), labels


def test_a_head_is_fitted_used_saved_and_loaded(opened, make_bundle, tmp_path):
    inputs, labels = samples()
    assert opened.evaluate(inputs, labels)["acc.personal"] is None
    assert opened.fit(inputs, labels, head="lr") is opened
    assert opened.evaluate(*samples(1))["acc.personal"] > 0.9
    found = opened.predict_proba(inputs)
    assert found.shape == (60, len(opened.classes))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
    assert (opened.predict(inputs) == labels).mean() > 0.9
    opened.save(tmp_path / "head")
    again = Personalizer.open(make_bundle().path, cache=tmp_path / "cache").load(tmp_path / "head")
    np.testing.assert_array_equal(again.predict_proba(inputs), found)


def test_labels_may_be_names_or_positions(opened):
    inputs, labels = samples()
    by_position = opened.fit(inputs, labels).predict_proba(inputs)
    by_name = opened.fit(inputs, labels.astype(str)).predict_proba(inputs)
    np.testing.assert_array_equal(by_position, by_name)


def test_answers_are_of_the_kind_that_the_labels_were(opened, make_bundle, tmp_path):
    """As scikit-learn: text for text, integers for integers, be they names or positions of classes."""
    inputs, labels = samples()
    for given in (labels, labels.astype(str), labels.astype(object), labels.astype(str).astype(object)):
        found = opened.fit(inputs, given, head="prototype").predict(inputs)
        assert (found == given).mean() > 0.9
        assert found.dtype.kind == ("U" if isinstance(given[0], str) else "i")
    task = opened.bundle.manifest.task.model_copy(update={"class_names": ("a", "b", "2")})
    other = Personalizer.open(make_bundle(task=task).path, cache=tmp_path / "cache")
    assert (other.fit(inputs, labels, head="prototype").predict(inputs) == labels).mean() > 0.9  # positions
    own = labels * 5 + 3
    assert (other.fit(inputs, own, head="prototype", own_classes=True).predict(inputs) == own).all()
    assert other.classes_.tolist() == [3, 8, 13]
    other.save(tmp_path / "head")
    assert (other.load(tmp_path / "head").predict(inputs) == own).all()
    other.fit(inputs, labels, head="prototype", local=True).use_local()
    assert (other.predict(inputs) == labels).mean() > 0.9
    other.fit(inputs, np.array([2, 7, 9])[labels], head="prototype", own_classes=True)  # '2' is the bundle's, as 'a' is
    assert other.classes_.tolist() == ["a", "b", "2", "7", "9"]


def test_partial_fit_takes_integers_for_names(opened):
    inputs, labels = samples()
    opened.partial_fit(inputs[:30], labels[:30] + 20, head="prototype")
    assert opened.classes_.tolist() == [20, 21, 22]
    opened.partial_fit(inputs[30:], labels[30:] + 21)
    assert opened.classes_.tolist() == [20, 21, 22, 23]
    assert opened.predict(inputs).dtype.kind == "i"
    opened.partial_fit(inputs, (labels + 20).astype(str))
    assert opened.predict(inputs).dtype.kind == "U"


def test_a_head_of_one_class_is_reported_and_a_new_class_alone_is_not(opened, caplog):
    inputs, labels = samples()
    opened.partial_fit(inputs[labels < 2], labels[labels < 2], head="prototype")
    opened.partial_fit(inputs[labels == 2], labels[labels == 2])
    assert not caplog.text
    opened.fit(inputs[labels == 2], labels[labels == 2], head="prototype")
    assert "one_class class=2: the head can only answer that" in caplog.text


def test_own_classes_are_fitted_predicted_and_loaded_by_their_names(opened, make_bundle, tmp_path):
    inputs, labels = samples()
    names = np.array(["cat", "dog", "tree"])[labels]
    with pytest.raises(DataError, match="own_classes=True"):
        opened.fit(inputs, names)
    opened.fit(inputs, names, own_classes=True)
    assert opened.classes == ("cat", "dog", "tree")
    assert (opened.predict(inputs) == names).mean() > 0.9
    assert opened.evaluate(inputs, names)["acc.personal"] > 0.9
    opened.save(tmp_path / "head")
    again = Personalizer.open(make_bundle().path, cache=tmp_path / "cache").load(tmp_path / "head")
    assert set(again.predict(inputs)) == {"cat", "dog", "tree"}


def test_own_classes_follow_those_of_the_bundle_where_some_are_known(opened):
    inputs, labels = samples()
    opened.fit(inputs, np.array(["7", "scarf", "3"])[labels], own_classes=True)
    assert opened.classes == (*"0123456789", "scarf")
    shares = opened.predict_proba(inputs)
    assert shares.shape == (60, 11)
    assert shares[:, [0, 1, 2, 4, 5, 6, 8, 9]].max() == 0


def test_partial_fit_learns_as_one_fit_of_everything_and_extends_the_classes(opened, make_bundle, tmp_path):
    """In the order of arrival, whatever the batches are; columns of earlier classes keep their places."""
    inputs, labels = samples()
    names = np.array(["cat", "dog", "tree"])[labels]
    whole = Personalizer.open(make_bundle().path, cache=tmp_path / "cache").fit(
        inputs, names, head="lr", own_classes=True
    )
    early = np.flatnonzero(labels < 2)
    late = np.flatnonzero(labels == 2)
    opened.partial_fit(inputs[early[:20]], names[early[:20]], head="lr")
    assert opened.classes_.tolist() == ["cat", "dog"]
    opened.partial_fit(inputs[early[20:]], names[early[20:]], classes=["cat", "dog"])
    opened.partial_fit(inputs[late], names[late])
    assert opened.classes_.tolist() == ["cat", "dog", "tree"]
    np.testing.assert_allclose(
        opened.head.head.predict_proba(rows_of(opened)), whole.head.head.predict_proba(rows_of(whole)), atol=1e-3
    )
    opened.partial_fit(inputs[:2], [2, 0])  # positions
    assert opened.head.metrics["n_train"] == 62
    opened.partial_fit(inputs[:1], ["7"])  # a class of the bundle that was not among those of the device
    assert opened.classes_.tolist() == ["cat", "dog", "tree", "7"]


def rows_of(personalizer):
    return personalizer.encoder.features(personalizer._samples(samples()[0], None, (), is_labelled=False).inputs)


def test_partial_fit_begins_with_the_classes_that_are_given(opened, tmp_path):
    inputs, labels = samples()
    opened.partial_fit(inputs, labels, classes=["low", "middle", "high"], head="prototype")
    assert opened.classes_.tolist() == ["low", "middle", "high"]
    before = opened.head
    with pytest.raises(DataError, match="labels 3"):
        opened.partial_fit(inputs[:1], [3])
    assert opened.head is before
    opened.partial_fit(inputs, np.array(["low", "middle", "high"])[labels])
    assert (opened.head.head.name, opened.head.metrics["n_train"]) == ("prototype", 120)
    opened.save(tmp_path / "head")
    opened.load(tmp_path / "head")
    with pytest.raises(UsageError, match="without its samples"):
        opened.partial_fit(inputs, labels)


def test_inputs_unlike_all_that_was_learned_are_unknown(opened, make_bundle, tmp_path):
    inputs, labels = samples()
    with pytest.raises(UsageError, match="no threshold"):
        opened.fit(inputs[:18], labels[:18]).is_unknown(inputs)
    opened.fit(inputs, labels, unknown=0.1)
    assert opened.is_unknown(samples(1)[0]).mean() <= 0.2
    strange = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    strange[:, :4] = 0
    assert opened.is_unknown(strange).mean() > 0.9
    opened.save(tmp_path / "head")
    again = Personalizer.open(make_bundle().path, cache=tmp_path / "cache").load(tmp_path / "head")
    np.testing.assert_array_equal(again.is_unknown(strange), opened.is_unknown(strange))


def test_probabilities_are_calibrated_from_fifty_samples_on(opened):
    """Labels that are noise half of the time: out of fold no answer deserves more than about two thirds."""
    rng = np.random.default_rng(0)
    (inputs, labels) = samples()
    noisy = np.where(rng.random(60) < 0.5, rng.integers(0, 3, 60), labels)
    opened.fit(inputs, noisy, head="lr", params={"c": 100.0})
    known = opened.head.confidence.calibration
    raw = opened.head.head.predict_proba(opened.encoder.features(opened._samples(inputs, noisy, opened.classes).inputs))
    assert known.temperature > 1.5
    assert known.error_after < known.error_before
    assert opened.predict_proba(inputs).max(axis=1).mean() < raw.max(axis=1).mean()
    assert (opened.predict_proba(inputs).argmax(axis=1) == raw.argmax(axis=1)).all()
    assert opened.fit(inputs[:49], noisy[:49]).head.confidence.calibration is None


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"y": np.zeros(5, int)}, DataError, "60 inputs, 5 labels"),
        ({"y": None}, UsageError, "y is missing"),
        ({"y": samples()[1] + 20}, DataError, "labels 20..22"),
        ({"X": np.zeros((60, 4))}, DataError, r"float64\[60, 4\], expected numbers: images \[n, height, width\], "),
        ({"X": np.zeros((32, 32)), "y": [1]}, DataError, "a single input is an array with n = 1"),
        ({"X": samples()[0][:0], "y": samples()[1][:0]}, DataError, "X: no samples, expected at least one"),
        ({"y": ["1"] * 59 + [None]}, DataError, "label 59 is None, expected text or an integer"),
        ({"y": samples()[1] + 0.5}, DataError, r"labels are float64\[60\], expected one row of integers or text"),
        ({"unknown": 2}, UsageError, "unknown=2: expected a share of inputs, 0 or more and below 1"),
        ({"head": "lrr"}, UnknownName, "did you mean 'lr'"),
    ],
)
def test_mistakes_get_one_clear_error(opened, change, error, words):
    given = {"X": samples()[0], "y": samples()[1], **change}
    with pytest.raises(error, match=words):
        opened.fit(**given)


def test_the_best_head_is_chosen_where_none_is_named(opened):
    inputs, labels = samples()
    opened.fit(inputs, labels)
    assert opened.choice.name == opened.head.head.name == opened.choice.trials[0].name
    assert opened.head.metrics["choice"] == opened.choice.why
    opened.fit(inputs, labels, head="lr")
    assert opened.choice is None


def test_nothing_is_saved_or_opened_that_is_not_there(opened, tmp_path):
    with pytest.raises(UsageError, match="no head to save"):
        opened.save(tmp_path / "head")
    with pytest.raises(UsageError, match="it is not there"):
        Personalizer.open(tmp_path / "no.hwb")


def test_inputs_without_labels_are_predicted_but_not_scored(opened, tmp_path):
    inputs, labels = samples()
    np.savez(tmp_path / "x.npz", inputs=inputs)
    opened.fit(inputs, labels)
    np.testing.assert_array_equal(opened.predict(f"npz:{tmp_path / 'x.npz'}"), opened.predict(inputs))
    with pytest.raises(UsageError, match="y is missing"):
        opened.evaluate(inputs)
    with pytest.raises(DataError, match="has no array labels"):
        opened.evaluate(f"npz:{tmp_path / 'x.npz'}")


def test_images_that_are_not_normalised_yet_give_the_same_answers(opened):
    spec = opened.bundle.manifest.task.input
    names = opened.classes
    parts = [load("digits:optdigits?n=40", spec, names, compact=compact) for compact in (False, True)]
    assert [part.inputs.dtype.name for part in parts] == ["float32", "uint8"]
    opened.fit(parts[0], head="prototype")
    np.testing.assert_array_equal(opened.predict_proba(parts[1]), opened.predict_proba(parts[0]))
    learned = [opened.fit(part, head="mahalanobis", params={"normal": names[0]}).numeric for part in parts]
    np.testing.assert_array_equal(*(one.head.arrays["center"] for one in learned))


def test_samples_are_split_as_the_command_line_splits_them(opened):
    train, test = opened.samples("digits?n=40", test_fraction=0.5, seed=3)
    assert len(train) + len(test) == 40
    assert 17 <= len(test) <= 23
    assert opened.fit(train).evaluate(test)["acc.personal"] > 0.2
    with pytest.raises(UsageError, match="which client's rows"):
        opened.samples("digits?n=40", partition="p.json")


# --- one input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    """Paths of five photos of three sizes, whose brightness is their class."""
    paths = []
    for number, side in enumerate((8, 40, 8, 24, 40)):
        pixels = np.full((side, side + 2, 3), number % 3 * 100, np.uint8)
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


@pytest.fixture
def fitted(opened):
    return opened.fit(*samples(), head="prototype")


@pytest.mark.parametrize("shape", [(96, 96, 3), (96, 80, 4), (8, 9, 3), (3, 96, 96), (3, 8, 8), (8, 8, 1), (96, 80, 1)])
def test_one_image_is_not_taken_for_a_batch_of_its_rows(fitted, shape):
    image = np.full(shape, 200, np.uint8)
    for ask in (fitted.predict, fitted.predict_proba, fitted.is_unknown):
        with pytest.raises(DataError, match=r"give X\[None\]"):
            ask(image)
    assert fitted.predict(image[None]).tolist() == [2]


@pytest.mark.parametrize("shape", [(96, 8, 8), (96, 8, 8, 3), (96, 3, 8, 8), (4, 30, 30), (96, 28, 28), (3, 1, 9, 9)])
def test_batch_stays_a_batch(fitted, shape):
    assert len(fitted.predict(np.full(shape, 200, np.uint8))) == shape[0]


def test_rows_with_a_label_each_are_a_batch(opened):
    grey = np.arange(30)[:, None, None] % 3 * 100 + np.zeros((30, 20, 4))
    assert opened.fit(grey.astype(np.uint8), np.arange(30) % 3, head="prototype").head.metrics["n_train"] == 30


def test_paths_and_pictures_are_answered_one_by_one(fitted, photos):
    expected = [0, 1, 2, 0, 1]
    assert fitted.predict(photos).tolist() == expected
    assert fitted.predict([str(path) for path in photos]).tolist() == expected
    assert fitted.predict(np.array([str(path) for path in photos])).tolist() == expected
    assert fitted.predict(photos[1]).tolist() == fitted.predict(str(photos[1])).tolist() == [1]
    pictures = [Image.open(path) for path in photos]
    assert fitted.predict(pictures).tolist() == expected
    assert fitted.predict(pictures[2]).tolist() == [2]
    assert fitted.predict([np.asarray(picture) for picture in pictures]).tolist() == expected
    assert fitted.evaluate(photos, expected)["acc.personal"] == 1.0


def test_columns_of_paths_and_pictures_are_lists_of_them(fitted, photos):
    pandas = pytest.importorskip("pandas")
    expected = [0, 1, 2, 0, 1]
    assert fitted.predict(np.array(photos, dtype=object)).tolist() == expected
    assert fitted.predict(pandas.Series([str(path) for path in photos])).tolist() == expected
    pictures = np.empty(len(photos), object)
    pictures[:] = [Image.open(path) for path in photos]
    assert fitted.predict(pictures).tolist() == expected


def test_tensor_with_its_graph_is_an_array(fitted):
    torch = pytest.importorskip("torch")
    image = torch.full((1, 8, 8, 3), 0.8)
    assert fitted.predict(image.requires_grad_()).tolist() == fitted.predict(image.detach().numpy()).tolist()


@pytest.mark.parametrize(
    "given, words",
    [
        (None, "X: NoneType, expected an array"),
        (b"PNG", "X: bytes, expected an array"),
        ({"x": 1}, "X: dict, expected an array"),
        ((x for x in ()), r"X: generator, expected .* give list\(X\)"),
    ],
)
def test_what_is_no_batch_is_named(fitted, given, words):
    with pytest.raises(DataError, match=words):
        fitted.predict(given)


def test_photos_are_fitted_with_a_label_each(opened, photos):
    opened.fit(photos, ["cat", "dog", "cow", "cat", "dog"], own_classes=True, head="prototype")
    assert opened.predict(photos).tolist() == ["cat", "dog", "cow", "cat", "dog"]
    with pytest.raises(DataError, match="5 inputs, 2 labels"):
        opened.fit(photos, ["cat", "dog"], own_classes=True)


def test_broken_photos_are_named_and_left_out_where_the_call_says_so(fitted, photos, caplog):
    photos[3].write_bytes(b"no image")
    folder = f"images:{photos[0].parent}"
    for given in (folder, photos):
        with pytest.raises(DataError, match=r"(?s)1 of 5 images cannot be used.*3\.png.*strict=False in Python"):
            fitted.predict(given)
        caplog.clear()
        assert fitted.predict(given, strict=False).tolist() == [0, 1, 2, 1]
        assert "3.png" in caplog.text
    assert fitted.evaluate(photos, [0, 1, 2, 0, 1], strict=False)["acc.personal"] == 1.0


def test_file_that_is_not_there_is_named(fitted, tmp_path):
    with pytest.raises(DataError, match=r"absent\.png"):
        fitted.predict(tmp_path / "absent.png")
    with pytest.raises(DataError, match=r"absent\.png"):
        fitted.predict("absent.png")


# --- one input after the other ---


@pytest.fixture
def colours(make_bundle, tmp_path):
    """A head for coloured squares, in memory."""
    from serving_site import COLOURS, square

    labels = np.array([label for label in COLOURS for _ in range(20)])
    inputs = np.stack([square(label, number) for number, label in enumerate(labels)])
    personal = Personalizer.open(make_bundle().path, cache=tmp_path / "cache")
    return personal.fit(inputs, labels, head="lr", own_classes=True)


def test_a_stream_of_paths_images_and_arrays_is_answered_as_predict_does(colours, tmp_path):
    from PIL import Image
    from serving_site import COLOURS, png, square

    path = tmp_path / "green.png"
    path.write_bytes(png(square("green", 70)))
    inputs = [square("red", 70)[None], str(path), Image.fromarray(square("blue", 70))]
    answers = list(colours.stream(iter(inputs)))
    assert [answer.label for answer in answers] == list(COLOURS)
    for one_input, answer in zip(inputs, answers, strict=True):
        assert list(answer.probabilities.values()) == colours.predict_proba(one_input)[0].tolist()
        assert answer.is_unknown is bool(colours.is_unknown(one_input)[0])


def test_a_stream_that_never_ends_is_answered_as_it_comes(colours):
    import itertools

    from serving_site import square

    endless = itertools.repeat(square("red")[None])
    assert [answer.label for answer in itertools.islice(colours.stream(endless), 3)] == ["red"] * 3


def test_one_photo_as_an_array_is_refused_and_not_taken_for_many(colours):
    with pytest.raises(DataError, match=r"give X\[None\]"):
        colours.predict(np.zeros((96, 80, 3), np.uint8))


def test_a_head_in_memory_is_served_while_the_context_lasts(colours):
    import http.client
    import json

    from serving_site import png, square

    with colours.serve(port=0) as page:
        address, _, token = page.partition("#token=")
        connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=60)
        connection.request("POST", "/classify", png(square("blue")))
        answer = json.loads(connection.getresponse().read())
        connection.close()
    assert answer["class"] == "blue"
    assert len(token) >= 24
    with pytest.raises(OSError, match=r"."):
        connection.connect()
