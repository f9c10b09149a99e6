"""Certificates of an authority of one's own, and keys of nodes: for testing, closed from the start.

For a real federation every silo makes its own key (`ssh-keygen -t ecdsa -b 384`) and hands over
the public half alone.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from undrift.errors import ConfigError, MissingExtra
from undrift.guarded.text import read_bytes
from undrift.state import disk

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise MissingExtra(
        "certificates need cryptography, which comes with Flower: pip install 'undrift[flower]'"
    ) from error

DAYS = 90
_PEM = serialization.Encoding.PEM
_PLAIN = serialization.NoEncryption()


class Authority(NamedTuple):
    """An authority that signs certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def new_authority(name: str = "undrift test authority") -> Authority:
    """Make an authority for testing."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    use = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    made = (
        _started(subject, subject, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(use, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .sign(key, hashes.SHA384())
    )
    return Authority(made, key)


def server_certificate(authority: Authority, hosts: Sequence[str]) -> tuple[bytes, bytes]:
    """Make certificate and key of a server that is reached under these names and addresses."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    names = x509.SubjectAlternativeName([_named(host) for host in hosts])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    made = (
        _started(subject, authority.certificate.subject, key)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, hashes.SHA384())
    )
    return made.public_bytes(_PEM), private_bytes(key)


def _started(subject: x509.Name, issuer: x509.Name, key: Any) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Write a private key of a server."""
    return key.private_bytes(_PEM, serialization.PrivateFormat.TraditionalOpenSSL, _PLAIN)


def node_key() -> tuple[bytes, bytes]:
    """Make the key pair of a node, as `ssh-keygen -t ecdsa -b 384` does."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _PLAIN)
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return private, key.public_key().public_bytes(*form) + b"\n"


def pem_of(public: Path) -> str:
    """Read a public key of ssh's form as PEM, which is how Flower compares keys."""
    try:
        key = serialization.load_ssh_public_key(read_bytes(public, "key_bytes"))
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{public} is no public key: `ssh-keygen -t ecdsa -b 384` makes one ({error})"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{public} is no elliptic curve key: use `ssh-keygen -t ecdsa -b 384`")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(_PEM, form).decode()


def expiry(certificate: Path) -> datetime.datetime:
    """Tell until when a certificate is valid."""
    try:
        found = x509.load_pem_x509_certificate(read_bytes(certificate, "key_bytes"))
        return found.not_valid_after_utc
    except (OSError, ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise ConfigError(f"{certificate} is no certificate ({error})") from error


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read."""
    disk.make_directory(path.parent, disk.SECRET_FOLDER)
    disk.write_atomically(path, [data], disk.SECRET)
