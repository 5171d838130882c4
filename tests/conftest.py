"""Fixtures that tests of several wings share."""

from tests.s3 import s3_bucket, s3_proxy, s3_server

__all__ = ["s3_bucket", "s3_proxy", "s3_server"]
