"""What is executed, or decides what is, was written by nobody else."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from undrift import native
from undrift.kernels import memory, own_files
from undrift.kernels.own_files import NotOurs, check_folder, make_own_folder, open_ours

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
NOBODY = 65534


def test_a_folder_is_made_for_its_owner_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        made = make_own_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in (made, made.parent)} == {0o700}
    (made / "file").write_bytes(b"mine")
    with open(open_ours(made / "file"), "rb") as file:
        assert file.read() == b"mine"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_folder_above_counts(tmp_path, depth):
    place = make_own_folder(tmp_path / "a" / "b" / "c")
    (place / "file").write_bytes(b"")
    (place, *place.parents)[depth].chmod(0o777)
    with pytest.raises(NotOurs, match="may be written by others"):
        open_ours(place / "file")
    (place, *place.parents)[depth].chmod(0o1777)  # as /tmp: names in it belong to their makers
    if depth:
        os.close(open_ours(place / "file"))


def test_a_link_leads_to_what_is_judged(tmp_path):
    place = make_own_folder(tmp_path / "true")
    loose = tmp_path / "loose"
    loose.mkdir()
    (tmp_path / "link").symlink_to(place)
    assert check_folder(tmp_path / "link") == place
    loose.chmod(0o777)
    (loose / "link").symlink_to(place)
    assert check_folder(loose / "link") == place  # and this is the path that is used from now on
    (place / "file").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic"):
        open_ours(place / "file")
    os.mkfifo(place / "pipe")
    with pytest.raises(NotOurs):
        open_ours(place / "pipe")


@pytest.mark.parametrize("mode", [0o666, 0o602])
def test_a_file_that_others_may_write_is_not_read(tmp_path, mode):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "file").chmod(mode)
    with pytest.raises(NotOurs):
        open_ours(tmp_path / "file")


def test_a_group_of_one_is_no_other(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "file").chmod(0o664)
    for own in (True, False):
        monkeypatch.setattr(own_files, "_is_own_group", lambda group, own=own: own)
        if own:
            os.close(open_ours(tmp_path / "file"))
        else:
            with pytest.raises(NotOurs):
                open_ours(tmp_path / "file")


@needs_root
def test_what_belongs_to_somebody_else_is_not_used(tmp_path):
    place = make_own_folder(tmp_path / "squatted")
    (place / "file").write_bytes(b"")
    os.chown(place / "file", NOBODY, NOBODY)
    with pytest.raises(NotOurs):
        open_ours(place / "file")
    os.chown(place, NOBODY, NOBODY)
    with pytest.raises(NotOurs):
        make_own_folder(place / "native")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("UNDRIFT_NATIVE", raising=False)
    native.loops.cache_clear()
    memory._known.clear()
    yield tmp_path / "cache"
    native.loops.cache_clear()
    memory._known.clear()


def test_kernels_are_not_chosen_by_others(cache, monkeypatch):
    monkeypatch.setattr(memory, "_file", lambda: memory.folder() / "kernels.json")
    memory.remember("a", {"BM": 64})
    (file,) = cache.iterdir()
    for place, mode in ((file, 0o666), (cache, 0o777)):
        before = place.stat().st_mode & 0o777
        place.chmod(mode)
        memory._known.clear()
        assert memory.recall("a") is None
        place.chmod(before)
    file.write_text("[" * 100_000)
    memory._known.clear()
    assert memory.recall("a") is None


def test_torch_keeps_compiled_code_in_a_folder_of_ours(cache, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    memory.own_compiler_cache()
    assert os.environ.pop("TORCHINDUCTOR_CACHE_DIR") == str(cache / "inductor")
    cache.chmod(0o777)
    memory.own_compiler_cache()
    own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert cache not in own.parents and own.stat().st_mode & 0o777 == 0o700
    own.rmdir()


LIBRARY = "int answer(void) {{ return {}; }}\n__attribute__((constructor)) void ran(void) {{ {} }}"


@pytest.mark.skipif(native.loops(torch.float32) is None, reason="there is no C compiler")
class TestLoops:
    def test_both_types_are_loaded_side_by_side(self, cache):
        """Loaded libraries are known by their names: two descriptors may not have one number."""
        single, double = (native.loops(dtype) for dtype in (torch.float32, torch.float64))
        assert single._handle != double._handle
        native.loops.cache_clear()
        again = native.loops(torch.float64)
        assert again._handle == double._handle

    def test_where_descriptors_have_no_path_a_copy_is_loaded(self, cache, monkeypatch):
        exists = Path.exists
        monkeypatch.setattr(Path, "exists", lambda p: "/proc/self/fd" not in str(p) and exists(p))
        assert isinstance(native.loops(torch.float32), ctypes.CDLL)

    def test_what_was_checked_is_what_is_loaded(self, cache, tmp_path, monkeypatch):
        """Another user exchanges the file between the check and the loading, again and again."""
        assert native.loops(torch.float32) is not None
        (file,) = (cache / "native").glob("dense32-*.so")
        evil = tmp_path / "evil.so"
        mark = tmp_path / "ran"
        source = LIBRARY.format(1, f'FILE *f = fopen("{mark}", "w"); fclose(f);')
        compiler = native._compiler()
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(evil)],
            input=b"#include <stdio.h>\n" + source.encode(), check=True,
        )  # fmt: skip
        honest, stop = file.read_bytes(), threading.Event()

        def exchange() -> None:
            while not stop.is_set():
                for content in (evil.read_bytes(), honest):
                    beside = tmp_path / "beside.so"
                    beside.write_bytes(content)
                    beside.chmod(0o700)
                    beside.replace(file)

        thread = threading.Thread(target=exchange)
        thread.start()
        try:
            for _ in range(100):
                native._loaded(file)
        finally:
            stop.set()
            thread.join()
        assert not mark.exists()

    @needs_root
    def test_a_folder_that_somebody_made_before_us_is_not_used(self, tmp_path):
        """A user without a home has a folder in /tmp, whose name everybody knows."""
        tmp = tmp_path / "tmp"
        tmp.mkdir()
        for one in (tmp_path.parent, tmp_path, tmp):
            one.chmod(0o1777 if one == tmp else 0o755)
        squatted = tmp / f"undrift-{os.geteuid()}"
        squatted.mkdir()
        os.chown(squatted, NOBODY, NOBODY)
        program = (
            "import tempfile; from pathlib import Path\n"
            f"tempfile.tempdir = {str(tmp)!r}\n"
            "def nowhere(): raise RuntimeError\n"
            "Path.home = nowhere\n"
            "import torch; from undrift import native\n"
            "print(native.loops(torch.float32))"
        )
        bare = {k: v for k, v in os.environ.items() if k not in ("UNDRIFT_CACHE", "XDG_CACHE_HOME")}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=bare
        )
        assert done.stdout == "None\n", done.stderr
        assert not list(squatted.iterdir())
