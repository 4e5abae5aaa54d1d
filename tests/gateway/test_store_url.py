"""Every form of the store's URL is read as the operator means it, and shown without what is secret."""

from __future__ import annotations

import pytest
from redis.asyncio.connection import SSLConnection

from gateway.queue.primary import ToPrimary, ToPrimaryTls
from gateway.queue.redis_client import connect
from gateway.queue.store_url import StoreUrl, StoreUrlError, parse_store_url, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://:pw@h:6379/0", StoreUrl("redis://:pw@h:6379/0")),
        ("redis://", StoreUrl("redis://")),
        ("unix:///tmp/s?db=1", StoreUrl("unix:///tmp/s?db=1")),
        (
            "redis+sentinel://u:p%40:@a,b:1,[::1]:26380/my%20service/2",
            StoreUrl("redis://u:p%40:@primary/2", (("a", 26379), ("b", 1), ("::1", 26380)), "my service"),
        ),
        (
            "rediss+sentinel://a/s?sentinel_password=x%26y&ssl_ca_certs=/ca",
            StoreUrl("rediss://primary/?ssl_ca_certs=%2Fca", (("a", 26379),), "s", None, "x&y"),
        ),
        ("redis+cluster://a,[fe80::1]", StoreUrl("redis://primary/", (("a", 6379), ("fe80::1", 6379)))),
        ("rediss+cluster://:p@a:7000/", StoreUrl("rediss://:p@primary/", (("a", 7000),))),
    ],
)
def test_a_store_s_url_is_read(text: str, expected: StoreUrl) -> None:
    assert parse_store_url(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("h:6379", "one of redis://"),
        ("http://u:hunter2@h", "'http://h': expected one of redis://"),
        ("redis://:hunter2@h:x/0", "'redis://h:x/0': expected HOST or HOST:PORT"),
        ("redis+cluster://:hunter2@", "expected HOST or HOST:PORT"),
        ("redis+cluster://a:70000", "expected HOST or HOST:PORT"),
        ("redis+cluster://a,,b", "expected HOST or HOST:PORT"),
        ("redis+cluster://a/1", "no path, since a cluster has only database 0"),
        ("redis+sentinel://a,b", "the primary's name after the hosts"),
        ("redis+sentinel://a/s/x?sentinel_password=hunter2", "a database number"),
        ("redis://h/production", "the number of a database"),
        ("redis://h/0/1", "the number of a database"),
        ("redis://h/-1", "the number of a database"),
        ("redis://:hunter2@h,i/0", "with one host"),
        ("redis://u:a/hunter2@h:6379/0", "percent-encoded"),
        ("redis://u:6379/hunter2@h:6379/0", "percent-encoded"),
        ("redis://u:hunter2?x@h:6379/0", "percent-encoded"),
        ("redis://u:hunter2#x@h:6379/0", "percent-encoded"),
        ("redis+sentinel://a,b?sentinel_password=x@hunter2", "the primary's name after the hosts"),
    ],
)
def test_what_names_no_store_is_refused_without_its_secrets(text: str, told: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        parse_store_url(text)

    assert told in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:pw@h:6379/0", "redis://h:6379/0"),
        ("rediss://u:pw@h/1?x=y", "rediss://h/1"),
        ("redis+sentinel://u:pw@[::1],b/s?sentinel_password=x", "redis+sentinel://[::1],b/s"),
        ("unix:///s", "unix:///s"),
    ],
)
def test_a_url_is_shown_with_where_but_not_with_the_password(url: str, expected: str) -> None:
    assert shown(url) == expected
    assert "pw" not in repr(parse_store_url(url))


@pytest.mark.parametrize(
    "url",
    [
        "redis://h?db=x",
        "redis://h/0?hunter2=1",
        "redis://h?socket_connect_timeout=hunter2",
        "redis+sentinel://h/s?hunter2=1",
        "rediss://h?ssl_cert_reqs=hunter2",
        "rediss+cluster://h?ssl_cert_reqs=hunter2",
        "redis://h?health_check_interval=hunter2",
        "redis://h?retry=5",
        "redis://h?max_connections=-1",
    ],
)
def test_options_that_the_client_does_not_take_are_told_without_them(url: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        connect(url)

    assert "options after the ?" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "option", ["decode_responses", "protocol", "socket_timeout", "retry_on_timeout", "redis_connect_func"]
)
@pytest.mark.parametrize("store", ["redis://:hunter2@h/0", "redis+sentinel://h/s"])
def test_an_option_that_changes_how_the_queue_reads_answers_is_refused(store: str, option: str) -> None:
    with pytest.raises(
        StoreUrlError, match=f"{option} after the \\? is for the queue itself to say; leave it out"
    ) as caught:
        connect(f"{store}?{option}=3")

    assert "hunter2" not in str(caught.value)


def test_credentials_and_tls_reach_the_nodes_that_are_asked_and_the_primary() -> None:
    of_a_cluster = connect("rediss+cluster://u:p@a?ssl_cert_reqs=none").connection_pool
    of_sentinels = connect("redis+sentinel://u:p@a/s/3?sentinel_username=v&sentinel_password=q").connection_pool

    asking_nodes, asking_sentinels = (
        pool.connection_kwargs["primary"]._options for pool in (of_a_cluster, of_sentinels)
    )
    assert (of_a_cluster.connection_class, of_sentinels.connection_class) == (ToPrimaryTls, ToPrimary)
    assert of_a_cluster.connection_kwargs["primary"]._kind is SSLConnection
    assert (asking_nodes["username"], asking_nodes["password"], asking_nodes["ssl_cert_reqs"]) == ("u", "p", "none")
    assert (asking_sentinels["username"], asking_sentinels["password"]) == ("v", "q")
    assert (of_sentinels.connection_kwargs["password"], of_sentinels.connection_kwargs["db"]) == ("p", 3)
