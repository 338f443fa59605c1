"""Who may get webhooks, at which addresses."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core.receivers import Server, allowed, is_public, named, receiver, server_of

PRIVATE = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "240.0.0.1", "198.18.0.1",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::10.0.0.1", "64:ff9b:1::8.8.8.8",
    "2002:7f00:1::", "2002:a00:1::1", "2001:0:7f00:1::", "4000::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "64:ff9b::8.8.8.8"]


def ways(url: str, *entries: str) -> int:
    return len(named(server_of(url), [receiver(entry) for entry in entries]))


def test_a_host_is_allowed_over_https_at_its_port_alone() -> None:
    assert ways("https://hooks.lab/a?b=c", "hooks.lab") == 1
    assert ways("HTTPS://Hooks.Lab:443", "hooks.lab") == 1
    assert ways("https://hooks.lab:8443/", "hooks.lab:8443") == ways("https://hooks.lab/", "https://HOOKS.lab") == 1
    for other in ("https://hooks.lab:8443/", "http://hooks.lab/", "https://x.hooks.lab/", "https://hooks.lab./"):
        assert ways(other, "hooks.lab") == 0


def test_plain_http_is_for_entries_that_say_so() -> None:
    assert ways("http://hooks.lab:9000/", "http://hooks.lab:9000") == 1
    assert ways("https://hooks.lab:9000/", "http://hooks.lab:9000") == 0
    assert ways("http://hooks.lab:9001/", "http://hooks.lab:9000") == 0


@pytest.mark.parametrize(
    "url",
    [
        "", "hooks.lab", "//hooks.lab/", "ftp://hooks.lab/", "https:///x", "https://", "https://hooks.lab#x",
        "https://hooks.lab/#x", "https://user@hooks.lab/", "https://hooks.lab@evil.example/", "https://hooks.lab:0/",
        "https://hooks.lab:65536/", "https://hooks.lab:/", "https://hooks.lab\\@evil.example/", "https://hooks.lab /",
        "https://hooks.lab/a b", "https://hooks.lab/\n", " https://hooks.lab/", "https://höoks.lab/", "https://%68/",
        "https://hooks.lab/é", "https://[::1%25lo]/", "https://[::g]/", "https://[1.2.3.4]/", "https://hooks.lab\n",
        "https://hooks.lab/" + "a" * 2048, "https:/hooks.lab/", "https://127.1/", "https://2130706433/",
        "https://0x7f000001/", "https://0x7f.1/", "https://0177.0.0.1/", "https://1.2.3.4.5/", "https://hooks.1/",
        "https://hooks.lab,evil.example/",
    ],
)  # fmt: skip
def test_what_two_readers_may_take_for_two_servers_is_no_url(url: str) -> None:
    with pytest.raises(ValueError):
        server_of(url)


def test_addresses_are_known_in_any_spelling() -> None:
    assert server_of("https://[0:0::1]/") == Server("https", "::1", 443)
    assert ways("https://[0:0:0:0:0:0:0:1]:8443/", "https://[::1]:8443") == 1


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "*",
        "hooks.lab/path",
        "hooks.lab=",
        "hooks.lab=x",
        "hooks.lab=10.0.0.1/8",
        "a b",
        "h:0",
        "ftp://h",
        "127.1",
        "0x7f.1",
    ],
)
def test_an_entry_that_means_nothing_is_refused(entry: str) -> None:
    with pytest.raises(ValueError):
        receiver(entry)


@pytest.mark.parametrize("address", PRIVATE)
def test_what_is_not_on_the_internet_is_not_reached_by_a_name(address: str) -> None:
    assert not is_public(ip_address(address))
    assert allowed(["8.8.8.8", address], [receiver("hooks.lab")]) == ["8.8.8.8"]


@pytest.mark.parametrize("address", PUBLIC)
def test_what_is_on_the_internet_is_reached_by_a_name(address: str) -> None:
    assert allowed([address], [receiver("hooks.lab")]) == [address]


def test_a_host_that_is_listed_with_its_address_is_reached_there_alone() -> None:
    found = ["10.0.0.7", "10.0.0.8", "8.8.8.8", "fd00::7", "127.0.0.1"]

    assert allowed(found, [receiver("hooks.lab=10.0.0.7")]) == ["10.0.0.7"]
    assert allowed(found, [receiver("http://hooks.lab:9000=10.0.0.0/24")]) == ["10.0.0.7", "10.0.0.8"]
    assert allowed(found, [receiver("hooks.lab=10.0.0.7"), receiver("hooks.lab=fd00::/8")]) == ["10.0.0.7", "fd00::7"]
    assert allowed(found, [receiver("http://127.0.0.1:9000")]) == ["127.0.0.1"]
    assert allowed(["::1"], [receiver("https://[::1]")]) == ["::1"]
    assert allowed(found, []) == []


@given(st.ip_addresses())
def test_an_address_that_is_public_is_global_in_the_registries_too(address: object) -> None:
    found = ip_address(str(address))
    if is_public(found):
        assert not (found.is_private or found.is_loopback or found.is_link_local or found.is_multicast)
