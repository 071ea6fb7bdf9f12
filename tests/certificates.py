"""Certificates for tests, by the program openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

NAMES = "DNS:localhost,IP:127.0.0.1"


def self_signed(folder: Path, name: str = "generator") -> tuple[str, str]:
    """Paths of a certificate for loopback and its key."""
    return _make(folder, name, "-x509", "-addext", f"subjectAltName={NAMES}")


def signed_by(folder: Path, authority: tuple[str, str], name: str) -> tuple[str, str]:
    """Paths of a certificate for loopback that an authority signed, and its key."""
    request, key = _make(folder, name)
    cert, names = folder / f"{name}-signed.pem", folder / f"{name}.ext"
    names.write_text(f"subjectAltName={NAMES}")
    by = ["-CA", authority[0], "-CAkey", authority[1], "-CAcreateserial", "-extfile", str(names)]
    openssl("x509", "-req", "-in", request, "-out", str(cert), "-days", "2", *by)
    return str(cert), key


def openssl(*words: str) -> None:
    """Run the program; it must succeed."""
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


def _make(folder: Path, name: str, *words: str) -> tuple[str, str]:
    cert, key = folder / f"{name}-cert.pem", folder / f"{name}-key.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(cert), *words)
    key.chmod(0o600)
    return str(cert), str(key)
