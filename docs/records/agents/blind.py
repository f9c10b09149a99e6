"""Make a policy blind: it no longer sees the updates, only where its knobs stand.

    python docs/records/agents/blind.py digits mnist autoencoder

What it sees of the updates is standardised; without the weights of that input, it is taken for its
mean.  What a blind policy does is a schedule: the same in every run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from undrift.rules.policy import encode_policy, read_policy


def blind(name: str) -> bytes:
    agent = read_policy(name)
    (first, shift), *rest = agent.layers
    assert agent.steering.sees == ("pca", "knobs"), agent.steering.sees
    first = first.clone()
    first[:, 0] = 0
    return encode_policy(((first, shift), *rest), agent.steering, {"from": name, "blind": True})


def main() -> None:
    for name in sys.argv[1:]:
        Path(__file__).with_name(f"{name}-blind.safetensors").write_bytes(blind(name))


if __name__ == "__main__":
    main()
