"""Certificates that tests make for themselves."""

import subprocess
from pathlib import Path


def made_certificate(folder: Path, name: str, *options: str) -> tuple[str, str]:
    """Make a certificate for localhost; return its file and that of its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-out", cert, "-keyout", key, *(options or ("-nodes",)),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)
