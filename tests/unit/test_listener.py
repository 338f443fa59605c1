"""Where the service listens on TCP, by whose certificate, and to which names it answers."""

import socket
import ssl
from pathlib import Path

import pytest

from freight.api.front import known_hosts
from freight.api.listener import listen_on, load_tls, peer_of
from freight.config import load_config
from freight.core.address import Address, parse_address
from freight.errors import FreightError, OperationError, UserError
from tests.certificates import made_certificate


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8400", "127.0.0.1", 8400), ("[::1]:8400", "::1", 8400), ("localhost:8400", "localhost", 8400),
        ("0.0.0.0:8400", "0.0.0.0", 8400), (":8400", "", 8400), ("[::]:0", "::", 0),
        (" GPU-box.lan:1 ", "gpu-box.lan", 1),
    ],
)  # fmt: skip
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)
    assert parse_address(str(Address(host, port))) == Address(host, port)


WRONG = [
    "8400", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536", "127.0.0.1:-1", "::1:8400", "[::1]",
    "[::1]:", "[127.0.0.1]:1", "[x]:1", "256.0.0.1:1", "1.2.3:1", "http://localhost:8400", "localhost:8400/",
    "a b:1", "-x:1",
    "localhost:8400,[::1]:8400", "\N{SNOWMAN}:1", "h:\N{ARABIC-INDIC DIGIT ONE}", "h\0:1",
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        parse_address(text)


def test_wrong_address_in_the_settings_is_named_by_its_key(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[server]\nlisten = "8400"\n')
    with pytest.raises(UserError, match=r"config\.toml: server\.listen is '8400': expected HOST:PORT"):
        load_config({}, {}, {"FREIGHT_CONFIG": str(file)})


@pytest.mark.parametrize("text", ["127.0.0.1:0", "localhost:0", "0.0.0.0:0", ":0"])
def test_address_is_listened_on(text: str) -> None:
    listeners = listen_on(parse_address(text), "--listen")
    try:
        [port] = {listener.getsockname()[1] for listener in listeners}
        with socket.create_connection(("127.0.0.1", port)):
            pass
    finally:
        for listener in listeners:
            listener.close()


def test_address_that_is_taken_is_named_with_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OperationError, match=rf"server\.listen is localhost:{port}: .*in use"):
            listen_on(Address("localhost", port), "server.listen")


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_address_of_another_machine_is_named_with_its_setting(host: str) -> None:
    with pytest.raises(FreightError, match=rf"--listen is {host}:8400") as caught:
        listen_on(Address(host, 8400), "--listen")
    assert caught.value.hint


def test_certificate_and_key_are_taken_from_two_files_or_one(tmp_path: Path) -> None:
    cert, key = made_certificate(tmp_path, "own")
    both = tmp_path / "both.pem"
    both.write_text(Path(cert).read_text() + Path(key).read_text())

    assert isinstance(load_tls(cert, key), ssl.SSLContext)
    assert isinstance(load_tls(str(both), ""), ssl.SSLContext)
    assert load_tls("", "") is None


def test_certificate_and_key_of_no_use_are_named_by_their_setting(tmp_path: Path) -> None:
    cert, key = made_certificate(tmp_path, "own")
    _, other = made_certificate(tmp_path, "other")
    locked = made_certificate(tmp_path, "locked", "-passout", "pass:secret")
    junk = tmp_path / "junk"
    junk.write_text("junk")
    cut = tmp_path / "cut"
    cut.write_text(Path(key).read_text()[:90])

    for words, pair in {
        r"server\.tls_key is set, and server\.tls_cert is not": ("", key),
        r"server\.tls_cert is .*missing: cannot read it: No such file": (str(tmp_path / "missing"), key),
        r"server\.tls_key is .*missing: cannot read it: No such file": (cert, str(tmp_path / "missing")),
        rf"server\.tls_cert is {tmp_path}: cannot read it": (str(tmp_path), key),
        r"other\.key \(server\.tls_key\) is not that of the certificate in .*own\.pem": (cert, other),
        r"server\.tls_cert is .*junk: it holds no certificate": (str(junk), key),
        r"server\.tls_key is .*junk: there is no usable key": (cert, str(junk)),
        r"server\.tls_key is .*cut: there is no usable key": (cert, str(cut)),
        r"server\.tls_key is not set: there is no usable key": (cert, ""),
        r"server\.tls_key is locked with a password": locked,
    }.items():
        with pytest.raises(UserError, match=words) as caught:
            load_tls(*pair)
        assert caught.value.hint
        assert "None" not in caught.value.message


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"), ("fe80::1%eth0", "fe80::/64"),
    ],
)  # fmt: skip
def test_peers(host: str, peer: str) -> None:
    assert peer_of(host) == peer


def test_names_that_the_service_answers_to() -> None:
    assert known_hosts(Address("box.lan", 1), (), "box") == {"box.lan", "localhost"}
    assert known_hosts(Address("::1", 1), (), "box") == {"[::1]", "localhost"}
    assert known_hosts(Address("", 1), (), "Box") == {"box", "localhost"}
    assert known_hosts(Address("", 1), ("Freight.Example.org",), "box") == {"freight.example.org"}
