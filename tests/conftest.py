"""Fixtures that tests of several wings share."""

import gc
import multiprocessing
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.s3 import s3_bucket, s3_proxy, s3_server

__all__ = ["s3_bucket", "s3_proxy", "s3_server"]

# What processes of a fork server need is loaded once, in that server; those that are spawned load all of it themselves.
multiprocessing.set_forkserver_preload(["torch", "tests.compiler.killed"])


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """In this process a sync checks its descriptor and waits for nothing: no test cuts the power, and thousands of syncs take a minute of a disk.

    Tests of what is synced, and when, put their own function in this one's place; processes that tests start sync in earnest.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: os.fstat(fd) and None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_looking_at_what_stays() -> None:
    """Modules of torch and of the S3 server are a million objects; a test that collects garbage is to look at its own."""
    gc.collect()
    gc.freeze()


# no test of ours depends on the speed of a machine
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
