"""`undrift deploy init`: everything that a federation needs, in one folder."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from undrift.data import Federation, Population
from undrift.deploy import templates
from undrift.errors import ConfigError
from undrift.experiment.spec import Experiment
from undrift.experiment.tables import read_table, write_table
from undrift.experiment.world import Dealt, deal
from undrift.federated.alone import Example
from undrift.federated.project import (
    EXPERIMENT,
    FEDERATION,
    TABLE,
    asked_of,
    check_deployable,
    is_table,
    share,
)
from undrift.state import disk

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:-]{0,252}")
PORT = 8000  # of the SuperLink, on its own machine
LARGEST = 100_000  # rows of a silo, where nobody here knows them
DOOR = 443  # of the door in front of it, on a machine that silos reach


class Wanted(NamedTuple):
    """What the operator says of the federation."""

    clients: int | None = None  # by default as many as the experiment deals to
    host: str = "127.0.0.1"  # under which silos reach the server
    port: int | None = None  # under which silos reach the server
    insecure: bool = False
    judge: bool = True  # whether the server has the experiment's test examples

    @property
    def here(self) -> bool:
        """Whether silos are on this very machine and need no door."""
        return self.host in ("127.0.0.1", "localhost")

    @property
    def door(self) -> int:
        """Tell the port that silos knock at."""
        return (PORT if self.here else DOOR) if self.port is None else self.port

    @property
    def address(self) -> str:
        """Tell where silos reach the server."""
        return f"[{self.host}]:{self.door}" if ":" in self.host else f"{self.host}:{self.door}"

    def check(self) -> None:
        """Refuse an address that cannot work."""
        if not _HOST.fullmatch(self.host) or not 0 < self.door < 65536:
            raise ConfigError(f"{self.host}:{self.door} is no address of a server")
        if self.insecure and not self.here:
            raise ConfigError(f"--insecure is for one machine: leave out --host {self.host}")
        if not self.here and self.door == PORT:
            raise ConfigError(
                f"--port {PORT} is the SuperLink's own, which 127.0.0.1 alone reaches: silos come "
                f"through operator/door.conf, at another port (by default {DOOR})"
            )


def init(folder: Path, experiment: Experiment, wanted: Wanted) -> Path:
    """Write the project; an existing folder is refused."""
    check_deployable(experiment)
    wanted.check()
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise ConfigError(f"{folder} exists already: choose another folder, or delete it")
    clients, table = _federation(experiment, wanted)
    place = folder.resolve()
    try:
        disk.make_directory(place)
        # its keys, and what Flower keeps of messages
        disk.make_directory(place / "operator", disk.SECRET_FOLDER)
        _write_app(place, experiment)
        _write_silos(place, clients, _loader(experiment, table), wanted)
        _write_operator(place, wanted)
        table["keys"] = [] if wanted.insecure else read_keys(place, clients)
        write_text(place / "app" / "silos" / FEDERATION, write_table(table))
        write_text(place / "README.md", _readme(clients, wanted))
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)  # half a project would be taken for a whole one
        raise
    return place


def _federation(experiment: Experiment, wanted: Wanted) -> tuple[int, dict[str, Any]]:
    if is_table(experiment):
        asked_of(experiment)  # refuses what silos could not agree on
    dealt = None if _is_elsewhere(experiment, wanted) else deal(experiment)
    clients = wanted.clients
    if clients is None:
        assert dealt is not None, "_is_elsewhere"
        clients = len(dealt.parts)
    if not 1 <= clients <= 100_000:
        raise ConfigError(f"--clients {clients}: a federation has 1 to 100,000 silos")
    cohort = len(experiment.sampler.sample(0, 0, Population.of([1] * clients)).ids)
    largest = LARGEST if dealt is None else max(len(part) for part in dealt.parts)
    tested = dealt is not None and len(dealt.examples.test_x) > 0
    return clients, {
        "clients": clients,
        **_names(dealt, clients),
        "insecure": wanted.insecure,
        "joining": 300.0,
        "judge": wanted.judge and tested,
        **({"x": TABLE} if dealt is None or is_table(experiment) else _shapes(experiment, dealt)),
        "patience": {
            "seconds": 600.0,
            "minimum": max(1, min(2, cohort)),
            "empty_rounds": 3,
            "returning": 120.0,
        },
        "limits": {"size": max(10_000, 10 * largest)},
    }


def _is_elsewhere(experiment: Experiment, wanted: Wanted) -> bool:
    """Whether nobody here has the table: silos bring theirs, and their number is told."""
    path = dict(experiment.data.settings).get("path")  # type: ignore[union-attr]
    there = isinstance(path, str) and Path(path).exists()
    return is_table(experiment) and wanted.clients is not None and not there


def _names(dealt: Dealt | None, clients: int) -> dict[str, Any]:
    """Name the clients, where the data do."""
    if dealt is None or dealt.names is None or len(dealt.parts) != clients:
        return {}
    return {"names": list(dealt.site_names())} if dealt.examples.info.client_names else {}


def _shapes(experiment: Experiment, dealt: Dealt) -> dict[str, Any]:
    """Tell what an example looks like."""
    full = next(i for i, part in enumerate(dealt.parts) if len(part))
    given = share(experiment, full)
    assert isinstance(given, tuple), "a table is prepared by its silos"
    example, data = Example.of(Federation.of([given])), dealt.examples
    if data.embedding is not None:
        raise ConfigError("a model with vectors of words from the data cannot be deployed yet")
    x = {"shape": list(example.x_shape), "dtype": str(example.x_dtype).removeprefix("torch.")}
    y = {"shape": list(example.y_shape), "dtype": str(example.y_dtype).removeprefix("torch.")}
    return {"classes": data.classes, "x": x, "y": y}


def read_keys(place: Path, clients: int) -> list[str]:
    """Read every silo's public key."""
    from undrift.deploy.certificates import pem_of

    return [pem_of(silo(place, client) / "key.pub") for client in range(clients)]


def renew_keys(place: Path) -> int:
    """Write the public keys that lie in the silos' folders into the federation."""
    path = place / "app" / "silos" / FEDERATION
    table = read_table(path)
    clients = int(table["clients"])
    write_text(path, write_table({**table, "insecure": False, "keys": read_keys(place, clients)}))
    return clients


def silo(place: Path, client: int) -> Path:
    """Tell where the folder of a silo is."""
    return place / "silos" / f"client-{client}"


def write_text(path: Path, text: str, executable: bool = False) -> None:
    """Write a text file."""
    disk.make_directory(path.parent)
    disk.write_atomically(path, [text.encode()], 0o777 if executable else 0o666)


# ---------------------------------------------------------------------------------------- parts
def _write_app(place: Path, experiment: Experiment) -> None:
    app = place / "app" / "silos"
    write_text(place / "app" / "pyproject.toml", templates.PYPROJECT)
    write_text(app / "__init__.py", '"""The Flower app of this federation."""\n')
    write_text(app / "server_app.py", templates.SERVER_APP)
    write_text(app / "client_app.py", templates.CLIENT_APP)
    write_text(app / EXPERIMENT, write_table(experiment.to_table()))


def _loader(experiment: Experiment, table: dict[str, Any]) -> Callable[..., str]:
    """Give what writes a silo's loader: of its number, and of where the app is."""
    if table["x"] != TABLE:
        x, y = (f"{table[n]['shape']} {table[n]['dtype']}" for n in "xy")
        return partial(templates.LOADER.format, x=x, y=y)
    schema = asked_of(experiment).schema
    # a name may hold quotes or the end of a line
    told = [
        f"    {json.dumps(n, ensure_ascii=False)[1:-1]}: {schema[n].kind}" for n in schema.names
    ]
    return partial(templates.LOADER_OF_TABLE.format, columns="\n".join(told))


def _write_silos(place: Path, clients: int, loader: Callable[..., str], wanted: Wanted) -> None:
    security = "--insecure" if wanted.insecure else templates.NODE_TLS
    authority = None if wanted.insecure else _authority(place, wanted)
    for client in range(clients):
        folder = silo(place, client)
        disk.make_directory(folder, disk.SECRET_FOLDER)  # holds a key, and states of the client
        app = os.path.relpath(place / "app" / "silos", folder)
        write_text(folder / "loader.py", loader(client=client, app=app))
        node = templates.NODE.format(
            quiet=templates.QUIET, address=wanted.address, security=security,
            client=client,
        )  # fmt: skip
        write_text(folder / "node.sh", node, executable=True)
        write_text(folder / "node.service", _service(f"silo {client}", folder, "node.sh"))
        if authority is not None:
            _write_identity(place, folder, authority)


def _authority(place: Path, wanted: Wanted) -> Any:
    from undrift.deploy import certificates as made

    authority = made.new_authority()
    folder = place / "operator" / "certificates"
    disk.make_directory(folder, disk.SECRET_FOLDER)
    pem = authority.certificate.public_bytes(made._PEM)
    write_text(folder / "ca.crt", pem.decode())
    made.write_secret(folder / "ca.key", made.private_bytes(authority.key))
    hosts = list(dict.fromkeys(["localhost", "127.0.0.1", wanted.host]))
    certificate, key = made.server_certificate(authority, hosts)
    write_text(folder / "server.crt", certificate.decode())
    made.write_secret(folder / "server.key", key)
    return authority


def _write_identity(place: Path, folder: Path, authority: Any) -> None:
    """Write a silo's key, the authority it trusts, and what its own loopback door needs."""
    from undrift.deploy import certificates as made

    private, public = made.node_key()
    made.write_secret(folder / "key", private)
    write_text(folder / "key.pub", public.decode())
    write_text(folder / "ca.crt", (place / "operator/certificates/ca.crt").read_text())
    certificate, key = made.server_certificate(authority, ["localhost", "127.0.0.1"])
    write_text(folder / "node.crt", certificate.decode())
    made.write_secret(folder / "node.key", key)


def _write_operator(place: Path, wanted: Wanted) -> None:
    folder, quiet = place / "operator", templates.QUIET
    tls = "--insecure" if wanted.insecure else templates.SUPERLINK_TLS
    superlink = templates.SUPERLINK.format(quiet=quiet, port=PORT, security=tls)
    write_text(folder / "superlink.sh", superlink, executable=True)
    write_text(folder / "register.sh", templates.REGISTER.format(quiet=quiet), executable=True)
    write_text(folder / "run.sh", templates.RUN.format(quiet=quiet), executable=True)
    write_text(folder / "flower" / "config.toml", flower_config(place, PORT, wanted.insecure))
    write_text(folder / "superlink.service", _service("server", folder, "superlink.sh"))
    if not wanted.insecure:
        door = templates.DOOR.format(
            door=DOOR if wanted.door == PORT else wanted.door, host=wanted.host, folder=folder,
            port=PORT,
        )  # fmt: skip
        write_text(folder / "door.conf", door)


def flower_config(place: Path, port: int, insecure: bool) -> str:
    """Write how Flower's own commands find the SuperLink."""
    certificate = place / "operator" / "certificates" / "ca.crt"
    security = "insecure = true" if insecure else f'root-certificates = "{certificate}"'
    return templates.CONFIG.format(port=port, security=security)


def _service(what: str, folder: Path, script: str) -> str:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return templates.SERVICE.format(
        what=what, folder=folder, script=folder / script, path=path, user=getpass.getuser()
    )


def _readme(clients: int, wanted: Wanted) -> str:
    closed = (
        "This federation is INSECURE: no TLS, no keys. It is for a try-out on one machine."
        if wanted.insecure
        else "It is closed: TLS by an authority of its own, and only nodes whose keys are listed."
    )
    return templates.README.format(clients=clients, closed=closed, address=wanted.address)
