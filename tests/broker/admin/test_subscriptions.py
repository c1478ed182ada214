"""Subscribers get the counters each second; without subscribers none are computed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlxpool.broker.admin.subscriptions import INTERVAL, LEASE, MAX_SUBSCRIBERS, Subscriptions
from mlxpool.common.protocol.frames import Header
from support import kinds
from support.fake_peers import FakePeers

ID = bytes(16)


@pytest.fixture
def peers() -> FakePeers:
    return FakePeers()


@pytest.fixture
def subscriptions(peers: FakePeers) -> Subscriptions:
    return Subscriptions(peers, lambda now: {"at": now})


def told(peers: FakePeers) -> list[tuple[int, Any]]:
    sent, peers.sent = peers.sent, []
    return [(number, message.body["at"]) for number, message in sent]


def test_nothing_is_due_while_nobody_watches(
    subscriptions: Subscriptions, peers: FakePeers
) -> None:
    assert subscriptions.next_wake() == math.inf
    subscriptions.send_due(1e9)
    assert told(peers) == []


def test_updates_come_at_once_and_then_each_second(
    subscriptions: Subscriptions, peers: FakePeers
) -> None:
    subscriptions.renew(1, ID, 10.0)
    assert told(peers) == [(1, 10.0)]
    assert subscriptions.next_wake() == 10.0 + INTERVAL
    subscriptions.send_due(10.5)
    assert told(peers) == []
    subscriptions.send_due(11.0)
    subscriptions.send_due(11.1)
    assert told(peers) == [(1, 11.0)]


def test_all_subscribers_get_the_figures_of_the_same_moment(
    subscriptions: Subscriptions, peers: FakePeers
) -> None:
    subscriptions.renew(1, ID, 10.0)
    subscriptions.renew(2, ID, 10.5)
    assert told(peers) == [(1, 10.0), (2, 10.5)]
    subscriptions.send_due(11.0)
    assert told(peers) == [(1, 11.0), (2, 11.0)]


def test_a_first_update_is_not_followed_at_once_by_that_of_all(
    subscriptions: Subscriptions, peers: FakePeers
) -> None:
    subscriptions.renew(1, ID, 10.0)
    subscriptions.renew(2, ID, 10.75)
    subscriptions.renew(3, ID, 11.0)
    subscriptions.send_due(11.0)
    assert told(peers) == [(1, 10.0), (2, 10.75), (3, 11.0), (1, 11.0)]
    subscriptions.send_due(12.0)
    assert told(peers) == [(1, 12.0), (2, 12.0), (3, 12.0)]


def test_a_repeated_watch_prolongs_the_subscription_without_an_update(
    subscriptions: Subscriptions, peers: FakePeers
) -> None:
    subscriptions.renew(1, ID, 10.0)
    subscriptions.renew(1, b"x" * 16, 12.0)
    told(peers)
    subscriptions.send_due(10.0 + LEASE)
    assert peers.sent[0][1].header == Header(kinds.WATCH, b"x" * 16)
    subscriptions.send_due(12.0 + LEASE)
    assert peers.forgotten == [1]
    assert len(subscriptions) == 0 and subscriptions.next_wake() == math.inf


def test_a_subscriber_that_does_not_ask_again_is_forgotten(
    subscriptions: Subscriptions, peers: FakePeers
) -> None:
    subscriptions.renew(1, ID, 10.0)
    told(peers)
    subscriptions.send_due(10.0 + LEASE)
    assert (told(peers), peers.forgotten) == ([], [1])


def test_a_subscriber_with_a_backlog_gets_no_update(
    subscriptions: Subscriptions, peers: FakePeers
) -> None:
    subscriptions.renew(1, ID, 10.0)
    subscriptions.renew(2, ID, 10.0)
    told(peers)
    peers.full.add(1, 100)
    subscriptions.send_due(11.0)
    assert told(peers) == [(2, 11.0)]


def test_a_subscriber_whose_connection_is_gone_is_forgotten(
    subscriptions: Subscriptions, peers: FakePeers
) -> None:
    subscriptions.renew(1, ID, 10.0)
    peers.dead.add(1)
    subscriptions.send_due(11.0)
    assert 1 not in subscriptions
    subscriptions.send_due(12.0)
    assert subscriptions.next_wake() == math.inf


def test_the_number_of_subscribers_is_bounded(subscriptions: Subscriptions) -> None:
    for number in range(MAX_SUBSCRIBERS):
        assert subscriptions.accepts(number)
        subscriptions.renew(number, ID, 10.0)
    assert not subscriptions.accepts(MAX_SUBSCRIBERS)
    assert subscriptions.accepts(0)
