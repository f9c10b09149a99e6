"""Nothing but the guarded readers parses bytes from outside."""

from __future__ import annotations

import ast
from pathlib import Path

import undrift

SOURCE = Path(undrift.__file__).parent
PARSERS = {
    *("json.load", "json.loads", "tomllib.load", "tomllib.loads", "pickle.load", "pickle.loads"),
    *("torch.load", "np.load", "np.fromfile", "np.genfromtxt", "np.loadtxt", "np.memmap"),
    *("np.lib.format.read_array", "zipfile.ZipFile", "tarfile.open", "gzip.open", "lzma.open"),
    *("gzip.GzipFile", "gzip.decompress", "lzma.decompress", "bz2.open", "bz2.decompress"),
    *("zlib.decompress", "zlib.decompressobj", "yaml.load", "marshal.loads", "shelve.open"),
}
OWN = {  # what this process, or one that it started, wrote itself a moment ago
    "experiment/pool.py": {"json.loads"},
    "experiment/worker.py": {"json.loads"},
    "rules/policy.py": {"json.loads"},
    "testing/records.py": {"pickle.loads"},
}


def calls(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_nothing_else_parses_bytes_from_outside():
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if not place.startswith("guarded/"):
            assert calls(path) & PARSERS <= OWN.get(place, set()), place


def test_the_guarded_readers_are_seen():
    assert {"json.loads", "tomllib.loads"} <= calls(SOURCE / "guarded/text.py")
