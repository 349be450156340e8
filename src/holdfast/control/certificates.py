"""Makes what mutual TLS needs: an authority of a job's own, and a certificate of all its processes, or of each node."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError, installing

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = ["ANY_HOST", "make_certificates", "make_node_certificates", "nodes_named"]

ANY_HOST = "any-host.holdfast.internal"
"""Who has a certificate that is made out to this name may be called on any host."""

_NODE = "holdfast:node:"
"""What the name of a node begins with in the certificate of who may speak for it alone: a URI."""
_SKEW = datetime.timedelta(minutes=5)
_DNS_NAME = re.compile(r"(\*\.)?[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?", re.ASCII | re.IGNORECASE)


def make_certificates(folder: Path, hosts: tuple[str, ...], *, days: float = 365.0) -> tuple[Path, Path, Path]:
    """Writes ``ca.pem``, ``cert.pem`` and ``key.pem``; the authority's own key is not kept, so it signs nothing else.

    Args:
        folder: a new or empty folder; it becomes readable for its owner only, as the files are.
        hosts: names or IP addresses that its processes are reached by; :data:`ANY_HOST`: by any.
        days: how long they are valid.

    Returns:
        The paths of ``ca.pem``, ``cert.pem`` and ``key.pem``.

    Raises:
        ConfigError: the folder is not empty or cannot be written, a host is no name, or the package ``cryptography`` is
            not installed.
    """
    (parts,) = _made([(hosts, None)], days)
    _claim(folder)
    return _write(folder, parts)


def make_node_certificates(
    folder: Path, hosts: tuple[str, ...], nodes: Sequence[str], *, days: float = 365.0
) -> tuple[Path, ...]:
    """Writes what each node shows into a folder of its own within ``folder``: nobody speaks for another node by it.

    Args:
        folder: see make_certificates.
        hosts: see make_certificates; of all nodes.
        nodes: their names, as agents go by them.
        days: see make_certificates.

    Returns:
        The folders, in the order of ``nodes``.

    Raises:
        ConfigError: see make_certificates; or a name is given twice, or can be none of a folder.
    """
    for node in nodes:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", node, re.ASCII) or nodes.count(node) > 1:
            raise ConfigError(
                f"--nodes: {node!r}: expected names of nodes, each once, of letters, digits, '.', '_' and '-'"
            )
    made = _made([(hosts, node) for node in nodes], days)
    _claim(folder)
    for node, parts in zip(nodes, made, strict=True):
        _claim(folder / node)
        _write(folder / node, parts)
    return tuple(folder / node for node in nodes)


def nodes_named(names: Iterable[str]) -> frozenset[str]:
    """Returns for which nodes alone whoever has a certificate with these names may speak; none: for any."""
    return frozenset(name.removeprefix(_NODE) for name in names if name.startswith(_NODE))


_Parts = tuple[tuple[str, bytes], ...]


def _made(certified: Sequence[tuple[tuple[str, ...], str | None]], days: float) -> list[_Parts]:
    """Returns the files of all who are certified by one authority: hosts, and a node if it speaks for that alone."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(f"holdfast certs: needs the package cryptography; {installing('tls')}") from None
    authority = ec.generate_private_key(ec.SECP256R1())
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    root = _certificate("holdfast authority", authority, "holdfast authority", authority, until)
    pem = serialization.Encoding.PEM
    found: list[_Parts] = []
    for hosts, node in certified:
        key = ec.generate_private_key(ec.SECP256R1())
        cert = _certificate("holdfast", key, "holdfast authority", authority, until, hosts, node)
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        found.append((("ca.pem", root.public_bytes(pem)), ("cert.pem", cert.public_bytes(pem)), ("key.pem", private)))
    return found


def _certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: EllipticCurvePrivateKey,
    until: datetime.datetime,
    hosts: tuple[str, ...] | None = None,
    node: str | None = None,
) -> x509.Certificate:
    """One certificate: of the authority itself if ``hosts`` is None, else of who is reached by them."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    start = min(datetime.datetime.now(datetime.UTC), until) - _SKEW
    builder = x509.CertificateBuilder(
        named(issuer), named(name), key.public_key(), x509.random_serial_number(), start, until
    )
    constraints = x509.BasicConstraints(ca=hosts is None, path_length=0 if hosts is None else None)
    builder = builder.add_extension(constraints, critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = builder.add_extension(above, critical=False)
    builder = builder.add_extension(_usage(is_authority=hosts is None), critical=True)
    if hosts is not None:
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(both, critical=False)
        names = list(map(_name, hosts))
        if node is not None:
            names.append(x509.UniformResourceIdentifier(_NODE + node))
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _DNS_NAME.fullmatch(host):
            raise ConfigError(
                f"--host: expected an IP address, or a name such as node-1.example (xn--... if not ASCII), got {host!r}"
            ) from None
        return x509.DNSName(host)


def _claim(folder: Path) -> None:
    """Makes a folder that only we may enter, or of an empty one such a folder; others stay as they are."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--out {folder}: is not empty; choose a new folder, nothing was changed")
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written: {error.strerror}") from None


def _write(folder: Path, parts: _Parts) -> tuple[Path, Path, Path]:
    """Writes files that only we may read, into a folder of their own; overwrites nothing."""
    try:
        for name, data in parts:
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "wb") as stream:
                stream.write(data)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written: {error.strerror}") from None
    ca, cert, key = (folder / name for name, _ in parts)
    return ca, cert, key
