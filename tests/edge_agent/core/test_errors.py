from __future__ import annotations

import errno
import ssl
import subprocess
import sys

import pytest

from edge_agent.core.errors import (
    BrokerAway,
    ConfigError,
    HeadwaterError,
    MissingCapability,
    UnknownName,
    cause,
    nearest,
    raiser_of,
    remedy,
    without_home,
)
from edge_agent.core.installation import install_command

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
# As systemd does to all processes of a service that stops.


def test_a_configuration_error_lists_each_mistake_on_a_line_of_its_own():
    assert str(ConfigError("a.toml", ["x is missing", "y = 3: too large"])) == (
        "a.toml: 2 mistakes\n  - x is missing\n  - y = 3: too large"
    )
    assert str(ConfigError("a.toml", iter(["x is missing"]))) == "a.toml: 1 mistake\n  - x is missing"


def test_an_unknown_name_carries_what_a_program_may_want_to_know():
    error = UnknownName("head", "svn", ["svm", "lr"])
    assert (error.kind, error.name, error.known, error.nearest) == ("head", "svn", ("lr", "svm"), "svm")
    assert str(error) == "unknown head 'svn': did you mean 'svm'? known: lr, svm"
    assert str(UnknownName("head", "zzz", [])) == "unknown head 'zzz': known: none"


@pytest.mark.parametrize(
    "name, close", [("fedpre", "fedper"), ("FEDPER", None), ("fedper", "fedper"), ("qqq", None), ("", None)]
)
def test_only_a_name_that_is_close_is_suggested(name, close):
    assert nearest(name, ["fedavg", "fedper", "repper"]) == close


def test_a_missing_package_is_told_with_the_extra_that_brings_it():
    error = MissingCapability.package("torch", "train", "tier 'train'")
    what = "tier 'train' needs 'torch', which is not installed"
    assert str(error) == f"{what}; {install_command('train')}"
    assert error.public_message == f"{what}; install the extra 'train' there", "without a path of this machine"
    assert error.exit_code == 5


def test_one_except_catches_them_all():
    for error in (ConfigError("a", []), UnknownName("a", "b", []), BrokerAway("x")):
        with pytest.raises(HeadwaterError):
            raise error


@pytest.mark.parametrize(
    "code, words",
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "chmod"), (errno.EROFS, "that can be written"), (errno.EIO, "")],
)
def test_what_to_do_about_a_path_depends_on_what_the_system_says(code, words):
    found = remedy(OSError(code, "x"))
    assert (words in found, bool(found)) == (True, bool(words))


def test_certificate_of_another_time_names_the_clocks():
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_message = "certificate is not yet valid"
    for code, words in ((9, "; compare the clocks"), (18, "")):
        error.verify_code = code
        assert cause(error) == f"the certificate is not trusted (certificate is not yet valid{words})"


def test_process_that_failed_is_told_without_its_command():
    for code, end in (("raise ValueError('no key')", "exit code 1: ValueError: no key"), (KILLED, "signal 15")):
        with pytest.raises(subprocess.CalledProcessError) as failed:
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert cause(failed.value) == f"its process ended with {end}"


def test_who_raised_an_error_is_told_without_its_words():
    def deepest():
        raise ValueError("whatever it says")

    def outer():
        deepest()

    with pytest.raises(ValueError, match="whatever") as caught:
        outer()
    assert raiser_of(caught.value) == (__name__, "deepest")
    assert raiser_of(ValueError("never raised")) == ("", "")


def test_words_about_a_home_directory_alone_are_no_missing_home():
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("the home directory of this module is elsewhere")
    assert without_home(caught.value) is None
