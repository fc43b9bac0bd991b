"""Make a set of several domains of the icon themes of desktops: a class is an icon's name, a domain is a theme.

    python examples/icons/icon_domains.py --out icons
    headwater simulate --data images:icons --partition domains --method fedpick

Themes draw the same names in styles of their own: a shift of features with equal classes, as photos and drawings of the
same things are. Each name that all themes have becomes a class; its images are the sizes in which a theme has it, on a
white ground. Nothing is downloaded: the themes are those of installed packages, or of packages that were unpacked with
``dpkg -x`` (``--themes DIR``). See README.md beside this file for packages and licences.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

THEMES = ("Faenza", "Tango", "elementary-xfce", "gnome", "nuoveXT2", "oxygen")
"""Themes of different artists with icons as PNG; themes that reuse the artwork of one of them are left out."""

SMALLEST = 16
LARGEST = 64
"""Sides in pixels of the icons that are taken: larger ones say nothing new at the size that networks here see."""

LEAST_IMAGES = 3
"""A name that a theme has in fewer sizes is left out: a client could not train and test on it."""

Icons = Mapping[str, Mapping[int, Path]]
"""Name of an icon -> side in pixels -> file."""


class UnusableThemes(Exception):
    """Themes are missing, or too little of them is common to all; the message says what to do."""


@dataclass(frozen=True)
class Theme:
    """A theme's icons by name and size."""

    name: str
    icons: Icons

    @classmethod
    def read(cls, folder: Path) -> Theme:
        """Return the theme in a folder, whatever the order of its folders for sizes and contexts."""
        icons: dict[str, dict[int, Path]] = {}
        for path in sorted(folder.rglob("*.png")):
            side = side_of(path.relative_to(folder))
            is_wanted = side is not None and SMALLEST <= side <= LARGEST
            # A name may be a link to an icon of a package that is not there.
            if side is not None and is_wanted and path.is_file():
                icons.setdefault(path.stem, {}).setdefault(side, path)
        return cls(folder.name, {name: sizes for name, sizes in icons.items() if len(sizes) >= LEAST_IMAGES})


def side_of(path: Path) -> int | None:
    """Return the side in pixels that the folders of an icon say, as in 32x32/apps or apps/32; None: they say none."""
    for part in reversed(path.parts[:-1]):
        width, _, height = part.partition("x")
        if width.isdecimal() and height in {"", width}:
            return int(width)
    return None


def common_names(themes: Sequence[Theme]) -> list[str]:
    """Return the names that all themes have, sorted, without those that a theme draws like another name.

    Themes give some icons several names. Two classes with the same images could not be told apart, so of such names
    the first alone is kept.
    """
    shared = sorted(set.intersection(*(set(theme.icons) for theme in themes)))
    kept: list[str] = []
    seen: set[tuple[str, bytes]] = set()
    for name in shared:
        pictures = {(theme.name, largest_image(theme.icons[name])) for theme in themes}
        if not pictures & seen:
            kept.append(name)
            seen |= pictures
    return kept


def largest_image(sizes: Mapping[int, Path]) -> bytes:
    """Return the bytes of an icon's largest file."""
    return sizes[max(sizes)].read_bytes()


def on_white(path: Path) -> Image.Image:
    """Return an icon on a white ground, as an RGB image: what is transparent has no colour of its own."""
    with Image.open(path) as opened:
        icon = opened.convert("RGBA")
    ground = Image.new("RGBA", icon.size, "white")
    ground.alpha_composite(icon)
    return ground.convert("RGB")


def write_domains(out: Path, roots: Sequence[Path], names: Sequence[str]) -> tuple[int, int]:
    """Write a folder for each theme with one for each class, and return the numbers of classes and images.

    Args:
        out: The folder, which must be new or empty.
        roots: The folders to look for themes in, the first one first.
        names: The names of the themes.

    Raises:
        UnusableThemes: Themes are missing, have no name in common, or ``out`` holds something.
    """
    if out.exists() and any(out.iterdir()):
        raise UnusableThemes(f"{out} is not empty; choose another --out, or remove it")
    # 1. All themes, or none: what is missing is named at once.
    themes = []
    missing = []
    for name in names:
        folders = [root / name for root in roots if (root / name).is_dir()]
        if folders:
            themes.append(Theme.read(folders[0]))
        else:
            missing.append(name)
    if missing:
        places = ", ".join(map(str, roots))
        raise UnusableThemes(f"no theme {', '.join(missing)} in {places}; install its package, or name it by --themes")
    # 2. The classes.
    classes = common_names(themes)
    if len(classes) < 2:
        raise UnusableThemes(
            f"{', '.join(names)} have {len(classes)} names in common, expected at least 2; choose others by --theme"
        )
    # 3. The images, named by their side so that they are read in that order. The folder gets its name once it is whole.
    count = 0
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for theme in themes:
        for name in classes:
            folder = unfinished / theme.name / name
            folder.mkdir(parents=True)
            for side, path in sorted(theme.icons[name].items()):
                on_white(path).save(folder / f"{side:03d}.png")
                count += 1
    unfinished.rename(out)
    return len(classes), count


def main() -> int:
    """Parse the command line, write the domains, and say what they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the domains; new or empty")
    parser.add_argument(
        "--themes", type=Path, action="append", help="folder of themes; repeatable; default: /usr/share/icons"
    )
    parser.add_argument("--theme", action="append", help=f"name of a theme; repeatable; default: {', '.join(THEMES)}")
    options = parser.parse_args()
    names = options.theme or THEMES
    try:
        classes, images = write_domains(options.out, options.themes or [Path("/usr/share/icons")], names)
    except (UnusableThemes, OSError) as error:
        print(f"icon_domains.py: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {len(names)} domains, {classes} classes, {images} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
