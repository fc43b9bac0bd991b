from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from edge_agent.core.errors import ConfigError, DataError, UnknownName
from edge_agent.core.task import ImageInput
from edge_agent.data import check, domains, load
from edge_agent.data.sets import officecaltech, officehome, pacs
from edge_agent.data.sets.domainnet import FEDBN_CLASSES

SPEC = ImageInput(channels=3, height=4, width=4, mean=(0.0,), std=(1.0,))
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
SIX = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def paint(path, red: int = 0, green: int = 0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 4), (red, green, 0)).save(path)


@pytest.fixture
def pacs_folder(tmp_path):
    """Four images of each class and domain: three listed for training, one for testing. Red tells the class."""
    for domain in pacs.FACTS.domains:
        ends = "png" if domain == "sketch" else "jpg"
        lists = {"train": [], "crossval": [], "test": []}
        for label, name in enumerate(PACS_CLASSES):
            for number in range(1, 5):
                file = f"{domain}/{name}/pic_{number:03d}.{ends}"
                paint(tmp_path / "kfold" / file, 30 * label)
                lists["crossval" if number == 2 else "train"].append(f"{file} {label + 1}")
                lists["test"].append(f"{file} {label + 1}")
        for kind, lines in lists.items():
            (tmp_path / f"{domain}_{kind}_kfold.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_pacs_by_its_official_lists(pacs_folder):
    train, test = (load(f"pacs:{pacs_folder}?domain=sketch&split={split}", SPEC) for split in ("train", "test"))
    assert train.class_names == test.class_names == PACS_CLASSES
    assert train.labels.tolist() == [label for label in range(7) for _ in range(3)]
    assert test.names == tuple(f"sketch/{name}/pic_002.png" for name in PACS_CLASSES)
    assert not set(train.names) & set(test.names)
    np.testing.assert_allclose(test.inputs[:, 0, 0, 0] * 255, 30 * np.arange(7), atol=2)
    assert len(load(f"pacs:{pacs_folder}", SPEC)) == 4 * 7 * 3
    assert len(load(f"pacs:{pacs_folder}?split=all&domain=photo,cartoon", SPEC)) == 2 * 7 * 4


@pytest.mark.parametrize("inside, lists", [("kfold", "kfold"), ("kfold", "kfold/pacs_label"), ("kfold", "splits")])
def test_the_lists_of_pacs_are_found_where_copies_have_them(pacs_folder, inside, lists):
    for path in list(pacs_folder.glob("*.txt")):
        (pacs_folder / lists).mkdir(exist_ok=True)
        path.rename(pacs_folder / lists / path.name)
    assert len(load(f"pacs:{pacs_folder}?split=test", SPEC)) == 28
    if lists.startswith(inside):
        assert len(load(f"pacs:{pacs_folder / inside}?split=test", SPEC)) == 28


def test_the_class_is_that_of_the_folder_and_an_image_listed_twice_counts_once(pacs_folder):
    """As in the official list of art_painting for testing: label 0 in its first line, another line twice."""
    path = pacs_folder / "art_painting_crossval_kfold.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0][:-1] + "0", *lines[1:], lines[3]]) + "\n")
    assert load(f"pacs:{pacs_folder}?domain=art_painting&split=test", SPEC).labels.tolist() == list(range(7))


def test_the_image_that_is_damaged_in_the_official_archive_is_left_out(pacs_folder):
    bad = pacs_folder / "kfold" / "sketch" / "dog" / "n02103406_4068-1.png"
    bad.write_bytes(b"\x89PNG cut")
    with (pacs_folder / "sketch_train_kfold.txt").open("a") as file:
        file.write("sketch/dog/n02103406_4068-1.png 1\n")
    assert len(load(f"pacs:{pacs_folder}?domain=sketch", SPEC)) == 21
    assert len(load(f"pacs:{pacs_folder}?domain=sketch&split=all", SPEC)) == 28


def test_a_part_of_the_training_images_leaves_the_test_part_whole(pacs_folder):
    part, again, other = (load(f"pacs:{pacs_folder}?n=5&seed={seed}", SPEC) for seed in (0, 0, 1))
    assert [sum(name.startswith(domain) for name in part.names) for domain in pacs.FACTS.domains] == [5] * 4
    assert part.names == again.names != other.names
    assert len(load(f"pacs:{pacs_folder}?n=5&split=test", SPEC)) == 28


def test_a_split_by_chance_needs_no_lists_and_takes_a_share_of_each_class(pacs_folder):
    for path in pacs_folder.glob("*.txt"):
        path.unlink()
    with pytest.raises(DataError, match=r"no 'photo_train_kfold\.txt'.*beside the domains.*test_share"):
        load(f"pacs:{pacs_folder}?domain=photo", SPEC)
    source = f"pacs:{pacs_folder}?domain=photo&test_share=0.5"
    train, test = (load(f"{source}&split={split}", SPEC) for split in ("train", "test"))
    assert np.bincount(train.labels).tolist() == np.bincount(test.labels).tolist() == [2] * 7
    assert not set(train.names) & set(test.names)
    assert load(f"{source}&split=test&seed=1", SPEC).names != test.names


def test_lists_with_lines_of_another_form_are_told(pacs_folder):
    path = pacs_folder / "photo_train_kfold.txt"
    kept = path.read_text()
    for line in ("photo/dog/x.jpg", "sketch/dog/x.jpg 1", "photo/../../x.jpg 1", "/etc/x.jpg 1", "photo/dog/x.jpg one"):
        path.write_text(f"{kept}{line}\n")
        with pytest.raises(DataError, match=r"photo_train_kfold\.txt' has 1 lines of another form \(line 22"):
            load(f"pacs:{pacs_folder}?domain=photo", SPEC)
    path.write_text(kept.replace("photo/horse", "photo/hors"))
    with pytest.raises(DataError, match=r"such as 'hors' \(did you mean 'horse'\?\)"):
        load(f"pacs:{pacs_folder}?domain=photo", SPEC)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        load(f"pacs:{pacs_folder}?domain=photo", SPEC)


def test_listed_images_that_are_missing_are_named(pacs_folder):
    (pacs_folder / "kfold" / "photo" / "dog" / "pic_001.jpg").unlink()
    with pytest.raises(DataError, match=r"1 of 21 images.*\n.*photo/dog/pic_001\.jpg: .*no such file"):
        load(f"pacs:{pacs_folder}?domain=photo", SPEC)


def test_what_is_missing_is_told_with_layout_page_and_licence(tmp_path, pacs_folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    for kind in ("pacs", "officehome", "officecaltech", "domainnet"):
        with pytest.raises(DataError, match=rf"{kind}: no .* expected folders .* get it from https?://.*licence: "):
            check(f"{kind}:{empty}")
    (pacs_folder / "kfold" / "cartoon").rename(empty / "cartoon")
    with pytest.raises(DataError, match="it lacks cartoon; domain=art_painting,photo,sketch takes what is there"):
        check(f"pacs:{pacs_folder}")
    check(f"pacs:{pacs_folder}?domain=photo")
    with pytest.raises(UnknownName, match="PACS domain 'skecth': did you mean 'sketch'"):
        check(f"pacs:{pacs_folder}?domain=skecth")


def test_a_class_too_few_is_told(pacs_folder):
    for domain in pacs.FACTS.domains:
        (pacs_folder / "kfold" / domain / "person").rename(pacs_folder / f"{domain}-person")
    with pytest.raises(DataError, match="6 classes: dog, elephant, giraffe, guitar, horse, house"):
        load(f"pacs:{pacs_folder}", SPEC)


@pytest.fixture
def home(tmp_path):
    for domain in ("Art", "Clipart", "Product", "Real World"):
        for number in range(65):
            for image in range(2 if domain == "Art" else 1):
                paint(tmp_path / "OfficeHomeDataset_10072016" / domain / f"Class_{number:02d}" / f"{image}.jpg", number)
    return tmp_path


def test_office_home_has_no_split_of_its_own(home):
    assert len(load(f"officehome:{home}", SPEC)) == 65 * 5
    real = load(f"officehome:{home}?domain=real_world", SPEC)
    assert real.names[0] == "Real World/Class_00/0.jpg"
    assert real.labels.tolist() == list(range(65))
    train, test = (load(f"officehome:{home}?domain=Art&split={split}", SPEC) for split in ("train", "test"))
    assert sorted(train.names + test.names) == sorted(load(f"officehome:{home}?domain=Art", SPEC).names)
    assert train.labels.tolist() == test.labels.tolist() == list(range(65))
    assert load(f"officehome:{home}?n=7&domain=Clipart", SPEC).names != ()


@pytest.fixture
def caltech(tmp_path):
    names = ("back_pack", "bike", "calculator", "headphones", "keyboard")
    names += ("laptop_computer", "monitor", "mouse", "mug", "projector")
    for domain in officecaltech.FACTS.domains:
        for name in names:
            for number in range(5):
                paint(tmp_path / "office_caltech_10" / domain / name / f"frame_{number:04d}.jpg")
    return tmp_path


def test_office_caltech_has_four_domains_of_ten_classes(caltech):
    samples = load(f"officecaltech:{caltech}?domain=dslr&split=test", SPEC)
    assert samples.class_names[0] == "back_pack"
    assert samples.labels.tolist() == list(range(10))
    assert len(load(f"officecaltech:{caltech}?domain=dslr&split=train", SPEC)) == 40
    found = domains(f"officecaltech:{caltech}?n=3")
    assert list(found) == ["amazon", "caltech", "dslr", "webcam"]
    assert {len(load(source, SPEC)) for source in found.values()} == {3}


def test_without_the_need_for_lists_an_official_split_cannot_be_asked(caltech, home):
    for source in (f"officecaltech:{caltech}", f"officehome:{home}"):
        with pytest.raises(ConfigError, match="test_share"):
            load(f"{source}?test_share=1", SPEC)
    assert officehome.SOURCE.options().split == "all"


@pytest.fixture
def domainnet(tmp_path):
    """Class -> images in each domain: zebra 3, tiger 2, bird 2, axe 1, fork 1; only the lists have t-shirts."""
    for domain in SIX:
        lines = {"train": [f"{domain}/t-shirt/{domain}_1.jpg 1"], "test": []}
        for label, (name, count) in enumerate({"axe": 1, "bird": 2, "fork": 1, "tiger": 2, "zebra": 3}.items()):
            for number in range(count):
                file = f"{domain}/{name}/{domain}_{label:03d}_{number:06d}.jpg"
                paint(tmp_path / file, 20 * label)
                lines["test" if number == 1 else "train"].append(f"{file} {label}")
        (tmp_path / "splits").mkdir(exist_ok=True)
        for split, found in lines.items():
            (tmp_path / "splits" / f"{domain}_{split}.txt").write_text("\n".join(found) + "\n")
    return tmp_path


def test_domainnet_takes_the_most_frequent_classes_the_named_or_those_of_fedbn(domainnet, tmp_path):
    two = load(f"domainnet:{domainnet}?domain=real&classes=2", SPEC)
    assert two.class_names == ("bird", "zebra")
    assert two.labels.tolist() == [0, 1, 1]
    assert load(f"domainnet:{domainnet}?domain=real&classes=3&split=test", SPEC).class_names == (
        "bird",
        "tiger",
        "zebra",
    )
    named = load(f"domainnet:{domainnet}?domain=sketch,real&classes=fork,axe", SPEC)
    assert named.class_names == ("axe", "fork")
    assert named.names[0].startswith("real/axe/")
    with pytest.raises(UnknownName, match="class of DomainNet 'feather'"):
        load(f"domainnet:{domainnet}?classes=fedbn", SPEC)
    for name in FEDBN_CLASSES:
        paint(domainnet / "real" / name / "real_1.jpg")
    assert load(f"domainnet:{domainnet}?domain=real&classes=fedbn&split=all", SPEC).class_names == FEDBN_CLASSES


def test_domainnet_without_folders_for_all_classes_of_its_lists_asks_for_a_choice(domainnet):
    with pytest.raises(DataError, match="1 classes of its lists have no folder, such as 't-shirt'"):
        load(f"domainnet:{domainnet}?domain=real", SPEC)
    assert len(load(f"domainnet:{domainnet}?domain=real&split=test", SPEC)) == 3
    with pytest.raises(UnknownName, match="'zebar': did you mean 'zebra'"):
        load(f"domainnet:{domainnet}?classes=zebar", SPEC)
    with pytest.raises(ConfigError, match=r"classes=9: expected 1\.\.5"):
        load(f"domainnet:{domainnet}?classes=9", SPEC)


def test_the_most_frequent_classes_are_those_of_all_domains_that_are_there(domainnet):
    """In real alone, axe would be among the first two."""
    for number in range(2, 5):
        paint(domainnet / "real" / "axe" / f"{number}.jpg")
    assert load(f"domainnet:{domainnet}?domain=real&classes=2&split=all", SPEC).class_names == ("bird", "zebra")


def test_sets_without_domains_and_single_domains_expand_to_nothing_or_themselves(pacs_folder):
    assert domains(f"npz:{pacs_folder}") == {}
    assert domains("digits:photo") == {}
    assert list(domains(f"pacs:{pacs_folder}?domain=photo,cartoon", seed=3)) == ["cartoon", "photo"]
    assert domains("digits?n=2", seed=4)["photo"] == "digits:photo?seed=4&n=2&client=2&clients=6"
    assert domains("digits?seed=9&client=1&clients=3", seed=4)["photo"] == "digits:photo?seed=9&client=1&clients=3"
