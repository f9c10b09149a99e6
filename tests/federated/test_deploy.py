"""The folder of a federation, its certificates, and processes that are ours alone."""

import ast
import contextlib
import os
import re
import runpy
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import undrift as fl
from undrift.cli import main
from undrift.deploy.check import check
from undrift.deploy.local import Local, free_port
from undrift.errors import ConfigError, DataError, FederationError
from undrift.experiment.spec import load
from undrift.experiment.tables import parse_table
from undrift.federated.project import load_silo, node_of, read_project
from undrift.state import disk

SETTINGS = ["digits", "rounds=2", "partition.clients=3", "sampler.count=2"]
SOURCE = Path(fl.__file__).parent


def init(place, *more):
    return main(["deploy", "init", str(place), *SETTINGS, *more])


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    pytest.importorskip("cryptography")
    place = tmp_path_factory.mktemp("closed") / "silos"
    assert init(place) == 0
    return place


def test_a_federation_is_closed_unless_one_says_otherwise(closed):
    server, node = (closed / "operator/superlink.sh").read_text(), ""
    assert "--enable-supernode-auth" in server and "--ssl-certfile" in server
    for client in range(3):
        node = (closed / f"silos/client-{client}/node.sh").read_text()
        assert "--root-certificates ca.crt" in node and "--auth-supernode-private-key key" in node
        assert "--insecure" not in server + node
    project = read_project(closed / "app/silos")
    assert len(project.keys) == 3 and not project.door.trust
    assert "--host 127.0.0.1" in server


def test_every_file_that_is_promised_is_there(closed):
    names = {str(p.relative_to(closed)) for p in closed.rglob("*") if p.is_file()}
    silo = {f"silos/client-2/{n}" for n in ("key", "key.pub", "ca.crt", "loader.py", "node.sh")}
    assert names >= silo | {
        *("README.md", "app/pyproject.toml", "app/silos/experiment.toml"),
        *("app/silos/federation.toml", "app/silos/server_app.py", "app/silos/client_app.py"),
        *("operator/superlink.sh", "operator/register.sh", "operator/run.sh", "operator/door.conf"),
        *("operator/superlink.service", "silos/client-0/node.service"),
    }
    readme = (closed / "README.md").read_text()
    operator, silos = readme.split("## A silo")
    assert operator.split("```sh")[1].split("```")[0].count("\n") - 1 == 5
    assert silos.split("```sh")[1].split("```")[0].count("\n") - 1 == 3
    for script in closed.rglob("*.sh"):
        subprocess.run(["/bin/sh", "-n", str(script)], check=True)


def test_private_keys_are_private_and_nobody_has_anothers(closed):
    secret = [*closed.rglob("key"), *closed.rglob("*.key")]
    assert len(secret) == 3 + 3 + 2
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in secret)
    assert len({p.read_bytes() for p in secret}) == len(secret)


@pytest.fixture
def readable(monkeypatch):
    """What was written, byte by byte, to files that others may read at that moment."""
    seen, inner = [], disk._os_write

    def write(fd, data):
        if os.fstat(fd).st_mode & 0o077:
            seen.append(bytes(data))
        return inner(fd, data)

    monkeypatch.setattr(disk, "_os_write", write)
    before = os.umask(0)  # the mode is the file's own, not the umask's
    yield seen
    os.umask(before)


def test_no_byte_of_a_key_is_ever_in_a_file_that_others_can_read(tmp_path, readable):
    pytest.importorskip("cryptography")
    assert init(tmp_path / "silos") == 0
    assert readable and not [data for data in readable if b"SECRET KEY" in data]
    for name in ("operator", "operator/certificates", *(f"silos/client-{i}" for i in range(3))):
        assert stat.S_IMODE((tmp_path / "silos" / name).stat().st_mode) == 0o700, name


def test_a_secret_does_not_take_over_the_mode_of_a_stray_file(tmp_path):
    stray = tmp_path / f"{disk.TEMPORARY}{os.getpid()}-key"
    stray.write_bytes(b"left by a process of the same number")
    stray.chmod(0o666)
    with stray.open("rb") as reader:  # and whoever has it open reads nothing new
        disk.write_atomically(tmp_path / "key", [b"secret"], disk.SECRET)
        assert b"secret" not in reader.read()
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600 and not stray.exists()


@pytest.mark.parametrize(
    ("script", "program"),
    [
        ("operator/superlink.sh", "flower-superlink"),
        ("operator/run.sh", "undrift"),
        ("silos/client-0/node.sh", "undrift-supernode"),
    ],
)
def test_what_flower_writes_is_its_owners_alone(script, program, tmp_path):
    """Its database holds reports, its logs and folders names of files and errors."""
    assert init(tmp_path / "open", "--insecure") == 0
    fake = tmp_path / "bin" / program
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\numask > {tmp_path}/umask\nexit 0\n")
    fake.chmod(0o755)
    (fake.parent / "sleep").symlink_to("/bin/true")  # between two starts of a node
    settings = {"PATH": f"{fake.parent}:/usr/bin:/bin", "TRIES": "1"}
    subprocess.run(["/bin/sh", tmp_path / "open" / script], env=settings, check=False)
    assert int((tmp_path / "umask").read_text(), 8) & 0o077 == 0o077


def test_a_mode_is_never_changed_after_the_bytes_are_there():
    """A file is private from its first byte on, or somebody has read it by then."""
    for path in SOURCE.rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        changed = [c for c in calls if ast.unparse(c.func).endswith("chmod")]
        # a library that is made executable: no secret
        assert not changed or path == SOURCE / "native" / "__init__.py", path


def test_certificates_are_the_authoritys_and_name_the_host(closed):
    from undrift.deploy.certificates import expiry

    place = closed / "operator" / "certificates"
    found = subprocess.run(
        ["openssl", "verify", "-CAfile", str(place / "ca.crt"), str(place / "server.crt")],
        capture_output=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert expiry(place / "server.crt").year >= 2025
    with pytest.raises(ConfigError, match="no certificate"):
        expiry(closed / "README.md")


def test_an_insecure_federation_needs_the_flag_and_says_what_it_is(tmp_path, capsys):
    assert init(tmp_path / "open", "--insecure") == 0
    assert "INSECURE" in capsys.readouterr().out
    assert "INSECURE" in (tmp_path / "open/README.md").read_text()
    path = tmp_path / "open/app/silos/federation.toml"
    path.write_text(path.read_text().replace("insecure = true", "insecure = false"))
    with pytest.raises(ConfigError, match="anybody may say"):
        read_project(path.parent)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["algorithm.use=fedavg,scaffold"], "no sweeps"),
        (["evaluate.drift=true"], "judged by its server's model"),
        (["task.class_weights=balanced"], "write the weights as a list"),
        (["--host", "a b"], "no address"),
        (["--port", "0"], "no address"),
        (["--clients", "0"], "1 to 100,000"),
    ],
)
def test_what_cannot_be_deployed_is_refused_and_leaves_nothing(arguments, told, tmp_path, capsys):
    assert init(tmp_path / "x", "--insecure", *arguments) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_an_existing_folder_is_not_written_over(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("precious")
    assert init(tmp_path / "x", "--insecure") == 2
    assert "exists already" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["mine"]


def test_new_keys_are_taken_in(closed, capsys):
    from undrift.deploy.certificates import node_key

    before = read_project(closed / "app/silos").keys
    (closed / "silos/client-1/key.pub").write_bytes(node_key()[1])
    assert main(["deploy", "keys", str(closed)]) == 0
    after = read_project(closed / "app/silos").keys
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    (closed / "silos/client-1/key.pub").write_text("ssh-rsa nonsense")
    assert main(["deploy", "keys", str(closed)]) == 2
    assert "ssh-keygen" in capsys.readouterr().err


# ---- silos ---------------------------------------------------------------------------------------
def test_the_loader_that_is_written_gives_what_a_simulation_gives(closed, monkeypatch, capsys):
    place = closed / "app/silos"
    project = read_project(place)
    loader = f"{closed / 'silos/client-1/loader.py'}:load"
    found = load_silo(loader, 1, place)
    assert found.num_clients == 1 and int(found.sizes[0]) > 0
    monkeypatch.chdir(closed / "silos/client-1")
    runpy.run_path("loader.py", run_name="__main__")  # as README tells the silo to
    assert capsys.readouterr().out.startswith(f"{int(found.sizes[0])} examples")
    assert project.example.x_shape == (1, 8, 8)


@pytest.mark.parametrize("kind", ["pair", "dataset", "loader", "federation"])
def test_a_silo_may_bring_its_data_in_many_forms(kind, tmp_path):
    (tmp_path / "mine.py").write_text(f"""
import torch, undrift as fl
from torch.utils.data import DataLoader, TensorDataset
x, y = torch.randn(9, 4), torch.arange(9) % 3
def load(client, place):
    return {{"pair": (x, y), "dataset": TensorDataset(x, y),
             "loader": DataLoader(TensorDataset(x, y), batch_size=4),
             "federation": fl.Federation.of([(x, y)])}}["{kind}"]
""")
    assert int(load_silo(f"{tmp_path / 'mine.py'}:load", 0, tmp_path).sizes[0]) == 9


@pytest.mark.parametrize("loader", ["", "x", "nowhere.py:load", "math:nothing", "math:a b"])
def test_a_loader_that_is_none_is_refused(loader, tmp_path):
    with pytest.raises(ConfigError, match="loader"):
        load_silo(loader, 0, tmp_path)


def test_examples_of_another_shape_are_refused_on_the_node(closed, tmp_path):
    (tmp_path / "mine.py").write_text("""
import torch
def load(client, place):
    return torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)
""")
    place = closed / "app/silos"
    with pytest.raises(DataError, match="the loader gives"):
        node_of(read_project(place), place, 0, tmp_path, f"{tmp_path / 'mine.py'}:load")


# ---- check ---------------------------------------------------------------------------------------
def test_check_says_what_is_wrong(closed, tmp_path):
    found = [str(one) for one in check(closed, free_port())]
    assert found[0].startswith("ok") and "superlink.sh" in found[-1] and found[-1][:3] == "BAD"
    (closed / "operator/certificates/ca.key").chmod(0o644)
    found = [str(one) for one in check(closed, free_port())]
    (closed / "operator/certificates/ca.key").chmod(0o600)
    assert any("chmod 600" in one for one in found)
    [only] = check(tmp_path)
    assert not only.good and "experiment.toml" in only.text


def test_check_notices_a_server_that_speaks_in_the_clear(closed):
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()

        def answer():
            caller, _ = door.accept()
            caller.recv(1000)
            caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            caller.close()

        threading.Thread(target=answer, daemon=True).start()
        found = [str(one) for one in check(closed, door.getsockname()[1])]
    assert "does not speak TLS" in found[-1]


def test_a_folder_that_is_no_federation_is_refused(tmp_path, capsys):
    for what in ("try", "check", "keys"):
        assert main(["deploy", what, str(tmp_path)]) == 2
        assert "no federation" in capsys.readouterr().err


# ---- processes -----------------------------------------------------------------------------------
def test_processes_end_with_their_children_and_nobody_elses(tmp_path):
    assert init(tmp_path / "open", "--insecure") == 0
    other = subprocess.Popen(["sleep", "60"])
    try:
        with Local(tmp_path / "open") as local:
            script = "sleep 61 & echo $! > $HERE/child; trap '' TERM; sleep 62"
            local.start("one", ["/bin/sh", "-c", script], HERE=str(tmp_path))
            while not (tmp_path / "child").is_file() or not (tmp_path / "child").read_text():
                time.sleep(0.02)
            child = int((tmp_path / "child").read_text())
            local.stop("one", signal.SIGKILL)
            for _ in range(200):  # its new parent has to fetch it
                if not Path(f"/proc/{child}/cmdline").is_file() or not _command(child):
                    break
                time.sleep(0.02)
            assert not _command(child)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_server_that_does_not_start_says_why(tmp_path, monkeypatch):
    assert init(tmp_path / "open", "--insecure") == 0
    monkeypatch.setattr("shutil.which", lambda name, **settings: f"/anywhere/{name}")
    (tmp_path / "open/operator/superlink.sh").write_text("echo no such thing as a server; exit 3\n")
    with Local(tmp_path / "open") as local, pytest.raises(FederationError, match="no such thing"):
        local.superlink()


def test_what_a_run_says_is_told_while_it_runs_and_its_error_once(tmp_path, monkeypatch):
    monkeypatch.setattr("undrift.deploy.local.PAUSE", 0.05)
    assert init(tmp_path / "open", "--insecure") == 0
    script = (
        "echo noise; echo 'undrift: round 1: a'; printf 'undrift: rou'; sleep 0.5; "
        "echo 'nd 2: b'; sleep 0.5; echo 'undrift: it fails'; exit $CODE"
    )
    with Local(tmp_path / "open") as local:
        for code, last in (("0", ["it fails"]), ("3", [])):
            told = []
            began = time.monotonic()

            def tell(line, told=told, began=began):
                told.append((line, time.monotonic() - began))

            with contextlib.suppress(FederationError) if code == "3" else contextlib.nullcontext():
                local.command("one", ["/bin/sh", "-c", script], 20, tell, CODE=code)
            assert [line for line, _ in told] == ["round 1: a", "round 2: b", *last]
            assert told[0][1] < 0.5 < told[1][1]


def test_a_run_that_is_followed_ends_in_time(tmp_path):
    assert init(tmp_path / "open", "--insecure") == 0
    with Local(tmp_path / "open") as local, pytest.raises(FederationError, match=r"within 0\.7 s"):
        local.command("one", ["sleep", "60"], 0.7, print)


# ---- no pickle -----------------------------------------------------------------------------------
def test_nothing_in_the_package_can_unpickle():
    """What bandit's B301, B302, B403 and B614 look for, in every module; numpy may not either."""
    # `testing` copies its caller's own objects by pickle, to see whether they survive it
    for path in set(SOURCE.rglob("*.py")) - set((SOURCE / "testing").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        found = {name.partition(".")[0] for name in names}
        assert not found & {"pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml"}, path
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        named = {ast.unparse(n.func) for n in calls}
        assert not named & {"torch.load", "eval", "pd.read_pickle", "pandas.read_pickle"}, path
        for call in calls:
            if ast.unparse(call.func) in ("np.load", "numpy.load"):
                assert "allow_pickle=False" in ast.unparse(call), path


def test_flower_is_named_when_it_is_missing(monkeypatch):
    for name in [n for n in sys.modules if n.startswith(("flwr", "undrift.federated.flower"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(fl.errors.MissingExtra, match=r"undrift\[flower\]"):
        __import__("undrift.federated.flower")


# ---- the guide -----------------------------------------------------------------------------------
def blocks(kind):
    page = SOURCE.parent.parent / "docs" / "from-simulation-to-silos.md"
    if not page.is_file():
        pytest.skip("the documentation is not beside the package")
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_guide_says_what_is_true(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (leak,) = blocks("python")
    exec(compile(leak, "guide", "exec"), {})
    (private,) = blocks("toml")
    table = parse_table(private, "guide")
    [made] = load("digits", ["rounds=1"], **table)
    assert made.algorithm.rules == (fl.Private(0.5, 1.0, 100),)
    pytest.importorskip("cryptography")
    (line,) = [x for b in blocks("sh") for x in b.splitlines() if " deploy init " in x]
    assert main(shlex.split(line)[1:]) == 0
