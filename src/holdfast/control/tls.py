"""Mutual TLS for control connections: both ends show a certificate of the job's own authority."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc

from holdfast.config.job import Tls
from holdfast.control.certificates import ANY_HOST, nodes_named
from holdfast.errors import ConfigError, installing

__all__ = ["channel_credentials", "Caller", "check_node", "check_tls", "nodes_of", "server_credentials"]

_FIRST = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
"""Of a chain, the certificate of whoever shows it."""


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """What a server presents; callers without a certificate of the same authority are refused."""
    ca, cert, key = (_read(name, path) for name, path in _files(tls))
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)


class Caller(NamedTuple):
    """What a caller presents and by whom the server must be certified; and for which name, as options of a channel."""

    credentials: grpc.ChannelCredentials
    options: tuple[tuple[str, str], ...]


def channel_credentials(tls: Tls) -> Caller:
    """What whoever calls a coordinator presents and demands."""
    ca, cert, key = (_read(name, path) for name, path in _files(tls))
    credentials = grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
    return Caller(credentials, (("grpc.ssl_target_name_override", ANY_HOST),) if _is_for_any_host(cert) else ())


def _is_for_any_host(cert: bytes) -> bool:
    """Whether all processes of a job show this certificate, on whichever hosts: callers do not look for the host's."""
    found = _FIRST.search(cert)
    with contextlib.suppress(ValueError):  # whoever uses it finds out, and says so
        return found is not None and ANY_HOST.encode() in ssl.PEM_cert_to_DER_cert(found[0].decode("ascii"))
    return False


def check_tls(tls: Tls, host: str) -> None:
    """Shakes hands with itself, in memory, so that what is wrong is told before any process is started.

    Raises:
        ConfigError: a file cannot be read or used, the certificate is not one that the other end will accept, or links
            between workers cannot be sealed here.
    """
    _check_sealing()
    for name, path in _files(tls):
        _read(name, path)
    server, client = _context(tls, ssl.PROTOCOL_TLS_SERVER), _context(tls, ssl.PROTOCOL_TLS_CLIENT)
    name = ANY_HOST if _is_for_any_host(_read("cert", tls.cert)) else host
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=name),
    )
    try:
        for _ in range(4):  # more turns than a handshake has
            for end in ends:
                _advance(end)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or error
        raise ConfigError(
            f"control.tls.cert: {tls.cert} is not accepted for {host}: {reason}; holdfast certs makes one that is"
        ) from None


def _advance(end: ssl.SSLObject) -> None:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return


def check_node(tls: Tls, node: str) -> None:
    """Looks whether a certificate, if it speaks for some nodes alone, does so for this one.

    Raises:
        ConfigError: it does not.
    """
    from cryptography import x509

    try:
        cert = x509.load_pem_x509_certificate(_read("cert", tls.cert))
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return  # it is not one that holdfast certs has made
    nodes = nodes_named(names.get_values_for_type(x509.UniformResourceIdentifier))
    if nodes and node not in nodes:
        raise ConfigError(
            f"control.tls.cert: {tls.cert} speaks for node {', '.join(sorted(nodes))} alone, and this is {node}: "
            "expected its own (control.tls, --certs), or the other name (HOLDFAST_NODE, --node)"
        )


def nodes_of(shown: Mapping[str, Sequence[bytes]]) -> frozenset[str]:
    """Returns for which nodes alone a caller may speak, by what gRPC knows of the certificate shown; none: for any."""
    return nodes_named(name.decode("utf-8", "replace") for name in shown.get("x509_subject_alternative_name", ()))


def _check_sealing() -> None:
    """Looks for what seals links between workers: not all that holds a certificate is made by ``holdfast certs``."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ConfigError(f"control.tls: needs the package cryptography; {installing('tls')}") from None
    if not hasattr(AESGCM, "encrypt_into"):
        raise ConfigError(f"control.tls: needs the package cryptography, 47 or newer; {installing('tls')}")


def _context(tls: Tls, side: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(tls.ca)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"control.tls.ca: {tls.ca} holds no certificate in PEM form") from None
    try:
        context.load_cert_chain(tls.cert, tls.key, password="")
    except (ssl.SSLError, OSError) as error:
        mismatch = isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
        why = "is not the key of" if mismatch else "cannot be used with"
        raise ConfigError(f"control.tls.key: {tls.key} {why} the certificate {tls.cert}; both must be PEM") from None
    return context


def _files(tls: Tls) -> list[tuple[str, str]]:
    return [("ca", tls.ca), ("cert", tls.cert), ("key", tls.key)]


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"control.tls.{name}: {path}: {error.strerror or error}") from None
