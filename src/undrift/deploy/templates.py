"""The texts of a project folder."""

from __future__ import annotations

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "silos"
version = "1.0.0"
description = "A federation that trains with undrift"
license = "Apache-2.0"
dependencies = ["undrift[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "silos"
fab-include = ["silos/**/*.py", "silos/*.toml"]

[tool.flwr.app.components]
serverapp = "silos.server_app:app"
clientapp = "silos.client_app:app"

[tool.flwr.app.config]
folder = ""     # where the server keeps the run
check = false   # greet everybody and stop
ended = ""      # where the server writes how the run ended
"""

SERVER_APP = '''\
"""The server: runs experiment.toml over the nodes of federation.toml."""

from pathlib import Path

from undrift.federated.flower import server_app

app = server_app(Path(__file__).parent)
'''

CLIENT_APP = '''\
"""A silo: answers the server with what its own loader gives it to train on."""

from pathlib import Path

from undrift.federated.flower import client_app

app = client_app(Path(__file__).parent)
'''

LOADER = '''\
"""What this silo trains on.  Nothing that `load` gives ever leaves this machine.

Give a pair (x, y) of tensors, a torch Dataset or DataLoader (what does not fit into memory is
streamed from disk), or an undrift Federation of one client.
Each x is {x}, each y is {y}.
"""

from pathlib import Path

from undrift.federated.project import share


def load(client: int, place: Path):
    """Give this silo's examples; `place` holds experiment.toml."""
    # For a try-out: what a simulation of the same experiment gives to this client.
    # Put your own data here, for instance:
    #     table = numpy.load("/data/patients.npz")
    #     return torch.from_numpy(table["x"]), torch.from_numpy(table["y"])
    return share(place / "experiment.toml", client)


if __name__ == "__main__":
    x, y = load({client}, Path("{app}"))
    print(f"{{len(x)}} examples")
    print(f"x {{list(x.shape[1:])}} {{x.dtype}}, y {{list(y.shape[1:])}} {{y.dtype}}")
'''

LOADER_OF_TABLE = '''\
"""What this silo trains on.  No row of it ever leaves this machine.

Give the path of a .csv, .tsv or .parquet file (a relative one starts from this folder), or a pandas
DataFrame.  It needs these columns, and more do no harm:
{columns}
"""

import sys
from pathlib import Path

from undrift.federated.project import share, try_table


def load(client: int, place: Path):
    """Give this silo's table; `place` holds experiment.toml."""
    # For a try-out: this client's rows of the experiment's own table.
    # Put your own table here, for instance:
    #     return "/data/patients.csv"
    return share(place / "experiment.toml", client)


if __name__ == "__main__":
    sys.exit(try_table(__file__, {client}, Path("{app}")))
'''

QUIET = """\
cd "$(dirname "$0")"
umask 077  # messages, states and logs tell about data
export FLWR_HOME="${FLWR_HOME:-$PWD/flower}" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
mkdir -p "$FLWR_HOME"
"""

SUPERLINK = """\
#!/bin/sh
# Flower's server.  It listens on this machine alone: whoever reaches this port may also start runs
# and register nodes, so only /v1/fleet/ is passed on to silos (door.conf).
set -e
{quiet}exec flower-superlink --host 127.0.0.1 --port "${{PORT:-{port}}}" {security} \\
  --database "${{DATABASE:-superlink.db}}" --disable-runtime-dependency-installation
"""

SUPERLINK_TLS = """\
--enable-supernode-auth \\
  --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/server.crt \\
  --ssl-keyfile certificates/server.key"""

REGISTER = """\
#!/bin/sh
# Lets the nodes in whose public keys lie in silos/; everybody else is turned away.
set -e
{quiet}for key in ../silos/*/key.pub; do
  said=$(COLUMNS=200 flwr supernode register "$key" federation 2>&1) || case "$said" in
    *"already in use"*) said="$key is registered already" ;;
    *) echo "$said" >&2; exit 1 ;;
  esac
  echo "$said"
done
flwr supernode list federation
"""

RUN = """\
#!/bin/sh
# Runs the experiment, or goes on with it after the last round that was completed.  It ends with
# exit code 0 only if every round was trained.
set -e
{quiet}exec undrift deploy run .. --out "${{FOLDER:-$PWD/run}}"
"""

CONFIG = """\
[superlink]
default = "federation"

[superlink.federation]
address = "127.0.0.1:{port}"
{security}
"""

NODE = """\
#!/bin/sh
# This silo's node: it connects to the server, nobody connects to it.  A node that has ended is
# started again, with growing pauses; after TRIES times in a row without 5 minutes of work the
# script gives up.  A node that was killed is let in only when the server has noticed it, after
# a minute.
{quiet}stop() {{
  trap '' INT TERM
  kill "$node" 2>/dev/null && wait "$node"
  exit "$1"
}}
trap 'stop 130' INT
trap 'stop 143' TERM
tries=0
while [ "$tries" -lt "${{TRIES:-1000}}" ]; do
  begun=$(date +%s)
  undrift-supernode --superlink "${{SUPERLINK:-{address}}}" {security} \\
    --host 127.0.0.1 --port "${{PORT:-9094}}" \\
    --node-config "client={client} folder=\\"$PWD/state\\" loader=\\"$PWD/loader.py:load\\"" &
  node=$!
  wait "$node"
  code=$?
  [ $(($(date +%s) - begun)) -lt 300 ] || tries=0
  tries=$((tries + 1))
  pause=$((tries < 12 ? 5 * tries : 60))
  echo "the node has ended with exit code $code; it is started again in $pause seconds" >&2
  sleep "$pause" &
  node=$!
  wait "$node"
done
echo "the node has ended $tries times in a row: look above for why, then start it again" >&2
exit 1
"""

NODE_TLS = """\
--root-certificates ca.crt \\
  --auth-supernode-private-key key \\
  --ssl-ca-certfile ca.crt --ssl-certfile node.crt --ssl-keyfile node.key"""

SERVICE = """\
# User and paths are those of the machine where `undrift deploy init` ran: change them where this
# folder lies elsewhere.  The user owns the folder and needs no other right.
[Unit]
Description=undrift: {what}
After=network-online.target
Wants=network-online.target

[Service]
User={user}
ExecStart=/bin/sh "{script}"
WorkingDirectory={folder}
Environment=PATH={path}
Restart=on-failure
RestartSec=10
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=strict
ReadWritePaths="{folder}"

[Install]
WantedBy=multi-user.target
"""

DOOR = """\
# nginx: what silos may reach of the server.  Flower answers nodes under /v1/fleet/; everything else
# (starting runs, registering nodes, reading logs) stays on this machine.
server {{
    listen {door} ssl;
    server_name {host};
    ssl_certificate     "{folder}/certificates/server.crt";
    ssl_certificate_key "{folder}/certificates/server.key";
    ssl_protocols TLSv1.3;
    client_max_body_size 64m;

    location /v1/fleet/ {{
        proxy_pass https://127.0.0.1:{port};
        proxy_ssl_trusted_certificate "{folder}/certificates/ca.crt";
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_read_timeout 300s;
        proxy_request_buffering off;
    }}
    location / {{
        return 403;
    }}
}}
"""

README = """\
# A federation of {clients} silos

`app/silos/experiment.toml` is the experiment, the same file that `undrift run` simulates;
`app/silos/federation.toml` says who takes part, what an example looks like and what a client may
claim. {closed}

Try everything on this machine first: `undrift deploy try .`

## The operator

```sh
pip install 'undrift[flower]'
sh operator/superlink.sh           # or install operator/superlink.service; keep it running
sh operator/register.sh            # let the keys in silos/ in
undrift deploy check .             # is everybody there?
sh operator/run.sh                 # writes operator/run; after a crash it goes on there
```

Silos connect to `{address}`. The SuperLink itself listens on 127.0.0.1, because whoever reaches its
port may also start runs: `operator/door.conf` (nginx) passes on the nodes' part alone.

## A silo

Give each silo its folder `silos/client-N`, and nothing else. Its key is for testing: for a real
federation the silo runs `ssh-keygen -t ecdsa -b 384 -N '' -f key` and returns `key.pub` alone; then
`undrift deploy keys .` writes the new keys into the federation.

```sh
pip install 'undrift[flower]'
python loader.py                   # after writing into it where your data are
sh node.sh                         # or install node.service with your paths; keep it running
```

State of the algorithm is in `state/` of each silo: keep it between restarts. A node runs the app
that the operator sends: agree on `app/` beforehand.
"""
