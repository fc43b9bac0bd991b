"""Image sets of several domains: one folder for each domain, in it one for each class; some with official lists.

Lists name one image in each line, ``domain/class/file label``. The class is that of the folder: the number is not used,
since it is wrong for some images (PACS's list ``art_painting_crossval_kfold.txt``, which also names an image twice).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from pydantic import Field

from ...core.errors import DataError, UnknownName, cause
from ...core.storage import read_regular
from ...core.task import ImageInput
from ..base import DataSource, Options, Raw, Strings, near
from ..images import SUFFIXES, ImageFiles, images_in, visible

MAX_TEXT_BYTES = 64 << 20
"""More than any list, label or signal file of these sets has."""


@dataclass(frozen=True)
class Origin:
    """A public data set: the ``kind`` that reads it, its ``layout``, its official ``page`` and its ``licence``."""

    kind: str
    title: str
    layout: str
    page: str
    licence: str

    def missing(self, where: object, state: str = "") -> DataError:
        """Return an error for a folder without the set; ``state``: what is there or missing, in a few words."""
        detail = f" ({state})" if state else ""
        return DataError(
            f"{self.kind}: no {self.title} in '{where}'{detail}; expected {self.layout}; "
            f"get it from {self.page} (licence: {self.licence})"
        )

    def damaged(self, path: Path, problem: str, expected: str) -> DataError:
        """Return an error for a file of the set that is not what it should be."""
        return DataError(
            f"{self.kind}: '{path}' {problem}, expected {expected}; it is damaged or was not fetched whole: "
            f"download it again from {self.page}"
        )


def lines_of(path: Path, origin: Origin) -> list[str]:
    """Return lines of a text file of a set, without surrounding blanks and without empty ones.

    Raises:
        DataError: The file does not exist, is too large, or is not text.
    """
    try:
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise origin.damaged(path, f"has {size} bytes", f"text of at most {MAX_TEXT_BYTES}")
        text = read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise origin.missing(path.parent, f"'{path.name}': {cause(error)}") from error
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line]


def integers_of(path: Path, origin: Origin) -> np.ndarray:
    """Return one natural number from each line of a text file, (n,) int64.

    Raises:
        DataError: See `lines_of`; or a line is not a number.
    """
    lines = lines_of(path, origin)
    for number, line in enumerate(lines, 1):
        if not (line.isascii() and line.isdigit() and len(line) < 10):
            raise origin.damaged(path, f"has '{line[:40]}' in line {number}", "a natural number in each line")
    return np.array(lines, np.int64)


def random_part(count: int, n: int | None, seed: int | tuple[int, ...]) -> np.ndarray:
    """Return rows (m,) of ``count``, in order: a random ``n`` of them where there are more than that, else all."""
    if n is None or n >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).permutation(count)[:n])


_log = logging.getLogger(__name__)
_SHOWN = 10
_ENDINGS = tuple(SUFFIXES)

Split = Literal["train", "test", "all"]


@dataclass(frozen=True)
class Facts:
    """The facts about a set beside its `Origin`.

    ``num_classes`` is None where people keep some of the classes. ``inside``: folders of the official archives in which
    the domains may lie. ``lists``: split -> pattern of the file that lists it, none where there is no official split;
    ``lists_inside``: folders in which those may lie. ``damaged``: images that cannot be read in the official archive.
    ``side``: pixels of the papers' inputs.
    """

    origin: Origin
    domains: tuple[str, ...]
    num_classes: int | None
    side: int
    inside: tuple[str, ...] = ()
    lists: Mapping[str, str] | None = None
    lists_inside: tuple[str, ...] = ()
    damaged: frozenset[str] = frozenset()

    def read(self, where: str, options: DomainOptions) -> Raw:
        """Return images of the chosen domains, decoded on access."""
        return read(find(self, where, options.domain), options)

    def parts(self, where: str, options: DomainOptions) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return the path and the option that select each domain alone."""
        return {name: (where, {"domain": name}) for name in find(self, where, options.domain).folders}

    def source(self, options: type[DomainOptions]) -> DataSource:
        """Return the data source of the set. Reading opens no image, so it serves for inspecting, too."""
        return DataSource(options, self.read, needs_path=True, inspect=self.read, domains=self.parts)


class DomainOptions(Options):
    """Options of a set of domains."""

    domain: Strings = Field((), description="only these domains; default: all")
    split: Split = "all"
    n: int | None = Field(
        None, ge=1, description="at most that many images of each domain, a random part; the test part stays whole"
    )
    seed: int = Field(0, ge=0, description="which random part and, without lists, which split")
    test_share: float | None = Field(
        None, gt=0, lt=1, description="split by chance, with this share of each class for testing, not by lists"
    )


class ByChance(DomainOptions):
    """Options of a set without an official split."""

    test_share: float | None = Field(0.2, gt=0, lt=1, description="share of each class for testing, by chance")


@dataclass(frozen=True)
class Layout:
    """A set that was found: its ``root``, the ``folders`` of the chosen domains, the ``classes`` where some were."""

    facts: Facts
    root: Path
    folders: Mapping[str, Path]
    classes: tuple[str, ...] | None = None

    def class_names(self) -> tuple[str, ...]:
        """Return the chosen classes, or those that have a folder in one of the domains.

        Raises:
            DataError: The file does not have as many lines as the set.
        """
        if self.classes is not None:
            return self.classes
        found_names: set[str] = set()
        for folder in self.folders.values():
            found_names.update(entry.name for entry in _folders_in(folder))
        names = tuple(sorted(found_names))
        expected = self.facts.num_classes
        if not names or (expected is not None and len(names) != expected):
            message = f"{len(names)} classes: {', '.join(names[:_SHOWN])}"
            if len(names) > _SHOWN:
                message += " …"
            raise self.facts.origin.missing(self.root, message)
        return names

    def images(self, domain: str, options: DomainOptions) -> list[Path]:
        """Return files of one domain that the options choose."""
        share = options.test_share
        names = self.class_names()
        if options.split == "all":
            result = self._in_folders(domain, names)
        elif share is None:
            result = self._listed(domain, options.split)
        else:
            result = self._by_chance(domain, names, options.split, share, options.seed)
        sound = [path for path in result if _inner(path) not in self.facts.damaged]
        limit = None if options.split == "test" else options.n
        chosen = random_part(len(sound), limit, (options.seed, self.facts.domains.index(domain)))
        return [sound[row] for row in chosen]

    def counts(self) -> Counter[str]:
        """Return images of each class in every domain that is there, whichever were chosen.

        By file name alone: the largest set has more than half a million.
        """
        result: Counter[str] = Counter()
        parent = next(iter(self.folders.values())).parent
        for domain in _domains_in(self.facts, parent).values():
            for folder in _folders_in(domain):
                with os.scandir(folder) as entries:
                    result[folder.name] += sum(entry.name.lower().endswith(_ENDINGS) for entry in entries)
        return result

    def _in_folders(self, domain: str, classes: Sequence[str]) -> list[Path]:
        """Return all images of a domain, class after class; a class without a folder has none."""
        paths: list[Path] = []
        for name in classes:
            folder = self.folders[domain] / name
            if folder.is_dir():
                paths += images_in(folder)
        return paths

    def _by_chance(self, domain: str, classes: Sequence[str], split: Split, share: float, seed: int) -> list[Path]:
        """Return the images of one part, of which a share of each class tests: at least one where there are two."""
        chosen: list[Path] = []
        for number, name in enumerate(classes):
            paths = self._in_folders(domain, [name])
            rng = np.random.default_rng((seed, self.facts.domains.index(domain), number))
            test_count = min(max(round(len(paths) * share), 1), max(len(paths) - 1, 0))
            order = rng.permutation(len(paths))
            rows = order[:test_count] if split == "test" else order[test_count:]
            chosen += [paths[row] for row in np.sort(rows)]
        return chosen

    def _listed(self, domain: str, split: str) -> list[Path]:
        """Return what the official list names, each image once, those of the chosen classes."""
        origin = self.facts.origin
        images = self._read_list(domain, split)
        repeated = len(images) - len(set(images))
        if repeated > 0:
            _log.info("listed_twice kind=%s domain=%s images=%d", origin.kind, domain, repeated)
        # Where classes were chosen, the list names others as well; otherwise each of its classes has a folder.
        class_names = set(self.class_names())
        unknown = sorted({image.parts[1] for image in images} - class_names)
        if self.classes is None and unknown:
            message = f"{len(unknown)} classes of its lists have no folder, such as '{unknown[0]}'"
            raise origin.missing(self.root, message + near(unknown[0], self.class_names()))
        folder = self.folders[domain]
        return [folder.joinpath(*image.parts[1:]) for image in dict.fromkeys(images) if image.parts[1] in class_names]

    def _read_list(self, domain: str, split: str) -> list[PurePosixPath]:
        """Return the paths ``domain/class/file`` in the official list of a part, in its order.

        Raises:
            DataError: There is no such list, or a line of it has another form.
        """
        path = self._list_file(domain, split)
        images = []
        wrong = []
        for number, line in enumerate(lines_of(path, self.facts.origin), 1):
            text, _, label = line.rpartition(" ")
            image = PurePosixPath(text.strip())
            images.append(image)
            is_of_domain = len(image.parts) == 3 and ".." not in image.parts and plain(image.parts[0]) == plain(domain)
            if not (label.isdigit() and is_of_domain):
                wrong.append(f"line {number}: '{line[:60]}'")
        if wrong:
            message = f"has {len(wrong)} lines of another form ({'; '.join(wrong[:3])})"
            raise self.facts.origin.damaged(path, message, f"'{domain}/class/file number' in each line")
        return images

    def _list_file(self, domain: str, split: str) -> Path:
        """Return the list, beside the domains, above them, or in one of the folders in which it may lie."""
        origin = self.facts.origin
        if self.facts.lists is None:
            raise DataError(f"{origin.kind}: {origin.title} has no official split; give test_share for one by chance")
        name = self.facts.lists[split].format(domain=domain)
        outer_folders = [self.root, self.folders[domain].parent]
        folders = list(outer_folders)
        for folder in outer_folders:
            folders += [folder / inner for inner in self.facts.lists_inside]
        for folder in folders:
            if (folder / name).is_file():
                return folder / name
        raise DataError(
            f"{origin.kind}: no '{name}' in '{self.root}'; expected the official lists beside the domains or in "
            f"{' or '.join(self.facts.lists_inside)}; get them from {origin.page}, or say test_share=0.2 for a "
            "split by chance"
        )


def plain(name: str) -> str:
    """Return a name without case, blanks, dashes and underscores, in which copies of a set differ."""
    return "".join(letter for letter in name.lower() if letter not in " -_")


def find(facts: Facts, where: str, wanted: Sequence[str] = ()) -> Layout:
    """Return the set at ``where``, with the domains that are wanted, or all of them.

    Raises:
        UnknownName: The set has no such domain.
        DataError: The folder holds nothing of the set, or a domain is missing.
    """
    # Copies of a set spell the names of domains differently.
    official_names = {plain(name): name for name in facts.domains}
    for name in wanted:
        if plain(name) not in official_names:
            raise UnknownName(f"{facts.origin.title} domain", name, facts.domains)
    chosen = [official_names[plain(name)] for name in wanted] or list(facts.domains)
    # The domains are in the folder itself, or in one of those into which archives unpack.
    root = Path(where).expanduser()
    folders = _domains_below(facts, root)
    if not folders:
        raise facts.origin.missing(where)
    lacking = [name for name in chosen if name not in folders]
    if lacking:
        message = f"it lacks {', '.join(lacking)}; domain={','.join(folders)} takes what is there"
        raise facts.origin.missing(where, message)
    return Layout(facts, root, {name: folders[name] for name in facts.domains if name in chosen})


def _domains_below(facts: Facts, root: Path) -> dict[str, Path]:
    """Return the folders of the domains in ``root``, or in the first folder inside it that has any; empty: none has."""
    for folder in (root, *(root / inner for inner in facts.inside)):
        folders = _domains_in(facts, folder)
        if folders:
            return folders
    return {}


def _domains_in(facts: Facts, root: Path) -> dict[str, Path]:
    """Return the folders of the domains that are in ``root``, by their official names."""
    folder_of = {plain(folder.name): folder for folder in _folders_in(root)}
    return {name: folder_of[plain(name)] for name in facts.domains if plain(name) in folder_of}


def read(layout: Layout, options: DomainOptions) -> Raw:
    """Return images of the chosen domains, decoded on access."""
    names = layout.class_names()
    paths: list[Path] = []
    for domain in layout.folders:
        paths += layout.images(domain, options)
    position = {name: label for label, name in enumerate(names)}
    labels = np.array([position[path.parent.name] for path in paths], np.int64)
    natural = ImageInput(channels=3, height=layout.facts.side, width=layout.facts.side)
    return Raw("image", ImageFiles(paths), labels, names, natural=natural, names=tuple(map(_inner, paths)))


def _inner(path: Path) -> str:
    """Return the path ``domain/class/file`` of an image in the archive."""
    return "/".join(path.parts[-3:])


def _folders_in(root: Path) -> list[Path]:
    return [path for path in visible(root) if path.is_dir()] if root.is_dir() else []
