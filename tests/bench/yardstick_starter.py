"""What the starter encoder is worth: six tasks that its training never saw, against models without it, and a table.

``python tests/bench/yardstick_starter.py --folder DIR --packages DIR --starter FILE --digits FILE`` draws the samples
of each task, fits heads on both encoders and the best model of the raw inputs, keeps results in --folder, and prints
the tables of examples/results/starter.md. ``--packages`` is a folder into which Debian packages were unpacked with
``dpkg -x``: the icon themes oxygen, faenza, mate, moka and tango, gnome-backgrounds and tuxpaint-stamps-default;
espeak-ng and dataset-fashion-mnist are installed. Tasks:

- ``fashion``: Fashion-MNIST, ten kinds of clothes, 28 x 28, grey.
- ``digits``: handwritten digits on cut-outs of photos, 32 x 32.
- ``print``: printed digits in 21 fonts, on colours.
- ``icons``: icons of five desktop themes by what they stand for: actions, applications, devices, file types, status.
- ``words``: ten words spoken by 40 voices of a synthesizer, as pictures of their spectra; voices are never shared.
- ``things``: ten things photographed or drawn, turned and lit, on backgrounds of a desktop.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yardstick_own_classes as own_classes
from matplotlib import get_data_path
from PIL import Image
from scipy.signal import spectrogram
from scipy.stats import t as student

from edge_agent import data
from edge_agent.bundle.unpacked import Bundle
from edge_agent.data import Samples, digits
from edge_agent.heads import AUTO
from edge_agent.personal.fitting import FitOptions
from edge_agent.personal.personalize import personalize
from edge_agent.personal.personalizer import load_bundle
from edge_agent.personal.precision import open_encoder

EACH = (1, 5, 10, 50)
"""Samples of each class that a device learns from."""

TESTED = 40
"""Held-out samples of each class."""

WORDS = ("yes", "no", "up", "down", "left", "right", "stop", "go", "seven", "house")
VOICES = ("m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4", "f5", "croak", "whisper", "klatt", "klatt2")
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbcwmd")
CONTEXTS = ("actions", "apps", "devices", "mimetypes", "status")
THEMES = {
    "oxygen-icon-theme": "oxygen/base/64x64/{context}",
    "faenza-icon-theme": "Faenza/{context}/64",
    "mate-icon-theme": "mate/48x48/{context}",
    "moka-icon-theme": "Moka/64x64/{context}",
    "tango-icon-theme": "Tango/32x32/{context}",
}


@dataclass(frozen=True)
class Pictures:
    """Pictures (n, height, width) or (n, height, width, 3) uint8, and classes (n,), to learn from and for tests."""

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray


Drawn = tuple[np.ndarray, np.ndarray]


def drawn_apart(pool: Drawn, test_pool: Drawn, rng: np.random.Generator) -> Pictures:
    """Return ``EACH[-1]`` samples of every class to learn from, the classes in turn, and `TESTED` for tests."""
    classes = np.unique(pool[1])
    by_class = [rng.permutation(np.flatnonzero(pool[1] == label))[: EACH[-1]] for label in classes]
    in_turn = np.stack(by_class).T.reshape(-1)
    tested = own_classes.some(test_pool[1], classes, TESTED, rng)
    return Pictures(pool[0][in_turn], pool[1][in_turn], test_pool[0][tested], test_pool[1][tested])


def fashion(seed: int, _packages: Path) -> Pictures:
    """Return pictures of clothes, one piece on each."""
    rng = np.random.default_rng([seed, 1])
    return drawn_apart(own_classes.fashion("train"), own_classes.fashion("test"), rng)


def digits_on_photos(seed: int, _packages: Path) -> Pictures:
    """Return handwritten digits on photos; the handwriting of tests is in no other sample."""
    rng = np.random.default_rng([seed, 2])
    originals, labels = digits.load()
    order = rng.permutation(len(labels))
    pools = []
    for rows in (order[:1000], order[1000:]):
        images = [digits.on_photo(originals[row], seed, int(rng.integers(2**31))) for row in rows]
        pools.append((np.stack(images), labels[rows]))
    return drawn_apart(pools[0], pools[1], rng)


def printed(seed: int, _packages: Path) -> Pictures:
    """Return printed digits; fonts of tests are in no other sample."""
    rng = np.random.default_rng([seed, 3])
    folder = Path(get_data_path()) / "fonts" / "ttf"
    names = [*folder.glob("DejaVu*.ttf"), *folder.glob("STIXGeneral*.ttf"), *folder.glob("cm[brst]*10.ttf")]
    fonts = [path for path in sorted(names) if "Display" not in path.name and "cmsy" not in path.name]
    order = rng.permutation(len(fonts))
    known = [fonts[row] for row in order[: len(fonts) // 2]]
    strange = [fonts[row] for row in order[len(fonts) // 2 :]]
    pools = [own_classes.printed(1200, seed, chosen, salt=number) for number, chosen in enumerate((known, strange))]
    return drawn_apart(pools[0], pools[1], rng)


def icons(seed: int, packages: Path) -> Pictures:
    """Return icons on plain grounds; the names of tests' icons are in no other sample."""
    rng = np.random.default_rng([seed, 4])
    pools: tuple[list[tuple[Path, int]], list[tuple[Path, int]]] = ([], [])
    for label, context in enumerate(CONTEXTS):
        files = [
            file
            for theme, pattern in THEMES.items()
            for file in sorted((packages / theme / "usr/share/icons" / pattern.format(context=context)).glob("*.png"))
            if not file.is_symlink()
        ]
        names = sorted({file.stem for file in files})
        held_out = {names[row] for row in rng.permutation(len(names))[: len(names) // 2]}
        for file in rng.permutation(np.array(files, object)):
            pools[file.stem in held_out].append((file, label))
    chosen = [_first_of_each(pool, 100) for pool in pools]
    drawn = [(np.stack([_on_plain(file, rng) for file, _ in pool]), _labels(pool)) for pool in chosen]
    return drawn_apart(drawn[0], drawn[1], rng)


def _first_of_each(pool: list[tuple[Path, int]], count: int) -> list[tuple[Path, int]]:
    """Return the first files of each class."""
    return [pair for label in range(len(CONTEXTS)) for pair in [p for p in pool if p[1] == label][:count]]


def _labels(pool: list[tuple[Path, int]]) -> np.ndarray:
    return np.array([label for _, label in pool])


def _on_plain(file: Path, rng: np.random.Generator) -> np.ndarray:
    """Return an icon on a plain ground of random lightness, 64 x 64."""
    with Image.open(file) as opened:
        icon = opened.convert("RGBA").resize((56, 56), Image.Resampling.BICUBIC)
    ground = Image.new(
        "RGBA", (64, 64), (*[int(v) for v in np.clip(rng.normal(190, 45) + rng.normal(0, 8, 3), 0, 255)], 255)
    )
    ground.alpha_composite(icon, tuple(int(v) for v in rng.integers(0, 9, 2)))
    return np.asarray(ground.convert("RGB"))


def words(seed: int, packages: Path) -> Pictures:
    """Return spectra of words; the voices of tests are in no other sample."""
    rng = np.random.default_rng([seed, 5])
    file = packages / "words.npz"
    if not file.exists():
        np.savez(file, **_spoken())
    arrays = np.load(file)
    voices = rng.permutation(arrays["voice"].max() + 1)
    is_strange = np.isin(arrays["voice"], voices[: len(voices) // 3])
    pools = [(arrays["pictures"][rows], arrays["label"][rows]) for rows in (~is_strange, is_strange)]
    return drawn_apart(pools[0], pools[1], rng)


def _spoken() -> dict[str, np.ndarray]:
    """Return the pictures (n, 64, 64) uint8 of all words by all voices, with their labels and voices."""
    rng = np.random.default_rng(5)
    pictures = []
    labels = []
    speakers = []
    for voice, label, sound in spoken_words(rng):
        pictures.append(_spectrum(sound, rng))
        labels.append(label)
        speakers.append(voice)
    return {"pictures": np.stack(pictures), "label": np.array(labels), "voice": np.array(speakers)}


def spoken_words(rng: np.random.Generator) -> Iterator[tuple[int, int, bytes]]:
    """Yield the voice, the word and the WAV file of all words by all voices, each twice at random pitch and speed."""
    for voice in range(len(VOICES) * len(ACCENTS)):
        name = f"{ACCENTS[voice % len(ACCENTS)]}+{VOICES[voice // len(ACCENTS)]}"
        for label, word in enumerate(WORDS):
            for _ in range(2):
                pitch = str(int(rng.integers(25, 75)))
                speed = str(int(rng.integers(130, 210)))
                command = ["espeak-ng", "-v", name, "-p", pitch, "-s", speed, "--stdout", word]
                yield voice, label, subprocess.run(command, check=True, capture_output=True).stdout


def noisy_sound(sound: bytes, rng: np.random.Generator, loudness: tuple[float, float]) -> tuple[np.ndarray, int]:
    """Return the first 0.8 s of a WAV file with noise, and its rate in Hz.

    ``loudness``: the powers of ten between which the noise's amplitude is drawn; full scale is 1.
    """
    with wave.open(io.BytesIO(sound)) as reader:
        rate = reader.getframerate()
        signal = np.frombuffer(reader.readframes(reader.getnframes()), np.int16).astype(np.float64) / 2**15
    # A synthesizer's header may claim more frames than it wrote; what was read counts.
    length = int(0.8 * rate)
    begin = int(rng.integers(0, max(1, int(0.08 * rate))))
    padded = np.zeros(length)
    piece = signal[: length - begin]
    padded[begin : begin + len(piece)] = piece
    padded += rng.normal(0, 10 ** rng.uniform(*loudness), length)
    return padded, rate


def _spectrum(sound: bytes, rng: np.random.Generator) -> np.ndarray:
    """Return the logarithm of a sound's spectrum up to 5 kHz over 0.8 s, with noise, as a picture 64 x 64, uint8."""
    padded, rate = noisy_sound(sound, rng, (-3.5, -2.3))
    _, _, power = spectrogram(padded, rate, nperseg=512, noverlap=512 - len(padded) // 66)
    rows = int(5000 / rate * 512)
    decibels = 10 * np.log10(power[:rows] + 1e-12)
    scaled = np.clip((decibels - decibels.max() + 60) / 60, 0, 1)
    image = Image.fromarray((255 * scaled[::-1]).astype(np.uint8))
    return np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR))


def things(seed: int, packages: Path) -> Pictures:
    """Return pictures of ten things on backgrounds; the backgrounds of tests are in no other sample."""
    rng = np.random.default_rng([seed, 6])
    root = packages / "tuxpaint-stamps-default/usr/share/tuxpaint/stamps"
    folders = ("animals", "food", "household", "vehicles", "plants", "town")
    files = [file for name in folders for file in sorted((root / name).rglob("*.png")) if "cartoon" not in file.parts]
    chosen = [files[row] for row in rng.permutation(len(files))[:10]]
    grounds = sorted((packages / "gnome-backgrounds/usr/share/backgrounds/gnome").glob("*.webp"))
    order = rng.permutation(len(grounds))
    pools = []
    for half in (order[: len(order) // 2], order[len(order) // 2 :]):
        scenes = [_opened(grounds[row]) for row in half]
        images = [_in_scene(file, scenes[int(rng.integers(len(scenes)))], rng) for file in chosen for _ in range(60)]
        pools.append((np.stack(images), np.repeat(np.arange(10), 60)))
    return drawn_apart(pools[0], pools[1], rng)


def _opened(file: Path) -> Image.Image:
    """Return a background, at most 400 pixels wide."""
    with Image.open(file) as opened:
        opened.thumbnail((400, 400))
        return opened.convert("RGB")


def _in_scene(file: Path, scene: Image.Image, rng: np.random.Generator) -> np.ndarray:
    """Return a thing in front of a cut-out of a scene, turned, lit and noisy, 96 x 96."""
    side = int(rng.integers(96, min(scene.size) + 1))
    left, top = (int(rng.integers(0, extent - side + 1)) for extent in scene.size)
    picture = scene.crop((left, top, left + side, top + side)).resize((96, 96)).convert("RGBA")
    with Image.open(file) as opened:
        thing = opened.convert("RGBA")
    thing.thumbnail((200, 200))
    thing = thing.rotate(rng.normal(0, 15), expand=True, resample=Image.Resampling.BILINEAR)
    thing.thumbnail([int(rng.integers(45, 85))] * 2)
    place = [int(rng.integers(0, 97 - extent)) for extent in thing.size]
    picture.alpha_composite(thing, tuple(place))
    lit = np.asarray(picture.convert("RGB")).astype(np.float64) * rng.uniform(0.6, 1.2) + rng.normal(0, 15)
    return np.clip(lit + rng.normal(0, 8, lit.shape), 0, 255).astype(np.uint8)


TASKS: dict[str, Callable[[int, Path], Pictures]] = {
    "fashion": fashion,
    "digits": digits_on_photos,
    "print": printed,
    "icons": icons,
    "words": words,
    "things": things,
}


def samples_of(pictures: np.ndarray, labels: np.ndarray, bundle: Bundle) -> Samples:
    """Return pictures as a device with this bundle takes them, with classes of its own."""
    names = np.char.add("own-", labels.astype(str))
    task = bundle.manifest.task
    return data.from_arrays(pictures, names, task.input, task.class_names, own_classes=True)


def measure(bundle: Bundle, pictures: Pictures, each: int, seed: int) -> dict[str, float]:
    """Return accuracies: the best model without the encoder, the best head on it, and `auto` with its blend."""
    count = each * len(np.unique(pictures.train_labels))
    train = samples_of(pictures.train[:count], pictures.train_labels[:count], bundle)
    test = samples_of(pictures.test, pictures.test_labels, bundle)
    encoder = open_encoder(bundle, "fp32", train)
    head = personalize(bundle, (train, test), encoder, FitOptions(AUTO, local=False, blend=False, seed=seed))
    blend = personalize(bundle, (train, test), encoder, FitOptions(AUTO, seed=seed))
    return {
        "local": blend.scores.local or 0.0,
        "head": head.scores.personal or 0.0,
        "auto": blend.scores.personal or 0.0,
    }


def tables(folder: Path) -> list[str]:
    """Return a table for each number of samples: accuracies, %, mean and standard deviation over the seeds.

    The best model alone is that of the same pictures of 64 x 64, as `edge-agent fit` reports it. Gains are means of the
    differences of the same seed, with the 95 % interval by Student's t.
    """
    lines = []
    for each in map(str, EACH):
        lines += ["", f"{each} of each class:" if each != "1" else "One of each class:", ""]
        lines += [
            "| task | best alone | digits, `auto` | starter, head | gain | starter, `auto` | gain |",
            "|---|" + "---|" * 6,
        ]
        for task in TASKS:
            runs = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{task}-[0-9].json"))]
            if runs:
                lines.append(_row(task, runs, each))
    return lines


def _row(task: str, runs: list[dict[str, dict[str, dict[str, float]]]], each: str) -> str:
    """Return the line of one task."""
    alone = np.array([run["starter"][each]["local"] for run in runs])
    head, auto = (np.array([run["starter"][each][name] for run in runs]) for name in ("head", "auto"))
    digits_auto = np.array([run["digits"][each]["auto"] for run in runs])
    cells = [
        spread(alone),
        spread(digits_auto),
        spread(head),
        gain(head - alone),
        spread(auto),
        gain(auto - alone),
    ]
    return f"| {task} | {' | '.join(cells)} |"


def spread(values: np.ndarray) -> str:
    """Return the mean and the standard deviation of accuracies, in %."""
    return f"{100 * values.mean():.1f} ± {100 * values.std(ddof=1):.1f}"


def gain(differences: np.ndarray) -> str:
    """Return the mean of differences and its interval; bold where the interval is above 0."""
    half = student.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / np.sqrt(len(differences))
    mean = differences.mean()
    text = f"{100 * mean:+.1f} ({100 * (mean - half):+.1f} to {100 * (mean + half):+.1f})"
    return f"**{text}**" if mean - half > 0 else text


def main() -> None:
    """Measure what is not in the folder yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--starter", type=Path, required=True)
    parser.add_argument("--digits", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    bundles = {name: load_bundle(getattr(arguments, name), arguments.folder / name) for name in ("digits", "starter")}
    for seed in arguments.seeds:
        for task in arguments.tasks:
            path = arguments.folder / f"{task}-{seed}.json"
            if path.exists():
                continue
            pictures = TASKS[task](seed, arguments.packages)
            result = {
                name: {str(each): measure(bundle, pictures, each, seed) for each in EACH}
                for name, bundle in bundles.items()
            }
            path.write_text(json.dumps(result, indent=1))
            print(path, {name: rows["10"] for name, rows in result.items()}, flush=True)
    print("\n".join(tables(arguments.folder)))


if __name__ == "__main__":
    main()
