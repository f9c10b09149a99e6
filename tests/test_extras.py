"""Every extra is used once in an environment of its own; here, that nothing is left out of it."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="the project's files are not beside the tests"
)
# modules whose package is called otherwise
NAMES = {"PIL": "pillow", "mlflow": "mlflow-skinny", "sklearn": "scikit-learn"}
OWN = {"fcntl", "undrift"}


@pytest.fixture
def extras(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import extras

    return extras


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def packages(lines):
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines}


def test_every_extra_has_a_use(extras):
    import extras_uses

    assert list(extras_uses.USES) == list(project()["optional-dependencies"]) == extras.extras()


def test_every_package_that_is_imported_comes_with_undrift_or_an_extra():
    every = packages(project()["dependencies"])
    for lines in project()["optional-dependencies"].values():
        every |= packages(lines)
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        found |= {
            n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level
        }
        for name in {one.partition(".")[0] for one in found} - sys.stdlib_module_names - OWN:
            assert NAMES.get(name, name).replace("_", "-") in every, f"{path}: {name}"


def test_the_oldest_versions_are_the_ends_of_their_ranges(extras):
    for name, pinned in extras.OLDEST.items():
        package, version = pinned.removesuffix(".*").split("==")
        [line] = [one for one in project()["optional-dependencies"][name] if package in one]
        assert line.startswith(f"{package}>={version},<")
        assert [name, pinned] in extras.planned([name])


def test_one_extra_that_fails_does_not_hide_the_others(extras, monkeypatch, capsys):
    monkeypatch.setattr(extras, "environment", lambda folder, below=None: folder)
    monkeypatch.setattr(extras, "install", lambda *_: None)

    def check(name, folder, *more):
        if name == "ray":
            raise extras.Failed("it does not install:\n    ERROR: No matching distribution found")

    monkeypatch.setattr(extras, "check", check)
    assert extras.main(["images", "ray", "flower"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in said if line[:3] in ("ok ", "BAD")] == [
        *("ok   imag", "BAD  ray:", "ok   flow", "ok   flow"),
    ]
    assert extras.main(["images"]) == 0
    assert extras.main(["image"]) == 2


def test_a_version_that_the_registry_lacks_is_named(extras, monkeypatch, tmp_path):
    """pip's own error is what tells; it stands between much else."""
    code = "print('talk'); print('ERROR: No matching distribution found for certifi>=2099')"
    command = [sys.executable, "-c", f"{code}; print('more talk'); raise SystemExit(1)"]
    with pytest.raises(extras.Failed, match=r"^no luck:\n +ERROR: No matching .* certifi>=2099$"):
        extras.ran(command, tmp_path, "no luck")
    command[2] = "import sys; sys.exit('why not')"
    with pytest.raises(extras.Failed, match=r"^no luck:\n +why not$"):
        extras.ran(command, tmp_path, "no luck")
    extras.ran([sys.executable, "-c", ""], tmp_path, "no luck")
    monkeypatch.setattr(extras, "SECONDS", 0.2)
    with pytest.raises(extras.Failed, match="no end after"):
        extras.ran([sys.executable, "-c", "import time; time.sleep(30)"], tmp_path, "no luck")


def test_continuous_integration_runs_the_tests_and_every_extra():
    script = (ROOT / ".ci" / "run").read_text()
    assert "./scripts/test\n" in script and "scripts/extras.py\n" in script
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_an_environment_on_top_has_the_commands_with_its_own_python(extras, tmp_path):
    """`undrift deploy` calls them by name: those below would not see what the extra brought."""
    base = tmp_path / "base"
    (base / "bin").mkdir(parents=True)
    (base / "lib" / "python3" / "site-packages").mkdir(parents=True)
    (base / "bin" / "undrift").write_text(f"#!{base}/bin/python\nprint('here')\n")
    python = extras.environment(tmp_path / "top", base)
    assert python == tmp_path / "top" / "bin" / "python"
    script = tmp_path / "top" / "bin" / "undrift"
    assert script.read_text().startswith(f"#!{python}\n")
    assert subprocess.run([script], capture_output=True, text=True).stdout == "here\n"
