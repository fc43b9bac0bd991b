"""What ``[blobs]`` of a coordinator's configuration allows, and what its mistakes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.blobs.object_store import ServedFolder
from coordinator.blobs.opening import check_blobs, open_blob_urls, store_of
from coordinator.config import load_config
from edge_agent.core.errors import ConfigError, UsageError

TASK = '[task]\nclass_names = ["a", "b"]\n'
IDENTITY = '[identity]\nhost = "fl.example.org"\n'


def config_of(folder, blobs, more=""):
    path = folder / "coordinator.toml"
    path.write_text(f"{TASK}{more}[blobs]\n{blobs}\n")
    return load_config(path)


@pytest.mark.parametrize(
    "blobs, mistake",
    [
        ("", "needs either serve"),
        ('serve = "127.0.0.1:1"\nstore = "s3://a/b"', "needs either serve"),
        ('serve = "127.0.0.1:99999"', "ports end at 65535"),
        ('serve = "127.0.0.1"', "serve"),
        ('serve = "0.0.0.0:8444"', "has no TLS"),
        ('serve = "0.0.0.0:8444"\ninsecure = true', "give blobs.url"),
        ('serve = "127.0.0.1:1"\nkey = "key.pem"', "key needs cert"),
        ('store = "/srv/www"', "give url"),
        ('store = "www"\nurl = "http://h/x"', "absolute path"),
        ('serve = "127.0.0.1:1"\nurl = "ftp://h"', "url"),
        ('serve = "127.0.0.1:1"\nurl = "http://user@h"', "url"),
        ('serve = "127.0.0.1:1"\nabove = 5', "above_bytes"),
    ],
)
def test_a_mistake_is_named(tmp_path, blobs, mistake):
    with pytest.raises(ConfigError, match=mistake):
        config_of(tmp_path, blobs)


def test_all_mistakes_are_named_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"key needs cert.*give url.*absolute path"):
        config_of(tmp_path, 'store = "www"\nkey = "key.pem"')


def test_with_certificates_the_address_is_that_of_the_broker(tmp_path):
    config = config_of(tmp_path, 'serve = "0.0.0.0:8444"', IDENTITY)
    assert "https://fl.example.org:8444" in check_blobs(config)


def test_without_the_section_all_blobs_go_over_mqtt(tmp_path):
    path = tmp_path / "coordinator.toml"
    path.write_text(TASK)
    assert open_blob_urls(load_config(path), lambda: None) is None


def test_an_address_that_is_taken_is_named_at_the_start(tmp_path):
    first = open_blob_urls(config_of(tmp_path, 'serve = "127.0.0.1:0"'), lambda: None)
    taken = first.describe().where.removeprefix("http://")
    try:
        with pytest.raises(UsageError, match=rf"cannot be served on {taken} .* choose another address"):
            open_blob_urls(config_of(tmp_path, f'serve = "{taken}"'), lambda: None)
    finally:
        first.close()


def test_a_folder_is_tried_by_doctor(tmp_path):
    config = config_of(tmp_path, f'store = "{tmp_path / "www"}"\nurl = "https://static.example.org/models/"')
    store = store_of(config.blobs)
    assert isinstance(store, ServedFolder)
    assert store.url("ab") == "https://static.example.org/models/ab"
    assert check_blobs(config) == f"{tmp_path / 'www'} can be written"
    assert list((tmp_path / "www").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    config = config_of(tmp_path, f'store = "{tmp_path / "file" / "www"}"\nurl = "http://h/x"')
    with pytest.raises(UsageError, match=r"file/www' cannot be written .* go over MQTT"):
        check_blobs(config)


def test_the_settings_of_a_run_do_not_depend_on_the_way_of_its_blobs(tmp_path):
    path = Path(tmp_path) / "plain.toml"
    path.write_text(TASK)
    plain = load_config(path).digests()
    assert config_of(tmp_path, 'serve = "127.0.0.1:0"').digests() == plain
