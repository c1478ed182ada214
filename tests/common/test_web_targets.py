"""The targets of notices: forms of URLs, allowed hosts, and addresses that are not public."""

from __future__ import annotations

import ipaddress

import pytest

from mlxpool.common.web_targets import Allowed, Origin, Target, is_public, parse_origin


@pytest.mark.parametrize(
    ("url", "origin", "path"),
    [
        ("https://a.example", Origin("https", "a.example", 443), "/"),
        ("http://A.Example/x?y=1", Origin("http", "a.example", 80), "/x?y=1"),
        ("https://a.example:8443/", Origin("https", "a.example", 8443), "/"),
        ("http://127.0.0.1:8080/a%20b", Origin("http", "127.0.0.1", 8080), "/a%20b"),
        ("http://[::0001]:80/", Origin("http", "::1", 80), "/"),
        ("https://[::ffff:7f00:1]/", Origin("https", "::ffff:127.0.0.1", 443), "/"),
    ],
)
def test_urls_that_are_taken(url: str, origin: Origin, path: str) -> None:
    # ipaddress writes a mapped address in one of two ways, by its version
    target = Target.parse(url)
    assert (target.origin.scheme, target.origin.port, target.path) == (
        origin.scheme,
        origin.port,
        path,
    )
    assert target.origin.address == origin.address
    assert target.origin.address is not None or target.origin.host == origin.host


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.example",
        "ftp://a.example/",
        "file:///etc/passwd",
        "https://user@a.example/",
        "https://user:word@a.example/",
        "https://allowed.example@evil.example/",
        "https://a.example\\@evil.example/",
        "https://a.example/\\evil",
        "https://a.example/#part",
        "https://a.example:0/",
        "https://a.example:65536/",
        "https://a.example:+80/",
        "https://a.example:/",
        "https:///path",
        "https://a..example/",
        "https://a.example./",
        "https://-a.example/",
        "https://ä.example/",
        "https://a.example/ x",
        "https://a.example/\tx",
        "https://a.example/x\r\nHost: evil",
        "https://a.exa\tmple/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0x7f.1/",
        "https://0177.0.0.1/",
        "https://127.1/",
        "https://127.0.0.01/",
        "https://1.2.3.4.5/",
        "https://256.0.0.1/",
        "https://a.example.0x1/",
        "https://[::1%25eth0]/",
        "https://[fe80::1%eth0]/",
        "https://[::1/",
        "https://[:::]/",
        "https://a.example/" + "x" * 2048,
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"the URL |is not|the port"):
        Target.parse(url)


def test_an_origin_has_no_path() -> None:
    assert str(parse_origin("https://A.example")) == "https://a.example:443"
    assert str(parse_origin("http://[::1]:8080")) == "http://[::1]:8080"
    for text in ("https://a.example/", "https://a.example/x", "https://a.example?x"):
        with pytest.raises(ValueError, match="the URL must be"):
            parse_origin(text)


def test_only_origins_of_the_settings_are_allowed() -> None:
    allowed = Allowed.of(["https://a.example", "http://b.example:8080"], [])
    for url in ("https://a.example/x", "https://A.EXAMPLE:443/", "http://b.example:8080"):
        assert allowed.refusal(Target.parse(url)) == ""
    for url in (
        "http://a.example/",
        "https://a.example:8443/",
        "https://b.example:8080/",
        "https://c.example/",
        "https://a.example.evil.example/",
        "https://sub.a.example/",
    ):
        assert "is not one of job_notify_hosts" in allowed.refusal(Target.parse(url))
    assert Allowed().refusal(Target.parse("https://a.example/"))


def test_a_faulty_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"'a\.example': the URL must be"):
        Allowed.of(["a.example"], [])
    with pytest.raises(ValueError, match=r"'10\.0\.0\.1/8'"):
        Allowed.of([], ["10.0.0.1/8"])


NOT_PUBLIC = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2", "fe80::1", "fec0::1", "fc00::1", "fd00:ec2::254",
    "ff02::1", "100::1", "2001:db8::1",
]  # fmt: skip


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    parsed = ipaddress.ip_address(address)
    assert not is_public(parsed)
    origin = parse_origin("https://a.example")
    assert "not public" in Allowed.of(["https://a.example"], []).address_refusal(origin, parsed)
    network = str(ipaddress.ip_network(address))
    assert not Allowed.of(["https://a.example"], [network]).address_refusal(origin, parsed)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_an_address_that_is_named_itself_is_allowed() -> None:
    named = parse_origin("http://127.0.0.1:8080")
    allowed = Allowed.of([str(named)], [])
    assert allowed.address_refusal(named, ipaddress.ip_address("127.0.0.1")) == ""
    assert allowed.address_refusal(named, ipaddress.ip_address("127.0.0.2"))
