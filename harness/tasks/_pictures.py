"""Labelled pictures of 32 x 32: a known corpus, or a folder.

digits             1,797 of 8 x 8, enlarged four times; comes with scikit-learn
fashion-mnist      60,000 + 10,000 of 28 x 28, a black margin around them; from fetch-data or Debian
cifar10            50,000 + 10,000 in colour; published, through `datasets`
a folder           train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png; or saved by `datasets`
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinpipe.harness import fetch
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.tasks import _arrays, _hub

# Part of a cache's file name: raise it when the same folder would give other pictures.
FORMAT = 1
SIDE = _hub.SIDE
OFFLINE = "digits; fashion-mnist (`thinpipe fetch-data fashion-mnist`, once); or a folder of pictures"
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")
NAMED = ("digits", "fashion-mnist", "cifar10")
COLUMNS = [{"img": "img", "label": "label"}, {"img": "image", "label": "label"}]


@dataclass(frozen=True, eq=False)
class Pictures:
    """pixels: uint8 (n, C, 32, 32), C 1 (grey) or 3; labels: int64 (n,): one a sample, the training split first.
    num_train: how many are its; None: there is no split. classes: what each class number is called."""

    name: str
    pixels: np.ndarray
    labels: np.ndarray
    num_train: int | None
    classes: list[str]
    sha256: str


def read_pictures(name: str, num_labels: int, cache_dir: Path) -> Pictures:
    """The corpus called `name`, or the folder at that path. Raises UserError where there is none, it holds no pictures,
    or other than `num_labels` classes."""
    path = Path(name).expanduser()
    if name == "digits":
        found = _digits()
    elif name == "fashion-mnist":
        found = _fashion(fetch.path(name, cache_dir))
    elif name == "cifar10":
        source = _hub.Published("uoft-cs/cifar10", None, COLUMNS[:1], "test")
        found = _through_datasets(name, _hub.published(name, source, cache_dir, offline_corpora=OFFLINE))
    elif path.is_dir() and _hub.is_saved(path):
        splits, _ = _hub.saved(path, COLUMNS, cache_dir, held_out=("test", "validation"))
        found = _through_datasets(name, splits)
    elif path.is_dir():
        found = _folder(name, path, cache_dir)
    else:
        raise UserError(
            f"task.corpus {name!r} is neither a known corpus nor a folder, seen from {Path.cwd()}."
            f"{near_miss(name, NAMED)} Or give a folder with a folder of pictures a class."
        )
    if len(found.classes) != num_labels:
        advice = f"set task.num_labels to {len(found.classes)}" if len(found.classes) > 1 else "add others"
        raise UserError(
            f"task.corpus {name!r} has {len(found.classes)} classes ({', '.join(found.classes[:8])}), not "
            f"{num_labels}: {advice}."
        )
    return found


def _digits() -> Pictures:
    # Found, not imported: scikit-learn starts threads.
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None, "scikit-learn is a requirement"
    assert spec.submodule_search_locations is not None, "a package has a folder"
    packed = (Path(spec.submodule_search_locations[0]) / "datasets/data/digits.csv.gz").read_bytes()
    table = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",", dtype=np.int64)
    # Values are 0..16.
    small = (table[:, :64].reshape(-1, 1, 8, 8) * 255 // 16).astype(np.uint8)
    pixels = small.repeat(4, axis=2).repeat(4, axis=3)
    names = [str(number) for number in range(10)]
    return Pictures("digits", pixels, table[:, 64], None, names, hashlib.sha256(packed).hexdigest())


def _fashion(folder: Path) -> Pictures:
    parts = [(folder / name).read_bytes() for name in fetch.FASHION]
    arrays = [np.frombuffer(gzip.decompress(part), dtype=np.uint8) for part in parts]
    pixels = np.concatenate([arrays[0][16:], arrays[2][16:]]).reshape(-1, 1, 28, 28)
    labels = np.concatenate([arrays[1][8:], arrays[3][8:]]).astype(np.int64)
    margin = (SIDE - 28) // 2
    pixels = np.pad(pixels, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
    names = ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    return Pictures("fashion-mnist", pixels, labels, len(arrays[1]) - 8, names, digest)


def _through_datasets(name: str, splits: _hub.Splits) -> Pictures:
    parts = [split for split in (splits.train, splits.held_out) if split is not None]
    pixels = np.concatenate([np.asarray(part["img"]) for part in parts]).transpose(0, 3, 1, 2)
    values, labels = np.unique(np.concatenate([np.asarray(part["label"]) for part in parts]), return_inverse=True)
    num_train = len(splits.train["label"]) if splits.held_out is not None else None
    digest = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    return Pictures(name, np.ascontiguousarray(pixels), labels, num_train, [str(v) for v in values], digest)


def _folder(name: str, folder: Path, cache_dir: Path) -> Pictures:
    """Sorted by class and file name. What was read is kept in the cache by its content."""
    apart = (folder / "train").is_dir() and (folder / "test").is_dir()
    roots = [folder / "train", folder / "test"] if apart else [folder]
    classes = [_classes(name, root) for root in roots]
    if apart and classes[0] != classes[1]:
        odd = sorted(set(classes[0]) ^ set(classes[1]))
        raise UserError(f"task.corpus {name!r}: train and test have other classes: {', '.join(odd[:8])} only in one.")
    files = [[_files(name, root / one) for one in classes[0]] for root in roots]
    labels = [number for root in files for number, group in enumerate(root) for _ in group]
    digest = _hub.hash_folder(folder, SUFFIXES)
    path = cache_dir / f"pictures{FORMAT}-{digest[:16]}.npz"
    if not path.exists():
        pictures = [_open(file) for root in files for group in root for file in group]
        _arrays.write(path, {"pixels": np.stack(pictures).transpose(0, 3, 1, 2)})
    pixels = np.ascontiguousarray(_arrays.read(path)["pixels"])
    assert len(pixels) == len(labels), f"{path} holds {len(pixels)} pictures, not {len(labels)}"
    num_train = sum(len(group) for group in files[0]) if apart else None
    return Pictures(name, pixels, np.array(labels), num_train, list(classes[0]), digest)


def _classes(name: str, root: Path) -> list[str]:
    found = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise UserError(f"task.corpus {name!r}: {root} has no folders; there is to be one a class, pictures in it.")
    return found


def _files(name: str, folder: Path) -> Sequence[Path]:
    found = sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in SUFFIXES)
    if not found:
        raise UserError(f"task.corpus {name!r}: {folder} holds no pictures ({', '.join(SUFFIXES)}).")
    return found


def _open(file: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(file) as image:
            return _hub.picture(image)
    except (OSError, SyntaxError) as error:  # Pillow's, for a broken PNG
        raise UserError(f"{file} is no picture that can be read: {error}. Remove or mend it.") from None
